//! Tracks which module is running, for listeners.
//!
//! A module does not know its path in the tree. When a module without a name is entered, the tree below it is walked,
//! and all modules in it are named; see [`names`]. How a module is recognized is in [`identity`].

mod identity;
mod names;

use std::rc::Rc;

use dtensor_array::listeners;

use super::Module;
use crate::comm::{Running, running_module, set_running_module};
use names::NAMES;

/// The event of a module that starts to run.
pub(crate) struct Entered<'a> {
    pub(crate) module: &'a dyn Module,
    pub(crate) running: &'static Running,
}

listeners! {
    /// Notified of every module that runs on this thread.
    pub(crate) static MODULES: dyn Fn(&Entered<'_>);
}

/// Runs `body` and notifies the listener of the modules that it runs.
pub(crate) fn watched<R>(listener: Rc<dyn Fn(&Entered<'_>)>, body: impl FnOnce() -> R) -> R {
    /// Names start anew for the next listener.
    struct EndWatch;
    impl Drop for EndWatch {
        fn drop(&mut self) {
            if !MODULES.any() {
                NAMES.with_borrow_mut(|names| names.end_watch());
            }
        }
    }
    let _end = EndWatch;
    MODULES.listen(listener, body)
}

/// Marks a module as running until it is dropped.
pub(super) struct RunningGuard {
    parent: Option<&'static Running>,
}

impl RunningGuard {
    pub(super) fn enter(module: &dyn Module) -> Option<RunningGuard> {
        if !MODULES.any() {
            return None;
        }
        let (kind, parent) = (module.kind(), running_module());
        let name = names::name_of(module, kind);
        let running = name.running(kind, parent);
        let by_address = names::names_by_address(module, &name);
        NAMES.with_borrow_mut(|names| names.by_address.push(by_address));
        set_running_module(Some(running));
        let guard = RunningGuard { parent };
        // Listeners are called last, because they may run modules themselves.
        MODULES.each(|listener| listener(&Entered { module, running }));
        Some(guard)
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        set_running_module(self.parent);
        NAMES.with_borrow_mut(|names| names.by_address.pop());
    }
}

#[cfg(test)]
mod tests;
