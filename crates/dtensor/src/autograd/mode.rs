//! Whether operators are recorded: a mode of the calling thread, for the length of a scope.

use std::cell::Cell;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

pub(crate) fn grad_enabled() -> bool {
    ENABLED.get()
}

/// Runs `body` with recording on or off, and restores the mode even if it panics.
fn scoped<R>(enabled: bool, body: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ENABLED.set(self.0);
        }
    }
    let _restore = Restore(ENABLED.replace(enabled));
    body()
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
    scoped(false, body)
}

/// Runs `body` with recording on, inside a [`no_grad`] scope too.
pub fn enable_grad<R>(body: impl FnOnce() -> R) -> R {
    scoped(true, body)
}
