//! [`SharedBuffer`]: memory that several threads write to, each its own range, and that then becomes one vector.

use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// An uninitialised buffer of `len` elements that several threads fill.
pub(crate) struct SharedBuffer<T> {
    ptr: NonNull<T>,
    len: usize,
    capacity: usize,
    /// Whether `take` has returned the vector, which then owns the memory.
    taken: AtomicBool,
}

// SAFETY: the buffer owns its memory like a vector. Using it from another thread moves or writes elements there, which
// `T: Send` allows. Elements are never read through it.
unsafe impl<T: Send> Send for SharedBuffer<T> {}
// SAFETY: as above. Callers of `range` guarantee that the ranges of concurrent writers do not overlap.
unsafe impl<T: Send> Sync for SharedBuffer<T> {}

impl<T: Copy> SharedBuffer<T> {
    /// Allocates a buffer of `len` elements. Returns `None` if there is not enough memory.
    pub(crate) fn new(len: usize) -> Option<Self> {
        let mut data: Vec<T> = Vec::new();
        data.try_reserve_exact(len).ok()?;
        let mut data = ManuallyDrop::new(data);
        let ptr = NonNull::new(data.as_mut_ptr())?;
        Some(SharedBuffer { ptr, len, capacity: data.capacity(), taken: AtomicBool::new(false) })
    }

    /// Returns a range of the buffer for writing. Panics if it is out of bounds.
    ///
    /// # Safety
    /// While the slice is in use, no other slice may overlap it, and `take` must not be called.
    // The purpose of this type is to write through a shared reference.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [MaybeUninit<T>] {
        assert!(range.start <= range.end && range.end <= self.len, "range out of bounds");
        // SAFETY: the range is inside the allocation, the elements need not be initialised, and the caller guarantees
        // that no other slice overlaps it.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.ptr.as_ptr().add(range.start).cast::<MaybeUninit<T>>(),
                range.end - range.start,
            )
        }
    }

    /// Returns the vector the first time, `None` after that.
    ///
    /// # Safety
    /// Every element must have been written, the writes must happen before this call, and no slice of `range` may be in use.
    pub(crate) unsafe fn take(&self) -> Option<Vec<T>> {
        if self.taken.swap(true, Ordering::AcqRel) {
            return None;
        }
        // SAFETY: pointer and capacity come from the vector in `new`, which was not dropped. It is returned only once, and
        // the caller guarantees that `len` elements are written.
        Some(unsafe { Vec::from_raw_parts(self.ptr.as_ptr(), self.len, self.capacity) })
    }
}

impl<T> Drop for SharedBuffer<T> {
    fn drop(&mut self) {
        if !*self.taken.get_mut() {
            // SAFETY: as in `take`, but with length 0, because not all elements may be written.
            drop(unsafe { Vec::from_raw_parts(self.ptr.as_ptr(), 0, self.capacity) });
        }
    }
}

impl<T> std::fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedBuffer({} elements)", self.len)
    }
}
