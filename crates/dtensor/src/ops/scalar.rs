//! Element-wise operators with scalar attributes: `x · a + b`, powers and clamps.

use super::{Arrays, Aside, Bits, Here, Metas, Op, grads, one, same_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::scalar as kernel;
use dtensor_array::{Meta, Scalar};
use dtensor_layout::Rule;

/// `x · mul + add`. Sharding depends on `slope` and `linear` only, so the two numbers are `Aside`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Affine {
    op: &'static str,
    mul: Aside<f64>,
    add: Aside<f64>,
    /// 1 if the result increases with x, −1 if it decreases, 0 if neither.
    slope: i8,
    /// True if `add` is 0.
    linear: bool,
}

impl Affine {
    fn new(op: &'static str, mul: f64, add: f64) -> Self {
        let slope = match (mul.is_finite() && add.is_finite(), mul) {
            (true, mul) if mul > 0.0 => 1,
            (true, mul) if mul < 0.0 => -1,
            _ => 0,
        };
        Affine { op, mul: Aside(mul), add: Aside(add), slope, linear: add == 0.0 }
    }
}

impl Op for Affine {
    fn name(&self) -> &'static str {
        self.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        use ReduceOp::{Avg, Max, Min, Sum};
        let rule = Rule::pointwise(x, out)?.passing(&[Avg], &[0])?;
        let rule = if self.linear { rule.passing(&[Sum], &[0])? } else { rule };
        // Integers wrap, so the order of elements may change.
        match self.slope {
            _ if x[0].dtype.is_int() => Ok(rule),
            1 => rule.passing(&[Max, Min], &[0]),
            -1 => rule.mapping(&[(Max, Min), (Min, Max)], &[0]),
            _ => Ok(rule),
        }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::affine(x[0], self.mul.0, self.add.0)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        Ok(grads![Some(if self.mul.0 == 1.0 { dy } else { dy.mul(self.mul.0)? })])
    }
}

/// `x` to the power of a scalar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PowScalar(Bits);

impl Op for PowScalar {
    fn name(&self) -> &'static str {
        "pow"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let e = self.0.get();
        if x[0].dtype.is_int() && (e < 0.0 || e.fract() != 0.0) {
            let why = format!(
                "an integer tensor to the power {e} is not an integer tensor: cast it to a float dtype first"
            );
            return Err(Error::argument("pow", why));
        }
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::pow_scalar(x[0], self.0.get())?))
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (x, dy, e) = (cx.input(0)?, cx.dy()?, self.0.get());
        // x⁰ is constant, but e · xᵉ⁻¹ would be 0 · ∞ at 0.
        let dx = if e == 0.0 { x.zeros_like()? } else { dy.mul(&x.pow(e - 1.0)?.mul(e)?)? };
        Ok(grads![Some(dx)])
    }
}

/// Clamp of each element to two optional bounds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Clamp {
    lo: Aside<Option<f64>>,
    hi: Aside<Option<f64>>,
}

impl Clamp {
    fn bounds(&self) -> (Option<f64>, Option<f64>) {
        (self.lo.0, self.hi.0)
    }
}

impl Op for Clamp {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)?.passing(&[ReduceOp::Max, ReduceOp::Min], &[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let (lo, hi) = self.bounds();
        Ok(one(kernel::clamp(x[0], lo, hi)?))
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dx = apply(ClampGrad(self.clone()), &[&cx.input(0)?, &cx.dy()?])?;
        Ok(grads![Some(dx)])
    }
}

/// The gradient of clamp: passes strictly between the bounds, else zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClampGrad(Clamp);

impl Op for ClampGrad {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        same_dtype(self.name(), x)?;
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let (lo, hi) = self.0.bounds();
        Ok(one(kernel::clamp_grad(x[0], lo, hi, x[1])?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[0])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let x = cx.input(0)?;
        Ok(grads![
            cx.when(0, || x.zeros_like())?,
            cx.when(1, || apply(ClampGrad(self.0.clone()), &[&x, &cx.dy()?]))?,
        ])
    }
}

impl Tensor {
    /// Computes `self · mul + add` in one pass, recorded under the name `op`.
    #[track_caller]
    pub(super) fn affine(&self, op: &'static str, mul: Scalar, add: Scalar) -> Result<Tensor> {
        let mul = mul.for_arithmetic(op, self.dtype())?;
        let add = add.for_arithmetic(op, self.dtype())?;
        apply(Affine::new(op, mul, add), &[self])
    }

    #[track_caller]
    pub(super) fn pow_scalar(&self, exponent: Scalar) -> Result<Tensor> {
        apply(PowScalar(Bits::new(exponent.as_f64())), &[self])
    }

    /// Clamps each element to `lo..=hi`. NaN stays NaN. The gradient at a bound is 0, as for `relu` at 0.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[-2f32, 0.5, 2.], [3])?;
    /// assert_eq!(x.clamp(-1.0, 1.0)?.to_vec::<f32>()?, [-1., 0.5, 1.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn clamp(&self, lo: impl Into<Scalar>, hi: impl Into<Scalar>) -> Result<Tensor> {
        self.clamp_to(Some(lo.into()), Some(hi.into()))
    }

    /// Clamps each element to at least `lo`. NaN stays NaN.
    #[track_caller]
    pub fn clamp_min(&self, lo: impl Into<Scalar>) -> Result<Tensor> {
        self.clamp_to(Some(lo.into()), None)
    }

    /// Clamps each element to at most `hi`. NaN stays NaN.
    #[track_caller]
    pub fn clamp_max(&self, hi: impl Into<Scalar>) -> Result<Tensor> {
        self.clamp_to(None, Some(hi.into()))
    }

    #[track_caller]
    fn clamp_to(&self, lo: Option<Scalar>, hi: Option<Scalar>) -> Result<Tensor> {
        if [lo, hi].into_iter().flatten().any(|bound| bound.exceeds_f64(self.dtype())) {
            let raised = if let Some(lo) = lo { self.maximum(lo)? } else { self.clone() };
            return if let Some(hi) = hi { raised.minimum(hi) } else { Ok(raised) };
        }
        let bound = |b: Option<Scalar>| b.map(|s| s.for_dtype("clamp", self.dtype())).transpose();
        apply(Clamp { lo: Aside(bound(lo)?), hi: Aside(bound(hi)?) }, &[self])
    }
}
