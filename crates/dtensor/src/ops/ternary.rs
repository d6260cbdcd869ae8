//! Element-wise operators with three inputs, with NumPy's broadcasting.

use super::{Arrays, Here, Metas, Op, Precision, grads, need_float, one, same_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::tensor::Operand;
use crate::{Result, Tensor};
use dtensor_array::kernels::ternary::{self, Ternary};
use dtensor_array::{Array, Meta};
use dtensor_layout::Rule;

/// A floating-point element-wise operator with three inputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OfThree(Ternary);

impl Op for OfThree {
    fn name(&self) -> &'static str {
        match self.0 {
            Ternary::Lerp => "lerp",
        }
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let (op, dtype) = (self.name(), same_dtype(self.name(), x)?);
        need_float(op, dtype)?;
        let shape = x[0].shape.broadcast(op, &x[1].shape)?.broadcast(op, &x[2].shape)?;
        Ok(one(Meta { shape, dtype, device: x[0].device }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = Rule::pointwise(x, out)?;
        match self.0 {
            // With one weight for all ranks, a sum of interpolations is the interpolation of the sums.
            Ternary::Lerp => rule.linear(&[0, 1]),
        }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(ternary::ternary(self.0, x[0], x[1], x[2])?))
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let [a, b, c] = [0, 1, 2].map(|i| move || cx.input(i));
        match self.0 {
            Ternary::Lerp => Ok(grads![
                cx.when_broadcast(0, || dy.mul(&c()?.rsub(1)?))?,
                cx.when_broadcast(1, || dy.mul(&c()?))?,
                cx.when_broadcast(2, || dy.mul(&b()?.sub(&a()?)?))?,
            ]),
        }
    }
}

impl Tensor {
    /// Interpolates linearly from this tensor to `end`: `self + weight · (end − self)`. All three broadcast, and the weight may be a
    /// number.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let (start, end) = (Tensor::from_slice(&[1f32, 2.], [2])?, Tensor::from_slice(&[5f32, 10.], [2])?);
    /// assert_eq!(start.lerp(&end, 0.25)?.to_vec::<f32>()?, [2., 4.]);
    /// let weight = Tensor::from_slice(&[0f32, 1.], [2, 1])?;
    /// assert_eq!(start.lerp(&end, &weight)?.to_vec2::<f32>()?, [[1., 2.], [5., 10.]]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn lerp<'a>(&self, end: &Tensor, weight: impl Into<Operand<'a>>) -> Result<Tensor> {
        let op = OfThree(Ternary::Lerp);
        match weight.into() {
            Operand::Tensor(weight) => apply(op, &[self, end, weight]),
            Operand::Scalar(weight) => apply(op, &[self, end, &self.scalar_like("lerp", weight)?]),
        }
    }
}
