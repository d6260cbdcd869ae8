//! Statistical tests of random numbers.
//!
//! Seeds are fixed, so a test always passes or always fails. All limits are five standard deviations: a good generator
//! fails a test with a probability of less than one in a million.

/// The largest deviation that passes, in standard deviations.
pub(crate) const SIGMAS: f64 = 5.0;

/// Asserts that numbers fill `bins` equal bins of [0, 1] as uniform numbers do (Pearson's test): neither too unevenly
/// nor too evenly.
#[track_caller]
pub(crate) fn expect_even(numbers: &[f64], bins: usize, what: &str) {
    let mut counts = vec![0usize; bins];
    for &u in numbers {
        assert!((0.0..=1.0).contains(&u), "{what}: {u}");
        counts[((u * bins as f64) as usize).min(bins - 1)] += 1;
    }
    expect_counts(&counts, &vec![1.0 / bins as f64; bins], what);
}

/// Asserts that these counts are plausible for these probabilities (chi-square test).
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

/// Asserts that numbers are uniform on [0, 1], up to chance (Kolmogorov's test).
#[track_caller]
pub(crate) fn expect_uniform(numbers: &[f64], what: &str) {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len() as f64;
    let off = |(i, &u): (usize, &f64)| (u - i as f64 / n).abs().max((u - (i + 1) as f64 / n).abs());
    let statistic = sorted.iter().enumerate().map(off).fold(0.0, f64::max) * n.sqrt();
    // The statistic exceeds x with probability 2·exp(−2x²): 6e-7 for this limit, the same as five standard deviations.
    assert!(statistic < 2.75, "{what}: off by {statistic} / √n");
}

/// Asserts that numbers have this mean and variance. The spread of their variance follows from the fourth central
/// moment.
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

/// Asserts that two lists of uniform numbers are independent: by their correlation, and by the counts of pairs in the
/// cells of a square.
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

/// The distribution function of the standard normal distribution.
pub(crate) fn normal_cdf(z: f64) -> f64 {
    0.5 * libm::erfc(-z * std::f64::consts::FRAC_1_SQRT_2)
}
