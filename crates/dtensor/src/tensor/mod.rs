//! [`Tensor`]: a value with a shape, a dtype and, where a gradient is wanted, a place in the graph.

mod construct;
mod display;
mod expect;
mod operand;
mod read;

use std::sync::Arc;

pub(crate) use construct::default_device;
pub use construct::on_device;
pub use operand::Operand;

use dtensor_array::shape::Dim;
use dtensor_array::{Array, DType, Device, Meta, Shape};

use std::panic::Location;

use crate::autograd::{Leaf, Link};
use crate::dispatch::locate;
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::{Error, Result};
use dtensor_layout::Placement;

/// A multi-dimensional array.
///
/// A tensor is an immutable value: no operator changes one, so a value that backward will need cannot be
/// overwritten, and clones (which are cheap) never surprise. Every operator checks its arguments and returns a
/// [`Result`].
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

/// What this rank has of a tensor, and how the whole lies on a mesh if it does.
#[derive(Clone)]
pub(crate) struct Value {
    pub(crate) part: Part,
    pub(crate) layout: Option<Layout>,
}

/// What this rank has of a tensor: a value, or only what is known of one.
#[derive(Clone)]
pub(crate) enum Part {
    Array(Array),
    Meta(Arc<Meta>),
}

impl Part {
    fn dims(&self) -> &[usize] {
        match self {
            Part::Array(local) => local.dims(),
            Part::Meta(meta) => &meta.shape,
        }
    }

    pub(crate) fn meta(&self) -> Meta {
        match self {
            Part::Array(local) => local.meta(),
            Part::Meta(meta) => Meta::clone(meta),
        }
    }

    /// A part without a value.
    pub(crate) fn of_meta(shape: Shape, dtype: DType) -> Part {
        Part::Meta(Arc::new(Meta { shape, dtype, device: Device::Meta }))
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

    /// Of a tensor on this rank alone.
    pub(crate) fn plain(part: Part) -> Value {
        Value { part, layout: None }
    }
}

impl Tensor {
    pub(crate) fn new(value: Value, link: Link) -> Self {
        Tensor { value, link }
    }

    /// A tensor of this rank alone, with this value and no history.
    pub(crate) fn of(local: Array) -> Self {
        Tensor { value: Value::plain(Part::Array(local)), link: Link::None }
    }

    /// A tensor that lies on a mesh, of which this rank has this part.
    pub(crate) fn laid(part: Part, layout: Layout) -> Self {
        Tensor { value: Value { part, layout: Some(layout) }, link: Link::None }
    }

    /// The same place in the graph, with another value for it: how a parameter is updated.
    pub(crate) fn with_value(&self, value: Value) -> Tensor {
        Tensor { value, link: self.link.clone() }
    }

    pub(crate) fn value(&self) -> &Value {
        &self.value
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Whether these hold one value, and not only equal ones.
    pub(crate) fn is_same(&self, other: &Tensor) -> bool {
        match (&self.value.part, &other.value.part) {
            (Part::Array(a), Part::Array(b)) => a.is_same(b),
            (Part::Meta(a), Part::Meta(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// What this rank has of the value, to be changed; none for a meta tensor. Others who hold the tensor do not see the change.
    pub(crate) fn part_mut(&mut self) -> Option<&mut Array> {
        match &mut self.value.part {
            Part::Array(local) => Some(local),
            Part::Meta(_) => None,
        }
    }

    /// How the tensor lies on a mesh, if it is distributed.
    pub fn layout(&self) -> Option<&Layout> {
        self.value.layout.as_ref()
    }

    /// The mesh that the tensor lies on, if it is distributed.
    pub fn mesh(&self) -> Option<&DeviceMesh> {
        self.layout().map(Layout::mesh)
    }

    /// The placements, one per dim of the mesh; none if the tensor is not distributed.
    pub fn placements(&self) -> &[Placement] {
        self.layout().map_or(&[], Layout::placements)
    }

    /// Whether the tensor lies on a mesh.
    pub fn is_distributed(&self) -> bool {
        self.value.layout.is_some()
    }

    /// The size of each dim.
    pub fn dims(&self) -> &[usize] {
        match &self.value.layout {
            None => self.value.part.dims(),
            Some(layout) => layout.shape(),
        }
    }

    /// The size of each dim, as a value of its own.
    pub fn shape(&self) -> Shape {
        Shape::from(self.dims())
    }

    /// The number of dims.
    pub fn rank(&self) -> usize {
        self.dims().len()
    }

    /// The size of one dim.
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
            .ok_or_else(|| Error::argument("size", "a tensor without dims has no size of one"))
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match &self.value.part {
            Part::Array(local) => local.dtype(),
            Part::Meta(meta) => meta.dtype,
        }
    }

    /// Where the value lives.
    pub fn device(&self) -> Device {
        match &self.value.part {
            Part::Array(_) => Device::Cpu,
            Part::Meta(meta) => meta.device,
        }
    }

    /// Whether this tensor has shape and dtype only.
    pub fn is_meta(&self) -> bool {
        self.device() == Device::Meta
    }

    /// Shape, dtype and device together.
    pub fn meta(&self) -> Meta {
        self.value.meta()
    }

    /// Whether the elements, those on this rank if it is distributed, lie row by row without gaps. Meta tensors count as
    /// such.
    pub fn is_contiguous(&self) -> bool {
        match &self.value.part {
            Part::Array(local) => local.is_contiguous(),
            Part::Meta(_) => true,
        }
    }

    #[track_caller]
    pub(crate) fn dim(&self, op: &'static str, dim: impl Into<Dim>) -> Result<usize> {
        let at = Location::caller();
        dim.into().resolve(op, self.rank()).map_err(|error| locate(error, &[self], at))
    }

    /// Whether operators on this tensor are recorded for [`backward`](Tensor::backward).
    pub fn requires_grad(&self) -> bool {
        !matches!(self.link, Link::None)
    }

    /// Whether this tensor is not the result of a recorded operator. Only leaves keep a gradient.
    pub fn is_leaf(&self) -> bool {
        !matches!(self.link, Link::Node(..))
    }

    /// A leaf with the same value, whose gradient is computed (or not) from here on. The gradient collects in the
    /// returned tensor and its clones. On the result of a recorded operator, `true` changes nothing and `false`
    /// is an error: [`detach`](Tensor::detach) is what cuts it off.
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

    /// The same value without history: nothing done with it reaches this tensor's gradient.
    pub fn detach(&self) -> Tensor {
        Tensor { value: self.value.clone(), link: Link::None }
    }

    /// The gradient collected so far, if this is a leaf that has one.
    pub fn grad(&self) -> Option<Tensor> {
        match &self.link {
            Link::Leaf(leaf) => leaf.grad.lock().clone(),
            _ => None,
        }
    }

    /// Forgets the gradient collected so far.
    pub fn zero_grad(&self) {
        if let Link::Leaf(leaf) = &self.link {
            *leaf.grad.lock() = None;
        }
    }

    /// Replaces the gradient collected so far, which must be of this leaf's shape, dtype and layout.
    pub fn set_grad(&self, grad: Option<Tensor>) -> Result<()> {
        const OP: &str = "set_grad";
        let Link::Leaf(leaf) = &self.link else {
            return Err(Error::Argument {
                op: OP,
                message: "only a leaf that requires grad keeps a gradient".into(),
            });
        };
        if let Some(grad) = &grad {
            self.expect_like(OP, "the gradient must have the tensor's shape", grad)?;
        }
        *leaf.grad.lock() = grad;
        Ok(())
    }

    /// Changes the gradient collected so far, if there is one. How it was computed is forgotten.
    pub(crate) fn change_grad(&self, change: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let Link::Leaf(leaf) = &self.link else { return Ok(()) };
        match &mut *leaf.grad.lock() {
            Some(grad) => {
                grad.link = Link::None;
                change(grad)
            }
            None => Ok(()),
        }
    }
}
