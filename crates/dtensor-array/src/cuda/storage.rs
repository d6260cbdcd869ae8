//! [`CudaStorage`]: memory of a GPU behind arrays.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::device::Gpu;
use super::driver::{Address, Handle};
use super::pool::out_of_memory;
use super::recorder;
use super::stream::Stream;
use crate::memory::Purpose;
use crate::{DType, Result};

/// The bit of all streams whose index is not smaller.
const OTHERS: usize = 63;

/// Memory of a GPU, of one element type.
pub(crate) struct CudaStorage {
    address: Address,
    bytes: usize,
    pub(crate) dtype: DType,
    /// The number of elements.
    pub(crate) len: usize,
    /// The stream whose pool the memory belongs to.
    home: &'static Stream,
    /// The stream that wrote the memory last.
    writer: &'static Stream,
    /// The streams that have used the memory since then, as bits by their index. They have waited for the writer.
    users: AtomicU64,
    purpose: AtomicU8,
    /// Whether there is a storage at the address, for graphs that use the memory.
    mark: OnceLock<Mark>,
    /// The number of the recording that created this, or 0.
    recording: u32,
}

/// True as long as a storage lives.
pub(super) type Mark = Arc<AtomicBool>;

fn bit(stream: &Stream) -> u64 {
    1 << stream.index.min(OTHERS)
}

const PURPOSES: [Purpose; 5] =
    [Purpose::Other, Purpose::Parameter, Purpose::Gradient, Purpose::OptimizerState, Purpose::Gathered];

impl CudaStorage {
    /// Allocates memory that work of this stream will write.
    pub(crate) fn new(stream: &'static Stream, dtype: DType, len: usize) -> Result<CudaStorage> {
        let gpu = stream.gpu;
        let (address, bytes) = match len * dtype.size() {
            0 => (0, 0),
            bytes => {
                gpu.enter()?;
                let found = stream.pool.lock().allocate(gpu, stream.handle, bytes)?;
                match found {
                    Some(found) => found,
                    None => retry(stream, bytes)?,
                }
            }
        };
        let recording = stream.recording.load(Ordering::Relaxed);
        Ok(CudaStorage::at(address, bytes, dtype, len, stream, recording, OnceLock::new()))
    }

    fn at(
        address: Address,
        bytes: usize,
        dtype: DType,
        len: usize,
        home: &'static Stream,
        recording: u32,
        mark: OnceLock<Mark>,
    ) -> CudaStorage {
        home.gpu.usage.add(Purpose::Other, bytes);
        let (users, purpose) = (AtomicU64::new(0), AtomicU8::new(Purpose::Other as u8));
        CudaStorage { address, bytes, dtype, len, home, writer: home, users, purpose, mark, recording }
    }

    /// Returns the flag that says whether this storage lives.
    fn mark(&self) -> Mark {
        self.mark.get_or_init(|| Arc::new(AtomicBool::new(true))).clone()
    }

    /// Returns the address, whatever uses it.
    pub(crate) fn start(&self) -> Address {
        self.address
    }

    /// Returns true if a recording created this.
    pub(super) fn is_recorded_by(&self, number: u32) -> bool {
        self.recording == number && self.bytes > 0
    }

    /// Returns true if this is the storage at that memory.
    pub(super) fn is_at(&self, memory: &Memory) -> bool {
        self.mark.get().is_some_and(|mark| Arc::ptr_eq(mark, &memory.mark))
    }

    /// Describes the memory, to create a storage of it again after this one is dropped.
    pub(super) fn memory(&self) -> Memory {
        let &CudaStorage { address, bytes, dtype, len, home, .. } = self;
        Memory { address, bytes, dtype, len, home, mark: self.mark() }
    }

    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.home.gpu
    }

    /// Returns the address, for reading by work of `stream`, which first waits for the writer if that is another stream.
    #[inline]
    pub(crate) fn address(&self, stream: &Stream) -> Result<Address> {
        if !std::ptr::eq(stream, self.writer) || stream.is_recorded() {
            self.order(stream)?;
        }
        Ok(self.address)
    }

    #[cold]
    fn order(&self, stream: &Stream) -> Result<()> {
        if stream.is_recorded() {
            self.note(stream);
            if std::ptr::eq(stream, self.writer) {
                return Ok(());
            }
        }
        let has_waited = self.users.load(Ordering::Acquire) & bit(stream) != 0;
        if !has_waited || stream.index >= OTHERS {
            stream.wait_for(self.writer)?;
            self.users.fetch_or(bit(stream), Ordering::AcqRel);
        }
        Ok(())
    }

    /// Notes the use by a recording, unless it has created this.
    fn note(&self, stream: &Stream) {
        if self.recording != stream.recording.load(Ordering::Relaxed) && self.bytes > 0 {
            recorder::note(self.address, || self.mark());
        }
    }

    /// Returns the address, for writing by work of `stream`, which first waits for all other users.
    pub(crate) fn address_mut(&mut self, stream: &'static Stream) -> Result<Address> {
        if stream.is_recorded() {
            self.note(stream);
        }
        if !std::ptr::eq(stream, self.writer) || *self.users.get_mut() != 0 {
            self.wait_for_users(stream)?;
            // The pool's stream must wait for this one before it uses the memory again.
            self.writer = stream;
            *self.users.get_mut() = 0;
        }
        Ok(self.address)
    }

    /// Makes a stream wait for the writer and all users.
    fn wait_for_users(&self, stream: &Stream) -> Result<()> {
        stream.wait_for(self.writer)?;
        let users = self.users.load(Ordering::Acquire);
        if users != 0 {
            let mut result = Ok(());
            self.gpu().each_stream(|user| {
                if users & bit(user) != 0 && result.is_ok() {
                    result = stream.wait_for(user);
                }
            });
            result?;
        }
        Ok(())
    }

    pub(crate) fn count_as(&self, purpose: Purpose) {
        let before = self.purpose.swap(purpose as u8, Ordering::Relaxed);
        // In this order, a count is never below zero, also if two threads do this at once.
        self.gpu().usage.add(purpose, self.bytes);
        self.gpu().usage.subtract(PURPOSES[before as usize], self.bytes);
    }
}

/// Returns events that happen when the streams of these bits, without the home stream of the memory, have used it.
pub(super) fn last_uses(home: &Stream, users: u64) -> Result<SmallVec<[Handle; 2]>> {
    let gpu = home.gpu;
    gpu.enter()?;
    let mut events = Ok(SmallVec::new());
    gpu.each_stream(|user| {
        if let Ok(list) = &mut events
            && users & bit(user) != 0
            && !std::ptr::eq(user, home)
        {
            let mark = || {
                let event = gpu.take_event()?;
                gpu.driver.record(event, user.handle)?;
                Ok(event)
            };
            match mark() {
                Ok(event) => list.push(event),
                Err(error) => events = Err(error),
            }
        }
    });
    events
}

/// The memory of a storage that may be dropped.
pub(super) struct Memory {
    pub(super) address: Address,
    bytes: usize,
    dtype: DType,
    len: usize,
    home: &'static Stream,
    pub(super) mark: Mark,
}

impl Memory {
    /// Creates a storage of the memory of a recording. Returns `None` if there is one.
    pub(super) fn revive(&self, number: u32) -> Option<CudaStorage> {
        let &Memory { address, bytes, dtype, len, home, ref mark } = self;
        if bytes > 0 && !home.pool.lock().revive(number, address) {
            return None;
        }
        mark.store(true, Ordering::Release);
        Some(CudaStorage::at(address, bytes, dtype, len, home, number, OnceLock::from(mark.clone())))
    }
}

/// Waits until all streams are done, gives the memory that they keep for later back to the driver, and tries again.
#[cold]
fn retry(stream: &'static Stream, bytes: usize) -> Result<(Address, usize)> {
    let gpu = stream.gpu;
    let mut result = Ok(());
    gpu.each_stream(|stream| {
        if result.is_ok() && !stream.is_recorded() {
            result = gpu.driver.synchronize(stream.handle);
        }
    });
    gpu.each_stream(|stream| {
        if result.is_ok() && !stream.is_recorded() {
            result = stream.pool.lock().release(gpu);
        }
    });
    result?;
    let found = stream.pool.lock().allocate(gpu, stream.handle, bytes)?;
    found.ok_or_else(|| out_of_memory(gpu, bytes))
}

impl Drop for CudaStorage {
    fn drop(&mut self) {
        let gpu = self.home.gpu;
        if let Some(mark) = self.mark.get() {
            mark.store(false, Ordering::Release);
        }
        gpu.usage.subtract(PURPOSES[*self.purpose.get_mut() as usize], self.bytes);
        if self.bytes == 0 {
            return;
        }
        // Later work of the home stream may use the memory at once, unless other streams use it.
        if std::ptr::eq(self.home, self.writer) && *self.users.get_mut() == 0 {
            return self.home.pool.lock().free(gpu, self.address);
        }
        let users = *self.users.get_mut() | bit(self.writer);
        if recorder::defer_free(self.home, self.address, users) {
            return;
        }
        // After an error of the driver, the memory may be in use for ever, and stays allocated.
        if let Ok(events) = last_uses(self.home, users) {
            self.home.pool.lock().free_after(gpu, self.address, events);
        }
    }
}

impl std::fmt::Debug for CudaStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaStorage({} {}, {})", self.len, self.dtype, self.gpu().device())
    }
}
