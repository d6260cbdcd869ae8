//! [`Lanes`]: vectors of AVX-512.

use std::arch::x86_64::*;

use crate::Real;

/// A vector of AVX-512.
///
/// # Safety
/// All methods need a machine with AVX-512.
pub(crate) trait Lanes: Copy {
    /// The type of an element.
    type T: Real + Default;
    /// The number of elements, a power of two.
    const N: usize;

    /// Returns a vector with the same number in all lanes.
    unsafe fn splat(x: Self::T) -> Self;
    /// Reads the lanes of the mask. The others are 0.
    unsafe fn load(from: *const Self::T, mask: u16) -> Self;
    /// Writes the lanes of the mask.
    unsafe fn store(self, to: *mut Self::T, mask: u16);
    /// Computes `self × b + c` with one rounding.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// Computes `self × b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// Exchanges every second run of 2ˢᵗᵉᵖ lanes of the first vector with the run of the second vector before it: the
    /// transposes of two by two matrices of such runs.
    unsafe fn exchange(self, other: Self, step: usize) -> [Self; 2];
}

/// Returns the mask of the first lanes.
#[inline(always)]
pub(super) fn first(lanes: usize) -> u16 {
    ((1u32 << lanes) - 1) as u16
}

/// Returns the lanes that [`Lanes::exchange`] takes for the first or second result. Lanes of the second vector count from `N`.
const fn exchanged<const N: usize>(step: usize, second: bool) -> [usize; N] {
    let mut lanes = [0; N];
    let mut i = 0;
    while i < N {
        let run = i >> step;
        let from = if second { run | 1 } else { run & !1 };
        lanes[i] = (from << step) + i % (1 << step) + if run & 1 == 0 { 0 } else { N };
        i += 1;
    }
    lanes
}

macro_rules! lanes {
    ($V:ty: $T:ty, $N:literal, $Mask:ty, $Index:ty, $STEPS:literal, $splat:ident, $load:ident, $store:ident, $mul_add:ident,
     $mul:ident, $permute:ident) => {
        impl Lanes for $V {
            type T = $T;
            const N: usize = $N;
            #[inline(always)]
            unsafe fn splat(x: $T) -> Self {
                // SAFETY: the machine has AVX-512.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(from: *const $T, mask: u16) -> Self {
                // SAFETY: the caller guarantees that the lanes of the mask are readable.
                unsafe { $load(mask as $Mask, from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $T, mask: u16) {
                // SAFETY: the caller guarantees that the lanes of the mask are writable.
                unsafe { $store(to, mask as $Mask, self) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: the machine has AVX-512.
                unsafe { $mul_add(self, b, c) }
            }
            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                // SAFETY: the machine has AVX-512.
                unsafe { $mul(self, b) }
            }
            #[inline(always)]
            unsafe fn exchange(self, other: Self, step: usize) -> [Self; 2] {
                const fn indices(step: usize, second: bool) -> [$Index; $N] {
                    let lanes = exchanged::<$N>(step, second);
                    let mut indices = [0; $N];
                    let mut i = 0;
                    while i < $N {
                        indices[i] = lanes[i] as $Index;
                        i += 1;
                    }
                    indices
                }
                const INDICES: [[[$Index; $N]; 2]; $STEPS] = {
                    let mut all = [[[0; $N]; 2]; $STEPS];
                    let mut step = 0;
                    while step < $STEPS {
                        all[step] = [indices(step, false), indices(step, true)];
                        step += 1;
                    }
                    all
                };
                // SAFETY: the machine has AVX-512, and the indices have the size of a vector.
                INDICES[step].map(|indices| unsafe {
                    $permute(self, _mm512_loadu_si512(indices.as_ptr().cast()), other)
                })
            }
        }
    };
}

lanes!(__m512: f32, 16, u16, i32, 4, _mm512_set1_ps, _mm512_maskz_loadu_ps, _mm512_mask_storeu_ps, _mm512_fmadd_ps,
    _mm512_mul_ps, _mm512_permutex2var_ps);
lanes!(__m512d: f64, 8, u8, i64, 3, _mm512_set1_pd, _mm512_maskz_loadu_pd, _mm512_mask_storeu_pd, _mm512_fmadd_pd,
    _mm512_mul_pd, _mm512_permutex2var_pd);
