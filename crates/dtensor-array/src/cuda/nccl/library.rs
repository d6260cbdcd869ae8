//! The library NCCL, loaded at first use.
//!
//! Its functions are declared here, because only fourteen are needed. Types and numbers are those of `nccl.h`, which have not changed
//! since version 2.10.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::bindings::{Kind, Nccl, Queued, UniqueId};
use crate::cuda::Stream;
use crate::cuda::device::Gpu;
use crate::cuda::driver::{Handle, failed};
use crate::{DType, ReduceOp, Result};

type Communicator = *mut c_void;
type CudaStream = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// The oldest version with all functions, dtypes and reductions: 2.10 has averages and bf16.
const OLDEST: i32 = 21000;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        struct Library {
            version: unsafe extern "C" fn(*mut c_int) -> Status,
            error_string: unsafe extern "C" fn(Status) -> *const c_char,
            last_error: Option<unsafe extern "C" fn(Communicator) -> *const c_char>,
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        /// Returns the functions of a library.
        fn bind(library: &'static libloading::Library) -> std::result::Result<Library, libloading::Error> {
            // SAFETY: these are the types of the functions in `nccl.h`.
            unsafe {
                Ok(Library {
                    version: *library.get(b"ncclGetVersion")?,
                    error_string: *library.get(b"ncclGetErrorString")?,
                    last_error: library.get(b"ncclGetLastError").ok().map(|function| *function),
                    $($field: *library.get($name)?,)*
                })
            }
        }
    };
}

functions! {
    unique_id = b"ncclGetUniqueId": fn(*mut UniqueId);
    join = b"ncclCommInitRank": fn(*mut Communicator, c_int, UniqueId, c_int);
    destroy = b"ncclCommDestroy": fn(Communicator);
    abort = b"ncclCommAbort": fn(Communicator);
    async_error = b"ncclCommGetAsyncError": fn(Communicator, *mut Status);
    group_start = b"ncclGroupStart": fn();
    group_end = b"ncclGroupEnd": fn();
    all_reduce = b"ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, CudaStream);
    reduce_scatter = b"ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, CudaStream);
    reduce = b"ncclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Communicator, CudaStream);
    all_gather = b"ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Communicator, CudaStream);
    broadcast = b"ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, CudaStream);
    send = b"ncclSend": fn(*const c_void, usize, c_int, c_int, Communicator, CudaStream);
    receive = b"ncclRecv": fn(*mut c_void, usize, c_int, c_int, Communicator, CudaStream);
}

/// Loads the library, once. Returns why it cannot be used, if so.
pub(in crate::cuda) fn load() -> Result<&'static dyn Nccl> {
    static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        // SAFETY: the library has no initialisers that matter.
        let open = |name: &&str| unsafe { libloading::Library::new(*name) }.ok();
        let found = ["libnccl.so.2", "libnccl.so"].iter().find_map(open);
        let found = found.ok_or("libnccl.so.2 is not found; add its folder to LD_LIBRARY_PATH")?;
        let library = bind(Box::leak(Box::new(found))).map_err(|error| error.to_string())?;
        match library.version() {
            Ok(version) if version < OLDEST => {
                Err(format!("version {version} is too old: {OLDEST} is needed"))
            }
            Ok(_) => Ok(library),
            Err(error) => Err(error.to_string()),
        }
    });
    library.as_ref().map(|library| library as &dyn Nccl).map_err(|why| failed("nccl", why))
}

impl Library {
    fn check(&self, call: &str, status: Status, communicator: Communicator) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: both functions return static texts, for any status and communicator.
        let (text, last) = unsafe {
            let last = self.last_error.map(|last| last(communicator));
            ((self.error_string)(status), last.unwrap_or(null_mut()))
        };
        let read = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: the text ends with a zero byte.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        let why = [read(text), read(last).trim().to_owned()].into_iter().filter(|text| !text.is_empty());
        Err(failed(call, why.collect::<Vec<_>>().join(": ")))
    }
}

fn dtype_number(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

fn op_number(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}

impl Nccl for Library {
    fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the pointer is valid.
        self.check("ncclGetVersion", unsafe { (self.version)(&mut version) }, null_mut())?;
        Ok(version)
    }

    fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is valid.
        self.check("ncclGetUniqueId", unsafe { (self.unique_id)(&mut id) }, null_mut())?;
        Ok(id)
    }

    fn join(&self, id: &UniqueId, size: usize, ranks: &[(usize, &'static Gpu)]) -> Result<Vec<Handle>> {
        let mut communicators: Vec<Communicator> = vec![null_mut(); ranks.len()];
        // SAFETY: the pointers are valid until the group ends, which creates the communicators.
        unsafe {
            self.check("ncclGroupStart", (self.group_start)(), null_mut())?;
            let mut result = Ok(());
            for ((rank, gpu), communicator) in ranks.iter().zip(&mut communicators) {
                result = result.and_then(|()| gpu.enter()).and_then(|()| {
                    let status = (self.join)(communicator, size as c_int, *id, *rank as c_int);
                    self.check("ncclCommInitRank", status, null_mut())
                });
            }
            let ended = self.check("ncclCommInitRank", (self.group_end)(), null_mut());
            result.and(ended)?;
        }
        Ok(communicators.into_iter().map(|communicator| communicator as Handle).collect())
    }

    fn waits_for_others(&self) -> bool {
        true
    }

    fn destroy(&self, communicator: Handle) {
        // SAFETY: the communicator is valid, and nothing uses it after this. There is nobody to tell of an error.
        unsafe { (self.destroy)(communicator as Communicator) };
    }

    fn abort(&self, communicator: Handle, _: &Stream) {
        // SAFETY: as above. A thread that waits in a function of the library for this communicator returns from it.
        unsafe { (self.abort)(communicator as Communicator) };
    }

    fn error(&self, communicator: Handle) -> Result<()> {
        let (communicator, mut error) = (communicator as Communicator, SUCCESS);
        // SAFETY: the communicator and the pointer are valid.
        let status = unsafe { (self.async_error)(communicator, &mut error) };
        self.check("ncclCommGetAsyncError", status, communicator)?;
        match error {
            IN_PROGRESS => Ok(()),
            error => self.check("nccl", error, communicator),
        }
    }

    fn group_start(&self) -> Result<()> {
        // SAFETY: the function needs nothing.
        self.check("ncclGroupStart", unsafe { (self.group_start)() }, null_mut())
    }

    fn group_end(&self) -> Result<()> {
        // SAFETY: as above.
        self.check("ncclGroupEnd", unsafe { (self.group_end)() }, null_mut())
    }

    unsafe fn queue(&self, communicator: Handle, transfer: &Queued, stream: Handle) -> Result<()> {
        let Queued { kind, count, .. } = *transfer;
        let (from, to) = (transfer.from as *const c_void, transfer.to as *mut c_void);
        let (dtype, comm) = (dtype_number(transfer.dtype), communicator as Communicator);
        let stream = stream as CudaStream;
        // SAFETY: the caller guarantees the addresses, and communicator and stream are valid.
        let (call, status) = unsafe {
            match kind {
                Kind::AllReduce(op) => {
                    ("ncclAllReduce", (self.all_reduce)(from, to, count, dtype, op_number(op), comm, stream))
                }
                Kind::ReduceScatter(op) => (
                    "ncclReduceScatter",
                    (self.reduce_scatter)(from, to, count, dtype, op_number(op), comm, stream),
                ),
                Kind::Reduce(op, root) => {
                    let (op, root) = (op_number(op), root as c_int);
                    ("ncclReduce", (self.reduce)(from, to, count, dtype, op, root, comm, stream))
                }
                Kind::AllGather => ("ncclAllGather", (self.all_gather)(from, to, count, dtype, comm, stream)),
                Kind::Broadcast(root) => {
                    ("ncclBroadcast", (self.broadcast)(from, to, count, dtype, root as c_int, comm, stream))
                }
                Kind::Send(peer) => {
                    ("ncclSend", (self.send)(from, count, dtype, peer as c_int, comm, stream))
                }
                Kind::Receive(peer) => {
                    ("ncclRecv", (self.receive)(to, count, dtype, peer as c_int, comm, stream))
                }
            }
        };
        self.check(call, status, comm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library returns its version and an id without a GPU, which shows that its functions are found and called as declared.
    #[test]
    fn the_library_answers_if_there_is_one() {
        let Ok(library) = load() else { return };
        assert!(library.version().unwrap() >= OLDEST);
        assert!(!library.waits_for_others() || library.error(0).is_err());
    }
}
