//! [`Fault`]: the error of a collective that could not finish. [`Cause`]: why it could not.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::replicas::ReplicaRecord;
use crate::{Failure, Result};

/// Why a collective could not finish. All ranks of the group get the same cause. Over MPI, ranks that fail at the same moment
/// may get different ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// The calls of two ranks do not match.
    Mismatch {
        /// One rank of the world, and its call.
        one: (usize, Box<Call>),
        /// The other rank, and its call.
        other: (usize, Box<Call>),
    },
    /// The calls match, but ranks passed different values for an array that they took as replicated before.
    NotReplicated {
        /// The first rank of the group, as a rank of the world, and the arrays that it took.
        one: (usize, Box<ReplicaRecord>),
        /// The first rank that differs from it.
        other: (usize, Box<ReplicaRecord>),
        /// All ranks that differ from the first one.
        ranks: Vec<usize>,
    },
    /// A rank left the world, so it will never arrive.
    Left {
        /// The rank in the world.
        rank: usize,
        /// How it left.
        how: Departure,
        /// Its last call, if known.
        last: Option<Box<Call>>,
    },
    /// Ranks did not arrive within the timeout.
    Late {
        /// The missing ranks in the world, and the last call of each, if known.
        ranks: Vec<(usize, Option<Call>)>,
        /// The timeout.
        waited: Duration,
    },
    /// The GPUs did not finish a collective that all ranks had begun, so it was aborted.
    Aborted {
        /// The rank in the world that noticed it, or the group's first rank if the ranks are threads.
        rank: usize,
        /// The call of that rank.
        call: Box<Call>,
        /// Why it was aborted.
        why: String,
    },
    /// The transport itself failed.
    Transport {
        /// The rank in the world that noticed the failure, or the group's first rank if the failure is shared.
        rank: usize,
        /// The transport's error message.
        message: String,
    },
}

/// How a rank left its world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// The rank finished its work.
    Returned,
    /// The rank returned an error.
    Failed(String),
    /// The rank panicked.
    Panicked(String),
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Departure::Returned => f.write_str("it returned"),
            Departure::Failed(error) => write!(f, "it returned an error: {error}"),
            Departure::Panicked(message) => write!(f, "it panicked: {message}"),
        }
    }
}

/// The error of one rank whose collective could not finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// This rank in the world.
    pub rank: usize,
    /// This rank's call.
    pub call: Call,
    /// Why the collective could not finish.
    pub cause: Arc<Cause>,
    /// True if the group had failed before this call.
    pub earlier: bool,
    /// The last calls of this rank before this one, newest first.
    pub recent: Vec<Call>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { rank, call, cause, .. } = self;
        write!(f, "rank {rank}: {call}")?;
        if self.earlier {
            write!(f, ": the group failed before")?;
        }
        match &**cause {
            Cause::Mismatch { one, other } if !self.earlier && one.0 == *rank => {
                write!(f, " does not match rank {}: {}", other.0, other.1)?;
            }
            Cause::Mismatch { one, other } if !self.earlier && other.0 == *rank => {
                write!(f, " does not match rank {}: {}", one.0, one.1)?;
            }
            Cause::Mismatch { one, other } => {
                write!(f, ": rank {}: {} does not match rank {}: {}", one.0, one.1, other.0, other.1)?;
            }
            Cause::NotReplicated { one, other, ranks } => {
                write!(f, ": the ranks passed different values for a tensor that is taken as replicated: ")?;
                ReplicaRecord::write_difference(f, (one.0, &one.1), (other.0, &other.1))?;
                if ranks.len() > 1 {
                    write!(f, "; ranks {ranks:?} differ from rank {}", one.0)?;
                }
                write!(
                    f,
                    "; pass the same tensor on all ranks, or another placement; `check_replicated` turns this check off"
                )?;
            }
            Cause::Left { rank, how, last } => {
                write!(f, ": rank {rank} has left the world: {how}")?;
                last_call(f, last.as_deref())?;
            }
            Cause::Late { ranks, waited } => {
                for (rank, last) in ranks {
                    write!(f, ": rank {rank} did not arrive within {waited:?}")?;
                    last_call(f, last.as_ref())?;
                }
            }
            Cause::Aborted { call: other, why, .. } if **other == *call => write!(f, ": {why}")?,
            Cause::Aborted { rank, call, why } => write!(f, ": rank {rank}: {call}: {why}")?,
            Cause::Transport { rank, message } => write!(f, ": rank {rank}: {message}")?,
        }
        if let Cause::Mismatch { one, other } = &**cause
            && one.1.drawn != other.1.drawn
        {
            write!(
                f,
                ": the ranks' random generators have diverged: for tensors on a mesh, rank {} has drawn {}, and rank {} {}",
                one.0, one.1.drawn, other.0, other.1.drawn
            )?;
            if one.1.drawn.differs_only_in_digest(&other.1.drawn) {
                write!(f, ", but an earlier draw differed")?;
            }
            write!(
                f,
                "; all ranks must draw the same, from the same state (`manual_seed`, `synchronize_rng`)"
            )?;
        }
        if !self.recent.is_empty() {
            write!(f, "\nlast collectives of rank {rank}, newest first:")?;
            for call in &self.recent {
                write!(f, "\n  {call}")?;
            }
        }
        Ok(())
    }
}

fn last_call(f: &mut fmt::Formatter<'_>, last: Option<&Call>) -> fmt::Result {
    match last {
        Some(call) => write!(f, "; its last call was {call}"),
        None => Ok(()),
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(payload: Box<dyn std::any::Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => match payload.downcast::<&'static str>() {
            Ok(message) => message.to_string(),
            Err(_) => "a panic payload that is not a string".into(),
        },
    }
}

/// Returns how a rank leaves whose work ended with `result`.
pub(crate) fn departure_of<T>(result: &Result<T>) -> Departure {
    let Err(error) = result else { return Departure::Returned };
    match Failure::of(error) {
        Some(Failure::Panicked { message, .. }) => Departure::Panicked(message.clone()),
        // Only the first line: this rank's earlier calls do not help the others.
        _ => Departure::Failed(error.to_string().lines().next().unwrap_or_default().to_string()),
    }
}
