//! [`Pending`]: a collective that has begun.

use std::fmt;

use crate::transport::Flight;
use crate::{Arrays, Result};

/// A collective that has begun. It is over for this rank when it has been waited for.
///
/// Dropping it without waiting loses the result and holds nobody up: on threads the others do without this rank, over
/// MPI its part is done when it next communicates or leaves.
#[must_use = "the result is there after `wait`"]
pub struct Pending<T> {
    flight: Box<dyn Flight>,
    finish: Box<dyn FnOnce(Arrays) -> Result<T> + Send>,
}

impl<T> Pending<T> {
    pub(crate) fn new(
        flight: Box<dyn Flight>,
        finish: impl FnOnce(Arrays) -> Result<T> + Send + 'static,
    ) -> Self {
        Pending { flight, finish: Box::new(finish) }
    }

    /// What `further` makes of the result.
    pub(crate) fn and_then<U>(self, further: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        let Pending { flight, finish } = self;
        Pending::new(flight, move |values| further(finish(values)?))
    }

    /// Whether [`wait`](Pending::wait) would return at once.
    pub fn is_ready(&mut self) -> bool {
        self.flight.poll()
    }

    /// Waits for the result.
    pub fn wait(self) -> Result<T> {
        (self.finish)(self.flight.wait()?)
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:?})", self.flight)
    }
}
