//! Decisions that have been made, so that each is made once.

use std::any::{Any, TypeId};
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use smallvec::SmallVec;

use super::Decision;
use crate::Tensor;
use crate::tensor::DType;

/// When there are more decisions, all are forgotten: shapes that change from call to call must not fill the memory.
const LIMIT: usize = 1 << 14;

/// How often decisions were found and how often they had to be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// How often an operator had been run on such layouts before.
    pub hits: u64,
    /// How often it had not.
    pub misses: u64,
    /// How many decisions are remembered now, of at most 16,384.
    pub entries: usize,
}

/// Operators that can be told apart. Implemented for everything that can be compared, hashed and cloned.
pub trait Attributes: Debug + Send + Sync + 'static {
    /// Whether the other is of the same type and equal.
    #[doc(hidden)]
    fn same(&self, other: &dyn Any) -> bool;
    #[doc(hidden)]
    fn digest(&self, hasher: &mut FxHasher);
    #[doc(hidden)]
    fn kept(&self) -> Box<dyn Any + Send + Sync>;
}

impl<T: Clone + Debug + Eq + Hash + Send + Sync + 'static> Attributes for T {
    fn same(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<T>().is_some_and(|other| other == self)
    }

    fn digest(&self, hasher: &mut FxHasher) {
        TypeId::of::<T>().hash(hasher);
        self.hash(hasher);
    }

    fn kept(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(self.clone())
    }
}

/// An operator, and how its inputs lie.
struct Entry {
    op: Box<dyn Any + Send + Sync>,
    inputs: SmallVec<[Seen; 4]>,
    decision: Arc<Decision>,
}

/// The decisions of a mesh.
#[derive(Default)]
pub(crate) struct Decisions {
    /// By the digest of operator and inputs.
    entries: FxHashMap<u64, SmallVec<[Entry; 1]>>,
    stats: CacheStats,
    /// How often all have been forgotten because rules changed.
    epoch: u64,
}

/// What makes an input, but for its values: layout and shape, dtype, and whether it is a meta tensor. Inputs lie on the mesh
/// whose decisions these are.
type Seen = (u64, DType, bool);

fn seen(x: &Tensor) -> Seen {
    (x.layout().map_or(u64::MAX, |layout| layout.spec().id), x.dtype(), x.is_meta())
}

pub(crate) fn digest(op: &dyn Attributes, inputs: &[&Tensor]) -> u64 {
    let mut hasher = FxHasher::default();
    op.digest(&mut hasher);
    for x in inputs {
        let (id, dtype, meta) = seen(x);
        hasher.write_u64(id << 5 | (dtype as u64) << 1 | meta as u64);
    }
    hasher.finish()
}

impl Decisions {
    pub(crate) fn find(
        &mut self,
        digest: u64,
        op: &dyn Attributes,
        inputs: &[&Tensor],
    ) -> Option<Arc<Decision>> {
        let alike = |entry: &&Entry| {
            entry.inputs.len() == inputs.len()
                && entry.inputs.iter().zip(inputs).all(|(known, x)| *known == seen(x))
                && op.same(&*entry.op)
        };
        let found = self.entries.get(&digest).and_then(|entries| entries.iter().find(alike));
        match found {
            Some(_) => self.stats.hits += 1,
            None => self.stats.misses += 1,
        }
        found.map(|entry| entry.decision.clone())
    }

    pub(crate) fn keep(
        &mut self,
        digest: u64,
        op: &dyn Attributes,
        inputs: &[&Tensor],
        decision: Arc<Decision>,
    ) {
        if self.stats.entries >= LIMIT {
            self.clear();
        }
        let inputs = inputs.iter().map(|x| seen(x)).collect();
        self.entries.entry(digest).or_default().push(Entry { op: op.kept(), inputs, decision });
        self.stats.entries += 1;
    }

    fn clear(&mut self) {
        self.entries.clear();
        self.stats.entries = 0;
    }

    /// Forgets everything: decisions were made by rules that are no longer those that count.
    pub(crate) fn revise(&mut self) {
        self.clear();
        self.epoch += 1;
    }

    /// Forgets everything, and counts anew.
    pub(crate) fn restart(&mut self) {
        self.revise();
        self.stats = CacheStats::default();
    }

    /// Between two that are equal, no rule has changed.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn stats(&self) -> CacheStats {
        self.stats
    }
}
