//! Tracks which module is running, for listeners.
//!
//! A module does not know its path in the tree. When a module without a name is entered, the tree below it is walked,
//! and all modules in it are named; see [`names`]. How a module is recognized is in [`identity`].

mod identity;
mod names;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use dtensor_array::{Located, listeners};

use super::Module;
use super::walk::{Node, Walk};
use crate::comm::{RunningModule, running_module, set_running_module};
use identity::{Identity, address_key};
use names::NAMES;

/// The event of a module that starts to run.
pub(crate) struct ModuleEntered<'a> {
    pub(crate) module: &'a dyn Module,
    pub(crate) running: &'static RunningModule,
}

listeners! {
    /// Notified of every module that runs on this thread.
    pub(crate) static MODULES: dyn Fn(&ModuleEntered<'_>);
}

/// Runs `body` and notifies the listener of the modules that it runs.
pub(crate) fn with_module_listener<R>(
    listener: Rc<dyn Fn(&ModuleEntered<'_>)>,
    body: impl FnOnce() -> R,
) -> R {
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
    parent: Option<&'static RunningModule>,
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
        MODULES.each(|listener| listener(&ModuleEntered { module, running }));
        Some(guard)
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        set_running_module(self.parent);
        NAMES.with_borrow_mut(|names| names.by_address.pop());
    }
}

/// Names the module that an error comes from: by its path below the outermost module whose `forward` the error has left.
pub(super) fn name_module(located: &mut Located, module: &dyn Module) {
    let key = |module: &dyn Module| {
        let kind = module.kind();
        let mut hasher = DefaultHasher::new();
        match Identity::of(module, kind) {
            Some(identity) => identity.key.hash(&mut hasher),
            None => address_key(module, kind).hash(&mut hasher),
        }
        hasher.finish()
    };
    let outer = key(module);
    let named = match &located.module {
        None => module.kind().to_string(),
        // A `forward` that another one of the same module called.
        Some(_) if located.module_key == outer => return,
        Some(inner) => {
            let inside = Walk::over(module, usize::MAX).into_iter().find_map(|found| match found.node {
                Node::Module { module, .. } if key(module) == located.module_key => Some(found.path),
                _ => None,
            });
            // A module that is no field of this one keeps its own name.
            let Some(path) = inside else { return };
            let below = inner.split_once('.').map(|(_, below)| format!(".{below}")).unwrap_or_default();
            format!("{}.{path}{below}", module.kind())
        }
    };
    (located.module, located.module_key) = (Some(named), outer);
}

#[cfg(test)]
mod tests;
