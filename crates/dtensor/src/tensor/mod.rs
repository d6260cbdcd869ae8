//! [`Tensor`]: an array with a shape and a dtype, and, if it requires a gradient, a node of the autograd graph.

mod construct;
mod deferred;
mod display;
mod expect;
mod operand;
mod read;

use std::sync::Arc;

pub use construct::{default_device, on_device};
use deferred::Deferred;
pub use operand::Operand;

use dtensor_array::memory::Purpose;
use dtensor_array::shape::Dim;
use dtensor_array::{Array, DType, Device, Meta, Shape};

use std::panic::Location;

use crate::autograd::{Leaf, Link};
use crate::dispatch::locate;
use crate::journal::{self, Access};
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::{Error, Result};
use dtensor_layout::Placement;

/// A multi-dimensional array, on one device or sharded over a mesh of ranks.
///
/// A tensor is immutable: no operator changes it, so values that backward needs cannot be overwritten. Clones are
/// cheap and share the value. Every operator checks its arguments and returns a [`Result`].
///
/// On a mesh, a tensor also has a [`Layout`]; each rank then stores only its shard. See
/// [`distribute_tensor`](crate::distribute_tensor).
///
/// ```
/// use dtensor::Tensor;
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2])?.requires_grad_(true)?;
/// let loss = x.mul(&x)?.sum_all()?;
/// loss.backward()?;
/// assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [2., 4., 6., 8.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tensor {
    value: Value,
    link: Link,
}

/// The local tensor of this rank and, if the tensor is distributed, its layout.
#[derive(Clone)]
pub(crate) struct Value {
    pub(crate) part: LocalTensor,
    pub(crate) layout: Option<Layout>,
}

/// The local tensor of this rank: elements, now or at the first use, or only shape and dtype on [`Device::Meta`].
#[derive(Clone)]
pub(crate) enum LocalTensor {
    Array(Array),
    Meta(Arc<Meta>),
    Deferred(Arc<Deferred>),
}

impl LocalTensor {
    fn dims(&self) -> &[usize] {
        match self {
            LocalTensor::Array(local) => local.dims(),
            LocalTensor::Meta(meta) => &meta.shape,
            LocalTensor::Deferred(deferred) => &deferred.meta().shape,
        }
    }

    /// Returns the elements, or `None` on the meta device. Computes them if they are deferred.
    #[inline]
    pub(crate) fn array(&self) -> Result<Option<&Array>> {
        match self {
            LocalTensor::Array(local) => Ok(Some(local)),
            LocalTensor::Meta(_) => Ok(None),
            LocalTensor::Deferred(deferred) => deferred.array().map(Some),
        }
    }

    /// Sets what the memory is [counted](crate::debug::record_memory) as.
    pub(crate) fn count_as(&self, purpose: Purpose) {
        if let LocalTensor::Array(local) = self {
            local.count_as(purpose);
        }
    }

    pub(crate) fn meta(&self) -> Meta {
        match self {
            LocalTensor::Array(local) => local.meta(),
            LocalTensor::Meta(meta) => Meta::clone(meta),
            LocalTensor::Deferred(deferred) => deferred.meta().clone(),
        }
    }

    /// Creates a meta part: shape and dtype without elements.
    pub(crate) fn of_meta(shape: Shape, dtype: DType) -> LocalTensor {
        LocalTensor::Meta(Arc::new(Meta { shape, dtype, device: Device::Meta }))
    }
}

impl Value {
    pub(crate) fn meta(&self) -> Meta {
        let meta = self.part.meta();
        match &self.layout {
            None => meta,
            Some(layout) => Meta { shape: layout.shape().clone(), ..meta },
        }
    }

    /// Creates the value of a tensor that is not distributed.
    pub(crate) fn plain(part: LocalTensor) -> Value {
        Value { part, layout: None }
    }
}

impl Tensor {
    pub(crate) fn new(value: Value, link: Link) -> Self {
        Tensor { value, link }
    }

    /// Wraps a value in a tensor without autograd history.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_value(value: Value) -> Self {
        Tensor { value, link: Link::None }
    }

    /// Wraps an array in a tensor that is not distributed and has no autograd history.
    pub(crate) fn of(local: Array) -> Self {
        Tensor { value: Value::plain(LocalTensor::Array(local)), link: Link::None }
    }

    /// Wraps a local tensor and its layout in a distributed tensor without autograd history.
    pub(crate) fn from_shard(part: LocalTensor, layout: Layout) -> Self {
        Tensor { value: Value { part, layout: Some(layout) }, link: Link::None }
    }

    /// Returns a tensor with the same autograd link and another value. Used to update parameters.
    pub(crate) fn with_value(&self, value: Value) -> Tensor {
        Tensor { value, link: self.link.clone() }
    }

    pub(crate) fn value(&self) -> &Value {
        &self.value
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Returns true if both share one value in memory; equal values do not suffice.
    pub(crate) fn is_same(&self, other: &Tensor) -> bool {
        match (&self.value.part, &other.value.part) {
            (LocalTensor::Array(a), LocalTensor::Array(b)) => a.is_same(b),
            (LocalTensor::Meta(a), LocalTensor::Meta(b)) => Arc::ptr_eq(a, b),
            (LocalTensor::Deferred(a), LocalTensor::Deferred(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// Returns the local array for in-place changes, or `None` for a meta tensor. Other holders of the tensor do
    /// not see the changes.
    pub(crate) fn local_array_mut(&mut self) -> Result<Option<&mut Array>> {
        if let LocalTensor::Deferred(deferred) = &self.value.part {
            self.value.part = LocalTensor::Array(deferred.array()?.clone());
        }
        Ok(match &mut self.value.part {
            LocalTensor::Array(local) => Some(local),
            _ => None,
        })
    }

    /// Returns the layout (mesh, placements and global shape), or `None` if the tensor is not distributed.
    pub fn layout(&self) -> Option<&Layout> {
        self.value.layout.as_ref()
    }

    /// Returns the mesh, or `None` if the tensor is not distributed.
    pub fn mesh(&self) -> Option<&DeviceMesh> {
        self.layout().map(Layout::mesh)
    }

    /// Returns the placements, one per mesh dim. The slice is empty if the tensor is not distributed.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], "tp")?;
    /// let x = sharded::ones([4, 6], DType::F32, &mesh, [Shard(1)])?;
    /// assert_eq!(x.placements(), [Shard(1)]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn placements(&self) -> &[Placement] {
        self.layout().map_or(&[], Layout::placements)
    }

    /// Returns true if the tensor is on a mesh, whatever its placements.
    pub fn is_distributed(&self) -> bool {
        self.value.layout.is_some()
    }

    /// Returns the size of each dim. For a distributed tensor these are the global sizes.
    pub fn dims(&self) -> &[usize] {
        match &self.value.layout {
            None => self.value.part.dims(),
            Some(layout) => layout.shape(),
        }
    }

    /// Returns the size of each dim as an owned [`Shape`].
    pub fn shape(&self) -> Shape {
        Shape::from(self.dims())
    }

    /// Returns the number of dims (PyTorch's `ndim`).
    pub fn ndim(&self) -> usize {
        self.dims().len()
    }

    /// Returns the size of one dim. Negative dims count from the back. Returns an error if the dim is out of range.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::zeros([2, 5], DType::F32)?.size(-1)?, 5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn size(&self, dim: impl Into<Dim>) -> Result<usize> {
        let dim = self.dim("size", dim)?;
        self.dims()
            .get(dim)
            .copied()
            .ok_or_else(|| Error::argument("size", "dim: a scalar (0-d tensor) has no dims"))
    }

    /// Returns the number of elements, of all ranks together if the tensor is distributed.
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> DType {
        match &self.value.part {
            LocalTensor::Array(local) => local.dtype(),
            LocalTensor::Meta(meta) => meta.dtype,
            LocalTensor::Deferred(deferred) => deferred.meta().dtype,
        }
    }

    /// Returns the device that stores the elements.
    pub fn device(&self) -> Device {
        match &self.value.part {
            LocalTensor::Array(local) => local.device(),
            LocalTensor::Meta(meta) => meta.device,
            LocalTensor::Deferred(deferred) => deferred.meta().device,
        }
    }

    /// Returns true if the tensor has a shape and a dtype but no elements.
    pub fn is_meta(&self) -> bool {
        self.device() == Device::Meta
    }

    /// Returns shape, dtype and device together.
    pub fn meta(&self) -> Meta {
        self.value.meta()
    }

    /// Returns true if the elements (of a distributed tensor: those of this rank) are contiguous in row-major
    /// order. Always true for meta tensors.
    pub fn is_contiguous(&self) -> bool {
        match self.value.part.array() {
            Ok(Some(local)) => local.is_contiguous(),
            _ => true,
        }
    }

    #[track_caller]
    pub(crate) fn dim(&self, op: &'static str, dim: impl Into<Dim>) -> Result<usize> {
        let at = Location::caller();
        dim.into().resolve(op, self.ndim()).map_err(|error| locate(error, &[self], at))
    }

    /// Returns true if operators on this tensor are recorded for [`backward`](Tensor::backward).
    pub fn requires_grad(&self) -> bool {
        !matches!(self.link, Link::None)
    }

    /// Returns true if this tensor is not the result of a recorded operator. Only leaves accumulate a gradient.
    pub fn is_leaf(&self) -> bool {
        !matches!(self.link, Link::Node(..))
    }

    /// Returns a leaf with the same value that requires a gradient if `on` is true, and does not otherwise. The
    /// gradient accumulates in the returned tensor and its clones. On the result of a recorded operator, `true`
    /// changes nothing and `false` returns an error: use [`detach`](Tensor::detach) instead.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let weight = Tensor::ones([3], DType::F32)?.requires_grad_(true)?;
    /// assert!(weight.is_leaf() && weight.mul(2.0)?.requires_grad());
    /// assert!(weight.mul(2.0)?.requires_grad_(false).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn requires_grad_(&self, on: bool) -> Result<Tensor> {
        const OP: &str = "requires_grad_";
        match (&self.link, on) {
            (Link::None, false) | (Link::Leaf(_) | Link::Node(..), true) => Ok(self.clone()),
            (Link::Leaf(_), false) => Ok(self.detach()),
            (Link::Node(..), false) => Err(Error::Argument {
                op: OP,
                message:
                    "you can only change requires_grad flags of leaf tensors; use `detach` to get a tensor \
                          that does not require gradients"
                        .into(),
            }),
            (Link::None, true) if !self.dtype().is_float() => Err(Error::DType {
                op: OP,
                dtype: self.dtype(),
                why: "only tensors of floating point dtype can require gradients",
            }),
            (Link::None, true) => {
                let leaf = Leaf { layout: self.value.layout.clone(), ..Leaf::default() };
                Ok(Tensor { value: self.value.clone(), link: Link::Leaf(Arc::new(leaf)) })
            }
        }
    }

    /// Returns the same value without autograd history: gradients of what is computed from it do not reach this
    /// tensor. Nothing is copied.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::scalar(3f32)?.requires_grad_(true)?;
    /// x.mul(&x.detach())?.backward()?;
    /// assert_eq!(x.grad().unwrap().item::<f32>()?, 3.0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn detach(&self) -> Tensor {
        Tensor { value: self.value.clone(), link: Link::None }
    }

    /// Returns the accumulated gradient, or `None` if there is none yet or this is not a leaf that requires one.
    pub fn grad(&self) -> Option<Tensor> {
        match &self.link {
            Link::Leaf(leaf) => {
                journal::note(leaf, Access::Read);
                leaf.grad.lock().clone()
            }
            _ => None,
        }
    }

    /// Clears the accumulated gradient.
    pub fn zero_grad(&self) {
        if let Link::Leaf(leaf) = &self.link {
            journal::note(leaf, Access::Replace);
            *leaf.grad.lock() = None;
        }
    }

    /// Replaces the accumulated gradient, or clears it with `None`. Returns an error if this is not a leaf that
    /// requires a gradient, or if the shape, dtype, device or layout of `grad` differs from the leaf's.
    pub fn set_grad(&self, grad: Option<Tensor>) -> Result<()> {
        const OP: &str = "set_grad";
        let Link::Leaf(leaf) = &self.link else {
            return Err(Error::Argument {
                op: OP,
                message: "only a leaf tensor that requires grad has a gradient to set".into(),
            });
        };
        if let Some(grad) = &grad {
            self.expect_like(OP, "the gradient must have the tensor's shape", grad)?;
        }
        journal::note(leaf, Access::Replace);
        *leaf.grad.lock() = grad;
        Ok(())
    }

    /// Applies `change` to the accumulated gradient, if there is one. The gradient loses its own autograd history.
    pub(crate) fn change_grad(&self, change: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let Link::Leaf(leaf) = &self.link else { return Ok(()) };
        journal::note(leaf, Access::Change);
        match &mut *leaf.grad.lock() {
            Some(grad) => {
                grad.link = Link::None;
                change(grad)
            }
            None => Ok(()),
        }
    }
}
