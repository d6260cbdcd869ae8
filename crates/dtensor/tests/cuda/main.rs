//! The tables and laws on a GPU, and what only a GPU has.
//!
//! With `DTENSOR_DEVICE=cuda`, every tensor of these tests is on the GPU, and so are the single-device results that the laws compare with.
//! Golden values come from PyTorch, and `training` compares with the CPU. `tools/on_gpu` builds this program for a machine with a GPU;
//! `./test` runs parts of it on the emulator.

#[path = "../common/mod.rs"]
mod common;

mod device;
mod faults;
mod fusion;
mod sharing;
mod training;
mod waits;

#[path = "../modules/autocast.rs"]
mod autocast;
#[path = "../modules/checkpoint/mod.rs"]
mod checkpoint;
#[path = "../pytorch/golden.rs"]
mod golden;
#[path = "../laws/laws_checkpoint/mod.rs"]
mod laws_checkpoint;
#[path = "../laws/laws_fully_sharded.rs"]
mod laws_fully_sharded;
#[path = "../laws/laws_gradients.rs"]
mod laws_gradients;
#[path = "../laws/laws_layout_gradients.rs"]
mod laws_layout_gradients;
#[path = "../laws/laws_local_gradients.rs"]
mod laws_local_gradients;
#[path = "../laws/laws_operators.rs"]
mod laws_operators;
#[path = "../laws/laws_random/mod.rs"]
mod laws_random;
#[path = "../laws/laws_redistribute/mod.rs"]
mod laws_redistribute;
#[path = "../laws/laws_tensor_parallel.rs"]
mod laws_tensor_parallel;
#[path = "../modules/layers.rs"]
mod layers;
#[path = "../parallel/loss_parallel.rs"]
mod loss_parallel;
#[path = "../modules/optimizers/mod.rs"]
mod optimizers;
#[path = "../pytorch/pytorch_common_dtensor.rs"]
mod pytorch_common_dtensor;
#[path = "../pytorch/pytorch_tp_style.rs"]
mod pytorch_tp_style;
#[path = "../parallel/whole_models.rs"]
mod whole_models;

use dtensor::Device;

/// The GPU that tests use.
const GPU: Device = Device::Cuda(0);
