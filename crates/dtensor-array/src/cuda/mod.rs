//! The engine for NVIDIA GPUs: memory, streams and kernels.
//!
//! Work is asynchronous. Each thread has a stream per GPU. An operator queues its kernel there and returns an array at once; only
//! copies to main memory wait. A storage knows the streams that use it, so arrays may move between threads freely.
//!
//! Chains of element-wise operators run as one kernel: see `fuse.rs`.
//!
//! Kernels are CUDA C++ in `kernels/`, one file per family. They are compiled for an element type and a GPU when they are first
//! used, and cached on disk. With the feature `cuda-emulator` and no GPU, the system's C++ compiler compiles them, and they run on
//! the CPU.

mod assign;
#[cfg(feature = "cuda-emulator")]
mod capture;
mod device;
mod driver;
mod empty;
#[cfg(feature = "cuda-emulator")]
mod emulator;
mod fault;
mod fold;
mod fuse;
mod graph;
mod kernel;
mod map;
#[doc(hidden)]
pub mod nccl;
mod nvidia;
mod pool;
mod recorder;
mod storage;
mod stream;
#[cfg(test)]
mod testing;
mod window;

pub(crate) use device::{MAX_DEVICES, gpu};
pub use device::{
    device_count, device_name, is_available, launches_of_this_thread, memory_stats, reset_peak_memory_stats,
    synchronize, waits_of_this_thread,
};
#[doc(hidden)]
pub use empty::launch_empty;
#[doc(hidden)]
pub use fuse::fuse_after;
pub use fuse::{flush, fuse};
#[doc(hidden)]
pub use graph::{Graph, Kept, Recording, duplicate, overwrite};
#[doc(hidden)]
pub use kernel::compile_all;
pub(crate) use kernel::{Unit, grid_for};
pub use pool::MemoryStats;
#[doc(hidden)]
pub use recorder::{is_recording, recorded_numbers, refuse};
pub(crate) use storage::CudaStorage;
use stream::on_stream;
pub(crate) use stream::{Stream, current_stream, on_communication_stream, stream_of, stream_on};

pub(crate) mod attention;
pub(crate) mod binary;
pub(crate) mod cast;
pub(crate) mod cat;
pub(crate) mod clip;
pub(crate) mod copy;
pub(crate) mod extremum;
pub(crate) mod index;
pub(crate) mod locate;
pub(crate) mod loss;
pub(crate) mod matmul;
pub(crate) mod moments;
pub(crate) mod norm;
pub(crate) mod optim;
pub(crate) mod parallel;
pub(crate) mod random;
pub(crate) mod reduce;
mod rows;
pub(crate) mod scalar;
pub(crate) mod scan;
pub(crate) mod select;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod ternary;
pub(crate) mod unary;
pub(crate) mod unfold;
pub(crate) mod write;
