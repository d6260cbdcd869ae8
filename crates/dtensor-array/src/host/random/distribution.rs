//! [`Distribution`]: the distributions of random numbers, and the checks of their arguments.

use super::floats::{nearest, normal_source, uniform_bounds, uniform_source};
use super::integers::{Choice, Integers, threshold};
use super::philox::Draw;
#[cfg(feature = "cuda")]
use super::truncated::kernel_numbers;
use super::truncated::{bounds, truncated_source};
use super::{Window, fill_window};
use crate::{Array, Elem, Num, with_elem, with_float};
use crate::{DType, Error, Result};

/// A distribution of random numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // the fields have the usual names
pub enum Distribution {
    /// Uniform in `[low, high)`.
    Uniform { low: f64, high: f64 },
    /// Normal.
    Normal { mean: f64, std: f64 },
    /// Normal, truncated to `[low, high]`.
    Truncated { mean: f64, std: f64, low: f64, high: f64 },
    /// 1 with probability `p`, else 0.
    Bernoulli { p: f64 },
    /// Uniform over the integers `low..high`.
    Integers { low: i64, high: i64 },
}

pub(crate) fn check_probability(op: &'static str, p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) {
        Ok(())
    } else {
        Err(Error::argument(op, format!("p must be between 0 and 1, but got {p}")))
    }
}

impl Distribution {
    /// Returns an error if an argument is invalid, or if `dtype` cannot hold the numbers.
    pub fn check(self, op: &'static str, dtype: DType) -> Result<()> {
        let invalid = |message: String| Err(Error::argument(op, message));
        if !matches!(self, Distribution::Bernoulli { .. } | Distribution::Integers { .. })
            && !dtype.is_float()
        {
            return Err(Error::DType { op, dtype, why: "it needs a floating-point dtype" });
        }
        match self {
            Distribution::Uniform { low, high } => {
                if !(low <= high && (high - low).is_finite()) {
                    return invalid(format!("expected a finite low <= high, but got {low} and {high}"));
                }
                let fits = with_float!(op, dtype, T => {
                    let wide = <T as Elem>::Acc::from_f64(high - low).to_f64();
                    Ok([nearest::<T>(low), nearest::<T>(high), wide].iter().all(|x| x.is_finite()))
                })?;
                if !fits {
                    return invalid(format!("low {low} or high {high} is out of bounds for dtype {dtype}"));
                }
                if with_float!(op, dtype, T => Ok(uniform_bounds::<T>(low, high)))?.is_none() {
                    return invalid(format!(
                        "there is no number of dtype {dtype} from low = {low} up to, but excluding, high = {high}"
                    ));
                }
            }
            Distribution::Normal { std, .. } => {
                if std.is_nan() || std < 0.0 {
                    return invalid(format!("expected std >= 0.0, but got {std}"));
                }
            }
            Distribution::Truncated { mean, std, low, high } => {
                if !(std >= 0.0 && std.is_finite() && mean.is_finite()) {
                    return invalid(format!(
                        "expected a finite mean and std >= 0.0, but got {mean} and {std}"
                    ));
                }
                if low.is_nan() || high.is_nan() || low > high {
                    return invalid(format!("expected a <= b, but got a = {low} and b = {high}"));
                }
                if with_float!(op, dtype, T => Ok(bounds::<T>(low, high)))?.is_none() {
                    return invalid(format!(
                        "there is no number of dtype {dtype} from a = {low} to b = {high}"
                    ));
                }
            }
            Distribution::Bernoulli { p } => check_probability(op, p)?,
            Distribution::Integers { low, high } => {
                if low >= high {
                    return invalid(format!("low ({low}) must be less than high ({high})"));
                }
                // A floating-point dtype holds all integers up to a power of two, but not all larger ones.
                let (least, most) = match dtype {
                    DType::I64 => (i64::MIN, i64::MAX),
                    DType::U8 => (0, 255),
                    DType::BF16 => (-(1 << 8), 1 << 8),
                    DType::F16 => (-(1 << 11), 1 << 11),
                    DType::F32 => (-(1 << 24), 1 << 24),
                    DType::F64 => (-(1 << 53), 1 << 53),
                };
                if low < least || high - 1 > most {
                    return invalid(format!(
                        "low ({low}) or high ({high}) is out of bounds for dtype {dtype}, which holds the integers \
                         from {least} to {most}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Draws the window's elements of a random array. The caller must have checked the arguments with
/// [`Distribution::check`].
pub(crate) fn draw(distribution: Distribution, dtype: DType, window: &Window, draw: Draw) -> Result<Array> {
    const OP: &str = "random";
    let empty_range = || Error::argument(OP, "there is no number between the bounds");
    match distribution {
        Distribution::Uniform { low, high } => with_float!(OP, dtype, T => {
            fill_window::<T, _>(&uniform_source::<T>(draw, low, high).ok_or_else(empty_range)?, window)
        }),
        Distribution::Normal { mean, std } => {
            with_float!(OP, dtype, T => fill_window::<T, _>(&normal_source::<T>(draw, mean, std), window))
        }
        Distribution::Truncated { mean, std, low, high } => with_float!(OP, dtype, T => {
            let source = truncated_source::<T>(draw, mean, std, [low, high]);
            fill_window::<T, _>(&source.ok_or_else(empty_range)?, window)
        }),
        Distribution::Bernoulli { p } => with_elem!(dtype, T => {
            let (less, not) = (T::from_acc(Num::ONE), T::from_acc(Num::ZERO));
            fill_window(&Choice { draw, threshold: threshold(p), less, not }, window)
        }),
        Distribution::Integers { low, high } => {
            let range = high.wrapping_sub(low) as u64;
            match dtype {
                DType::I64 => fill_window(&Integers { draw, low, range, make: |x: i64| x }, window),
                // `f64` holds all integers of the other dtypes.
                _ => with_elem!(dtype, T => {
                    let make = |x: i64| T::from_acc(Num::from_f64(x as f64));
                    fill_window::<T, _>(&Integers { draw, low, range, make }, window)
                }),
            }
        }
    }
}

/// What a GPU needs to draw from a distribution: a kernel and its arguments.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recipe {
    pub(crate) kernel: &'static str,
    /// The words that count as a success.
    pub(crate) threshold: [u32; 2],
    /// The form of a truncated distribution.
    pub(crate) form: u32,
    pub(crate) numbers: [f64; 8],
    /// The smallest integer, and the number of integers.
    pub(crate) low: i64,
    pub(crate) range: u64,
}

#[cfg(feature = "cuda")]
impl Recipe {
    /// Returns what draws elements of `dtype`. Returns the errors of [`draw`].
    pub(crate) fn new(distribution: Distribution, dtype: DType) -> Result<Recipe> {
        const OP: &str = "random";
        let empty_range = || Error::argument(OP, "there is no number between the bounds");
        let mut recipe = Recipe::default();
        match distribution {
            Distribution::Uniform { low, high } => {
                let bounds = with_float!(OP, dtype, T => Ok(uniform_bounds::<T>(low, high)))?;
                let (least, most) = bounds.ok_or_else(empty_range)?;
                recipe.kernel = "uniform";
                recipe.numbers[..4].copy_from_slice(&[low, high - low, least, most]);
            }
            Distribution::Normal { mean, std } => {
                if dtype.is_int() {
                    return Err(Error::DType { op: OP, dtype, why: "it needs a floating-point dtype" });
                }
                recipe.kernel = "normal";
                recipe.numbers[..2].copy_from_slice(&[mean, std]);
            }
            Distribution::Truncated { mean, std, low, high } => {
                let numbers = with_float!(OP, dtype, T => Ok(kernel_numbers::<T>(mean, std, [low, high])))?;
                recipe.kernel = "truncated";
                (recipe.form, recipe.numbers) = numbers.ok_or_else(empty_range)?;
            }
            Distribution::Bernoulli { p } => {
                recipe.kernel = "bernoulli";
                recipe.threshold = threshold(p).words();
            }
            Distribution::Integers { low, high } => {
                recipe.kernel = "integers";
                (recipe.low, recipe.range) = (low, high.wrapping_sub(low) as u64);
            }
        }
        Ok(recipe)
    }
}
