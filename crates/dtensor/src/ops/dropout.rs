//! Dropout.

use super::{Arrays, Aside, Bits, Here, Metas, Op, grads, need_float, one};
use crate::autograd::{Backward, Grads};
use crate::random::{Draw, next_draw};
use crate::{Error, Result, Tensor, apply};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::random as kernel;
use dtensor_layout::Rule;

/// Each element dropped with probability `p`, the others scaled to keep the mean. Which ones go is a function of the
/// draw and the element's index, so the gradient drops the same ones without a saved mask.
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
        // Partial sums could go through, but would be scaled before they are added: not the bits of the whole.
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

/// A probability of dropping, checked.
pub(crate) fn probability(op: &'static str, p: f64) -> Result<f64> {
    if (0.0..=1.0).contains(&p) {
        Ok(p)
    } else {
        Err(Error::argument(op, format!("dropout probability has to be between 0 and 1, but got {p}")))
    }
}

impl Tensor {
    /// Each element set to 0 with probability `p`, to the nearest multiple of 2⁻³², the others divided by 1 − p, drawn from the
    /// thread's generator.
    /// In evaluation, leave it out.
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
        // What is refused uses up no draw.
        need_float("dropout", self.dtype())?;
        apply(Dropout { p, draw: Aside(next_draw(self.mesh())) }, &[self])
    }
}
