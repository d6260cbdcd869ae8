//! The linear (fully connected) layer.

use super::{Base, Module, Parameter, forward};
use crate::{Error, Result, Tensor};

/// A linear layer: computes `x · weightᵀ + bias` over the last dim.
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
    /// Weight matrix of shape `[outputs, inputs]`.
    pub weight: Parameter,
    /// Bias of shape `[outputs]`, if any.
    pub bias: Option<Parameter>,
    heads: Option<usize>,
    base: Base,
}

#[forward]
impl Linear {
    /// Creates a layer with weight and bias uniform within ±1/√inputs, drawn from this thread's generator.
    pub fn new(inputs: usize, outputs: usize, bias: bool) -> Result<Self> {
        let bound = if inputs > 0 { 1.0 / (inputs as f64).sqrt() } else { 0.0 };
        let uniform = move |like: &Tensor| like.uniform_like(-bound, bound);
        Ok(Linear {
            weight: Parameter::with_init([outputs, inputs], uniform)?,
            bias: if bias { Some(Parameter::with_init([outputs], uniform)?) } else { None },
            heads: None,
            base: Base::new(),
        })
    }

    /// Creates a layer from existing parameters.
    pub fn from_parameters(weight: Parameter, bias: Option<Parameter>) -> Result<Self> {
        let table = weight.get();
        let &[outputs, _] = table.dims() else {
            let message = format!("the weight must have 2 dims, but its shape is {}", table.shape());
            return Err(Error::argument("Linear", message));
        };
        if let Some(bias) = &bias
            && bias.get().dims() != [outputs]
        {
            let message =
                format!("the bias must have shape [{outputs}], but its shape is {}", bias.get().shape());
            return Err(Error::argument("Linear", message));
        }
        Ok(Linear { weight, bias, heads: None, base: Base::new() })
    }

    /// Declares that the outputs are those of `heads` attention heads. Sharding a head over two ranks is then an
    /// error.
    pub fn with_heads(mut self, heads: usize) -> Result<Self> {
        let outputs = self.weight.get().size(0)?;
        if heads == 0 || !outputs.is_multiple_of(heads) {
            let message = format!("{outputs} outputs cannot be split into {heads} heads");
            return Err(Error::argument("Linear", message));
        }
        self.heads = Some(heads);
        Ok(self)
    }

    /// Returns the number of attention heads, if it was declared.
    pub fn heads(&self) -> Option<usize> {
        self.heads
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.linear(&self.weight.get(), self.bias.as_ref().map(Parameter::get).as_ref())
    }
}
