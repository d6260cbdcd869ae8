//! Optimizers, learning-rate schedules and gradient clipping.
//!
//! A step is one fused, in-place pass per parameter over its value, its gradient and the optimizer state. A gradient
//! and the state have the layout of their parameter, so every rank updates its own shards and a step communicates
//! nothing. Only [`clip_grad_norm`] and [`grad_norm`] communicate: once for all parameters of a mesh.
//!
//! ```
//! use dtensor::nn::Linear;
//! use dtensor::optim::{AdamW, AdamWOptions, ClipOptions, Schedule, clip_grad_norm};
//! use dtensor::prelude::*;
//! # fn main() -> Result<()> {
//! let layer = Linear::new(3, 2, true)?;
//! let optimizer = AdamW::new([layer.weight.clone()], 0.01)?;
//! // Biases get no weight decay.
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
mod recorded;
mod schedule;
mod sgd;
mod state;
mod update;

pub use adam::{Adam, AdamOptions, AdamW, AdamWOptions};
pub use clip::{ClipOptions, clip_grad_norm, clip_grad_value, grad_norm};
pub use descent::Descent;
pub use schedule::Schedule;
pub use sgd::{Sgd, SgdOptions};
pub(crate) use state::parameter_of_key;

use crate::nn::{Parameter, StateDict};
use crate::{Error, Result, Tensor};

/// Updates parameters from their gradients. Like parameters, an optimizer is a shared cell: its methods take `&self`.
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
    /// Updates all parameters that have a gradient. A value is updated in place if no other tensor shares its memory;
    /// else a new one is stored, and the old tensor is unchanged.
    ///
    /// Nothing is communicated. Errors are found before any parameter is changed.
    fn step(&self) -> Result<()>;

    /// Clears the gradients.
    fn zero_grad(&self) {
        self.parameters().iter().for_each(Parameter::zero_grad);
    }

    /// Returns the parameters, group by group.
    fn parameters(&self) -> Vec<Parameter>;

    /// Returns the learning rate of each group, times the [factor](Optimizer::set_factor).
    fn learning_rates(&self) -> Vec<f64>;

    /// Returns the factor of the learning rates. Default: 1.
    fn factor(&self) -> f64;

    /// Multiplies the learning rates of all groups by a factor. This is how a [`Schedule`] changes them.
    fn set_factor(&self, factor: f64) -> Result<()>;

    /// Returns everything that is needed to resume training bit-identically: the options of the groups, and the state
    /// of each parameter, by its index. Distributed tensors stay distributed.
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

    /// Loads options and state or, if something does not fit, nothing.
    ///
    /// Layouts are handled as in [`Module::load_state_dict`](crate::nn::Module::load_state_dict): a value on the
    /// parameter's mesh is redistributed to the parameter's layout, and of a plain value every rank takes its shard.
    /// So after its parameters got a new layout, an optimizer can continue with
    /// `optimizer.load_state_dict(&optimizer.state_dict())`.
    #[track_caller]
    fn load_state_dict(&self, state: &StateDict) -> Result<()>;
}

/// Returns an error if a parameter or gradient is partial, because then no rank has its elements.
fn expect_not_partial(op: &'static str, x: &Tensor) -> Result<()> {
    match x.layout() {
        Some(layout) if x.placements().iter().any(|p| p.is_partial()) => Err(Error::argument(
            op,
            format!(
                "a parameter or gradient is partial ({layout}): redistribute it to Replicate or Shard first"
            ),
        )),
        _ => Ok(()),
    }
}
