//! What is said when a collective cannot be finished.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::{Failure, Result};

/// Why a collective could not be finished. The same on every rank of the group; over MPI, ranks that give up at the same
/// moment may each have seen something else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// Two ranks meant different things.
    Mismatch {
        /// A rank of the world and what it called.
        one: (usize, Box<Call>),
        /// Another.
        other: (usize, Box<Call>),
    },
    /// A rank has left the world, so it will never come.
    Left {
        /// The rank of the world.
        rank: usize,
        /// How it left.
        how: Departure,
        /// What it called last, where that is known.
        last: Option<Box<Call>>,
    },
    /// Ranks did not come in time.
    Late {
        /// The ranks of the world that were missing, and what each called last, where that is known.
        ranks: Vec<(usize, Option<Call>)>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The transport itself failed.
    Transport {
        /// The rank of the world that noticed, or the group's first where all work together.
        rank: usize,
        /// What it said.
        message: String,
    },
}

/// How a rank left the world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// Its work was done.
    Returned,
    /// Its work ended in an error.
    Failed(String),
    /// It panicked.
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

/// A collective that could not be finished, as one rank saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// This rank of the world.
    pub rank: usize,
    /// What it had called.
    pub call: Call,
    /// Why it could not be finished.
    pub cause: Arc<Cause>,
    /// Whether the group had failed before this call.
    pub earlier: bool,
    /// What this rank had called last, newest first, this call left out.
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
            Cause::Transport { rank, message } => write!(f, ": rank {rank}: {message}")?,
        }
        if let Cause::Mismatch { one, other } = &**cause
            && one.1.drawn != other.1.drawn
        {
            write!(
                f,
                ": the ranks' generators have come apart: of tensors on a mesh, rank {} has drawn {}, and rank {} {}",
                one.0, one.1.drawn, other.0, other.1.drawn
            )?;
            if one.1.drawn.differs_unseen(&other.1.drawn) {
                write!(f, ", but an earlier draw was not the same")?;
            }
            write!(f, "; all must draw alike, from the same state (`manual_seed`, `synchronize_rng`)")?;
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
        Some(call) => write!(f, "; the last it called was {call}"),
        None => Ok(()),
    }
}

/// The words of a panic.
pub(crate) fn panic_message(payload: Box<dyn std::any::Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => match payload.downcast::<&'static str>() {
            Ok(message) => message.to_string(),
            Err(_) => "a value that is not a message".into(),
        },
    }
}

/// Turns the end of a rank's work into how it left.
pub(crate) fn departure<T>(result: &Result<T>) -> Departure {
    let Err(error) = result else { return Departure::Returned };
    match Failure::of(error) {
        Some(Failure::Panicked { message, .. }) => Departure::Panicked(message.clone()),
        // The first line: what this rank did before is of no use to the others.
        _ => Departure::Failed(error.to_string().lines().next().unwrap_or_default().to_string()),
    }
}
