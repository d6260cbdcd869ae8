//! Random numbers: Philox 4×32-10, a counter-based generator.
//!
//! A draw is named by a seed (the key) and a stream (counter words 2 and 3). Element `i` of a draw is a function
//! of the two and of `i` alone: words come from block `i / 4` (`i / 2` for types that take two words). So a part of
//! a tensor can be drawn by itself from the indices its elements have in the whole, and gets the same values.

mod distribution;
mod dropout;
mod philox;
mod real;
mod truncated;
mod whole;

use std::mem::MaybeUninit;

pub use distribution::Distribution;
pub(crate) use distribution::draw;
#[cfg(test)]
pub(crate) use dropout::keep_mask;
pub(crate) use dropout::{dropout, dropout_run};
pub use philox::Draw;
use philox::{CHUNK, FEW};
pub(crate) use whole::bernoulli_each;

use super::{fill_array, simd};
use crate::Array;
use crate::window::Window;
use crate::{Element, Result};

/// Makes `CHUNK` elements at a time, starting at a block, or `FEW`, which costs less than a whole chunk.
trait Source<T> {
    /// Elements per block.
    const PER_BLOCK: u64;
    fn chunk(&self, block: u64) -> [T; CHUNK];
    fn few(&self, block: u64) -> [T; FEW];
}

/// Up to how many elements are made a few at a time.
const SHORT: usize = CHUNK / 4;

/// Calls `put(offset, values)` for runs of values that together are elements `first` to `first + n`.
#[inline(always)]
fn each_run<T: Copy, S: Source<T>>(source: &S, first: u64, n: usize, mut put: impl FnMut(usize, &[T])) {
    let mut block = first / S::PER_BLOCK;
    let mut skip = (first % S::PER_BLOCK) as usize;
    let mut done = 0;
    while done < n {
        if skip + n - done <= SHORT {
            let values = source.few(block);
            let take = (FEW - skip).min(n - done);
            put(done, &values[skip..skip + take]);
            done += take;
            skip = 0;
            block = block.wrapping_add(FEW as u64 / S::PER_BLOCK);
            continue;
        }
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

/// The elements of a source that a window shows.
fn part<T: Element, S: Source<T>>(source: &S, window: &Window) -> Result<Array> {
    // SAFETY: the runs cover every element, and `fill` writes all of a run.
    unsafe {
        fill_array(window.shape(), |out| {
            window.each_run(|at, first, n| fill(source, first as u64, &mut out[at..at + n]));
        })
    }
}

#[cfg(test)]
mod tests;
