//! The number of threads that a matrix product may use. Each calling thread has its own setting.
//!
//! Ranks that run as threads set it to 1, so that they do not compete for the cores. A program with one rank uses all cores.

crate::mode! {
    /// 0 until the first query, because finding the number of cores takes a system call.
    static THREADS: Cell<usize> = 0;
}

/// Returns the number of threads that matrix products may use when called from this thread. The default is the number of cores.
#[inline]
pub fn num_threads() -> usize {
    if THREADS.get() == 0 {
        THREADS.set(std::thread::available_parallelism().map_or(1, |n| n.get()));
    }
    THREADS.get()
}

/// Sets [`num_threads`] for this thread; 0 counts as 1.
///
/// ```
/// dtensor_array::set_num_threads(1);
/// assert_eq!(dtensor_array::num_threads(), 1);
/// ```
#[inline]
pub fn set_num_threads(threads: usize) {
    THREADS.set(threads.max(1));
}

/// Runs `body` with [`num_threads`] set, then restores the previous value.
#[inline]
pub fn with_num_threads<R>(threads: usize, body: impl FnOnce() -> R) -> R {
    THREADS.within(threads.max(1), body)
}
