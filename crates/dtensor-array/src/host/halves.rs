//! Conversions to and from the half-precision types. They are branch-free, so that loops over them vectorise.

use half::{bf16, f16};

/// Widens a `bf16` exactly.
#[inline(always)]
pub(crate) fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// Rounds to the nearest `bf16`, ties to even.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // NaN is handled separately, because rounding could turn it into infinity.
    bf16::from_bits(if x.is_nan() { bits >> 16 | 0x40 } else { rounded } as u16)
}

/// Widens an `f16` exactly.
#[inline(always)]
pub(crate) fn f16_to_f32(x: f16) -> f32 {
    let bits = x.to_bits() as u32;
    // The bits are read as if the exponent had the bias of f32. The product corrects it, also for subnormal numbers.
    let scaled = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | (bits & 0x8000) << 16)
}

/// Rounds to the nearest `f16`, ties to even.
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> f16 {
    let a = x.abs();
    let bits = a.to_bits();
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + (bits >> 13 & 1)) >> 13;
    // The last bit of an f32 between ½ and 1 equals the smallest subnormal f16, so this sum rounds to that.
    let subnormal = (a + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let y = if a < 6.103_515_6e-5 { subnormal } else { normal };
    let y = if a >= 65520.0 { 0x7c00 } else { y };
    let y = if a.is_nan() { 0x7e00 | bits >> 13 & 0x3ff } else { y };
    f16::from_bits((y | x.to_bits() >> 16 & 0x8000) as u16)
}

/// Narrows to `f32` such that rounding the result to half precision gives the correctly rounded `x`. If bits are lost, the last
/// bit is set ("round to odd").
#[inline(always)]
pub(crate) fn f64_to_f32_sticky(x: f64) -> f32 {
    let y = x as f32;
    let wide = y as f64;
    let bits = y.to_bits();
    // If rounding went away from zero, the previous number is the truncated one.
    let truncated = bits.wrapping_sub((wide.abs() > x.abs()) as u32);
    if wide == x || x.is_nan() { y } else { f32::from_bits(truncated | 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            if !b.is_nan() {
                assert_eq!(bf16_to_f32(b).to_bits(), b.to_f32().to_bits());
                assert_eq!(f32_to_bf16(bf16_to_f32(b)), b);
            }
            if !h.is_nan() {
                assert_eq!(f16_to_f32(h).to_bits(), h.to_f32().to_bits());
                assert_eq!(f32_to_f16(f16_to_f32(h)), h);
            }
            assert_eq!(bf16_to_f32(b).is_nan(), b.is_nan());
            assert_eq!(f16_to_f32(h).is_nan(), h.is_nan());
        }
        // Multiples of 2¹² include ties between two f16 values, and multiples of 2¹⁵ ties between two bf16 values.
        for bits in (0..=u32::MAX).step_by(1009).chain((0..=u32::MAX).step_by(1 << 12)) {
            let x = f32::from_bits(bits);
            if x.is_nan() {
                assert!(f32_to_bf16(x).is_nan() && f32_to_f16(x).is_nan());
            } else {
                assert_eq!(f32_to_bf16(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
                assert_eq!(f32_to_f16(x).to_bits(), f16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn doubles_round_once() {
        // Just above a tie. Rounding to f32 first would give the tie, which rounds down to even.
        let x = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(f32_to_bf16(f64_to_f32_sticky(x)).to_f32(), 1.0 + 2f32.powi(-7));
        assert_eq!(f32_to_bf16(f64_to_f32_sticky(-x)).to_f32(), -1.0 - 2f32.powi(-7));
        // Just below the next tie, which would round up to even.
        let x = 1.0 + 3.0 * 2f64.powi(-8) - 2f64.powi(-40);
        assert_eq!(f32_to_bf16(f64_to_f32_sticky(x)).to_f32(), 1.0 + 2f32.powi(-7));
        for x in [0.0, 1.5, f64::INFINITY, -f64::INFINITY] {
            assert_eq!(f64_to_f32_sticky(x), x as f32);
        }
        assert_eq!(f32_to_bf16(f64_to_f32_sticky(1e300)), bf16::INFINITY);
        assert_eq!(f32_to_bf16(f64_to_f32_sticky(-1e-300)).to_f32(), 0.0);
        assert!(f64_to_f32_sticky(f64::NAN).is_nan());
    }
}
