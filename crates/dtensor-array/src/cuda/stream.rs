//! [`Stream`]: a queue of work for a GPU. Each thread has one per GPU.

use std::any::Any;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::device::{Gpu, MAX_DEVICES, count_wait};
use super::driver::{Address, Handle};
use super::fault::Faults;
use super::fuse::{self, Fusing};
use super::pool::Pool;
use super::{gpu, recorder};
use crate::{Array, DType, Device, Error, Result, Shape};

/// A queue of work for a GPU: kernels and copies run in the order in which they are queued.
pub(crate) struct Stream {
    pub(crate) gpu: &'static Gpu,
    pub(crate) handle: Handle,
    /// The number of streams of the GPU that are older.
    pub(crate) index: usize,
    pub(super) pool: Mutex<Pool>,
    staging: Mutex<Vec<Staging>>,
    faults: Faults,
    /// The element-wise work that is not queued yet.
    pub(super) fusing: Mutex<Fusing>,
    /// What the driver keeps for matrix products on this stream.
    pub(super) library: Mutex<Option<Box<dyn Any + Send>>>,
    /// The number of the recording that this stream takes part in, or 0.
    pub(super) recording: AtomicU32,
    /// If a communicator uses this stream: who reads what it writes.
    readers: Mutex<Option<Readers>>,
}

/// The streams that read results of a communicator, by their indices, and the error of those results, if they have failed.
#[derive(Default)]
struct Readers {
    streams: Vec<usize>,
    error: Option<Error>,
}

/// Pinned memory that a copy to the GPU reads until its event has happened.
struct Staging {
    memory: *mut u8,
    bytes: usize,
    event: Handle,
}

// SAFETY: the memory belongs to this value alone, and is written only under the stream's lock.
unsafe impl Send for Staging {}

impl Stream {
    /// Creates a stream on the current GPU.
    pub(super) fn new(gpu: &'static Gpu, index: usize) -> Result<Stream> {
        Ok(Stream {
            gpu,
            handle: gpu.driver.create_stream()?,
            index,
            pool: Mutex::default(),
            staging: Mutex::default(),
            faults: Faults::new(gpu)?,
            fusing: Mutex::default(),
            library: Mutex::default(),
            recording: AtomicU32::new(0),
            readers: Mutex::default(),
        })
    }

    /// Makes this the stream of a communicator.
    pub(super) fn begin_communication(&self) {
        *self.readers.lock() = Some(Readers::default());
    }

    pub(super) fn end_communication(&self) {
        *self.readers.lock() = None;
    }

    /// Reports an error to all streams that read what this communicator's stream writes, now or later.
    pub(super) fn fail(&self, error: Error) {
        let mut readers = self.readers.lock();
        if let Some(readers) = &mut *readers {
            let is_reader = |stream: &Stream| readers.streams.contains(&stream.index);
            self.gpu.each_stream(|stream| {
                if is_reader(stream) {
                    stream.faults.report(error.clone());
                }
            });
            readers.error = Some(error);
        }
    }

    /// Adds a stream to those that read what this one writes, if it is a communicator's.
    fn add_reader(&self, reader: &Stream) -> Result<()> {
        let mut readers = self.readers.lock();
        let Some(Readers { streams, error }) = &mut *readers else { return Ok(()) };
        if !streams.contains(&reader.index) {
            streams.push(reader.index);
        }
        error.clone().map_or(Ok(()), Err)
    }

    /// Returns true while work of this stream is recorded, not run.
    #[inline]
    pub(crate) fn is_recorded(&self) -> bool {
        self.recording.load(Ordering::Relaxed) != 0
    }

    /// Waits until all work queued so far is done.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.expect_running("waiting for the GPU")?;
        count_wait();
        self.gpu.enter()?;
        self.gpu.driver.synchronize(self.handle)
    }

    /// Makes the later work of this stream wait for what is queued on another stream so far.
    pub(crate) fn wait_for(&self, other: &Stream) -> Result<()> {
        if std::ptr::eq(self, other) {
            return Ok(());
        }
        other.add_reader(self)?;
        self.gpu.enter()?;
        if (self.is_recorded() || other.is_recorded()) && recorder::has_waited(self, other)? {
            return Ok(());
        }
        other.gpu.with_event(|event| {
            other.gpu.driver.record(event, other.handle)?;
            self.gpu.driver.wait(self.handle, event)
        })
    }

    /// Returns the errors that kernels of this stream have found so far, if any: an index out of bounds, for example.
    #[inline]
    pub(crate) fn check_faults(&self) -> Result<()> {
        self.faults.take()
    }

    /// Returns the address where a kernel reports invalid values, and the number that identifies it as an operator of the line
    /// that is running.
    pub(crate) fn fault_site(&self, op: &'static str) -> (Address, u32) {
        self.faults.site(op)
    }

    /// Creates an array whose elements a kernel will write.
    pub(crate) fn empty(&'static self, dtype: DType, shape: &[usize]) -> Result<Array> {
        let shape = Shape::from(shape);
        let storage = super::CudaStorage::new(self, dtype, shape.numel())?;
        Ok(Array::from_cuda(storage, shape))
    }

    /// Returns the address of the first element of an array on this GPU, for reading by work of this stream.
    #[inline]
    pub(crate) fn read(&self, x: &Array) -> Result<Address> {
        let storage = x.cuda_storage()?;
        Ok(storage.address(self)? + (x.offset() * x.dtype().size()) as u64)
    }

    /// Returns an error if this stream is recorded, because `what` cannot be.
    #[inline]
    pub(crate) fn expect_running(&self, what: &'static str) -> Result<()> {
        if self.is_recorded() { Err(recorder::refuse(what)) } else { Ok(()) }
    }

    /// Copies bytes from main memory to the GPU. Waits for nothing. A recording keeps the bytes and copies them in each replay.
    pub(crate) fn upload(&self, target: Address, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.gpu.enter()?;
        if self.is_recorded() {
            return recorder::record_upload(self, target, bytes);
        }
        let driver = self.gpu.driver;
        let mut staging = self.staging.lock();
        let free = |part: &Staging| part.bytes >= bytes.len() && part.bytes <= bytes.len().max(4096) * 4;
        let mut found = None;
        for (i, part) in staging.iter().enumerate() {
            if free(part) && driver.has_happened(part.event)? {
                found = Some(i);
                break;
            }
        }
        let part = match found {
            Some(i) => staging.swap_remove(i),
            None => {
                let size = bytes.len().next_power_of_two().max(4096);
                Staging { memory: driver.allocate_pinned(size)?, bytes: size, event: driver.create_event()? }
            }
        };
        // SAFETY: the memory has at least as many bytes, and no copy reads it any more: its event has happened. It stays
        // as it is until the event recorded here has happened.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), part.memory, bytes.len());
            driver.copy_to_device(target, part.memory, bytes.len(), self.handle)?;
        }
        driver.record(part.event, self.handle)?;
        // Large buffers are rare (weights that are loaded), and are not kept.
        let is_large = part.bytes > 64 << 20;
        if is_large {
            driver.synchronize(self.handle)?;
            // SAFETY: the copy is done.
            unsafe { driver.free_pinned(part.memory) };
            self.gpu.return_event(part.event);
        } else {
            staging.push(part);
        }
        Ok(())
    }

    /// Copies bytes from the GPU to main memory. Waits for this stream, and returns the errors that its kernels have found.
    ///
    /// # Safety
    /// `target` must be writable and `source` readable for `bytes`.
    pub(crate) unsafe fn download(&self, target: *mut u8, source: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            // A kernel may still find a fault.
            self.synchronize()?;
            return self.check_faults();
        }
        self.expect_running("reading a value")?;
        count_wait();
        self.gpu.enter()?;
        // SAFETY: the caller guarantees both ranges.
        unsafe { self.gpu.driver.copy_to_host(target, source, bytes, self.handle)? };
        self.check_faults()?;
        // What is read may depend on what this thread's other stream has read of a communicator.
        let other = COMMUNICATION.try_with(|streams| streams.0[self.gpu.ordinal].get());
        other.ok().flatten().map_or(Ok(()), Stream::check_faults)
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({} of {})", self.index, self.gpu.device())
    }
}

/// The streams of a thread, which others may use after it has ended.
struct Streams([Cell<Option<&'static Stream>>; MAX_DEVICES]);

impl Drop for Streams {
    fn drop(&mut self) {
        for stream in self.0.iter().filter_map(Cell::get) {
            stream.gpu.idle.lock().push(stream);
        }
    }
}

thread_local! {
    static STREAMS: Streams = const { Streams([const { Cell::new(None) }; MAX_DEVICES]) };
    /// The streams for communication.
    static COMMUNICATION: Streams = const { Streams([const { Cell::new(None) }; MAX_DEVICES]) };
    /// The stream that was used last.
    static CURRENT: Cell<Option<&'static Stream>> = const { Cell::new(None) };
}

/// Returns this thread's stream of a GPU.
#[inline]
pub(crate) fn current_stream(gpu: &'static Gpu) -> Result<&'static Stream> {
    match CURRENT.get() {
        Some(stream) if std::ptr::eq(stream.gpu, gpu) => Ok(stream),
        _ => switch(gpu),
    }
}

#[cold]
fn switch(gpu: &'static Gpu) -> Result<&'static Stream> {
    gpu.enter()?;
    let known = STREAMS.try_with(|streams| streams.0[gpu.ordinal].get());
    let stream = match known {
        Ok(Some(stream)) => stream,
        Ok(None) => {
            let stream = gpu.take_stream()?;
            STREAMS.with(|streams| streams.0[gpu.ordinal].set(Some(stream)));
            stream
        }
        // The thread is ending: arrays in its thread-locals are dropped.
        Err(_) => return gpu.take_stream(),
    };
    CURRENT.set(Some(stream));
    Ok(stream)
}

/// Returns this thread's stream of a GPU for communication, if it has been used.
pub(super) fn communication_stream(gpu: &'static Gpu) -> Option<&'static Stream> {
    COMMUNICATION.with(|streams| streams.0[gpu.ordinal].get())
}

/// Runs `body` with this thread's second stream of a GPU, the one for communication, as its current one. So its work may run at the same
/// time as the thread's other work.
pub(crate) fn on_communication_stream<R>(gpu: &'static Gpu, body: impl FnOnce() -> R) -> Result<R> {
    let known = COMMUNICATION.with(|streams| streams.0[gpu.ordinal].get());
    let stream = match known {
        Some(stream) => stream,
        None => {
            let stream = gpu.take_stream()?;
            COMMUNICATION.with(|streams| streams.0[gpu.ordinal].set(Some(stream)));
            stream
        }
    };
    on_stream(stream, body)
}

/// Runs `body` with a stream as the current one.
pub(super) fn on_stream<R>(stream: &'static Stream, body: impl FnOnce() -> R) -> Result<R> {
    /// Restores the current stream, also after a panic.
    struct Restore(Option<&'static Stream>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    recorder::join(stream)?;
    let _restore = Restore(CURRENT.replace(Some(stream)));
    // Communication starts as soon as it can.
    Ok(fuse::fuse(false, body))
}

/// Calls `f` with each stream of this thread.
pub(super) fn each_stream_of_thread(mut f: impl FnMut(&'static Stream)) {
    let streams = STREAMS.try_with(|streams| streams.0.each_ref().map(Cell::get));
    streams.into_iter().flatten().flatten().for_each(&mut f);
}

/// Returns this thread's stream of the GPU that holds an array.
#[inline]
pub(crate) fn stream_of(x: &Array) -> Result<&'static Stream> {
    let gpu = x.cuda_storage()?.gpu();
    current_stream(gpu)
}

/// Returns this thread's stream of a device, which must be a GPU.
pub(crate) fn stream_on(device: Device) -> Result<&'static Stream> {
    match device {
        Device::Cuda(ordinal) => current_stream(gpu(ordinal)?),
        device => Err(Error::argument("cuda", format!("expected a GPU, but got {device}"))),
    }
}
