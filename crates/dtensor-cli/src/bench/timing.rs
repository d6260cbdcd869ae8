//! Timing of a closure, and statistics.

use std::time::Instant;

/// Returns the median; of an even number of values, the mean of the two in the middle.
pub(crate) fn median(mut xs: Vec<f64>) -> f64 {
    xs.sort_by(f64::total_cmp);
    let middle = xs.len() / 2;
    if xs.len().is_multiple_of(2) { (xs[middle - 1] + xs[middle]) / 2.0 } else { xs[middle] }
}

/// Returns the time of one call of `body` in seconds: the median of `samples` timings of `inner` calls each. A timing ends with `finish`,
/// which waits for a GPU.
pub(crate) fn seconds<E>(
    samples: usize,
    inner: usize,
    mut body: impl FnMut() -> Result<(), E>,
    finish: impl Fn() -> Result<(), E>,
) -> Result<f64, E> {
    let mut times = Vec::with_capacity(samples);
    for _ in 0..samples {
        let start = Instant::now();
        for _ in 0..inner {
            body()?;
        }
        finish()?;
        times.push(start.elapsed().as_secs_f64() / inner as f64);
    }
    Ok(median(times))
}

/// Describes how much faster than the peer we are: the smallest speedup and the geometric mean.
pub(crate) fn describe_speedups(speedups: &[f64]) -> String {
    let smallest = speedups.iter().copied().fold(f64::INFINITY, f64::min);
    let mean = (speedups.iter().map(|x| x.ln()).sum::<f64>() / speedups.len() as f64).exp();
    format!("at least {smallest:.1} times as fast as the peer, geometric mean {mean:.1}")
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle_value() {
        assert_eq!(median(vec![7.0]), 7.0);
        assert_eq!(median(vec![9.0, 1.0]), 5.0);
        assert_eq!(median(vec![3.0, 100.0, 1.0]), 3.0);
        assert_eq!(median(vec![4.0, 100.0, 1.0, 2.0]), 3.0);
    }
}
