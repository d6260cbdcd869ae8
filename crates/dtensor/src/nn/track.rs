//! Which module is running, for those who watch.
//!
//! A module does not know its place in the tree. When one is entered that nobody has heard of, the tree below it is walked, and
//! all modules in it are named by it; see [`names`]. What tells one module from others is in [`identity`].

mod identity;
mod names;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::Module;
use crate::comm::{Running, running_module, set_running_module};
use names::NAMES;

/// A module that begins to run.
pub(crate) struct Entered<'a> {
    pub(crate) module: &'a dyn Module,
    pub(crate) running: &'static Running,
}

/// Somebody who is told of every module that is run on this thread.
pub(crate) type Watcher = Rc<dyn Fn(&Entered<'_>)>;

thread_local! {
    static TRACKING: Cell<bool> = const { Cell::new(false) };
    static WATCHERS: RefCell<Vec<Watcher>> = const { RefCell::new(Vec::new()) };
}

/// Whether anybody watches.
pub(super) fn tracking() -> bool {
    TRACKING.get()
}

/// Runs `body`, of whose modules the watcher is told.
pub(crate) fn watched<R>(watcher: Watcher, body: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            let left = WATCHERS.with_borrow_mut(|watchers| {
                watchers.pop();
                watchers.len()
            });
            if left == 0 {
                TRACKING.set(false);
                NAMES.with_borrow_mut(|names| names.end_watch());
            }
        }
    }
    WATCHERS.with_borrow_mut(|watchers| watchers.push(watcher));
    TRACKING.set(true);
    let _restore = Restore;
    body()
}

/// A module that is running, until this is dropped.
pub(super) struct Inside {
    parent: Option<&'static Running>,
}

impl Inside {
    pub(super) fn enter(module: &dyn Module) -> Option<Inside> {
        if !tracking() {
            return None;
        }
        let (kind, parent) = (module.kind(), running_module());
        let name = names::name_of(module, kind);
        let running = name.running(kind, parent);
        let lying = names::lying_in(module, &name);
        NAMES.with_borrow_mut(|names| names.lying.push(lying));
        set_running_module(Some(running));
        let inside = Inside { parent };
        // They may run modules themselves.
        let watchers = WATCHERS.with_borrow(Clone::clone);
        watchers.iter().for_each(|watcher| watcher(&Entered { module, running }));
        Some(inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        set_running_module(self.parent);
        NAMES.with_borrow_mut(|names| names.lying.pop());
    }
}

#[cfg(test)]
mod tests;
