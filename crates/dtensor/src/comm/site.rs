//! The line that something is done for, which errors and recordings name.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::running::running_module;
use crate::scope::within;

/// A line of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Site {
    /// The file, as the compiler names it.
    pub file: Cow<'static, str>,
    /// The line in it.
    pub line: u32,
    /// The operator that moves its inputs there, where nobody asked for it to be done.
    pub operator: Option<Arc<str>>,
    /// The module that was running, if somebody watches modules.
    pub module: Option<Cow<'static, str>>,
}

thread_local! {
    static ORIGIN: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Runs `body`, in which everything is done for this line: a gradient is the work of the operator it is of. Without one,
/// everything is done for the line that does it.
pub(crate) fn on_behalf_of<R>(
    line: impl Into<Option<&'static Location<'static>>>,
    body: impl FnOnce() -> R,
) -> R {
    within(&ORIGIN, line.into(), body)
}

/// The line that everything is done for, if there is one.
pub(crate) fn origin() -> Option<&'static Location<'static>> {
    ORIGIN.get()
}

/// The line that something is done for: the one that calls, unless it does so for another.
pub(crate) fn asked_by(caller: &'static Location<'static>) -> &'static Location<'static> {
    ORIGIN.get().unwrap_or(caller)
}

impl Site {
    /// The line that called the function this is called from.
    #[track_caller]
    pub(crate) fn caller() -> Self {
        Site::of(asked_by(Location::caller()))
    }

    pub(crate) fn of(at: &'static Location<'static>) -> Self {
        let module = running_module().map(|module| Cow::Borrowed(module.path));
        Site { file: Cow::Borrowed(at.file()), line: at.line(), operator: None, module }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)?;
        if let Some(operator) = &self.operator {
            write!(f, ", implicit in {operator}")?;
        }
        match &self.module {
            Some(module) => write!(f, ", in module {module}"),
            None => Ok(()),
        }
    }
}
