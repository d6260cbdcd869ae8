//! Dropout: each element is multiplied by 0 or by a scale, depending on its index.

use std::mem::MaybeUninit;

use super::distribution::check_probability;
#[cfg(test)]
use super::fill_window;
use super::integers::{Choice, threshold};
use super::philox::Draw;
use super::{each_run, fill_array, simd};
use crate::window::Window;
use crate::{Array, Float, Num, Real, with_float};
use crate::{Element, Result};

/// Returns the mask of [`dropout`] with the same arguments, for tests: 0 for a dropped element, else 1, of dtype `U8`.
#[cfg(test)]
pub(crate) fn keep_mask(shape: &[usize], p: f64, draw: Draw) -> Result<Array> {
    check_probability("dropout", p)?;
    let source = Choice { draw, threshold: threshold(p), less: 0u8, not: 1 };
    fill_window(&source, &Window::whole(shape))
}

/// Returns the scale of the elements that are not dropped.
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
    let scale = T::Acc::from_f64(keep_scale(p));
    let source = Choice { draw, threshold: threshold(p), less: T::Acc::ZERO, not: scale };
    // SAFETY: the runs cover every element.
    unsafe {
        fill_array(window.shape(), |out: &mut [MaybeUninit<T>]| {
            window.each_run(|at, first, n| {
                let (x, out) = (&x[at..at + n], &mut out[at..at + n]);
                simd::<T, _>(
                    #[inline(always)]
                    || write_dropout(&source, first as u64, x, out),
                );
            });
        })
    }
}

/// Writes the elements `x`, whose first index is `first`, times the factors of a source.
#[inline(always)]
fn write_dropout<T: Float>(source: &Choice<T::Acc>, first: u64, x: &[T], out: &mut [MaybeUninit<T>]) {
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

/// Applies dropout in place to elements whose first index is `first`. Call it only inside [`simd`].
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
