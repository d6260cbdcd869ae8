//! Memory that several threads fill, each its own part, and that becomes one vector.

use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// Room for `len` elements, not yet written.
pub(crate) struct Shared<T> {
    ptr: NonNull<T>,
    len: usize,
    capacity: usize,
    /// Whether the vector has been handed out, and with it the memory.
    taken: AtomicBool,
}

// SAFETY: this is a vector in the making. Sending it, or references to it, to another thread moves or writes elements
// there, which `T: Send` allows; elements are never read through it.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above. That writers do not meet is what callers of `range` promise.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// `None` if there is not so much memory.
    pub(crate) fn new(len: usize) -> Option<Self> {
        let mut room: Vec<T> = Vec::new();
        room.try_reserve_exact(len).ok()?;
        let mut room = ManuallyDrop::new(room);
        let ptr = NonNull::new(room.as_mut_ptr())?;
        Some(Shared { ptr, len, capacity: room.capacity(), taken: AtomicBool::new(false) })
    }

    /// A part of the memory, to be written.
    ///
    /// # Safety
    /// Until the slice is given up, nobody else may have one that overlaps it, and `take` may not be called.
    // A slice handed out for writing behind a shared reference is what this type is for.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [MaybeUninit<T>] {
        assert!(range.start <= range.end && range.end <= self.len, "inside the memory");
        // SAFETY: the range lies inside the allocation, the elements need not be initialised, and the caller promises
        // that nobody else uses them meanwhile.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.ptr.as_ptr().add(range.start).cast::<MaybeUninit<T>>(),
                range.end - range.start,
            )
        }
    }

    /// The vector; `None` the second time.
    ///
    /// # Safety
    /// Every element must have been written by somebody whose writes this thread can see, and no slice may be out.
    pub(crate) unsafe fn take(&self) -> Option<Vec<T>> {
        if self.taken.swap(true, Ordering::AcqRel) {
            return None;
        }
        // SAFETY: pointer and capacity are those of the vector that `new` forgot, which is handed out once; the caller
        // promises that `len` elements are written.
        Some(unsafe { Vec::from_raw_parts(self.ptr.as_ptr(), self.len, self.capacity) })
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        if !*self.taken.get_mut() {
            // SAFETY: as in `take`, with no elements: nothing is known to be written.
            drop(unsafe { Vec::from_raw_parts(self.ptr.as_ptr(), 0, self.capacity) });
        }
    }
}

impl<T> std::fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({} elements)", self.len)
    }
}
