//! How much is shown.

use super::record::OperationRecord;
use crate::{Error, Result};

/// How much a table or file shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Modules with their collectives.
    Collectives,
    /// What modules are and have, and operators on meshes that compute or move something.
    Distributed,
    /// Operators on this rank's tensors alone, too.
    Computing,
    /// All operators.
    Everything,
}

impl Level {
    pub(super) fn checked(op: &'static str, noise_level: u8) -> Result<Level> {
        Ok(match noise_level {
            0 => Level::Collectives,
            1 => Level::Distributed,
            2 => Level::Computing,
            3 => Level::Everything,
            _ => {
                let message = format!("noise_level must be 0, 1, 2 or 3, but is {noise_level}");
                return Err(Error::argument(op, message));
            }
        })
    }

    /// Whether modules are shown with their types and parameters.
    pub(super) fn shows_modules(self) -> bool {
        self > Level::Collectives
    }

    pub(super) fn shows(self, operation: &OperationRecord) -> bool {
        match self {
            Level::Collectives => false,
            Level::Distributed => operation.is_distributed() && !operation.is_trivial(),
            Level::Computing => !operation.is_trivial(),
            Level::Everything => true,
        }
    }
}
