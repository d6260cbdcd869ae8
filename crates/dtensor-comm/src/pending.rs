//! [`Pending`]: a collective that has begun.

use std::fmt;

use crate::transport::InFlight;
use crate::{Arrays, Result};

/// A collective that has begun. [`wait`](Pending::wait) returns its result.
///
/// Dropping it loses the result but does not block the other ranks. On threads they finish the collective without this rank.
/// Over MPI this rank does its share when it next communicates or leaves the world.
///
/// ```
/// use dtensor_comm::{ReduceOp, launch};
/// use dtensor_array::Array;
/// # fn main() -> dtensor_comm::Result<()> {
/// launch(2, |world| {
///     let x = Array::from_vec(vec![1f32; 4], &[4])?;
///     let sum = world.group().all_reduce_async(&x, ReduceOp::Sum)?;
///     // Other work can run here while the collective is in progress.
///     assert_eq!(sum.wait()?.copy_to_host::<f32>()?, [2.; 4]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[must_use = "call `wait` to get the result"]
pub struct Pending<T> {
    flight: Box<dyn InFlight>,
    finish: Box<dyn FnOnce(Arrays) -> Result<T> + Send>,
}

impl<T> Pending<T> {
    pub(crate) fn new(
        flight: Box<dyn InFlight>,
        finish: impl FnOnce(Arrays) -> Result<T> + Send + 'static,
    ) -> Self {
        Pending { flight, finish: Box::new(finish) }
    }

    /// Returns true if [`wait`](Pending::wait) would return at once.
    pub fn is_ready(&mut self) -> bool {
        self.flight.poll()
    }

    /// Waits for the collective and returns its result. Returns an error if it could not finish (see [`Fault`](crate::Fault)).
    pub fn wait(self) -> Result<T> {
        (self.finish)(self.flight.wait()?)
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:?})", self.flight)
    }
}
