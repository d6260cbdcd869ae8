//! NVIDIA GPUs (feature `cuda`).
//!
//! A tensor on [`Device::Cuda`](crate::Device::Cuda) is computed on by the GPU with that number. Tensors get there with
//! [`Tensor::to_device`](crate::Tensor::to_device), models with [`Module::to_device`](crate::nn::Module::to_device), and new tensors are created there
//! inside [`on_device`](crate::on_device), or everywhere if the environment variable `DTENSOR_DEVICE` is `cuda`.
//!
//! The crate builds without CUDA. At run time it loads the driver (`libcuda.so`), and from CUDA 12 or 13 the compiler (`libnvrtc.so`) and the library
//! for matrix products (`libcublasLt.so`), which the dynamic loader must find: `LD_LIBRARY_PATH` names their folder. Kernels are compiled for the
//! GPU when they are first used and kept in `~/.cache/dtensor/kernels`, or in the folder `DTENSOR_KERNEL_CACHE`.
//!
//! Operators return at once and the GPU works on its own. What waits for it is what reads values: `item`, `to_vec`, printing, copies to the CPU.
//! An invalid value that a kernel finds, such as an index out of bounds, is an error at the next read or collective; it names the operator and the
//! line that called it. Ranks that run as threads can share a GPU: each has its own stream.
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

pub use dtensor_array::cuda::{
    MemoryStats, device_count, device_name, is_available, memory_stats, synchronize, waits_of_this_thread,
};
