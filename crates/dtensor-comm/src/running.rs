//! The module that is running on this thread, so that a collective can name the module that called it.
//!
//! It is stored in this crate because collectives need it. Only names are stored: this crate does not depend on modules.

use std::cell::Cell;
use std::collections::HashMap;

use dtensor_array::mode;
use dtensor_array::mode::Scope;
use parking_lot::Mutex;

/// A running module and the modules that called it. One value exists per module and caller. It lives as long as the program, so
/// graph nodes and recorded collectives can refer to it without owning it.
#[derive(Debug)]
pub struct RunningModule {
    /// The root of the module tree that contains it.
    pub root: Root,
    /// The name of the root, followed by the dotted path of the module below it.
    pub path: &'static str,
    /// The name of the module's type.
    pub kind: &'static str,
    /// The module that called it.
    pub parent: Option<&'static RunningModule>,
}

/// The root of a module tree. Its name comes from its type, so several roots may share a name.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    /// Tells roots of the same name apart, if known.
    pub id: Option<u64>,
    /// The name.
    pub name: &'static str,
}

impl RunningModule {
    /// Returns a root module without an id.
    #[doc(hidden)]
    #[inline]
    pub fn of(
        path: &str,
        kind: &'static str,
        parent: Option<&'static RunningModule>,
    ) -> &'static RunningModule {
        RunningModule::below(None, path, "", kind, parent)
    }

    /// Returns the module at the dotted path `below` under a root of this id and name. The path of the root itself is empty.
    pub fn below(
        root: Option<u64>,
        name: &str,
        below: &str,
        kind: &'static str,
        parent: Option<&'static RunningModule>,
    ) -> &'static RunningModule {
        /// The caller's address, the root's id, the module's path and its kind.
        type Key = (usize, Option<u64>, &'static str, &'static str);
        static ALL: Mutex<Option<HashMap<Key, &'static RunningModule>>> = Mutex::new(None);
        let caller = parent.map_or(0, RunningModule::address);
        let path = if below.is_empty() { name.to_string() } else { format!("{name}.{below}") };
        let mut all = ALL.lock();
        let all = all.get_or_insert_default();
        if let Some(known) = all.get(&(caller, root, &*path, kind)) {
            return known;
        }
        let path: &'static str = Box::leak(path.into());
        let root = Root { id: root, name: &path[..name.len()] };
        let running: &'static RunningModule = Box::leak(Box::new(RunningModule { root, path, kind, parent }));
        all.insert((caller, root.id, path, kind), running);
        running
    }

    /// Returns the same module under another root name and with another caller.
    #[inline]
    pub fn renamed(&self, root: &str, parent: Option<&'static RunningModule>) -> &'static RunningModule {
        let below = self.path[self.root.name.len()..].trim_start_matches('.');
        RunningModule::below(self.root.id, root, below, self.kind, parent)
    }

    /// Returns its address in memory, which identifies it because each value exists once.
    #[inline]
    pub fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns the innermost module that is, or has called, each of these. `None` if there is none.
    pub fn common(
        mut modules: impl Iterator<Item = Option<&'static RunningModule>>,
    ) -> Option<&'static RunningModule> {
        let first = modules.next()??;
        modules.try_fold(first, |common, other| {
            let callers: Vec<usize> = other?.chain().map(RunningModule::address).collect();
            common.chain().find(|module| callers.contains(&module.address()))
        })
    }

    /// Iterates over the module and its callers, innermost first.
    #[inline]
    pub fn chain(&'static self) -> impl Iterator<Item = &'static RunningModule> {
        std::iter::successors(Some(self), |running| running.parent)
    }
}

mode! {
    static MODULE: Cell<Option<&'static RunningModule>> = None;
    /// The innermost running module that a parallel plan has named.
    static STYLED: Cell<Option<&'static RunningModule>> = None;
}

/// Returns the innermost running module that a parallel plan has named. Unlike [`running_module`], it is known if nothing listens.
#[inline]
pub fn styled_module() -> Option<&'static RunningModule> {
    MODULE.get().or_else(|| STYLED.get())
}

/// Sets the module that [`styled_module`] returns, until the guard is dropped.
#[inline]
pub fn enter_styled_module(module: &'static RunningModule) -> Scope<Cell<Option<&'static RunningModule>>> {
    STYLED.enter(Some(module))
}

/// Returns the module that is running on this thread. `None` outside modules, and if nothing listens to modules.
#[inline]
pub fn running_module() -> Option<&'static RunningModule> {
    MODULE.get()
}

/// Sets the module that is running on this thread.
#[inline]
pub fn set_running_module(module: Option<&'static RunningModule>) {
    MODULE.set(module);
}

/// Runs `body` as if the given module were running, for example in the backward pass.
#[inline]
pub fn within_module<R>(module: Option<&'static RunningModule>, body: impl FnOnce() -> R) -> R {
    MODULE.within(module, body)
}
