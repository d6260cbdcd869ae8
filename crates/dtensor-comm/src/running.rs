//! The module that runs on this thread, for those who watch.
//!
//! What a collective is called for is known here, below everything that communicates. Nothing here knows what a module is.

use std::collections::HashMap;

use dtensor_array::mode;
use parking_lot::Mutex;

/// A module that runs, and what it runs in. There is one for each module and place it is called from, for as long as the program
/// runs: a node of the graph, or a note on a collective, names it without owning it.
#[derive(Debug)]
pub struct Running {
    /// The module at the top of the tree that it was found in.
    pub root: Root,
    /// The name of the root, then the dotted path.
    pub path: &'static str,
    /// The name of its type.
    pub kind: &'static str,
    /// The module it was called from.
    pub parent: Option<&'static Running>,
}

/// The top of a tree of modules. Its name is made of its type, and another one may have the same at another time.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    /// Which one it is; nothing for one that cannot be told from others of its name.
    pub id: Option<u64>,
    pub name: &'static str,
}

impl Running {
    /// A root that cannot be told from others of its name.
    #[doc(hidden)]
    #[inline]
    pub fn of(path: &str, kind: &'static str, parent: Option<&'static Running>) -> &'static Running {
        Running::below(None, path, "", kind, parent)
    }

    /// A module at a dotted path below a root, which has the empty one.
    pub fn below(
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
    #[inline]
    pub fn renamed(&self, root: &str, parent: Option<&'static Running>) -> &'static Running {
        let below = self.path[self.root.name.len()..].trim_start_matches('.');
        Running::below(self.root.id, root, below, self.kind, parent)
    }

    /// Where it lies: there is one of each.
    #[inline]
    pub fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// It, and those it runs in, from the inside out.
    #[inline]
    pub fn chain(&'static self) -> impl Iterator<Item = &'static Running> {
        std::iter::successors(Some(self), |running| running.parent)
    }
}

mode! {
    static MODULE: Cell<Option<&'static Running>> = None;
}

/// The module that runs on this thread, if somebody watches.
#[inline]
pub fn running_module() -> Option<&'static Running> {
    MODULE.get()
}

/// Sets the module that runs on this thread.
#[inline]
pub fn set_running_module(module: Option<&'static Running>) {
    MODULE.set(module);
}

/// Runs `body` in the name of a module that ran before.
#[inline]
pub fn within_module<R>(module: Option<&'static Running>, body: impl FnOnce() -> R) -> R {
    MODULE.within(module, body)
}
