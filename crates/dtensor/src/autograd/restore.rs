//! Values that the graph does not save, because backward can restore them.

use std::sync::Arc;

use dtensor_array::{Array, mode};

use crate::tensor::{LocalTensor, Value};

/// Arrays that may be freed after forward, and that backward can restore.
pub(crate) trait Restore: Send + Sync {
    /// Returns a deferred copy of a view of one of these arrays, which does not keep the array alive. Returns `None` for any other
    /// array.
    fn restore_later(self: Arc<Self>, view: &Array) -> Option<LocalTensor>;
}

mode! {
    static RESTORING: Cell<bool> = false;
    static SOURCES: RefCell<Vec<Arc<dyn Restore>>> = Vec::new();
}

/// A scope in which the graph does not save the arrays of a source.
pub(crate) struct RestoreScope {
    _sources: mode::Scope<std::cell::RefCell<Vec<Arc<dyn Restore>>>>,
    _restoring: mode::Scope<std::cell::Cell<bool>>,
}

/// Opens a scope in which the graph does not save the arrays of this source.
pub(crate) fn restore_from(source: Arc<dyn Restore>) -> RestoreScope {
    let mut sources = SOURCES.get();
    sources.push(source);
    RestoreScope { _sources: SOURCES.enter(sources), _restoring: RESTORING.enter(true) }
}

/// Returns true if some values need not be saved.
#[inline]
pub(super) fn is_restoring() -> bool {
    RESTORING.get()
}

/// Replaces a value by a deferred one if backward can restore it.
#[cold]
pub(super) fn release(value: &mut Value) {
    let Ok(Some(array)) = value.part.array() else { return };
    // The innermost source is the most likely one.
    let deferred = SOURCES.get().into_iter().rev().find_map(|source| source.restore_later(array));
    if let Some(part) = deferred {
        value.part = part;
    }
}
