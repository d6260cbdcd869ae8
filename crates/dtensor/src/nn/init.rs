//! Initializers for parameters.
//!
//! An [`Init`] is a rule for initial values. It [fills](Init::apply) a parameter in place, or [creates](Init::tensor)
//! a tensor. The values do not depend on the layout: a distributed parameter gets the same bits as on one device, and
//! fans are computed from the global shape.
//!
//! ```
//! use dtensor::nn::init::{self, Fan, Nonlinearity};
//! use dtensor::nn::{Linear, Module};
//! use dtensor::prelude::*;
//! # fn main() -> Result<()> {
//! let layer = Linear::new(64, 32, true)?;
//! init::kaiming_normal(Fan::In, Nonlinearity::Relu).apply(&layer.weight)?;
//! init::zeros().apply(layer.bias.as_ref().unwrap())?;
//! // Apply an initialiser to every matrix.
//! let normal = init::trunc_normal(0.0, 0.02, -0.04, 0.04);
//! for (_, parameter) in layer.named_parameters().iter().filter(|(_, p)| p.get().ndim() == 2) {
//!     normal.apply(parameter)?;
//! }
//! # Ok(())
//! # }
//! ```

use super::Parameter;
use crate::random::Distribution;
use crate::tensor::default_device;
use crate::{DType, Device, Error, Result, Shape, Tensor, no_grad};

/// A rule for the initial values of a tensor. The functions of this module create one.
///
/// ```
/// use dtensor::nn::{Parameter, init};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let rule = init::xavier_uniform(1.0);
/// let fresh = rule.tensor([5, 3], DType::F32)?;
/// assert!(fresh.abs()?.max_all()?.item::<f32>()? <= (6f32 / 8.0).sqrt());
/// // As the rule of a parameter, which `reset_parameters` runs again.
/// let weight = Parameter::with_init([5, 3], move |like| rule.like(like))?;
/// assert_eq!(weight.get().dims(), [5, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Init(InitRule);

#[derive(Clone, Copy, Debug, PartialEq)]
enum InitRule {
    Constant(f64),
    Eye,
    /// A distribution, and the name of the function for errors.
    Random(&'static str, Distribution),
    VarianceScaled(VarianceScaling),
}

/// Random values with mean 0, whose variance depends on the fans.
#[derive(Clone, Copy, Debug, PartialEq)]
struct VarianceScaling {
    name: &'static str,
    fan: FanMode,
    gain: f64,
    normal: bool,
}

/// The fan that the variance is divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum FanMode {
    One(Fan),
    /// The mean of fan in and fan out.
    Both,
}

/// The fan that the variance of the weights is scaled by.
///
/// ```
/// use dtensor::DType;
/// use dtensor::nn::init::{Fan, Nonlinearity, kaiming_uniform};
/// # fn main() -> dtensor::Result<()> {
/// let largest = |fan| {
///     let x = kaiming_uniform(fan, Nonlinearity::Linear).tensor([2, 1000], DType::F32)?;
///     x.abs()?.max_all()?.item::<f32>()
/// };
/// assert!(largest(Fan::In)? < 0.06 && largest(Fan::Out)? > 1.0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fan {
    /// Fan in, the number of inputs of one output: preserves the variance in the forward pass.
    #[default]
    In,
    /// Fan out, the number of outputs of one input: preserves the variance in the backward pass.
    Out,
}

/// The nonlinearity after a layer.
///
/// ```
/// use dtensor::nn::init::{Nonlinearity, calculate_gain};
/// // A slope of zero is a ReLU.
/// assert_eq!(calculate_gain(Nonlinearity::LeakyRelu(0.0)), calculate_gain(Nonlinearity::Relu));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Nonlinearity {
    /// None, or a convolution.
    Linear,
    /// The logistic sigmoid.
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
    /// ReLU.
    Relu,
    /// Leaky ReLU with this negative slope.
    LeakyRelu(f64),
    /// The scaled exponential linear unit.
    Selu,
}

/// Returns the factor for the standard deviation of weights that preserves the variance through a nonlinearity.
///
/// ```
/// use dtensor::nn::init::{Nonlinearity, calculate_gain};
/// assert_eq!(calculate_gain(Nonlinearity::Tanh), 5.0 / 3.0);
/// assert_eq!(calculate_gain(Nonlinearity::LeakyRelu(1.0)), 1.0);
/// ```
pub fn calculate_gain(nonlinearity: Nonlinearity) -> f64 {
    match nonlinearity {
        Nonlinearity::Linear | Nonlinearity::Sigmoid => 1.0,
        Nonlinearity::Tanh => 5.0 / 3.0,
        Nonlinearity::Relu => 2f64.sqrt(),
        Nonlinearity::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
        Nonlinearity::Selu => 0.75,
    }
}

/// Returns fan in and fan out of a weight of shape `[outputs, inputs, …]`. Further dims are those of a convolution
/// kernel, and multiply both.
///
/// ```
/// use dtensor::nn::init::calculate_fans;
/// assert_eq!(calculate_fans([8, 4]).unwrap(), (4, 8));
/// assert_eq!(calculate_fans([8, 4, 3, 3]).unwrap(), (36, 72));
/// assert!(calculate_fans([8]).is_err());
/// ```
pub fn calculate_fans(shape: impl Into<Shape>) -> Result<(usize, usize)> {
    compute_fans("calculate_fans", &shape.into())
}

fn compute_fans(op: &'static str, shape: &[usize]) -> Result<(usize, usize)> {
    let [outputs, inputs, kernel @ ..] = shape else {
        let message = format!(
            "fan in and fan out can not be computed for tensor with fewer than 2 dimensions, and this one has shape {}",
            Shape::from(shape)
        );
        return Err(Error::argument(op, message));
    };
    let kernel: usize = kernel.iter().product();
    Ok((inputs * kernel, outputs * kernel))
}

/// Declares functions that create an [`Init`], each with an example.
macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) $example:literal => $kind:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// ```
        /// use dtensor::nn::init::*;
        /// # use dtensor::DType;
        /// # fn main() -> dtensor::Result<()> {
        #[doc = concat!("let x = ", stringify!($name), "(", $example, ").tensor([3, 4], DType::F32)?;")]
        /// assert_eq!(x.dims(), [3, 4]);
        /// # Ok(())
        /// # }
        /// ```
        pub fn $name($($arg: $type),*) -> Init {
            Init($kind)
        }
    )*};
}

rules! {
    /// Fills with zeros.
    zeros() "" => InitRule::Constant(0.0);
    /// Fills with ones.
    ones() "" => InitRule::Constant(1.0);
    /// Fills with one value.
    constant(value: f64) "0.5" => InitRule::Constant(value);
    /// Fills a matrix with ones on the diagonal and zeros elsewhere: the identity.
    eye() "" => InitRule::Eye;
    /// Draws from the uniform distribution on [`low`, `high`).
    uniform(low: f64, high: f64) "-0.1, 0.1" => InitRule::Random("uniform", Distribution::Uniform { low, high });
    /// Draws from the normal distribution with this mean and standard deviation.
    normal(mean: f64, std: f64) "0.0, 0.02" => InitRule::Random("normal", Distribution::Normal { mean, std });
    /// Draws from the normal distribution with this mean and standard deviation, truncated to [`a`, `b`].
    trunc_normal(mean: f64, std: f64, a: f64, b: f64) "0.0, 0.02, -0.04, 0.04" =>
        InitRule::Random("trunc_normal", Distribution::Truncated { mean, std, low: a, high: b });
    /// Draws from the uniform distribution with mean 0 and variance gain² / (mean of both fans): Glorot and Bengio,
    /// "Understanding the difficulty of training deep feedforward neural networks".
    xavier_uniform(gain: f64) "1.0" => variance_scaling("xavier_uniform", FanMode::Both, gain, false);
    /// Draws from the normal distribution with mean 0 and variance gain² / (mean of both fans).
    xavier_normal(gain: f64) "calculate_gain(Nonlinearity::Tanh)" => variance_scaling("xavier_normal", FanMode::Both, gain, true);
    /// Draws from the uniform distribution with mean 0 and variance gain² / fan, with the gain of the nonlinearity:
    /// He, Zhang, Ren and Sun, "Delving deep into rectifiers".
    kaiming_uniform(fan: Fan, nonlinearity: Nonlinearity) "Fan::In, Nonlinearity::LeakyRelu(0.1)" =>
        variance_scaling("kaiming_uniform", FanMode::One(fan), calculate_gain(nonlinearity), false);
    /// Draws from the normal distribution with mean 0 and variance gain² / fan, with the gain of the nonlinearity.
    kaiming_normal(fan: Fan, nonlinearity: Nonlinearity) "Fan::Out, Nonlinearity::Relu" =>
        variance_scaling("kaiming_normal", FanMode::One(fan), calculate_gain(nonlinearity), true);
}

fn variance_scaling(name: &'static str, fan: FanMode, gain: f64, normal: bool) -> InitRule {
    InitRule::VarianceScaled(VarianceScaling { name, fan, gain, normal })
}

impl VarianceScaling {
    /// Returns the standard deviation for a tensor of this shape.
    fn std(self, shape: &[usize]) -> Result<f64> {
        if !(self.gain >= 0.0 && self.gain.is_finite()) {
            return Err(Error::argument(
                self.name,
                format!("gain must be >= 0 and finite, but got {}", self.gain),
            ));
        }
        let (inputs, outputs) = compute_fans(self.name, shape)?;
        let fan = match self.fan {
            FanMode::One(Fan::In) => inputs as f64,
            FanMode::One(Fan::Out) => outputs as f64,
            FanMode::Both => (inputs + outputs) as f64 / 2.0,
        };
        // A fan of zero means that the tensor has no elements.
        Ok(if fan > 0.0 { self.gain / fan.sqrt() } else { 0.0 })
    }
}

impl Init {
    /// Sets the initial value of a parameter. Random values come from this thread's generator. The layout,
    /// `requires_grad` and the accumulated gradient are kept.
    ///
    /// A parameter on [`Device::Meta`] gets memory on the default device and keeps its layout. Within
    /// [`on_device`](crate::on_device) for the meta device, it stays without a value.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::nn::{Linear, init};
    /// use dtensor::{Device, DeviceMesh, Shard, distribute_tensor, on_device};
    /// # fn main() -> dtensor::Result<()> {
    /// let layer = on_device(Device::Meta, || Linear::new(1 << 20, 1 << 20, false))?;
    /// let mesh = DeviceMesh::new(&World::simulated(1 << 18, 0)?, [1 << 18], "tp")?;
    /// layer.weight.replace(&distribute_tensor(&layer.weight.get().detach(), &mesh, [Shard(0)])?)?;
    /// init::xavier_normal(1.0).apply(&layer.weight)?;
    /// assert_eq!(layer.weight.get().to_local()?.dims(), [4, 1 << 20]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn apply(&self, parameter: &Parameter) -> Result<()> {
        let before = parameter.get().detach();
        let device = if before.is_meta() { default_device()? } else { before.device() };
        let place = if before.device() == device { before } else { before.empty_like(device)? };
        let value = no_grad(|| self.like(&place))?;
        parameter.set_initial(&place, &value)
    }

    /// Creates a tensor.
    pub fn tensor(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.create(&Tensor::meta_of(shape, dtype)?, default_device()?)
    }

    /// Creates a tensor with the shape, dtype and device of `like`, and on its mesh. If `like` is partial, the new
    /// tensor is replicated.
    pub fn like(&self, like: &Tensor) -> Result<Tensor> {
        self.create(like, like.device())
    }

    /// Creates a tensor as [`like`](Init::like) does, on another device.
    fn create(&self, like: &Tensor, device: Device) -> Result<Tensor> {
        let draw = |name, distribution| like.random_like(name, distribution, device);
        match self.0 {
            InitRule::Constant(value) => like.full_like_on(device, value),
            InitRule::Eye if like.ndim() != 2 => {
                let message = format!(
                    "only tensors with 2 dimensions are supported, and this one has shape {}",
                    like.shape()
                );
                Err(Error::argument("eye", message))
            }
            InitRule::Eye => like.windows_like(device, |window| Tensor::eye_window(like.dtype(), window)),
            InitRule::Random(name, distribution) => draw(name, distribution),
            InitRule::VarianceScaled(scaled) => {
                let std = scaled.std(like.dims())?;
                // A uniform distribution on ±bound has the standard deviation bound / √3.
                let bound = 3f64.sqrt() * std;
                let normal = Distribution::Normal { mean: 0.0, std };
                let uniform = Distribution::Uniform { low: -bound, high: bound };
                draw(scaled.name, if scaled.normal { normal } else { uniform })
            }
        }
    }
}
