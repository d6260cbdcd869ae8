//! The operators. Each is one small value that says its shape rule, its sharding rule, its kernel and its gradient.
//!
//! To add one: a struct with the operator's attributes, an implementation of [`Op`], and a method on
//! [`Tensor`](crate::Tensor) that calls [`apply`](crate::apply). Gradient rules use public operators only.

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
mod together;
mod unary;
mod view;
mod write;

use smallvec::SmallVec;

pub use attention::Attention;
pub use conv::{Convolution, Padding};
pub(crate) use dropout::probability;
pub use here::Here;
pub(crate) use index::padding_row;
pub use loss::{CrossEntropy, Reduction};
pub use loss_parallel::loss_parallel;
pub use quantile::{Interpolation, Quantiles};
pub(crate) use together::ROUNDS;
pub use together::Together;
pub use unary::Gelu;

use crate::autograd::{Backward, Grads, Saves};
use crate::{Error, Result};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::{Attributes, Rule};

/// What is known of an operator's outputs before it runs.
pub type Metas = SmallVec<[Meta; 1]>;

/// The values of an operator's outputs.
pub type Arrays = SmallVec<[Array; 1]>;

/// An operator: a value that holds its attributes and says everything the system needs to know of it. It derives `Clone`,
/// `Debug`, `PartialEq`, `Eq` and `Hash`: equal operators on tensors that lie alike are run alike.
pub trait Op: Attributes {
    /// The name in messages and traces.
    fn name(&self) -> &'static str;

    /// Shape and dtype of the outputs, or why the inputs cannot be used. What can be checked without looking at values is
    /// checked here: the kernel trusts it.
    fn shape(&self, x: &[Meta]) -> Result<Metas>;

    /// On which parts of the inputs it can be run, and what it makes of them. Asked with the metas of the whole tensors.
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule>;

    /// The values of the outputs on this rank, from this rank's parts of the inputs.
    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays>;

    /// In the place of [`kernel`](Op::kernel) where a [merging](Rule::merging) factor is cut: the next thing that ranks do
    /// together, or this rank's parts of the outputs. It is asked again and again, with what is known so far.
    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        let _ = (x, known, here);
        Err(Error::argument(
            self.name(),
            "this operator has a merging rule, but does not say what ranks do together",
        ))
    }

    /// What it is run in inside an [`autocast`](crate::autocast) scope.
    fn precision(&self) -> Precision {
        Precision::AsGiven
    }

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
        Err(Error::Argument { op: self.name(), message: "this operator has no gradient rule".into() })
    }
}

/// What an operator is run in inside an [`autocast`](crate::autocast) scope. One that says nothing gets its inputs as they are.
/// Inputs of integers are left alone always.
///
/// ```
/// use dtensor::{DType, Here, Array, Arrays, Meta, Metas, Op, Precision, Result, Rule, Tensor, apply, autocast};
///
/// /// Each element times 10³⁰, which is too much for half precision.
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
///         Ok([x[0].clone()].into_iter().collect())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::pointwise(x, out)?.linear(&[0])
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         let values = x[0].copy_to_host::<f32>()?.into_iter().map(|v| 1e30 * v).collect();
///         Ok([Array::from_vec(values, x[0].dims())?].into_iter().collect())
///     }
/// }
///
/// /// The first of two inputs, which may be of different dtypes.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct First;
///
/// impl Op for First {
///     fn name(&self) -> &'static str {
///         "first"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into_iter().collect())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::pointwise(x, out)
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         Ok([x[0].clone()].into_iter().collect())
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
    /// In the dtypes that the inputs have.
    #[default]
    AsGiven,
    /// In the half precision of the scope. Inputs of double precision stay as they are.
    Low,
    /// In single precision, even if the inputs are of half precision. Those of double precision stay as they are.
    Single,
    /// In the widest dtype of the inputs. Those without dims follow the others, and count only where none has dims.
    Widest,
}

/// The gradients of an operator's inputs, as [`Grads`].
macro_rules! grads {
    ($($grad:expr),* $(,)?) => {
        smallvec::smallvec![$($grad),*]
    };
}
use grads;

/// The reductions that choosing some elements, or setting zeros among them, leaves alone.
const SELECTING: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min];

/// The reductions that looking at the same elements in another way leaves alone.
const ANY: [ReduceOp; 5] = ReduceOp::ALL;

/// The one output of most operators.
fn one<T, A: smallvec::Array<Item = T>>(x: T) -> SmallVec<A> {
    let mut out = SmallVec::new();
    out.push(x);
    out
}

/// An attribute that makes no difference to how an operator is run on parts: all are equal. A seed is one.
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

/// A float attribute of an operator, compared and hashed by its bits.
///
/// ```
/// use dtensor::Bits;
/// assert_eq!(Bits::new(0.5).get(), 0.5);
/// assert_ne!(Bits::new(0.0), Bits::new(-0.0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bits(u64);

impl Bits {
    /// Of a number.
    pub fn new(x: f64) -> Self {
        Bits(x.to_bits())
    }

    /// The number.
    pub fn get(self) -> f64 {
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

fn need_rank(op: &'static str, what: &str, meta: &Meta, rank: usize) -> Result<()> {
    if meta.shape.rank() == rank {
        Ok(())
    } else {
        Err(Error::argument(op, format!("{what} must have {rank} dims, but its shape is {}", meta.shape)))
    }
}
