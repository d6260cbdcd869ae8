//! How many threads one matrix product may use, per calling thread.
//!
//! Ranks that are threads set 1, so that they do not fight over the cores; a program with one rank keeps them all.

use std::cell::Cell;

use crate::scope::within;

thread_local! {
    static THREADS: Cell<usize> = const { Cell::new(0) };
}

/// The number of threads that matrix products called from this thread may use.
pub fn num_threads() -> usize {
    THREADS.with(|threads| {
        if threads.get() == 0 {
            threads.set(std::thread::available_parallelism().map_or(1, |n| n.get()));
        }
        threads.get()
    })
}

/// Sets [`num_threads`] for this thread; 0 counts as 1.
///
/// ```
/// dtensor::set_num_threads(1);
/// assert_eq!(dtensor::num_threads(), 1);
/// ```
pub fn set_num_threads(threads: usize) {
    THREADS.with(|cell| cell.set(threads.max(1)));
}

/// Runs `body` with [`num_threads`] set, and restores it.
pub fn with_num_threads<R>(threads: usize, body: impl FnOnce() -> R) -> R {
    within(&THREADS, threads.max(1), body)
}
