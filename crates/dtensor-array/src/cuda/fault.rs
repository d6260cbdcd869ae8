//! [`Faults`]: invalid values that kernels find, such as an index out of bounds. A kernel cannot return an error, so it writes the
//! first invalid value into a slot. The host reads the slot when it reads values, and before a collective.

use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::device::Gpu;
use super::driver::Address;
use crate::{Error, Result, origin};

/// What a kernel writes. Must match `Fault` in `kernels/prelude.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Slot {
    /// 0 if nothing is wrong, else one of the codes below.
    code: u32,
    /// The operator that found it, as an index into [`Faults::sites`].
    site: u32,
    index: i64,
    dim: u32,
    size: i64,
}

/// An index is not below the size of the dim.
const OUT_OF_BOUNDS: u32 = 1;
/// An index is given twice.
const TWICE: u32 = 2;
/// A probability is not between 0 and 1.
const PROBABILITY: u32 = 3;

/// An operator, and the line that called it.
type Site = (&'static str, Option<&'static Location<'static>>);

/// The slot of a stream.
pub(super) struct Faults {
    /// In main memory that the GPU can write.
    slot: *mut Slot,
    sites: Mutex<Vec<Site>>,
    /// An error of other work that the stream's work depends on, and whether there is one.
    reported: Mutex<Option<Error>>,
    is_reported: AtomicBool,
}

// SAFETY: the slot is read and written through volatile accesses only, and belongs to this value.
unsafe impl Send for Faults {}
// SAFETY: as above.
unsafe impl Sync for Faults {}

impl Faults {
    pub(super) fn new(gpu: &Gpu) -> Result<Faults> {
        let slot = gpu.driver.allocate_pinned(size_of::<Slot>())?.cast::<Slot>();
        // SAFETY: the memory is large enough, aligned, and nothing else uses it yet.
        unsafe { slot.write_volatile(Slot { code: 0, site: 0, index: 0, dim: 0, size: 0 }) };
        Ok(Faults {
            slot,
            sites: Mutex::default(),
            reported: Mutex::default(),
            is_reported: AtomicBool::new(false),
        })
    }

    /// Reports an error of other work that the stream's work depends on.
    pub(super) fn report(&self, error: Error) {
        *self.reported.lock() = Some(error);
        self.is_reported.store(true, Ordering::SeqCst);
    }

    /// Returns the slot's address and the number of the running operator.
    pub(super) fn site(&self, op: &'static str) -> (Address, u32) {
        let site = (op, origin::current_line());
        let mut sites = self.sites.lock();
        let number = sites.iter().rposition(|known| *known == site).unwrap_or_else(|| {
            sites.push(site);
            sites.len() - 1
        });
        (self.slot as Address, number as u32)
    }

    /// Returns the error in the slot, if any, and empties it.
    #[inline]
    pub(super) fn take(&self) -> Result<()> {
        if self.is_reported.load(Ordering::Relaxed) && self.is_reported.swap(false, Ordering::SeqCst) {
            return self.reported.lock().take().map_or(Ok(()), Err);
        }
        // SAFETY: the slot lives as long as `self`.
        match unsafe { (&raw const (*self.slot).code).read_volatile() } {
            0 => Ok(()),
            _ => Err(self.fault()),
        }
    }

    #[cold]
    fn fault(&self) -> Error {
        // SAFETY: as in `take`.
        let Slot { code, site, index, dim, size } = unsafe { self.slot.read_volatile() };
        // SAFETY: as in `take`.
        unsafe { (&raw mut (*self.slot).code).write_volatile(0) };
        let (op, line) = self.sites.lock().get(site as usize).copied().unwrap_or(("cuda", None));
        let error = match code {
            OUT_OF_BOUNDS => {
                Error::IndexOutOfBounds { op, index, dim: dim as usize, size: size.max(0) as usize }
            }
            TWICE => {
                let message = format!("index {index} appears more than once; every index must be unique");
                Error::argument(op, message)
            }
            PROBABILITY => {
                let p = f64::from_bits(index as u64);
                Error::argument(op, format!("every probability must be between 0 and 1, but got {p}"))
            }
            code => Error::argument(op, format!("the kernel reports error {code}")),
        };
        match line {
            Some(line) => error.at(line, None),
            None => error,
        }
    }
}
