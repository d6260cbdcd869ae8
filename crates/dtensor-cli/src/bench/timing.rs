//! Timing one body of code.

use std::time::Instant;

/// The middle of some numbers, halfway between the two in the middle if there are two.
pub(crate) fn median(mut xs: Vec<f64>) -> f64 {
    xs.sort_by(f64::total_cmp);
    let middle = xs.len() / 2;
    if xs.len().is_multiple_of(2) { (xs[middle - 1] + xs[middle]) / 2.0 } else { xs[middle] }
}

/// The median time, in seconds, of one of `inner` calls of `body`, over `samples` runs of them.
pub(crate) fn seconds<E>(
    samples: usize,
    inner: usize,
    mut body: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    let mut times = Vec::with_capacity(samples);
    for _ in 0..samples {
        let began = Instant::now();
        for _ in 0..inner {
            body()?;
        }
        times.push(began.elapsed().as_secs_f64() / inner as f64);
    }
    Ok(median(times))
}

/// How much faster than the peer, over some cases.
pub(crate) fn faster(speedups: &[f64]) -> String {
    let smallest = speedups.iter().copied().fold(f64::INFINITY, f64::min);
    let mean = (speedups.iter().map(|x| x.ln()).sum::<f64>() / speedups.len() as f64).exp();
    format!("at least {smallest:.1} times as fast as the peer, geometric mean {mean:.1}")
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![7.0]), 7.0);
        assert_eq!(median(vec![9.0, 1.0]), 5.0);
        assert_eq!(median(vec![3.0, 100.0, 1.0]), 3.0);
        assert_eq!(median(vec![4.0, 100.0, 1.0, 2.0]), 3.0);
    }
}
