//! The operators. Each is one small struct that implements [`Op`]: shape rule, sharding rule, kernel and gradient.
//!
//! To add an operator: write a struct with its attributes, implement [`Op`] for it, and add a method to
//! [`Tensor`](crate::Tensor) that calls [`apply`](crate::op::apply). Gradient rules use public operators only.

mod arithmetic;
mod attention;
mod bernoulli;
mod compare;
mod conv;
mod dropout;
mod dynamic;
mod extremum;
mod here;
mod index;
mod join;
mod loss;
mod loss_parallel;
mod mask;
mod matmul;
mod normalise;
mod overload;
mod quantile;
mod reduce;
mod scalar;
mod scan;
mod slice;
mod softmax;
mod sort;
mod ternary;
mod together;
mod unary;
mod view;
mod write;

use smallvec::SmallVec;

pub use attention::AttentionOptions;
pub use conv::{ConvOptions, Padding};
pub(crate) use dropout::probability;
pub use here::Here;
pub(crate) use index::padding_row;
pub use loss::{CrossEntropyOptions, Reduction};
pub use loss_parallel::loss_parallel;
pub use quantile::{Interpolation, QuantileOptions};
pub(crate) use together::ROUNDS;
pub use together::Together;
pub use unary::Gelu;

use crate::autograd::{Backward, Grads, Saves};
use crate::{Error, Result};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::{Attributes, Rule};

/// Shapes, dtypes and devices of an operator's outputs, one [`Meta`] per output.
pub type Metas = SmallVec<[Meta; 1]>;

/// The local arrays of an operator's outputs, one per output.
pub type Arrays = SmallVec<[Array; 1]>;

/// An operator: a struct that holds its attributes, with a shape rule, a sharding rule, a kernel and a gradient.
///
/// Derive `Clone`, `Debug`, `PartialEq`, `Eq` and `Hash`: equal operators on inputs with equal layouts share one
/// cached sharding decision. [`apply`](crate::op::apply) runs an operator and has a complete example.
pub trait Op: Attributes {
    /// Returns the name used in error messages and traces.
    fn name(&self) -> &'static str;

    /// Returns the shape and dtype of each output, or an error if the inputs do not fit. Everything that can be
    /// checked without element values is checked here; the kernel relies on it.
    fn shape(&self, x: &[Meta]) -> Result<Metas>;

    /// Returns the sharding rule: on which shards of the inputs the operator can run, and the placements of its
    /// outputs. `x` and `out` are the metas of the full tensors.
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule>;

    /// Computes this rank's shards of the outputs from this rank's shards of the inputs.
    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays>;

    /// Replaces [`kernel`](Op::kernel) if a [merging](Rule::merging) factor is sharded: returns the next
    /// collective, or this rank's shards of the outputs. It is called repeatedly; `known` holds the results of the
    /// collectives so far.
    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        let _ = (x, known, here);
        Err(Error::argument(
            self.name(),
            "this operator has a merging rule, but does not implement `Op::together`",
        ))
    }

    /// Returns the precision used inside an [`autocast`](crate::autocast) scope.
    fn precision(&self) -> Precision {
        Precision::AsGiven
    }

    /// Returns which inputs and outputs are saved for [`gradient`](Op::gradient).
    fn saves(&self) -> Saves {
        Saves::NOTHING
    }

    /// Returns false if the operator has no gradient at all, such as a comparison. Its outputs then never require a
    /// gradient.
    fn differentiable(&self) -> bool {
        true
    }

    /// Returns true if [`gradient`](Op::gradient) takes the gradient of its output in any floating-point dtype. Operators before
    /// and after it in the backward pass then need no casts.
    #[doc(hidden)]
    fn takes_any_float(&self) -> bool {
        false
    }

    /// Returns true if [`gradient`](Op::gradient) can add the gradient that its first input has so far.
    #[doc(hidden)]
    fn adds_known(&self) -> bool {
        false
    }

    /// Computes the gradients of the inputs from those of the outputs, with public tensor operators.
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let _ = cx;
        Err(Error::Argument { op: self.name(), message: "this operator has no gradient rule".into() })
    }
}

/// The precision of an operator inside an [`autocast`](crate::autocast) scope. Integer inputs are never cast.
///
/// ```
/// use dtensor::{DType, Array, Result, Tensor, autocast};
/// use dtensor::op::{Here, Arrays, Meta, Metas, Op, Precision, Rule, apply};
///
/// /// Multiplies each element by 10³⁰, which overflows half precision.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct Huge;
///
/// impl Op for Huge {
///     fn name(&self) -> &'static str {
///         "huge"
///     }
///     fn precision(&self) -> Precision {
///         Precision::Single
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::pointwise(x, out)?.linear(&[0])
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         let values = x[0].with_host_slice(|x: &[f32]| x.iter().map(|v| 1e30 * v).collect())?;
///         Ok([Array::from_vec(values, x[0].dims())?].into())
///     }
/// }
///
/// /// Returns the first of two inputs, which may have different dtypes.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct First;
///
/// impl Op for First {
///     fn name(&self) -> &'static str {
///         "first"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::pointwise(x, out)
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         Ok([x[0].clone()].into())
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let x = Tensor::ones([2], DType::F16)?;
/// assert_eq!(autocast(DType::F16, || apply(Huge, &[&x]))?.to_vec::<f32>()?, [1e30, 1e30]);
/// let wide = Tensor::ones([2], DType::F32)?;
/// assert_eq!(autocast(DType::F16, || apply(First, &[&x, &wide]))?.dtype(), DType::F16);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Inputs keep their dtypes.
    #[default]
    AsGiven,
    /// Inputs are cast to the half-precision dtype of the scope, except `f64` inputs.
    Low,
    /// Half-precision inputs are cast to `f32`. `f64` inputs stay as they are.
    Single,
    /// All inputs are cast to the widest dtype among them, and to `f32` for `f16` with `bf16`. Scalars (0-d) follow
    /// the others and count only if all inputs are scalars.
    Widest,
}

/// Builds [`Grads`](crate::op::Grads) from a list of gradients, one `Option<Tensor>` per input.
#[macro_export]
macro_rules! grads {
    ($($grad:expr),* $(,)?) => {
        $crate::op::smallvec![$($grad),*]
    };
}
use grads;

/// The reductions that commute with selecting elements or filling some with zeros.
const SELECTING: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min];

/// The reductions that commute with views of the same elements: all of them.
const ANY: [ReduceOp; 5] = ReduceOp::ALL;

/// Wraps the only output of an operator in a list.
fn one<T, A: smallvec::Array<Item = T>>(x: T) -> SmallVec<A> {
    let mut out = SmallVec::new();
    out.push(x);
    out
}

/// An attribute that does not affect sharding, such as a seed. All values compare equal, so operators that differ
/// only in such attributes share one cached sharding decision.
#[derive(Clone, Copy, Debug)]
pub struct Aside<T>(pub T);

impl<T> PartialEq for Aside<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl<T> Eq for Aside<T> {}
impl<T> std::hash::Hash for Aside<T> {
    fn hash<H: std::hash::Hasher>(&self, _: &mut H) {}
}

/// An `f64` attribute of an operator, compared and hashed by its bits.
///
/// ```
/// use dtensor::op::Bits;
/// assert_eq!(Bits::new(0.5).get(), 0.5);
/// assert_ne!(Bits::new(0.0), Bits::new(-0.0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bits(u64);

impl Bits {
    /// Wraps a number.
    pub fn new(x: f64) -> Self {
        Bits(x.to_bits())
    }

    /// Returns the number.
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// Returns the meta of `x` with another shape.
fn reshaped(x: &Meta, shape: Shape) -> Meta {
    Meta { shape, ..x.clone() }
}

/// Returns the common dtype of all operands, or an error if they differ.
fn same_dtype(op: &'static str, x: &[Meta]) -> Result<DType> {
    for other in &x[1..] {
        if other.dtype != x[0].dtype {
            return Err(Error::DTypeMismatch { op, left: x[0].dtype, right: other.dtype });
        }
    }
    Ok(x[0].dtype)
}

/// Returns the dtype of statistics saved for backward: `f32` for half precision, else the input's.
fn statistics_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Returns the error of a fused gradient kernel that cannot be differentiated again.
fn no_second(op: &'static str) -> Result<Grads> {
    let message =
        "the gradient is one fused kernel, which cannot be differentiated again (no second derivative)";
    Err(Error::Argument { op, message: message.into() })
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

fn need_ndim(op: &'static str, what: &str, meta: &Meta, ndim: usize) -> Result<()> {
    if meta.shape.ndim() == ndim {
        Ok(())
    } else {
        Err(Error::argument(op, format!("{what} must have {ndim} dims, but its shape is {}", meta.shape)))
    }
}
