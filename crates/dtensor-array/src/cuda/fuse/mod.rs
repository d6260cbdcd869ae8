//! Fusion: chains of element-wise operators run as one kernel.
//!
//! An element-wise operator does not queue its kernel. Its result is *pending*: the storage holds an [`Expression`], which names the
//! function and its inputs, and inputs may be pending themselves. Whoever asks for the address of a pending storage forces it: one
//! kernel then computes the expression with everything pending below it ([`plan`]). What somebody else holds too is written by the same
//! kernel; what only the expression holds is never in memory. A value that nobody holds any more is never computed.
//!
//! The kernels are generated from the functions of the single operators, in the same order and rounded to the same dtypes, so their
//! results have the same bits ([`program`]). They are compiled when a chain is seen for the third time; until then its operators run one
//! by one.
//!
//! Pending work belongs to the stream of the thread that ran the operator, and is queued there, whoever forces it. It is bounded: a
//! stream has at most [`MOST_PENDING`] pending storages, an expression at most [`MOST_OPERATORS`] operators, and inputs that nobody else
//! holds at most [`MOST_BYTES`]. `cuda::synchronize` queues all of it, and so does a step that writes in place what it reads. So do the
//! begin and the end of a recording, and a replay; chains that are recorded are compiled at once.

mod plan;
mod program;
mod samples;
#[cfg(test)]
mod tests;

use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

pub(super) use samples::samples;

use self::plan::Plan;
use self::program::{Known, Program};
use super::driver::Address;
use super::map::{Function, Numbers};
use super::stream::{Stream, each_stream_of_thread};
use super::{CudaStorage, gpu, recorder};
use crate::storage::Storage;
use crate::{Array, DType, Result, Shape, origin};

/// The most operators of an expression.
const MOST_OPERATORS: usize = 16;
/// The most arrays that an expression reads.
const MOST_INPUTS: usize = 8;
/// The most pending storages of a stream.
const MOST_PENDING: usize = 64;
/// The most bytes of inputs that only pending work holds.
const MOST_BYTES: usize = 256 << 20;

#[derive(Clone, Copy)]
enum Setting {
    /// As the environment variable `DTENSOR_FUSE` says: on, unless it is 0.
    Default,
    On,
    Off,
    /// A chain is compiled when it is seen for this time.
    After(u32),
}

crate::mode! {
    static FUSE: Cell<Setting> = Setting::Default;
}

/// Runs `body` with fusion of element-wise operators on GPUs on or off.
///
/// It is on by default, unless the environment variable `DTENSOR_FUSE` is 0. Results have the same bits either way.
///
/// ```
/// use dtensor_array::cuda;
/// let sum = cuda::fuse(false, || 1 + 1);
/// assert_eq!(sum, 2);
/// ```
#[inline]
pub fn fuse<R>(on: bool, body: impl FnOnce() -> R) -> R {
    FUSE.within(if on { Setting::On } else { Setting::Off }, body)
}

/// Runs `body` with fusion on, and compiles a chain when it is seen for the `n`-th time, instead of the third or the number in
/// `DTENSOR_FUSE`.
#[doc(hidden)]
pub fn fuse_after<R>(n: u32, body: impl FnOnce() -> R) -> R {
    FUSE.within(Setting::After(n), body)
}

/// Returns the number of times that a chain must be seen before it is compiled, or `None` if fusion is off.
fn threshold() -> Option<u32> {
    match FUSE.get() {
        Setting::Off => None,
        Setting::After(n) => Some(n),
        Setting::Default => Some(given_threshold()).filter(|&n| n > 0),
        Setting::On => Some(given_threshold()).filter(|&n| n > 0).or(Some(USUAL_THRESHOLD)),
    }
}

/// Returns as [`threshold`], for work that is queued now.
fn threshold_now() -> Option<u32> {
    // What is recorded runs often, but is seen once.
    let lower = |n| if n <= USUAL_THRESHOLD && recorder::is_recording() { 1 } else { n };
    threshold().map(lower)
}

/// The number of times that a chain must be seen before it is compiled.
const USUAL_THRESHOLD: u32 = 3;

/// Returns the number in the environment variable `DTENSOR_FUSE`, or the usual one.
fn given_threshold() -> u32 {
    static GIVEN: OnceLock<u32> = OnceLock::new();
    *GIVEN.get_or_init(|| {
        let given = std::env::var("DTENSOR_FUSE").ok().and_then(|text| text.parse().ok());
        // The emulator's compiler takes longer than what a fused kernel saves.
        let is_emulated = gpu(0).is_ok_and(|gpu| gpu.info.architecture == "emulated");
        given.unwrap_or(if is_emulated { 1000 } else { USUAL_THRESHOLD })
    })
}

/// Returns true if element-wise operators are fused.
#[inline]
pub(super) fn is_on() -> bool {
    threshold().is_some()
}

/// What the elements of a pending storage are computed from.
pub(crate) struct Expression {
    function: Function,
    numbers: Numbers,
    /// What it reads: views of their own, so that the handles of a storage that are no inputs of expressions can be counted.
    inputs: SmallVec<[Array; 3]>,
    shape: Shape,
    out: DType,
    /// The line that called the operator.
    line: Option<&'static Location<'static>>,
    /// The number of operators, and of arrays read, with those of pending inputs. What is shared counts each time.
    operators: usize,
    arrays: usize,
    /// Where it is in [`Fusing::pending`].
    at: usize,
}

impl Drop for Expression {
    fn drop(&mut self) {
        for input in &self.inputs {
            if let Ok(storage) = input.cuda_storage() {
                storage.readers.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

/// The element-wise work of a stream that is not queued yet.
#[derive(Default)]
pub(crate) struct Fusing {
    /// The pending storages, oldest first. Some have been dropped or computed since.
    pending: Vec<Option<Weak<Storage>>>,
    /// At least the bytes of all storages that expressions read.
    bytes: usize,
    known: FxHashMap<Program, Known>,
}

/// Creates a pending array: a function of operands that broadcast to `shape`, which is not empty.
pub(super) fn defer(
    stream: &'static Stream,
    function: Function,
    (out, shape): (DType, Shape),
    operands: &[&Array],
    numbers: Numbers,
) -> Result<Array> {
    let numel = shape.numel();
    let (mut operators, mut arrays) = (1, 0);
    for x in operands {
        match sizes_if_absorbed(stream, x, numel)? {
            Some(inside) => (operators, arrays) = (operators + inside.0, arrays + inside.1),
            None => arrays += 1,
        }
    }
    if operators > MOST_OPERATORS || arrays > MOST_INPUTS {
        for x in operands {
            x.cuda_storage()?.force()?;
        }
        (operators, arrays) = (1, operands.len());
    }
    let mut inputs = SmallVec::new();
    let mut bytes = 0;
    for x in operands {
        let storage = x.cuda_storage()?;
        storage.readers.fetch_add(1, Ordering::AcqRel);
        bytes += storage.len * storage.dtype.size();
        inputs.push(x.another_view());
    }
    let mut fusing = stream.fusing.lock();
    fusing.make_room();
    let (line, at) = (origin::current_line(), fusing.pending.len());
    let expression =
        Expression { function, numbers, inputs, shape: shape.clone(), out, line, operators, arrays, at };
    let array = Array::from_cuda(CudaStorage::pending(stream, out, numel, Box::new(expression)), shape);
    fusing.pending.push(Some(array.weak_storage()));
    fusing.bytes += bytes;
    if fusing.bytes > MOST_BYTES {
        fusing.release();
    }
    Ok(array)
}

/// Returns the numbers of operators and arrays of a pending operand that an expression of `numel` elements can compute itself. Forces
/// any other that is pending.
#[inline]
fn sizes_if_absorbed(stream: &Stream, x: &Array, numel: usize) -> Result<Option<(usize, usize)>> {
    let storage = x.cuda_storage()?;
    if !storage.is_pending() {
        return Ok(None);
    }
    if std::ptr::eq(storage.home, stream)
        && x.numel() == numel
        && x.is_whole()
        && let Some(expression) = &*storage.pending.lock()
    {
        return Ok(Some((expression.operators, expression.arrays)));
    }
    force(storage)?;
    Ok(None)
}

/// Queues the work that computes a pending storage. Returns its address.
#[cold]
pub(super) fn force(storage: &CudaStorage) -> Result<Address> {
    storage.home.fusing.lock().compute(storage)?;
    Ok(storage.start())
}

/// Queues all element-wise operators of this thread that are still pending, without waiting for them.
///
/// They are queued by themselves when somebody needs their results. A loop that measures operators needs it, because a result that is
/// dropped while it is pending is never computed. Returns the first error, if any, such as a lack of memory.
pub fn flush() -> Result<()> {
    let mut result = Ok(());
    each_stream_of_thread(|stream| {
        let flushed = flush_stream(stream);
        if result.is_ok() {
            result = flushed;
        }
    });
    result
}

/// Queues everything that is pending on a stream.
pub(crate) fn flush_stream(stream: &Stream) -> Result<()> {
    stream.fusing.lock().flush()
}

impl Fusing {
    /// Computes a storage, with everything below it.
    fn compute(&mut self, root: &CudaStorage) -> Result<()> {
        while root.is_pending() {
            match Plan::new(root) {
                Ok(plan) => return plan.run(self),
                // The shapes do not fit into one loop.
                Err(blocked) => self.compute(blocked.cuda_storage()?)?,
            }
        }
        Ok(())
    }

    /// Computes everything, the latest first: it includes most of the others. Returns the first error; what failed stays pending.
    fn flush(&mut self) -> Result<()> {
        let mut result = Ok(());
        for at in (0..self.pending.len()).rev() {
            if let Some(Storage::Cuda(storage, _)) = self.storage(at).as_deref() {
                let computed = self.compute(storage);
                result = result.and(computed);
            }
        }
        self.bytes = 0;
        // Storages that were dropped have no entry to keep, and computed ones have removed theirs.
        let failed: Vec<_> = self.pending.drain(..).flatten().filter_map(|entry| entry.upgrade()).collect();
        for storage in failed {
            if let Storage::Cuda(cuda, _) = &*storage
                && let Some(expression) = &mut *cuda.pending.lock()
            {
                expression.at = self.pending.len();
                self.pending.push(Some(Arc::downgrade(&storage)));
            }
        }
        result
    }

    fn storage(&self, at: usize) -> Option<Arc<Storage>> {
        self.pending.get(at)?.as_ref()?.upgrade()
    }

    /// Removes entries that are not needed any more from the end of the list, and makes room for another one.
    #[inline]
    fn make_room(&mut self) {
        while let Some(last) = self.pending.last()
            && last.as_ref().is_none_or(|entry| entry.strong_count() == 0)
        {
            self.pending.pop();
        }
        if self.pending.is_empty() {
            self.bytes = 0;
        } else if self.pending.len() >= MOST_PENDING {
            // What fails stays pending, and returns its error when it is forced.
            let _ = self.flush();
        }
    }

    /// Computes everything if only pending work keeps too much memory allocated.
    #[cold]
    fn release(&mut self) {
        let (mut all, mut only_here) = (0, 0);
        for at in 0..self.pending.len() {
            if let Some(Storage::Cuda(storage, _)) = self.storage(at).as_deref()
                && let Some(expression) = &*storage.pending.lock()
            {
                for input in &expression.inputs {
                    let Ok(read) = input.cuda_storage() else { continue };
                    if !read.is_pending() {
                        let bytes = read.len * read.dtype.size();
                        all += bytes;
                        let handles = input.storage_handles();
                        only_here +=
                            if handles <= read.readers.load(Ordering::Acquire) as usize { bytes } else { 0 };
                    }
                }
            }
        }
        self.bytes = all;
        if only_here > MOST_BYTES {
            let _ = self.flush();
        }
    }
}
