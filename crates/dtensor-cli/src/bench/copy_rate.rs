//! Measures how fast this machine copies memory: the bound for collectives between threads.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use super::timing::median;

/// The smallest number of bytes per timing, so that a copy takes far longer than the barrier before it.
const ENOUGH: usize = 4 << 20;
const SAMPLES: usize = 15;

/// Returns the bytes read and written per second by up to `threads` threads, limited to the number of cores. Each thread repeatedly
/// copies its own buffer of `bytes` bytes. The memory is touched before.
pub(crate) fn bytes_per_second(threads: usize, bytes: usize) -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(threads));
    let inner = (ENOUGH / bytes).max(1);
    let barrier = Barrier::new(threads);
    let copy = || {
        let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
        // The first timing is a warm-up and does not count.
        let times = (0..=SAMPLES).map(|_| {
            barrier.wait();
            let start = Instant::now();
            for _ in 0..inner {
                to.copy_from_slice(black_box(&from));
                black_box(&mut to);
            }
            barrier.wait();
            start.elapsed().as_secs_f64() / inner as f64
        });
        median(times.skip(1).collect())
    };
    let seconds = std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(copy);
        }
        copy()
    });
    (2 * threads * bytes) as f64 / seconds
}
