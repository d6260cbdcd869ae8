//! Convolution layers.

use super::{Base, Module, Parameter, forward};
use crate::{ConvOptions, Error, Result, Shape, Tensor};

/// Creates weight and bias, uniform within ±1/√(inputs / groups · elements of the kernel).
fn init_parameters(
    op: &'static str,
    inputs: usize,
    outputs: usize,
    kernel: &[usize],
    groups: usize,
    bias: bool,
) -> Result<(Parameter, Option<Parameter>)> {
    for (what, n) in [("inputs", inputs), ("outputs", outputs)] {
        if groups == 0 || !n.is_multiple_of(groups) {
            return Err(Error::argument(
                op,
                format!("{n} {what} must be divisible by the number of groups, {groups}"),
            ));
        }
    }
    let shape: Shape = [outputs, inputs / groups].into_iter().chain(kernel.iter().copied()).collect();
    shape.checked_numel(op)?;
    let fan_in = shape[1..].iter().product::<usize>();
    let bound = if fan_in > 0 { 1.0 / (fan_in as f64).sqrt() } else { 0.0 };
    let uniform = move |like: &Tensor| like.uniform_like(-bound, bound);
    let weight = Parameter::with_init(shape, uniform)?;
    Ok((weight, if bias { Some(Parameter::with_init([outputs], uniform)?) } else { None }))
}

/// A 1-d [convolution](Tensor::conv1d) of `[batch, inputs, length]`.
///
/// ```
/// use dtensor::nn::Conv1d;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Conv1d::new(3, 8, [5], true, Default::default())?;
/// assert_eq!(layer.forward(&Tensor::zeros([2, 3, 16], DType::F32)?)?.dims(), [2, 8, 12]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct Conv1d {
    /// Kernel of shape `[outputs, inputs / groups, kernel length]`.
    pub weight: Parameter,
    /// Bias of shape `[outputs]`, if any.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: ConvOptions<1>,
    base: Base,
}

#[forward]
impl Conv1d {
    /// Creates a layer with weight and bias uniform within ±1/√(inputs / groups · kernel length), drawn from this
    /// thread's generator.
    pub fn new(
        inputs: usize,
        outputs: usize,
        kernel: [usize; 1],
        bias: bool,
        options: ConvOptions<1>,
    ) -> Result<Self> {
        let (weight, bias) = init_parameters("Conv1d", inputs, outputs, &kernel, options.groups, bias)?;
        Ok(Conv1d { weight, bias, options, base: Base::new() })
    }

    /// Returns stride, padding, dilation and groups.
    pub fn options(&self) -> ConvOptions<1> {
        self.options
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.conv1d(&self.weight.get(), self.bias.as_ref().map(Parameter::get).as_ref(), self.options)
    }
}

/// A 2-d [convolution](Tensor::conv2d) of `[batch, inputs, height, width]`.
///
/// ```
/// use dtensor::nn::Conv2d;
/// use dtensor::prelude::*;
/// use dtensor::{ConvOptions, Padding};
/// # fn main() -> Result<()> {
/// let layer = Conv2d::new(3, 8, [3, 3], true, ConvOptions { padding: Padding::Same, ..Default::default() })?;
/// assert_eq!(layer.forward(&Tensor::zeros([2, 3, 16, 9], DType::F32)?)?.dims(), [2, 8, 16, 9]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct Conv2d {
    /// Kernel of shape `[outputs, inputs / groups, kernel height, kernel width]`.
    pub weight: Parameter,
    /// Bias of shape `[outputs]`, if any.
    pub bias: Option<Parameter>,
    #[module(skip)]
    options: ConvOptions<2>,
    base: Base,
}

#[forward]
impl Conv2d {
    /// Creates a layer with weight and bias uniform within ±1/√(inputs / groups · elements of the kernel), drawn from
    /// this thread's generator.
    pub fn new(
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        bias: bool,
        options: ConvOptions<2>,
    ) -> Result<Self> {
        let (weight, bias) = init_parameters("Conv2d", inputs, outputs, &kernel, options.groups, bias)?;
        Ok(Conv2d { weight, bias, options, base: Base::new() })
    }

    /// Returns stride, padding, dilation and groups.
    pub fn options(&self) -> ConvOptions<2> {
        self.options
    }

    /// Applies the layer.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.conv2d(&self.weight.get(), self.bias.as_ref().map(Parameter::get).as_ref(), self.options)
    }
}
