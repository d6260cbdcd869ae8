//! [`Gpu`]: a GPU, found at first use, and the registry of all of them.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::driver::{Address, Driver, Handle, Info};
use super::pool::{MemoryStats, Usage};
use super::stream::{Stream, on_communication_stream};
use super::{current_stream, fuse, nvidia};
use crate::{Device, Error, Result};

/// The most GPUs that are used.
pub(crate) const MAX_DEVICES: usize = 16;

/// A GPU.
pub(crate) struct Gpu {
    pub(crate) ordinal: usize,
    pub(crate) driver: &'static dyn Driver,
    pub(crate) info: Info,
    /// The memory in use, of all streams together.
    pub(crate) usage: Usage,
    /// All streams, in the order of their indices.
    streams: Mutex<Vec<&'static Stream>>,
    /// Streams of threads that have ended.
    pub(super) idle: Mutex<Vec<&'static Stream>>,
    /// Events that are not in use.
    events: Mutex<Vec<Handle>>,
    /// Blocks that were dropped while a stream that has used them was recorded: the home stream, the address, and the users.
    pub(super) late: Mutex<Vec<(&'static Stream, Address, u64)>>,
}

impl Gpu {
    /// Makes this the current GPU of the thread.
    #[inline]
    pub(crate) fn enter(&self) -> Result<()> {
        if ENTERED.get() != self.ordinal {
            self.driver.enter(self.ordinal)?;
            ENTERED.set(self.ordinal);
        }
        Ok(())
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    /// Returns a stream that no thread uses, or a new one.
    pub(super) fn take_stream(&'static self) -> Result<&'static Stream> {
        self.enter()?;
        let idle = self.idle.lock().pop();
        if let Some(stream) = idle {
            // What the thread before has left behind is no error of this one.
            self.driver.synchronize(stream.handle)?;
            let _ = stream.check_faults();
            return Ok(stream);
        }
        let mut streams = self.streams.lock();
        let stream: &'static Stream = Box::leak(Box::new(Stream::new(self, streams.len())?));
        streams.push(stream);
        Ok(stream)
    }

    /// Calls `f` with every stream.
    pub(crate) fn each_stream(&self, mut f: impl FnMut(&'static Stream)) {
        let streams = self.streams.lock().clone();
        streams.into_iter().for_each(&mut f);
    }

    /// Calls `f` with an event that is not in use.
    pub(crate) fn with_event<R>(&self, f: impl FnOnce(Handle) -> Result<R>) -> Result<R> {
        let event = self.take_event()?;
        let result = f(event);
        self.return_event(event);
        result
    }

    pub(crate) fn take_event(&self) -> Result<Handle> {
        if let Some(event) = self.events.lock().pop() {
            return Ok(event);
        }
        self.enter()?;
        self.driver.create_event()
    }

    pub(crate) fn return_event(&self, event: Handle) {
        self.events.lock().push(event);
    }
}

thread_local! {
    /// The GPU that this thread's driver calls act on.
    static ENTERED: Cell<usize> = const { Cell::new(usize::MAX) };
    /// How often this thread has waited for a GPU.
    static WAITS: Cell<usize> = const { Cell::new(0) };
    /// How many kernels this thread has queued.
    static LAUNCHES: Cell<usize> = const { Cell::new(0) };
}

struct Gpus {
    gpus: Vec<Gpu>,
    /// The reason, if there are none.
    why_none: Option<String>,
}

/// Finds the GPUs, once.
fn gpus() -> &'static Gpus {
    static GPUS: OnceLock<Gpus> = OnceLock::new();
    GPUS.get_or_init(|| {
        let found = nvidia::find();
        #[cfg(feature = "cuda-emulator")]
        let found = found.or_else(|_| super::emulator::find());
        let gpus = found.and_then(|driver| {
            let gpu = |ordinal| {
                let info = driver.info(ordinal).map_err(|error| error.to_string())?;
                Ok(Gpu {
                    ordinal,
                    driver,
                    info,
                    usage: Usage::default(),
                    streams: Mutex::default(),
                    idle: Mutex::default(),
                    events: Mutex::default(),
                    late: Mutex::default(),
                })
            };
            (0..driver.count().min(MAX_DEVICES)).map(gpu).collect::<std::result::Result<Vec<Gpu>, String>>()
        });
        match gpus {
            Ok(gpus) => Gpus { gpus, why_none: None },
            Err(why) => Gpus { gpus: Vec::new(), why_none: Some(why) },
        }
    })
}

/// Returns a GPU, or an error that says why there is none.
#[inline]
pub(crate) fn gpu(ordinal: usize) -> Result<&'static Gpu> {
    let all = gpus();
    all.gpus.get(ordinal).ok_or_else(|| no_gpu(ordinal, all))
}

#[cold]
fn no_gpu(ordinal: usize, all: &Gpus) -> Error {
    let why = match (&all.why_none, all.gpus.len()) {
        (Some(why), _) => why.clone(),
        (None, 0) => "the driver finds no GPU".into(),
        (None, 1) => "there is one GPU, cuda:0".into(),
        (None, n) => format!("there are {n} GPUs, cuda:0 to cuda:{}", n - 1),
    };
    Error::argument("device", format!("cuda:{ordinal} is not available: {why}"))
}

/// Returns true if there is a GPU that can be used.
pub fn is_available() -> bool {
    device_count() > 0
}

/// Returns the number of GPUs that can be used.
pub fn device_count() -> usize {
    gpus().gpus.len()
}

/// Returns the name of a GPU, such as `NVIDIA H200`. Returns an error if there is no such GPU.
pub fn device_name(device: Device) -> Result<String> {
    match device {
        Device::Cuda(ordinal) => Ok(gpu(ordinal)?.info.name.clone()),
        device => Err(Error::argument("device_name", format!("expected a GPU, but got {device}"))),
    }
}

/// Waits until the GPU has done all work that this thread has queued, and returns the error of that work, if any: an index out of
/// bounds, for example.
pub fn synchronize(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => {
            let stream = current_stream(gpu(ordinal)?)?;
            stream.expect_running("waiting for the GPU")?;
            fuse::flush_stream(stream)?;
            on_communication_stream(stream.gpu, || {
                stream.gpu.driver.synchronize(current_stream(stream.gpu)?.handle)
            })??;
            stream.synchronize()?;
            stream.check_faults()
        }
        _ => Ok(()),
    }
}

/// Returns how the memory of a GPU is used, after this thread's element-wise work has been queued. Returns an error if there is no
/// such GPU.
pub fn memory_stats(device: Device) -> Result<MemoryStats> {
    match device {
        Device::Cuda(ordinal) => {
            let gpu = gpu(ordinal)?;
            fuse::flush_stream(current_stream(gpu)?)?;
            Ok(gpu.usage.stats())
        }
        device => Err(Error::argument("memory_stats", format!("expected a GPU, but got {device}"))),
    }
}

/// Makes [`MemoryStats::peak_allocated`] count from what is in use now. Returns an error if there is no such GPU.
pub fn reset_peak_memory_stats(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => {
            gpu(ordinal)?.usage.reset_peak();
            Ok(())
        }
        device => {
            Err(Error::argument("reset_peak_memory_stats", format!("expected a GPU, but got {device}")))
        }
    }
}

/// Returns how often the calling thread has waited for a GPU: for each copy to main memory, and each [`synchronize`].
#[doc(hidden)]
pub fn waits_of_this_thread() -> usize {
    WAITS.get()
}

pub(super) fn count_wait() {
    WAITS.set(WAITS.get() + 1);
}

/// Returns how many kernels the calling thread has queued, without those of libraries. Work that is [pending](fuse) does not count yet.
#[doc(hidden)]
pub fn launches_of_this_thread() -> usize {
    LAUNCHES.get()
}

pub(super) fn count_launch() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// A counter that threads share.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicUsize);

impl Counter {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, value: usize) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(super) fn raise_to(&self, value: usize) {
        self.0.fetch_max(value, Ordering::Relaxed);
    }

    pub(super) fn add(&self, n: usize) -> usize {
        self.0.fetch_add(n, Ordering::Relaxed).wrapping_add(n)
    }

    pub(super) fn subtract(&self, n: usize) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }
}
