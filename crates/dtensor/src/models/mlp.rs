//! Two layers with a bend between them, and stacks of these.

use crate::nn::{Base, Linear, Module, ModuleList, Relu, forward};
use crate::{Result, Tensor, manual_seed};

/// A layer from 10 to 16, [`Relu`], a layer back to 10.
///
/// ```
/// use dtensor::models::MLPModule;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::ones([4, 10], DType::F32)?;
/// let (a, b) = (MLPModule::new(true)?, MLPModule::new(true)?);
/// assert_eq!(a.forward(&x)?.to_vec::<f32>()?, b.forward(&x)?.to_vec::<f32>()?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct MLPModule {
    /// The first layer.
    pub net1: Linear,
    /// The bend.
    pub relu: Relu,
    /// The second layer.
    pub net2: Linear,
    base: Base,
}

#[forward]
impl MLPModule {
    /// Of sizes 10, 16 and 10. It starts this thread's generator anew from seed 5, so that all are equal.
    pub fn new(bias: bool) -> Result<Self> {
        manual_seed(5);
        MLPModule::with_sizes(10, 16, 10, bias)
    }

    /// Of other sizes: what comes in, what lies between, what goes out. Drawn from this thread's generator as it is.
    pub fn with_sizes(inputs: usize, hidden: usize, outputs: usize, bias: bool) -> Result<Self> {
        Ok(MLPModule {
            net1: Linear::new(inputs, hidden, bias)?,
            relu: Relu::new(),
            net2: Linear::new(hidden, outputs, bias)?,
            base: Base::new(),
        })
    }

    /// Applies the model.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.net2.forward(&self.relu.forward(&self.net1.forward(x)?)?)
    }
}

/// Several [`MLPModule`]s, one after the other.
///
/// ```
/// use dtensor::models::MLPStacked;
/// use dtensor::nn::Module;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let model = MLPStacked::new(2)?;
/// assert_eq!(model.forward(&Tensor::ones([4, 10], DType::F32)?)?.dims(), [4, 10]);
/// assert!(model.get_parameter("layers.1.net2.weight").is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct MLPStacked {
    /// The models.
    pub layers: ModuleList<MLPModule>,
    base: Base,
}

#[forward]
impl MLPStacked {
    /// Of so many, with biases.
    pub fn new(n_layers: usize) -> Result<Self> {
        let layers = (0..n_layers).map(|_| MLPModule::new(true)).collect::<Result<_>>()?;
        Ok(MLPStacked { layers, base: Base::new() })
    }

    /// Applies the models.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        Ok(x)
    }
}
