//! [`Planner`]: specs, plans and decisions on one mesh, each worked out once.

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

/// When there are more specs or plans, all are forgotten: shapes that change from call to call must not fill the memory.
const LIMIT: usize = 1 << 14;

/// The most dims that a distributed tensor has.
const MAX_RANK: usize = 64;

/// Specs, plans and decisions on one mesh. Equal specs are one `Arc` while the planner remembers them.
#[derive(Debug)]
pub struct Planner {
    mesh: Mesh,
    specs: Mutex<Specs>,
    /// By the numbers of both specs and the bytes of an element.
    plans: Mutex<FxHashMap<(u64, u64, usize), Arc<Plan>>>,
    decisions: Mutex<Decisions>,
}

#[derive(Debug, Default)]
struct Specs {
    /// The number of the next one. Numbers are not used again.
    next: u64,
    known: FxHashMap<SpecKey, Arc<Spec>>,
}

impl Planner {
    /// Creates a planner that has planned nothing yet.
    pub fn new(mesh: Mesh) -> Self {
        Planner { mesh, specs: Mutex::default(), plans: Mutex::default(), decisions: Mutex::default() }
    }

    /// The mesh.
    #[inline]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the spec of a tensor of this shape, after checking that the placements fit mesh and shape.
    pub fn spec(
        &self,
        op: &'static str,
        placements: impl Into<Placements>,
        shape: impl Into<Shape>,
    ) -> Result<Arc<Spec>> {
        let shape = shape.into();
        shape.checked_numel(op)?;
        if shape.rank() > MAX_RANK {
            let message =
                format!("a distributed tensor has at most {MAX_RANK} dims, but the shape is {shape}");
            return Err(Error::argument(op, message));
        }
        let placements = placements.into().checked(op, self.mesh.ndim(), shape.rank())?;
        Ok(self.intern(SpecKey { placements, shape }))
    }

    /// As [`spec`](Planner::spec), of placements that have been checked.
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

    /// Returns the cheapest way from one spec of this planner to another, of the same shape.
    pub fn plan(&self, from: &Arc<Spec>, to: &Arc<Spec>, dtype: DType) -> Arc<Plan> {
        let key = (from.id, to.id, dtype.size());
        if let Some(plan) = self.plans.lock().get(&key) {
            return plan.clone();
        }
        let plan = Arc::new(Plan::new(&self.mesh, from, to, dtype.size()));
        let mut plans = self.plans.lock();
        if plans.len() >= LIMIT {
            plans.clear();
        }
        plans.insert(key, plan.clone());
        plan
    }

    /// Returns how an operator is run on inputs like these. If it is not known yet, asks for the operator's rule and chooses.
    #[inline]
    pub fn decide<E: From<Error>>(
        &self,
        op: &dyn Attributes,
        inputs: &[InputKey],
        ask: impl FnOnce() -> std::result::Result<Question, E>,
    ) -> std::result::Result<Arc<Decision>, E> {
        let digest = digest(op, inputs);
        if let Some(decision) = self.decisions.lock().find(digest, op, inputs) {
            return Ok(decision);
        }
        let epoch = self.decisions.lock().epoch();
        let decision = Arc::new(choose(self, ask()?)?);
        let mut known = self.decisions.lock();
        // Rules may have changed meanwhile, on another thread.
        if known.epoch() == epoch {
            known.keep(digest, op, inputs, decision.clone());
        }
        Ok(decision)
    }

    /// How often decisions were found and how often they had to be made.
    pub fn stats(&self) -> CacheStats {
        self.decisions.lock().stats()
    }

    /// Forgets decisions: they were made by rules that have changed.
    pub fn forget_decisions(&self) {
        self.decisions.lock().revise();
    }

    /// Forgets specs, plans and decisions, and counts anew.
    pub fn clear(&self) {
        self.decisions.lock().restart();
        self.specs.lock().known.clear();
        self.plans.lock().clear();
    }
}
