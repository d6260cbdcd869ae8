//! NCCL: communication between GPUs, one rank per GPU.
//!
//! A [`Communicator`] is one rank's end of a group. It has a stream of its own, on which its transfers run beside the other work
//! of the GPU. [`communicate`] queues transfers and does not wait. A thread (`watchdog.rs`) looks after them: if they do not finish, it
//! aborts the communicators, and those who read the results get an error.

mod bindings;
#[cfg(feature = "cuda-emulator")]
pub mod emulator;
pub(super) mod library;
mod watchdog;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub(crate) use self::bindings::Nccl;
pub use self::bindings::UniqueId;
use self::bindings::{Kind, Queued};
pub use self::watchdog::{OnFailure, Watch};
use super::driver::{Handle, failed};
use super::{Stream, gpu, on_stream};
use crate::{Array, DType, Device, Error, ReduceOp, Result};

/// When collectives of ranks that have a GPU each go through NCCL: the environment variable `DTENSOR_NCCL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// `auto`, the default: if the library is found and the ranks of a group have different GPUs.
    Auto,
    /// `off`: never.
    Off,
    /// `force`: always, also for groups of one rank. It is an error if NCCL cannot be used.
    Force,
}

/// Returns when collectives go through NCCL.
pub fn usage() -> Result<Usage> {
    static USAGE: OnceLock<Result<Usage>> = OnceLock::new();
    let read = || match std::env::var("DTENSOR_NCCL").as_deref() {
        Err(_) | Ok("auto") => Ok(Usage::Auto),
        Ok("off") => Ok(Usage::Off),
        Ok("force") => Ok(Usage::Force),
        Ok(text) => {
            Err(Error::argument("DTENSOR_NCCL", format!("expected auto, off or force, but got {text:?}")))
        }
    };
    USAGE.get_or_init(read).clone()
}

/// Returns the library, or an error that says why it cannot be used.
fn nccl() -> Result<&'static dyn Nccl> {
    gpu(0)?.driver.nccl()
}

/// Returns an error that says why NCCL cannot be used in this process, if so.
pub fn check_available() -> Result<()> {
    nccl().map(drop)
}

/// Returns the version of the library, such as `2.27.3`.
pub fn version() -> Result<String> {
    let version = nccl()?.version()?;
    Ok(format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100))
}

/// Creates the id of a new group of communicators. One rank creates it, and all of them join with it.
pub fn unique_id() -> Result<UniqueId> {
    nccl()?.unique_id()
}

/// Returns what identifies a GPU among all GPUs of all machines.
pub fn identity(device: Device) -> Result<[u8; 16]> {
    match device {
        Device::Cuda(ordinal) => {
            let gpu = gpu(ordinal)?;
            gpu.driver.identity(gpu.ordinal)
        }
        device => Err(Error::argument("nccl", format!("expected a GPU, but got {device}"))),
    }
}

/// One rank's end of a group of ranks that have a GPU each.
pub struct Communicator {
    nccl: &'static dyn Nccl,
    handle: Handle,
    stream: &'static Stream,
    size: usize,
    aborted: AtomicBool,
}

impl Communicator {
    /// Joins a group of `size` ranks as some of them, each given by its number and its GPU. Waits for the ranks that other threads and
    /// processes join as.
    pub fn join(id: &UniqueId, size: usize, ranks: &[(usize, Device)]) -> Result<Vec<Arc<Communicator>>> {
        let nccl = nccl()?;
        let mut seats = Vec::with_capacity(ranks.len());
        for &(rank, device) in ranks {
            let Device::Cuda(ordinal) = device else {
                return Err(Error::argument("nccl", format!("expected a GPU, but got {device}")));
            };
            seats.push((rank, gpu(ordinal)?));
        }
        let handles = nccl.join(id, size, &seats)?;
        let communicator = |(handle, (_, gpu)): (Handle, (usize, &'static super::device::Gpu))| {
            let stream = gpu.take_stream()?;
            stream.begin_communication();
            Ok(Arc::new(Communicator { nccl, handle, stream, size, aborted: AtomicBool::new(false) }))
        };
        handles.into_iter().zip(seats).map(communicator).collect()
    }

    /// Returns the GPU.
    pub fn device(&self) -> Device {
        self.stream.gpu.device()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Runs `body` with the communicator's stream as the current one of its GPU: kernels that `body` queues run there, and arrays that
    /// it creates are written there.
    pub fn run<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        self.stream.gpu.enter()?;
        on_stream(self.stream, body)
    }

    /// Creates an array for a transfer to write.
    pub fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Array> {
        self.stream.empty(dtype, shape)
    }

    /// Ends all transfers without their results. All later ones are errors.
    pub fn abort(&self) {
        if !self.aborted.swap(true, Ordering::SeqCst) {
            let (nccl, handle, stream) = (self.nccl, self.handle, self.stream);
            // The library may wait for its kernels to end.
            detach(nccl, move || nccl.abort(handle, stream));
        }
    }

    fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }
}

/// The number of threads that run work of the library, and whether the process is ending.
static DETACHED: AtomicUsize = AtomicUsize::new(0);
static IS_ENDING: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> std::ffi::c_int;
}

/// Stops the watchdog and lets the threads that run work of the library finish before the process unloads it. After that, communicators leak.
extern "C" fn finish_detached() {
    if IS_ENDING.swap(true, Ordering::SeqCst) {
        return;
    }
    watchdog::stop();
    let began = Instant::now();
    while DETACHED.load(Ordering::SeqCst) > 0 && began.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Has the end of the process wait for work of the library. Called whenever such work begins: what is registered last runs first, so
/// before the driver and the library, which register while they work, are torn down.
fn expect_end() {
    // SAFETY: the function takes no arguments and lives as long as the program.
    unsafe { atexit(finish_detached) };
}

/// Runs work of the library that may wait for other ranks, on a thread if so.
fn detach(nccl: &'static dyn Nccl, work: impl FnOnce() + Send + 'static) {
    if !nccl.waits_for_others() {
        return work();
    }
    expect_end();
    /// Counts the thread, also if it panics.
    struct Counted;
    impl Drop for Counted {
        fn drop(&mut self) {
            DETACHED.fetch_sub(1, Ordering::SeqCst);
        }
    }
    DETACHED.fetch_add(1, Ordering::SeqCst);
    let counted = Counted;
    if IS_ENDING.load(Ordering::SeqCst) {
        return;
    }
    let run = move || {
        let _counted = counted;
        work();
    };
    drop(std::thread::Builder::new().name("nccl".into()).spawn(run));
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let (nccl, handle, stream, aborted) = (self.nccl, self.handle, self.stream, self.is_aborted());
        detach(nccl, move || {
            // After an abort, work that was queued behind the transfers may still run.
            let done = stream.gpu.enter().and_then(|()| stream.gpu.driver.synchronize(stream.handle));
            if !aborted {
                nccl.destroy(handle);
            }
            stream.end_communication();
            if done.is_ok() {
                stream.gpu.idle.lock().push(stream);
            }
        });
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator({} of {} ranks)", self.device(), self.size)
    }
}

/// What one rank does in a collective. All arrays are contiguous and on the rank's GPU. Ranks of a group must queue matching transfers.
#[derive(Debug)]
pub enum Transfer {
    /// Reduces the arrays of all ranks into an array of each.
    AllReduce(ReduceOp, Array, Array),
    /// Reduces the arrays of all ranks and writes one slice of equal size on each.
    ReduceScatter(ReduceOp, Array, Array),
    /// Reduces the arrays of all ranks into an array of this rank, which must be given there.
    Reduce(ReduceOp, usize, Array, Option<Array>),
    /// Concatenates the arrays of all ranks, of equal size.
    AllGather(Array, Array),
    /// Copies the first array of this rank into the second arrays of all ranks. They may be the same array.
    Broadcast(usize, Array, Array),
    /// Sends an array to a rank.
    Send(usize, Array),
    /// Receives an array from a rank.
    Receive(usize, Array),
}

impl Transfer {
    /// Returns the transfer for the library, or `None` if it moves nothing. The stream will wait for the arrays.
    fn queued(&self, stream: &Stream) -> Result<Option<Queued>> {
        let (kind, from, to) = match self {
            Transfer::AllReduce(op, from, to) => (Kind::AllReduce(*op), Some(from), Some(to)),
            Transfer::ReduceScatter(op, from, to) => (Kind::ReduceScatter(*op), Some(from), Some(to)),
            Transfer::Reduce(op, root, from, to) => (Kind::Reduce(*op, *root), Some(from), to.as_ref()),
            Transfer::AllGather(from, to) => (Kind::AllGather, Some(from), Some(to)),
            Transfer::Broadcast(root, from, to) => (Kind::Broadcast(*root), Some(from), Some(to)),
            Transfer::Send(peer, from) => (Kind::Send(*peer), Some(from), None),
            Transfer::Receive(peer, to) => (Kind::Receive(*peer), None, Some(to)),
        };
        let address = |x: Option<&Array>| match x {
            Some(x) if !x.is_contiguous() => Err(failed("nccl", "expected contiguous arrays")),
            Some(x) => stream.read(x),
            None => Ok(0),
        };
        // The number of elements on one rank, of the smaller side.
        let count = match (from, to) {
            (Some(from), Some(to)) => from.numel().min(to.numel()),
            (one, other) => one.or(other).map_or(0, Array::numel),
        };
        let (from, to, dtype) = (address(from)?, address(to)?, from.or(to).map(Array::dtype));
        Ok(dtype.filter(|_| count > 0).map(|dtype| Queued { kind, from, to, count, dtype }))
    }
}

/// Queues the transfers of some ranks of a group, which run together, and returns without waiting for them. `watch` says what happens
/// if they do not finish.
pub fn communicate(ranks: &[(&Arc<Communicator>, Vec<Transfer>)], watch: Watch) -> Result<()> {
    // Transfers of several groups begin in the same order on all GPUs of this process, or two of them could wait for each other.
    static ORDER: Mutex<()> = Mutex::new(());
    let mut all = Vec::new();
    for (rank, transfers) in ranks {
        if rank.is_aborted() {
            return Err(failed("nccl", "the communicator has been aborted"));
        }
        rank.stream.gpu.enter()?;
        for transfer in transfers {
            all.extend(transfer.queued(rank.stream)?.map(|queued| (rank, queued)));
        }
    }
    let Some((first, _)) = all.first() else { return Ok(()) };
    let nccl = first.nccl;
    let _order = ORDER.lock();
    let flight = watchdog::begin(ranks.iter().map(|(rank, _)| Arc::clone(rank)).collect(), watch)?;
    let queue = || {
        nccl.group_start()?;
        let mut result = Ok(());
        for (rank, queued) in &all {
            // SAFETY: the arrays have at least as many elements, on this GPU. The stream has waited for what wrote them, and their memory
            // is not used again before the stream has done this.
            result = result.and_then(|()| unsafe { nccl.queue(rank.handle, queued, rank.stream.handle) });
        }
        // A group ends also after an error.
        let ended = nccl.group_end();
        result.and(ended)
    };
    flight.end(queue())
}

#[cfg(test)]
mod tests;
