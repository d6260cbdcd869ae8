//! The user's source line that an operator or collective runs for. Errors and recordings name it.

use std::panic::Location;

crate::mode! {
    static ORIGIN: Cell<Option<&'static Location<'static>>> = None;
}

/// Runs `body` on behalf of another source line: a gradient runs on behalf of the line that its forward operator was called on.
/// With `None`, [`caller_line`] returns each caller's own line again.
pub fn with_caller_line<R>(
    line: impl Into<Option<&'static Location<'static>>>,
    body: impl FnOnce() -> R,
) -> R {
    ORIGIN.within(line.into(), body)
}

/// Returns the source line to report: the line set by [`with_caller_line`], or else `caller`.
#[inline]
pub fn caller_line(caller: &'static Location<'static>) -> &'static Location<'static> {
    ORIGIN.get().unwrap_or(caller)
}

/// Returns the line set by [`with_caller_line`], if any.
#[inline]
pub fn current_line() -> Option<&'static Location<'static>> {
    ORIGIN.get()
}
