//! Stream capture in the emulator: records the work queued between `begin_capture` and `end_capture`, and replays it.
//!
//! The rules are CUDA's: a stream joins a recording by waiting for an event of a stream that is recorded, must be waited for before the
//! recording ends, and can neither be waited for on the host nor wait for work outside of the recording.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::driver::{Address, Handle, failed};
use crate::Result;

/// What a kernel gets besides its argument. Must match `Launch` in `kernels/emulator.h`.
#[repr(C)]
pub(super) struct Launch {
    pub(super) grid: [u32; 3],
    pub(super) block: u32,
    pub(super) shared_bytes: u32,
}

pub(super) type Kernel = unsafe extern "C" fn(*const Launch, *const c_void);

/// Work on a stream.
pub(super) enum Work {
    /// A kernel and a copy of its argument, in words as aligned as any argument.
    Kernel(Kernel, Launch, Vec<u128>),
    Copy {
        target: Address,
        source: Address,
        bytes: usize,
    },
    Zero {
        target: Address,
        bytes: usize,
    },
}

impl Work {
    /// Copies the argument of a kernel.
    ///
    /// # Safety
    /// The argument must be readable for `bytes`.
    pub(super) unsafe fn kernel(
        kernel: Kernel,
        launch: Launch,
        (argument, bytes): (*const c_void, usize),
    ) -> Work {
        let mut words = vec![0u128; bytes.div_ceil(16)];
        // SAFETY: the caller guarantees the source, and the target is large enough.
        unsafe { std::ptr::copy_nonoverlapping(argument.cast::<u8>(), words.as_mut_ptr().cast(), bytes) };
        Work::Kernel(kernel, launch, words)
    }

    /// Does the work.
    ///
    /// # Safety
    /// All addresses must be valid for it.
    unsafe fn run(&self) {
        // SAFETY: the caller guarantees the addresses.
        unsafe {
            match self {
                Work::Kernel(kernel, launch, argument) => kernel(launch, argument.as_ptr().cast()),
                &Work::Copy { target, source, bytes } => {
                    std::ptr::copy(source as *const u8, target as *mut u8, bytes);
                }
                &Work::Zero { target, bytes } => std::ptr::write_bytes(target as *mut u8, 0, bytes),
            }
        }
    }
}

/// How much work of each stream comes before a point.
type Clock = HashMap<Handle, usize>;

struct Capture {
    origin: Handle,
    work: Vec<Work>,
    /// The streams that take part, and what comes before their next work.
    streams: HashMap<Handle, Clock>,
}

/// The recordings that have begun.
#[derive(Default)]
pub(super) struct Captures {
    /// False until the first recording, so that other work needs no lock.
    any: AtomicBool,
    all: Mutex<(Vec<Capture>, Events)>,
}

/// Events that were recorded: the origin of the recording, and what comes before the event.
type Events = HashMap<Handle, (Handle, Clock)>;

impl Captures {
    pub(super) fn begin(&self, stream: Handle) -> Result<()> {
        self.any.store(true, Ordering::Release);
        let (captures, _) = &mut *self.all.lock();
        if captures.iter().any(|capture| capture.streams.contains_key(&stream)) {
            return Err(failed("begin_capture", "the stream is recorded already"));
        }
        let streams = HashMap::from([(stream, Clock::new())]);
        captures.push(Capture { origin: stream, work: Vec::new(), streams });
        Ok(())
    }

    pub(super) fn end(&self, stream: Handle) -> Result<Vec<Work>> {
        let (captures, _) = &mut *self.all.lock();
        let Some(at) = captures.iter().position(|capture| capture.origin == stream) else {
            return Err(failed("end_capture", "the stream is not recorded"));
        };
        let Capture { work, streams, .. } = captures.swap_remove(at);
        let own = |stream: &Handle| streams[stream].get(stream).copied().unwrap_or(0);
        let known = |other: &Handle| streams[&stream].get(other).copied().unwrap_or(0);
        if streams.keys().any(|other| known(other) < own(other)) {
            return Err(failed("end_capture", "a stream that joined the recording was not waited for"));
        }
        Ok(work)
    }

    /// Adds work to the recording of its stream, if there is one, or returns it.
    pub(super) fn add(&self, stream: Handle, work: impl FnOnce() -> Work) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let (captures, _) = &mut *self.all.lock();
        for capture in captures {
            if let Some(clock) = capture.streams.get_mut(&stream) {
                *clock.entry(stream).or_default() += 1;
                capture.work.push(work());
                return true;
            }
        }
        false
    }

    pub(super) fn record(&self, event: Handle, stream: Handle) {
        let (captures, events) = &mut *self.all.lock();
        events.remove(&event);
        for capture in captures {
            if let Some(clock) = capture.streams.get(&stream) {
                events.insert(event, (capture.origin, clock.clone()));
            }
        }
    }

    pub(super) fn wait(&self, stream: Handle, event: Handle) -> Result<()> {
        let (captures, events) = &mut *self.all.lock();
        let origin = captures.iter().find(|capture| capture.streams.contains_key(&stream));
        let origin = origin.map(|capture| capture.origin);
        match events.get(&event) {
            None if origin.is_none() => Ok(()),
            None => Err(failed("wait", "a recorded stream cannot wait for work outside of the recording")),
            Some((of, _)) if origin.is_some_and(|origin| origin != *of) => {
                Err(failed("wait", "two recordings cannot wait for each other"))
            }
            Some((of, known)) => {
                let Some(capture) = captures.iter_mut().find(|capture| capture.origin == *of) else {
                    return Err(failed("wait", "the recording of the event has ended"));
                };
                let clock = capture.streams.entry(stream).or_default();
                for (&other, &count) in known {
                    let mine = clock.entry(other).or_default();
                    *mine = count.max(*mine);
                }
                Ok(())
            }
        }
    }

    /// Returns an error if the stream is recorded: the host cannot wait for it.
    pub(super) fn expect_running(&self, call: &str, stream: Handle) -> Result<()> {
        let is_recorded = self.any.load(Ordering::Acquire)
            && self.all.lock().0.iter().any(|capture| capture.streams.contains_key(&stream));
        if is_recorded { Err(failed(call, "the stream is recorded")) } else { Ok(()) }
    }

    /// Returns an error if the event is part of a recording: it never happens.
    pub(super) fn expect_real(&self, event: Handle) -> Result<()> {
        let is_recorded = self.any.load(Ordering::Acquire) && self.all.lock().1.contains_key(&event);
        if is_recorded { Err(failed("has_happened", "the event was recorded")) } else { Ok(()) }
    }
}

/// Runs recorded work.
///
/// # Safety
/// All addresses must be valid for it.
pub(super) unsafe fn replay(work: &[Work]) {
    for work in work {
        // SAFETY: the caller guarantees the addresses.
        unsafe { work.run() };
    }
}
