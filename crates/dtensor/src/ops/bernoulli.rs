//! Zeros and ones, each with a probability of its own.

use super::{Arrays, Aside, Here, Metas, Op, need_float, one};
use crate::random::{Draw, lend, next_draw};
use crate::{Generator, Result, Tensor, apply};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::random as kernel;
use dtensor_layout::Rule;

/// 1 with the probability that is the element, else 0. Which it is is a function of the draw, the probability and the element's
/// index.
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
    /// With this tensor's elements as probabilities: 1 with that probability, to the nearest multiple of
    /// 2⁻³², else 0, of the same dtype, drawn from this thread's generator. No gradient flows through it. For
    /// one probability see [`bernoulli`](Tensor::bernoulli).
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
        // What is refused uses up no draw.
        need_float("bernoulli", self.dtype())?;
        apply(Bernoulli { draw: Aside(next_draw(self.mesh())) }, &[self])
    }

    /// As [`bernoulli_each`](Tensor::bernoulli_each), from a given generator.
    #[track_caller]
    pub fn bernoulli_each_with(&self, generator: &mut Generator) -> Result<Tensor> {
        let _lent = lend(generator);
        self.bernoulli_each()
    }
}
