//! Softmax and its logarithm over one dim.

use super::loss_parallel::{Asked, check_scores};
use super::{Arrays, Here, Metas, Op, Together, grads, need_float, one};
use crate::autograd::{Backward, Grads, Saves};
use crate::{Result, Tensor, apply};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::softmax as kernel;
use dtensor_array::shape::Dim;
use dtensor_layout::Rule;

/// Each row along a dim depends on all of it: where it is cut, ranks sum up what they have of it.
fn together_along(dim: usize, x: &[Meta], out: &[Meta]) -> Result<Rule> {
    let rule = Rule::along(dim, x, out)?;
    if x[0].shape.rank() == 0 { Ok(rule) } else { rule.merging_along("w") }
}

/// Softmax, or its logarithm, over one dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Softmax {
    dim: usize,
    log: bool,
    /// Whether it was applied inside [`loss_parallel`](crate::parallel::loss_parallel).
    asked: Asked,
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
        together_along(self.dim, x, out)
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
    /// The gradient from the output and the gradient of that.
    #[track_caller]
    fn backward(&self, y: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let _allowed = self.asked.allow();
        apply(SoftmaxGrad(self.clone()), &[y, dy])
    }
}

/// The gradient of softmax from its output `y` and the gradient of that: `y (dy − Σ y dy)`, or for the logarithm
/// `dy − eʸ Σ dy`.
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
        together_along(self.0.dim, x, out)
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
        let sum = |t: Tensor| if t.rank() == 0 { Ok(t) } else { t.sum_keepdim(self.0.dim) };
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
    /// eˣ over the sum of eˣ along `dim`. A row of −∞ alone is NaN. Where the dim is cut it stays so: two numbers per row are
    /// reduced, and one on the way back.
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

    /// The logarithm of [`softmax`](Tensor::softmax), without the loss of precision.
    #[track_caller]
    pub fn log_softmax(&self, dim: impl Into<Dim>) -> Result<Tensor> {
        self.softmax_along(self.dim("log_softmax", dim)?, true)
    }

    #[track_caller]
    fn softmax_along(&self, dim: usize, log: bool) -> Result<Tensor> {
        let op = Softmax { dim, log, asked: Asked::now() };
        if op.asked.is_set() {
            check_scores(op.name(), self)?;
        }
        let _allowed = op.asked.allow();
        apply(op, &[self])
    }
}
