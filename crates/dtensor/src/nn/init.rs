//! First values of parameters.
//!
//! An [`Init`] says how a tensor is to begin. It [fills](Init::apply) a parameter in place, wherever that
//! lies, or [makes](Init::tensor) a tensor. What it makes does not depend on where: a parameter that is
//! spread over a mesh gets the bits that it would get on one device, and fans are those of the whole.
//!
//! ```
//! use dtensor::nn::init::{self, Fan, Nonlinearity};
//! use dtensor::nn::{Linear, Module};
//! use dtensor::prelude::*;
//! # fn main() -> Result<()> {
//! let layer = Linear::new(64, 32, true)?;
//! init::kaiming_normal(Fan::In, Nonlinearity::Relu).apply(&layer.weight)?;
//! init::zeros().apply(layer.bias.as_ref().unwrap())?;
//! // Everything that is a matrix.
//! let normal = init::trunc_normal(0.0, 0.02, -0.04, 0.04);
//! for (_, parameter) in layer.named_parameters().iter().filter(|(_, p)| p.get().rank() == 2) {
//!     normal.apply(parameter)?;
//! }
//! # Ok(())
//! # }
//! ```

use super::Parameter;
use crate::random::Distribution;
use crate::tensor::default_device;
use crate::{DType, Device, Error, Result, Shape, Tensor, no_grad};

/// How a tensor is to begin. The functions of this module make them.
///
/// ```
/// use dtensor::nn::{Parameter, init};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let rule = init::xavier_uniform(1.0);
/// let fresh = rule.tensor([5, 3], DType::F32)?;
/// assert!(fresh.abs()?.max_all()?.item::<f32>()? <= (6f32 / 8.0).sqrt());
/// // As the rule of a parameter, by which its module can be reset.
/// let weight = Parameter::drawn([5, 3], move |like| rule.like(like))?;
/// assert_eq!(weight.get().dims(), [5, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Init(Kind);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Constant(f64),
    Eye,
    /// By the function of this name.
    Drawn(&'static str, Distribution),
    Scaled(Scaled),
}

/// Random numbers with mean 0, whose spread goes by the shape.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scaled {
    name: &'static str,
    fan: Average,
    gain: f64,
    normal: bool,
}

/// What the variance is divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Average {
    One(Fan),
    /// The mean of both.
    Both,
}

/// Which of the two sizes of a layer its weights are scaled by.
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
    /// How many inputs go into one output: keeps the variance in the forward pass.
    #[default]
    In,
    /// How many outputs one input goes into: keeps the variance in the backward pass.
    Out,
}

/// What follows a layer.
///
/// ```
/// use dtensor::nn::init::{Nonlinearity, calculate_gain};
/// // Without a slope, nothing leaks.
/// assert_eq!(calculate_gain(Nonlinearity::LeakyRelu(0.0)), calculate_gain(Nonlinearity::Relu));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Nonlinearity {
    /// Nothing, or a convolution.
    Linear,
    /// The logistic function.
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
    /// The positive part.
    Relu,
    /// The positive part and the negative one times this.
    LeakyRelu(f64),
    /// The self-normalising exponential unit.
    Selu,
}

/// What weights before a nonlinearity are scaled by to keep the variance.
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

/// How many inputs go into one output of a weight of this shape, `[outputs, inputs, …]`, and how many outputs
/// one input goes into. Further dims are those of a kernel.
///
/// ```
/// use dtensor::nn::init::calculate_fans;
/// assert_eq!(calculate_fans([8, 4]).unwrap(), (4, 8));
/// assert_eq!(calculate_fans([8, 4, 3, 3]).unwrap(), (36, 72));
/// assert!(calculate_fans([8]).is_err());
/// ```
pub fn calculate_fans(shape: impl Into<Shape>) -> Result<(usize, usize)> {
    fans("calculate_fans", &shape.into())
}

fn fans(op: &'static str, shape: &[usize]) -> Result<(usize, usize)> {
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

/// Declares functions that make a rule, each with an example.
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
    /// Zeros.
    zeros() "" => Kind::Constant(0.0);
    /// Ones.
    ones() "" => Kind::Constant(1.0);
    /// One number everywhere.
    constant(value: f64) "0.5" => Kind::Constant(value);
    /// Ones on the diagonal of a matrix, else zeros: what comes in goes out.
    eye() "" => Kind::Eye;
    /// Uniform on [`low`, `high`).
    uniform(low: f64, high: f64) "-0.1, 0.1" => Kind::Drawn("uniform", Distribution::Uniform { low, high });
    /// Normal with this mean and standard deviation.
    normal(mean: f64, std: f64) "0.0, 0.02" => Kind::Drawn("normal", Distribution::Normal { mean, std });
    /// Normal with this mean and standard deviation, but between `a` and `b`, both included.
    trunc_normal(mean: f64, std: f64, a: f64, b: f64) "0.0, 0.02, -0.04, 0.04" =>
        Kind::Drawn("trunc_normal", Distribution::Truncated { mean, std, low: a, high: b });
    /// Uniform with mean 0 and the variance gain² / (mean of both fans), of Glorot and Bengio ("Understanding
    /// the difficulty of training deep feedforward neural networks").
    xavier_uniform(gain: f64) "1.0" => scaled("xavier_uniform", Average::Both, gain, false);
    /// Normal with mean 0 and the variance gain² / (mean of both fans).
    xavier_normal(gain: f64) "calculate_gain(Nonlinearity::Tanh)" => scaled("xavier_normal", Average::Both, gain, true);
    /// Uniform with mean 0 and the variance gain² / fan, of He, Zhang, Ren and Sun ("Delving deep into
    /// rectifiers"); the gain is that of the nonlinearity.
    kaiming_uniform(fan: Fan, nonlinearity: Nonlinearity) "Fan::In, Nonlinearity::LeakyRelu(0.1)" =>
        scaled("kaiming_uniform", Average::One(fan), calculate_gain(nonlinearity), false);
    /// Normal with mean 0 and the variance gain² / fan; the gain is that of the nonlinearity.
    kaiming_normal(fan: Fan, nonlinearity: Nonlinearity) "Fan::Out, Nonlinearity::Relu" =>
        scaled("kaiming_normal", Average::One(fan), calculate_gain(nonlinearity), true);
}

fn scaled(name: &'static str, fan: Average, gain: f64, normal: bool) -> Kind {
    Kind::Scaled(Scaled { name, fan, gain, normal })
}

impl Scaled {
    /// The standard deviation for a tensor of this shape.
    fn std(self, shape: &[usize]) -> Result<f64> {
        if !(self.gain >= 0.0 && self.gain.is_finite()) {
            return Err(Error::argument(
                self.name,
                format!("gain must be >= 0 and finite, but got {}", self.gain),
            ));
        }
        let (inputs, outputs) = fans(self.name, shape)?;
        let fan = match self.fan {
            Average::One(Fan::In) => inputs as f64,
            Average::One(Fan::Out) => outputs as f64,
            Average::Both => (inputs + outputs) as f64 / 2.0,
        };
        // Without inputs or outputs there is no element either.
        Ok(if fan > 0.0 { self.gain / fan.sqrt() } else { 0.0 })
    }
}

impl Init {
    /// Gives a parameter its first value, from this thread's generator if that is random. How the parameter
    /// lies, whether its gradient is wanted, the gradient collected so far and which parameter it is stay as
    /// they are.
    ///
    /// A parameter without a value, one that was made on [`Device::Meta`], gets one, and lies as it did; only inside
    /// [`on_device`](crate::on_device), where a model is made without values, it goes on without.
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
        let device = if before.is_meta() { default_device() } else { before.device() };
        let place = if before.device() == device { before } else { before.empty_like(device)? };
        let value = no_grad(|| self.like(&place))?;
        parameter.begin(&place, &value)
    }

    /// A new tensor.
    pub fn tensor(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.made(&Tensor::meta_of(shape, dtype)?, default_device())
    }

    /// A new tensor of the shape, dtype and device of another one, and on its mesh. Where that one has
    /// partial values, this one is whole.
    pub fn like(&self, like: &Tensor) -> Result<Tensor> {
        self.made(like, like.device())
    }

    /// As [`like`](Init::like), on another device.
    fn made(&self, like: &Tensor, device: Device) -> Result<Tensor> {
        let drawn = |name, distribution| like.drawn_like(name, distribution, device);
        match self.0 {
            Kind::Constant(value) => like.full_like_on(device, value),
            Kind::Eye if like.rank() != 2 => {
                let message = format!(
                    "only tensors with 2 dimensions are supported, and this one has shape {}",
                    like.shape()
                );
                Err(Error::argument("eye", message))
            }
            Kind::Eye => like.parts_like(device, |window| Tensor::eye_window(like.dtype(), window)),
            Kind::Drawn(name, distribution) => drawn(name, distribution),
            Kind::Scaled(scaled) => {
                let std = scaled.std(like.dims())?;
                // That of numbers uniform within ±bound is bound / √3.
                let bound = 3f64.sqrt() * std;
                let normal = Distribution::Normal { mean: 0.0, std };
                let uniform = Distribution::Uniform { low: -bound, high: bound };
                drawn(scaled.name, if scaled.normal { normal } else { uniform })
            }
        }
    }
}
