//! The exponential function with AVX-512 intrinsics.
//!
//! AVX-512 can look up sixteen table entries at once, and scale by a power of two in one instruction, even if the result is
//! subnormal or infinite. That is half the work of [`math::exp`](super::math::exp), but compilers do not find it.

use std::arch::x86_64::*;
use std::f32::consts::{LN_2, LOG2_E};
use std::mem::MaybeUninit;

use pulp::x86::V4;

use super::fill_array;

use crate::{Array, Result};

/// 2 to the powers 0/16, 1/16, …, 15/16.
const ROOTS: [f32; 16] = [
    1.0,
    1.044_273_7,
    1.090_507_7,
    1.138_788_6,
    1.189_207_1,
    1.241_857_8,
    1.296_839_6,
    1.354_255_6,
    std::f32::consts::SQRT_2,
    1.476_826_2,
    1.542_210_8,
    1.610_490_3,
    1.681_792_9,
    1.756_252_2,
    1.834_008_1,
    1.915_206_6,
];

/// The difference between log₂ e and its nearest `f32`.
const LOG2_E_LOW: f32 = 1.925_963e-8;

/// Adding this to a small number rounds it to a multiple of 1/16, whose count of sixteenths is then in the low bits.
const ROUND: f32 = 786_432.0; // 1.5 × 2¹⁹

/// Computes e to the power of each element of `x`, which must be of dtype `f32`.
pub(super) fn exp(_has_avx512: V4, x: &Array) -> Result<Array> {
    // Views are made contiguous, so that all elements take the same path and the result does not depend on the layout.
    let x = x.contiguous()?;
    let read = x.read::<f32>()?;
    let data = &read.data()[..x.numel()];
    // SAFETY: a `V4` exists only on a machine with AVX-512, and `exp_all` writes every element.
    unsafe { fill_array::<f32>(x.dims(), |out| exp_all(data, out)) }
}

#[target_feature(enable = "avx512f,avx512dq")]
fn exp_all(x: &[f32], out: &mut [MaybeUninit<f32>]) {
    let (x, rest) = x.as_chunks();
    let (out, out_rest) = out.as_chunks_mut();
    for (out, x) in out.iter_mut().zip(x) {
        exp_16(x, out);
    }
    let mut last = [0.0; 16];
    let mut last_out = [MaybeUninit::uninit(); 16];
    last[..rest.len()].copy_from_slice(rest);
    exp_16(&last, &mut last_out);
    out_rest.copy_from_slice(&last_out[..rest.len()]);
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp_16(x: &[f32; 16], out: &mut [MaybeUninit<f32>; 16]) {
    let all = |c| _mm512_set1_ps(c);
    // SAFETY: both arrays have sixteen elements.
    let (x, roots) = unsafe { (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(ROOTS.as_ptr())) };
    // x · log₂ e = n + f, where n is a multiple of 1/16.
    let shifted = _mm512_fmadd_ps(x, all(LOG2_E), all(ROUND));
    let n = _mm512_sub_ps(shifted, all(ROUND));
    let f = _mm512_fmsub_ps(x, all(LOG2_E), n);
    let f = _mm512_fmadd_ps(x, all(LOG2_E_LOW), f);
    // Takes the smaller magnitude with the sign of f. If x is so large that f is noise or NaN, this makes it a small number.
    let f = _mm512_range_ps::<0b0010>(f, all(0.0625));
    // 2ᶠ − 1, as f times a polynomial.
    let q = _mm512_fmadd_ps(f, all(0.055_502_35), all(0.240_234_29));
    let m = _mm512_mul_ps(f, _mm512_fmadd_ps(f, q, all(LN_2)));
    // The lowest four bits are the index into the table, and the scale is 2 to the integer part of n.
    let root = _mm512_permutexvar_ps(_mm512_castps_si512(shifted), roots);
    let y = _mm512_scalef_ps(_mm512_fmadd_ps(m, root, root), n);
    // SAFETY: `out` has sixteen elements.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr().cast(), y) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exp_of(x: &[f32]) -> Option<Vec<f32>> {
        let x = Array::from_vec(x.to_vec(), &[x.len()]).unwrap();
        // There is nothing to test on a machine without AVX-512.
        Some(exp(V4::try_new()?, &x).unwrap().copy_to_host().unwrap())
    }

    #[test]
    fn exp_is_accurate_everywhere() {
        let x: Vec<f32> = (0..=u32::MAX).step_by(997).map(f32::from_bits).filter(|x| !x.is_nan()).collect();
        let Some(y) = exp_of(&x) else { return };
        for (x, y) in x.into_iter().zip(y) {
            let want = (x as f64).exp();
            let nearest = want as f32;
            let ulp = (nearest.next_up() - nearest) as f64;
            assert!(y == nearest || (y as f64 - want).abs() <= 1.1 * ulp, "exp {x} is {want}, not {y}");
        }
    }

    #[test]
    fn special_values() {
        let inf = f32::INFINITY;
        let x = [inf, -inf, 0.0, -0.0, 88.73, -200.0, f32::MAX, f32::MIN, -100.0, -104.0, 1e-45];
        let Some(y) = exp_of(&x) else { return };
        assert_eq!(y, [inf, 0.0, 1.0, 1.0, inf, 0.0, inf, 0.0, 3.8e-44, 0.0, 1.0]);
        assert!(y.iter().all(|y| y.is_sign_positive()));
        assert!(exp_of(&[f32::NAN, -f32::NAN]).unwrap().iter().all(|y| y.is_nan()));
        assert!(exp_of(&[88.72]).unwrap()[0].is_finite());
    }

    #[test]
    fn views_give_the_same_bits() {
        let Some(wide) = V4::try_new() else { return };
        let x = Array::from_vec((0..33 * 20).map(|i| i as f32 * 0.25 - 80.0).collect(), &[33, 20]).unwrap();
        let y = exp(wide, &x).unwrap();
        let view = |x: &Array| x.transpose(0, 1).and_then(|x| x.narrow(0, 3, 7)).unwrap();
        let want = view(&y).contiguous().unwrap();
        let got = exp(wide, &view(&x)).unwrap();
        assert_eq!(
            (got.dims(), got.copy_to_host::<f32>().unwrap()),
            (want.dims(), want.copy_to_host::<f32>().unwrap())
        );
    }
}
