//! [`CudaStorage`]: memory of a GPU behind arrays.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use smallvec::SmallVec;

use super::device::Gpu;
use super::driver::{Address, Handle};
use super::pool::out_of_memory;
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
}

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
                let found = stream.pool.lock().allocate(gpu, bytes)?;
                match found {
                    Some(found) => found,
                    None => retry(stream, bytes)?,
                }
            }
        };
        gpu.usage.add(Purpose::Other, bytes);
        let (users, purpose) = (AtomicU64::new(0), AtomicU8::new(Purpose::Other as u8));
        Ok(CudaStorage { address, bytes, dtype, len, home: stream, writer: stream, users, purpose })
    }

    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.home.gpu
    }

    /// Returns the address, for reading by work of `stream`, which first waits for the writer if that is another stream.
    #[inline]
    pub(crate) fn address(&self, stream: &Stream) -> Result<Address> {
        if !std::ptr::eq(stream, self.writer) {
            self.order(stream)?;
        }
        Ok(self.address)
    }

    #[cold]
    fn order(&self, stream: &Stream) -> Result<()> {
        let has_waited = self.users.load(Ordering::Acquire) & bit(stream) != 0;
        if !has_waited || stream.index >= OTHERS {
            stream.wait_for(self.writer)?;
            self.users.fetch_or(bit(stream), Ordering::AcqRel);
        }
        Ok(())
    }

    /// Returns the address, for writing by work of `stream`, which first waits for all other users.
    pub(crate) fn address_mut(&mut self, stream: &'static Stream) -> Result<Address> {
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

    /// Returns events that happen when the other streams than the home stream have used the memory.
    fn last_uses(&self) -> Result<SmallVec<[Handle; 2]>> {
        let gpu = self.gpu();
        gpu.enter()?;
        let users = self.users.load(Ordering::Acquire);
        let mut events = Ok(SmallVec::new());
        gpu.each_stream(|user| {
            let is_user = users & bit(user) != 0 || std::ptr::eq(user, self.writer);
            if let Ok(list) = &mut events
                && is_user
                && !std::ptr::eq(user, self.home)
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

    pub(crate) fn count_as(&self, purpose: Purpose) {
        let before = self.purpose.swap(purpose as u8, Ordering::Relaxed);
        // In this order, a count is never below zero, also if two threads do this at once.
        self.gpu().usage.add(purpose, self.bytes);
        self.gpu().usage.subtract(PURPOSES[before as usize], self.bytes);
    }
}

/// Waits until all streams are done, gives the memory that they keep for later back to the driver, and tries again.
#[cold]
fn retry(stream: &'static Stream, bytes: usize) -> Result<(Address, usize)> {
    let gpu = stream.gpu;
    let mut result = Ok(());
    gpu.each_stream(|stream| {
        if result.is_ok() {
            result = gpu.driver.synchronize(stream.handle);
        }
    });
    gpu.each_stream(|stream| {
        if result.is_ok() {
            result = stream.pool.lock().release(gpu);
        }
    });
    result?;
    let found = stream.pool.lock().allocate(gpu, bytes)?;
    found.ok_or_else(|| out_of_memory(gpu, bytes))
}

impl Drop for CudaStorage {
    fn drop(&mut self) {
        let gpu = self.home.gpu;
        gpu.usage.subtract(PURPOSES[*self.purpose.get_mut() as usize], self.bytes);
        if self.bytes == 0 {
            return;
        }
        // Later work of the home stream may use the memory at once, unless other streams use it.
        if std::ptr::eq(self.home, self.writer) && *self.users.get_mut() == 0 {
            return self.home.pool.lock().free(gpu, self.address);
        }
        // After an error of the driver, the memory may be in use for ever, and stays allocated.
        if let Ok(events) = self.last_uses() {
            self.home.pool.lock().free_after(self.address, events);
        }
    }
}

impl std::fmt::Debug for CudaStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaStorage({} {}, {})", self.len, self.dtype, self.gpu().device())
    }
}
