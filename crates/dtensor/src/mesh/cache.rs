//! What a mesh remembers: layouts and the plans between them, so that each is worked out once.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::placement::{Spec, SpecKey};
use crate::redistribute::Plan;

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
