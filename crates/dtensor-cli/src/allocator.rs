//! The global allocator and its settings.

// The only foreign function of this program is called here.
#![allow(unsafe_code)]

use libmimalloc_sys::{mi_option_set_default, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The option for the delay, in milliseconds, after which freed pages go back to the system; a negative delay means never. The crate
/// has no name for it.
const PURGE_DELAY: mi_option_t = 15;

/// Makes the allocator retain freed pages, unless its environment variables say otherwise. Results are large and short-lived, and the
/// next training step needs the same amount of memory, which the system would have to map and clear again.
pub(crate) fn keep_pages() {
    // SAFETY: sets an integer option, which the allocator reads when it frees memory.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) }
}
