//! Random whole numbers and choices between two values.

use std::mem::MaybeUninit;

use super::philox::{CHUNK, Draw};
use super::{Source, each_run, fill_local, simd};
use crate::engine::kernels::window::Window;
use crate::engine::{Float, Local, Num, with_float};
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
        // The upper half of the product with the range: off from even by one part in 2⁶⁴ / range.
        self.draw.wide_words(block).map(|word| {
            let above = (u128::from(word) * u128::from(self.range)) >> 64;
            (self.make)(self.low.wrapping_add(above as i64))
        })
    }
}

/// `less` where the element's 24-bit uniform number is under a probability, else `not`.
pub(super) struct Choice<T> {
    pub(super) draw: Draw,
    pub(super) threshold: u32,
    pub(super) less: T,
    pub(super) not: T,
}

impl<T: Copy> Source<T> for Choice<T> {
    const PER_BLOCK: u64 = 4;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [T; CHUNK] {
        self.draw.words(block).map(|word| if word >> 8 < self.threshold { self.less } else { self.not })
    }
}

/// The number under which the upper 24 bits of a word stand for a uniform number under `p`.
pub(super) fn threshold(p: f64) -> u32 {
    (p * f64::from(1 << 24)).ceil() as u32
}

/// The upper 24 bits of each element's word.
struct Levels(Draw);

impl Source<u32> for Levels {
    const PER_BLOCK: u64 = 4;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [u32; CHUNK] {
        self.0.words(block).map(|word| word >> 8)
    }
}

/// 1 with the probability that the element of `p` says, else 0: what a draw with one probability makes of it. Elements go
/// by the index that they have in the whole of which `window` shows `p`.
pub(crate) fn bernoulli_each(p: &Local, window: &Window, draw: Draw) -> Result<Local> {
    let p = p.contiguous()?;
    with_float!("bernoulli", p.dtype(), T => chosen::<T>(&p, window, draw))
}

fn chosen<T: Float + Element>(p: &Local, window: &Window, draw: Draw) -> Result<Local> {
    let read = p.read::<T>()?;
    assert_eq!(read.dims, &window.shape()[..]);
    let p = &read.data()[..p.numel()];
    if let Some(p) = p.iter().map(|p| p.acc().to_f64()).find(|p| !(0.0..=1.0).contains(p)) {
        let message = format!("every probability must be between 0 and 1, but there is {p}");
        return Err(Error::argument("bernoulli", message));
    }
    let steps = T::Acc::from_f64(f64::from(1 << 24));
    let (one, zero) = (T::from_acc(Num::ONE), T::from_acc(Num::ZERO));
    // SAFETY: the runs cover every element.
    unsafe {
        fill_local(window.shape(), |out: &mut [MaybeUninit<T>]| {
            window.each_run(|at, first, n| {
                let (p, out) = (&p[at..at + n], &mut out[at..at + n]);
                simd::<T, _>(
                    #[inline(always)]
                    || {
                        each_run(
                            &Levels(draw),
                            first as u64,
                            n,
                            #[inline(always)]
                            |at, levels| {
                                let (p, out) = (&p[at..at + levels.len()], &mut out[at..at + levels.len()]);
                                for ((out, &p), &level) in out.iter_mut().zip(p).zip(levels) {
                                    // Scaled by a power of two, and compared with a number of 24 bits: exact.
                                    let less = T::Acc::from_f64(f64::from(level)) < p.acc() * steps;
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
