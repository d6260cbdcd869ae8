//! The truncated normal distribution.
//!
//! Each number is computed from one uniform number by the inverse of the cumulative distribution function (CDF), in double
//! precision. If the CDF changes too little or too much between the bounds for that, the distance from one bound is computed
//! instead.

use std::f64::consts::FRAC_1_SQRT_2;

use super::Source;
use super::floats::{Sample, at_least, nearest, neighbour};
use super::philox::{CHUNK, Draw, FEW};
use crate::{Float, Num};

/// A source of truncated normal numbers.
pub(super) struct Truncated {
    draw: Draw,
    form: Form,
    /// The smallest value of the element type between the bounds.
    low: f64,
    /// The largest value of the element type between the bounds.
    high: f64,
}

/// The method that computes a number from a uniform one. Lengths are in standard deviations. `bound` is the bound nearer to the
/// mean, and `step` is one standard deviation, signed, away from it towards the other bound.
enum Form {
    /// All numbers are this one.
    One(f64),
    /// Inverts the CDF from the nearer end, so that both tails are accurate. The probabilities are those of a number below the
    /// lower bound, above the upper bound, and between them.
    Quantile { mean: f64, std: f64, below: f64, above: f64, between: f64 },
    /// The bounds are so close that the logarithm of the density is nearly linear, and falls with this slope.
    Narrow { bound: f64, step: f64, slope: f64, width: f64 },
    /// The bounds are so far out that probabilities are tiny. `from` is the distance of `bound` from the mean, `ratio` is Mills'
    /// ratio there, and `beyond` is the logarithm of the share of the tail that is beyond the other bound.
    Tail { bound: f64, step: f64, from: f64, ratio: f64, beyond: f64 },
}

/// Up to this width, the logarithm of the density differs from a line by at most width² / 8, about 1e-9.
const NARROW: f64 = 1e-4;
/// From this distance on, bounds are treated as a tail.
const FAR: f64 = 10.0;

/// Returns the smallest and the largest finite value of `T` from `low` to `high`, or `None` if there is none.
pub(super) fn bounds<T: Float>(low: f64, high: f64) -> Option<(f64, f64)> {
    let (least, most) = (at_least::<T>(low), nearest::<T>(high));
    let least = if least == f64::NEG_INFINITY { neighbour::<T>(least, true) } else { least };
    let most = if most > high || most == f64::INFINITY { neighbour::<T>(most, false) } else { most };
    (low <= least && least <= most && most <= high).then_some((least, most))
}

/// Creates the source for `T`. Returns `None` if there is no value of `T` between the bounds.
pub(super) fn truncated_source<T: Float>(
    draw: Draw,
    mean: f64,
    std: f64,
    [low, high]: [f64; 2],
) -> Option<Truncated> {
    let (least, most) = bounds::<T>(low, high)?;
    Some(Truncated { draw, form: Form::of(mean, std, low, high), low: least, high: most })
}

impl<T: Float<Acc: Sample>> Source<T> for Truncated {
    const PER_BLOCK: u64 = <T::Acc as Sample>::PER_BLOCK;
    #[inline(always)]
    fn chunk(&self, block: u64) -> [T; CHUNK] {
        self.numbers(T::Acc::inner_uniforms(self.draw, block))
    }
    #[inline(always)]
    fn few(&self, block: u64) -> [T; FEW] {
        self.numbers(T::Acc::few_inner_uniforms(self.draw, block))
    }
}

impl Truncated {
    #[inline(always)]
    fn numbers<T: Float, const N: usize>(&self, u: [f64; N]) -> [T; N] {
        self.form.numbers(u).map(
            #[inline(always)]
            |x| {
                let x = nearest::<T>(x);
                let x = if x > self.high { self.high } else { x };
                T::from_acc(T::Acc::from_f64(if x < self.low { self.low } else { x }))
            },
        )
    }
}

/// Returns the number of the form, the numbers in it, and the bounds, as arguments of the kernel for GPUs. Returns `None` if there
/// is no value of `T` between the bounds.
#[cfg(feature = "cuda")]
pub(super) fn kernel_numbers<T: Float>(
    mean: f64,
    std: f64,
    [low, high]: [f64; 2],
) -> Option<(u32, [f64; 8])> {
    let (least, most) = bounds::<T>(low, high)?;
    let (number, [a, b, c, d, e]) = match Form::of(mean, std, low, high) {
        Form::One(x) => (0, [x, 0.0, 0.0, 0.0, 0.0]),
        Form::Quantile { mean, std, below, above, between } => (1, [mean, std, below, above, between]),
        Form::Narrow { bound, step, slope, width } => (2, [bound, step, slope, width, 0.0]),
        Form::Tail { bound, step, from, ratio, beyond } => (3, [bound, step, from, ratio, beyond]),
    };
    Some((number, [a, b, c, d, e, least, most, 0.0]))
}

impl Form {
    fn of(mean: f64, std: f64, low: f64, high: f64) -> Form {
        if std == 0.0 {
            return Form::One(mean);
        }
        let (from, to, width) = ((low - mean) / std, (high - mean) / std, (high - low) / std);
        let (bound, step, near, far) =
            if from + to < 0.0 { (high, -std, -to, -from) } else { (low, std, from, to) };
        if width <= NARROW {
            return Form::Narrow { bound, step, slope: 0.5 * (near + far), width };
        }
        if near == f64::INFINITY {
            return Form::One(bound);
        }
        if near >= FAR {
            let ratio = mills(near);
            let beyond = (mills(far) / ratio).ln() - width * (near + 0.5 * width);
            return Form::Tail { bound, step, from: near, ratio, beyond };
        }
        let (below, above) = (normal_cdf(from), normal_cdf(-to));
        // Subtracts the smaller probabilities, so that the difference keeps its precision.
        let between = match () {
            _ if from > 0.0 => normal_cdf(-from) - above,
            _ if to < 0.0 => normal_cdf(to) - below,
            _ => 1.0 - below - above,
        };
        Form::Quantile { mean, std, below, above, between }
    }

    /// Returns the `u`-quantiles of the truncated distribution.
    #[inline(always)]
    fn numbers<const N: usize>(&self, u: [f64; N]) -> [f64; N] {
        let Form::Quantile { mean, std, below, above, between } = *self else {
            return u.map(|u| self.number(u));
        };
        let (mut p, mut side) = ([0.0; N], [0.0; N]);
        for i in 0..N {
            let (under, over) = (below + u[i] * between, above + (1.0 - u[i]) * between);
            (p[i], side[i]) = if under < over { (under, 1.0) } else { (over, -1.0) };
        }
        let mut z = quantiles(p);
        for i in 0..N {
            z[i] = mean + std * (side[i] * z[i]);
        }
        z
    }

    /// Returns the `u`-quantile of the truncated distribution.
    fn number(&self, u: f64) -> f64 {
        match *self {
            Form::One(x) => x,
            Form::Quantile { .. } => self.numbers([u])[0],
            Form::Narrow { bound, step, slope, width } => {
                let (u, rest) = if step < 0.0 { (1.0 - u, u) } else { (u, 1.0 - u) };
                let fall = slope * width;
                // If the density does not fall, the distribution is uniform.
                let distance = if fall > f64::EPSILON { -log_mix(u, rest, -fall) / slope } else { u * width };
                bound + step * distance
            }
            Form::Tail { bound, step, from, ratio, beyond } => {
                let (u, rest) = if step < 0.0 { (1.0 - u, u) } else { (u, 1.0 - u) };
                // The logarithm of the share of the tail that is beyond the result.
                let further = log_mix(u, rest, beyond);
                // The first guess assumes that the share falls like the density. Newton's method then improves it on the
                // logarithm, which is nearly linear.
                let mut distance = -2.0 * further / (from + from.hypot((-2.0 * further).sqrt()));
                for _ in 0..3 {
                    let here = mills(from + distance);
                    let error = (here / ratio).ln() - distance * (from + 0.5 * distance) - further;
                    distance += error * here;
                }
                bound + step * distance
            }
        }
    }
}

/// Computes `ln(rest + u · e^log)`, where `rest` is `1 − u`. Accurate for `u` near 0 and near 1.
fn log_mix(u: f64, rest: f64, log: f64) -> f64 {
    let change = u * log.exp_m1();
    if change > -0.5 { change.ln_1p() } else { (rest + u * log.exp()).ln() }
}

/// Computes Mills' ratio: the probability that a standard normal number is above `z`, divided by the density at `z`. Uses
/// Laplace's continued fraction, which is accurate to the last digits for `z` from [`FAR`].
fn mills(z: f64) -> f64 {
    1.0 / (1..=16).rev().fold(z, |rest, n| z + f64::from(n) / rest)
}

/// Computes the CDF of the standard normal distribution.
fn normal_cdf(z: f64) -> f64 {
    0.5 * libm::erfc(-z * FRAC_1_SQRT_2)
}

/// Computes a polynomial. The coefficients start with that of the highest power.
#[inline(always)]
fn poly<const N: usize>(x: f64, coefficients: [f64; N]) -> f64 {
    coefficients.into_iter().fold(0.0, |sum, c| sum.mul_add(x, c))
}

/// Computes the `p`-quantiles of the standard normal distribution to about 16 digits, for `p` up to about 0.9. This is Wichura's
/// algorithm AS 241 ("The percentage points of the normal distribution", 1988).
#[inline(always)]
fn quantiles<const N: usize>(p: [f64; N]) -> [f64; N] {
    // Most numbers are in the middle. Its loop has no branches, so that it is vectorised, and the others are computed after it.
    let mut z = [0.0; N];
    for i in 0..N {
        z[i] = middle_quantile(p[i] - 0.5);
    }
    for i in 0..N {
        if (p[i] - 0.5).abs() > MIDDLE {
            z[i] = tail_quantile(p[i]);
        }
    }
    z
}

/// Up to this distance of the probability from ½, [`middle_quantile`] applies.
const MIDDLE: f64 = 0.425;

/// Computes one of the [`quantiles`], of `½ + q`.
#[inline(always)]
fn middle_quantile(q: f64) -> f64 {
    let r = MIDDLE * MIDDLE - q * q;
    let over = poly(
        r,
        [
            2_509.080_928_730_122_7,
            33_430.575_583_588_13,
            67_265.770_927_008_7,
            45_921.953_931_549_87,
            13_731.693_765_509_46,
            1_971.590_950_306_551_3,
            133.141_667_891_784_38,
            3.387_132_872_796_366_5,
        ],
    );
    let under = poly(
        r,
        [
            5_226.495_278_852_854,
            28_729.085_735_721_943,
            39_307.895_800_092_71,
            21_213.794_301_586_597,
            5_394.196_021_424_751,
            687.187_007_492_057_9,
            42.313_330_701_600_91,
            1.0,
        ],
    );
    q * over / under
}

/// Computes one of the [`quantiles`], of a small probability.
#[inline(always)]
fn tail_quantile(p: f64) -> f64 {
    if p <= 0.0 {
        return f64::NEG_INFINITY;
    }
    let r = (-p.ln()).sqrt();
    if r <= 5.0 {
        let r = r - 1.6;
        let over = poly(
            r,
            [
                0.000_774_545_014_278_341_4,
                0.022_723_844_989_269_184,
                0.241_780_725_177_450_6,
                1.270_458_252_452_368_4,
                3.647_848_324_763_204_5,
                5.769_497_221_460_691,
                4.630_337_846_156_546,
                1.423_437_110_749_683_5,
            ],
        );
        let under = poly(
            r,
            [
                1.050_750_071_644_416_9e-9,
                0.000_547_593_808_499_534_5,
                0.015_198_666_563_616_457,
                0.148_103_976_427_480_08,
                0.689_767_334_985_1,
                1.676_384_830_183_803_8,
                2.053_191_626_637_759,
                1.0,
            ],
        );
        -over / under
    } else {
        let r = r - 5.0;
        let over = poly(
            r,
            [
                2.010_334_399_292_288_1e-7,
                2.711_555_568_743_487_6e-5,
                0.001_242_660_947_388_078_4,
                0.026_532_189_526_576_124,
                0.296_560_571_828_504_87,
                1.784_826_539_917_291_3,
                5.463_784_911_164_114,
                6.657_904_643_501_103,
            ],
        );
        let under = poly(
            r,
            [
                2.044_263_103_389_939_7e-15,
                1.421_511_758_316_446e-7,
                1.846_318_317_510_054_8e-5,
                0.000_786_869_131_145_613_3,
                0.014_875_361_290_850_615,
                0.136_929_880_922_735_8,
                0.599_832_206_555_888,
                1.0,
            ],
        );
        -over / under
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantile(p: f64) -> f64 {
        quantiles([p])[0]
    }

    /// Mills' ratio agrees with the CDF where both can be computed.
    #[test]
    fn mills_ratios() {
        for z in [FAR, 10.5, 12.0, 17.0, 25.0, 37.0] {
            let density = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
            let expected = normal_cdf(-z) / density;
            assert!((mills(z) / expected - 1.0).abs() < 1e-12, "{z}: {} instead of {expected}", mills(z));
        }
        // Further out it agrees with the first terms of the asymptotic series.
        for z in [1e4f64, 1e8, 1e200] {
            assert!((mills(z) * z - (1.0 - 1.0 / z / z)).abs() < 1e-15, "{z}");
        }
        assert_eq!(mills(f64::INFINITY), 0.0);
    }

    /// Where two forms apply, they agree up to the precision of the less accurate one.
    #[test]
    fn forms_agree() {
        for (low, high) in [(10.0, 10.5), (10.0, 12.0), (10.0, 10.001), (20.0, f64::INFINITY), (-14.0, -11.0)]
        {
            let tail = Form::of(0.0, 1.0, low, high);
            assert!(matches!(tail, Form::Tail { .. }));
            let (below, above) = (normal_cdf(low), normal_cdf(-high));
            let between = if low > 0.0 { normal_cdf(-low) - above } else { normal_cdf(high) - below };
            let quantile = Form::Quantile { mean: 0.0, std: 1.0, below, above, between };
            for u in [1e-12, 1e-5, 0.1, 0.25, 0.5, 0.9, 1.0 - 1e-9] {
                let (a, b) = (tail.number(u), quantile.number(u));
                // Probabilities have a relative error of about 1e-14, because erfc loses z² units in the last place. The
                // error of a number is Mills' ratio times that.
                let limit = 1e-12;
                assert!((a - b).abs() < limit, "{low} {high} {u}: {a} {b}");
            }
        }
        let width = 0.99 * NARROW;
        for (low, high) in
            [(0.5, 0.5 + width), (-3.0, -3.0 + width), (-0.5 * width, 0.5 * width), (10.0, 10.0 + width)]
        {
            let narrow = Form::of(0.0, 1.0, low, high);
            assert!(matches!(narrow, Form::Narrow { .. }));
            let (below, above) = (normal_cdf(low), normal_cdf(-high));
            let between = if low > 0.0 { normal_cdf(-low) - above } else { normal_cdf(high) - below };
            let quantile = Form::Quantile { mean: 0.0, std: 1.0, below, above, between };
            for u in [1e-5, 0.1, 0.25, 0.5, 0.9, 0.999] {
                let (a, b) = (narrow.number(u), quantile.number(u));
                // The density has a relative error of 1e-9. The other form has an error of about 1e-16 of the probability,
                // divided by the density.
                assert!((a - b).abs() < 2e-9 * NARROW + 1e-14, "{low} {high} {u}: {a} {b}");
            }
        }
    }

    /// The CDF of a quantile is the probability. The CDF is accurate to the last digits.
    #[test]
    fn quantiles_invert_the_cdf() {
        let mut p = 0.5f64;
        let mut worst = 0.0f64;
        while p > 1e-300 {
            for p in [p, p * 0.83, p * 0.71] {
                let z = quantile(p);
                // One step of Newton's method gives the error of the quantile.
                let slope = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
                let error = (normal_cdf(z) - p) / slope;
                worst = worst.max(error.abs() / z.abs().max(1.0));
            }
            p *= 0.9;
        }
        // The CDF itself has an error of about 1e-16 · z · p / slope, where z · p / slope is about 1.
        assert!(worst < 1e-14, "{worst}");
        assert_eq!(quantile(0.0), f64::NEG_INFINITY);
        assert_eq!(quantile(0.5), 0.0);
        // Values from tables.
        for (p, z) in [
            (0.025, -1.959_963_984_540_054),
            (0.001, -3.090_232_306_167_813_5),
            (1e-10, -6.361_340_902_404_056),
        ] {
            assert!((quantile(p) - z).abs() < 1e-14, "{p}: {} instead of {z}", quantile(p));
        }
    }
}
