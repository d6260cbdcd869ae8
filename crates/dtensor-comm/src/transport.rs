//! The traits that a kind of world implements: threads, MPI, simulated. Everything above them is the same for all kinds.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Arrays;
use crate::call::Call;
use crate::fault::Departure;
use crate::site::Site;
use crate::{Error, Result};
use dtensor_array::Array;

/// Identifies a group on all its members: its ranks in order, and how many groups of these ranks a member created before.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) members: Arc<[usize]>,
    pub(crate) number: u64,
}

/// What a rank needs to join a group.
#[derive(Debug)]
pub(crate) struct Joining {
    pub(crate) key: Key,
    /// This rank's position among the members.
    pub(crate) me: usize,
    pub(crate) name: Arc<str>,
    pub(crate) timeout: Duration,
    /// The source line that creates the group. Only MPI uses it: there, ranks wait for each other, so joining can fail.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))]
    pub(crate) at: Site,
}

/// One rank's connection to its world.
pub(crate) trait Transport: Debug + Send + Sync {
    /// Connects this rank with the other members, which call this too.
    fn join(&self, joining: &Joining) -> Result<Arc<dyn Channel>>;

    /// Announces that this rank leaves the world. Called once.
    fn depart(&self, how: Departure);
}

/// One rank's connection to a group.
pub(crate) trait Channel: Debug + Send + Sync {
    /// Begins a collective without waiting for the other members.
    fn start(self: Arc<Self>, call: Call, values: Arrays, timeout: Duration) -> Result<Box<dyn InFlight>>;

    /// Sends a value to a member without waiting for it to receive.
    fn send(&self, call: Call, value: Array, dst: usize, tag: u32) -> Result<()>;

    /// Begins to receive the next value that a member sends with this tag.
    fn receive(
        self: Arc<Self>,
        call: Call,
        src: usize,
        tag: u32,
        timeout: Duration,
    ) -> Result<Box<dyn InFlight>>;

    /// Records a call in the ring of last calls without running it.
    fn note(&self, call: &Call);
}

/// A collective that has begun.
pub(crate) trait InFlight: Debug + Send {
    /// Makes progress without waiting. Returns true if waiting would return at once.
    fn poll(&mut self) -> bool;

    /// Waits for the collective and returns its results on this rank.
    fn wait(self: Box<Self>) -> Result<Arrays>;
}

/// A collective that has finished.
#[derive(Debug)]
pub(crate) struct Finished(pub(crate) Arrays);

impl InFlight for Finished {
    fn poll(&mut self) -> bool {
        true
    }
    fn wait(self: Box<Self>) -> Result<Arrays> {
        Ok(self.0)
    }
}

/// Returns the result of a collective that returns one value.
pub(crate) fn single(op: &'static str, values: Arrays) -> Result<Array> {
    let missing = || Error::argument(op, "the collective returned no value on this rank");
    values.into_iter().next().ok_or_else(missing)
}

/// Returns the deadline of a timeout that begins now. A timeout too long to be represented becomes more than a hundred years.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    const FOREVER: Duration = Duration::from_secs(1 << 32);
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + FOREVER)
}
