//! Binary element-wise operators, with NumPy's broadcasting.

use super::{Arrays, Here, Metas, Op, Precision, grads, need_float, one, same_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::tensor::Operand;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::binary::{self, Binary};
use dtensor_array::{Meta, Scalar, Shape};
use dtensor_layout::Rule;

/// A binary element-wise operator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Arithmetic(Binary);

impl Op for Arithmetic {
    fn name(&self) -> &'static str {
        match self.0 {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Pow => "pow",
            Binary::Maximum => "maximum",
            Binary::Minimum => "minimum",
        }
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let dtype = same_dtype(self.name(), x)?;
        if self.0 == Binary::Div {
            need_float(self.name(), dtype)?;
        }
        Ok(one(Meta { shape: x[0].shape.broadcast(self.name(), &x[1].shape)?, dtype, device: x[0].device }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        // `add` does not pass `Max` and `Min`: max(a) + b = max(a + b) fails if ∞ meets −∞ or integers wrap.
        use ReduceOp::{Avg, Max, Min};
        let rule = Rule::pointwise(x, out)?;
        match self.0 {
            Binary::Add | Binary::Sub => rule.linear(&[0, 1])?.passing(&[Avg], &[0])?.passing(&[Avg], &[1]),
            Binary::Mul => rule.linear(&[0])?.linear(&[1]),
            Binary::Div => rule.linear(&[0]),
            Binary::Pow => Ok(rule),
            Binary::Maximum => rule.passing(&[Max], &[0, 1])?.passing(&[Min], &[0])?.passing(&[Min], &[1]),
            Binary::Minimum => rule.passing(&[Min], &[0, 1])?.passing(&[Max], &[0])?.passing(&[Max], &[1]),
        }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(binary::binary(self.0, x[0], x[1])?))
    }

    fn saves(&self) -> Saves {
        match self.0 {
            Binary::Add | Binary::Sub => Saves::NOTHING,
            Binary::Pow => Saves::ALL,
            _ => Saves::INPUTS,
        }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let a = || cx.input(0);
        let b = || cx.input(1);
        // Ties share the gradient; otherwise the selected input gets all of it.
        let share = |not_selected: Tensor| {
            a()?.eq(&b()?)?.where_(&dy.mul(0.5)?, &dy)?.masked_fill(&not_selected, 0.0)
        };
        let (da, db) = match self.0 {
            Binary::Add => {
                (cx.when_broadcast(0, || Ok(dy.clone()))?, cx.when_broadcast(1, || Ok(dy.clone()))?)
            }
            Binary::Sub => (cx.when_broadcast(0, || Ok(dy.clone()))?, cx.when_broadcast(1, || dy.neg())?),
            Binary::Mul => (cx.when_broadcast(0, || dy.mul(&b()?))?, cx.when_broadcast(1, || dy.mul(&a()?))?),
            Binary::Div => (
                cx.when_broadcast(0, || dy.div(&b()?))?,
                cx.when_broadcast(1, || dy.neg()?.mul(&a()?.div(&b()?)?.div(&b()?)?))?,
            ),
            Binary::Pow => (
                cx.when_broadcast(0, || {
                    let (a, b) = (a()?, b()?);
                    dy.mul(&b.mul(&a.pow(&b.sub(1.0)?)?)?)?.masked_fill(&b.eq(0.0)?, 0.0)
                })?,
                cx.when_broadcast(1, || {
                    // 0 to a power ≥ 0 has gradient 0 in the exponent, although ln 0 is infinite.
                    let (a, b) = (a()?, b()?);
                    let flat = a.eq(0.0)?.mul(&b.ge(0.0)?)?;
                    dy.mul(&cx.output(0)?.mul(&a.log()?)?)?.masked_fill(&flat, 0.0)
                })?,
            ),
            Binary::Maximum => (
                cx.when_broadcast(0, || share(a()?.lt(&b()?)?))?,
                cx.when_broadcast(1, || share(a()?.gt(&b()?)?))?,
            ),
            Binary::Minimum => (
                cx.when_broadcast(0, || share(a()?.gt(&b()?)?))?,
                cx.when_broadcast(1, || share(a()?.lt(&b()?)?))?,
            ),
        };
        Ok(grads![da, db])
    }
}

impl Tensor {
    /// Creates a scalar tensor of this tensor's dtype and device, the other operand of an operator.
    #[track_caller]
    pub(crate) fn scalar_like(&self, op: &'static str, scalar: Scalar) -> Result<Tensor> {
        scalar.for_dtype(op, self.dtype())?;
        let meta = Meta { shape: Shape::scalar(), dtype: self.dtype(), device: self.device() };
        Tensor::full_of(&meta, scalar)
    }

    #[track_caller]
    fn arithmetic(&self, f: Binary, other: Operand<'_>) -> Result<Tensor> {
        match other {
            Operand::Tensor(other) => apply(Arithmetic(f), &[self, other]),
            Operand::Scalar(scalar) => {
                let op = Arithmetic(f);
                let other = self.scalar_like(op.name(), scalar)?;
                apply(op, &[self, &other])
            }
        }
    }

    /// Adds a tensor or a number, with broadcasting.
    ///
    /// ```
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2.], [2, 1])?;
    /// let y = Tensor::from_slice(&[10f32, 20., 30.], [3])?;
    /// assert_eq!(x.add(&y)?.to_vec2::<f32>()?, [[11., 21., 31.], [12., 22., 32.]]);
    /// assert_eq!(x.add(0.5)?.to_vec::<f32>()?, [1.5, 2.5]);
    /// assert!(x.add(&Tensor::zeros([4, 4, 3], DType::F64)?).is_err());
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn add<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
        match other.into() {
            Operand::Scalar(s) if !s.exceeds_f64(self.dtype()) => self.affine("add", Scalar::Int(1), s),
            other => self.arithmetic(Binary::Add, other),
        }
    }

    /// Subtracts a tensor or a number, with broadcasting.
    #[track_caller]
    pub fn sub<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
        match other.into() {
            Operand::Scalar(Scalar::Float(s)) => self.affine("sub", Scalar::Int(1), Scalar::Float(-s)),
            Operand::Scalar(Scalar::Int(s)) if !Scalar::Int(s).exceeds_f64(self.dtype()) => {
                self.affine("sub", Scalar::Int(1), Scalar::Int(s.wrapping_neg()))
            }
            other => self.arithmetic(Binary::Sub, other),
        }
    }

    /// Multiplies by a tensor or a number, with broadcasting.
    #[track_caller]
    pub fn mul<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
        match other.into() {
            Operand::Scalar(s) if !s.exceeds_f64(self.dtype()) => self.affine("mul", s, Scalar::Int(0)),
            other => self.arithmetic(Binary::Mul, other),
        }
    }

    /// Divides by a tensor or a number, with broadcasting. Returns an error for integer dtypes: cast first.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[1f32, 3.], [2])?.div(2.0)?.to_vec::<f32>()?, [0.5, 1.5]);
    /// assert!(Tensor::from_slice(&[1i64, 3], [2])?.div(2).is_err());
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn div<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
        self.arithmetic(Binary::Div, other.into())
    }

    /// Computes a number minus this tensor.
    #[track_caller]
    pub fn rsub(&self, scalar: impl Into<Scalar>) -> Result<Tensor> {
        let scalar = scalar.into();
        if scalar.exceeds_f64(self.dtype()) {
            return self.scalar_like("rsub", scalar)?.sub(self);
        }
        self.affine("rsub", Scalar::Int(-1), scalar)
    }

    /// Computes a number divided by this tensor.
    #[track_caller]
    pub fn rdiv(&self, scalar: impl Into<Scalar>) -> Result<Tensor> {
        self.scalar_like("rdiv", scalar.into())?.div(self)
    }

    /// Raises each element to the power of a tensor or a number, with broadcasting.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[2f32, 3.], [2])?.pow(2.0)?.to_vec::<f32>()?, [4., 9.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn pow<'a>(&self, exponent: impl Into<Operand<'a>>) -> Result<Tensor> {
        match exponent.into() {
            Operand::Scalar(e) => self.pow_scalar(e),
            tensor => self.arithmetic(Binary::Pow, tensor),
        }
    }

    /// Computes a number to the power of this tensor.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[0f32, 3.], [2])?.rpow(2.0)?.to_vec::<f32>()?, [1., 8.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn rpow(&self, base: impl Into<Scalar>) -> Result<Tensor> {
        self.scalar_like("rpow", base.into())?.pow(self)
    }

    /// Returns the element-wise maximum with a tensor or a number. NaN propagates; ties share the gradient.
    #[track_caller]
    pub fn maximum<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
        self.arithmetic(Binary::Maximum, other.into())
    }

    /// Returns the element-wise minimum with a tensor or a number. NaN propagates; ties share the gradient.
    #[track_caller]
    pub fn minimum<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
        self.arithmetic(Binary::Minimum, other.into())
    }

    /// Sums over the dims along which `shape` was broadcast to this tensor's shape: the gradient of
    /// [`expand`](Tensor::expand).
    #[track_caller]
    pub fn sum_to(&self, shape: &Shape) -> Result<Tensor> {
        if self.dims() == &shape[..] {
            return Ok(self.clone());
        }
        if !shape.broadcasts_to(&self.shape()) {
            return Err(Error::ShapeMismatch {
                op: "sum_to",
                why: "the first shape cannot be reduced to the second",
                left: self.shape(),
                right: shape.clone(),
            });
        }
        let lead = self.ndim() - shape.ndim();
        let dims: Vec<usize> =
            (0..self.ndim()).filter(|&d| d < lead || (shape[d - lead] == 1 && self.dims()[d] != 1)).collect();
        self.sum_keepdim(&dims[..])?.reshape(shape)
    }
}
