//! Cumulative sums.

use super::{Arrays, Here, Metas, Op, grads, one};
use crate::autograd::{Backward, Grads};
use crate::op::apply;
use crate::{Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::scan as kernel;
use dtensor_array::shape::Dim;
use dtensor_array::{DType, Meta};
use dtensor_layout::Rule;

/// Cumulative sum along one dim, from the front or (`reverse`) from the back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cumsum {
    dim: usize,
    reverse: bool,
}

impl Op for Cumsum {
    fn name(&self) -> &'static str {
        "cumsum"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let dtype = if x[0].dtype == DType::U8 { DType::I64 } else { x[0].dtype };
        Ok(one(Meta { dtype, ..x[0].clone() }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = Rule::along(self.dim, x, out)?;
        if x[0].dtype == DType::U8 { Ok(rule) } else { rule.linear(&[0]) }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::cumsum(x[0], self.dim, self.reverse)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(apply(Cumsum { dim: self.dim, reverse: !self.reverse }, &[&cx.dy()?])?)])
    }
}

impl Tensor {
    /// Computes the cumulative sum along one dim (`u8` is summed as `i64`).
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[1i64, 2, 3], [3])?.cumsum(0)?.to_vec::<i64>()?, [1, 3, 6]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn cumsum(&self, dim: impl Into<Dim>) -> Result<Tensor> {
        apply(Cumsum { dim: self.dim("cumsum", dim)?, reverse: false }, &[self])
    }
}
