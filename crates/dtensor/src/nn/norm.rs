//! Normalization layers.

use super::{Base, Module, Parameter, forward};
use crate::{DType, Error, Result, Shape, Tensor};

/// Layer normalisation: normalises over the last dims to mean 0 and variance 1, then scales by `weight` and adds
/// `bias`. These start as ones and zeros.
///
/// ```
/// use dtensor::nn::LayerNorm;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[1f32, 3., 5., 7.], [2, 2])?;
/// let y = LayerNorm::new(2)?.with_eps(0.0).forward(&x)?;
/// assert_eq!(y.to_vec::<f32>()?, [-1., 1., -1., 1.]);
/// // Over two dims, and without parameters.
/// assert_eq!(LayerNorm::new([2, 2])?.without_parameters().forward(&x)?.dims(), [2, 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct LayerNorm {
    /// Scale, with the shape of the normalised dims, if any.
    pub weight: Option<Parameter>,
    /// Bias, with the shape of the normalised dims, if any.
    pub bias: Option<Parameter>,
    shape: Shape,
    eps: f64,
    base: Base,
}

#[forward]
impl LayerNorm {
    /// Creates a norm over the last dims, which have this shape, with weight and bias, and an epsilon of 1e-5.
    pub fn new(shape: impl Into<Shape>) -> Result<Self> {
        let shape = check_normalized_shape("LayerNorm", shape.into())?;
        Ok(LayerNorm {
            weight: Some(Parameter::with_init(&shape, Tensor::ones_like)?),
            bias: Some(Parameter::with_init(&shape, Tensor::zeros_like)?),
            shape,
            eps: 1e-5,
            base: Base::new(),
        })
    }

    /// Sets the epsilon that is added to the variance.
    pub fn with_eps(self, eps: f64) -> Self {
        LayerNorm { eps, ..self }
    }

    /// Removes the bias.
    pub fn without_bias(self) -> Self {
        LayerNorm { bias: None, ..self }
    }

    /// Removes weight and bias.
    pub fn without_parameters(self) -> Self {
        LayerNorm { weight: None, bias: None, ..self }
    }

    /// Returns the shape of the normalised dims.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the epsilon that is added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        expect_last_dims("LayerNorm", &self.shape, x)?;
        let value = |parameter: &Option<Parameter>| parameter.as_ref().map(Parameter::get);
        let (weight, bias) = (value(&self.weight), value(&self.bias));
        x.layer_norm(self.shape.ndim(), weight.as_ref(), bias.as_ref(), self.eps)
    }
}

/// Root-mean-square normalisation: divides by the root of the mean square over the last dims, then scales by
/// `weight`, which starts as ones.
///
/// ```
/// use dtensor::nn::RmsNorm;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[1f32, 7., 5., 5.], [2, 2])?;
/// let y = RmsNorm::new(2)?.with_eps(0.0).forward(&x)?;
/// assert_eq!(y.to_vec::<f32>()?, [0.2, 1.4, 1., 1.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct RmsNorm {
    /// Scale, with the shape of the normalised dims, if any.
    pub weight: Option<Parameter>,
    shape: Shape,
    eps: Option<f64>,
    base: Base,
}

#[forward]
impl RmsNorm {
    /// Creates a norm over the last dims, which have this shape, with a weight. By default the epsilon is the machine
    /// epsilon of the precision in which the norm is computed.
    pub fn new(shape: impl Into<Shape>) -> Result<Self> {
        let shape = check_normalized_shape("RmsNorm", shape.into())?;
        let weight = Parameter::with_init(&shape, Tensor::ones_like)?;
        Ok(RmsNorm { weight: Some(weight), shape, eps: None, base: Base::new() })
    }

    /// Sets the epsilon that is added to the mean square.
    pub fn with_eps(self, eps: f64) -> Self {
        RmsNorm { eps: Some(eps), ..self }
    }

    /// Removes the weight.
    pub fn without_weight(self) -> Self {
        RmsNorm { weight: None, ..self }
    }

    /// Returns the shape of the normalised dims.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the epsilon that is added to the mean square, if it was set.
    pub fn eps(&self) -> Option<f64> {
        self.eps
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        expect_last_dims("RmsNorm", &self.shape, x)?;
        // Half precision is computed in single precision.
        let least = if x.dtype() == DType::F64 { f64::EPSILON } else { f32::EPSILON.into() };
        let weight = self.weight.as_ref().map(Parameter::get);
        x.rms_norm(self.shape.ndim(), weight.as_ref(), self.eps.unwrap_or(least))
    }
}

fn check_normalized_shape(op: &'static str, shape: Shape) -> Result<Shape> {
    if shape.ndim() == 0 {
        return Err(Error::argument(op, "expected normalized_shape to be at least 1-dimensional"));
    }
    Ok(shape)
}

fn expect_last_dims(op: &'static str, shape: &Shape, x: &Tensor) -> Result<()> {
    if x.dims().ends_with(shape) {
        return Ok(());
    }
    let message =
        format!("given normalized_shape {shape}, expected input with these last dims, but got {}", x.shape());
    Err(Error::argument(op, message))
}
