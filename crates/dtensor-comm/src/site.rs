//! [`Site`]: the call site that errors and recordings show.

use std::borrow::Cow;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use dtensor_array::origin::caller_line;
use serde::{Deserialize, Serialize};

use crate::running::running_module;

/// A call site: a source line, and the operator and module that called the collective on its behalf.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Site {
    /// The file, as the compiler names it.
    pub file: Cow<'static, str>,
    /// The line in the file.
    pub line: u32,
    /// The operator that redistributes its inputs, if the collective is implicit: no user called it.
    pub operator: Option<Arc<str>>,
    /// The module that was running, if anything listens to modules.
    pub module: Option<Cow<'static, str>>,
}

impl Site {
    /// Returns the line that called the current function. That function must be `#[track_caller]`.
    #[track_caller]
    #[inline]
    pub fn caller() -> Self {
        Site::of(caller_line(Location::caller()))
    }

    /// Returns the site of a given line, in the module that is running.
    #[inline]
    pub fn of(at: &'static Location<'static>) -> Self {
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
