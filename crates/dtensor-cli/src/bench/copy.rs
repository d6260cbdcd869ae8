//! How fast this machine copies memory: what collectives among threads are held against.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use super::timing::median;

/// Bytes copied per timing at least: far longer than it takes to start together.
const ENOUGH: usize = 4 << 20;
const SAMPLES: usize = 15;

/// Bytes read and written per second when up to `threads` threads, but no more than can run at once, each copy `bytes` of
/// their own to another place of their own, again and again. The memory has been touched before.
pub(crate) fn bytes_per_second(threads: usize, bytes: usize) -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(threads));
    let inner = (ENOUGH / bytes).max(1);
    let together = Barrier::new(threads);
    let copy = || {
        let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
        // The first is not counted.
        let times = (0..=SAMPLES).map(|_| {
            together.wait();
            let began = Instant::now();
            for _ in 0..inner {
                to.copy_from_slice(black_box(&from));
                black_box(&mut to);
            }
            together.wait();
            began.elapsed().as_secs_f64() / inner as f64
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
