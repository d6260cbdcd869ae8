//! The primitives that the meeting of ranks is built on. A test compiles the same meeting with the primitives of a
//! checker of schedules in their place.

pub(crate) use std::sync::Arc;
use std::sync::LazyLock;
pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

/// Waits to be woken, or for the deadline. True if the deadline has passed.
pub(crate) fn wait_until<T>(bell: &Condvar, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
    bell.wait_until(guard, deadline).timed_out()
}

/// How a rank waits before it sleeps.
#[derive(Debug)]
pub(crate) struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// For a group of `ranks` on this machine. Spinning helps only if the one waited for can run meanwhile.
    pub(crate) fn new(ranks: usize) -> Self {
        // Asking the system takes longer than a small collective.
        static CORES: LazyLock<usize> =
            LazyLock::new(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        Patience { spins: if ranks <= *CORES { 2000 } else { 0 }, yields: 40 }
    }

    /// Waits a moment. False if it is time to sleep.
    pub(crate) fn pause(&mut self) -> bool {
        if self.spins > 0 {
            self.spins -= 1;
            // The one waited for may be meant to run on this core.
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
