//! NVIDIA GPUs (feature `cuda`).
//!
//! Operators on a tensor on [`Device::Cuda`](crate::Device::Cuda) run on the GPU with that number.
//! [`Tensor::to_device`](crate::Tensor::to_device) moves a tensor there, [`Module::to_device`](crate::nn::Module::to_device) a model. New
//! tensors are created there inside [`on_device`](crate::on_device); if the environment variable `DTENSOR_DEVICE` is `cuda`, everywhere
//! on the first GPU.
//!
//! The crate builds without CUDA. At run time it loads the driver (`libcuda.so`) and, from CUDA 12 or 13, the compiler
//! (`libnvrtc.so`) and the library for matrix products (`libcublasLt.so`). If the dynamic loader does not find these two, name
//! their folder in `LD_LIBRARY_PATH`. Kernels are compiled for the GPU when they are first used, and cached in
//! `~/.cache/dtensor/kernels` or in the folder `DTENSOR_KERNEL_CACHE`.
//!
//! Operators queue work for the GPU and return at once. Only reading values waits for it: `item`, `to_vec`, printing, copies to the
//! CPU. If a kernel finds an invalid value, such as an index out of bounds, the next read or collective returns the error, which
//! names the operator and the line that called it. Ranks that run as threads can share a GPU: each has its own stream. Collectives
//! between ranks that have a GPU each go through NCCL (`libnccl.so.2`), if it is found; the environment variable `DTENSOR_NCCL` forbids
//! (`off`) or demands (`force`) it.
//!
//! Chains of element-wise operators, with their casts and broadcast operands, run as one kernel ([`fuse`]). Their kernel is generated and
//! compiled when a chain is seen for the third time, and kept in the same folder. Results have the same bits as without fusion, which the
//! environment variable `DTENSOR_FUSE=0` turns off. A result that is dropped before anybody needed it is never computed, so a loop that
//! measures operators must call [`flush`], or turn fusion off.
//!
//! ```
//! use dtensor::{DType, Device, Tensor, cuda};
//! # fn main() -> dtensor::Result<()> {
//! let device = if cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
//! let x = Tensor::ones([2, 3], DType::F32)?.to_device(device)?;
//! assert_eq!(x.mul(2.0)?.sum_all()?.item::<f32>()?, 12.0);
//! # Ok(())
//! # }
//! ```

mod graph;

pub use graph::{Graph, graph};

#[doc(hidden)]
pub use dtensor_array::cuda::launch_empty;
pub use dtensor_array::cuda::{
    MemoryStats, device_count, device_name, flush, fuse, fuse_after, is_available, launches_of_this_thread,
    memory_stats, reset_peak_memory_stats, synchronize, waits_of_this_thread,
};
