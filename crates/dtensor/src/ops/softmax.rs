//! Softmax and log-softmax over one dim.

use super::loss_parallel::{LossScope, check_logits};
use super::{Arrays, Here, Metas, Op, Together, grads, need_float, one};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::{Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::softmax as kernel;
use dtensor_array::shape::Dim;
use dtensor_layout::Rule;

/// Returns the rule of operators along a dim whose rows the ranks complete together: the dim may stay sharded.
fn merging_rule_along(dim: usize, x: &[Meta], out: &[Meta]) -> Result<Rule> {
    let rule = Rule::along(dim, x, out)?;
    if x[0].shape.ndim() == 0 { Ok(rule) } else { rule.merging_along("w") }
}

/// Softmax or log-softmax over one dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Softmax {
    dim: usize,
    log: bool,
    /// Records whether the operator was applied inside [`loss_parallel`](crate::parallel::loss_parallel).
    scope: LossScope,
}

impl Op for Softmax {
    fn name(&self) -> &'static str {
        if self.log { "log_softmax" } else { "softmax" }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_float(self.name(), x[0].dtype)?;
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        merging_rule_along(self.dim, x, out)
    }

    fn together(&self, x: &[&Array], known: &[Array], _: &Here<'_>) -> Result<Together> {
        Ok(match known {
            [] => Together::Reduce(kernel::maxima(x[0], self.dim)?, ReduceOp::Max),
            [max] => Together::Reduce(kernel::exp_sums(x[0], max, self.dim)?, ReduceOp::Sum),
            [max, sum, ..] => Together::Done(one(kernel::normalised(x[0], max, sum, self.dim, self.log)?)),
        })
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(if self.log {
            kernel::log_softmax(x[0], self.dim)?
        } else {
            kernel::softmax(x[0], self.dim)?
        }))
    }

    fn saves(&self) -> Saves {
        Saves::OUTPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(self.backward(&cx.output(0)?, &cx.dy()?)?)])
    }
}

impl Softmax {
    /// Computes the gradient from the output and the gradient of the output.
    #[track_caller]
    fn backward(&self, y: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let _explicit = self.scope.allow_merging();
        apply(SoftmaxGrad(self.clone()), &[y, dy])
    }
}

/// The gradient of softmax from its output `y` and the gradient `dy` of the output: `y (dy − Σ y dy)`, or for
/// log-softmax `dy − eʸ Σ dy`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SoftmaxGrad(Softmax);

impl Op for SoftmaxGrad {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        merging_rule_along(self.0.dim, x, out)
    }

    fn together(&self, x: &[&Array], known: &[Array], _: &Here<'_>) -> Result<Together> {
        let Softmax { dim, log, .. } = self.0;
        Ok(match known {
            [] => Together::Reduce(kernel::backward_sums(x[0], x[1], dim, log)?, ReduceOp::Sum),
            [sum, ..] => Together::Done(one(kernel::backward_with(x[0], x[1], sum, dim, log)?)),
        })
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let f = if self.0.log { kernel::log_softmax_backward } else { kernel::softmax_backward };
        Ok(one(f(x[0], x[1], self.0.dim)?))
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (y, dy, g) = (cx.input(0)?, cx.input(1)?, cx.dy()?);
        let sum = |t: Tensor| if t.ndim() == 0 { Ok(t) } else { t.sum_keepdim(self.0.dim) };
        if self.0.log {
            let p = y.exp()?;
            return Ok(grads![
                cx.when(0, || g.mul(&p)?.mul(&sum(dy.clone())?)?.neg())?,
                cx.when(1, || g.sub(&sum(g.mul(&p)?)?))?,
            ]);
        }
        Ok(grads![
            cx.when(0, || g.mul(&dy.sub(&sum(y.mul(&dy)?)?)?)?.sub(&dy.mul(&sum(g.mul(&y)?)?)?))?,
            cx.when(1, || self.0.backward(&y, &g))?,
        ])
    }
}

impl Tensor {
    /// Computes the softmax along `dim`: eˣ / Σ eˣ. A row of only −∞ gives NaN.
    ///
    /// On a mesh, a sharded `dim` stays sharded: forward reduces two numbers per row over the ranks, backward one.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[0f32, f32::NEG_INFINITY, 0.], [3])?;
    /// assert_eq!(x.softmax(0)?.to_vec::<f32>()?, [0.5, 0., 0.5]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn softmax(&self, dim: impl Into<Dim>) -> Result<Tensor> {
        self.softmax_along(self.dim("softmax", dim)?, false)
    }

    /// Computes the logarithm of [`softmax`](Tensor::softmax) without its loss of precision.
    #[track_caller]
    pub fn log_softmax(&self, dim: impl Into<Dim>) -> Result<Tensor> {
        self.softmax_along(self.dim("log_softmax", dim)?, true)
    }

    #[track_caller]
    fn softmax_along(&self, dim: usize, log: bool) -> Result<Tensor> {
        let op = Softmax { dim, log, scope: LossScope::current() };
        if op.scope.is_set() {
            check_logits(op.name(), self)?;
        }
        let _explicit = op.scope.allow_merging();
        apply(op, &[self])
    }
}
