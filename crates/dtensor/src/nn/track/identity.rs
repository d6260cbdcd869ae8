//! What tells one module from others.
//!
//! A module is known by its base; one without a base by all parameters, buffers and bases in it, each with the way there. These
//! stay the same when a module is moved or cloned. Two modules may share some of them, but not all, unless they are the same.

use std::any::Any;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Weak};

use crate::nn::Module;
use crate::nn::walk::{Piece, Walk};

/// A module that is told from others.
pub(super) struct Identity {
    pub(super) key: Key,
    pub(super) places: Places,
}

/// A module's kind, and what its places are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    kind: &'static str,
    places: u64,
}

/// What lies in a module. As long as these are held, even so, nothing else can lie at their addresses.
pub(super) struct Places(Vec<Weak<dyn Any>>);

impl Places {
    /// Whether the module may still be there. One that is holds all its places.
    pub(super) fn are_there(&self) -> bool {
        self.0.iter().all(|place| place.strong_count() > 0)
    }
}

impl Identity {
    /// None for a module that has no places.
    pub(super) fn of(module: &dyn Module, kind: &'static str) -> Option<Identity> {
        let (mut hasher, mut held) = (DefaultHasher::new(), Vec::new());
        for (way, place) in places(module) {
            (way, Arc::as_ptr(&place).cast::<()>().addr()).hash(&mut hasher);
            held.push(Arc::downgrade(&place));
        }
        let key = Key { kind, places: hasher.finish() };
        (!held.is_empty()).then_some(Identity { key, places: Places(held) })
    }
}

fn places(module: &dyn Module) -> Vec<(String, Arc<dyn Any>)> {
    if let Some(base) = module.base() {
        return vec![(String::new(), base.state.clone())];
    }
    let found = Walk::over(module, usize::MAX).into_iter();
    let place = |piece| -> Option<Arc<dyn Any>> {
        match piece {
            Piece::Module { .. } => None,
            Piece::Parameter(parameter) => Some(parameter.cell.clone()),
            Piece::Buffer(buffer) => Some(buffer.cell.clone()),
            Piece::Base(base) => Some(base.state.clone()),
        }
    };
    found.filter_map(|found| Some((found.path, place(found.piece)?))).collect()
}

/// What tells modules apart that have no places: their kind and where they lie.
pub(super) type Spot = (&'static str, usize);

pub(super) fn spot(module: &dyn Module, kind: &'static str) -> Spot {
    (kind, std::ptr::from_ref(module).cast::<()>().addr())
}
