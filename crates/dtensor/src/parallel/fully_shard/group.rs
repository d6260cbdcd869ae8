//! [`ShardGroup`]: the parameters of one module, which are gathered together.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use dtensor_array::mode;
use parking_lot::Mutex;

use crate::autograd::{Phase, RestoreScope, grad_enabled, phase, restore_from};
use crate::comm::Site;
use crate::distributed::{GatherSpec, Gathered};
use crate::nn::{Parameter, StandInGuard, StandIns, enter_stand_ins};
use crate::{Result, Tensor};

mode! {
    /// The call of the outermost fully sharded module, if one runs.
    static RUN: RefCell<Option<Arc<Run>>> = None;
}

/// A call of the outermost fully sharded module.
#[derive(Default)]
struct Run {
    /// The module that was entered last.
    last: Mutex<Option<(Arc<ShardGroup>, Arc<Gathered>)>>,
}

/// The parameters of one fully sharded module.
pub(super) struct ShardGroup {
    parameters: Vec<Parameter>,
    /// The index of each parameter, by address.
    indices: Arc<HashMap<usize, usize>>,
    spec: Arc<GatherSpec>,
    reshard: Option<bool>,
    /// The group that was entered after this one in the last run.
    next: Mutex<Weak<ShardGroup>>,
    /// The next gather, if it has begun already.
    prefetched: Mutex<Option<Arc<Gathered>>>,
    /// The line and module that last used the group.
    site: Mutex<Option<Site>>,
}

impl ShardGroup {
    pub(super) fn new(parameters: Vec<Parameter>, spec: Arc<GatherSpec>, reshard: Option<bool>) -> Self {
        let indices = parameters.iter().enumerate().map(|(i, parameter)| (parameter.address(), i)).collect();
        ShardGroup {
            parameters,
            indices: Arc::new(indices),
            spec,
            reshard,
            next: Mutex::default(),
            prefetched: Mutex::default(),
            site: Mutex::default(),
        }
    }

    /// Opens a scope in which gathered tensors stand in for the parameters.
    #[track_caller]
    pub(super) fn open(self: Arc<Self>) -> Result<Box<dyn Any>> {
        let (at, again) = (Site::caller(), phase() == Phase::Recomputation);
        *self.site.lock() = Some(at.clone());
        let leaves: Vec<Tensor> = self.parameters.iter().map(Parameter::leaf).collect();
        let prefetched = self.prefetched.lock().take().filter(|gathered| gathered.is_of(&leaves));
        let gathered = match prefetched {
            Some(gathered) => gathered,
            None => Gathered::begin(&self.spec, leaves, at)?,
        };
        let (run, outermost) = match RUN.get() {
            Some(run) => (run, false),
            None => (Arc::default(), true),
        };
        // A checkpoint that runs again does so in the order of backward.
        if !again {
            if let Some((group, before)) = run.last.lock().replace((self.clone(), gathered.clone())) {
                *group.next.lock() = Arc::downgrade(&self);
                gathered.set_previous(&before);
            }
            let next = self.next.lock().upgrade();
            if let Some(next) = next {
                next.prefetch()?;
            }
        }
        let tensors = gathered.record();
        // Values that are computed again are used at once.
        let release = self.reshard.unwrap_or(!outermost) && grad_enabled() && !again;
        if release {
            gathered.release();
        }
        let stand_ins = Arc::new(GatheredParameters { gathered: gathered.clone(), tensors });
        Ok(Box::new(ModuleScope {
            _stand_ins: enter_stand_ins(self.indices.clone(), stand_ins),
            _restore: release.then(|| restore_from(gathered.clone())),
            _run: RUN.enter(Some(run)),
            gathered,
        }))
    }

    /// Begins to gather the parameters for the next use of the group.
    fn prefetch(&self) -> Result<()> {
        let mut prefetched = self.prefetched.lock();
        let leaves: Vec<Tensor> = self.parameters.iter().map(Parameter::leaf).collect();
        let site = self.site.lock().clone();
        if let (Some(site), None) = (site, prefetched.as_ref().filter(|gathered| gathered.is_of(&leaves))) {
            *prefetched = Some(Gathered::begin(&self.spec, leaves, site)?);
        }
        Ok(())
    }
}

/// The scope of one `forward`. The gathered tensors are freed when it ends, however it ends.
struct ModuleScope {
    _stand_ins: StandInGuard,
    _restore: Option<RestoreScope>,
    _run: mode::Scope<std::cell::RefCell<Option<Arc<Run>>>>,
    gathered: Arc<Gathered>,
}

impl Drop for ModuleScope {
    fn drop(&mut self) {
        self.gathered.free();
    }
}

/// The gathered tensors of one `forward`.
struct GatheredParameters {
    gathered: Arc<Gathered>,
    /// The tensors without values, which `gathered` has while it is not freed.
    tensors: Vec<Tensor>,
}

impl StandIns for GatheredParameters {
    fn tensor(&self, index: usize) -> Tensor {
        self.gathered.with_value(index, &self.tensors[index])
    }
}
