//! Random numbers: Philox 4×32-10, a counter-based generator.
//!
//! A draw is named by a seed (the key) and a stream (counter words 2 and 3). Element `i` of a draw is a function
//! of the two and of `i` alone: words come from block `i / 4` (`i / 2` for types that take two words). So a part of
//! a tensor can be drawn by itself from the indices its elements have in the whole, and gets the same values.

mod philox;

use std::mem::MaybeUninit;

use philox::CHUNK;
pub(crate) use philox::Draw;

use super::window::Window;
use super::{fill_local, simd};
use crate::engine::{Elem, Float, Local, Num, Real, with_elem, with_float};
use crate::{DType, Element, Error, Result};

/// Makes `CHUNK` elements at a time, starting at a block.
trait Source<T> {
    /// Elements per block.
    const PER_BLOCK: u64;
    fn chunk(&self, block: u64) -> [T; CHUNK];
}

/// Calls `put(offset, values)` for runs of values that together are elements `first` to `first + n`.
#[inline(always)]
fn each_run<T: Copy, S: Source<T>>(source: &S, first: u64, n: usize, mut put: impl FnMut(usize, &[T])) {
    let mut block = first / S::PER_BLOCK;
    let mut skip = (first % S::PER_BLOCK) as usize;
    let mut done = 0;
    while done < n {
        let values = source.chunk(block);
        if skip == 0 && n - done >= CHUNK {
            put(done, &values);
            done += CHUNK;
        } else {
            let take = (CHUNK - skip).min(n - done);
            put(done, &values[skip..skip + take]);
            done += take;
            skip = 0;
        }
        block = block.wrapping_add(CHUNK as u64 / S::PER_BLOCK);
    }
}

/// Writes elements `first` to `first + out.len()` of a source; every one of `out` is written.
fn fill<T: Copy, S: Source<T>>(source: &S, first: u64, out: &mut [MaybeUninit<T>]) {
    simd::<f32, _>(
        #[inline(always)]
        || {
            each_run(
                source,
                first,
                out.len(),
                #[inline(always)]
                |at, values| {
                    for (out, &value) in out[at..at + values.len()].iter_mut().zip(values) {
                        out.write(value);
                    }
                },
            )
        },
    )
}

/// A type that random real numbers are made in.
pub(crate) trait Sample: Real {
    #[doc(hidden)]
    const PER_BLOCK: u64;
    #[doc(hidden)]
    fn uniforms(draw: Draw, block: u64) -> [Self; CHUNK];
    #[doc(hidden)]
    fn normals(draw: Draw, block: u64) -> [Self; CHUNK];
}

const TWO_POW_M24: f32 = 1.0 / (1 << 24) as f32;
const TWO_POW_M32: f32 = 1.0 / (1u64 << 32) as f32;
const TWO_POW_M53: f64 = 1.0 / (1u64 << 53) as f64;

impl Sample for f32 {
    const PER_BLOCK: u64 = 4;

    #[inline(always)]
    fn uniforms(draw: Draw, block: u64) -> [f32; CHUNK] {
        draw.words(block).map(|word| (word >> 8) as f32 * TWO_POW_M24)
    }

    #[inline(always)]
    fn normals(draw: Draw, block: u64) -> [f32; CHUNK] {
        let pairs = draw.pairs(block);
        let mut out = [0.0; CHUNK];
        let (mut radius, mut angle) = ([0.0; CHUNK / 2], [0.0; CHUNK / 2]);
        for (i, &pair) in pairs.iter().enumerate() {
            // All 32 bits, for the sake of the tail, and half a step up: the logarithm is finite. Near 1 the sum
            // rounds to 1, whose logarithm is 0.
            let u = pair as u32 as f32 * TWO_POW_M32 + 0.5 * TWO_POW_M32;
            radius[i] = Real::sqrt(-2.0 * Real::ln(u));
            angle[i] = (pair >> 40) as u32 as f32 * (TWO_POW_M24 * std::f32::consts::TAU);
        }
        for i in 0..CHUNK / 2 {
            out[2 * i] = radius[i] * Real::cos(angle[i]);
            out[2 * i + 1] = radius[i] * Real::sin(angle[i]);
        }
        out
    }
}

impl Sample for f64 {
    const PER_BLOCK: u64 = 2;

    #[inline(always)]
    fn uniforms(draw: Draw, block: u64) -> [f64; CHUNK] {
        draw.wide_words(block).map(|word| (word >> 11) as f64 * TWO_POW_M53)
    }

    #[inline(always)]
    fn normals(draw: Draw, block: u64) -> [f64; CHUNK] {
        let words = draw.wide_words(block);
        let mut out = [0.0; CHUNK];
        for i in (0..CHUNK).step_by(2) {
            let u = ((words[i] >> 11) as f64 + 0.5) * TWO_POW_M53;
            let angle = (words[i + 1] >> 11) as f64 * (TWO_POW_M53 * std::f64::consts::TAU);
            let r = Real::sqrt(-2.0 * Real::ln(u));
            out[i] = r * Real::cos(angle);
            out[i + 1] = r * Real::sin(angle);
        }
        out
    }
}

/// Uniform numbers in `[low, high]`, all values of `T`.
struct Uniform<A> {
    draw: Draw,
    offset: A,
    width: A,
    low: A,
    high: A,
}

impl<T: Float<Acc: Sample>> Source<T> for Uniform<T::Acc> {
    const PER_BLOCK: u64 = <T::Acc as Sample>::PER_BLOCK;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [T; CHUNK] {
        T::Acc::uniforms(self.draw, block).map(|u| {
            let x = T::from_acc(u * self.width + self.offset).acc();
            let x = if x > self.high { self.high } else { x };
            T::from_acc(if x < self.low { self.low } else { x })
        })
    }
}

struct Normal<A> {
    draw: Draw,
    mean: A,
    std: A,
}

impl<T: Float<Acc: Sample>> Source<T> for Normal<T::Acc> {
    const PER_BLOCK: u64 = <T::Acc as Sample>::PER_BLOCK;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [T; CHUNK] {
        T::Acc::normals(self.draw, block).map(|z| T::from_acc(z * self.std + self.mean))
    }
}

struct Integers {
    draw: Draw,
    low: i64,
    /// How many values there are.
    range: u64,
}

impl Source<i64> for Integers {
    const PER_BLOCK: u64 = 2;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [i64; CHUNK] {
        // The upper half of the product with the range: off from even by one part in 2⁶⁴ / range.
        self.draw
            .wide_words(block)
            .map(|word| self.low.wrapping_add(((u128::from(word) * u128::from(self.range)) >> 64) as i64))
    }
}

/// `less` where the element's 24-bit uniform number is under a probability, else `not`.
struct Choice<T> {
    draw: Draw,
    threshold: u32,
    less: T,
    not: T,
}

impl<T: Copy> Source<T> for Choice<T> {
    const PER_BLOCK: u64 = 4;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [T; CHUNK] {
        self.draw.words(block).map(|word| if word >> 8 < self.threshold { self.less } else { self.not })
    }
}

/// The number under which the upper 24 bits of a word stand for a uniform number under `p`.
fn threshold(p: f64) -> u32 {
    (p * f64::from(1 << 24)).ceil() as u32
}

fn check_probability(op: &'static str, p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) {
        Ok(())
    } else {
        Err(Error::argument(op, format!("probability must be between 0 and 1, but got {p}")))
    }
}

/// The value of `T` after `x` (`up`) or before it.
fn neighbour<T: Float>(x: f64, up: bool) -> f64 {
    // The least step that does not round back finds it whatever the type's precision.
    let mut step = (x.abs() * (f64::EPSILON / 2.0)).max(f64::from_bits(1));
    loop {
        let y = T::from_acc(T::Acc::from_f64(if up { x + step } else { x - step })).acc().to_f64();
        if if up { y > x } else { y < x } {
            return y;
        }
        step *= 2.0;
    }
}

fn uniform_source<T: Float<Acc: Sample>>(draw: Draw, low: f64, high: f64) -> Uniform<T::Acc> {
    let round = |x: f64| T::from_acc(T::Acc::from_f64(x)).acc().to_f64();
    let least = if round(low) < low { neighbour::<T>(round(low), true) } else { round(low) };
    let most = if round(high) >= high { neighbour::<T>(round(high), false) } else { round(high) };
    let acc = T::Acc::from_f64;
    // An interval without a value of `T` inside gives its lower end.
    Uniform { draw, offset: acc(low), width: acc(high - low), low: acc(least), high: acc(most.max(least)) }
}

fn normal_source<T: Float<Acc: Sample>>(draw: Draw, mean: f64, std: f64) -> Normal<T::Acc> {
    Normal { draw, mean: T::Acc::from_f64(mean), std: T::Acc::from_f64(std) }
}

/// The elements of a source that a window shows.
fn part<T: Element, S: Source<T>>(source: &S, window: &Window) -> Result<Local> {
    // SAFETY: the runs cover every element, and `fill` writes all of a run.
    unsafe {
        fill_local(window.shape(), |out| {
            window.each_run(|at, first, n| fill(source, first as u64, &mut out[at..at + n]));
        })
    }
}

/// Uniform numbers in `[low, high)`.
pub(crate) fn uniform(
    dtype: DType,
    window: &Window,
    seed: u64,
    stream: u64,
    low: f64,
    high: f64,
) -> Result<Local> {
    if !(low <= high && (high - low).is_finite()) {
        return Err(Error::argument(
            "uniform",
            format!("expected a finite low <= high, but got {low} and {high}"),
        ));
    }
    let draw = Draw { seed, stream };
    with_float!("uniform", dtype, T => part::<T, _>(&uniform_source::<T>(draw, low, high), window))
}

/// Normally distributed numbers.
pub(crate) fn normal(
    dtype: DType,
    window: &Window,
    seed: u64,
    stream: u64,
    mean: f64,
    std: f64,
) -> Result<Local> {
    if std.is_nan() || std < 0.0 {
        return Err(Error::argument("normal", format!("expected std >= 0, but got {std}")));
    }
    let draw = Draw { seed, stream };
    with_float!("normal", dtype, T => part::<T, _>(&normal_source::<T>(draw, mean, std), window))
}

/// Whole numbers in `low..high`, of dtype `I64`.
pub(crate) fn integers(window: &Window, seed: u64, stream: u64, low: i64, high: i64) -> Result<Local> {
    if low >= high {
        return Err(Error::argument("randint", format!("expected low < high, but got {low} and {high}")));
    }
    part(&Integers { draw: Draw { seed, stream }, low, range: high.wrapping_sub(low) as u64 }, window)
}

/// 1 with probability `p`, else 0.
pub(crate) fn bernoulli(dtype: DType, window: &Window, seed: u64, stream: u64, p: f64) -> Result<Local> {
    check_probability("bernoulli", p)?;
    with_elem!(dtype, T => {
        let (less, not) = (T::from_acc(Num::ONE), T::from_acc(Num::ZERO));
        part(&Choice { draw: Draw { seed, stream }, threshold: threshold(p), less, not }, window)
    })
}

/// For tests: 0 where [`dropout`] with the same arguments drops an element, else 1; of dtype `U8`.
#[cfg(test)]
pub(crate) fn keep_mask(shape: &[usize], p: f64, seed: u64, stream: u64) -> Result<Local> {
    check_probability("dropout", p)?;
    let source = Choice { draw: Draw { seed, stream }, threshold: threshold(p), less: 0u8, not: 1 };
    part(&source, &Window::whole(shape))
}

/// The factor of an element that dropout keeps.
pub(crate) fn keep_scale(p: f64) -> f64 {
    if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 }
}

/// `x` with each element dropped (times 0) with probability `p` and else divided by `1 − p`. The choice depends on
/// the index that the element has in the whole of which `window` shows `x`, and not on the dtype.
pub(crate) fn dropout(x: &Local, window: &Window, p: f64, seed: u64, stream: u64) -> Result<Local> {
    check_probability("dropout", p)?;
    let x = x.contiguous()?;
    with_float!("dropout", x.dtype(), T => dropout_of::<T>(&x, window, p, Draw { seed, stream }))
}

fn dropout_of<T: Float + Element>(x: &Local, window: &Window, p: f64, draw: Draw) -> Result<Local> {
    let read = x.read::<T>()?;
    assert_eq!(read.dims, &window.shape()[..]);
    let x = &read.data()[..x.numel()];
    let kept = T::Acc::from_f64(keep_scale(p));
    let source = Choice { draw, threshold: threshold(p), less: T::Acc::ZERO, not: kept };
    // SAFETY: the runs cover every element.
    unsafe {
        fill_local(window.shape(), |out: &mut [MaybeUninit<T>]| {
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

#[cfg(test)]
mod tests;
