//! Which module is running, for those who watch.
//!
//! A module does not know its place in the tree. When one is entered that nobody has heard of, the tree below it is walked, and
//! all modules in it are named by it; see [`names`]. What tells one module from others is in [`identity`].

mod identity;
mod names;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use dtensor_array::{Located, listeners};

use super::Module;
use super::walk::{Piece, Walk};
use crate::comm::{Running, running_module, set_running_module};
use identity::{Identity, spot};
use names::NAMES;

/// A module that begins to run.
pub(crate) struct Entered<'a> {
    pub(crate) module: &'a dyn Module,
    pub(crate) running: &'static Running,
}

listeners! {
    /// Told of every module that is run on this thread.
    pub(crate) static MODULES: dyn Fn(&Entered<'_>);
}

/// Runs `body`, of whose modules the listener is told.
pub(crate) fn watched<R>(listener: Rc<dyn Fn(&Entered<'_>)>, body: impl FnOnce() -> R) -> R {
    /// Names are given anew to whoever watches next.
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

/// A module that is running, until this is dropped.
pub(super) struct Inside {
    parent: Option<&'static Running>,
}

impl Inside {
    pub(super) fn enter(module: &dyn Module) -> Option<Inside> {
        if !MODULES.any() {
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
        MODULES.each(|listener| listener(&Entered { module, running }));
        Some(inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        set_running_module(self.parent);
        NAMES.with_borrow_mut(|names| names.lying.pop());
    }
}

/// Names the module that an error comes from: by its path below the outermost module whose `forward` the error has left.
pub(super) fn name_module(located: &mut Located, module: &dyn Module) {
    let key = |module: &dyn Module| {
        let kind = module.kind();
        let mut hasher = DefaultHasher::new();
        match Identity::of(module, kind) {
            Some(identity) => identity.key.hash(&mut hasher),
            None => spot(module, kind).hash(&mut hasher),
        }
        hasher.finish()
    };
    let outer = key(module);
    let named = match &located.module {
        None => module.kind().to_string(),
        // A `forward` that another one of the same module called.
        Some(_) if located.module_key == outer => return,
        Some(inner) => {
            let inside = Walk::over(module, usize::MAX).into_iter().find_map(|found| match found.piece {
                Piece::Module { module, .. } if key(module) == located.module_key => Some(found.path),
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
