//! Dropout: elements times 0 or a number, by their index.

use std::mem::MaybeUninit;

use super::distribution::check_probability;
#[cfg(test)]
use super::part;
use super::philox::Draw;
use super::whole::{Choice, threshold};
use super::{each_run, fill_array, simd};
use crate::window::Window;
use crate::{Array, Float, Num, Real, with_float};
use crate::{Element, Result};

/// For tests: 0 where [`dropout`] with the same arguments drops an element, else 1; of dtype `U8`.
#[cfg(test)]
pub(crate) fn keep_mask(shape: &[usize], p: f64, draw: Draw) -> Result<Array> {
    check_probability("dropout", p)?;
    let source = Choice { draw, threshold: threshold(p), less: 0u8, not: 1 };
    part(&source, &Window::whole(shape))
}

/// The factor of an element that dropout keeps.
pub(crate) fn keep_scale(p: f64) -> f64 {
    if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 }
}

/// Applies dropout: multiplies each element by 0 with probability `p`, and divides it by `1 − p` otherwise.
pub(crate) fn dropout(x: &Array, window: &Window, p: f64, draw: Draw) -> Result<Array> {
    check_probability("dropout", p)?;
    let x = x.contiguous()?;
    with_float!("dropout", x.dtype(), T => dropout_of::<T>(&x, window, p, draw))
}

fn dropout_of<T: Float + Element>(x: &Array, window: &Window, p: f64, draw: Draw) -> Result<Array> {
    let read = x.read::<T>()?;
    assert_eq!(read.dims, &window.shape()[..]);
    let x = &read.data()[..x.numel()];
    let kept = T::Acc::from_f64(keep_scale(p));
    let source = Choice { draw, threshold: threshold(p), less: T::Acc::ZERO, not: kept };
    // SAFETY: the runs cover every element.
    unsafe {
        fill_array(window.shape(), |out: &mut [MaybeUninit<T>]| {
            window.each_run(|at, first, n| {
                let (x, out) = (&x[at..at + n], &mut out[at..at + n]);
                simd::<T, _>(
                    #[inline(always)]
                    || dropped(&source, first as u64, x, out),
                );
            });
        })
    }
}

/// Writes elements `first` to `first + x.len()` of an array times the factors of a source.
#[inline(always)]
fn dropped<T: Float>(source: &Choice<T::Acc>, first: u64, x: &[T], out: &mut [MaybeUninit<T>]) {
    each_run(
        source,
        first,
        out.len(),
        #[inline(always)]
        |at, factors| {
            let (x, out) = (&x[at..at + factors.len()], &mut out[at..at + factors.len()]);
            for ((out, &x), &factor) in out.iter_mut().zip(x).zip(factors) {
                out.write(T::from_acc(x.acc() * factor));
            }
        },
    );
}

/// Multiplies elements `first` to `first + values.len()` of an array by what dropout multiplies them by. Inside
/// [`simd`] only.
#[inline(always)]
pub(crate) fn dropout_run<A: Real>(draw: Draw, p: f64, first: u64, values: &mut [A]) {
    let source = Choice { draw, threshold: threshold(p), less: A::ZERO, not: A::from_f64(keep_scale(p)) };
    each_run(
        &source,
        first,
        values.len(),
        #[inline(always)]
        |at, factors| {
            for (value, &factor) in values[at..at + factors.len()].iter_mut().zip(factors) {
                *value = *value * factor;
            }
        },
    );
}
