//! Adam and AdamW.

use super::Descent;
use super::update::{OptionValue, Update, UpdateArrays, UpdateStep, expect_not_negative};
use crate::{Error, Result};
use smallvec::SmallVec;

use dtensor_array::kernels::optim::{AdamSlot, AdamStep, adam_many};

/// Adam: scales the running mean of the gradient by the root of the running mean of its square.
///
/// ```
/// use dtensor::nn::{Linear, Module};
/// use dtensor::optim::Adam;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(3, 1, true)?;
/// let optimizer = Adam::new(layer.parameters(), 0.01)?;
/// let x = Tensor::ones([1, 3], DType::F32)?;
/// let loss = || layer.forward(&x)?.sub(5.0)?.pow(2)?.sum_all();
/// let before = loss()?;
/// before.backward()?;
/// optimizer.step()?;
/// assert!(loss()?.item::<f32>()? < before.item::<f32>()?);
/// # Ok(())
/// # }
/// ```
pub type Adam = Descent<AdamOptions>;

/// AdamW: Adam with decoupled weight decay, which multiplies the parameter by 1 − learning rate · `weight_decay` in
/// every step.
///
/// ```
/// use dtensor::nn::Parameter;
/// use dtensor::optim::{AdamW, AdamWOptions};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let weight = Parameter::new(&Tensor::ones([2], DType::F64)?)?;
/// let options = AdamWOptions { lr: 0.5, weight_decay: 0.5, ..Default::default() };
/// let optimizer = AdamW::new([weight.clone()], options)?;
/// weight.get().mul(0.0)?.sum_all()?.backward()?;
/// optimizer.step()?;
/// assert_eq!(weight.get().to_vec::<f64>()?, [0.75, 0.75]);
/// # Ok(())
/// # }
/// ```
pub type AdamW = Descent<AdamWOptions>;

macro_rules! options {
    (
        $(#[$doc:meta])* $options:ident, $name:literal, $weight_decay:literal,
        $(#[$decay:meta])* |$o:ident, $lr:ident| ($added:expr, $shrink:expr)
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $options {
            /// Learning rate.
            pub lr: f64,
            /// Decay rates of the two moment estimates (`beta1`, `beta2`).
            pub betas: (f64, f64),
            /// Added to the denominator for numerical stability.
            pub eps: f64,
            $(#[$decay])*
            pub weight_decay: f64,
            /// Use the AMSGrad variant: divide by the root of the largest second moment seen so far.
            pub amsgrad: bool,
            /// Maximize the objective instead of minimizing it.
            pub maximize: bool,
        }

        impl Default for $options {
            fn default() -> Self {
                $options {
                    lr: 1e-3,
                    betas: (0.9, 0.999),
                    eps: 1e-8,
                    weight_decay: $weight_decay,
                    amsgrad: false,
                    maximize: false,
                }
            }
        }

        impl From<f64> for $options {
            fn from(lr: f64) -> Self {
                $options { lr, ..Default::default() }
            }
        }

        impl $options {
            fn at(&self, step: UpdateStep) -> AdamStep {
                let ($o, $lr) = (self, step.lr);
                // The running means start at zero, so they are divided by this bias correction.
                let bias_correction = |beta: f64| 1.0 - beta.powf(step.count as f64);
                AdamStep {
                    lr: step.lr / bias_correction(self.betas.0),
                    scale: 1.0 / bias_correction(self.betas.1).sqrt(),
                    betas: self.betas,
                    eps: self.eps,
                    weight_decay: $added,
                    shrink: $shrink,
                    maximize: self.maximize,
                }
            }
        }

        impl Update for $options {
            const NAME: &'static str = $name;
            const SLOTS: &'static [&'static str] = &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
            const COUNTS: bool = true;

            fn check(&self) -> Result<()> {
                expect_not_negative(Self::NAME, "learning rate", self.lr)?;
                expect_not_negative(Self::NAME, "epsilon value", self.eps)?;
                for (i, beta) in [self.betas.0, self.betas.1].into_iter().enumerate() {
                    if !(0.0..1.0).contains(&beta) {
                        let message = format!("invalid beta parameter at index {i}: {beta}");
                        return Err(Error::argument(Self::NAME, message));
                    }
                }
                expect_not_negative(Self::NAME, "weight_decay value", self.weight_decay)
            }

            fn lr(&self) -> f64 {
                self.lr
            }

            fn slots(&self) -> usize {
                if self.amsgrad { 3 } else { 2 }
            }

            fn fields(&mut self) -> Vec<(&'static str, OptionValue<'_>)> {
                vec![
                    ("lr", OptionValue::Number(&mut self.lr)),
                    ("beta1", OptionValue::Number(&mut self.betas.0)),
                    ("beta2", OptionValue::Number(&mut self.betas.1)),
                    ("eps", OptionValue::Number(&mut self.eps)),
                    ("weight_decay", OptionValue::Number(&mut self.weight_decay)),
                    ("amsgrad", OptionValue::Flag(&mut self.amsgrad)),
                    ("maximize", OptionValue::Flag(&mut self.maximize)),
                ]
            }

            fn numbers(&self, step: UpdateStep) -> SmallVec<[f64; 9]> {
                SmallVec::from(self.at(step).numbers())
            }

            fn update(&self, step: UpdateStep, arrays: Vec<UpdateArrays<'_>>) -> Result<()> {
                let slot = |UpdateArrays { value, grad, state }| {
                    let mut state = state.into_iter();
                    let (Some(mean), Some(square)) = (state.next(), state.next()) else {
                        return Err(Error::argument(Self::NAME, "the moment estimates are missing"));
                    };
                    Ok(AdamSlot { value, grad, moments: [mean, square], largest: state.next() })
                };
                adam_many(&self.at(step), &mut arrays.into_iter().map(slot).collect::<Result<Vec<_>>>()?)
            }
        }
    };
}

options! {
    /// Options of [`Adam`]. A number converts into options with this learning rate.
    ///
    /// ```
    /// use dtensor::optim::{Adam, AdamOptions};
    /// assert_eq!(AdamOptions::from(0.1), AdamOptions { lr: 0.1, ..Default::default() });
    /// let error = Adam::new([], AdamOptions { betas: (0.9, 1.0), ..Default::default() }).unwrap_err().to_string();
    /// assert!(error.contains("invalid beta parameter at index 1: 1"), "{error}");
    /// ```
    AdamOptions, "Adam", 0.0,
    /// Weight decay (L2 penalty): this multiple of the parameter is added to its gradient.
    |o, _lr| (o.weight_decay, 1.0)
}

options! {
    /// Options of [`AdamW`]. A number converts into options with this learning rate.
    ///
    /// ```
    /// use dtensor::optim::AdamWOptions;
    /// assert_eq!(AdamWOptions::from(0.1), AdamWOptions { lr: 0.1, ..Default::default() });
    /// assert_eq!(AdamWOptions::default().weight_decay, 0.01);
    /// ```
    AdamWOptions, "AdamW", 0.01,
    /// Decoupled weight decay: in every step the parameter is multiplied by 1 − learning rate · `weight_decay`.
    |o, lr| (0.0, 1.0 - lr * o.weight_decay)
}
