//! Tensors that stand in for parameters while a module runs: [`Parameter::get`] returns them instead of the leaf.

use std::collections::HashMap;
use std::sync::Arc;

use dtensor_array::mode;

use super::Parameter;
use crate::Tensor;

/// Makes the tensors that stand in for some parameters.
pub(crate) trait StandIns: Send + Sync {
    /// Returns the tensor for the parameter with this index.
    fn tensor(&self, index: usize) -> Tensor;
}

/// The parameters that something stands in for on this thread: those of the innermost module, and of the modules around it.
struct Scope {
    /// The index of each parameter, by address.
    indices: Arc<HashMap<usize, usize>>,
    tensors: Arc<dyn StandIns>,
    around: Option<Arc<Scope>>,
}

mode! {
    static ANY: Cell<bool> = false;
    static INNERMOST: RefCell<Option<Arc<Scope>>> = None;
}

/// Ends a scope of [`enter_stand_ins`] when it is dropped.
pub(crate) struct StandInGuard {
    _innermost: mode::Scope<std::cell::RefCell<Option<Arc<Scope>>>>,
    _any: mode::Scope<std::cell::Cell<bool>>,
}

/// Lets tensors stand in for parameters, which are given by address, until the guard is dropped.
pub(crate) fn enter_stand_ins(
    indices: Arc<HashMap<usize, usize>>,
    tensors: Arc<dyn StandIns>,
) -> StandInGuard {
    let scope = Scope { indices, tensors, around: INNERMOST.get() };
    StandInGuard { _innermost: INNERMOST.enter(Some(Arc::new(scope))), _any: ANY.enter(true) }
}

/// Returns the tensor that stands in for a parameter, if there is one.
#[inline]
pub(super) fn stand_in(parameter: &Parameter) -> Option<Tensor> {
    if ANY.get() { find(parameter.address()) } else { None }
}

#[cold]
fn find(address: usize) -> Option<Tensor> {
    let mut scope = INNERMOST.get();
    while let Some(inner) = scope {
        if let Some(&index) = inner.indices.get(&address) {
            return Some(inner.tensors.tensor(index));
        }
        scope = inner.around.clone();
    }
    None
}
