//! Copies of modules that share nothing with the original.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use dtensor_array::mode;
use parking_lot::Mutex;

use super::walk::{Piece, Walk};
use super::{Base, Buffer, Module, Parameter};
use crate::{Error, Result};

/// The places copied so far, by the address of the original.
type Copies = Arc<Mutex<HashMap<usize, Box<dyn Any + Send>>>>;

mode! {
    /// Set while a module is being copied.
    static COPIES: RefCell<Option<Copies>> = None;
}

/// Another module with parameters, buffers, gradients and hooks like those of this one: a clone is the same module, a deep copy
/// is not. A parameter that is used under two names is one parameter in the copy too.
///
/// What the module holds behind an [`Arc`] is not copied by cloning; if parameters lie there, this is an error.
///
/// ```
/// use dtensor::nn::{Linear, Module, deep_copy};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(2, 2, true)?;
/// let (same, other) = (layer.clone(), deep_copy(&layer)?);
/// layer.weight.set(&Tensor::zeros([2, 2], DType::F32)?)?;
/// assert_eq!(same.weight.get().to_vec::<f32>()?, [0.; 4]);
/// assert_ne!(other.weight.get().to_vec::<f32>()?, [0.; 4]);
/// # Ok(())
/// # }
/// ```
pub fn deep_copy<M: Module + Clone>(module: &M) -> Result<M> {
    let copy = COPIES.within(Some(Copies::default()), || module.clone());
    let (originals, copies) = (Walk::over(module, usize::MAX), Walk::over(&copy, usize::MAX));
    for (a, b) in originals.iter().zip(&copies) {
        let shared = match (&a.piece, &b.piece) {
            (Piece::Parameter(a), Piece::Parameter(b)) => a.is(b),
            (Piece::Buffer(a), Piece::Buffer(b)) => a.is(b),
            (Piece::Base(a), Piece::Base(b)) => a.is(b),
            _ => false,
        };
        if shared {
            let message = format!(
                "`{}` would be shared with the original: its module is held behind an `Arc` or a reference, which a clone shares",
                a.path
            );
            return Err(Error::argument("deep_copy", message));
        }
    }
    Ok(copy)
}

/// The clone of a place: the same one, or its copy while modules are being copied.
fn cloned<T: Send + Sync + 'static>(place: &Arc<T>, copy: impl FnOnce(&T) -> T) -> Arc<T> {
    let address = Arc::as_ptr(place).addr();
    let Some(copies) = COPIES.get() else { return place.clone() };
    let mut copies = copies.lock();
    let known = copies.entry(address).or_insert_with(|| Box::new(Arc::new(copy(place))));
    known.downcast_ref::<Arc<T>>().unwrap_or(place).clone()
}

impl Clone for Parameter {
    fn clone(&self) -> Self {
        Parameter { cell: cloned(&self.cell, |_| self.copied()) }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        Buffer { cell: cloned(&self.cell, |_| self.copied()), persistent: self.persistent }
    }
}

impl Clone for Base {
    fn clone(&self) -> Self {
        Base { state: cloned(&self.state, |state| state.copied()) }
    }
}
