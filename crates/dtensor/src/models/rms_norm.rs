//! Root-mean-square normalisation, put together from operators.

use crate::nn::{Base, Module, Parameter, forward};
use crate::{Result, Tensor};

/// What [`RmsNorm`](crate::nn::RmsNorm) does over one dim, written by hand: a norm as somebody might bring along, which the library knows
/// nothing of.
///
/// ```
/// use dtensor::models::RMSNormPython;
/// use dtensor::nn::RmsNorm;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::randn([2, 8], DType::F64)?;
/// let (ours, theirs) = (RMSNormPython::new(8)?, RmsNorm::new(8)?.with_eps(1e-6));
/// ours.weight.replace(&Tensor::ones([8], DType::F64)?)?;
/// let apart = ours.forward(&x)?.sub(&theirs.without_weight().forward(&x)?)?.abs()?.max_all()?;
/// assert!(apart.item::<f64>()? < 1e-12);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct RMSNormPython {
    /// What the last dim is scaled by.
    pub weight: Parameter,
    eps: f64,
    base: Base,
}

#[forward]
impl RMSNormPython {
    /// Over a last dim of this size; 1e-6 is added to the mean square.
    pub fn new(dim: usize) -> Result<Self> {
        let weight = Parameter::with_init([dim], Tensor::ones_like)?;
        Ok(RMSNormPython { weight, eps: 1e-6, base: Base::new() })
    }

    /// With another number added to the mean square.
    pub fn with_eps(self, eps: f64) -> Self {
        RMSNormPython { eps, ..self }
    }

    /// Applies the layer.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scale = x.pow(2.0)?.mean_keepdim(-1)?.add(self.eps)?.rsqrt()?;
        x.mul(&scale)?.mul(&self.weight.get())
    }
}
