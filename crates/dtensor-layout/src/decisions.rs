//! A cache of decisions.

use std::any::{Any, TypeId};
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use smallvec::SmallVec;

use dtensor_array::{DType, Device};

use crate::Decision;

/// The maximum number of cached decisions. Beyond it all are dropped, so that changing shapes do not fill the memory.
const LIMIT: usize = 1 << 14;

/// Statistics of the decision cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// How often a decision was found in the cache.
    pub hits: u64,
    /// How often a decision had to be made.
    pub misses: u64,
    /// The number of cached decisions, at most 16,384.
    pub entries: usize,
}

/// An operator and its attributes as a cache key. Implemented for every type that can be compared, hashed and cloned.
pub trait Attributes: Debug + Send + Sync + 'static {
    /// Returns true if `other` has the same type and is equal.
    #[doc(hidden)]
    fn same(&self, other: &dyn Any) -> bool;
    /// Hashes the type and the value.
    #[doc(hidden)]
    fn digest(&self, hasher: &mut FxHasher);
    /// Returns a clone for the cache.
    #[doc(hidden)]
    fn to_cached(&self) -> Box<dyn Any + Send + Sync>;
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
    fn to_cached(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(self.clone())
    }
}

/// A cached decision with its key.
#[derive(Debug)]
struct Entry {
    op: Box<dyn Any + Send + Sync>,
    inputs: SmallVec<[InputKey; 4]>,
    decision: Arc<Decision>,
}

/// The cached decisions of a mesh.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    /// By the digest of operator and inputs. The entries of one digest are compared.
    entries: FxHashMap<u64, SmallVec<[Entry; 1]>>,
    stats: CacheStats,
    /// How often the cache was invalidated.
    epoch: u64,
}

/// The properties of one input that a decision depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputKey {
    /// The id of its spec.
    pub spec: u64,
    /// Its dtype.
    pub dtype: DType,
    /// Its device. A decision describes its outputs, and they are on the device of the inputs.
    pub device: Device,
}

/// Returns a hash of an operator and its inputs.
#[inline]
pub(crate) fn digest(op: &dyn Attributes, inputs: &[InputKey]) -> u64 {
    let mut hasher = FxHasher::default();
    op.digest(&mut hasher);
    for &InputKey { spec, dtype, device } in inputs {
        let device = match device {
            Device::Meta => 0,
            Device::Cuda(ordinal) => ordinal as u64 + 2,
            _ => 1,
        };
        hasher.write_u64(spec << 10 | (dtype as u64) << 6 | device);
    }
    hasher.finish()
}

impl Decisions {
    /// Returns a cached decision, and counts the hit or miss.
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

    /// Adds a decision.
    pub(crate) fn insert(
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
        self.entries.entry(digest).or_default().push(Entry { op: op.to_cached(), inputs, decision });
        self.stats.entries += 1;
    }

    #[inline]
    fn clear(&mut self) {
        self.entries.clear();
        self.stats.entries = 0;
    }

    /// Drops all decisions, because the rules that led to them have changed.
    #[inline]
    pub(crate) fn invalidate(&mut self) {
        self.clear();
        self.epoch += 1;
    }

    /// Drops all decisions and resets the statistics.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.invalidate();
        self.stats = CacheStats::default();
    }

    /// Returns a number that changes whenever the cache is invalidated.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    #[inline]
    pub(crate) fn stats(&self) -> CacheStats {
        self.stats
    }
}
