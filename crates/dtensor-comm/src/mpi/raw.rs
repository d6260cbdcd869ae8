//! The calls into the MPI library, each made safe by what owns the memory it is given.
//!
//! The library is asked for the level at which threads may call it one at a time; [`turn`] sees to that.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use mpi::Threading;
use mpi::ffi;
use parking_lot::{Mutex, MutexGuard};

use crate::{Error, Result};
use dtensor_array::{Array, HostCopy, HostRoom};
use dtensor_array::{DType, Meta};

/// The right to call the library.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock()
}

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> c_int;
}

/// Ends MPI when the program ends: worlds come and go, but MPI can be begun only once.
extern "C" fn finalize() {
    let _turn = turn();
    if !mpi::environment::is_finalized() {
        // SAFETY: MPI was begun by `initialize`, has not been ended, and nobody else is calling it. What an ending program
        // could do about an error is nothing.
        unsafe { ffi::MPI_Finalize() };
    }
}

/// Begins MPI, the first time.
pub(super) fn initialize() -> Result<()> {
    static BEGUN: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let begun = BEGUN.get_or_init(|| {
        if let Some((universe, level)) = mpi::initialize_with_threading(Threading::Serialized) {
            // Its end is that of the program.
            std::mem::forget(universe);
            // SAFETY: `finalize` is a function without arguments that lives as long as the program.
            unsafe { atexit(finalize) };
            if level < Threading::Serialized {
                return Err(format!("this MPI library allows no calls from several threads ({level:?})"));
            }
        }
        // SAFETY: MPI has begun; both are constants of the library.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code).map_err(|error| error.to_string())
    });
    begun.clone().map_err(|message| Error::argument("mpi", message))
}

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

/// A number as the library takes it.
fn int(n: usize) -> Result<c_int> {
    let message = || format!("{n} is more than MPI can count ({})", c_int::MAX);
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

/// Some processes in an order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm(ffi::MPI_Comm);

// SAFETY: a handle, which any thread may use when it has its turn.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// Something that the library is doing. The memory it was given must live until it is done: see [`Step`](super::Step).
#[derive(Debug)]
pub(super) struct Request {
    raw: ffi::MPI_Request,
    /// The member of the group that it waits for, where that is one.
    pub(super) peer: Option<usize>,
    /// What must come, if something must.
    expects: Option<(usize, DType)>,
    done: bool,
}

// SAFETY: a handle, as above.
unsafe impl Send for Request {}

impl Request {
    /// Whether it is done. An error if something else came than was expected.
    pub(super) fn test(&mut self) -> Result<bool> {
        if self.done {
            return Ok(true);
        }
        let mut flag = 0;
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
        let _turn = turn();
        // SAFETY: the request has not been completed before, and its memory is alive.
        let code = unsafe { ffi::MPI_Test(&mut self.raw, &mut flag, status.as_mut_ptr()) };
        // A request that failed is over too.
        self.done = flag != 0 || code != ffi::MPI_SUCCESS as c_int;
        check("MPI_Test", code)?;
        if let Some((len, dtype)) = self.expects.filter(|_| self.done) {
            let mut came = 0;
            // SAFETY: the status was zeroed, and then written by the library.
            let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), datatype(dtype), &mut came) };
            check("MPI_Get_count", code)?;
            if came as usize != len {
                let message = format!("{len} elements were expected, but {came} came: ranks disagree");
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
    pub(super) fn world() -> Self {
        // SAFETY: a constant of the library.
        Comm(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// This process's number and how many there are.
    pub(super) fn rank_and_size(self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        let _turn = turn();
        // SAFETY: the communicator is alive, and both numbers are written before they are read.
        unsafe {
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(self.0, &mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(self.0, &mut size))?;
        }
        Ok((rank as usize, size as usize))
    }

    fn request(
        call: &'static str,
        peer: Option<usize>,
        start: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<Request> {
        // SAFETY: a constant of the library.
        let mut raw = unsafe { ffi::RSMPI_REQUEST_NULL };
        let _turn = turn();
        check(call, start(&mut raw))?;
        Ok(Request { raw, peer, expects: None, done: false })
    }

    /// The same processes as another communicator, which is valid when the request is done. All must call this.
    pub(super) fn duplicate(self) -> Result<(Request, Box<Comm>)> {
        // On the heap: the library writes to it later.
        let mut copy = Box::new(Comm(self.0));
        let request = Comm::request("MPI_Comm_idup", None, |request| {
            // SAFETY: the target lives on the heap until the request is done.
            unsafe { ffi::MPI_Comm_idup(self.0, &mut copy.0, request) }
        })?;
        Ok((request, copy))
    }

    /// Some of the processes, in an order. They must all call this, and it waits for them.
    pub(super) fn subset(self, members: &[usize], tag: c_int) -> Result<Comm> {
        let ranks = members.iter().map(|&rank| int(rank)).collect::<Result<Vec<_>>>()?;
        let mut comm = self.0;
        let _turn = turn();
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

    /// Gives a communicator back to the library. Nobody may use it any more.
    pub(super) fn free(mut self) {
        let _turn = turn();
        if !mpi::environment::is_finalized() {
            // SAFETY: the communicator is alive and its owner is done with it.
            unsafe { ffi::MPI_Comm_free(&mut self.0) };
        }
    }

    /// # Safety
    /// The elements behind `data` must live and stay as they are until the request is done.
    pub(super) unsafe fn send(self, data: &Span, to: usize, tag: c_int) -> Result<Request> {
        let (n, to_int) = (int(data.len)?, int(to)?);
        Comm::request("MPI_Isend", Some(to), |request| {
            // SAFETY: the caller's promise.
            unsafe { ffi::MPI_Isend(data.at, n, datatype(data.dtype), to_int, tag, self.0, request) }
        })
    }

    /// # Safety
    /// The memory must live, and nobody else may use it, until the request is done.
    pub(super) unsafe fn receive(self, room: &Span, from: usize, tag: c_int) -> Result<Request> {
        // SAFETY: the caller's promise.
        let request = unsafe { self.receive_up_to(room, Some(from), tag)? };
        Ok(Request { expects: Some((room.len, room.dtype)), ..request })
    }

    /// As [`receive`](Comm::receive), also of fewer elements, and from anybody.
    ///
    /// # Safety
    /// As for [`receive`](Comm::receive).
    pub(super) unsafe fn receive_up_to(
        self,
        room: &Span,
        from: Option<usize>,
        tag: c_int,
    ) -> Result<Request> {
        let n = int(room.len)?;
        let source = match from {
            Some(from) => int(from)?,
            // SAFETY: a constant of the library.
            None => unsafe { ffi::RSMPI_ANY_SOURCE },
        };
        Comm::request("MPI_Irecv", from, |request| {
            // SAFETY: the caller's promise.
            unsafe { ffi::MPI_Irecv(room.at, n, datatype(room.dtype), source, tag, self.0, request) }
        })
    }
}

/// Elements in memory that somebody else owns.
#[derive(Debug)]
pub(super) struct Span {
    at: *mut c_void,
    len: usize,
    dtype: DType,
}

impl Span {
    fn new(at: *mut c_void, len: usize, dtype: DType) -> Self {
        // Where there is nothing, Rust's addresses are made up, and Open MPI takes some of them for constants of its own.
        static NOTHING: [u64; 2] = [0; 2];
        let at = if len == 0 { NOTHING.as_ptr().cast_mut().cast() } else { at };
        Span { at, len, dtype }
    }

    /// The parts that go as messages of their own, one after the other: the library counts elements in 32 bits. Nothing is no
    /// message. Where the program is checked for mistakes messages are short, so that tests see several.
    pub(super) fn messages(&self) -> impl Iterator<Item = Span> {
        const LONGEST: usize = if cfg!(debug_assertions) { 1 << 16 } else { 1 << 30 };
        (0..self.len).step_by(LONGEST).map(|start| self.part(start, LONGEST.min(self.len - start)))
    }

    /// Some of the elements.
    pub(super) fn part(&self, start: usize, len: usize) -> Span {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "inside the memory");
        Span::new(self.at.wrapping_byte_add(start * self.dtype.size()), len, self.dtype)
    }

    /// Copies as many elements of the same type.
    ///
    /// # Safety
    /// Both must be alive, they must not overlap, and nobody else may use the target.
    pub(super) unsafe fn copy_to(&self, to: &Span) {
        assert_eq!((self.len, self.dtype), (to.len, to.dtype));
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = self.len * self.dtype.size();
            self.at.cast::<u8>().copy_to_nonoverlapping(to.at.cast::<u8>(), bytes);
        }
    }

    /// The elements of an array. They must not be written to.
    pub(super) fn of(x: &HostCopy) -> Self {
        Span::new(x.as_ptr().cast_mut().cast(), x.array().numel(), x.array().dtype())
    }

    pub(super) fn of_bytes(bytes: &mut [u8]) -> Self {
        Span::new(bytes.as_mut_ptr().cast(), bytes.len(), DType::U8)
    }
}

/// Memory for a value that is to come.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) span: Span,
    memory: HostRoom,
}

impl Room {
    pub(super) fn new(meta: &Meta) -> Result<Self> {
        let mut memory = HostRoom::new(meta)?;
        let span = Span::new(memory.as_mut_ptr().cast(), meta.shape.numel(), meta.dtype);
        Ok(Room { span, memory })
    }

    /// The value.
    ///
    /// # Safety
    /// The library must have written every element.
    pub(super) unsafe fn arrived(self) -> Result<Array> {
        // SAFETY: the caller's promise.
        unsafe { self.memory.arrived() }
    }
}

// SAFETY: the pointer is into memory that moves along, or whose owner does.
unsafe impl Send for Span {}
