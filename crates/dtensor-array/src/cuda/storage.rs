//! [`CudaStorage`]: memory of a GPU behind arrays.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::device::Gpu;
use super::driver::{Address, Handle};
use super::fuse::{self, Expression};
use super::pool::out_of_memory;
use super::recorder;
use super::stream::Stream;
use crate::memory::Purpose;
use crate::{DType, Result};

/// The bit of all streams whose index is not smaller.
const OTHERS: usize = 63;

/// Memory of a GPU, of one element type.
pub(crate) struct CudaStorage {
    /// The address and its size in bytes, once the elements are computed or being computed.
    memory: OnceLock<(Address, usize)>,
    /// What the elements will be computed from, before that. Changes under the lock of [`fuse`] of the home stream.
    pub(super) pending: Mutex<Option<Box<Expression>>>,
    /// The number of times that the storage is an input of pending expressions.
    pub(super) readers: AtomicU32,
    pub(crate) dtype: DType,
    /// The number of elements.
    pub(crate) len: usize,
    /// The stream whose pool the memory belongs to.
    pub(super) home: &'static Stream,
    /// The stream that wrote the memory last.
    writer: &'static Stream,
    /// The streams that have used the memory since then, as bits by their index. They have waited for the writer.
    users: AtomicU64,
    purpose: AtomicU8,
    /// Whether there is a storage at the address, for graphs that use the memory.
    mark: OnceLock<Mark>,
    /// The number of the recording that created this, or 0.
    recording: AtomicU32,
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
        let memory = allocate(stream, len * dtype.size())?;
        let storage = CudaStorage::without_memory(stream, dtype, len, None, OnceLock::new());
        storage.set_memory(memory);
        Ok(storage)
    }

    /// Creates a storage whose elements are computed from an expression when they are needed, by work of this stream.
    pub(super) fn pending(
        stream: &'static Stream,
        dtype: DType,
        len: usize,
        expression: Box<Expression>,
    ) -> CudaStorage {
        CudaStorage::without_memory(stream, dtype, len, Some(expression), OnceLock::new())
    }

    #[inline]
    fn without_memory(
        home: &'static Stream,
        dtype: DType,
        len: usize,
        pending: Option<Box<Expression>>,
        mark: OnceLock<Mark>,
    ) -> CudaStorage {
        CudaStorage {
            memory: OnceLock::new(),
            pending: Mutex::new(pending),
            readers: AtomicU32::new(0),
            dtype,
            len,
            home,
            writer: home,
            users: AtomicU64::new(0),
            purpose: AtomicU8::new(Purpose::Other as u8),
            mark,
            recording: AtomicU32::new(0),
        }
    }

    /// Sets the memory, which comes from [`allocate`].
    #[inline]
    pub(super) fn set_memory(&self, memory: (Address, usize)) {
        self.recording.store(self.home.recording.load(Ordering::Relaxed), Ordering::Relaxed);
        self.gpu().usage.add(PURPOSES[self.purpose.load(Ordering::Relaxed) as usize], memory.1);
        let was_empty = self.memory.set(memory).is_ok();
        debug_assert!(was_empty, "a storage has one memory");
    }

    /// Returns true if work that computes the elements has not been queued yet.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.memory.get().is_none()
    }

    /// Queues the work that computes the elements, and that of this thread's expressions which read them, so that no expression holds
    /// the storage. Work that fails stays pending.
    #[inline]
    pub(crate) fn settle(&self) {
        let _ = self.force();
        if self.readers.load(Ordering::Acquire) > 0 {
            let _ = fuse::flush();
        }
    }

    /// Returns the address, after queueing the work that computes the elements.
    #[inline]
    pub(crate) fn force(&self) -> Result<Address> {
        match self.memory.get() {
            Some(memory) => Ok(memory.0),
            None => fuse::force(self),
        }
    }

    /// Returns the flag that says whether this storage lives.
    fn mark(&self) -> Mark {
        self.mark.get_or_init(|| Arc::new(AtomicBool::new(true))).clone()
    }

    /// Returns the address, whatever uses it; 0 for elements that are pending.
    pub(crate) fn start(&self) -> Address {
        self.memory.get().map_or(0, |memory| memory.0)
    }

    fn bytes(&self) -> usize {
        self.memory.get().map_or(0, |memory| memory.1)
    }

    /// Returns true if a recording created this.
    pub(super) fn is_recorded_by(&self, number: u32) -> bool {
        self.recording.load(Ordering::Relaxed) == number && self.bytes() > 0
    }

    /// Returns true if this is the storage at that memory.
    pub(super) fn is_at(&self, memory: &Memory) -> bool {
        self.mark.get().is_some_and(|mark| Arc::ptr_eq(mark, &memory.mark))
    }

    /// Describes the memory, to create a storage of it again after this one is dropped.
    pub(super) fn memory(&self) -> Memory {
        let &CudaStorage { dtype, len, home, .. } = self;
        Memory { address: self.start(), bytes: self.bytes(), dtype, len, home, mark: self.mark() }
    }

    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.home.gpu
    }

    /// Returns the address, for reading by work of `stream`, which first waits for the writer if that is another stream.
    #[inline]
    pub(crate) fn address(&self, stream: &Stream) -> Result<Address> {
        let address = self.force()?;
        if !std::ptr::eq(stream, self.writer) || stream.is_recorded() {
            self.order(stream)?;
        }
        Ok(address)
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
        let is_outside = !self.is_recorded_by(stream.recording.load(Ordering::Relaxed));
        if is_outside && self.bytes() > 0 {
            recorder::note(self.start(), || self.mark());
        }
    }

    /// Returns the address, for writing by work of `stream`, which first waits for all other users.
    pub(crate) fn address_mut(&mut self, stream: &'static Stream) -> Result<Address> {
        let address = self.force()?;
        if stream.is_recorded() {
            self.note(stream);
        }
        if !std::ptr::eq(stream, self.writer) || *self.users.get_mut() != 0 {
            self.wait_for_users(stream)?;
            // The pool's stream must wait for this one before it uses the memory again.
            self.writer = stream;
            *self.users.get_mut() = 0;
        }
        Ok(address)
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
        // While the storage is pending, its memory may be set only under this lock.
        let lock = self.is_pending().then(|| self.home.fusing.lock());
        let before = self.purpose.swap(purpose as u8, Ordering::Relaxed);
        if let Some(&(_, bytes)) = self.memory.get() {
            // In this order, a count is never below zero, also if two threads do this at once.
            self.gpu().usage.add(purpose, bytes);
            self.gpu().usage.subtract(PURPOSES[before as usize], bytes);
        }
        drop(lock);
    }
}

/// Allocates memory that work of a stream will write. Returns its address and its size.
pub(super) fn allocate(stream: &'static Stream, bytes: usize) -> Result<(Address, usize)> {
    let gpu = stream.gpu;
    if bytes == 0 {
        return Ok((0, 0));
    }
    gpu.enter()?;
    let found = stream.pool.lock().allocate(gpu, stream.handle, bytes)?;
    match found {
        Some(found) => Ok(found),
        None => retry(stream, bytes),
    }
}

/// Frees memory that came from [`allocate`] and that only work of this stream uses.
pub(super) fn free(stream: &'static Stream, (address, bytes): (Address, usize)) {
    if bytes > 0 {
        stream.pool.lock().free(stream.gpu, address);
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
        let storage = CudaStorage::without_memory(home, dtype, len, None, OnceLock::from(mark.clone()));
        storage.set_memory((address, bytes));
        storage.recording.store(number, Ordering::Relaxed);
        Some(storage)
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
        if let Some(mark) = self.mark.get() {
            mark.store(false, Ordering::Release);
        }
        let Some(&memory) = self.memory.get() else { return };
        self.gpu().usage.subtract(PURPOSES[*self.purpose.get_mut() as usize], memory.1);
        if memory.1 == 0 {
            return;
        }
        // Later work of the home stream may use the memory at once, unless other streams use it.
        if std::ptr::eq(self.home, self.writer) && *self.users.get_mut() == 0 {
            return free(self.home, memory);
        }
        let users = *self.users.get_mut() | bit(self.writer);
        if recorder::defer_free(self.home, memory.0, users) {
            return;
        }
        // After an error of the driver, the memory may be in use for ever, and stays allocated.
        if let Ok(events) = last_uses(self.home, users) {
            self.home.pool.lock().free_after(self.gpu(), memory.0, events);
        }
    }
}

impl std::fmt::Debug for CudaStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaStorage({} {}, {})", self.len, self.dtype, self.gpu().device())
    }
}
