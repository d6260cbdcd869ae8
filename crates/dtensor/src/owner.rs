//! [`Owner`]: the rank that made a mutable value. It catches values that ranks on threads share by mistake.

use std::fmt::Display;

use dtensor_comm::{RankId, current_rank};

use crate::{Error, Result};

/// The rank that made a value; `None` if it was made outside `launch`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(Option<RankId>);

impl Default for Owner {
    fn default() -> Self {
        Owner(current_rank())
    }
}

impl Owner {
    /// Returns an error if the calling rank did not make `what`, because all ranks would then change the same value.
    pub(crate) fn check(self, op: &'static str, what: impl Display) -> Result<()> {
        match current_rank() {
            Some(me) if self.0 != Some(me) => {
                let message = format!(
                    "{what} is shared between ranks: make it inside `launch`, or `deep_copy` it there, so that each rank has \
                     its own"
                );
                Err(Error::argument(op, message))
            }
            _ => Ok(()),
        }
    }
}
