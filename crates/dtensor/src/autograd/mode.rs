//! Whether operators are recorded: a mode of the calling thread, for the length of a scope.

use dtensor_array::mode;
use serde::{Deserialize, Serialize};

mode! {
    static ENABLED: Cell<bool> = true;
    static PHASE: Cell<Phase> = Phase::Forward;
}

/// What a thread is doing, as [`CommDebugMode`](crate::debug::CommDebugMode) tells collectives and operators apart by it.
///
/// ```
/// use dtensor::debug::{CommDebugMode, Phase};
/// use dtensor::{DType, Tensor, checkpoint};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
/// let mode = CommDebugMode::record(|| checkpoint(&x, |x| x.tanh())?.sum_all()?.backward())?;
/// let tanh = mode.operations().into_iter().filter(|operation| operation.name == "tanh");
/// let phases: Vec<_> = tanh.map(|operation| operation.phase).collect();
/// // It is computed, then once more, because nothing was kept of it, for its gradient.
/// assert_eq!(phases, [Phase::Forward, Phase::Recomputation, Phase::Backward]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It computes something for the first time.
    #[default]
    Forward,
    /// It computes gradients.
    Backward,
    /// It computes again, for gradients, what a [`checkpoint`](crate::checkpoint) has not kept.
    Recomputation,
}

/// What this thread is doing.
pub(crate) fn phase() -> Phase {
    PHASE.get()
}

/// Runs `body` as a phase, and restores the one before even if it panics.
pub(crate) fn in_phase<R>(phase: Phase, body: impl FnOnce() -> R) -> R {
    PHASE.within(phase, body)
}

pub(crate) fn grad_enabled() -> bool {
    ENABLED.get()
}

/// Runs `body` without recording: results do not require gradients.
///
/// ```
/// use dtensor::{DType, Tensor, no_grad};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
/// assert!(!no_grad(|| x.mul(2.0))?.requires_grad());
/// assert!(x.mul(2.0)?.requires_grad());
/// # Ok(())
/// # }
/// ```
pub fn no_grad<R>(body: impl FnOnce() -> R) -> R {
    ENABLED.within(false, body)
}

/// Runs `body` with recording on, inside a [`no_grad`] scope too.
pub fn enable_grad<R>(body: impl FnOnce() -> R) -> R {
    ENABLED.within(true, body)
}
