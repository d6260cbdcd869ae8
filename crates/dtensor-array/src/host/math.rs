//! Elementary functions in single precision.
//!
//! The functions are free of branches and calls: special values use selects, and powers of two are built from bits. A loop over
//! one of them vectorises if it is compiled through [`simd`](super::simd). Outside `simd` they are correct but slow. Polynomials
//! are minimax fits over the reduced range.

use std::f32::consts::LOG2_E;

use crate::Real;

/// Adding this to a small number rounds it to an integer, which is then in the low bits.
const ROUND: f32 = 12_582_912.0; // 1.5 × 2²³
const ROUND_F64: f64 = 6_755_399_441_055_744.0; // 1.5 × 2⁵²

/// ln 2 as a sum of two numbers. The first has few bits, so that its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;

/// Computes the polynomial `c[0] + c[1]·x + c[2]·x² + …`.
#[inline(always)]
fn poly<A: Real, const N: usize>(x: A, c: [A; N]) -> A {
    // Even and odd powers are summed separately: two short chains of dependent steps instead of a long one.
    let z = x * x;
    let mut sums = [c[N - 1], c[N - 2]];
    let mut i = N - 2;
    while i > 0 {
        i -= 1;
        sums = [sums[1], sums[0].mul_add(z, c[i])];
    }
    sums[0].mul_add(x, sums[1])
}

/// Splits `x` into `n·ln 2 + r` with `|r|` ≤ ln 2 / 2. Returns bits whose low part is `n + bias`, and `r`.
#[inline(always)]
fn reduce_exp(x: f32, bias: f32) -> (u32, f32) {
    let shifted = x.mul_add(LOG2_E, ROUND + bias);
    let n = shifted - (ROUND + bias);
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    (shifted.to_bits(), r)
}

/// Computes `eʳ − 1` for a reduced `r`, with a small relative error.
#[inline(always)]
fn exp_m1_reduced(r: f32) -> f32 {
    let q = poly(r, [0.5, 0.166_665_38, 0.041_666_266, 8.367_247e-3, 1.394_769_4e-3]);
    q.mul_add(r * r, r)
}

/// Computes e to the power `x`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is infinite, or rounds to zero. Comparisons with NaN are false, so NaN passes.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    // The result is scaled in two steps, because 2ⁿ may overflow or be subnormal. `n` has twice the exponent bias added, so a
    // shift halves it, and each half is a valid exponent.
    let (n, r) = reduce_exp(x, 254.0);
    let half = (n << 22) & 0x7f80_0000;
    let other = f32::from_bits((n << 23).wrapping_sub(half));
    let half = f32::from_bits(half);
    exp_m1_reduced(r).mul_add(half, half) * other
}

/// Computes the hyperbolic tangent.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let a = if a > 10.0 { 10.0 } else { a };
    // m = e²ᵃ − 1, without cancellation for small a. Then tanh a = m / (m + 2).
    let (n, r) = reduce_exp(a + a, 127.0);
    let scale = f32::from_bits(n << 23);
    let m = scale.mul_add(exp_m1_reduced(r), scale - 1.0);
    (m / (m + 2.0)).copysign(x)
}

/// Computes the error function.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let a = x.abs();
    let a = if a > 3.95 { 3.95 } else { a };
    // 1 − erf a = (1 + u/8)⁸ for a smooth function u(a), which is computed as −a plus a correction.
    let p = poly(
        a,
        [
            -0.128_379_17,
            -0.557_042_8,
            -0.016_713_295,
            0.052_716_415,
            1.489_326e-3,
            -4.101_166_5e-3,
            7.105_534e-4,
            -3.835_842e-5,
        ],
    );
    let u = a.mul_add(p, -a);
    // (1 + u/8)² = 1 + (u + u²/16)/4, and so on. Leaving out the ones keeps precision for small u.
    let u = (u * 0.0625).mul_add(u, u);
    let u = (u * 0.125).mul_add(u, u);
    let u = (u * 0.25).mul_add(u, u);
    u.copysign(x)
}

/// Computes the cumulative distribution function of the standard normal distribution, with a small absolute error.
#[inline(always)]
pub(crate) fn normal_cdf(x: f32) -> f32 {
    let a = x.abs();
    let a = if a > 5.58 { 5.58 } else { a };
    // Like `erf` of a/√2, with u/16 instead of u, which saves a step.
    let u = a * poly(
        a,
        [
            -0.049_867_783,
            -0.017_407_667,
            -3.688_617e-4,
            8.227_573_7e-4,
            1.735_798e-5,
            -3.247_866_7e-5,
            4.028_642_7e-6,
            -1.592_117_8e-7,
        ],
    );
    let u = u.mul_add(u, u);
    let u = (u * 2.0).mul_add(u, u);
    let u = (u * 4.0).mul_add(u, u);
    u.copysign(x).mul_add(8.0, 0.5)
}

/// Computes [`normal_cdf`] in double precision.
pub(crate) fn normal_cdf_f64(x: f64) -> f64 {
    libm::erf(x * std::f64::consts::FRAC_1_SQRT_2).mul_add(0.5, 0.5)
}

/// Computes the natural logarithm.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    let bias = if subnormal { 23 } else { 0 };
    // scaled = m · 2ⁿ with m from √½ to √2.
    let bits = scaled.to_bits() as i32;
    let n = bits.wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32) >> 23;
    let f = f32::from_bits(bits.wrapping_sub(n << 23) as u32) - 1.0;
    let n = (n - bias) as f32;
    let tail = poly(
        f,
        [
            0.333_333_1,
            -0.249_999_87,
            0.200_022_27,
            -0.166_692_51,
            0.142_186_69,
            -0.123_843_39,
            0.118_728_95,
            -0.117_898_39,
            0.069_155_864,
        ],
    );
    let square = f * f;
    let low = n.mul_add(LN2_LOW, (square * f) * tail);
    let y = n.mul_add(LN2_HIGH, f + square.mul_add(-0.5, low));
    // The logarithm of infinity or NaN is the same value.
    let y = if x < f32::INFINITY { y } else { x };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x < 0.0 { f32::NAN } else { y }
}

/// Reduces an angle `a` ≥ 0 to a multiple of π/2 plus a remainder from −π/4 to π/4. Returns the remainder, and the multiple
/// modulo 4.
#[inline(always)]
fn reduce_angle(a: f32) -> (f32, u32) {
    // 1/2π in pieces of 28 bits. A product with a 24-bit number is exact in double precision, and so is removing its full
    // turns. Seven pieces leave 70 fractional bits for the largest `f32`.
    const TURN: [f64; 7] = [
        170_891_318.0 / (1u64 << 30) as f64,
        240_010_261.0 / (1u64 << 58) as f64,
        44_024_437.0 / (1u64 << 58) as f64 / (1u64 << 28) as f64,
        131_200_308.0 / (1u64 << 58) as f64 / (1u64 << 56) as f64,
        232_525_238.0 / (1u64 << 58) as f64 / (1u64 << 42) as f64 / (1u64 << 42) as f64,
        43_358_524.0 / (1u64 << 58) as f64 / (1u64 << 56) as f64 / (1u64 << 56) as f64,
        70_845_471.0 / (1u64 << 62) as f64 / (1u64 << 62) as f64 / (1u64 << 62) as f64 / (1u64 << 12) as f64,
    ];
    let a = a as f64;
    let mut turns = 0.0;
    let mut i = 0;
    while i < TURN.len() {
        let part = a * TURN[i];
        turns += part - part.round_ties_even();
        i += 1;
    }
    let quarters = turns * 4.0;
    let shifted = quarters + ROUND_F64;
    let rest = quarters - (shifted - ROUND_F64);
    ((rest * std::f64::consts::FRAC_PI_2) as f32, shifted.to_bits() as u32 & 3)
}

/// Computes the sine of `quarter · π/2 + r`.
#[inline(always)]
fn sine_of(r: f32, quarter: u32) -> f32 {
    let u = r * r;
    let sin = (u * r).mul_add(poly(u, [-0.166_666_55, 8.332_173e-3, -1.951_666e-4]), r);
    let cos =
        (u * u).mul_add(poly(u, [0.041_666_646, -1.388_736_2e-3, 2.443_773_5e-5]), u.mul_add(-0.5, 1.0));
    let y = if quarter & 1 == 0 { sin } else { cos };
    f32::from_bits(y.to_bits() ^ ((quarter & 2) << 30))
}

/// Computes the sine.
#[inline(always)]
pub(crate) fn sin(x: f32) -> f32 {
    let (r, quarter) = reduce_angle(x.abs());
    f32::from_bits(sine_of(r, quarter).to_bits() ^ (x.to_bits() & 0x8000_0000))
}

/// Computes the cosine.
#[inline(always)]
pub(crate) fn cos(x: f32) -> f32 {
    let (r, quarter) = reduce_angle(x.abs());
    sine_of(r, quarter + 1)
}

/// Computes `x` to the power `y`, with the special values of C's `pow`.
#[inline(always)]
pub(crate) fn pow(x: f32, y: f32) -> f32 {
    // Computed in double precision: no `f32` is subnormal there, and the error of the logarithm, which `y` multiplies, stays
    // far below the precision of `f32`.
    let a = x.abs() as f64;
    let bits = a.to_bits() as i64;
    let n = bits.wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits() as i64) >> 52;
    let m = f64::from_bits(bits.wrapping_sub(n << 52) as u64);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let tail =
        [0.961_796_673_314_136_4, 0.577_083_590_598_586_9, 0.411_672_361_646_755_4, 0.340_737_047_187_980_5];
    let tail = poly(z, tail).mul_add(z, 2.885_390_081_790_107);
    // `n` is a small integer, so adding it to the bits of `ROUND_F64` converts it to floating point.
    let n = f64::from_bits((n as u64).wrapping_add(ROUND_F64.to_bits())) - ROUND_F64;
    let log = s.mul_add(tail, n);
    let log = if a < f64::INFINITY { log } else { a };
    let log = if a == 0.0 { f64::NEG_INFINITY } else { log };

    let t = log * y as f64;
    let t = if t > 200.0 { 200.0 } else { t };
    let t = if t < -200.0 { -200.0 } else { t };
    let shifted = t + ROUND_F64;
    let f = t - (shifted - ROUND_F64);
    let mantissa = poly(
        f,
        [
            0.999_999_999_961_688,
            0.693_147_180_728_376_1,
            0.240_226_511_981_189,
            0.055_504_103_536_306_97,
            0.009_618_027_257_172_837,
            0.001_333_392_243_451_994,
            0.000_154_692_903_717_867_7,
            1.520_194_885_085_996e-5,
        ],
    );
    let scale = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let power = (mantissa * scale) as f32;

    let is_integer = y.trunc() == y;
    let half = y * 0.5;
    let odd = is_integer & (half.trunc() != half);
    let sign = if odd { x.to_bits() & 0x8000_0000 } else { 0 };
    let power = f32::from_bits(power.to_bits() | sign);
    let root_of_negative = (x < 0.0) & (x > f32::NEG_INFINITY) & !is_integer;
    let power = if root_of_negative { f32::NAN } else { power };
    // In these cases the result is 1, even if the other argument is NaN.
    let one = (y == 0.0) | (x == 1.0) | ((x == -1.0) & (y.abs() == f32::INFINITY));
    if one { 1.0 } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error of `got` in units in the last place of the true value.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        if got.to_bits() == nearest.to_bits() || (got.is_nan() && want.is_nan()) {
            return 0.0;
        }
        if !nearest.is_finite() || !got.is_finite() {
            return f64::INFINITY;
        }
        let ulp = (nearest.abs().next_up() - nearest.abs()) as f64;
        (got as f64 - want).abs() / ulp
    }

    /// Returns every 997th finite `f32`, of both signs.
    fn floats() -> impl Iterator<Item = f32> {
        (0..=u32::MAX).step_by(997).map(f32::from_bits).filter(|x| x.is_finite())
    }

    fn worst(f: fn(f32) -> f32, exact: fn(f64) -> f64, distance: fn(f32, f64) -> f64) -> (f64, f32) {
        super::super::simd::<f32, _>(
            #[inline(always)]
            || {
                let mut worst = (0.0, 0.0);
                for x in floats() {
                    let d = distance(f(x), exact(x as f64));
                    if d > worst.0 || d.is_nan() {
                        worst = (d, x);
                    }
                }
                worst
            },
        )
    }

    #[test]
    fn functions_are_accurate_everywhere() {
        let relative = |got: f32, want: f64| {
            if got as f64 == want { 0.0 } else { (got as f64 - want).abs() / want.abs() }
        };
        let absolute = |got: f32, want: f64| (got as f64 - want).abs();
        for (name, (worst, at), limit) in [
            ("exp", worst(exp, f64::exp, ulps), 1.5),
            ("ln", worst(ln, f64::ln, ulps), 2.0),
            ("sin", worst(sin, f64::sin, ulps), 2.0),
            ("cos", worst(cos, f64::cos, ulps), 2.0),
            ("tanh", worst(tanh, f64::tanh, ulps), 4.0),
            ("tanh", worst(tanh, f64::tanh, relative), 4e-7),
            ("erf", worst(erf, libm::erf, absolute), 1.2e-7),
            ("erf", worst(erf, libm::erf, ulps), 4.0),
        ] {
            println!("{name} is off by {worst} at {at}");
            assert!(worst <= limit, "{name} is off by {worst} at {at}");
        }
    }

    #[test]
    fn special_values() {
        let inf = f32::INFINITY;
        for f in [exp, ln, tanh, erf, sin, cos] {
            assert!(f(f32::NAN).is_nan());
        }
        assert_eq!([exp(inf), exp(-inf), exp(0.0), exp(-0.0)], [inf, 0.0, 1.0, 1.0]);
        assert_eq!([exp(88.73), exp(-200.0), exp(1e30)], [inf, 0.0, inf]);
        assert!(exp(88.72).is_finite());
        assert_eq!(exp(-100.0), 3.8e-44);
        assert_eq!([ln(0.0), ln(-0.0), ln(inf), ln(1.0)], [-inf, -inf, inf, 0.0]);
        assert!(ln(-1.0).is_nan() && ln(-inf).is_nan() && ln(-1e-45).is_nan());
        assert_eq!([tanh(inf), tanh(-inf), erf(inf), erf(-inf)], [1.0, -1.0, 1.0, -1.0]);
        assert_eq!([tanh(1e-30), tanh(1e-45), erf(-1e-45)], [1e-30, 1e-45, -1e-45]);
        assert!(sin(inf).is_nan() && cos(-inf).is_nan());
        assert_eq!((sin(0.0), cos(0.0)), (0.0, 1.0));
        for f in [sin, tanh, erf] {
            assert_eq!(f(-0.0).to_bits(), (-0.0f32).to_bits());
        }
    }

    #[test]
    fn normal_cdf_is_accurate() {
        let exact = |x: f64| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
        let (worst, at) = worst(normal_cdf, exact, |got, want| (got as f64 - want).abs());
        assert!(worst <= 1e-7, "normal_cdf is off by {worst} at {at}");
        // The ends must be exact, because GELU multiplies them by numbers that may be large.
        let inf = f32::INFINITY;
        assert_eq!(
            [normal_cdf(-inf), normal_cdf(-6.0), normal_cdf(6.0), normal_cdf(inf)],
            [0.0, 0.0, 1.0, 1.0]
        );
        assert_eq!(normal_cdf(0.0), 0.5);
        assert!(normal_cdf(f32::NAN).is_nan());
    }

    #[test]
    fn powers_are_accurate() {
        let special = [
            0.0,
            0.5,
            1.0,
            1.5,
            2.0,
            3.0,
            1e-45,
            1e-30,
            1e30,
            16_777_215.0,
            f32::MAX,
            f32::INFINITY,
            f32::NAN,
        ];
        let special: Vec<f32> = special.iter().flat_map(|&x| [x, -x]).collect();
        for &x in &special {
            for &y in &special {
                let want = (x as f64).powf(y as f64);
                let got = pow(x, y);
                assert!(ulps(got, want) <= 1.0, "{x}^{y} is {want}, not {got}");
                assert!(want.is_nan() || got.is_sign_negative() == want.is_sign_negative(), "{x}^{y}");
            }
        }
        // Two sequences with large steps, whose pairs cover every magnitude of base and exponent.
        let (mut x, mut y) = (0u32, 0u32);
        for _ in 0..2_000_000 {
            (x, y) = (x.wrapping_add(0x9e37_79b9), y.wrapping_add(0x85eb_ca6b));
            // Exponents from 2⁻³² to 2³², where most results are neither zero nor infinite.
            let (x, y) =
                (f32::from_bits(x), f32::from_bits(((95 << 23) + (y & 0x1fff_ffff)) | (y & 0x8000_0000)));
            let want = (x as f64).powf(y as f64);
            assert!(ulps(pow(x, y), want) <= 1.0, "{x}^{y} is {want}, not {}", pow(x, y));
        }
    }
}
