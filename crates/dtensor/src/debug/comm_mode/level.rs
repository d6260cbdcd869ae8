//! [`Level`]: the noise level of a table or file.

use super::record::OperationRecord;
use crate::{Error, Result};

/// The noise level: how much a table or file shows. Each level shows all that the previous one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Modules with their collectives.
    Collectives,
    /// Types and parameters of modules, and operators on distributed tensors, except trivial ones.
    Distributed,
    /// Operators on local tensors, except trivial ones.
    NonTrivial,
    /// All operators.
    Everything,
}

impl Level {
    pub(super) fn checked(op: &'static str, noise_level: u8) -> Result<Level> {
        Ok(match noise_level {
            0 => Level::Collectives,
            1 => Level::Distributed,
            2 => Level::NonTrivial,
            3 => Level::Everything,
            _ => {
                let message = format!("noise_level must be 0, 1, 2 or 3, but is {noise_level}");
                return Err(Error::argument(op, message));
            }
        })
    }

    /// Returns true if modules are shown with their types and parameters.
    pub(super) fn shows_modules(self) -> bool {
        self > Level::Collectives
    }

    pub(super) fn shows(self, operation: &OperationRecord) -> bool {
        match self {
            Level::Collectives => false,
            Level::Distributed => operation.is_distributed() && !operation.is_trivial(),
            Level::NonTrivial => !operation.is_trivial(),
            Level::Everything => true,
        }
    }
}
