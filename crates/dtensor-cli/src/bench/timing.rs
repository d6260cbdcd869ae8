//! Timing one body of code.

use std::time::Instant;

/// The middle of some numbers.
pub(crate) fn median(mut xs: Vec<f64>) -> f64 {
    xs.sort_by(f64::total_cmp);
    xs[xs.len() / 2]
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
