//! The memory that results are made in.

// Foreign functions are called here, and nowhere else in the program.
#![allow(unsafe_code)]

use libmimalloc_sys::{mi_option_set_default, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// After how many milliseconds freed pages go back to the system; never, if negative. The crate has no name for this option.
const PURGE_DELAY: mi_option_t = 15;

/// Has the allocator keep the pages that it has, unless the environment says otherwise. Results are large and short-lived, and the
/// next step of a training needs as much memory again, which would have to be mapped and cleared anew.
pub(crate) fn keep_pages() {
    // SAFETY: sets a number, which the allocator reads when it frees.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) }
}
