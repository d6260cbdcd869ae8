//! How a module is recognized.
//!
//! A module with a base is identified by it. A module without one is identified by all parameters, buffers and bases
//! in it, each with its path. These stay the same when the module is moved or cloned. Two different modules may share
//! some of these cells, but not all of them.

use std::any::Any;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Weak};

use crate::nn::Module;
use crate::nn::walk::{Node, Walk};

/// How a module is recognized, and the cells that this depends on.
pub(super) struct Identity {
    pub(super) key: Key,
    pub(super) cells: CellRefs,
}

/// A module's type, and a hash of the paths and addresses of its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    kind: &'static str,
    cells: u64,
}

/// Weak references to the cells of a module. While they are held, their addresses are not reused.
pub(super) struct CellRefs(Vec<Weak<dyn Any>>);

impl CellRefs {
    /// Returns true if all cells are still alive. A living module holds all its cells.
    pub(super) fn are_alive(&self) -> bool {
        self.0.iter().all(|cell| cell.strong_count() > 0)
    }
}

impl Identity {
    /// Returns `None` for a module without cells.
    pub(super) fn of(module: &dyn Module, kind: &'static str) -> Option<Identity> {
        let (mut hasher, mut refs) = (DefaultHasher::new(), Vec::new());
        for (path, cell) in cells(module) {
            (path, Arc::as_ptr(&cell).cast::<()>().addr()).hash(&mut hasher);
            refs.push(Arc::downgrade(&cell));
        }
        let key = Key { kind, cells: hasher.finish() };
        (!refs.is_empty()).then_some(Identity { key, cells: CellRefs(refs) })
    }
}

fn cells(module: &dyn Module) -> Vec<(String, Arc<dyn Any>)> {
    if let Some(base) = module.base() {
        return vec![(String::new(), base.state.clone())];
    }
    let found = Walk::over(module, usize::MAX).into_iter();
    let cell = |node| -> Option<Arc<dyn Any>> {
        match node {
            Node::Module { .. } => None,
            Node::Parameter(parameter) => Some(parameter.cell.clone()),
            Node::Buffer(buffer) => Some(buffer.cell.clone()),
            Node::Base(base) => Some(base.state.clone()),
        }
    };
    found.filter_map(|found| Some((found.path, cell(found.node)?))).collect()
}

/// How a module without cells is recognized: by its type and its address.
pub(super) type AddressKey = (&'static str, usize);

pub(super) fn address_key(module: &dyn Module, kind: &'static str) -> AddressKey {
    (kind, std::ptr::from_ref(module).cast::<()>().addr())
}
