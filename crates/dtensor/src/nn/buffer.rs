//! Buffers: tensors that a model owns and no optimizer updates.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::journal::{self, Access};
use crate::{Result, Tensor};

/// A shared cell that holds a tensor of the model's state that has no gradient, such as running statistics or a
/// position table. Clones are the same buffer.
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
    /// Creates a buffer that is part of the state dict.
    pub fn new(value: &Tensor) -> Self {
        Buffer { cell: Arc::new(RwLock::new(value.detach())), persistent: true }
    }

    /// Creates a buffer that is not part of the state dict, because it can be recomputed.
    pub fn transient(value: &Tensor) -> Self {
        Buffer { persistent: false, ..Buffer::new(value) }
    }

    /// Returns the current tensor.
    pub fn get(&self) -> Tensor {
        journal::note(&self.cell, Access::Read);
        self.cell.read().clone()
    }

    /// Sets another value of the same shape and dtype. If the buffer is distributed, the value is redistributed to
    /// its layout.
    #[track_caller]
    pub fn set(&self, value: &Tensor) -> Result<()> {
        journal::note(&self.cell, Access::Replace);
        let mut cell = self.cell.write();
        *cell = super::parameter::fit_value(&cell, "a buffer keeps its shape", value)?.detach();
        Ok(())
    }

    /// Replaces the tensor by one of any shape, dtype, device and layout.
    pub fn replace(&self, value: &Tensor) {
        journal::note(&self.cell, Access::Replace);
        *self.cell.write() = value.detach();
    }

    /// Returns true if the buffer is part of the state dict.
    pub fn is_persistent(&self) -> bool {
        self.persistent
    }

    /// Returns true if both handles are the same buffer.
    pub fn is(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.cell, &other.cell)
    }

    /// Returns the address of the cell, which all clones share.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.cell).addr()
    }

    pub(super) fn copy_cell(&self) -> RwLock<Tensor> {
        RwLock::new(self.get())
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = self.get();
        write!(f, "Buffer({} {})", tensor.dtype(), tensor.shape())
    }
}
