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
        match error.root() {
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

/// Lists the root causes first, then the ranks that failed only because they waited for another rank. Ranks with the same error
/// share a line.
fn launch_message(failures: &[(usize, Error)]) -> String {
    let waited = |error: &Error| matches!(Failure::of(error), Some(Failure::Collective(_)));
    let causes = failures.iter().filter(|(_, error)| !waited(error));
    let others = failures.iter().filter(|(_, error)| waited(error));
    let mut lines: Vec<(Vec<usize>, String)> = Vec::new();
    for (rank, error) in causes.chain(others) {
        let line = error.to_string();
        // These messages name the rank already.
        if matches!(Failure::of(error), Some(Failure::Collective(_) | Failure::Panicked { .. })) {
            lines.push((Vec::new(), line));
            continue;
        }
        match lines.iter_mut().find(|(ranks, other)| !ranks.is_empty() && *other == line) {
            Some((ranks, _)) => ranks.push(*rank),
            None => lines.push((vec![*rank], line)),
        }
    }
    let lines = lines.into_iter().map(|(ranks, line)| match &ranks[..] {
        [] => line,
        ranks => format!("{}: {line}", rank_list(ranks)),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Formats ascending ranks: `rank 2`, `ranks 0-3`, `ranks 0-1, 5`.
fn rank_list(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [rank] => rank.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", runs.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_the_same_error_share_a_line() {
        let error = |rank: usize| (rank, Error::argument("f", if rank == 2 { "two" } else { "other" }));
        assert_eq!(
            launch_message(&[error(0), error(1), error(2), error(3)]),
            "ranks 0-1, 3: f: other\nrank 2: f: two"
        );
        assert_eq!(launch_message(&[error(2)]), "rank 2: f: two");
        let panicked = |rank| (rank, Failure::Panicked { rank, message: "oh".into() }.into());
        assert_eq!(launch_message(&[panicked(0), panicked(1)]), "rank 0 panicked: oh\nrank 1 panicked: oh");
    }
}
