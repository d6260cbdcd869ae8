//! [`Failure`]: what can go wrong between ranks.

use crate::{Error, Fault};

/// What went wrong between ranks. Carried by [`Error::Other`](dtensor_array::Error::Other).
///
/// ```
/// use dtensor_comm::{Failure, launch};
/// let error = launch(2, |world| match world.rank() {
///     0 => world.group().barrier(),
///     _ => Ok(()),
/// });
/// let Some(Failure::Launch { failures }) = Failure::of(&error.unwrap_err()).cloned() else { panic!() };
/// let (rank, error) = &failures[0];
/// assert!(*rank == 0 && matches!(Failure::of(error), Some(Failure::Collective(_))));
/// ```
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A collective could not be finished: ranks disagreed, or one of them is gone or late.
    #[error("{0}")]
    Collective(Box<Fault>),

    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank of the world.
        rank: usize,
        /// What it said.
        message: String,
    },

    /// Some ranks of a launch failed.
    #[error("{}", launch_message(.failures))]
    Launch {
        /// The ranks that failed and why, in rank order.
        failures: Vec<(usize, Error)>,
    },
}

impl Failure {
    /// Returns what went wrong between ranks, if that is what an error is about.
    pub fn of(error: &Error) -> Option<&Failure> {
        match error {
            Error::Other(other) => other.downcast_ref(),
            _ => None,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Error::other(failure)
    }
}

/// Lists root causes first, then ranks that failed only because they waited.
fn launch_message(failures: &[(usize, Error)]) -> String {
    let waited = |error: &Error| matches!(Failure::of(error), Some(Failure::Collective(_)));
    let causes = failures.iter().filter(|(_, error)| !waited(error));
    let others = failures.iter().filter(|(_, error)| waited(error));
    let lines = causes.chain(others).map(|(rank, error)| match Failure::of(error) {
        // These name their rank themselves.
        Some(Failure::Collective(_) | Failure::Panicked { .. }) => error.to_string(),
        _ => format!("rank {rank}: {error}"),
    });
    lines.collect::<Vec<_>>().join("\n")
}
