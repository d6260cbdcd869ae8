//! Random numbers have the distribution that their function names.

use dtensor::{DType, Generator, Result, Tensor, manual_seed};

use super::statistics::{
    SIGMAS, expect_counts, expect_even, expect_independent, expect_moments, expect_uniform, normal_cdf,
};

const N: usize = 200_000;
const WIDE: [DType; 2] = [DType::F32, DType::F64];

/// Asserts that numbers have this distribution function and these moments, and that neighbours are independent.
fn check(numbers: &[f64], cdf: impl Fn(f64) -> f64, [mean, variance, fourth]: [f64; 3], what: &str) {
    let uniform: Vec<f64> = numbers.iter().map(|&x| cdf(x)).collect();
    expect_even(&uniform, 256, what);
    expect_uniform(&uniform, what);
    expect_moments(numbers, mean, variance, fourth, what);
    // Neighbours must be independent, within one block of the generator and across two.
    for lag in [1, 2, 3, 4] {
        let ahead: Vec<f64> = uniform[lag..].iter().step_by(lag + 1).copied().collect();
        let behind: Vec<f64> = uniform.iter().step_by(lag + 1).copied().collect();
        expect_independent(&behind, &ahead, &format!("{what}, {lag} apart"));
    }
}

#[test]
fn rand_and_uniform_are_uniform() -> Result<()> {
    manual_seed(1);
    for dtype in WIDE {
        let x = Tensor::rand([N], dtype)?.to_f64_vec()?;
        assert!(x.iter().all(|x| (0.0..1.0).contains(x)));
        check(&x, |x| x, [0.5, 1.0 / 12.0, 1.0 / 80.0], &format!("rand {dtype}"));
        let (low, high): (f64, f64) = (-2.0, 0.5);
        let x = Tensor::uniform(low, high, [N], dtype)?.to_f64_vec()?;
        assert!(x.iter().all(|&x| low <= x && x < high));
        let width = high - low;
        let moments = [(low + high) / 2.0, width.powi(2) / 12.0, width.powi(4) / 80.0];
        check(&x, |x| (x - low) / width, moments, &format!("uniform {dtype}"));
    }
    Ok(())
}

#[test]
fn randn_and_normal_are_normal() -> Result<()> {
    manual_seed(2);
    for dtype in WIDE {
        let x = Tensor::randn([N], dtype)?.to_f64_vec()?;
        check(&x, normal_cdf, [0.0, 1.0, 3.0], &format!("randn {dtype}"));
        let x = Tensor::normal(3.0, 0.5, [N], dtype)?.to_f64_vec()?;
        let moments = [3.0, 0.25, 3.0 * 0.5f64.powi(4)];
        check(&x, |x| normal_cdf((x - 3.0) / 0.5), moments, &format!("normal {dtype}"));
    }
    // The tails must not be missing: about 0.27 % of the numbers are beyond three standard deviations.
    let x = Tensor::randn([1_000_000], DType::F32)?.to_f64_vec()?;
    let beyond = x.iter().filter(|x| x.abs() > 3.0).count();
    let p = 2.0 * normal_cdf(-3.0);
    let spread = (1e6 * p * (1.0 - p)).sqrt();
    assert!((beyond as f64 - 1e6 * p).abs() < SIGMAS * spread, "{beyond} beyond three standard deviations");
    Ok(())
}

/// Mean, variance and fourth central moment of a truncated normal distribution, by Simpson's rule.
fn truncated_moments(mean: f64, std: f64, a: f64, b: f64) -> [f64; 3] {
    const STEPS: usize = 20_000;
    let density = |x: f64| (-0.5 * ((x - mean) / std).powi(2)).exp();
    let integral = |f: &dyn Fn(f64) -> f64| {
        let h = (b - a) / STEPS as f64;
        let weight = |i: usize| if i == 0 || i == STEPS { 1.0 } else { 2.0 + 2.0 * (i % 2) as f64 };
        (0..=STEPS).map(|i| weight(i) * f(a + h * i as f64)).sum::<f64>() * h / 3.0
    };
    let whole = integral(&density);
    let centre = integral(&|x| x * density(x)) / whole;
    let moment = |k| integral(&|x| (x - centre).powi(k) * density(x)) / whole;
    [centre, moment(2), moment(4)]
}

#[test]
fn trunc_normal_has_a_truncated_normal_distribution() -> Result<()> {
    manual_seed(3);
    for dtype in WIDE {
        for (mean, std, a, b) in [
            (0.0, 1.0, -2.0, 2.0),
            (0.0, 0.02, -0.04, 0.04),
            (1.0, 2.0, -3.0, 0.5),
            // Bounds far out in either tail.
            (0.0, 1.0, 5.0, 7.0),
            (0.0, 1.0, -7.0, -5.0),
            (0.0, 1.0, 0.0, 6.0),
        ] {
            let x = Tensor::trunc_normal(mean, std, a, b, [N], dtype)?.to_f64_vec()?;
            assert!(x.iter().all(|&x| a <= x && x <= b));
            // Bounds above the mean use the upper tail, which loses no precision there.
            let above = |x: f64| normal_cdf((mean - x) / std);
            let below = |x: f64| normal_cdf((x - mean) / std);
            let cdf = |x: f64| {
                let share = if a > mean {
                    (above(a) - above(x)) / (above(a) - above(b))
                } else {
                    (below(x) - below(a)) / (below(b) - below(a))
                };
                share.clamp(0.0, 1.0)
            };
            let what = format!("trunc_normal({mean}, {std}, {a}, {b}) {dtype}");
            check(&x, cdf, truncated_moments(mean, std, a, b), &what);
        }
    }
    Ok(())
}

/// The distribution function of a truncated normal distribution, summed from the bound nearer to the mean. The density
/// itself may underflow, so it is computed relative to the density at that bound.
fn summed_cdf(mean: f64, std: f64, near: f64, far: f64) -> impl Fn(f64) -> f64 {
    const STEPS: usize = 200_000;
    let h = (far - near) / STEPS as f64;
    let density = move |x: f64| {
        let (z, way) = ((near - mean) / std, (x - near) / std);
        (-way * (z + 0.5 * way)).exp()
    };
    let mut sums = vec![0.0];
    for i in 0..STEPS {
        let x = near + h * i as f64;
        let step = (density(x) + 4.0 * density(x + 0.5 * h) + density(x + h)) / 6.0;
        sums.push(sums[i] + step);
    }
    move |x| {
        let at = (x - near) / h;
        let i = (at as usize).min(STEPS - 1);
        (sums[i] + (sums[i + 1] - sums[i]) * (at - i as f64)) / sums[STEPS]
    }
}

/// The bounds are so close together, or so far out, that the probabilities of different numbers hardly differ.
#[test]
fn trunc_normal_is_right_between_close_and_far_bounds() -> Result<()> {
    manual_seed(13);
    for dtype in WIDE {
        for (mean, std, a, b) in [
            (0.0, 1e16, 0.0, 1.0),
            (0.0, 1e14, 0.0, 1.0),
            (0.25, 1e9, 0.0, 1.0),
            (3.0, 1e5, -0.5, 1.0),
            (0.0, 1.0, 50.0, 60.0),
            (0.0, 1.0, -60.0, -50.0),
            (1.0, 0.5, 40.0, 40.01),
            (0.0, 1e-3, 1.0, 1.000001),
            (0.0, 1.0, 11.0, 11.3),
        ] {
            let x = Tensor::trunc_normal(mean, std, a, b, [N], dtype)?.to_f64_vec()?;
            assert!(x.iter().all(|&x| a <= x && x <= b));
            let upper = a + b > 2.0 * mean;
            let cdf = if upper { summed_cdf(mean, std, a, b) } else { summed_cdf(mean, std, b, a) };
            let uniform: Vec<f64> = x.iter().map(|&x| cdf(x)).collect();
            let what = format!("trunc_normal({mean}, {std}, {a}, {b}) {dtype}");
            // Bins must be much wider than the steps between numbers of the dtype. With too few bins, nothing is
            // compared.
            let widest = uniform_steps(&x, &cdf, dtype);
            let bins = (0.02 / widest).clamp(1.0, 256.0) as usize;
            if bins >= 16 {
                expect_even(&uniform, bins, &what);
                expect_uniform(&uniform, &what);
            } else {
                assert_eq!(dtype, DType::F32, "{what}");
            }
        }
    }
    Ok(())
}

/// Returns the largest growth of the distribution function between neighbouring numbers of the dtype.
fn uniform_steps(x: &[f64], cdf: &impl Fn(f64) -> f64, dtype: DType) -> f64 {
    let epsilon = if dtype == DType::F32 { f64::from(f32::EPSILON) } else { f64::EPSILON };
    let (least, most) = x.iter().fold((f64::MAX, f64::MIN), |(least, most), &x| (least.min(x), most.max(x)));
    let step = epsilon * least.abs().max(most.abs());
    let growth = |x: f64| (cdf((x + step).min(most)) - cdf(x)).abs();
    growth(least).max(growth((most - step).max(least)))
}

#[test]
fn randint_is_uniform() -> Result<()> {
    manual_seed(4);
    for (low, high) in [(0, 2), (-3, 4), (0, 100), (-500, 500)] {
        let bins = (high - low) as usize;
        for dtype in [DType::I64, DType::F32] {
            let x = Tensor::randint_as(low, high, [N], dtype)?.to_f64_vec()?;
            let mut counts = vec![0; bins];
            x.iter().for_each(|&x| counts[(x as i64 - low) as usize] += 1);
            expect_counts(
                &counts,
                &vec![1.0 / bins as f64; bins],
                &format!("randint({low}, {high}) {dtype}"),
            );
        }
    }
    // Over the whole range of `i64`, the upper bits are uniform.
    let x = Tensor::randint(i64::MIN, i64::MAX, [N])?.to_vec::<i64>()?;
    let unit: Vec<f64> = x.iter().map(|&x| (x as f64 + 2f64.powi(63)) / 2f64.powi(64)).collect();
    expect_even(&unit, 256, "randint of everything");
    Ok(())
}

#[test]
fn bernoulli_and_dropout_follow_their_probability() -> Result<()> {
    manual_seed(5);
    for p in [0.001, 0.3, 0.5, 0.9] {
        let ones = Tensor::bernoulli(p, [N], DType::U8)?.to_f64_vec()?.iter().sum::<f64>() as usize;
        expect_counts(&[N - ones, ones], &[1.0 - p, p], &format!("bernoulli({p})"));
        let each =
            Tensor::full([N], p, DType::F64)?.bernoulli_each()?.to_f64_vec()?.iter().sum::<f64>() as usize;
        expect_counts(&[N - each, each], &[1.0 - p, p], &format!("bernoulli_each of {p}"));
        let x = Tensor::ones([N], DType::F32)?.dropout(p)?.ne(0.0)?.to_f64_vec()?;
        let kept = x.iter().sum::<f64>() as usize;
        expect_counts(&[N - kept, kept], &[p, 1.0 - p], &format!("dropout({p})"));
    }
    // Probabilities of 0 and 1 are exact.
    assert!(Tensor::bernoulli(0.0, [N], DType::U8)?.to_vec::<u8>()?.iter().all(|&x| x == 0));
    assert!(Tensor::bernoulli(1.0, [N], DType::U8)?.to_vec::<u8>()?.iter().all(|&x| x == 1));
    // Each element has its own probability: counts the ones among elements with similar probabilities.
    let p = Tensor::rand([N], DType::F32)?;
    let (p, x) = (p.to_f64_vec()?, p.bernoulli_each()?.to_f64_vec()?);
    for part in 0..10 {
        let inside: Vec<usize> = (0..N).filter(|&i| (p[i] * 10.0) as usize == part).collect();
        let ones: f64 = inside.iter().map(|&i| x[i]).sum();
        let expected: f64 = inside.iter().map(|&i| p[i]).sum();
        let spread = inside.iter().map(|&i| p[i] * (1.0 - p[i])).sum::<f64>().sqrt();
        assert!((ones - expected).abs() < SIGMAS * spread, "{ones} ones instead of {expected}");
    }
    Ok(())
}

/// The first known answer of Random123 for Philox 4×32-10, with key and counter 0. No tensor reaches the counters of
/// the other known answers.
#[test]
fn the_first_block_is_the_known_answer_of_philox() -> Result<()> {
    let words: [u32; 4] = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
    let x = Tensor::rand_with([4], DType::F32, &mut Generator::new(0))?.to_vec::<f32>()?;
    assert_eq!(x, words.map(|word| (word >> 8) as f32 / 16_777_216.0));
    let x = Tensor::rand_with([2], DType::F64, &mut Generator::new(0))?.to_vec::<f64>()?;
    let wide = |low: u32, high: u32| (u64::from(high) << 32 | u64::from(low)) >> 11;
    let expected = [wide(words[0], words[1]), wide(words[2], words[3])];
    assert_eq!(x, expected.map(|word| word as f64 / (1u64 << 53) as f64));
    Ok(())
}

#[test]
fn draws_seeds_and_forks_are_independent() -> Result<()> {
    let numbers = |mut generator: Generator| Tensor::rand_with([N], DType::F32, &mut generator)?.to_f64_vec();
    let after = |seed: u64, draws: u64| Generator::from_state(dtensor::GeneratorState { seed, draws });
    let parent = Generator::new(11);
    let generators = [
        ("the parent", parent.clone()),
        ("its second draw", after(11, 1)),
        ("its third draw", after(11, 2)),
        ("a draw far on", after(11, 1 << 40)),
        ("the next seed", Generator::new(12)),
        ("a seed that differs in the upper half", Generator::new(11 + (1 << 32))),
        ("fork 0", parent.fork(0)),
        ("fork 1", parent.fork(1)),
        ("fork 2", parent.fork(2)),
        ("a fork of a fork", parent.fork(0).fork(1)),
        ("a fork of the next seed", Generator::new(12).fork(0)),
    ];
    let numbers: Vec<(&str, Vec<f64>)> = generators
        .into_iter()
        .map(|(name, generator)| Ok((name, numbers(generator)?)))
        .collect::<Result<_>>()?;
    for (i, (name, x)) in numbers.iter().enumerate() {
        expect_even(x, 256, name);
        for (other, y) in &numbers[..i] {
            expect_independent(x, y, &format!("{name} and {other}"));
        }
    }
    Ok(())
}
