//! Random integers, and random choices between two values.

use std::mem::MaybeUninit;

use super::philox::{CHUNK, Draw, FEW};
use super::{Source, each_run, fill_array, simd};
use crate::window::Window;
use crate::{Array, Float, Num, with_float};
use crate::{Element, Error, Result};

/// A source of random integers. `make` converts them to elements.
pub(super) struct Integers<F> {
    pub(super) draw: Draw,
    pub(super) low: i64,
    /// The number of values.
    pub(super) range: u64,
    pub(super) make: F,
}

impl<T: Copy + Default, F: Fn(i64) -> T> Source<T> for Integers<F> {
    const PER_BLOCK: u64 = 2;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [T; CHUNK] {
        self.draw.wide_words(block).map(|word| self.number(word))
    }
    #[inline(always)]
    fn few(&self, block: u64) -> [T; FEW] {
        self.draw.few_wide_words(block).map(|word| self.number(word))
    }
}

impl<T, F: Fn(i64) -> T> Integers<F> {
    #[inline(always)]
    fn number(&self, word: u64) -> T {
        // The upper half of the product with the range. The bias is one part in 2⁶⁴ / range.
        let above = (u128::from(word) * u128::from(self.range)) >> 64;
        (self.make)(self.low.wrapping_add(above as i64))
    }
}

/// A source of `less` if the element's word is below the threshold, else `not`.
pub(super) struct Choice<T> {
    pub(super) draw: Draw,
    pub(super) threshold: Threshold,
    pub(super) less: T,
    pub(super) not: T,
}

impl<T: Copy> Source<T> for Choice<T> {
    const PER_BLOCK: u64 = 4;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [T; CHUNK] {
        self.draw.words(block).map(|word| self.choice(word))
    }
    #[inline(always)]
    fn few(&self, block: u64) -> [T; FEW] {
        self.draw.few_words(block).map(|word| self.choice(word))
    }
}

impl<T: Copy> Choice<T> {
    #[inline(always)]
    fn choice(&self, word: u32) -> T {
        if self.threshold.contains(word) { self.less } else { self.not }
    }
}

/// The number of 32-bit words.
const WORDS: f64 = (1u64 << 32) as f64;

/// The words that count as a success: those below `under`, or all.
#[derive(Clone, Copy)]
pub(crate) struct Threshold {
    under: u32,
    all: bool,
}

impl Threshold {
    #[inline(always)]
    pub(super) fn contains(self, word: u32) -> bool {
        (word < self.under) | self.all
    }

    /// Returns the threshold as the argument of a kernel for GPUs.
    #[cfg(feature = "cuda")]
    pub(crate) fn words(self) -> [u32; 2] {
        [self.under, self.all.into()]
    }
}

/// Returns the threshold for a probability, rounded to a multiple of 2⁻³².
pub(crate) fn threshold(p: f64) -> Threshold {
    let words = (p * WORDS).round() as u64;
    Threshold { under: words as u32, all: words >> 32 > 0 }
}

/// A source of one 32-bit word for each element.
struct Words(Draw);

impl Source<u32> for Words {
    const PER_BLOCK: u64 = 4;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [u32; CHUNK] {
        self.0.words(block)
    }
    #[inline(always)]
    fn few(&self, block: u64) -> [u32; FEW] {
        self.0.few_words(block)
    }
}

/// Draws 1 with the probability in `p`, else 0, for each element. An element is the same as in a draw of
/// [`Distribution::Bernoulli`] with its probability.
pub(crate) fn bernoulli_each(p: &Array, window: &Window, draw: Draw) -> Result<Array> {
    let p = p.contiguous()?;
    with_float!("bernoulli", p.dtype(), T => bernoulli_of::<T>(&p, window, draw))
}

fn bernoulli_of<T: Float + Element>(p: &Array, window: &Window, draw: Draw) -> Result<Array> {
    let read = p.read::<T>()?;
    assert_eq!(read.dims, &window.shape()[..]);
    let p = &read.data()[..p.numel()];
    if let Some(p) = p.iter().map(|p| p.acc().to_f64()).find(|p| !(0.0..=1.0).contains(p)) {
        let message = format!("every probability must be between 0 and 1, but got {p}");
        return Err(Error::argument("bernoulli", message));
    }
    let (one, zero) = (T::from_acc(Num::ONE), T::from_acc(Num::ZERO));
    // SAFETY: the runs cover every element.
    unsafe {
        fill_array(window.shape(), |out: &mut [MaybeUninit<T>]| {
            window.each_run(|at, first, n| {
                let (p, out) = (&p[at..at + n], &mut out[at..at + n]);
                simd::<T, _>(
                    #[inline(always)]
                    || {
                        each_run(
                            &Words(draw),
                            first as u64,
                            n,
                            #[inline(always)]
                            |at, words| {
                                let (p, out) = (&p[at..at + words.len()], &mut out[at..at + words.len()]);
                                for ((out, &p), &word) in out.iter_mut().zip(p).zip(words) {
                                    // `word < round(x)` holds if and only if `word + 0.5 <= x`. All operations are exact.
                                    let less = f64::from(word) + 0.5 <= p.acc().to_f64() * WORDS;
                                    out.write(if less { one } else { zero });
                                }
                            },
                        )
                    },
                );
            });
        })
    }
}
