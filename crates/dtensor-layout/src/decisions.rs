//! Decisions that have been made, so that each is made once.

use std::any::{Any, TypeId};
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use smallvec::SmallVec;

use dtensor_array::DType;

use crate::Decision;

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
    #[inline]
    fn same(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<T>().is_some_and(|other| other == self)
    }

    #[inline]
    fn digest(&self, hasher: &mut FxHasher) {
        TypeId::of::<T>().hash(hasher);
        self.hash(hasher);
    }

    #[inline]
    fn kept(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(self.clone())
    }
}

/// An operator and its inputs.
#[derive(Debug)]
struct Entry {
    op: Box<dyn Any + Send + Sync>,
    inputs: SmallVec<[InputKey; 4]>,
    decision: Arc<Decision>,
}

/// The decisions of a mesh.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    /// By the digest of operator and inputs.
    entries: FxHashMap<u64, SmallVec<[Entry; 1]>>,
    stats: CacheStats,
    /// How often all have been forgotten because rules changed.
    epoch: u64,
}

/// What a decision depends on, of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputKey {
    /// The number of its spec.
    pub spec: u64,
    /// Its dtype.
    pub dtype: DType,
    /// Whether it is a meta tensor.
    pub meta: bool,
}

#[inline]
pub(crate) fn digest(op: &dyn Attributes, inputs: &[InputKey]) -> u64 {
    let mut hasher = FxHasher::default();
    op.digest(&mut hasher);
    for &InputKey { spec, dtype, meta } in inputs {
        hasher.write_u64(spec << 5 | (dtype as u64) << 1 | meta as u64);
    }
    hasher.finish()
}

impl Decisions {
    pub(crate) fn find(
        &mut self,
        digest: u64,
        op: &dyn Attributes,
        inputs: &[InputKey],
    ) -> Option<Arc<Decision>> {
        let alike = |entry: &&Entry| entry.inputs[..] == *inputs && op.same(&*entry.op);
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
        inputs: &[InputKey],
        decision: Arc<Decision>,
    ) {
        if self.stats.entries >= LIMIT {
            self.clear();
        }
        let inputs = inputs.into();
        self.entries.entry(digest).or_default().push(Entry { op: op.kept(), inputs, decision });
        self.stats.entries += 1;
    }

    #[inline]
    fn clear(&mut self) {
        self.entries.clear();
        self.stats.entries = 0;
    }

    /// Forgets everything: decisions were made by rules that are no longer those that count.
    #[inline]
    pub(crate) fn revise(&mut self) {
        self.clear();
        self.epoch += 1;
    }

    /// Forgets everything, and counts anew.
    #[inline]
    pub(crate) fn restart(&mut self) {
        self.revise();
        self.stats = CacheStats::default();
    }

    /// Between two that are equal, no rule has changed.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    #[inline]
    pub(crate) fn stats(&self) -> CacheStats {
        self.stats
    }
}
