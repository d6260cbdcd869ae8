//! Unary element-wise operators: `exp`, `relu`, `gelu` and others.

use std::f64::consts::PI;

use super::{Arrays, Here, Metas, Op, grads, need_float, one, same_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::unary::{self, TANH_CUBE, TANH_SCALE, Unary};
use dtensor_layout::Rule;

/// A unary element-wise operator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Map(Unary);

impl Op for Map {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        if !matches!(self.0, Unary::Neg | Unary::Abs | Unary::Sign | Unary::Relu) {
            need_float(self.name(), x[0].dtype)?;
        }
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = Rule::pointwise(x, out)?;
        match self.0 {
            // Integers wrap: the smallest integer has no negative, so negation does not exchange maximum and
            // minimum.
            Unary::Neg if x[0].dtype.is_int() => rule.linear(&[0]),
            Unary::Neg => rule
                .linear(&[0])?
                .mapping(&[(ReduceOp::Max, ReduceOp::Min), (ReduceOp::Min, ReduceOp::Max)], &[0]),
            // These never decrease. The others either do, or are not defined everywhere, such as `ln`: on some rank
            // they might give NaN.
            Unary::Sign | Unary::Exp | Unary::Tanh | Unary::Sigmoid | Unary::Relu | Unary::Erf => {
                rule.passing(&[ReduceOp::Max, ReduceOp::Min], &[0])
            }
            _ => Ok(rule),
        }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(unary::unary(self.0, x[0])?))
    }

    fn saves(&self) -> Saves {
        match self.0 {
            Unary::Neg => Saves::NOTHING,
            f if f.saves_output() => Saves::OUTPUTS,
            _ => Saves::INPUTS,
        }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        if self.0 == Unary::Neg {
            return Ok(grads![Some(dy.neg()?)]);
        }
        let saved = if self.0.saves_output() { cx.output(0)? } else { cx.input(0)? };
        Ok(grads![Some(apply(MapGrad(self.0), &[&saved, &dy])?)])
    }
}

/// The gradient times the derivative, in one pass. The first input is the saved value that the derivative is
/// computed from: the operator's output if that is simpler, else its input.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MapGrad(Unary);

impl MapGrad {
    /// Returns the derivative of the derivative with respect to the saved value.
    fn second(&self, s: &Tensor) -> Result<Tensor> {
        let gauss = |s: &Tensor, scale: f64| s.mul(s)?.mul(-scale)?.exp();
        match self.0 {
            Unary::Neg | Unary::Abs | Unary::Sign | Unary::Relu => s.zeros_like(),
            Unary::Exp => s.ones_like(),
            Unary::Sqrt => s.mul(s)?.recip()?.mul(-0.5),
            Unary::Rsqrt => s.mul(s)?.mul(-1.5),
            Unary::Recip | Unary::Tanh => s.mul(-2.0),
            Unary::Sigmoid => s.mul(-2.0)?.add(1.0),
            Unary::Ln => s.mul(s)?.recip()?.neg(),
            Unary::Sin => s.sin()?.neg(),
            Unary::Cos => s.cos()?.neg(),
            Unary::Erf => s.mul(-4.0 / PI.sqrt())?.mul(&gauss(s, 1.0)?),
            Unary::Silu => {
                let sigma = s.sigmoid()?;
                let slope = sigma.mul(&sigma.rsub(1.0)?)?;
                slope.mul(&s.mul(&sigma.mul(-2.0)?.add(1.0)?)?.add(2.0)?)
            }
            Unary::Gelu => {
                let density = gauss(s, 0.5)?.mul(1.0 / (2.0 * PI).sqrt())?;
                density.mul(&s.mul(s)?.rsub(2.0)?)
            }
            Unary::GeluTanh => {
                // With u = k(x + c x³) and t = tanh u, the derivative is ½(1 + t) + ½ x (1 − t²) u′.
                let (k, c) = (TANH_SCALE, TANH_CUBE);
                let square = s.mul(s)?;
                let t = s.mul(&square.mul(c)?.add(1.0)?)?.mul(k)?.tanh()?;
                let du = square.mul(3.0 * c)?.add(1.0)?.mul(k)?;
                let curvature = s.mul(6.0 * k * c)?.sub(&t.mul(2.0)?.mul(&du.mul(&du)?)?)?;
                t.mul(&t)?.rsub(1.0)?.mul(&du.add(&s.mul(0.5)?.mul(&curvature)?)?)
            }
        }
    }
}

impl Op for MapGrad {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        same_dtype(self.name(), x)?;
        if x[0].shape != x[1].shape {
            return Err(Error::ShapeMismatch {
                op: self.name(),
                why: "the gradient must have the value's shape",
                left: x[0].shape.clone(),
                right: x[1].shape.clone(),
            });
        }
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(unary::unary_grad(self.0, x[0], x[1])?))
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (saved, dy, g) = (cx.input(0)?, cx.input(1)?, cx.dy()?);
        Ok(grads![
            cx.when(0, || g.mul(&dy)?.mul(&self.second(&saved)?))?,
            cx.when(1, || apply(MapGrad(self.0), &[&saved, &g]))?,
        ])
    }
}

/// The two variants of GELU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// x Φ(x), with the error function.
    #[default]
    Exact,
    /// The approximation with tanh.
    Tanh,
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident => $f:ident;)*) => {
        impl Tensor {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(&self) -> Result<Tensor> {
                apply(Map(Unary::$f), &[self])
            })*
        }
    };
}

methods! {
    /// Negates each element.
    neg => Neg;
    /// Computes the absolute value of each element; the gradient at 0 is 0.
    abs => Abs;
    /// Returns the sign of each element: −1, 0 or 1. NaN stays NaN.
    sign => Sign;
    /// Computes the square root of each element.
    sqrt => Sqrt;
    /// Computes 1 / √x of each element.
    rsqrt => Rsqrt;
    /// Computes 1 / x of each element.
    recip => Recip;
    /// Computes eˣ of each element.
    exp => Exp;
    /// Computes the natural logarithm of each element.
    log => Ln;
    /// Computes the sine of each element.
    sin => Sin;
    /// Computes the cosine of each element.
    cos => Cos;
    /// Computes the hyperbolic tangent of each element.
    tanh => Tanh;
    /// Computes 1 / (1 + e⁻ˣ) of each element.
    sigmoid => Sigmoid;
    /// Computes the maximum of each element and 0; the gradient at 0 is 0.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[-1f32, 2.], [2])?.relu()?.to_vec::<f32>()?, [0., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    relu => Relu;
    /// Computes x · sigmoid(x) of each element.
    silu => Silu;
    /// Computes the error function of each element.
    erf => Erf;
}

impl Tensor {
    /// Computes the Gaussian error linear unit of each element.
    ///
    /// ```
    /// use dtensor::{Gelu, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[-1f64, 0., 1.], [3])?;
    /// assert!((x.gelu(Gelu::Exact)?.to_vec::<f64>()?[2] - 0.841345).abs() < 1e-6);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn gelu(&self, form: Gelu) -> Result<Tensor> {
        let f = match form {
            Gelu::Exact => Unary::Gelu,
            Gelu::Tanh => Unary::GeluTanh,
        };
        apply(Map(f), &[self])
    }
}
