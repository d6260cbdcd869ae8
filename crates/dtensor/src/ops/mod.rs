//! The operators. Each is one small value that says its shape rule, its kernel and its gradient.
//!
//! To add one: a struct with the operator's attributes, an implementation of [`Op`], and a method on
//! [`Tensor`](crate::Tensor) that calls [`apply`](crate::apply). Gradient rules use public operators only.

mod arithmetic;
mod attention;
mod compare;
mod dropout;
mod index;
mod join;
mod loss;
mod mask;
mod matmul;
mod normalise;
mod overload;
mod reduce;
mod scalar;
mod softmax;
mod sort;
mod unary;
mod view;

use std::fmt::Debug;

use smallvec::SmallVec;

pub use attention::Attention;
pub use loss::{CrossEntropy, Reduction};
pub use unary::Gelu;

use crate::autograd::{Backward, Grads, Saves};
use crate::engine::Local;
use crate::tensor::{DType, Meta, Shape};
use crate::{Error, Result};

/// What is known of an operator's outputs before it runs.
pub type Metas = SmallVec<[Meta; 1]>;

/// The values of an operator's outputs.
pub type Locals = SmallVec<[Local; 1]>;

/// An operator: a value that holds its attributes and says everything the system needs to know of it.
pub trait Op: Debug + Send + Sync + 'static {
    /// The name in messages and traces.
    fn name(&self) -> &'static str;

    /// Shape and dtype of the outputs, or why the inputs cannot be used. What can be checked without looking at values is
    /// checked here: the kernel trusts it.
    fn shape(&self, x: &[Meta]) -> Result<Metas>;

    /// The values of the outputs on this rank. `out` is what [`shape`](Op::shape) says of this rank's part.
    fn kernel(&self, x: &[&Local], out: &[Meta]) -> Result<Locals>;

    /// What [`gradient`](Op::gradient) reads.
    fn saves(&self) -> Saves {
        Saves::NOTHING
    }

    /// Whether the outputs depend smoothly on the inputs. If not, they never require a gradient.
    fn differentiable(&self) -> bool {
        true
    }

    /// The gradients of the inputs from those of the outputs, written with public tensor operators.
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let _ = cx;
        Err(Error::Autograd { op: self.name(), message: "this operator has no gradient rule".into() })
    }
}

/// The gradients of an operator's inputs, as [`Grads`].
macro_rules! grads {
    ($($grad:expr),* $(,)?) => {
        smallvec::smallvec![$($grad),*]
    };
}
use grads;

/// The one output of most operators.
fn one<T, A: smallvec::Array<Item = T>>(x: T) -> SmallVec<A> {
    let mut out = SmallVec::new();
    out.push(x);
    out
}

/// A float attribute of an operator, compared and hashed by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Bits(u64);

impl Bits {
    pub(crate) fn new(x: f64) -> Self {
        Bits(x.to_bits())
    }
    pub(crate) fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// The meta of a result that is like `x` but for its shape.
fn reshaped(x: &Meta, shape: Shape) -> Meta {
    Meta { shape, ..x.clone() }
}

/// The dtype all operands share.
fn same_dtype(op: &'static str, x: &[Meta]) -> Result<DType> {
    for other in &x[1..] {
        if other.dtype != x[0].dtype {
            return Err(Error::DTypeMismatch { op, left: x[0].dtype, right: other.dtype });
        }
    }
    Ok(x[0].dtype)
}

/// The dtype in which an operator keeps sums for its gradient: single precision for the half-precision types.
fn statistics_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// What the gradient of a fused gradient kernel says.
fn no_second(op: &'static str) -> Result<Grads> {
    let message = "the gradient of this operator is one fused kernel, which has no gradient of its own";
    Err(Error::Autograd { op, message: message.into() })
}

fn need_float(op: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        Ok(())
    } else {
        Err(Error::DType { op, dtype, why: "it needs a floating-point dtype" })
    }
}

fn need_dtype(op: &'static str, what: &str, meta: &Meta, dtype: DType) -> Result<()> {
    if meta.dtype == dtype {
        Ok(())
    } else {
        Err(Error::argument(op, format!("{what} must be of dtype {dtype}, not {}", meta.dtype)))
    }
}

fn need_rank(op: &'static str, what: &str, meta: &Meta, rank: usize) -> Result<()> {
    if meta.shape.rank() == rank {
        Ok(())
    } else {
        Err(Error::argument(op, format!("{what} must have {rank} dims, but its shape is {}", meta.shape)))
    }
}
