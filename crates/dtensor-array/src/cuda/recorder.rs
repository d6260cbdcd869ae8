//! [`Recorder`]: what a thread records, and the places where streams, storages and kernels ask for it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxBuildHasher;

use super::device::Gpu;
use super::driver::Address;
use super::storage::{Mark, last_uses};
use super::stream::{Stream, communication_stream};
use crate::host::random::Draw;
use crate::{Error, Result};

/// The bytes of the buffer of changing numbers.
pub(super) const NUMBERS: usize = 64 << 10;
/// Draws of a recording come from one generator, and have at most this distance from its first.
const DRAWS: u64 = 1 << 40;

/// What a thread records.
pub(super) struct Recorder {
    pub(super) number: u32,
    pub(super) stream: &'static Stream,
    /// The thread's stream for communication, and whether it takes part.
    pub(super) communication: Option<(&'static Stream, bool)>,
    /// The storages outside of the recording that it uses.
    pub(super) outside: HashMap<Address, Mark, FxBuildHasher>,
    /// The generator's next draw when the recording began.
    pub(super) first_draw: Draw,
    pub(super) numbers: Vec<u8>,
    pub(super) numbers_at: Address,
    /// Pinned memory that uploads read.
    pub(super) uploads: Vec<Pinned>,
    /// The first thing that cannot be recorded.
    pub(super) refused: Option<Refusal>,
}

impl Recorder {
    /// Returns the stream for communication, if it takes part.
    pub(super) fn joined(&self) -> Option<&'static Stream> {
        self.communication.and_then(|(stream, takes_part)| takes_part.then_some(stream))
    }
}

/// What cannot be recorded, and the line that asked for it.
pub(super) type Refusal = (&'static str, Option<&'static Location<'static>>);

/// The number of threads that record, so that other work needs no look at all streams.
pub(super) static RUNNING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    pub(super) static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Calls `f` with this thread's recorder, if it records.
pub(super) fn with_recorder<R>(f: impl FnOnce(&mut Recorder) -> R) -> Option<R> {
    // While a thread ends, it does not record.
    RECORDER.try_with(|recorder| recorder.borrow_mut().as_mut().map(f)).ok().flatten()
}

/// Returns true if this thread records a graph.
pub fn is_recording() -> bool {
    RECORDER.with(|recorder| recorder.borrow().is_some())
}

/// Notes that `what` cannot be recorded, and returns the error that says so. The recording fails, also if the error is dropped.
#[cold]
pub fn refuse(what: &'static str) -> Error {
    let refusal = (what, crate::origin::current_line());
    with_recorder(|recorder| {
        recorder.refused.get_or_insert(refusal);
    });
    refusal_error(refusal)
}

pub(super) fn refusal_error((what, line): Refusal) -> Error {
    let message = format!(
        "{what} cannot be recorded: a replay does only what the GPU did. Do it outside of the step; pass values as inputs, and \
         return results as outputs"
    );
    let error = Error::argument("cuda::graph", message);
    match line {
        Some(line) => error.at(line, None),
        None => error,
    }
}

/// Notes the use of a storage outside of the recording.
#[cold]
pub(super) fn note(address: Address, mark: impl FnOnce() -> Mark) {
    with_recorder(|recorder| {
        recorder.outside.entry(address).or_insert_with(mark);
    });
}

/// Returns true if the work of `stream` that is queued from now on comes after that of `other` without an event. One of them is
/// recorded.
#[cold]
pub(super) fn has_waited(stream: &Stream, other: &Stream) -> Result<bool> {
    let [number, of_other] = [stream, other].map(|stream| stream.recording.load(Ordering::Relaxed));
    if number == of_other {
        return Ok(false);
    }
    let own = with_recorder(|recorder| (recorder.number, recorder.communication));
    match own {
        Some((own, communication)) if own == number && of_other == 0 => {
            // The recording began after all work of the stream for communication.
            if !communication.is_some_and(|(known, _)| std::ptr::eq(known, other)) {
                other.gpu.driver.synchronize(other.handle)?;
            }
            Ok(true)
        }
        _ => Err(refuse("sharing arrays with a thread that records, or between threads that record,")),
    }
}

/// Makes the stream for communication part of this thread's recording, if there is one.
#[inline]
pub(super) fn join(stream: &'static Stream) -> Result<()> {
    if stream.is_recorded() || !is_recording() {
        return Ok(());
    }
    // The watchdog of another library would ask for events that never happen.
    if !communication_stream(stream.gpu).is_some_and(|own| std::ptr::eq(own, stream)) {
        return Err(refuse("a collective through NCCL"));
    }
    let main = with_recorder(|recorder| {
        let is_near = std::ptr::eq(recorder.stream.gpu, stream.gpu);
        is_near.then(|| {
            recorder.communication = Some((stream, true));
            stream.recording.store(recorder.number, Ordering::Relaxed);
            recorder.stream
        })
    });
    let Some(main) = main.flatten() else {
        return Err(refuse("work on several GPUs"));
    };
    stream.pool.lock().begin_recording();
    stream.wait_for(main)
}

/// Copies bytes to the GPU in each replay.
#[cold]
pub(super) fn record_upload(stream: &Stream, target: Address, bytes: &[u8]) -> Result<()> {
    let pinned = Pinned::new(stream.gpu, bytes)?;
    // SAFETY: the memory has as many bytes, and the recorder keeps it as long as the graph.
    unsafe { stream.gpu.driver.copy_to_device(target, pinned.memory, bytes.len(), stream.handle)? };
    with_recorder(|recorder| recorder.uploads.push(pinned));
    Ok(())
}

/// Notes a dropped block that is not the recording's own, if a stream that used it is recorded: what the stream did before it cannot be
/// marked now. Returns false if there is nothing to wait for.
#[inline]
pub(super) fn defer_free(home: &'static Stream, address: Address, users: u64) -> bool {
    RUNNING.load(Ordering::Acquire) > 0 && defer(home, address, users)
}

#[cold]
fn defer(home: &'static Stream, address: Address, users: u64) -> bool {
    let mut is_recorded = false;
    home.gpu.each_stream(|stream| is_recorded |= stream.is_recorded());
    if !is_recorded || home.pool.lock().is_private(address) {
        return false;
    }
    home.gpu.late.lock().push((home, address, users));
    true
}

/// Takes back the blocks that were dropped during recordings.
pub(super) fn free_late(gpu: &'static Gpu) {
    let late = std::mem::take(&mut *gpu.late.lock());
    for (home, address, users) in late {
        if defer_free(home, address, users) {
            continue;
        }
        // After an error of the driver, the memory may be in use for ever, and stays allocated.
        if let Ok(events) = last_uses(home, users) {
            home.pool.lock().free_after(gpu, address, events);
        }
    }
}

/// Returns how a kernel finds a draw: its seed and number, and the address of what is added to them in each replay, or 0.
pub(super) fn relative(draw: Draw) -> (Draw, Address) {
    let found = with_recorder(|recorder| {
        let distance = draw.stream.wrapping_sub(recorder.first_draw.stream);
        let is_near = draw.seed == recorder.first_draw.seed && distance < DRAWS;
        is_near.then_some((Draw { seed: 0, stream: distance }, recorder.numbers_at))
    });
    found.flatten().unwrap_or((draw, 0))
}

/// Returns the address of numbers that may change from replay to replay, or 0 if this thread does not record. Their positions are
/// counted by [`recorded_numbers`].
pub(super) fn numbers(numbers: &[f64]) -> Result<Address> {
    let added = with_recorder(|recorder| {
        let start = recorder.numbers.len();
        recorder.numbers.extend(numbers.iter().flat_map(|x| x.to_ne_bytes()));
        if recorder.numbers.len() > NUMBERS {
            return Err(Error::argument("cuda::graph", "one step can make at most 800 optimizer steps"));
        }
        Ok(recorder.numbers_at + start as u64)
    });
    added.unwrap_or(Ok(0))
}

/// Returns how many bytes of changing numbers this thread has recorded.
pub fn recorded_numbers() -> usize {
    with_recorder(|recorder| recorder.numbers.len()).unwrap_or(0)
}

/// Pinned memory with bytes that an upload reads.
pub(super) struct Pinned {
    gpu: &'static Gpu,
    memory: *mut u8,
}

impl Pinned {
    pub(super) fn new(gpu: &'static Gpu, bytes: &[u8]) -> Result<Pinned> {
        let memory = gpu.driver.allocate_pinned(bytes.len())?;
        // SAFETY: the memory has as many bytes, and nothing reads it yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory, bytes.len()) };
        Ok(Pinned { gpu, memory })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the graph that reads it is gone, and has waited for its last replay.
        unsafe { self.gpu.driver.free_pinned(self.memory) };
    }
}
