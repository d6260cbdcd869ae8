//! [`Planner`]: computes and caches specs, plans and decisions on one mesh.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use dtensor_array::{DType, Shape};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::choose::choose;
use crate::decisions::{Decisions, digest};
use crate::{
    Attributes, CacheStats, Decision, Error, InputKey, Mesh, Placements, Plan, Question, Result, Spec,
    SpecKey,
};

/// The maximum number of cached specs, and of plans. Beyond it all are dropped, so that changing shapes do not fill the memory.
const LIMIT: usize = 1 << 14;

/// The maximum number of dims of a distributed tensor.
const MAX_NDIM: usize = 64;

/// Computes specs, plans and decisions on one mesh, and caches them. Equal specs are the same `Arc` while they are cached.
#[derive(Debug)]
pub struct Planner {
    mesh: Mesh,
    specs: Mutex<Specs>,
    /// By the ids of both specs and the bytes of an element.
    plans: Mutex<FxHashMap<(u64, u64, usize), Arc<Plan>>>,
    decisions: Mutex<Decisions>,
}

#[derive(Debug, Default)]
struct Specs {
    /// The id of the next spec. Ids are never reused.
    next: u64,
    known: FxHashMap<SpecKey, Arc<Spec>>,
}

impl Planner {
    /// Creates a planner with an empty cache.
    pub fn new(mesh: Mesh) -> Self {
        Planner { mesh, specs: Mutex::default(), plans: Mutex::default(), decisions: Mutex::default() }
    }

    /// Returns the mesh.
    #[inline]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the spec of a tensor with these placements and this shape. Returns an error, which names `op`, if the placements do not
    /// fit the mesh or the shape.
    pub fn spec(
        &self,
        op: &'static str,
        placements: impl Into<Placements>,
        shape: impl Into<Shape>,
    ) -> Result<Arc<Spec>> {
        let shape = shape.into();
        shape.checked_numel(op)?;
        if shape.ndim() > MAX_NDIM {
            let message =
                format!("a distributed tensor has at most {MAX_NDIM} dims, but the shape is {shape}");
            return Err(Error::argument(op, message));
        }
        let placements = placements.into().checked(op, self.mesh.ndim(), shape.ndim())?;
        Ok(self.intern(SpecKey { placements, shape }))
    }

    /// Same as [`spec`](Planner::spec), for placements that are already checked.
    pub fn intern(&self, key: SpecKey) -> Arc<Spec> {
        let mut specs = self.specs.lock();
        let Specs { next, known } = &mut *specs;
        if known.len() >= LIMIT {
            known.clear();
        }
        match known.entry(key) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(slot) => {
                let spec = Arc::new(Spec::new(*next, slot.key().clone(), &self.mesh));
                *next += 1;
                slot.insert(spec).clone()
            }
        }
    }

    /// Returns the cheapest plan from one spec of this planner to another. Both must have the same shape.
    pub fn plan(&self, from: &Arc<Spec>, to: &Arc<Spec>, dtype: DType) -> Arc<Plan> {
        self.plan_for(from, to, dtype.size())
    }

    /// Returns the cheapest plan for a tensor that is redistributed together with others, of `bytes` bytes in total. They share
    /// collectives, so the tensors of a batch take the same path, which is the cheapest for a tensor of that size.
    ///
    /// ```
    /// use dtensor_array::{DType, ReduceOp};
    /// use dtensor_layout::{Mesh, Partial, Planner, Replicate, Shard};
    /// # fn main() -> dtensor_layout::Result<()> {
    /// let planner = Planner::new(Mesh::new([2, 2], ["replicate", "shard"])?);
    /// let sum = Partial(ReduceOp::Sum);
    /// let (from, to) = (planner.spec("example", [sum, sum], [64])?, planner.spec("example", [Replicate, Shard(0)], [64])?);
    /// assert_eq!(planner.plan(&from, &to, DType::F32).collectives(), ["all_reduce"]);
    /// let together = planner.plan_in_batch(&from, &to, DType::F32, 1 << 20);
    /// assert_eq!(together.collectives(), ["reduce_scatter", "all_reduce"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn plan_in_batch(&self, from: &Arc<Spec>, to: &Arc<Spec>, dtype: DType, bytes: usize) -> Arc<Plan> {
        // Elements of another size give the tensor the size of the batch. Few sizes, so that plans are found in the cache.
        let item = (bytes / from.key.shape.numel().max(1)).next_power_of_two();
        self.plan_for(from, to, item.max(dtype.size()))
    }

    fn plan_for(&self, from: &Arc<Spec>, to: &Arc<Spec>, item: usize) -> Arc<Plan> {
        let key = (from.id, to.id, item);
        if let Some(plan) = self.plans.lock().get(&key) {
            return plan.clone();
        }
        let plan = Arc::new(Plan::new(&self.mesh, from, to, item));
        let mut plans = self.plans.lock();
        if plans.len() >= LIMIT {
            plans.clear();
        }
        plans.insert(key, plan.clone());
        plan
    }

    /// Returns the layouts on which an operator runs, for inputs with these specs and dtypes. If the decision is not cached, calls
    /// `question` for the operator's rule and decides.
    #[inline]
    pub fn decide<E: From<Error>>(
        &self,
        op: &dyn Attributes,
        inputs: &[InputKey],
        question: impl FnOnce() -> std::result::Result<Question, E>,
    ) -> std::result::Result<Arc<Decision>, E> {
        let digest = digest(op, inputs);
        if let Some(decision) = self.decisions.lock().find(digest, op, inputs) {
            return Ok(decision);
        }
        let epoch = self.decisions.lock().epoch();
        let decision = Arc::new(choose(self, question()?)?);
        let mut decisions = self.decisions.lock();
        // If another thread has changed the rules meanwhile, the decision is outdated and is not cached.
        if decisions.epoch() == epoch {
            decisions.insert(digest, op, inputs, decision.clone());
        }
        Ok(decision)
    }

    /// Returns how often decisions were found in the cache, and how often not.
    pub fn stats(&self) -> CacheStats {
        self.decisions.lock().stats()
    }

    /// Drops all cached decisions. Call it after sharding rules have changed.
    pub fn forget_decisions(&self) {
        self.decisions.lock().invalidate();
    }

    /// Drops all cached specs, plans and decisions, and resets the statistics.
    pub fn clear(&self) {
        self.decisions.lock().reset();
        self.specs.lock().known.clear();
        self.plans.lock().clear();
    }
}
