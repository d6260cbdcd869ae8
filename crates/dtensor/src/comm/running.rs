//! The module that runs on this thread, for those who watch.
//!
//! What a collective is called for is known here, below everything that communicates. Nothing here knows what a module is.

use std::cell::Cell;
use std::collections::HashMap;

use parking_lot::Mutex;

use crate::scope::within;

/// A module that runs, and what it runs in. There is one for each module and place it is called from, for as long as the program
/// runs: a node of the graph, or a note on a collective, names it without owning it.
#[derive(Debug)]
pub(crate) struct Running {
    /// The module at the top of the tree that it was found in.
    pub(crate) root: Root,
    /// The name of the root, then the dotted path.
    pub(crate) path: &'static str,
    /// The name of its type.
    pub(crate) kind: &'static str,
    /// The module it was called from.
    pub(crate) parent: Option<&'static Running>,
}

/// The top of a tree of modules. Its name is made of its type, and another one may have the same at another time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Root {
    /// Which one it is; nothing for one that cannot be told from others of its name.
    pub(crate) id: Option<u64>,
    pub(crate) name: &'static str,
}

impl Running {
    /// A root that cannot be told from others of its name.
    #[cfg(test)]
    pub(crate) fn of(path: &str, kind: &'static str, parent: Option<&'static Running>) -> &'static Running {
        Running::below(None, path, "", kind, parent)
    }

    /// A module at a dotted path below a root, which has the empty one.
    pub(crate) fn below(
        root: Option<u64>,
        name: &str,
        below: &str,
        kind: &'static str,
        parent: Option<&'static Running>,
    ) -> &'static Running {
        /// What it was called from, by its address, its root, and its own path and kind.
        type Key = (usize, Option<u64>, &'static str, &'static str);
        static ALL: Mutex<Option<HashMap<Key, &'static Running>>> = Mutex::new(None);
        let caller = parent.map_or(0, Running::address);
        let path = if below.is_empty() { name.to_string() } else { format!("{name}.{below}") };
        let mut all = ALL.lock();
        let all = all.get_or_insert_default();
        if let Some(known) = all.get(&(caller, root, &*path, kind)) {
            return known;
        }
        let path: &'static str = Box::leak(path.into());
        let root = Root { id: root, name: &path[..name.len()] };
        let running: &'static Running = Box::leak(Box::new(Running { root, path, kind, parent }));
        all.insert((caller, root.id, path, kind), running);
        running
    }

    /// The same under another name of its root, called from there.
    pub(crate) fn renamed(&self, root: &str, parent: Option<&'static Running>) -> &'static Running {
        let below = self.path[self.root.name.len()..].trim_start_matches('.');
        Running::below(self.root.id, root, below, self.kind, parent)
    }

    /// Where it lies: there is one of each.
    pub(crate) fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// It, and those it runs in, from the inside out.
    pub(crate) fn chain(&'static self) -> impl Iterator<Item = &'static Running> {
        std::iter::successors(Some(self), |running| running.parent)
    }
}

thread_local! {
    static MODULE: Cell<Option<&'static Running>> = const { Cell::new(None) };
}

/// The module that runs on this thread, if somebody watches.
pub(crate) fn running_module() -> Option<&'static Running> {
    MODULE.get()
}

pub(crate) fn set_running_module(module: Option<&'static Running>) {
    MODULE.set(module);
}

/// Runs `body` in the name of a module that ran before.
pub(crate) fn within_module<R>(module: Option<&'static Running>, body: impl FnOnce() -> R) -> R {
    within(&MODULE, module, body)
}
