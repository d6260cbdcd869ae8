//! What only a GPU has. `DTENSOR_DEVICE=cuda` puts every tensor of these tests on the GPU.
//!
//! The tables and laws of the other programs run there too: `tools/gpu_tests` lists their modules. `./test` runs them on an emulator;
//! `tools/on_gpu` builds them for a machine with a GPU.

use dtensor_tests as common;

mod device;
mod faults;
mod fusion;
mod graph;
mod nccl;
mod sharing;
mod training;
mod waits;

use dtensor::Device;

/// The GPU that tests use.
const GPU: Device = Device::Cuda(0);
