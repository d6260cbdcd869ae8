//! [`Failure`]: the errors of this crate.

use crate::{Error, Fault};

/// An error between ranks. [`Error::Other`](dtensor_array::Error::Other) holds it; [`Failure::of`] gets it back.
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
    /// A collective could not finish: the ranks' calls did not match, or a rank left or was late.
    #[error("{0}")]
    Collective(Box<Fault>),

    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank in the world.
        rank: usize,
        /// The panic message.
        message: String,
    },

    /// Some ranks of a launch returned an error or panicked.
    #[error("{}", launch_message(.failures))]
    Launch {
        /// The ranks that failed and their errors, in rank order.
        failures: Vec<(usize, Error)>,
    },
}

impl Failure {
    /// Returns the failure that an error holds, or `None` if the error is of another kind.
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

/// Lists the root causes first, then the ranks that failed only because they waited for another rank.
fn launch_message(failures: &[(usize, Error)]) -> String {
    let waited = |error: &Error| matches!(Failure::of(error), Some(Failure::Collective(_)));
    let causes = failures.iter().filter(|(_, error)| !waited(error));
    let others = failures.iter().filter(|(_, error)| waited(error));
    let lines = causes.chain(others).map(|(rank, error)| match Failure::of(error) {
        // These messages name the rank already.
        Some(Failure::Collective(_) | Failure::Panicked { .. }) => error.to_string(),
        _ => format!("rank {rank}: {error}"),
    });
    lines.collect::<Vec<_>>().join("\n")
}
