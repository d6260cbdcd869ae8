//! Tests of randomness, with the limits that they have.
//!
//! Seeds are fixed, so a test passes always or never. All limits are those of five standard deviations: what is random
//! passes a test with a probability of all but one in a million.

/// How many standard deviations off is too far.
pub(crate) const SIGMAS: f64 = 5.0;

/// That numbers, which should be uniform on [0, 1], fill `bins` equal parts evenly (Pearson's test): neither too
/// unevenly nor too evenly.
#[track_caller]
pub(crate) fn expect_even(numbers: &[f64], bins: usize, what: &str) {
    let mut counts = vec![0usize; bins];
    for &u in numbers {
        assert!((0.0..=1.0).contains(&u), "{what}: {u}");
        counts[((u * bins as f64) as usize).min(bins - 1)] += 1;
    }
    expect_counts(&counts, &vec![1.0 / bins as f64; bins], what);
}

/// That things which happen with these probabilities have happened so often.
#[track_caller]
pub(crate) fn expect_counts(counts: &[usize], probabilities: &[f64], what: &str) {
    let n: usize = counts.iter().sum();
    let square = |(&count, &p): (&usize, &f64)| {
        let expected = n as f64 * p;
        assert!(expected >= 20.0, "{what}: too few numbers for the test");
        (count as f64 - expected).powi(2) / expected
    };
    let statistic: f64 = counts.iter().zip(probabilities).map(square).sum();
    // The cube root of a chi-square number over its degrees of freedom is nearly normal (Wilson and Hilferty).
    let freedom = (counts.len() - 1) as f64;
    let spread = 2.0 / (9.0 * freedom);
    let z = ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt();
    assert!(z.abs() < SIGMAS, "{what}: chi-square {statistic} of {freedom} is {z} standard deviations off");
}

/// That numbers, which should be uniform on [0, 1], are nowhere further from it than chance takes them (Kolmogorov's
/// test).
#[track_caller]
pub(crate) fn expect_uniform(numbers: &[f64], what: &str) {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len() as f64;
    let off = |(i, &u): (usize, &f64)| (u - i as f64 / n).abs().max((u - (i + 1) as f64 / n).abs());
    let statistic = sorted.iter().enumerate().map(off).fold(0.0, f64::max) * n.sqrt();
    // It is more than x with probability 2·exp(−2x²): 6e-7 for this x, as five standard deviations are.
    assert!(statistic < 2.75, "{what}: off by {statistic} / √n");
}

/// That numbers have this mean, variance and fourth central moment, of which the spread of the former follows.
#[track_caller]
pub(crate) fn expect_moments(numbers: &[f64], mean: f64, variance: f64, fourth: f64, what: &str) {
    let n = numbers.len() as f64;
    let got = numbers.iter().sum::<f64>() / n;
    let off = (got - mean).abs() / (variance / n).sqrt();
    assert!(off < SIGMAS, "{what}: mean {got}, {off} standard deviations from {mean}");
    let got = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let off = (got - variance).abs() / ((fourth - variance * variance) / n).sqrt();
    assert!(off < SIGMAS, "{what}: variance {got}, {off} standard deviations from {variance}");
}

/// That two lists of numbers, each uniform on [0, 1), know nothing of each other: by correlation, and by what falls
/// where in the square.
#[track_caller]
pub(crate) fn expect_independent(a: &[f64], b: &[f64], what: &str) {
    const SIDE: usize = 16;
    let n = a.len().min(b.len());
    // A product of two centred uniform numbers has the variance 1/144.
    let product: f64 = a.iter().zip(b).map(|(a, b)| (a - 0.5) * (b - 0.5)).sum();
    let off = 12.0 * product / (n as f64).sqrt();
    assert!(off.abs() < SIGMAS, "{what}: correlation {off} standard deviations from none");
    let cell = |u: f64| ((u * SIDE as f64) as usize).min(SIDE - 1);
    let mut counts = vec![0usize; SIDE * SIDE];
    a.iter().zip(b).for_each(|(&a, &b)| counts[cell(a) * SIDE + cell(b)] += 1);
    expect_counts(&counts, &[1.0 / (SIDE * SIDE) as f64; SIDE * SIDE], what);
}

/// How likely a standard normal number is to be less than `z`.
pub(crate) fn normal_cdf(z: f64) -> f64 {
    0.5 * libm::erfc(-z * std::f64::consts::FRAC_1_SQRT_2)
}
