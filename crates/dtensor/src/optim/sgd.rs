//! Stochastic gradient descent.

use crate::nn::Parameter;
use crate::{Error, Result};

/// Each parameter minus the learning rate times its gradient.
///
/// ```
/// use dtensor::nn::{Linear, Module};
/// use dtensor::optim::Sgd;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(3, 1, true)?;
/// let optimizer = Sgd::new(layer.parameters(), 0.1)?;
/// let x = Tensor::ones([1, 3], DType::F32)?;
/// let loss = || layer.forward(&x)?.pow(2)?.sum_all();
/// let before = loss()?;
/// before.backward()?;
/// optimizer.step()?;
/// assert!(loss()?.item::<f32>()? < before.item::<f32>()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Sgd {
    parameters: Vec<Parameter>,
    rate: f64,
}

impl Sgd {
    /// Descends on these parameters.
    pub fn new(parameters: Vec<Parameter>, rate: f64) -> Result<Self> {
        if !(rate >= 0.0 && rate.is_finite()) {
            return Err(Error::argument("Sgd", format!("invalid learning rate: {rate}")));
        }
        Ok(Sgd { parameters, rate })
    }

    /// One step along the gradients collected. Parameters without one stay as they are.
    pub fn step(&self) -> Result<()> {
        self.parameters.iter().try_for_each(|p| p.update(|value, grad| value.sub(&grad.mul(self.rate)?)))
    }

    /// Forgets the gradients.
    pub fn zero_grad(&self) {
        self.parameters.iter().for_each(Parameter::zero_grad);
    }
}
