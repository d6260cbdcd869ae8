//! A tensor that a model owns and no optimizer changes.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::{Result, Tensor};

/// A place that holds a tensor which belongs to the model's state but has no gradient: running statistics, a table of
/// positions. Clones are the same place.
///
/// ```
/// use dtensor::nn::{Buffer, Module};
/// use dtensor::prelude::*;
///
/// #[derive(Module)]
/// struct Counter {
///     seen: Buffer,
///     scratch: Buffer,
/// }
///
/// # fn main() -> Result<()> {
/// let zero = Tensor::zeros([1], DType::I64)?;
/// let counter = Counter { seen: Buffer::new(&zero), scratch: Buffer::transient(&zero) };
/// counter.seen.set(&counter.seen.get().add(1)?)?;
/// let state = counter.state_dict();
/// assert_eq!(state["seen"].to_vec::<i64>()?, [1]);
/// assert!(!state.contains_key("scratch"));
/// # Ok(())
/// # }
/// ```
pub struct Buffer {
    pub(super) cell: Arc<RwLock<Tensor>>,
    pub(super) persistent: bool,
}

impl Buffer {
    /// A buffer with this value, which is saved with the model.
    pub fn new(value: &Tensor) -> Self {
        Buffer { cell: Arc::new(RwLock::new(value.detach())), persistent: true }
    }

    /// A buffer with this value, which can be made again and is not part of the state dict.
    pub fn transient(value: &Tensor) -> Self {
        Buffer { persistent: false, ..Buffer::new(value) }
    }

    /// The tensor it holds now.
    pub fn get(&self) -> Tensor {
        self.cell.read().clone()
    }

    /// Puts another value of the same shape and dtype in its place. On a mesh, the value is brought to how the buffer lies.
    #[track_caller]
    pub fn set(&self, value: &Tensor) -> Result<()> {
        let mut cell = self.cell.write();
        *cell = super::parameter::fitting(&cell, "a buffer keeps its shape", value)?.detach();
        Ok(())
    }

    /// Puts another tensor, of any shape, dtype, device and layout, in its place.
    pub fn replace(&self, value: &Tensor) {
        *self.cell.write() = value.detach();
    }

    /// Whether it is part of the state dict.
    pub fn is_persistent(&self) -> bool {
        self.persistent
    }

    /// Whether two handles are the same buffer.
    pub fn is(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.cell, &other.cell)
    }

    /// Where it lies: clones lie at the same place.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.cell).addr()
    }

    pub(super) fn copied(&self) -> RwLock<Tensor> {
        RwLock::new(self.get())
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = self.get();
        write!(f, "Buffer({} {})", tensor.dtype(), tensor.shape())
    }
}
