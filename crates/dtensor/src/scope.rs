//! Modes of the calling thread, for the length of a scope.

use std::cell::Cell;
use std::thread::LocalKey;

/// Runs `body` with a cell set, and sets it back however `body` ends.
pub(crate) fn within<T: Copy + 'static, R>(
    cell: &'static LocalKey<Cell<T>>,
    value: T,
    body: impl FnOnce() -> R,
) -> R {
    struct Restore<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);
    impl<T: Copy> Drop for Restore<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(cell, cell.replace(value));
    body()
}
