//! Loops of our own, for what Candle is slow at or does not have. Each takes and gives [`Local`] values.
//!
//! Loops are plain Rust, compiled for the vector units of the machine through [`simd`]. A kernel may assume
//! that the operator's shape rule has passed: sizes agree and dims are in range. Values it must check itself
//! (indices). IEEE semantics hold: NaN in, NaN out; infinities are ordinary numbers.

use std::mem::MaybeUninit;

use super::{Elem, Local};
use crate::{Element, Result};

pub(crate) mod copy;
pub(crate) mod math;

/// Runs a loop compiled for the best vector unit this machine has. What the closure calls must be
/// `#[inline(always)]`, or it is compiled for the least.
#[inline(always)]
pub(crate) fn simd<R>(body: impl FnOnce() -> R) -> R {
    struct Body<F>(F);
    impl<R, F: FnOnce() -> R> pulp::WithSimd for Body<F> {
        type Output = R;
        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, _: S) -> R {
            (self.0)()
        }
    }
    pulp::Arch::new().dispatch(Body(body))
}

/// A vector of `n` elements that `fill` writes without their being zeroed first.
///
/// # Safety
/// `fill` must write every element of the slice.
pub(crate) unsafe fn fill_vec<T: Elem>(n: usize, fill: impl FnOnce(&mut [MaybeUninit<T>])) -> Vec<T> {
    let mut out = Vec::with_capacity(n);
    fill(&mut out.spare_capacity_mut()[..n]);
    // SAFETY: the capacity is at least `n`, and the caller's `fill` has written the first `n` elements.
    unsafe { out.set_len(n) };
    out
}

/// A new array of `shape` that `fill` writes without its being zeroed first.
///
/// # Safety
/// `fill` must write every element of the slice.
pub(crate) unsafe fn fill_local<T: Element>(
    shape: &[usize],
    fill: impl FnOnce(&mut [MaybeUninit<T>]),
) -> Result<Local> {
    // SAFETY: passed on to the caller.
    let data = unsafe { fill_vec(shape.iter().product(), fill) };
    Local::from_vec(data, shape)
}
