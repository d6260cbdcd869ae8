//! What is drawn: a distribution, its arguments, and what they must be.

use super::philox::Draw;
use super::real::{nearest, normal_source, uniform_bounds, uniform_source};
use super::truncated::{bounds, truncated_source};
use super::whole::{Choice, Integers, threshold};
use super::{Window, part};
use crate::{Array, Elem, Num, with_elem, with_float};
use crate::{DType, Error, Result};

/// How random numbers are distributed.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // the fields are named as in every text on the subject
pub enum Distribution {
    /// Evenly in `[low, high)`.
    Uniform { low: f64, high: f64 },
    /// Normally.
    Normal { mean: f64, std: f64 },
    /// Normally, but between bounds, which are included.
    Truncated { mean: f64, std: f64, low: f64, high: f64 },
    /// 1 with probability `p`, else 0.
    Bernoulli { p: f64 },
    /// Evenly over the whole numbers `low..high`.
    Integers { low: i64, high: i64 },
}

pub(super) fn check_probability(op: &'static str, p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) {
        Ok(())
    } else {
        Err(Error::argument(op, format!("p must be between 0 and 1, but got {p}")))
    }
}

impl Distribution {
    /// Checks the arguments, and that a tensor of `dtype` can hold what is drawn.
    pub fn check(self, op: &'static str, dtype: DType) -> Result<()> {
        let wrong = |message: String| Err(Error::argument(op, message));
        if !matches!(self, Distribution::Bernoulli { .. } | Distribution::Integers { .. })
            && !dtype.is_float()
        {
            return Err(Error::DType { op, dtype, why: "it needs a floating-point dtype" });
        }
        match self {
            Distribution::Uniform { low, high } => {
                if !(low <= high && (high - low).is_finite()) {
                    return wrong(format!("expected a finite low <= high, but got {low} and {high}"));
                }
                let fits = with_float!(op, dtype, T => {
                    let wide = <T as Elem>::Acc::from_f64(high - low).to_f64();
                    Ok([nearest::<T>(low), nearest::<T>(high), wide].iter().all(|x| x.is_finite()))
                })?;
                if !fits {
                    return wrong(format!("low {low} or high {high} is out of bounds for dtype {dtype}"));
                }
                if with_float!(op, dtype, T => Ok(uniform_bounds::<T>(low, high)))?.is_none() {
                    return wrong(format!(
                        "there is no number of dtype {dtype} from low = {low} up to but without high = {high}"
                    ));
                }
            }
            Distribution::Normal { std, .. } => {
                if std.is_nan() || std < 0.0 {
                    return wrong(format!("expected std >= 0.0, but got {std}"));
                }
            }
            Distribution::Truncated { mean, std, low, high } => {
                if !(std >= 0.0 && std.is_finite() && mean.is_finite()) {
                    return wrong(format!("expected a finite mean and std >= 0.0, but got {mean} and {std}"));
                }
                if low.is_nan() || high.is_nan() || low > high {
                    return wrong(format!("expected a <= b, but got a = {low} and b = {high}"));
                }
                if with_float!(op, dtype, T => Ok(bounds::<T>(low, high)))?.is_none() {
                    return wrong(format!(
                        "there is no number of dtype {dtype} from a = {low} to b = {high}"
                    ));
                }
            }
            Distribution::Bernoulli { p } => check_probability(op, p)?,
            Distribution::Integers { low, high } => {
                if low >= high {
                    return wrong(format!("low ({low}) must be less than high ({high})"));
                }
                // A real dtype holds all whole numbers up to a power of two, and not all beyond.
                let (least, most) = match dtype {
                    DType::I64 => (i64::MIN, i64::MAX),
                    DType::U8 => (0, 255),
                    DType::BF16 => (-(1 << 8), 1 << 8),
                    DType::F16 => (-(1 << 11), 1 << 11),
                    DType::F32 => (-(1 << 24), 1 << 24),
                    DType::F64 => (-(1 << 53), 1 << 53),
                };
                if low < least || high - 1 > most {
                    return wrong(format!(
                        "low ({low}) or high ({high}) is out of bounds for dtype {dtype}, which holds the whole numbers \
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
    let nothing = || Error::argument(OP, "no number is between the bounds");
    match distribution {
        Distribution::Uniform { low, high } => with_float!(OP, dtype, T => {
            part::<T, _>(&uniform_source::<T>(draw, low, high).ok_or_else(nothing)?, window)
        }),
        Distribution::Normal { mean, std } => {
            with_float!(OP, dtype, T => part::<T, _>(&normal_source::<T>(draw, mean, std), window))
        }
        Distribution::Truncated { mean, std, low, high } => with_float!(OP, dtype, T => {
            let source = truncated_source::<T>(draw, mean, std, [low, high]);
            part::<T, _>(&source.ok_or_else(nothing)?, window)
        }),
        Distribution::Bernoulli { p } => with_elem!(dtype, T => {
            let (less, not) = (T::from_acc(Num::ONE), T::from_acc(Num::ZERO));
            part(&Choice { draw, threshold: threshold(p), less, not }, window)
        }),
        Distribution::Integers { low, high } => {
            let range = high.wrapping_sub(low) as u64;
            match dtype {
                DType::I64 => part(&Integers { draw, low, range, make: |x: i64| x }, window),
                // Whole numbers that a double holds.
                _ => with_elem!(dtype, T => {
                    let make = |x: i64| T::from_acc(Num::from_f64(x as f64));
                    part::<T, _>(&Integers { draw, low, range, make }, window)
                }),
            }
        }
    }
}
