//! An MLP of two linear layers, and stacks of it.

use crate::nn::{Base, Linear, Module, ModuleList, Relu, forward};
use crate::{Result, Tensor, manual_seed, module};

/// Two linear layers, from 10 to 16 and back to 10, with a [`Relu`] between them.
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
    /// The activation.
    pub relu: Relu,
    /// The second layer.
    pub net2: Linear,
    base: Base,
}

#[forward]
impl MLPModule {
    /// Creates an MLP of sizes 10, 16 and 10. Seeds this thread's generator with 5 first, so that all such MLPs are equal.
    pub fn new(bias: bool) -> Result<Self> {
        manual_seed(5);
        MLPModule::with_sizes(10, 16, 10, bias)
    }

    /// Creates an MLP of other sizes. Its weights are drawn from this thread's generator in its current state.
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
        self.net2.forward(self.relu.forward(self.net1.forward(x)))
    }
}

module! {
    /// A stack of [`MLPModule`]s with biases.
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
    #[derive(Clone, Debug)]
    pub struct MLPStacked(n_layers: usize) {
        /// The MLPs.
        pub layers: ModuleList<MLPModule> = (0..n_layers).map(|_| MLPModule::new(true)).collect::<Result<_>>(),
        base: Base = Base::new(),
    }
}

#[forward]
impl MLPStacked {
    /// Applies the MLPs in order.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        Ok(x)
    }
}
