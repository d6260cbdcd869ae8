//! A collective over MPI as a chain of stages: requests that the library works on, and the code that runs when they are done.

use std::sync::Arc;

use super::member::Member;
use super::raw::Request;
use crate::Arrays;
use crate::fault::Cause;
use crate::{Error, Result};

/// Why a stage failed.
#[derive(Debug)]
pub(super) enum StageError {
    /// The group has failed.
    Cause(Arc<Cause>),
    /// An error on this rank.
    Error(Error),
}

impl From<Error> for StageError {
    fn from(error: Error) -> Self {
        StageError::Error(error)
    }
}

/// What follows a stage: another stage, something else to wait for, or the results of the collective.
#[derive(Debug)]
pub(super) enum Next {
    Stage(Stage),
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Wait(Wait),
    Done(Arrays),
}

/// Something else than requests that a collective waits for. Asked again and again, until it returns what follows.
pub(super) struct Wait(pub(super) Box<Ask>);

type Ask = dyn FnMut(&Arc<Member>) -> Option<StageResult> + Send;

impl std::fmt::Debug for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wait")
    }
}

pub(super) type StageResult = std::result::Result<Next, StageError>;

type Then = Box<dyn FnOnce(&Arc<Member>) -> StageResult + Send>;

/// Requests, and a continuation that runs when they are done. The continuation owns the memory that the library uses. A stage
/// that is dropped before its requests are done leaks this memory, because the library may still use it.
pub(super) struct Stage {
    requests: Vec<Request>,
    then: Option<Then>,
}

impl Stage {
    /// Posts requests on memory that `buffers` owns. The continuation gets `buffers` back. If a request cannot be posted after
    /// others were, the buffers leak.
    pub(super) fn post<B: Send + 'static>(
        mut buffers: B,
        post: impl FnOnce(&mut B, &mut Vec<Request>) -> Result<()>,
        then: impl FnOnce(&Arc<Member>, B) -> StageResult + Send + 'static,
    ) -> Result<Stage> {
        let mut requests = Vec::new();
        match post(&mut buffers, &mut requests) {
            Ok(()) => Ok(Stage { requests, then: Some(Box::new(move |member| then(member, buffers))) }),
            Err(error) => {
                if !requests.is_empty() {
                    std::mem::forget(buffers);
                }
                Err(error)
            }
        }
    }

    /// Tests the requests. Returns whether all are done, and whether one finished in this call.
    pub(super) fn test(&mut self) -> Result<(bool, bool)> {
        let (mut done, mut moved) = (true, false);
        for request in self.requests.iter_mut().filter(|request| !request.is_done()) {
            let now = request.test()?;
            done &= now;
            moved |= now;
        }
        Ok((done, moved))
    }

    /// Returns the members whose messages are not done.
    pub(super) fn peers(&self) -> Vec<usize> {
        let waiting = self.requests.iter().filter(|request| !request.is_done());
        let mut peers: Vec<usize> = waiting.filter_map(|request| request.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Runs the continuation. The requests must be done.
    pub(super) fn finish(mut self, member: &Arc<Member>) -> StageResult {
        debug_assert!(self.requests.iter().all(Request::is_done));
        (self.then.take().expect("a stage finishes once"))(member)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if !self.requests.iter().all(Request::is_done) {
            std::mem::forget(self.then.take());
        }
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stage({} requests)", self.requests.len())
    }
}
