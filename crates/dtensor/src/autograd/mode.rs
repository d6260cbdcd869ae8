//! Scoped modes of a thread: whether operators are recorded, and the phase (forward, backward, recomputation).

use dtensor_array::mode;
use serde::{Deserialize, Serialize};

mode! {
    static ENABLED: Cell<bool> = true;
    static PHASE: Cell<Phase> = Phase::Forward;
}

/// The phase a thread is in; [`CommDebugMode`](crate::debug::CommDebugMode) groups collectives and operators by it.
///
/// ```
/// use dtensor::debug::{CommDebugMode, Phase};
/// use dtensor::{DType, Tensor, checkpoint};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
/// let mode = CommDebugMode::record(|| checkpoint(&x, |x| x.tanh())?.sum_all()?.backward())?;
/// let tanh = mode.operations().into_iter().filter(|operation| operation.name == "tanh");
/// let phases: Vec<_> = tanh.map(|operation| operation.phase).collect();
/// // `tanh` runs twice, because the checkpoint saves nothing; then its gradient rule runs.
/// assert_eq!(phases, [Phase::Forward, Phase::Recomputation, Phase::Backward]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Forward: the thread computes a value for the first time.
    #[default]
    Forward,
    /// Backward: the thread computes gradients.
    Backward,
    /// The thread runs the body of a [`checkpoint`](crate::checkpoint()) again during backward.
    Recomputation,
}

/// Returns the phase that this thread is in.
pub(crate) fn phase() -> Phase {
    PHASE.get()
}

/// Runs `body` in a phase, and restores the previous phase even if it panics.
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

/// Runs `body` with recording on, even inside a [`no_grad`] scope.
///
/// ```
/// use dtensor::{DType, Tensor, enable_grad, no_grad};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
/// assert!(no_grad(|| enable_grad(|| x.mul(2.0)))?.requires_grad());
/// # Ok(())
/// # }
/// ```
pub fn enable_grad<R>(body: impl FnOnce() -> R) -> R {
    ENABLED.within(true, body)
}
