//! [`Tensor`]: a value with a shape, a dtype and, where a gradient is wanted, a place in the graph.

mod construct;
mod display;
mod dtype;
mod operand;
mod read;
mod shape;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(crate) use construct::{checked_new, checked_numel};
pub use dtype::{DType, Device, Element};
pub use operand::{Operand, Scalar};
pub(crate) use shape::DimList;
pub use shape::{Dim, Dims, INFER, NewShape, Shape};

use crate::autograd::{Leaf, Link};
use crate::engine::Local;
use crate::{Error, Result};

/// What is known of a tensor without its value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Meta {
    /// The size of each dim.
    pub shape: Shape,
    /// The element type.
    pub dtype: DType,
    /// Where the value lives.
    pub device: Device,
}

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

/// A tensor's value, or the lack of one.
#[derive(Clone)]
pub(crate) enum Value {
    Local(Local),
    Meta(Arc<Meta>),
}

impl Value {
    pub(crate) fn meta(&self) -> Meta {
        match self {
            Value::Local(local) => local.meta(),
            Value::Meta(meta) => Meta::clone(meta),
        }
    }
}

impl Tensor {
    pub(crate) fn new(value: Value, link: Link) -> Self {
        Tensor { value, link }
    }

    /// A tensor with this rank's value, and no history.
    pub(crate) fn from_local_value(local: Local) -> Self {
        Tensor { value: Value::Local(local), link: Link::None }
    }

    pub(crate) fn value(&self) -> &Value {
        &self.value
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// The value on this rank; an error for a meta tensor.
    pub(crate) fn local(&self, op: &'static str) -> Result<&Local> {
        match &self.value {
            Value::Local(local) => Ok(local),
            Value::Meta(_) => Err(Error::NoValue { op }),
        }
    }

    /// The size of each dim.
    pub fn dims(&self) -> &[usize] {
        match &self.value {
            Value::Local(local) => local.dims(),
            Value::Meta(meta) => &meta.shape,
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
        match &self.value {
            Value::Local(local) => local.dtype(),
            Value::Meta(meta) => meta.dtype,
        }
    }

    /// Where the value lives.
    pub fn device(&self) -> Device {
        match &self.value {
            Value::Local(_) => Device::Cpu,
            Value::Meta(meta) => meta.device,
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

    /// Whether the elements lie row by row without gaps. Meta tensors count as such.
    pub fn is_contiguous(&self) -> bool {
        match &self.value {
            Value::Local(local) => local.is_contiguous(),
            Value::Meta(_) => true,
        }
    }

    pub(crate) fn dim(&self, op: &'static str, dim: impl Into<Dim>) -> Result<usize> {
        dim.into().resolve(op, self.rank())
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
            (Link::Node(..), false) => Err(Error::Autograd {
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
                Ok(Tensor { value: self.value.clone(), link: Link::Leaf(Arc::new(Leaf::default())) })
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

    /// Replaces the gradient collected so far, which must be of this leaf's shape and dtype.
    pub fn set_grad(&self, grad: Option<Tensor>) -> Result<()> {
        const OP: &str = "set_grad";
        let Link::Leaf(leaf) = &self.link else {
            return Err(Error::Autograd {
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

    /// The same place in the graph with another value of the same shape and dtype: how a parameter is updated.
    pub(crate) fn with_value_of(&self, other: &Tensor) -> Tensor {
        Tensor { value: other.value.clone(), link: self.link.clone() }
    }
}
