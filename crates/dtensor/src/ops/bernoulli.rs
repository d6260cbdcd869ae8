//! `bernoulli_each`: random zeros and ones with one probability per element.

use super::{Arrays, Aside, Here, Metas, Op, need_float, one};
use crate::op::apply;
use crate::random::{Draw, lend, next_draw};
use crate::{Generator, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::random as kernel;
use dtensor_layout::Rule;

/// Draws 1 with the element as the probability, else 0. The result is a function of the draw, the probability and
/// the element's global index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Bernoulli {
    draw: Aside<Draw>,
}

impl Op for Bernoulli {
    fn name(&self) -> &'static str {
        "bernoulli"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_float("bernoulli", x[0].dtype)?;
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::bernoulli_each(x[0], &here.window(0, 0..x[0].dims().len())?, self.draw.0)?))
    }

    fn differentiable(&self) -> bool {
        false
    }
}

impl Tensor {
    /// Draws 1 with probability p and 0 otherwise, for each element p of this tensor. Probabilities are rounded to
    /// the nearest multiple of 2⁻³². The result has this tensor's dtype, uses this thread's generator and has no
    /// gradient. Returns an error if an element is not between 0 and 1. For a single probability see
    /// [`bernoulli`](Tensor::bernoulli).
    ///
    /// ```
    /// use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let p = Tensor::from_slice(&[0f32, 1., 0.5], [3])?;
    /// assert_eq!(p.bernoulli_each()?.to_vec::<f32>()?[..2], [0., 1.]);
    /// assert!(p.mul(3.0)?.bernoulli_each().is_err());
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn bernoulli_each(&self) -> Result<Tensor> {
        // Check first, so that an error uses up no draw.
        need_float("bernoulli", self.dtype())?;
        apply(Bernoulli { draw: Aside(next_draw(self.mesh())) }, &[self])
    }

    /// Like [`bernoulli_each`](Tensor::bernoulli_each), from the given generator.
    #[track_caller]
    pub fn bernoulli_each_with(&self, generator: &mut Generator) -> Result<Tensor> {
        let _guard = lend(generator);
        self.bernoulli_each()
    }
}
