//! Stochastic gradient descent.

use super::Descent;
use super::update::{Field, Step, Update, expect_not_negative};
use crate::{Error, Result};
use dtensor_array::kernels::optim::{SgdStep, sgd};

/// Stochastic gradient descent: each parameter minus the learning rate times its gradient, or times a running sum of its
/// gradients.
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

/// How [`Sgd`] goes. A number alone is a learning rate.
///
/// ```
/// use dtensor::optim::{Sgd, SgdOptions};
/// assert_eq!(SgdOptions::from(0.1), SgdOptions { lr: 0.1, ..Default::default() });
/// let error = Sgd::new([], SgdOptions { nesterov: true, ..Default::default() }).unwrap_err().to_string();
/// assert!(error.contains("nesterov momentum requires a momentum and zero dampening"), "{error}");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// The learning rate.
    pub lr: f64,
    /// How much of the running sum of gradients stays from step to step; without any, there is none.
    pub momentum: f64,
    /// How much less of a gradient is added to the running sum. The first is added whole.
    pub dampening: f64,
    /// How much of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// Goes along the gradient and what the running sum will be, rather than along the running sum.
    pub nesterov: bool,
    /// Goes up, not down.
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

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("lr", Field::Number(&mut self.lr)),
            ("momentum", Field::Number(&mut self.momentum)),
            ("dampening", Field::Number(&mut self.dampening)),
            ("weight_decay", Field::Number(&mut self.weight_decay)),
            ("nesterov", Field::Flag(&mut self.nesterov)),
            ("maximize", Field::Flag(&mut self.maximize)),
        ]
    }

    fn update(&self, step: Step<'_, '_>) -> Result<()> {
        let numbers = SgdStep {
            lr: step.lr,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            gain: if step.fresh { 1.0 } else { 1.0 - self.dampening },
            nesterov: self.nesterov,
            maximize: self.maximize,
        };
        sgd(&numbers, step.value, step.grad, step.state.first_mut().map(|slot| &mut **slot))
    }
}
