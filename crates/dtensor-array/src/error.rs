//! The error type of this crate and of the crates above.
//!
//! A message is one line in lower case: the operator, the argument, what was given. If PyTorch has a message for the same
//! error, ours keeps its key words, so that a web search finds the same advice.

use std::fmt::{self, Debug, Display};
use std::panic::Location;
use std::sync::Arc;

use crate::{DType, Device, Shape};

/// The result of every fallible function of these crates.
pub type Result<T> = std::result::Result<T, Error>;

/// An error, with the operator it happened in.
///
/// `Debug` prints what `Display` prints, so that a `main` that returns an error prints the message.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two shapes do not match.
    #[error("{op}: {why}: {left} and {right}")]
    ShapeMismatch {
        /// The operator.
        op: &'static str,
        /// How the shapes are wrong.
        why: &'static str,
        /// The first shape.
        left: Shape,
        /// The second shape.
        right: Shape,
    },

    /// The array does not have this dim.
    #[error(
        "{op}: dimension out of range (expected to be in range of [-{}, {}], but got {dim})",
        ndim.max(&1), ndim.max(&1) - 1
    )]
    DimOutOfRange {
        /// The operator.
        op: &'static str,
        /// The dim given.
        dim: isize,
        /// The number of dims of the array.
        ndim: usize,
    },

    /// An index is out of bounds.
    #[error("{op}: index {index} is out of bounds for dimension {dim} with size {size}")]
    IndexOutOfBounds {
        /// The operator.
        op: &'static str,
        /// The index.
        index: i64,
        /// The dim indexed.
        dim: usize,
        /// Its size.
        size: usize,
    },

    /// Two operands must have the same dtype but do not.
    #[error("{op}: dtypes differ: {left} and {right}; cast one of them with `to_dtype`")]
    DTypeMismatch {
        /// The operator.
        op: &'static str,
        /// The first dtype.
        left: DType,
        /// The second dtype.
        right: DType,
    },

    /// The operator is not defined for a dtype.
    #[error("{op}: not defined for dtype {dtype}: {why}")]
    DType {
        /// The operator.
        op: &'static str,
        /// The dtype given.
        dtype: DType,
        /// Which dtypes are accepted.
        why: &'static str,
    },

    /// Any other invalid argument.
    #[error("{op}: {message}")]
    Argument {
        /// The operator or function.
        op: &'static str,
        /// Which argument is invalid, and why.
        message: String,
    },

    /// The value of a meta tensor was requested.
    #[error("{op}: a meta tensor has shape and dtype but no value")]
    NoValue {
        /// The operator or function.
        op: &'static str,
    },

    /// An allocation failed.
    #[error("not enough memory for {elements} elements")]
    OutOfMemory {
        /// The number of elements.
        elements: usize,
    },

    /// The memory of a GPU cannot hold an array.
    #[error("{device}: out of memory: {report}")]
    OutOfDeviceMemory {
        /// The GPU.
        device: Device,
        /// What was asked for, and what holds the memory.
        report: String,
    },

    /// An error of a crate above, such as a failed collective.
    #[error("{0}")]
    Other(Other),

    /// An error of an operator, with the call that it comes from. [`Error::root`] returns the error itself.
    #[error("{0}")]
    Located(Box<Located>),
}

/// An error and where it comes from. Prints as one line: `matmul: …; operand 0 … (src/main.rs:12, in module Mlp.up)`.
#[derive(Clone, PartialEq)]
pub struct Located {
    /// The error itself.
    pub error: Error,
    /// What helps to understand the operands, if anything does.
    pub note: Option<String>,
    /// The line that called the operator.
    pub line: &'static Location<'static>,
    /// The module whose `forward` called it, as the type of the outermost module known and a path below it.
    pub module: Option<String>,
    /// Identifies the outermost module known to the module that called it.
    #[doc(hidden)]
    pub module_key: u64,
}

impl Display for Located {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = self.error.to_string();
        f.write_str(&error)?;
        if let Some(note) = &self.note {
            write!(f, "; {note}")?;
        }
        // Some messages name the line themselves.
        let line =
            Some(format!("{}:{}", self.line.file(), self.line.line())).filter(|line| !error.contains(line));
        match (line, &self.module) {
            (Some(line), Some(module)) => write!(f, " ({line}, in module {module})"),
            (Some(line), None) => write!(f, " ({line})"),
            (None, Some(module)) => write!(f, " (in module {module})"),
            (None, None) => Ok(()),
        }
    }
}

impl Debug for Located {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// An error type of another crate, inside an [`Error`].
#[derive(Clone, Debug)]
pub struct Other(Arc<dyn std::error::Error + Send + Sync>);

impl Other {
    /// Returns the error if it is of type `E`.
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl fmt::Display for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(&self.0, f)
    }
}

impl PartialEq for Other {
    /// Returns true if the messages are equal.
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Error {
    /// Creates an [`Error::Argument`].
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Error::Argument { op, message: message.into() }
    }

    /// Wraps an error of another crate.
    pub fn other(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Error::Other(Other(Arc::new(error)))
    }

    /// Turns this into an [`Error::Argument`] of `op` whose message starts with `what`. An [`Error::Other`] is returned
    /// unchanged, so that it can still be downcast.
    ///
    /// ```
    /// use dtensor_array::Error;
    /// let error = Error::argument("linear", "expected 3 features, but got 4");
    /// assert_eq!(error.with_context("linear", "weight").to_string(), "linear: weight: expected 3 features, but got 4");
    /// ```
    pub fn with_context(self, op: &'static str, what: impl Display) -> Self {
        if matches!(self, Error::Other(_)) {
            return self;
        }
        if let Error::Located(mut located) = self {
            located.error = located.error.with_context(op, what);
            return Error::Located(located);
        }
        let why = self.to_string();
        let why = why.strip_prefix(op).and_then(|why| why.strip_prefix(": ")).unwrap_or(&why);
        Error::argument(op, format!("{what}: {why}"))
    }

    /// Returns the error itself, without the call that it comes from.
    ///
    /// ```
    /// use dtensor_array::Error;
    /// let error = Error::argument("f", "no").at(std::panic::Location::caller(), None);
    /// assert_eq!(error.root(), &Error::argument("f", "no"));
    /// ```
    pub fn root(&self) -> &Error {
        match self {
            Error::Located(located) => located.error.root(),
            error => error,
        }
    }

    /// Adds the line of the call that the error comes from, and a note about its operands. An error that has a line keeps it, and so
    /// does an [`Error::Other`], which names lines itself.
    #[cold]
    pub fn at(self, line: &'static Location<'static>, note: Option<String>) -> Self {
        match self {
            Error::Other(_) | Error::Located(_) => self,
            error => Error::Located(Box::new(Located { error, note, line, module: None, module_key: 0 })),
        }
    }

    /// Creates the error for operands on different devices.
    pub fn devices(op: &'static str, left: Device, right: Device) -> Self {
        let message = format!("expected all tensors to be on the same device, but found {left} and {right}");
        Error::argument(op, message)
    }
}
