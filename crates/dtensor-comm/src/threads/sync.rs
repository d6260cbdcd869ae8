//! The synchronization primitives of the rendezvous. `tests/schedules.rs` compiles the rendezvous with the primitives of a
//! schedule checker instead.

pub(crate) use std::sync::Arc;
use std::sync::LazyLock;
pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

/// Waits for a notification or the deadline. Returns true if the deadline has passed.
pub(crate) fn wait_until<T>(wakeup: &Condvar, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
    wakeup.wait_until(guard, deadline).timed_out()
}

/// Spins, then yields, before a rank goes to sleep.
#[derive(Debug)]
pub(crate) struct Backoff {
    spins: u32,
    yields: u32,
}

impl Backoff {
    /// Creates a backoff for a group of `ranks` threads. Spinning helps only if the other ranks can run meanwhile, so it spins
    /// only if there are enough cores.
    pub(crate) fn new(ranks: usize) -> Self {
        // Cached: querying the number of cores takes longer than a small collective.
        static CORES: LazyLock<usize> =
            LazyLock::new(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        Backoff { spins: if ranks <= *CORES { 2000 } else { 0 }, yields: 40 }
    }

    /// Spins or yields once. Returns false if it is time to sleep.
    pub(crate) fn pause(&mut self) -> bool {
        if self.spins > 0 {
            self.spins -= 1;
            // Yield now and then, because the system may have scheduled the awaited rank on this core.
            if self.spins.is_multiple_of(128) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            true
        } else if self.yields > 0 {
            self.yields -= 1;
            std::thread::yield_now();
            true
        } else {
            false
        }
    }
}
