//! A collective over MPI as a chain of steps: things the library is doing, and what to do when they are done.

use std::sync::Arc;

use super::raw::Request;
use super::seat::Seat;
use crate::Arrays;
use crate::fault::Cause;
use crate::{Error, Result};

/// Why a step could not be made.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The group has failed.
    Cause(Arc<Cause>),
    /// This rank has.
    Error(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Trouble::Error(error)
    }
}

/// What follows a step.
#[derive(Debug)]
pub(super) enum Next {
    Step(Step),
    Done(Arrays),
}

pub(super) type Stepped = std::result::Result<Next, Trouble>;

type Then = Box<dyn FnOnce(&Arc<Seat>) -> Stepped + Send>;

/// Requests, and what to do when they are done. What follows owns the memory that the library was given, so a step that is
/// given up before its requests are done lets that memory leak: the library may still use it.
pub(super) struct Step {
    requests: Vec<Request>,
    then: Option<Then>,
}

impl Step {
    /// Posts requests on memory that `kept` owns. What follows gets it back. If one of them cannot be posted, what the
    /// others use leaks.
    pub(super) fn post<K: Send + 'static>(
        mut kept: K,
        post: impl FnOnce(&mut K, &mut Vec<Request>) -> Result<()>,
        then: impl FnOnce(&Arc<Seat>, K) -> Stepped + Send + 'static,
    ) -> Result<Step> {
        let mut requests = Vec::new();
        match post(&mut kept, &mut requests) {
            Ok(()) => Ok(Step { requests, then: Some(Box::new(move |seat| then(seat, kept))) }),
            Err(error) => {
                if !requests.is_empty() {
                    std::mem::forget(kept);
                }
                Err(error)
            }
        }
    }

    /// Whether all requests are done, and whether this call found one that is.
    pub(super) fn test(&mut self) -> Result<(bool, bool)> {
        let (mut done, mut moved) = (true, false);
        for request in self.requests.iter_mut().filter(|request| !request.is_done()) {
            let now = request.test()?;
            done &= now;
            moved |= now;
        }
        Ok((done, moved))
    }

    /// The members that are waited for.
    pub(super) fn peers(&self) -> Vec<usize> {
        let waiting = self.requests.iter().filter(|request| !request.is_done());
        let mut peers: Vec<usize> = waiting.filter_map(|request| request.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Goes on, after the requests are done.
    pub(super) fn finish(mut self, seat: &Arc<Seat>) -> Stepped {
        debug_assert!(self.requests.iter().all(Request::is_done));
        (self.then.take().expect("a step is finished once"))(seat)
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if !self.requests.iter().all(Request::is_done) {
            std::mem::forget(self.then.take());
        }
    }
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Step({} requests)", self.requests.len())
    }
}
