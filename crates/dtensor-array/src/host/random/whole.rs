//! Random whole numbers and choices between two values.

use std::mem::MaybeUninit;

use super::philox::{CHUNK, Draw, FEW};
use super::{Source, each_run, fill_array, simd};
use crate::window::Window;
use crate::{Array, Float, Num, with_float};
use crate::{Element, Error, Result};

/// Whole numbers, as `make` makes elements of them.
pub(super) struct Integers<F> {
    pub(super) draw: Draw,
    pub(super) low: i64,
    /// How many values there are.
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
        // The upper half of the product with the range: off from even by one part in 2⁶⁴ / range.
        let above = (u128::from(word) * u128::from(self.range)) >> 64;
        (self.make)(self.low.wrapping_add(above as i64))
    }
}

/// `less` where the element's word is under a probability, else `not`.
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
        if self.threshold.takes(word) { self.less } else { self.not }
    }
}

/// Words as numbers from 0 to 1: how many of them there are.
const WORDS: f64 = (1u64 << 32) as f64;

/// Which words stand for numbers under a probability: the first so many, or all.
#[derive(Clone, Copy)]
pub(super) struct Threshold {
    under: u32,
    all: bool,
}

impl Threshold {
    #[inline(always)]
    pub(super) fn takes(self, word: u32) -> bool {
        (word < self.under) | self.all
    }
}

/// As large a part of all words as `p` says, to the nearest.
pub(super) fn threshold(p: f64) -> Threshold {
    let words = (p * WORDS).round() as u64;
    Threshold { under: words as u32, all: words >> 32 > 0 }
}

/// Each element's word.
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
    with_float!("bernoulli", p.dtype(), T => chosen::<T>(&p, window, draw))
}

fn chosen<T: Float + Element>(p: &Array, window: &Window, draw: Draw) -> Result<Array> {
    let read = p.read::<T>()?;
    assert_eq!(read.dims, &window.shape()[..]);
    let p = &read.data()[..p.numel()];
    if let Some(p) = p.iter().map(|p| p.acc().to_f64()).find(|p| !(0.0..=1.0).contains(p)) {
        let message = format!("every probability must be between 0 and 1, but there is {p}");
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
                                    // A whole number is under the nearest one of another just if half a step more is not
                                    // above the other. All is exact.
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
