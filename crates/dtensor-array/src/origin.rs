//! The source line that work is done for, which errors and recordings name.

use std::panic::Location;

crate::mode! {
    static ORIGIN: Cell<Option<&'static Location<'static>>> = None;
}

/// Runs `body` on behalf of a source line: a gradient is the work of the line whose gradient it is. Without a line, everything
/// is done for the line that does it.
pub fn on_behalf_of<R>(line: impl Into<Option<&'static Location<'static>>>, body: impl FnOnce() -> R) -> R {
    ORIGIN.within(line.into(), body)
}

/// Returns the line that work is done for: the caller's, unless it works on behalf of another.
#[inline]
pub fn asked_by(caller: &'static Location<'static>) -> &'static Location<'static> {
    ORIGIN.get().unwrap_or(caller)
}
