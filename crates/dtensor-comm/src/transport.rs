//! What a kind of world has to provide. Everything else is the same for all of them.

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

/// What makes a group the same on all its members: its ranks, in their order, and its number among the groups of those
/// ranks that a member has made.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) members: Arc<[usize]>,
    pub(crate) number: u64,
}

/// A rank that is about to join a group.
#[derive(Debug)]
pub(crate) struct Joining {
    pub(crate) key: Key,
    /// Its position among the members.
    pub(crate) me: usize,
    pub(crate) name: Arc<str>,
    pub(crate) timeout: Duration,
    /// The line that makes the group. Only over MPI do ranks wait for each other here, so that it can fail.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))]
    pub(crate) at: Site,
}

/// One rank's connection to its world.
pub(crate) trait Transport: Debug + Send + Sync {
    /// Connects this rank with the other members, which do the same.
    fn join(&self, joining: &Joining) -> Result<Arc<dyn Channel>>;

    /// This rank will call nothing any more. Called once.
    fn depart(&self, how: Departure);
}

/// One rank's connection to a group.
pub(crate) trait Channel: Debug + Send + Sync {
    /// Begins a collective. It does not wait for others.
    fn start(self: Arc<Self>, call: Call, values: Arrays, timeout: Duration) -> Result<Box<dyn Flight>>;

    /// Hands a value to a member. It does not wait for it to be taken.
    fn send(&self, call: Call, value: Array, dst: usize, tag: u32) -> Result<()>;

    /// Begins to take the next value that a member sends with a tag.
    fn receive(
        self: Arc<Self>,
        call: Call,
        src: usize,
        tag: u32,
        timeout: Duration,
    ) -> Result<Box<dyn Flight>>;

    /// Remembers a call without making it.
    fn note(&self, call: &Call);
}

/// A collective that has begun.
pub(crate) trait Flight: Debug + Send {
    /// Whether waiting would return at once. Does what can be done meanwhile.
    fn poll(&mut self) -> bool;

    /// This rank's share of the outcome.
    fn wait(self: Box<Self>) -> Result<Arrays>;
}

/// A collective that is over.
#[derive(Debug)]
pub(crate) struct Landed(pub(crate) Arrays);

impl Flight for Landed {
    fn poll(&mut self) -> bool {
        true
    }
    fn wait(self: Box<Self>) -> Result<Arrays> {
        Ok(self.0)
    }
}

/// What a collective that gives one value gave.
pub(crate) fn only(op: &'static str, values: Arrays) -> Result<Array> {
    values.into_iter().next().ok_or_else(|| Error::argument(op, "the collective gave this rank no value"))
}

/// The end of a time that begins now. What is too long to be counted lasts for ages.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    const AGES: Duration = Duration::from_secs(1 << 32);
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + AGES)
}
