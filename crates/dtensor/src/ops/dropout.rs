//! Dropout.

use super::{Arrays, Aside, Bits, Here, Metas, Op, grads, need_float, one};
use crate::autograd::{Backward, Grads};
use crate::op::apply;
use crate::random::{Draw, next_draw};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::random as kernel;
use dtensor_layout::Rule;

/// Zeroes each element with probability `p` and scales the others so that the mean stays. Which elements are zeroed
/// is a function of the draw and the element's global index, so the gradient needs no saved mask.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Dropout {
    p: Bits,
    draw: Aside<Draw>,
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_float("dropout", x[0].dtype)?;
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        // Partial sums do not pass: scaling them before they are added would not be bit-identical to scaling the
        // sum.
        Rule::pointwise(x, out)
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let window = here.window(0, 0..x[0].dims().len())?;
        Ok(one(kernel::dropout(x[0], &window, self.p.get(), self.draw.0)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(apply(self.clone(), &[&cx.dy()?])?)])
    }
}

/// Checks a dropout probability.
pub(crate) fn probability(op: &'static str, p: f64) -> Result<f64> {
    if (0.0..=1.0).contains(&p) {
        Ok(p)
    } else {
        Err(Error::argument(op, format!("dropout probability has to be between 0 and 1, but got {p}")))
    }
}

impl Tensor {
    /// Sets each element to 0 with probability `p` and divides the others by 1 − `p`. The probability is rounded to
    /// the nearest multiple of 2⁻³². Uses this thread's generator. This is the training behaviour: do not call it
    /// in evaluation.
    ///
    /// On a mesh, the same elements are dropped as on a single device, for any placements.
    ///
    /// ```
    /// use dtensor::{DType, Tensor, manual_seed};
    /// # fn main() -> dtensor::Result<()> {
    /// manual_seed(1);
    /// let x = Tensor::ones([1000], DType::F32)?;
    /// let kept = x.dropout(0.25)?.ne(0.0)?.sum_all()?.item::<i64>()?;
    /// assert!((700..800).contains(&kept));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn dropout(&self, p: f64) -> Result<Tensor> {
        let p = Bits::new(probability("dropout", p)?);
        // Check first, so that an error uses up no draw.
        need_float("dropout", self.dtype())?;
        apply(Dropout { p, draw: Aside(next_draw(self.mesh())) }, &[self])
    }
}
