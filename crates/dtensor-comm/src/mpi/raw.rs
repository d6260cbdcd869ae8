//! The calls into the MPI library. They are safe or state what the caller must guarantee about memory.
//!
//! MPI is initialized at the level at which only one thread may call it at a time. [`lock`] ensures that.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use mpi::Threading;
use mpi::ffi;
use parking_lot::{Mutex, MutexGuard};

use crate::{Error, Result};
use dtensor_array::{Array, HostBuffer, HostCopy};
use dtensor_array::{DType, Meta};

/// Locks the library. Every call into it holds this lock.
fn lock() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock()
}

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> c_int;
}

/// Finalizes MPI when the program ends. Not earlier, because MPI can be initialized only once and a program may have several
/// worlds.
extern "C" fn finalize() {
    let _lock = lock();
    if !mpi::environment::is_finalized() {
        // SAFETY: `initialize` initialized MPI, it is not finalized, and the lock keeps other threads out. An error is ignored,
        // because the program is ending.
        unsafe { ffi::MPI_Finalize() };
    }
}

/// Initializes MPI in the first call. Later calls do nothing.
pub(super) fn initialize() -> Result<()> {
    static RESULT: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let result = RESULT.get_or_init(|| {
        if let Some((universe, level)) = mpi::initialize_with_threading(Threading::Serialized) {
            // MPI is finalized at the end of the program instead.
            std::mem::forget(universe);
            // SAFETY: `finalize` is a function without arguments that lives as long as the program.
            unsafe { atexit(finalize) };
            if level < Threading::Serialized {
                return Err(format!(
                    "this MPI library does not support calls from several threads ({level:?})"
                ));
            }
        }
        // SAFETY: MPI is initialized, and both arguments are constants of the library.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code).map_err(|error| error.to_string())
    });
    result.clone().map_err(|message| Error::argument("mpi", message))
}

/// Turns the return code of an MPI call into a result.
fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer is as long as the library says its messages can be.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    let text = String::from_utf8_lossy(&text[..len.clamp(0, text.len() as c_int) as usize]).into_owned();
    Err(Error::argument("mpi", format!("{call}: {text}")))
}

/// Converts a number to an MPI integer.
fn int(n: usize) -> Result<c_int> {
    let message = || format!("{n} is larger than the largest MPI integer, {}", c_int::MAX);
    c_int::try_from(n).map_err(|_| Error::argument("mpi", message()))
}

fn datatype(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library. Only the size matters: the library moves values and never computes with them.
    unsafe {
        match dtype.size() {
            1 => ffi::RSMPI_UINT8_T,
            2 => ffi::RSMPI_UINT16_T,
            4 => ffi::RSMPI_UINT32_T,
            _ => ffi::RSMPI_UINT64_T,
        }
    }
}

/// A communicator: a list of processes in a fixed order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm(ffi::MPI_Comm);

// SAFETY: a handle, which any thread may use while it holds the lock.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// A request that the library works on. Its memory must live until it is done: see [`Stage`](super::stage::Stage).
#[derive(Debug)]
pub(super) struct Request {
    raw: ffi::MPI_Request,
    /// The member at the other end, if there is one.
    pub(super) peer: Option<usize>,
    /// For a receive of fixed length: the number of elements and their dtype.
    expects: Option<(usize, DType)>,
    done: bool,
}

// SAFETY: a handle, as above.
unsafe impl Send for Request {}

impl Request {
    /// Returns true if the request is done. Returns an error if the received message has an unexpected length.
    pub(super) fn test(&mut self) -> Result<bool> {
        if self.done {
            return Ok(true);
        }
        let mut flag = 0;
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
        let _lock = lock();
        // SAFETY: the request has not been completed before, and its memory is alive.
        let code = unsafe { ffi::MPI_Test(&mut self.raw, &mut flag, status.as_mut_ptr()) };
        // A failed request is done too.
        self.done = flag != 0 || code != ffi::MPI_SUCCESS as c_int;
        check("MPI_Test", code)?;
        if let Some((len, dtype)) = self.expects.filter(|_| self.done) {
            let mut received = 0;
            // SAFETY: the status was zeroed, and then written by the library.
            let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), datatype(dtype), &mut received) };
            check("MPI_Get_count", code)?;
            if received as usize != len {
                let message = format!(
                    "expected {len} elements, but received {received}: the ranks' calls do not match"
                );
                return Err(Error::argument("mpi", message));
            }
        }
        Ok(self.done)
    }

    pub(super) fn is_done(&self) -> bool {
        self.done
    }
}

impl Comm {
    /// Returns the communicator of all processes.
    pub(super) fn world() -> Self {
        // SAFETY: a constant of the library.
        Comm(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// Returns the number of this process and the number of processes.
    pub(super) fn rank_and_size(self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        let _lock = lock();
        // SAFETY: the communicator is alive, and both numbers are written before they are read.
        unsafe {
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(self.0, &mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(self.0, &mut size))?;
        }
        Ok((rank as usize, size as usize))
    }

    /// Starts a request with the MPI call `start`.
    fn request(
        call: &'static str,
        peer: Option<usize>,
        start: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<Request> {
        // SAFETY: a constant of the library.
        let mut raw = unsafe { ffi::RSMPI_REQUEST_NULL };
        let _lock = lock();
        check(call, start(&mut raw))?;
        Ok(Request { raw, peer, expects: None, done: false })
    }

    /// Duplicates the communicator. The new one is valid when the request is done. All processes must call this.
    pub(super) fn duplicate(self) -> Result<(Request, Box<Comm>)> {
        // On the heap, because the library writes to it later.
        let mut copy = Box::new(Comm(self.0));
        let request = Comm::request("MPI_Comm_idup", None, |request| {
            // SAFETY: the target lives on the heap until the request is done.
            unsafe { ffi::MPI_Comm_idup(self.0, &mut copy.0, request) }
        })?;
        Ok((request, copy))
    }

    /// Creates a communicator of the given processes, in the given order. All of them must call this, and it blocks until they do.
    pub(super) fn subset(self, members: &[usize], tag: c_int) -> Result<Comm> {
        let ranks = members.iter().map(|&rank| int(rank)).collect::<Result<Vec<_>>>()?;
        let mut comm = self.0;
        let _lock = lock();
        // SAFETY: handles are written before they are read; the list lives through the call.
        unsafe {
            let mut all = ffi::RSMPI_GROUP_NULL;
            let mut some = ffi::RSMPI_GROUP_NULL;
            check("MPI_Comm_group", ffi::MPI_Comm_group(self.0, &mut all))?;
            let n = int(ranks.len())?;
            check("MPI_Group_incl", ffi::MPI_Group_incl(all, n, ranks.as_ptr(), &mut some))?;
            check("MPI_Comm_create_group", ffi::MPI_Comm_create_group(self.0, some, tag, &mut comm))?;
            ffi::MPI_Group_free(&mut some);
            ffi::MPI_Group_free(&mut all);
        }
        Ok(Comm(comm))
    }

    /// Frees the communicator. It must not be used afterwards.
    pub(super) fn free(mut self) {
        let _lock = lock();
        if !mpi::environment::is_finalized() {
            // SAFETY: the communicator is alive and its owner is done with it.
            unsafe { ffi::MPI_Comm_free(&mut self.0) };
        }
    }

    /// Begins to send elements to a member.
    ///
    /// # Safety
    /// The elements of `data` must live and must not change until the request is done.
    pub(super) unsafe fn send(self, data: &Span, to: usize, tag: c_int) -> Result<Request> {
        let (n, to_int) = (int(data.len)?, int(to)?);
        Comm::request("MPI_Isend", Some(to), |request| {
            // SAFETY: the caller guarantees it.
            unsafe { ffi::MPI_Isend(data.at, n, datatype(data.dtype), to_int, tag, self.0, request) }
        })
    }

    /// Begins to receive as many elements as `buffer` holds from a member.
    ///
    /// # Safety
    /// The memory of `buffer` must live, and nothing else may access it, until the request is done.
    pub(super) unsafe fn receive(self, buffer: &Span, from: usize, tag: c_int) -> Result<Request> {
        // SAFETY: the caller guarantees it.
        let request = unsafe { self.receive_up_to(buffer, Some(from), tag)? };
        Ok(Request { expects: Some((buffer.len, buffer.dtype)), ..request })
    }

    /// Same as [`receive`](Comm::receive), but also accepts fewer elements, and accepts any sender if `from` is `None`.
    ///
    /// # Safety
    /// Same as for [`receive`](Comm::receive).
    pub(super) unsafe fn receive_up_to(
        self,
        buffer: &Span,
        from: Option<usize>,
        tag: c_int,
    ) -> Result<Request> {
        let n = int(buffer.len)?;
        let source = match from {
            Some(from) => int(from)?,
            // SAFETY: a constant of the library.
            None => unsafe { ffi::RSMPI_ANY_SOURCE },
        };
        Comm::request("MPI_Irecv", from, |request| {
            // SAFETY: the caller guarantees it.
            unsafe { ffi::MPI_Irecv(buffer.at, n, datatype(buffer.dtype), source, tag, self.0, request) }
        })
    }
}

/// A range of elements in memory that another value owns.
#[derive(Debug)]
pub(super) struct Span {
    at: *mut c_void,
    len: usize,
    dtype: DType,
}

impl Span {
    fn new(at: *mut c_void, len: usize, dtype: DType) -> Self {
        // An empty Rust slice has an arbitrary address, and Open MPI takes some addresses for constants of its own.
        static EMPTY: [u64; 2] = [0; 2];
        let at = if len == 0 { EMPTY.as_ptr().cast_mut().cast() } else { at };
        Span { at, len, dtype }
    }

    /// Splits the range into messages, because MPI counts elements in 32 bits. An empty range gives no message. Debug builds use
    /// short messages, so that tests send several.
    pub(super) fn messages(&self) -> impl Iterator<Item = Span> {
        const MAX_LEN: usize = if cfg!(debug_assertions) { 1 << 16 } else { 1 << 30 };
        (0..self.len).step_by(MAX_LEN).map(|start| self.slice(start, MAX_LEN.min(self.len - start)))
    }

    /// Returns a part of the range.
    pub(super) fn slice(&self, start: usize, len: usize) -> Span {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "slice out of bounds");
        Span::new(self.at.wrapping_byte_add(start * self.dtype.size()), len, self.dtype)
    }

    /// Copies the elements to another range of the same length and dtype.
    ///
    /// # Safety
    /// Both ranges must be alive, they must not overlap, and nothing else may access the target.
    pub(super) unsafe fn copy_to(&self, to: &Span) {
        assert_eq!((self.len, self.dtype), (to.len, to.dtype));
        // SAFETY: the caller guarantees it.
        unsafe {
            let bytes = self.len * self.dtype.size();
            self.at.cast::<u8>().copy_to_nonoverlapping(to.at.cast::<u8>(), bytes);
        }
    }

    /// Returns the elements of an array. They must not be written to.
    pub(super) fn of(x: &HostCopy) -> Self {
        Span::new(x.as_ptr().cast_mut().cast(), x.array().numel(), x.array().dtype())
    }

    pub(super) fn of_bytes(bytes: &mut [u8]) -> Self {
        Span::new(bytes.as_mut_ptr().cast(), bytes.len(), DType::U8)
    }
}

/// Memory that a value is received into.
#[derive(Debug)]
pub(super) struct ReceiveBuffer {
    pub(super) span: Span,
    memory: HostBuffer,
}

impl ReceiveBuffer {
    pub(super) fn new(meta: &Meta) -> Result<Self> {
        let mut memory = HostBuffer::new(meta)?;
        let span = Span::new(memory.as_mut_ptr().cast(), meta.shape.numel(), meta.dtype);
        Ok(ReceiveBuffer { span, memory })
    }

    /// Returns the received value.
    ///
    /// # Safety
    /// The library must have written every element.
    pub(super) unsafe fn into_array(self) -> Result<Array> {
        // SAFETY: the caller guarantees it.
        unsafe { self.memory.arrived() }
    }
}

// SAFETY: the pointer is into memory that is sent along, or whose owner is.
unsafe impl Send for Span {}
