//! The kernels for arrays in main memory. The functions that [`kernels`](crate::kernels) calls are documented there.
//!
//! Loops are plain Rust. [`simd`] compiles them for several instruction sets and selects one at run time.

use std::mem::MaybeUninit;

use crate::{Array, Element, Error, Result, SimdTargets};

pub(crate) mod attention;
pub(crate) mod binary;
pub(crate) mod cast;
pub(crate) mod cat;
pub(crate) mod clip;
pub(crate) mod combine;
pub(crate) mod copy;
#[cfg(target_arch = "x86_64")]
mod exp;
pub(crate) mod extremum;
pub(crate) mod fold;
pub(crate) mod formula;
pub(crate) mod halves;
pub(crate) mod index;
pub(crate) mod layout;
pub(crate) mod locate;
pub(crate) mod loss;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod moments;
pub(crate) mod nest;
pub(crate) mod norm;
pub(crate) mod optim;
pub(crate) mod parallel;
pub(crate) mod random;
pub(crate) mod reduce;
pub(crate) mod rows;
pub(crate) mod scalar;
pub(crate) mod scan;
pub(crate) mod select;
pub(crate) mod shared;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod ternary;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod unary;
pub(crate) mod unfold;
pub(crate) mod wide;
pub(crate) mod write;

/// Runs a loop over elements of type `T`, compiled for the best instruction set of this machine.
///
/// The closure, `simd::<T, _>(#[inline(always)] || …)`, and every function it calls must be `#[inline(always)]`. Otherwise
/// they are compiled only for the baseline.
///
/// Every instruction set adds a copy of each of hundreds of loops. Therefore only `f32` loops are compiled for AVX-512, and
/// integer loops only for the baseline ([`SimdTargets`]).
#[inline(always)]
pub(crate) fn simd<T: SimdTargets, R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if T::AVX512
            && let Some(v4) = pulp::x86::V4::try_new()
        {
            return v4.vectorize(body);
        }
        if T::AVX2
            && let Some(v3) = pulp::x86::V3::try_new()
        {
            return v3.vectorize(body);
        }
    }
    body()
}

/// Creates a vector of `n` elements that `fill` writes. The memory is not zeroed first.
///
/// # Safety
/// `fill` must write every element of the slice.
pub(crate) unsafe fn fill_vec<T>(n: usize, fill: impl FnOnce(&mut [MaybeUninit<T>])) -> Result<Vec<T>> {
    let mut out = Vec::new();
    out.try_reserve_exact(n).map_err(|_| Error::OutOfMemory { elements: n })?;
    fill(&mut out.spare_capacity_mut()[..n]);
    // SAFETY: the capacity is at least `n`, and the caller's `fill` has written the first `n` elements.
    unsafe { out.set_len(n) };
    Ok(out)
}

/// Creates an array of `shape` that `fill` writes. The memory is not zeroed first.
///
/// # Safety
/// `fill` must write every element of the slice.
pub(crate) unsafe fn fill_array<T: Element>(
    shape: &[usize],
    fill: impl FnOnce(&mut [MaybeUninit<T>]),
) -> Result<Array> {
    // SAFETY: the caller guarantees the same.
    let data = unsafe { fill_vec(shape.iter().product(), fill)? };
    Array::from_vec(data, shape)
}
