//! Deep copies of modules.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use dtensor_array::mode;
use parking_lot::Mutex;

use super::walk::{Node, Walk};
use super::{Base, Buffer, Module, Parameter};
use crate::{Error, Result};

/// The cells copied so far, by the address of the original.
type Copies = Arc<Mutex<HashMap<usize, Box<dyn Any + Send>>>>;

mode! {
    /// Set while a module is being copied.
    static COPIES: RefCell<Option<Copies>> = None;
}

/// Returns an independent copy of a module, with its own parameters, buffers, gradients and hooks. A clone, in
/// contrast, is the same module. A shared parameter stays shared within the copy.
///
/// Returns an error if parameters are held behind an [`Arc`], because cloning the module does not copy those.
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
        let shared = match (&a.node, &b.node) {
            (Node::Parameter(a), Node::Parameter(b)) => a.is(b),
            (Node::Buffer(a), Node::Buffer(b)) => a.is(b),
            (Node::Base(a), Node::Base(b)) => a.is(b),
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

/// Clones a cell handle: the same cell or, during a deep copy, its copy.
fn clone_or_copy<T: Send + Sync + 'static>(cell: &Arc<T>, copy: impl FnOnce(&T) -> T) -> Arc<T> {
    let address = Arc::as_ptr(cell).addr();
    let Some(copies) = COPIES.get() else { return cell.clone() };
    let mut copies = copies.lock();
    let copied = copies.entry(address).or_insert_with(|| Box::new(Arc::new(copy(cell))));
    copied.downcast_ref::<Arc<T>>().unwrap_or(cell).clone()
}

impl Clone for Parameter {
    fn clone(&self) -> Self {
        Parameter { cell: clone_or_copy(&self.cell, |_| self.copy_cell()) }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        Buffer { cell: clone_or_copy(&self.cell, |_| self.copy_cell()), persistent: self.persistent }
    }
}

impl Clone for Base {
    fn clone(&self) -> Self {
        Base { state: clone_or_copy(&self.state, |state| state.copy_state()) }
    }
}
