//! The fully connected layer.

use super::{Module, Parameter};
use crate::{DType, Result, Tensor};

/// `x · weightᵀ + bias`, over the last dim.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(3, 5, true)?;
/// assert_eq!(layer.forward(&Tensor::zeros([2, 3], DType::F32)?)?.dims(), [2, 5]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Parameter,
    /// `[outputs]`, if there is one.
    pub bias: Option<Parameter>,
}

impl Linear {
    /// A layer with weights and biases uniform within ±1/√inputs, drawn from this thread's generator.
    pub fn new(inputs: usize, outputs: usize, bias: bool) -> Result<Self> {
        let bound = if inputs > 0 { 1.0 / (inputs as f64).sqrt() } else { 0.0 };
        let uniform = |shape: &[usize]| Tensor::rand(shape, DType::F32)?.mul(2.0 * bound)?.sub(bound);
        Ok(Linear {
            weight: Parameter::new(&uniform(&[outputs, inputs])?)?,
            bias: if bias { Some(Parameter::new(&uniform(&[outputs])?)?) } else { None },
        })
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.linear(&self.weight.get(), self.bias.as_ref().map(Parameter::get).as_ref())
    }
}
