//! The one error type.
//!
//! Messages are lower case, name the operator and the argument, and keep the key words of PyTorch's
//! message where it has one, so that a search for either finds the same advice.

use std::fmt::Display;

use crate::comm::Fault;
use crate::placement::Layout;
use crate::tensor::{DType, Device, Shape};

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, and in which operator.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two shapes that must agree do not.
    #[error("{op}: {why}: {left} and {right}")]
    ShapeMismatch {
        /// The operator.
        op: &'static str,
        /// The rule that is broken.
        why: &'static str,
        /// The first shape.
        left: Shape,
        /// The second shape.
        right: Shape,
    },

    /// A dim that the tensor does not have.
    #[error(
        "{op}: dimension out of range (expected to be in range of [-{}, {}], but got {dim})",
        rank.max(&1), rank.max(&1) - 1
    )]
    DimOutOfRange {
        /// The operator.
        op: &'static str,
        /// The dim asked for.
        dim: isize,
        /// The number of dims there are.
        rank: usize,
    },

    /// An index outside the dim it indexes.
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

    /// Operands whose dtypes must agree do not.
    #[error("{op}: dtypes differ: {left} and {right}; cast one of them with `to_dtype`")]
    DTypeMismatch {
        /// The operator.
        op: &'static str,
        /// The first dtype.
        left: DType,
        /// The second dtype.
        right: DType,
    },

    /// An operator that is not defined for a dtype.
    #[error("{op}: not defined for dtype {dtype}: {why}")]
    DType {
        /// The operator.
        op: &'static str,
        /// The dtype given.
        dtype: DType,
        /// What would be accepted.
        why: &'static str,
    },

    /// Any other argument that cannot be used.
    #[error("{op}: {message}")]
    Argument {
        /// The operator or function.
        op: &'static str,
        /// What is wrong with which argument.
        message: String,
    },

    /// A gradient that cannot be computed.
    #[error("{op}: {message}")]
    Autograd {
        /// The operator or function.
        op: &'static str,
        /// What is missing.
        message: String,
    },

    /// A value asked of a tensor that has none.
    #[error("{op}: a meta tensor has shape and dtype but no value")]
    NoValue {
        /// The operator or function.
        op: &'static str,
    },

    /// A collective that could not be finished: ranks disagreed, or one of them is gone or late.
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

    /// The local engine refused.
    #[error("engine: {0}")]
    Engine(String),
}

impl Error {
    /// An [`Error::Argument`], the common case of "this argument cannot be used".
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Error::Argument { op, message: message.into() }
    }

    /// As an error of `op` that says what it is about. Which ranks could not do what together is more than a message, and stays.
    pub(crate) fn about(self, op: &'static str, what: impl Display) -> Self {
        if matches!(self, Error::Collective(_) | Error::Panicked { .. } | Error::Launch { .. }) {
            return self;
        }
        let why = self.to_string();
        let why = why.strip_prefix(op).and_then(|why| why.strip_prefix(": ")).unwrap_or(&why);
        Error::argument(op, format!("{what}: {why}"))
    }

    /// Two tensors that must be in the same place are not.
    pub(crate) fn devices(op: &'static str, left: Device, right: Device) -> Self {
        let message = format!("expected all tensors to be on the same device, but found {left} and {right}");
        Error::argument(op, message)
    }

    /// Two tensors that must lie in the same way do not.
    pub(crate) fn layouts(op: &'static str, left: Option<&Layout>, right: Option<&Layout>) -> Self {
        let message = format!(
            "expected tensors of the same layout, but found {} and {}",
            layout_shown(left),
            layout_shown(right)
        );
        Error::argument(op, message)
    }
}

/// A tensor's layout, for a message.
fn layout_shown(layout: Option<&Layout>) -> String {
    layout.map_or_else(|| "a local tensor".into(), |layout| format!("{layout} on {}", layout.mesh()))
}

/// The causes first: a rank that only waited for another one says less.
fn launch_message(failures: &[(usize, Error)]) -> String {
    let waited = |error: &Error| matches!(error, Error::Collective(_));
    let causes = failures.iter().filter(|(_, error)| !waited(error));
    let others = failures.iter().filter(|(_, error)| waited(error));
    let lines = causes.chain(others).map(|(rank, error)| match error {
        // These name their rank themselves.
        Error::Collective(_) | Error::Panicked { .. } => error.to_string(),
        _ => format!("rank {rank}: {error}"),
    });
    lines.collect::<Vec<_>>().join("\n")
}
