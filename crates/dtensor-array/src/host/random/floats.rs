//! Uniform and normal random floating-point numbers.

use super::Source;
use super::philox::{CHUNK, Draw, FEW};
use crate::{Float, Num, Real};

/// A type that random floating-point numbers are computed in.
pub(crate) trait Sample: Real {
    #[doc(hidden)]
    const PER_BLOCK: u64;
    #[doc(hidden)]
    fn uniforms(draw: Draw, block: u64) -> [Self; CHUNK];
    #[doc(hidden)]
    fn few_uniforms(draw: Draw, block: u64) -> [Self; FEW];
    #[doc(hidden)]
    fn normals(draw: Draw, block: u64) -> [Self; CHUNK];
    #[doc(hidden)]
    fn few_normals(draw: Draw, block: u64) -> [Self; FEW];
    /// Returns uniform numbers strictly between 0 and 1, in double precision. Both `u` and `1 − u` are exact.
    #[doc(hidden)]
    fn inner_uniforms(draw: Draw, block: u64) -> [f64; CHUNK];
    #[doc(hidden)]
    fn few_inner_uniforms(draw: Draw, block: u64) -> [f64; FEW];
}

const TWO_POW_M24: f32 = 1.0 / (1 << 24) as f32;
const TWO_POW_M32: f32 = 1.0 / (1u64 << 32) as f32;
const TWO_POW_M32_F64: f64 = 1.0 / (1u64 << 32) as f64;
const TWO_POW_M52: f64 = 1.0 / (1u64 << 52) as f64;
const TWO_POW_M53: f64 = 1.0 / (1u64 << 53) as f64;

#[inline(always)]
fn single(word: u32) -> f32 {
    (word >> 8) as f32 * TWO_POW_M24
}

#[inline(always)]
fn inner_single(word: u32) -> f64 {
    (f64::from(word) + 0.5) * TWO_POW_M32_F64
}

#[inline(always)]
fn double(word: u64) -> f64 {
    (word >> 11) as f64 * TWO_POW_M53
}

#[inline(always)]
fn inner_double(word: u64) -> f64 {
    ((word >> 12) as f64 + 0.5) * TWO_POW_M52
}

/// Computes two normal numbers from each pair of words (Box–Muller transform).
#[inline(always)]
fn normal_singles<const PAIRS: usize, const N: usize>(pairs: [u64; PAIRS]) -> [f32; N] {
    let mut out = [0.0; N];
    let (mut radius, mut angle) = ([0.0; PAIRS], [0.0; PAIRS]);
    for (i, &pair) in pairs.iter().enumerate() {
        // All 32 bits are used, so that the tail is long, and half a step is added, so that the logarithm is finite. Near 1
        // the sum rounds to 1, whose logarithm is 0.
        let u = pair as u32 as f32 * TWO_POW_M32 + 0.5 * TWO_POW_M32;
        radius[i] = Real::sqrt(-2.0 * Real::ln(u));
        angle[i] = (pair >> 40) as u32 as f32 * (TWO_POW_M24 * std::f32::consts::TAU);
    }
    for i in 0..PAIRS {
        out[2 * i] = radius[i] * Real::cos(angle[i]);
        out[2 * i + 1] = radius[i] * Real::sin(angle[i]);
    }
    out
}

/// Computes two normal numbers from every two words.
#[inline(always)]
fn normal_doubles<const N: usize>(words: [u64; N]) -> [f64; N] {
    let mut out = [0.0; N];
    for i in (0..N).step_by(2) {
        let u = ((words[i] >> 11) as f64 + 0.5) * TWO_POW_M53;
        let angle = (words[i + 1] >> 11) as f64 * (TWO_POW_M53 * std::f64::consts::TAU);
        let r = Real::sqrt(-2.0 * Real::ln(u));
        out[i] = r * Real::cos(angle);
        out[i + 1] = r * Real::sin(angle);
    }
    out
}

impl Sample for f32 {
    const PER_BLOCK: u64 = 4;

    #[inline(always)]
    fn uniforms(draw: Draw, block: u64) -> [f32; CHUNK] {
        draw.words(block).map(single)
    }

    #[inline(always)]
    fn few_uniforms(draw: Draw, block: u64) -> [f32; FEW] {
        draw.few_words(block).map(single)
    }

    #[inline(always)]
    fn normals(draw: Draw, block: u64) -> [f32; CHUNK] {
        normal_singles(draw.pairs(block))
    }

    #[inline(always)]
    fn few_normals(draw: Draw, block: u64) -> [f32; FEW] {
        normal_singles(draw.few_pairs(block))
    }

    #[inline(always)]
    fn inner_uniforms(draw: Draw, block: u64) -> [f64; CHUNK] {
        draw.words(block).map(inner_single)
    }

    #[inline(always)]
    fn few_inner_uniforms(draw: Draw, block: u64) -> [f64; FEW] {
        draw.few_words(block).map(inner_single)
    }
}

impl Sample for f64 {
    const PER_BLOCK: u64 = 2;

    #[inline(always)]
    fn uniforms(draw: Draw, block: u64) -> [f64; CHUNK] {
        draw.wide_words(block).map(double)
    }

    #[inline(always)]
    fn few_uniforms(draw: Draw, block: u64) -> [f64; FEW] {
        draw.few_wide_words(block).map(double)
    }

    #[inline(always)]
    fn normals(draw: Draw, block: u64) -> [f64; CHUNK] {
        normal_doubles(draw.wide_words(block))
    }

    #[inline(always)]
    fn few_normals(draw: Draw, block: u64) -> [f64; FEW] {
        normal_doubles(draw.few_wide_words(block))
    }

    #[inline(always)]
    fn inner_uniforms(draw: Draw, block: u64) -> [f64; CHUNK] {
        draw.wide_words(block).map(inner_double)
    }

    #[inline(always)]
    fn few_inner_uniforms(draw: Draw, block: u64) -> [f64; FEW] {
        draw.few_wide_words(block).map(inner_double)
    }
}

/// A source of uniform numbers, clamped to `[low, high]`.
pub(super) struct Uniform<A> {
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
        T::Acc::uniforms(self.draw, block).map(|u| self.number(u))
    }
    #[inline(always)]
    fn few(&self, block: u64) -> [T; FEW] {
        T::Acc::few_uniforms(self.draw, block).map(|u| self.number(u))
    }
}

impl<A: Sample> Uniform<A> {
    #[inline(always)]
    fn number<T: Float<Acc = A>>(&self, u: A) -> T {
        let x = T::from_acc(u * self.width + self.offset).acc();
        let x = if x > self.high { self.high } else { x };
        T::from_acc(if x < self.low { self.low } else { x })
    }
}

/// A source of normal numbers.
pub(super) struct Normal<A> {
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
    #[inline(always)]
    fn few(&self, block: u64) -> [T; FEW] {
        T::Acc::few_normals(self.draw, block).map(|z| T::from_acc(z * self.std + self.mean))
    }
}

/// Returns the largest finite value of `T`.
fn greatest<T: Float>() -> f64 {
    (0..1024).rev().fold(0.0, |sum, exponent| {
        let more = sum + 2f64.powi(exponent);
        if more.is_finite() && nearest::<T>(more) == more { more } else { sum }
    })
}

/// Returns the next value of `T` above `x` if `up` is true, else the next below. For an infinity, returns the finite value next
/// to it.
pub(super) fn neighbour<T: Float>(x: f64, up: bool) -> f64 {
    if x.is_infinite() {
        return greatest::<T>().copysign(x);
    }
    // Doubles the step until the sum no longer rounds back to `x`. This works for any precision of `T`.
    let mut step = (x.abs() * (f64::EPSILON / 2.0)).max(f64::from_bits(1));
    loop {
        let y = T::from_acc(T::Acc::from_f64(if up { x + step } else { x - step })).acc().to_f64();
        if if up { y > x } else { y < x } {
            return y;
        }
        step *= 2.0;
    }
}

/// Rounds to the nearest value of `T`.
pub(super) fn nearest<T: Float>(x: f64) -> f64 {
    T::from_acc(T::Acc::from_f64(x)).acc().to_f64()
}

/// Returns the smallest value of `T` that is at least `x`.
pub(super) fn at_least<T: Float>(x: f64) -> f64 {
    let y = nearest::<T>(x);
    if y < x { neighbour::<T>(y, true) } else { y }
}

/// Returns the smallest and the largest value of `T` in `[low, high)`, or `None` if there is none. If `low` equals `high`, both
/// are the nearest value.
pub(super) fn uniform_bounds<T: Float>(low: f64, high: f64) -> Option<(f64, f64)> {
    let (least, most) = (at_least::<T>(low), nearest::<T>(high));
    if low == high {
        return most.is_finite().then_some((most, most));
    }
    let most = if most >= high { neighbour::<T>(most, false) } else { most };
    (least <= most && least.is_finite() && most.is_finite()).then_some((least, most))
}

/// Creates the source of uniform numbers in `[low, high)`. Returns `None` if the range contains no value of `T`.
pub(super) fn uniform_source<T: Float<Acc: Sample>>(
    draw: Draw,
    low: f64,
    high: f64,
) -> Option<Uniform<T::Acc>> {
    let (least, most) = uniform_bounds::<T>(low, high)?;
    let acc = T::Acc::from_f64;
    Some(Uniform { draw, offset: acc(low), width: acc(high - low), low: acc(least), high: acc(most) })
}

/// Creates the source of normal numbers.
pub(super) fn normal_source<T: Float<Acc: Sample>>(draw: Draw, mean: f64, std: f64) -> Normal<T::Acc> {
    Normal { draw, mean: T::Acc::from_f64(mean), std: T::Acc::from_f64(std) }
}
