//! Activation layers, and the identity.

use super::{Base, Module, forward};
use crate::{Result, Tensor};

/// The rectified linear unit: max(x, 0) of each element.
///
/// ```
/// use dtensor::nn::Relu;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[-1f32, 2.], [2])?;
/// assert_eq!(Relu::new().forward(&x)?.to_vec::<f32>()?, [0., 2.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, Module)]
pub struct Relu {
    base: Base,
}

#[forward]
impl Relu {
    /// Creates the layer.
    pub fn new() -> Self {
        Relu::default()
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.relu()
    }
}

/// The Gaussian error linear unit of each element, in one of two [forms](crate::Gelu).
///
/// ```
/// use dtensor::nn;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[0f32, 10.], [2])?;
/// assert_eq!(nn::Gelu::default().forward(&x)?.to_vec::<f32>()?, [0., 10.]);
/// assert_eq!(nn::Gelu::new(Gelu::Tanh).forward(&x)?.to_vec::<f32>()?, [0., 10.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, Module)]
pub struct Gelu {
    /// The exact form, or the tanh approximation.
    #[module(skip)]
    pub form: crate::Gelu,
    base: Base,
}

#[forward]
impl Gelu {
    /// Creates the layer in the given form.
    pub fn new(form: crate::Gelu) -> Self {
        Gelu { form, base: Base::new() }
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.gelu(self.form)
    }
}

/// The sigmoid linear unit: x · sigmoid(x) of each element.
///
/// ```
/// use dtensor::nn::Silu;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[0f64, 1.], [2])?;
/// let y = Silu::new().forward(&x)?.to_vec::<f64>()?;
/// assert!(y[0] == 0. && (y[1] - 0.731059).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, Module)]
pub struct Silu {
    base: Base,
}

#[forward]
impl Silu {
    /// Creates the layer.
    pub fn new() -> Self {
        Silu::default()
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.silu()
    }
}

/// Returns its input. Useful as a place for hooks, or instead of a layer that is left out.
///
/// ```
/// use dtensor::nn::Identity;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::ones([2], DType::F32)?;
/// assert_eq!(Identity::new().forward(&x)?.to_vec::<f32>()?, [1., 1.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, Module)]
pub struct Identity {
    base: Base,
}

#[forward]
impl Identity {
    /// Creates the layer.
    pub fn new() -> Self {
        Identity::default()
    }

    /// Returns the input.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }
}
