//! What a mesh remembers: layouts, the plans between them, and decisions about operators, so that each is worked out once.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::DeviceMesh;
use crate::placement::{Layout, Spec, SpecKey};
use crate::redistribute::Plan;
use crate::sharding::{Attributes, Decision, digest};
use crate::{Result, Tensor};

/// When there are more entries, all are forgotten: shapes that change from call to call must not fill the memory.
const LIMIT: usize = 1 << 14;

#[derive(Default)]
pub(super) struct Cache {
    next: u64,
    specs: FxHashMap<SpecKey, Arc<Spec>>,
    plans: FxHashMap<(u64, u64, usize), Arc<Plan>>,
}

impl Cache {
    pub(super) fn spec(&mut self, key: SpecKey, sizes: &[usize], coordinate: Option<&[usize]>) -> Arc<Spec> {
        if self.specs.len() >= LIMIT {
            self.specs.clear();
        }
        match self.specs.entry(key) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(slot) => {
                let spec = Arc::new(Spec::new(self.next, slot.key().clone(), sizes, coordinate));
                self.next += 1;
                slot.insert(spec).clone()
            }
        }
    }

    /// Layouts that tensors have stay what they are. Numbers are not given twice.
    pub(super) fn clear(&mut self) {
        self.specs.clear();
        self.plans.clear();
    }

    pub(super) fn plan(&self, from: &Spec, to: &Spec, item: usize) -> Option<Arc<Plan>> {
        self.plans.get(&(from.id, to.id, item)).cloned()
    }

    pub(super) fn keep(&mut self, from: &Spec, to: &Spec, item: usize, plan: Arc<Plan>) {
        if self.plans.len() >= LIMIT {
            self.plans.clear();
        }
        self.plans.insert((from.id, to.id, item), plan);
    }
}

impl DeviceMesh {
    /// How an operator is run on inputs that lie on this mesh as these do: decided once.
    pub(crate) fn decision(
        &self,
        op: &dyn Attributes,
        inputs: &[&Tensor],
        decide: impl FnOnce() -> Result<Decision>,
    ) -> Result<Arc<Decision>> {
        let digest = digest(op, inputs);
        if let Some(decision) = self.0.decisions.lock().find(digest, op, inputs) {
            return Ok(decision);
        }
        self.decide(digest, op, inputs, decide)
    }

    /// Makes a decision and remembers it.
    #[cold]
    fn decide(
        &self,
        digest: u64,
        op: &dyn Attributes,
        inputs: &[&Tensor],
        decide: impl FnOnce() -> Result<Decision>,
    ) -> Result<Arc<Decision>> {
        let epoch = self.0.decisions.lock().epoch();
        let decision = Arc::new(decide()?);
        let mut known = self.0.decisions.lock();
        // Rules may have changed meanwhile, on another thread.
        if known.epoch() == epoch {
            known.keep(digest, op, inputs, decision.clone());
        }
        Ok(decision)
    }

    /// A layout on an equal mesh as one on this.
    pub(crate) fn adopt(&self, layout: &Layout) -> Layout {
        if Arc::ptr_eq(&self.0, &layout.mesh().0) {
            return layout.clone();
        }
        Layout::of(self, layout.spec().key.clone())
    }

    /// The spec of a layout on this mesh: the same one every time.
    pub(crate) fn spec(&self, key: SpecKey) -> Arc<Spec> {
        self.0.cache.lock().spec(key, &self.0.shape, self.coordinate())
    }

    /// The plan from one layout on this mesh to another, made when first asked for.
    pub(crate) fn plan(&self, from: &Arc<Spec>, to: &Arc<Spec>, item: usize) -> Arc<Plan> {
        if let Some(plan) = self.0.cache.lock().plan(from, to, item) {
            return plan;
        }
        let plan = Arc::new(Plan::new(self, from, to, item));
        self.0.cache.lock().keep(from, to, item, plan.clone());
        plan
    }
}
