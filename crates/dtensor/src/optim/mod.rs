//! Optimizers: what changes parameters by their gradients.
//!
//! A step is one pass per parameter over its value, its gradient and what the optimizer remembers, in place. On a mesh every rank
//! does so with its part: a gradient lies as its parameter does, and so does all that is remembered, so that a step communicates
//! nothing. Only [`clip_grad_norm`] does, once for all parameters.
//!
//! ```
//! use dtensor::nn::Linear;
//! use dtensor::optim::{AdamW, AdamWOptions, ClipOptions, Schedule, clip_grad_norm};
//! use dtensor::prelude::*;
//! # fn main() -> Result<()> {
//! let layer = Linear::new(3, 2, true)?;
//! let optimizer = AdamW::new([layer.weight.clone()], 0.01)?;
//! // Biases are not to decay.
//! let options = AdamWOptions { lr: 0.01, weight_decay: 0.0, ..Default::default() };
//! optimizer.add_group(layer.bias.clone(), options)?;
//! let schedule = Schedule::linear_warmup(3).then(Schedule::cosine(7, 0.1));
//! let x = Tensor::rand([4, 3], DType::F32)?;
//! for step in 0..10 {
//!     optimizer.zero_grad();
//!     layer.forward(&x)?.pow(2)?.mean_all()?.backward()?;
//!     clip_grad_norm(&layer.parameters(), 1.0, ClipOptions::default())?;
//!     schedule.apply(&optimizer, step)?;
//!     optimizer.step()?;
//! }
//! # Ok(())
//! # }
//! ```

mod adam;
mod clip;
mod descent;
mod schedule;
mod sgd;
mod state;
mod update;

pub use adam::{Adam, AdamOptions, AdamW, AdamWOptions};
pub use clip::{ClipOptions, clip_grad_norm, clip_grad_value, grad_norm};
pub use descent::Descent;
pub use schedule::Schedule;
pub use sgd::{Sgd, SgdOptions};

use crate::nn::{Parameter, StateDict};
use crate::{Error, Result, Tensor};

/// Changes parameters by their gradients. Like the parameters, an optimizer is a place: it is changed through a shared
/// reference.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::optim::{Adam, Sgd};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(3, 1, true)?;
/// let x = Tensor::ones([1, 3], DType::F32)?;
/// let both: [Box<dyn Optimizer>; 2] =
///     [Box::new(Sgd::new(layer.parameters(), 0.1)?), Box::new(Adam::new(layer.parameters(), 0.1)?)];
/// for optimizer in both {
///     let loss = || layer.forward(&x)?.pow(2)?.sum_all();
///     let before = loss()?;
///     optimizer.zero_grad();
///     before.backward()?;
///     optimizer.step()?;
///     assert_ne!(loss()?.item::<f32>()?, before.item::<f32>()?);
/// }
/// # Ok(())
/// # }
/// ```
pub trait Optimizer {
    /// One step along the gradients collected. Parameters without one stay as they are. Nobody who holds the
    /// value that a parameter had sees it change; if nobody does, it is changed where it is.
    ///
    /// Nothing is communicated. An error is found before any parameter is changed.
    fn step(&self) -> Result<()>;

    /// Forgets the gradients.
    fn zero_grad(&self) {
        self.parameters().iter().for_each(Parameter::zero_grad);
    }

    /// The parameters, group after group.
    fn parameters(&self) -> Vec<Parameter>;

    /// The learning rate of each group, times the [factor](Optimizer::set_factor).
    fn learning_rates(&self) -> Vec<f64>;

    /// What the learning rates are multiplied by; 1 if nobody has set it.
    fn factor(&self) -> f64;

    /// Multiplies the learning rates that the groups were given by a number: that is how a [`Schedule`] changes them.
    fn set_factor(&self, factor: f64) -> Result<()>;

    /// All that is needed to go on later as if there had been no stop, bit for bit: the options of the groups, and what is
    /// remembered of each parameter, by its number. What lies on a mesh stays there.
    ///
    /// ```
    /// use dtensor::nn::Parameter;
    /// use dtensor::optim::Adam;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let weight = Parameter::new(&Tensor::ones([2], DType::F32)?)?;
    /// let optimizer = Adam::new([weight.clone()], 0.5)?;
    /// weight.get().sum_all()?.backward()?;
    /// optimizer.step()?;
    /// let state = optimizer.state_dict();
    /// assert_eq!(state["state.0.step"].item::<i64>()?, 1);
    /// assert_eq!(state["state.0.exp_avg"].dims(), [2]);
    /// assert_eq!(state["param_groups.0.lr"].item::<f64>()?, 0.5);
    ///
    /// let again = Adam::new([weight], 0.1)?;
    /// again.load_state_dict(&state)?;
    /// assert_eq!(again.learning_rates(), [0.5]);
    /// # Ok(())
    /// # }
    /// ```
    fn state_dict(&self) -> StateDict;

    /// Takes over the options and all that was remembered, or, if something does not fit, nothing.
    ///
    /// As in [`Module::load_state_dict`](crate::nn::Module::load_state_dict), a value that lies on the same
    /// mesh as the parameter is brought to how that lies, and of one that does not lie on a mesh every rank
    /// takes its part. So an optimizer whose parameters have been laid otherwise goes on with
    /// `optimizer.load_state_dict(&optimizer.state_dict())`.
    #[track_caller]
    fn load_state_dict(&self, state: &StateDict) -> Result<()>;
}

/// That a parameter or gradient consists of the parts that the ranks have: partial values are no elements.
fn expect_whole(op: &'static str, x: &Tensor) -> Result<()> {
    match x.layout() {
        Some(layout) if x.placements().iter().any(|p| p.is_partial()) => Err(Error::argument(
            op,
            format!("a parameter is partial ({layout}): redistribute it to replicas or shards first"),
        )),
        _ => Ok(()),
    }
}
