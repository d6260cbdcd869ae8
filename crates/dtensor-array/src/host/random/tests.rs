//! Tests of random numbers: their statistics, their bits on shards, and invalid bounds.

use half::{bf16, f16};

use super::super::testing::{FLOATS, bits, local, noise, pick, strided, windows};
use super::floats::{Sample, neighbour, normal_source, uniform_source};
use super::integers::{Choice, threshold};
use super::philox::philox;
use super::truncated::{bounds, truncated_source};
use super::*;
use crate::DType;
use crate::{Elem, Float, Num};

/// An arbitrary draw.
const DRAW: Draw = Draw { seed: 3, stream: 4 };

fn checked(
    distribution: Distribution,
    dtype: DType,
    window: &Window,
    seed: u64,
    stream: u64,
) -> Result<Array> {
    distribution.check("test", dtype)?;
    draw(distribution, dtype, window, Draw { seed, stream })
}

fn uniform(dtype: DType, window: &Window, seed: u64, stream: u64, low: f64, high: f64) -> Result<Array> {
    checked(Distribution::Uniform { low, high }, dtype, window, seed, stream)
}

fn normal(dtype: DType, window: &Window, seed: u64, stream: u64, mean: f64, std: f64) -> Result<Array> {
    checked(Distribution::Normal { mean, std }, dtype, window, seed, stream)
}

fn integers(window: &Window, seed: u64, stream: u64, low: i64, high: i64) -> Result<Array> {
    checked(Distribution::Integers { low, high }, DType::I64, window, seed, stream)
}

fn bernoulli(dtype: DType, window: &Window, seed: u64, stream: u64, p: f64) -> Result<Array> {
    checked(Distribution::Bernoulli { p }, dtype, window, seed, stream)
}

/// The number of standard deviations that a test tolerates. A correct generator fails with a probability of about one in a million.
const SIGMAS: f64 = 5.0;

/// Returns the largest relative rounding error of a dtype.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 => 2f64.powi(-24),
        _ => 2f64.powi(-53),
    }
}

/// Asserts that the mean of numbers agrees with a distribution of this mean and variance. `moved` is the average rounding error.
#[track_caller]
fn expect_mean(
    numbers: impl ExactSizeIterator<Item = f64>,
    mean: f64,
    variance: f64,
    moved: f64,
    what: &str,
) {
    let n = numbers.len() as f64;
    let got = numbers.sum::<f64>() / n;
    let limit = SIGMAS * (variance / n).sqrt() + moved;
    assert!((got - mean).abs() <= limit, "{what}: mean {got}, not within {limit} of {mean}");
}

/// Asserts that a count of successes among `n` trials agrees with the probability `p`.
#[track_caller]
fn expect_count(count: usize, n: usize, p: f64, what: &str) {
    let of = (0..n).map(|i| f64::from(u8::from(i < count)));
    expect_mean(of, p, p * (1.0 - p), 0.0, what);
}

fn run<T: Elem>(n: usize, fill: impl FnOnce(&mut [MaybeUninit<T>])) -> Vec<T> {
    // SAFETY: the fills under test write every element.
    unsafe { super::super::fill_vec(n, fill) }.unwrap()
}

#[test]
fn an_element_depends_only_on_its_index() {
    fn check<T: Float<Acc: Sample>>() {
        let draw = Draw { seed: 7, stream: 3 };
        let uniform = uniform_source::<T>(draw, -1.0, 2.0).unwrap();
        let normal = normal_source::<T>(draw, 0.0, 1.0);
        let truncated = truncated_source::<T>(draw, 0.5, 2.0, [-1.0, 2.0]).unwrap();
        let choice = Choice { draw, threshold: threshold(0.3), less: 1u8, not: 0 };
        let uniforms = run::<T>(400, |out| fill(&uniform, 0, out));
        let normals = run::<T>(400, |out| fill(&normal, 0, out));
        let truncateds = run::<T>(400, |out| fill(&truncated, 0, out));
        let choices = run::<u8>(400, |out| fill(&choice, 0, out));
        for (a, b) in
            [(0, 1), (1, 2), (3, 70), (5, 5), (63, 200), (66, 400), (129, 131), (5, 17), (62, 66), (100, 117)]
        {
            let first = a as u64;
            assert!(run::<T>(b - a, |out| fill(&uniform, first, out)) == uniforms[a..b], "uniform {a}..{b}");
            assert!(run::<T>(b - a, |out| fill(&normal, first, out)) == normals[a..b], "normal {a}..{b}");
            assert!(run::<T>(b - a, |out| fill(&truncated, first, out)) == truncateds[a..b], "{a}..{b}");
            assert_eq!(run::<u8>(b - a, |out| fill(&choice, first, out)), choices[a..b]);
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
    check::<f16>();
}

#[test]
fn a_shard_is_bit_identical_to_the_full_array() {
    for (case, (window, indices)) in windows().into_iter().enumerate() {
        let (seed, stream) = (case as u64, 3);
        let check = |what: &str, draw: &dyn Fn(&Window) -> Result<Array>| {
            let shard = draw(&window).unwrap();
            let full = draw(&Window::whole(window.whole_shape())).unwrap();
            assert_eq!(shard.dims(), &window.shape()[..]);
            assert_eq!(bits(&shard), pick(&bits(&full), &indices), "{what} {} {window:?}", shard.dtype());
        };
        for dtype in FLOATS {
            check("uniform", &|window| uniform(dtype, window, seed, stream, -1.0, 2.0));
            check("normal", &|window| normal(dtype, window, seed, stream, 0.5, 2.0));
            let truncated = Distribution::Truncated { mean: 0.5, std: 2.0, low: -1.0, high: 2.0 };
            check("truncated", &|window| checked(truncated, dtype, window, seed, stream));
            let n = window.whole_shape().numel();
            let values = noise(n, seed);
            let x = local(dtype, &values, window.whole_shape());
            let x_shard = local(dtype, &pick(&values, &indices), window.shape());
            let full = dropout(&x, &Window::whole(x.dims()), 0.4, Draw { seed, stream }).unwrap();
            for x_shard in [strided(&x_shard), x_shard] {
                let shard = dropout(&x_shard, &window, 0.4, Draw { seed, stream }).unwrap();
                assert_eq!(bits(&shard), pick(&bits(&full), &indices), "dropout {dtype} {window:?}");
            }
            let values: Vec<f64> = values.iter().map(|x| x.abs() / 2.0).collect();
            let p = local(dtype, &values, window.whole_shape());
            let p_shard = local(dtype, &pick(&values, &indices), window.shape());
            let full = bernoulli_each(&p, &Window::whole(p.dims()), Draw { seed, stream }).unwrap();
            for p_shard in [strided(&p_shard), p_shard] {
                let shard = bernoulli_each(&p_shard, &window, Draw { seed, stream }).unwrap();
                assert_eq!(bits(&shard), pick(&bits(&full), &indices), "bernoulli_each {dtype} {window:?}");
            }
        }
        for dtype in DType::ALL {
            check("bernoulli", &|window| bernoulli(dtype, window, seed, stream, 0.3));
            let integers = Distribution::Integers { low: 3, high: 200 };
            check("integers", &|window| checked(integers, dtype, window, seed, stream));
        }
        check("integers", &|window| integers(window, seed, stream, -1000, 1000));
        check("integers", &|window| integers(window, seed, stream, i64::MIN, i64::MAX));
    }
}

#[test]
fn indices_may_exceed_32_bits() {
    // Block numbers that cross 32 bits, so that they need both counter words.
    let n = 1usize << 40;
    let far = |range: std::ops::Range<usize>| Window::new(&[n], [[0..0, range]]).unwrap();
    let draw =
        |range| uniform(DType::F64, &far(range), 1, 2, 0.0, 1.0).unwrap().copy_to_host::<f64>().unwrap();
    let at = (1 << 33) - 3;
    let x = draw(at..at + 100);
    assert_eq!(draw(at + 7..at + 90), x[7..90]);
    let words = philox([0, 1, 2, 0], [1, 0]);
    let word = u64::from(words[1]) << 32 | u64::from(words[0]);
    assert_eq!(x[3], (word >> 11) as f64 / (1u64 << 53) as f64);
}

#[test]
fn uniform_numbers() {
    let x =
        uniform(DType::F32, &Window::whole(&[5, 7]), 1, 2, 0.0, 1.0).unwrap().copy_to_host::<f32>().unwrap();
    // Element 34, computed directly.
    let words = philox([8, 0, 2, 0], [1, 0]);
    assert_eq!(x[34], (words[2] >> 8) as f32 / 16777216.0);
    let x =
        uniform(DType::F64, &Window::whole(&[5, 7]), 1, 2, 0.0, 1.0).unwrap().copy_to_host::<f64>().unwrap();
    let words = philox([16, 0, 2, 0], [1, 0]);
    let word = u64::from(words[3]) << 32 | u64::from(words[2]);
    assert_eq!(x[33], (word >> 11) as f64 / (1u64 << 53) as f64);

    fn check<T: Float + Element>(low: f64, high: f64) {
        let n = 100_000;
        let x = uniform(<T as Element>::DTYPE, &Window::whole(&[n]), 5, 6, low, high)
            .unwrap()
            .copy_to_host::<T>()
            .unwrap();
        let x: Vec<f64> = x.into_iter().map(|x| x.acc().to_f64()).collect();
        assert!(x.iter().all(|&x| low <= x && x < high), "{} {low} {high}", <T as Element>::DTYPE);
        let (width, what) = (high - low, format!("{} {low} {high}", <T as Element>::DTYPE));
        let mean = 0.5 * (low + high);
        // Allows for rounding, and for the step down of numbers that round to the upper end.
        let moved = 3.0 * rounding(<T as Element>::DTYPE) * low.abs().max(high.abs());
        expect_mean(x.iter().copied(), mean, width.powi(2) / 12.0, moved, &what);
        // The variance of (x − mean)² is the fourth moment, width⁴ / 80, minus the square of width² / 12.
        let squares = x.iter().map(|x| (x - mean).powi(2));
        expect_mean(squares, width.powi(2) / 12.0, width.powi(4) / 180.0, moved * width, &what);
    }
    for (low, high) in [(0.0, 1.0), (-3.0, -1.0), (0.1, 7.3), (-0.05, 0.05)] {
        check::<f32>(low, high);
        check::<f64>(low, high);
        check::<bf16>(low, high);
        check::<f16>(low, high);
    }
    let same =
        uniform(DType::BF16, &Window::whole(&[9]), 0, 0, 2.0, 2.0).unwrap().copy_to_host::<bf16>().unwrap();
    assert_eq!(same, vec![bf16::from_f32(2.0); 9]);
    assert_eq!(uniform(DType::F32, &Window::whole(&[0, 3]), 0, 0, 0.0, 1.0).unwrap().dims(), [0, 3]);
    assert_eq!(uniform(DType::F32, &Window::whole(&[]), 0, 0, 0.0, 1.0).unwrap().numel(), 1);
    assert!(uniform(DType::I64, &Window::whole(&[1]), 0, 0, 0.0, 1.0).is_err());
    assert!(uniform(DType::F32, &Window::whole(&[1]), 0, 0, 1.0, 0.0).is_err());
    assert!(uniform(DType::F32, &Window::whole(&[1]), 0, 0, f64::NAN, 0.0).is_err());
}

#[test]
fn neighbours_are_the_adjacent_values() {
    assert_eq!(neighbour::<f32>(1.0, false), f64::from(1.0f32.next_down()));
    assert_eq!(neighbour::<f32>(0.0, false), f64::from(0.0f32.next_down()));
    assert_eq!(neighbour::<f32>(-3.0, true), f64::from((-3.0f32).next_up()));
    assert_eq!(neighbour::<f64>(1.0, false), 1.0f64.next_down());
    assert_eq!(neighbour::<bf16>(1.0, false), 0.99609375);
    assert_eq!(neighbour::<f16>(1.0, true), 1.0009765625);
}

#[test]
fn normal_numbers() {
    fn check<T: Float + Element>() {
        let n = 200_000;
        let x = normal(<T as Element>::DTYPE, &Window::whole(&[n]), 11, 0, 3.0, 2.0)
            .unwrap()
            .copy_to_host::<T>()
            .unwrap();
        let z: Vec<f64> = x.into_iter().map(|x| (x.acc().to_f64() - 3.0) / 2.0).collect();
        assert!(z.iter().all(|z| z.is_finite()));
        let what = <T as Element>::DTYPE.to_string();
        // The rounding error of each number, and the average error of a function of it with this slope.
        let rounded = |z: f64| rounding(<T as Element>::DTYPE) * (3.0 + 2.0 * z).abs() / 2.0;
        let moved = |slope: &dyn Fn(f64) -> f64| {
            z.iter().map(|&z| rounded(z) * slope(z).abs()).sum::<f64>() / n as f64
        };
        // The moments of the normal distribution, and the variances of the powers.
        for (k, expected, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            // Doubled, because powers are not linear.
            let moved = 2.0 * moved(&|z| f64::from(k) * z.powi(k - 1));
            expect_mean(
                z.iter().map(|z| z.powi(k)),
                expected,
                variance,
                moved,
                &format!("{what} moment {k}"),
            );
        }
        // Neighbours come from one block and must be independent.
        let pairs = z.chunks(2).map(|p| p[0] * p[1]);
        expect_mean(pairs, 0.0, 1.0, 4.0 * moved(&|z| z), &what);
        // All dtypes hold the values two standard deviations from the mean. Numbers slightly beyond may round to them.
        let p = libm::erfc(2f64.sqrt());
        let density = 2.0 * (-2f64).exp() / std::f64::consts::TAU.sqrt();
        let beyond = z.iter().map(|z| f64::from(u8::from(z.abs() > 2.0)));
        expect_mean(beyond, p, p * (1.0 - p), density * rounded(2.0), &what);
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
    check::<f16>();
    assert!(normal(DType::F32, &Window::whole(&[1]), 0, 0, 0.0, -1.0).is_err());
    assert_eq!(
        normal(DType::F32, &Window::whole(&[3]), 0, 0, 4.0, 0.0).unwrap().copy_to_host::<f32>().unwrap(),
        vec![4.0; 3]
    );
}

#[test]
fn random_integers() {
    let x = integers(&Window::whole(&[60_000]), 1, 1, -2, 4).unwrap().copy_to_host::<i64>().unwrap();
    for value in -2..4 {
        let count = x.iter().filter(|&&x| x == value).count();
        expect_count(count, 60_000, 1.0 / 6.0, &value.to_string());
    }
    assert!(x.iter().all(|x| (-2..4).contains(x)));
    let x =
        integers(&Window::whole(&[1000]), 1, 1, i64::MIN, i64::MAX).unwrap().copy_to_host::<i64>().unwrap();
    assert!(x.iter().any(|&x| x < i64::MIN / 2) && x.iter().any(|&x| x > i64::MAX / 2));
    assert_eq!(
        integers(&Window::whole(&[3]), 1, 1, 5, 6).unwrap().copy_to_host::<i64>().unwrap(),
        vec![5; 3]
    );
    assert!(integers(&Window::whole(&[3]), 1, 1, 5, 5).is_err());
}

#[test]
fn dropout_agrees_with_its_mask() {
    let n = 10_007;
    let x: Vec<f32> = (0..n).map(|i| i as f32 + 1.0).collect();
    let local = Array::from_vec(x.clone(), &[n]).unwrap();
    let mask = keep_mask(&[n], 0.25, DRAW).unwrap().copy_to_host::<u8>().unwrap();
    let y = dropout(&local, &Window::whole(local.dims()), 0.25, DRAW).unwrap().copy_to_host::<f32>().unwrap();
    let u = uniform(DType::F32, &Window::whole(&[n]), 3, 4, 0.0, 1.0).unwrap().copy_to_host::<f32>().unwrap();
    let mut run = x.clone();
    simd::<f32, _>(
        #[inline(always)]
        || dropout_run(Draw { seed: 3, stream: 4 }, 0.25, 13, &mut run[13..]),
    );
    for i in 0..n {
        let kept = u[i] >= 0.25;
        assert_eq!(mask[i], kept as u8);
        assert_eq!(y[i], if kept { x[i] * (1.0 / 0.75f32) } else { 0.0 });
        assert_eq!(run[i], if i < 13 { x[i] } else { y[i] });
    }
    expect_count(mask.iter().filter(|&&m| m == 1).count(), n, 0.75, "kept");
    assert_eq!(
        dropout(&local, &Window::whole(local.dims()), 0.0, DRAW).unwrap().copy_to_host::<f32>().unwrap(),
        x
    );
    assert!(
        dropout(&local, &Window::whole(local.dims()), 1.0, DRAW)
            .unwrap()
            .copy_to_host::<f32>()
            .unwrap()
            .iter()
            .all(|&y| y == 0.0)
    );
    assert!(dropout(&local, &Window::whole(local.dims()), 1.5, DRAW).is_err());
    assert!(dropout(&local, &Window::whole(local.dims()), f64::NAN, DRAW).is_err());
    let nan = Array::from_vec(vec![f32::NAN; 4], &[4]).unwrap();
    assert!(
        dropout(&nan, &Window::whole(nan.dims()), 0.5, DRAW)
            .unwrap()
            .copy_to_host::<f32>()
            .unwrap()
            .iter()
            .all(|y| y.is_nan())
    );
    // In a view, the index of an element is its index in the view.
    let view = Array::from_vec(vec![1f64; 6], &[3, 2]).unwrap().transpose(0, 1).unwrap();
    let y = dropout(&view, &Window::whole(view.dims()), 0.5, DRAW).unwrap().copy_to_host::<f64>().unwrap();
    let mask = keep_mask(&[2, 3], 0.5, DRAW).unwrap().copy_to_host::<u8>().unwrap();
    assert_eq!(y, mask.iter().map(|&m| 2.0 * f64::from(m)).collect::<Vec<_>>());
}

#[test]
fn bernoulli_numbers() {
    for dtype in DType::ALL {
        assert_eq!(bernoulli(dtype, &Window::whole(&[3, 0]), 0, 0, 0.5).unwrap().dtype(), dtype);
    }
    let ones =
        bernoulli(DType::U8, &Window::whole(&[20_000]), 0, 9, 0.3).unwrap().copy_to_host::<u8>().unwrap();
    assert!(ones.iter().all(|&x| x <= 1));
    expect_count(ones.iter().filter(|&&x| x == 1).count(), 20_000, 0.3, "ones");
    assert!(
        bernoulli(DType::F32, &Window::whole(&[9]), 0, 0, 1.0)
            .unwrap()
            .copy_to_host::<f32>()
            .unwrap()
            .iter()
            .all(|&x| x == 1.0)
    );
}

#[test]
fn probabilities_are_exact_to_32_bits() {
    // A probability of 1e-8 is 42.9 of the 2³² words, and 1 − 1e-8 is all but as many.
    for (p, words) in [(0.0, 0u64), (1e-8, 43), (1e-7, 429), (0.25, 1 << 30), (1.0 - 1e-8, (1 << 32) - 43)] {
        for word in [0, 42, 43, 428, 429, (1 << 30) - 1, 1 << 30, u32::MAX - 43, u32::MAX - 42, u32::MAX] {
            assert_eq!(threshold(p).contains(word), u64::from(word) < words, "{p} {word}");
        }
    }
    assert!(threshold(1.0).contains(0) && threshold(1.0).contains(u32::MAX));
    // For multiples of 2⁻²⁴ only the upper bits matter.
    for upper in [0u32, 1, 77, 1 << 23, (1 << 24) - 1] {
        let threshold = threshold(f64::from(upper) / f64::from(1 << 24));
        for word in [0, 255, 256, (77 << 8) - 1, 77 << 8, 1 << 31, u32::MAX - 256, u32::MAX - 255] {
            assert_eq!(threshold.contains(word), word >> 8 < upper, "{upper} {word}");
        }
    }
}

#[test]
fn bernoulli_takes_a_probability_per_element() {
    // Equal probabilities give the same bits as a draw with that probability.
    for p in [0.0, 1e-9, 0.25, 0.3, 0.999, 1.0] {
        for dtype in FLOATS {
            let each = local(dtype, &[p; 999], &[999]);
            let rounded = super::super::testing::values(&each)[0];
            let whole = Window::whole(&[999]);
            let got = bernoulli_each(&each, &whole, Draw { seed: 2, stream: 3 }).unwrap();
            assert_eq!(bits(&got), bits(&bernoulli(dtype, &whole, 2, 3, rounded).unwrap()), "{dtype} {p}");
        }
    }
    for p in [-0.1, 1.1, f64::NAN] {
        let p = local(DType::F32, &[0.5, p], &[2]);
        assert!(bernoulli_each(&p, &Window::whole(&[2]), Draw::default()).is_err());
    }
}

#[test]
fn random_integers_support_every_dtype() {
    let full = Window::whole(&[500]);
    let wide = integers(&full, 7, 8, 3, 200).unwrap().copy_to_host::<i64>().unwrap();
    for dtype in DType::ALL {
        let got = checked(Distribution::Integers { low: 3, high: 200 }, dtype, &full, 7, 8).unwrap();
        let wide: Vec<f64> = wide.iter().map(|&x| x as f64).collect();
        assert_eq!(super::super::testing::values(&got), wide);
    }
    for (dtype, low, high, fits) in [
        (DType::U8, 0, 256, true),
        (DType::U8, 0, 257, false),
        (DType::U8, -1, 2, false),
        (DType::BF16, -256, 257, true),
        (DType::BF16, 0, 258, false),
        (DType::F16, -2048, 2049, true),
        (DType::F16, -2049, 0, false),
        (DType::F32, 0, (1 << 24) + 1, true),
        (DType::F32, 0, (1 << 24) + 2, false),
        (DType::F64, i64::MIN, 0, false),
        (DType::I64, i64::MIN, i64::MAX, true),
    ] {
        let distribution = Distribution::Integers { low, high };
        assert_eq!(distribution.check("test", dtype).is_ok(), fits, "{dtype} {low} {high}");
    }
}

#[test]
fn bounds_must_contain_a_value_of_the_dtype() {
    // Bounds outside the range of the dtype.
    assert!(uniform(DType::F16, &Window::whole(&[1]), 0, 0, -1e5, 0.0).is_err());
    assert!(uniform(DType::F32, &Window::whole(&[1]), 0, 0, -3e38, 3e38).is_err());
    assert!(uniform(DType::F16, &Window::whole(&[9]), 0, 0, -65504.0, 65504.0).is_ok());
    // Bounds between two values of the dtype, or beyond the last one.
    assert!(uniform(DType::BF16, &Window::whole(&[1]), 0, 0, 1.0001, 1.0002).is_err());
    assert!(uniform(DType::F16, &Window::whole(&[1]), 0, 0, 65510.0, 65515.0).is_err());
    assert!(uniform(DType::F64, &Window::whole(&[1]), 0, 0, 1.0001, 1.0002).is_ok());
    // Equal bounds give the nearest value.
    let same = uniform(DType::BF16, &Window::whole(&[2]), 0, 0, 1.0001, 1.0001).unwrap();
    assert_eq!(super::super::testing::values(&same), [1.0, 1.0]);
    assert_eq!(bounds::<f16>(1e5, f64::INFINITY), None);
    assert_eq!(bounds::<f16>(f64::NEG_INFINITY, -1e5), None);
    assert_eq!(bounds::<f16>(f64::NEG_INFINITY, f64::INFINITY), Some((-65504.0, 65504.0)));
    assert_eq!(bounds::<f16>(-1e5, 1.0), Some((-65504.0, 1.0)));
    assert_eq!(neighbour::<f16>(f64::INFINITY, false), 65504.0);
    assert_eq!(neighbour::<f32>(f64::NEG_INFINITY, true), -f64::from(f32::MAX));
    assert_eq!(neighbour::<f64>(f64::INFINITY, false), f64::MAX);
}

#[test]
fn truncated_normal_numbers() {
    let between = |dtype, mean, std, low: f64, high: f64| {
        let x =
            checked(Distribution::Truncated { mean, std, low, high }, dtype, &Window::whole(&[40_000]), 3, 4);
        let x = super::super::testing::values(&x.unwrap());
        assert!(x.iter().all(|&x| low <= x && x <= high), "{dtype} {mean} {std} {low} {high}");
        x
    };
    let inf = f64::INFINITY;
    for dtype in FLOATS {
        for (mean, std, low, high) in [
            (0.0, 1.0, -2.0, 2.0),
            (0.0, 0.02, -0.04, 0.04),
            (0.0, 1.0, 3.0, 4.0),
            (0.0, 1.0, -4.0, -3.0),
            (1.0, 0.5, -inf, 1.25),
            (0.0, 1.0, 10.0, inf),
            (0.0, 1.0, -1e300, 1e300),
            (0.0, 1.0, 0.1, 0.11),
        ] {
            let x = between(dtype, mean, std, low, high);
            // The CDF of the truncated distribution must be ½ at the median.
            let q = |x: f64| 0.5 * libm::erfc((x - mean) / std / 2f64.sqrt());
            let middle = {
                let mut x = x.clone();
                x.sort_by(f64::total_cmp);
                x[x.len() / 2]
            };
            let share = (q(low) - q(middle)) / (q(low) - q(high));
            // The standard deviation of the median of n uniform numbers is 1 / 2√n. Steps of the dtype add to the limit.
            let step = rounding(dtype) * 2.0 * middle.abs();
            let coarse = (q(middle - step) - q(middle + step)) / (q(low) - q(high));
            let limit = SIGMAS / (2.0 * 40_000f64.sqrt()) + coarse;
            assert!((share - 0.5).abs() < limit, "{dtype} {mean} {std} {low} {high}: {share}");
        }
        // If only one number is possible, it is the one nearest to the mean.
        assert_eq!(between(dtype, 0.0, 1.0, 0.5, 0.5), vec![0.5; 40_000]);
        assert_eq!(between(dtype, 0.0, 0.0, -1.0, 1.0), vec![0.0; 40_000]);
        assert_eq!(between(dtype, 0.0, 0.0, 1.0, 2.0), vec![1.0; 40_000]);
        // So far out, the mean of z is 1 / (Mills' ratio) = 50 + 1 / (50 + 2 / (50 + …)), and its standard deviation is less
        // than 1 / 50.
        let (mean, spread, moved) = (50.0 + 1.0 / 50.04, 1.0 / 50.0, 51.0 * rounding(dtype));
        for sign in [1.0, -1.0] {
            let x = between(
                dtype,
                0.0,
                1.0,
                (sign * 50.0f64).min(sign * 60.0),
                (sign * 50.0f64).max(sign * 60.0),
            );
            expect_mean(x.iter().map(|x| x * sign), mean, spread * spread, moved + 1e-6, "far out");
        }
        // If the bounds are close compared to the standard deviation, the distribution is uniform.
        for std in [1e6, 1e16, 1e300] {
            let x = between(dtype, 0.0, std, 0.0, 1.0);
            expect_mean(x.iter().copied(), 0.5, 1.0 / 12.0, rounding(dtype), "narrow");
            let squares = x.iter().map(|x| (x - 0.5).powi(2));
            expect_mean(squares, 1.0 / 12.0, 1.0 / 180.0, rounding(dtype), "narrow");
        }
        // If the distance from the mean overflows, the result is the bound.
        assert_eq!(between(dtype, 0.0, 1e-310, 1.0, 2.0), vec![1.0; 40_000]);
    }
    // In double precision all numbers are distinct.
    let x = between(DType::F64, 0.0, 1e9, 0.0, 1.0);
    let distinct: std::collections::HashSet<u64> = x.iter().map(|x| x.to_bits()).collect();
    assert_eq!(distinct.len(), x.len());
    // Half precision has no value between some bounds.
    let narrow = Distribution::Truncated { mean: 0.0, std: 1.0, low: 1.0001, high: 1.0002 };
    assert!(narrow.check("test", DType::BF16).is_err() && narrow.check("test", DType::F32).is_ok());
    let far = Distribution::Truncated { mean: 0.0, std: 1.0, low: 1e5, high: 1e6 };
    assert!(far.check("test", DType::F16).is_err());
    for (mean, std, low, high) in
        [(0.0, -1.0, 0.0, 1.0), (0.0, 1.0, 1.0, 0.0), (f64::NAN, 1.0, 0.0, 1.0), (0.0, 1.0, f64::NAN, 1.0)]
    {
        assert!(Distribution::Truncated { mean, std, low, high }.check("test", DType::F32).is_err());
    }
}
