//! Functions of one element and some numbers.

use super::{Bits, Locals, Metas, Op, grads, one};
use crate::autograd::{Backward, Grads, Saves};
use crate::engine::Local;
use crate::engine::kernels::scalar as kernel;
use crate::tensor::{Meta, Scalar};
use crate::{Error, Result, Tensor, apply};

/// `x · mul + add`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Affine {
    op: &'static str,
    mul: Bits,
    add: Bits,
}

impl Op for Affine {
    fn name(&self) -> &'static str {
        self.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(x[0].clone()))
    }

    fn kernel(&self, x: &[&Local], _: &[Meta]) -> Result<Locals> {
        Ok(one(kernel::affine(x[0], self.mul.get(), self.add.get())?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        Ok(grads![Some(if self.mul.get() == 1.0 { dy } else { dy.mul(self.mul.get())? })])
    }
}

/// `x` to a fixed power.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PowScalar(Bits);

impl Op for PowScalar {
    fn name(&self) -> &'static str {
        "pow"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let e = self.0.get();
        if x[0].dtype.is_int() && (e < 0.0 || e.fract() != 0.0) {
            let why = format!("integers to the power {e} are not integers; cast the tensor first");
            return Err(Error::argument("pow", why));
        }
        Ok(one(x[0].clone()))
    }

    fn kernel(&self, x: &[&Local], _: &[Meta]) -> Result<Locals> {
        Ok(one(kernel::pow_scalar(x[0], self.0.get())?))
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (x, dy, e) = (cx.input(0)?, cx.dy()?, self.0.get());
        // x⁰ is constant, though e · xᵉ⁻¹ is 0 · ∞ where x is 0.
        let dx = if e == 0.0 { x.zeros_like()? } else { dy.mul(&x.pow(e - 1.0)?.mul(e)?)? };
        Ok(grads![Some(dx)])
    }
}

/// Each element brought between two bounds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Clamp {
    lo: Option<Bits>,
    hi: Option<Bits>,
}

impl Clamp {
    fn bounds(&self) -> (Option<f64>, Option<f64>) {
        (self.lo.map(Bits::get), self.hi.map(Bits::get))
    }
}

impl Op for Clamp {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(x[0].clone()))
    }

    fn kernel(&self, x: &[&Local], _: &[Meta]) -> Result<Locals> {
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

/// The gradient strictly between the bounds, else zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClampGrad(Clamp);

impl Op for ClampGrad {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(x[0].clone()))
    }

    fn kernel(&self, x: &[&Local], _: &[Meta]) -> Result<Locals> {
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
    /// `self · mul + add` in one pass, under the name of the operator that asks for it.
    pub(super) fn affine(&self, op: &'static str, mul: Scalar, add: Scalar) -> Result<Tensor> {
        let mul = Bits::new(mul.for_arithmetic(op, self.dtype())?);
        let add = Bits::new(add.for_arithmetic(op, self.dtype())?);
        apply(Affine { op, mul, add }, &[self])
    }

    pub(super) fn pow_scalar(&self, exponent: Scalar) -> Result<Tensor> {
        apply(PowScalar(Bits::new(exponent.as_f64())), &[self])
    }

    /// Each element, but at least `lo` and at most `hi`. NaN stays. The gradient at a bound is 0, as `relu`'s is.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[-2f32, 0.5, 2.], [3])?;
    /// assert_eq!(x.clamp(-1.0, 1.0)?.to_vec::<f32>()?, [-1., 0.5, 1.]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn clamp(&self, lo: impl Into<Scalar>, hi: impl Into<Scalar>) -> Result<Tensor> {
        self.clamped(Some(lo.into()), Some(hi.into()))
    }

    /// Each element, but at least `lo`. NaN stays.
    pub fn clamp_min(&self, lo: impl Into<Scalar>) -> Result<Tensor> {
        self.clamped(Some(lo.into()), None)
    }

    /// Each element, but at most `hi`. NaN stays.
    pub fn clamp_max(&self, hi: impl Into<Scalar>) -> Result<Tensor> {
        self.clamped(None, Some(hi.into()))
    }

    fn clamped(&self, lo: Option<Scalar>, hi: Option<Scalar>) -> Result<Tensor> {
        if [lo, hi].into_iter().flatten().any(|bound| bound.exceeds_f64(self.dtype())) {
            let raised = lo.map_or_else(|| Ok(self.clone()), |lo| self.maximum(lo))?;
            return hi.map_or_else(|| Ok(raised.clone()), |hi| raised.minimum(hi));
        }
        let bound =
            |b: Option<Scalar>| b.map(|s| s.for_dtype("clamp", self.dtype()).map(Bits::new)).transpose();
        apply(Clamp { lo: bound(lo)?, hi: bound(hi)? }, &[self])
    }
}
