//! The dropout layer.

use super::{Base, Module, forward};
use crate::ops::probability;
use crate::{Result, Tensor};

/// Dropout: in training, sets each element to 0 with probability `p` and divides the others by 1 − p. In evaluation,
/// and if `p` is 0, it returns its input and draws no random numbers.
///
/// In a distributed tensor, the same elements are dropped as on a single device.
///
/// ```
/// use dtensor::nn::{Dropout, Module};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let (layer, x) = (Dropout::new(0.5)?, Tensor::ones([100], DType::F32)?);
/// let y = layer.forward(&x)?.to_vec::<f32>()?;
/// assert!(y.contains(&0.) && y.contains(&2.));
/// layer.eval();
/// assert_eq!(layer.forward(&x)?.to_vec::<f32>()?, [1.; 100]);
/// assert!(Dropout::new(1.5).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct Dropout {
    p: f64,
    base: Base,
}

#[forward]
impl Dropout {
    /// Creates a layer that drops with probability `p`, from 0 to 1.
    pub fn new(p: f64) -> Result<Self> {
        Ok(Dropout { p: probability("Dropout", p)?, base: Base::new() })
    }

    /// Returns the probability of dropping an element.
    pub fn p(&self) -> f64 {
        self.p
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.p > 0.0 && self.base.is_training() { x.dropout(self.p) } else { Ok(x.clone()) }
    }
}
