//! Root-mean-square normalisation, written with operators.

use crate::nn::{Base, Module, Parameter, forward};
use crate::{Result, Tensor};

/// Computes what [`RmsNorm`](crate::nn::RmsNorm) computes over the last dim, with public operators: an example of a norm that the library
/// does not know.
///
/// ```
/// use dtensor::models::RMSNormPython;
/// use dtensor::nn::RmsNorm;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::randn([2, 8], DType::F64)?;
/// let (ours, theirs) = (RMSNormPython::new(8)?, RmsNorm::new(8)?.with_eps(1e-6));
/// ours.weight.replace(&Tensor::ones([8], DType::F64)?)?;
/// let apart = (ours.forward(&x)? - theirs.without_weight().forward(&x)?)?.abs()?.max_all()?;
/// assert!(apart.item::<f64>()? < 1e-12);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct RMSNormPython {
    /// The scale of each element of the last dim.
    pub weight: Parameter,
    eps: f64,
    base: Base,
}

#[forward]
impl RMSNormPython {
    /// Creates a norm over a last dim of size `dim`, with an `eps` of 1e-6.
    pub fn new(dim: usize) -> Result<Self> {
        let weight = Parameter::with_init([dim], Tensor::ones_like)?;
        Ok(RMSNormPython { weight, eps: 1e-6, base: Base::new() })
    }

    /// Sets the number that is added to the mean square.
    pub fn with_eps(self, eps: f64) -> Self {
        RMSNormPython { eps, ..self }
    }

    /// Applies the layer.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scale = (x.pow(2.0)?.mean_keepdim(-1)? + self.eps)?.rsqrt()?;
        x * scale * self.weight.get()
    }
}
