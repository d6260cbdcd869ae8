//! The number of threads that one matrix product may use, per calling thread.
//!
//! Ranks that are threads set 1, so that they do not compete for the cores; a program with one rank uses all of them.

crate::mode! {
    /// 0 until somebody asks: the number of cores takes a system call.
    static THREADS: Cell<usize> = 0;
}

/// Returns the number of threads that matrix products called from this thread may use.
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

/// Runs `body` with [`num_threads`] set, and restores it.
#[inline]
pub fn with_num_threads<R>(threads: usize, body: impl FnOnce() -> R) -> R {
    THREADS.within(threads.max(1), body)
}
