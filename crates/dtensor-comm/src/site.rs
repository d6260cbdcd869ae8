//! The line that something is done for, which errors and recordings name.

use std::borrow::Cow;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use dtensor_array::origin::asked_by;
use serde::{Deserialize, Serialize};

use crate::running::running_module;

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

impl Site {
    /// The line that called the function this is called from.
    #[track_caller]
    #[inline]
    pub fn caller() -> Self {
        Site::of(asked_by(Location::caller()))
    }

    /// The line given, in the module that runs.
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
