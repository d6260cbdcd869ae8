//! Quantiles and medians, computed from sorted elements.

use super::{Arrays, Aside, Here, Metas, Op, grads, need_float, one, same_dtype};
use crate::autograd::{Backward, Grads};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::binary as kernel;
use dtensor_array::shape::Dim;
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::Rule;

/// How to interpolate a quantile between two elements.
///
/// ```
/// use dtensor::{Interpolation, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::from_slice(&[0f64, 10.], [2])?;
/// let quarter = |between| x.quantile_all(0.25, between)?.item::<f64>();
/// assert_eq!((quarter(Interpolation::Linear)?, quarter(Interpolation::Midpoint)?), (2.5, 5.0));
/// assert_eq!((quarter(Interpolation::Lower)?, quarter(Interpolation::Higher)?), (0.0, 10.0));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interpolation {
    /// Interpolates linearly.
    #[default]
    Linear,
    /// The smaller element.
    Lower,
    /// The larger element.
    Higher,
    /// The nearest element; if both are equally near, the one with the even index.
    Nearest,
    /// The mean of both elements.
    Midpoint,
}

/// One quantile, or several, which become a new first dim of the result.
///
/// ```
/// use dtensor::{Interpolation, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::from_slice(&[3f32, 1., 2., 5., 4.], [5])?;
/// assert_eq!(x.quantile_all(0.5, Interpolation::Linear)?.to_vec::<f32>()?, [3.]);
/// assert_eq!(x.quantile_all([0.0, 0.25], Interpolation::Linear)?.to_vec::<f32>()?, [1., 2.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct QuantileOptions {
    all: Vec<f64>,
    several: bool,
}

impl From<f64> for QuantileOptions {
    fn from(q: f64) -> Self {
        QuantileOptions { all: vec![q], several: false }
    }
}

impl<const N: usize> From<[f64; N]> for QuantileOptions {
    fn from(all: [f64; N]) -> Self {
        QuantileOptions { all: all.into(), several: true }
    }
}

impl From<&[f64]> for QuantileOptions {
    fn from(all: &[f64]) -> Self {
        QuantileOptions { all: all.into(), several: true }
    }
}

/// Linear interpolation `a + weight · (b − a)` with a weight between 0 and 1, also if the difference is infinite.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Lerp {
    op: &'static str,
    weight: Aside<f64>,
}

impl Op for Lerp {
    fn name(&self) -> &'static str {
        self.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_float(self.op, same_dtype(self.op, x)?)?;
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)?.linear(&[0, 1])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::between(x[0], x[1], self.weight.0)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (weight, dy) = (self.weight.0, cx.dy()?);
        Ok(grads![cx.when(0, || dy.mul(1.0 - weight))?, cx.when(1, || dy.mul(weight))?])
    }
}

impl Tensor {
    /// Returns the `q`-quantile along one dim: 0 gives the minimum, 1 the maximum, and values between two elements
    /// are interpolated. Rows with NaN give NaN. Returns an error if the tensor is empty, or if there is no `q`.
    ///
    /// ```
    /// use dtensor::{Interpolation, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[4f32, 1., 3., 2., 20., 10.], [2, 3])?;
    /// assert_eq!(x.quantile(0.5, 1, false, Interpolation::Linear)?.to_vec::<f32>()?, [3., 10.]);
    /// assert_eq!(x.quantile([0.25, 1.0], 0, true, Interpolation::Linear)?.dims(), [2, 1, 3]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn quantile(
        &self,
        q: impl Into<QuantileOptions>,
        dim: impl Into<Dim>,
        keepdim: bool,
        interpolation: Interpolation,
    ) -> Result<Tensor> {
        const OP: &str = "quantile";
        let (q, dim) = (q.into(), self.dim(OP, dim)?);
        need_float(OP, self.dtype())?;
        let error = |message: String| Err(Error::argument(OP, message));
        if self.numel() == 0 {
            return error(format!("input tensor must be non-empty, but its shape is {}", self.shape()));
        }
        if q.all.is_empty() {
            return error("q: the list is empty".into());
        }
        if let Some(q) = q.all.iter().find(|q| !(0.0..=1.0).contains(*q)) {
            return error(format!("q values must be in the range [0, 1], but one is {q}"));
        }
        if self.ndim() == 0 {
            let y = self.unsqueeze(0)?.quantile_of(&q, 0, interpolation)?;
            return if q.several { y.reshape([q.all.len()]) } else { y.reshape(Shape::scalar()) };
        }
        let y = self.quantile_of(&q, dim, interpolation)?;
        match (q.several, keepdim) {
            (true, true) => Ok(y),
            (true, false) => y.squeeze(dim + 1),
            (false, true) => y.squeeze(0),
            (false, false) => y.squeeze(0)?.squeeze(dim),
        }
    }

    /// Returns the [`quantile`](Tensor::quantile) of all elements.
    ///
    /// ```
    /// use dtensor::{Interpolation, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[4f32, 1., 3., 2.], [2, 2])?;
    /// assert_eq!(x.quantile_all(0.5, Interpolation::Linear)?.item::<f32>()?, 2.5);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn quantile_all(
        &self,
        q: impl Into<QuantileOptions>,
        interpolation: Interpolation,
    ) -> Result<Tensor> {
        self.flatten_all()?.quantile(q, 0, false, interpolation)
    }

    /// Returns all quantiles along a new first dim, with `dim` of size 1 after it.
    #[track_caller]
    fn quantile_of(&self, q: &QuantileOptions, dim: usize, interpolation: Interpolation) -> Result<Tensor> {
        const OP: &str = "quantile";
        let n = self.dims()[dim];
        // Half precision is too coarse to interpolate in.
        let half = self.dtype().size() == 2;
        let x = if half { &self.to_dtype(DType::F32)? } else { self };
        let (sorted, _) = x.sort(dim, false)?;
        // NaN is sorted last, so the last element tells whether there is one.
        let last = sorted.narrow(dim, n - 1, 1)?;
        let has_nan = last.ne(&last)?;
        let mut all = Vec::with_capacity(q.all.len());
        // A loop instead of a closure, so that collectives carry the source line of the caller.
        for &q in &q.all {
            // In `f64` whatever the dtype: position 0.8 · 5 must be exactly 4.
            let at = q * (n - 1) as f64;
            let (low, high) = (at.floor(), at.ceil());
            let weight = match interpolation {
                Interpolation::Linear => at - low,
                Interpolation::Midpoint if low < high => 0.5,
                Interpolation::Higher => high - low,
                Interpolation::Nearest => at.round_ties_even() - low,
                Interpolation::Lower | Interpolation::Midpoint => 0.0,
            };
            let y = if weight == 0.0 {
                sorted.narrow(dim, low as usize, 1)?
            } else if weight == 1.0 {
                sorted.narrow(dim, high as usize, 1)?
            } else {
                let both = sorted.narrow(dim, low as usize, 2)?;
                let (low, high) = (both.narrow(dim, 0, 1)?, both.narrow(dim, 1, 1)?);
                apply(Lerp { op: OP, weight: Aside(weight) }, &[&low, &high])?
            };
            let y = has_nan.where_(&last, &y)?;
            all.push(if half { y.to_dtype(self.dtype())? } else { y });
        }
        if let [only] = &all[..] {
            return only.unsqueeze(0);
        }
        Tensor::stack(&all.iter().collect::<Vec<_>>(), 0)
    }

    /// Returns the median along one dim and its index. For an even number of elements, it is the smaller of the two
    /// middle ones. If there is a NaN, the median is NaN.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[7f32, 1., 5., 3.], [4])?;
    /// let (value, index) = x.median(0, false)?;
    /// assert_eq!((value.item::<f32>()?, index.item::<i64>()?), (3., 3));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn median(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        const OP: &str = "median";
        let dim = self.dim(OP, dim)?;
        if self.ndim() == 0 {
            return Ok((self.clone(), self.zeros_like()?.to_dtype(DType::I64)?));
        }
        let n = self.dims()[dim];
        if n == 0 {
            let message =
                format!("dim {dim} of a tensor of shape {} has no elements, and so no median", self.shape());
            return Err(Error::argument(OP, message));
        }
        let (sorted, order) = self.sort(dim, false)?;
        let (last, middle) = (sorted.narrow(dim, n - 1, 1)?, (n - 1) / 2);
        let has_nan = last.ne(&last)?;
        let value = has_nan.where_(&last, &sorted.narrow(dim, middle, 1)?)?;
        let index = has_nan.where_(&order.narrow(dim, n - 1, 1)?, &order.narrow(dim, middle, 1)?)?;
        if keepdim { Ok((value, index)) } else { Ok((value.squeeze(dim)?, index.squeeze(dim)?)) }
    }

    /// Returns the [`median`](Tensor::median) of all elements. Returns an error if there are none.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[7i64, 1, 5, 3], [2, 2])?.median_all()?.item::<i64>()?, 3);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn median_all(&self) -> Result<Tensor> {
        Ok(self.flatten_all()?.median(0, false)?.0)
    }
}
