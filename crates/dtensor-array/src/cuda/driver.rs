//! [`Driver`]: the functions of a GPU's driver that the engine needs.

use std::ffi::c_void;

use super::nccl::Nccl;
use crate::{Error, Result};

/// An address in the memory of a GPU.
pub(crate) type Address = u64;
/// The driver's handle of a stream, an event, a module or a function.
pub(crate) type Handle = usize;

/// The properties of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Info {
    pub(crate) name: String,
    /// The architecture that kernels are compiled for, such as `sm_90a`.
    pub(crate) architecture: String,
    /// The number of multiprocessors.
    pub(crate) multiprocessors: usize,
    /// The most shared memory of a block.
    pub(crate) shared_bytes: usize,
}

/// A matrix product `out = a · b + bias` for a batch. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    /// The dtype of the operands and the bias.
    pub(crate) dtype: crate::DType,
    /// The dtype of the result: the same, or `F32` for operands in half precision.
    pub(crate) out: crate::DType,
    /// Rows, columns and inner size.
    pub(crate) mnk: [usize; 3],
    /// Whether rows of `a` are contiguous (else columns are), and the stride between them.
    pub(crate) a: (bool, usize),
    /// The same for `b`.
    pub(crate) b: (bool, usize),
    /// The number of products, and the strides of `a`, `b` and the result from one to the next.
    pub(crate) batch: usize,
    pub(crate) batch_strides: [usize; 3],
    /// Whether each row of the result starts as the bias.
    pub(crate) has_bias: bool,
    /// Whether the result is added to what is there.
    pub(crate) accumulates: bool,
    /// The lowest power of two that divides each of the addresses of `a`, `b` and the result.
    pub(crate) alignments: [u32; 3],
}

/// The driver of one kind of GPU. Functions that take a stream queue work on it; none of them waits unless it says so.
///
/// All of them but [`count`](Driver::count), [`info`](Driver::info) and [`identity`](Driver::identity) act on the GPU that this thread last entered.
pub(crate) trait Driver: Send + Sync {
    /// Returns the number of GPUs.
    fn count(&self) -> usize;
    /// Describes a GPU.
    fn info(&self, ordinal: usize) -> Result<Info>;
    /// Returns what identifies a GPU among all GPUs of all machines.
    fn identity(&self, ordinal: usize) -> Result<[u8; 16]>;
    /// Makes a GPU the current one of this thread.
    fn enter(&self, ordinal: usize) -> Result<()>;

    /// Allocates memory. Returns `None` if there is not enough.
    fn allocate(&self, bytes: usize) -> Result<Option<Address>>;
    /// Frees memory. Waits for the GPU.
    fn free(&self, address: Address);
    /// Returns the free bytes and all bytes of the GPU's memory.
    fn memory(&self) -> Result<(usize, usize)>;
    /// Allocates main memory that the GPU can read and write at the same address.
    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8>;
    /// Frees pinned memory.
    ///
    /// # Safety
    /// It must come from [`allocate_pinned`](Driver::allocate_pinned), and nothing may use it any more.
    unsafe fn free_pinned(&self, memory: *mut u8);

    /// Creates a stream that does not wait for others.
    fn create_stream(&self) -> Result<Handle>;
    /// Waits until all work of a stream is done.
    fn synchronize(&self, stream: Handle) -> Result<()>;
    /// Creates an event.
    fn create_event(&self) -> Result<Handle>;
    /// Marks with an event what has been queued on a stream so far.
    fn record(&self, event: Handle, stream: Handle) -> Result<()>;
    /// Makes the later work of a stream wait for an event.
    fn wait(&self, stream: Handle, event: Handle) -> Result<()>;
    /// Returns true if an event has happened.
    fn has_happened(&self, event: Handle) -> Result<bool>;

    /// Copies from main memory to the GPU.
    ///
    /// # Safety
    /// `source` must be pinned memory of at least `bytes` that does not change before the copy is done, and `target` memory of
    /// the GPU.
    unsafe fn copy_to_device(
        &self,
        target: Address,
        source: *const u8,
        bytes: usize,
        stream: Handle,
    ) -> Result<()>;
    /// Copies from the GPU to main memory, and waits for the stream.
    ///
    /// # Safety
    /// `target` must be writable and `source` readable for `bytes`.
    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: Address,
        bytes: usize,
        stream: Handle,
    ) -> Result<()>;
    /// Copies between GPUs, or on one.
    ///
    /// # Safety
    /// Both must be memory of a GPU of at least `bytes`.
    unsafe fn copy(&self, target: Address, source: Address, bytes: usize, stream: Handle) -> Result<()>;
    /// Sets bytes to zero.
    ///
    /// # Safety
    /// It must be memory of the GPU of at least `bytes`.
    unsafe fn set_zero(&self, target: Address, bytes: usize, stream: Handle) -> Result<()>;

    /// Returns what, besides source and architecture, a compiled kernel depends on.
    fn compiler(&self) -> Result<String>;
    /// Compiles CUDA C++.
    fn compile(&self, name: &str, source: &str, architecture: &str) -> Result<Vec<u8>>;
    /// Loads what [`compile`](Driver::compile) returned, and returns its kernels of these names, or `None` for those that are not
    /// declared for the element type.
    fn load(&self, image: &[u8], kernels: &[String]) -> Result<Vec<Option<Handle>>>;
    /// Runs a kernel. `argument` is the address of its argument, and its size.
    ///
    /// # Safety
    /// `argument` must be of the kernel's type, and all addresses in it must be valid for what the kernel does.
    unsafe fn launch(
        &self,
        function: Handle,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        stream: Handle,
        argument: (*const c_void, usize),
    ) -> Result<()>;

    /// Records what is queued on a stream from now on, instead of running it. A stream that waits for an event of a stream that is
    /// recorded joins the recording, and must be waited for in turn before the recording ends.
    fn begin_capture(&self, stream: Handle) -> Result<()>;
    /// Ends a recording, and returns what [`launch_graph`](Driver::launch_graph) runs, or `None` if it is thrown away.
    fn end_capture(&self, stream: Handle, keep: bool) -> Result<Option<Handle>>;
    /// Runs recorded work.
    ///
    /// # Safety
    /// All addresses in the recorded work must be valid for what it does.
    unsafe fn launch_graph(&self, graph: Handle, stream: Handle) -> Result<()>;
    /// Frees recorded work, when it has run.
    ///
    /// # Safety
    /// The handle must come from [`end_capture`](Driver::end_capture), and is not used again.
    unsafe fn free_graph(&self, graph: Handle);

    /// Computes matrix products. Returns false if this driver has no library for these.
    ///
    /// # Safety
    /// The addresses must be valid for the sizes and strides in `product`.
    unsafe fn multiply(
        &self,
        product: &Product,
        addresses: [Address; 4],
        stream: &super::Stream,
    ) -> Result<bool>;

    /// Returns the library for communication between GPUs, or an error that says why there is none.
    fn nccl(&self) -> Result<&'static dyn Nccl>;
}

/// Creates the error for a call that the driver has failed.
#[cold]
pub(crate) fn failed(call: &str, why: impl std::fmt::Display) -> Error {
    Error::argument("cuda", format!("{call}: {why}"))
}
