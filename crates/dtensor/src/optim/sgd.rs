//! Stochastic gradient descent.

use super::Descent;
use super::update::{OptionValue, Update, UpdateArrays, UpdateStep, expect_not_negative};
use crate::{Error, Result};
use smallvec::SmallVec;

use dtensor_array::kernels::optim::{SgdSlot, SgdStep, sgd_many};

/// Stochastic gradient descent, optionally with momentum.
///
/// ```
/// use dtensor::nn::{Linear, Module};
/// use dtensor::optim::{Sgd, SgdOptions};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(3, 1, true)?;
/// let optimizer = Sgd::new(layer.parameters(), SgdOptions { lr: 0.1, momentum: 0.9, ..Default::default() })?;
/// let x = Tensor::ones([1, 3], DType::F32)?;
/// let loss = || layer.forward(&x)?.pow(2)?.sum_all();
/// let before = loss()?;
/// before.backward()?;
/// optimizer.step()?;
/// assert!(loss()?.item::<f32>()? < before.item::<f32>()?);
/// # Ok(())
/// # }
/// ```
pub type Sgd = Descent<SgdOptions>;

/// Options of [`Sgd`]. A number converts into options with this learning rate.
///
/// ```
/// use dtensor::optim::{Sgd, SgdOptions};
/// assert_eq!(SgdOptions::from(0.1), SgdOptions { lr: 0.1, ..Default::default() });
/// let error = Sgd::new([], SgdOptions { nesterov: true, ..Default::default() }).unwrap_err().to_string();
/// assert!(error.contains("nesterov momentum requires a momentum and zero dampening"), "{error}");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// Learning rate.
    pub lr: f64,
    /// Momentum: the decay rate of the running sum of gradients. 0 switches it off.
    pub momentum: f64,
    /// Dampening: gradients after the first are multiplied by 1 − `dampening` before they are added to the running
    /// sum.
    pub dampening: f64,
    /// Weight decay (L2 penalty): this multiple of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// Use Nesterov momentum.
    pub nesterov: bool,
    /// Maximize the objective instead of minimizing it.
    pub maximize: bool,
}

impl Default for SgdOptions {
    fn default() -> Self {
        SgdOptions {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        }
    }
}

impl From<f64> for SgdOptions {
    fn from(lr: f64) -> Self {
        SgdOptions { lr, ..Default::default() }
    }
}

impl SgdOptions {
    fn at(&self, step: UpdateStep) -> SgdStep {
        SgdStep {
            lr: step.lr,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            gain: if step.is_fresh { 1.0 } else { 1.0 - self.dampening },
            nesterov: self.nesterov,
            maximize: self.maximize,
        }
    }
}

impl Update for SgdOptions {
    const NAME: &'static str = "Sgd";
    const SLOTS: &'static [&'static str] = &["momentum_buffer"];
    const COUNTS: bool = false;

    fn check(&self) -> Result<()> {
        expect_not_negative(Self::NAME, "learning rate", self.lr)?;
        expect_not_negative(Self::NAME, "momentum value", self.momentum)?;
        expect_not_negative(Self::NAME, "weight_decay value", self.weight_decay)?;
        if !self.dampening.is_finite() {
            return Err(Error::argument(Self::NAME, format!("invalid dampening value: {}", self.dampening)));
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let message = "nesterov momentum requires a momentum and zero dampening";
            return Err(Error::argument(Self::NAME, message));
        }
        Ok(())
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn slots(&self) -> usize {
        usize::from(self.momentum != 0.0)
    }

    fn fields(&mut self) -> Vec<(&'static str, OptionValue<'_>)> {
        vec![
            ("lr", OptionValue::Number(&mut self.lr)),
            ("momentum", OptionValue::Number(&mut self.momentum)),
            ("dampening", OptionValue::Number(&mut self.dampening)),
            ("weight_decay", OptionValue::Number(&mut self.weight_decay)),
            ("nesterov", OptionValue::Flag(&mut self.nesterov)),
            ("maximize", OptionValue::Flag(&mut self.maximize)),
        ]
    }

    fn numbers(&self, step: UpdateStep) -> SmallVec<[f64; 9]> {
        SmallVec::from_slice(&self.at(step).numbers())
    }

    fn variant(&self) -> (usize, bool) {
        (self.slots(), self.nesterov)
    }

    fn update(&self, step: UpdateStep, arrays: Vec<UpdateArrays<'_>>) -> Result<()> {
        let slot = |UpdateArrays { value, grad, state }| {
            let momentum = state.into_iter().next();
            SgdSlot { value, grad, momentum }
        };
        sgd_many(&self.at(step), &mut arrays.into_iter().map(slot).collect::<Vec<_>>())
    }
}
