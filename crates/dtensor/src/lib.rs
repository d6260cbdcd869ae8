//! Distributed tensors for Rust: one [`Tensor`] type with automatic gradients, on one device or on a mesh of ranks.
//!
//! ```
//! use dtensor::prelude::*;
//!
//! # fn main() -> dtensor::Result<()> {
//! let x = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2])?;
//! let w = Tensor::ones([2, 2], DType::F32)?.requires_grad_(true)?;
//! let loss = x.matmul(&w)?.relu()?.sum_all()?;
//! loss.backward()?;
//! assert_eq!(w.grad().unwrap().to_vec::<f32>()?, [4., 4., 6., 6.]);
//! # Ok(())
//! # }
//! ```
//!
//! Put a tensor on a [`DeviceMesh`]: sharded, replicated or partial. Operators and gradients run on the shards and match the
//! single-device result.
//!
//! - [`Tensor`], [`Layout`], [`Placement`]: tensors, and how they are placed; [`distribute_tensor`], [`Tensor::redistribute`].
//! - [`comm`]: ranks and collectives; ranks are threads ([`comm::launch`]), processes over MPI, or simulated.
//! - [`nn`], [`optim`], [`models`]: modules, optimizers, small models.
//! - [`parallel`]: plans and styles that shard a module over a mesh.
//! - [`debug`]: which collectives ran, from which line and in which module.
//! - [`testing`]: sharding rules proved by trying, and test bodies that run on every kind of world.
//!
//! This crate may not name a kernel's memory or a transport: arrays and kernels are `dtensor-array`'s, ranks `dtensor-comm`'s, and
//! meshes, placements and plans `dtensor-layout`'s. It re-exports what users need of them.
#![warn(missing_docs)]

// The derive macro names this crate from outside; inside, it must find it too.
extern crate self as dtensor;

mod autograd;
#[cfg(feature = "candle")]
mod candle;
mod collectives;
pub mod comm;
pub mod debug;
mod declare;
mod dispatch;
mod distributed;
mod layout;
mod mesh;
pub mod models;
pub mod nn;
mod ops;
pub mod optim;
mod owner;
pub mod parallel;
mod random;
mod tensor;
pub mod testing;

pub use autograd::{
    Backward, BackwardOptions, Grads, Saves, checkpoint, checkpoint_all, enable_grad, grad, no_grad,
};
pub use dispatch::{
    ImplicitCommunication, apply, apply_all, autocast, autocast_dtype, autocast_off, explicit_communication,
    implicit_replication,
};
pub use distributed::{FromLocal, RedistributeOptions, distribute_tensor, distribute_tensor_from, sharded};
pub use dtensor_array::shape::{Dim, Dims, INFER, NewShape};
pub use dtensor_array::{
    Array, DType, Device, Element, Meta, Scalar, Shape, num_threads, set_num_threads, with_num_threads,
};
pub use dtensor_array::{Error, Other, Result};
pub use dtensor_layout::Placement::{self, Partial, Replicate, Shard, StridedShard};
pub use dtensor_layout::{Attributes, CacheStats, Chunk, MeshDim, MeshNames, Operator, Placements, Rule};
pub use layout::Layout;
pub use mesh::{DeviceMesh, init_device_mesh, use_mesh};
pub use ops::{
    Arrays, Aside, Attention, Bits, Convolution, CrossEntropy, Gelu, Here, Interpolation, Metas, Op, Padding,
    Precision, Quantiles, Reduction, Together,
};
pub use random::{
    Generator, GeneratorState, manual_seed, rng_state, set_rng_state, synchronize_rng, with_generator,
};
pub use tensor::{Operand, Tensor, on_device};

/// Redistribution plans: what [`Tensor::explain_redistribute`] and [`Layout::plan_to`] give, and what they count with.
pub mod redistribute {
    pub use dtensor_layout::{CostModel, Link, Plan, Step};
}

/// What most programs use.
pub mod prelude {
    pub use crate::comm::{Group, ReduceOp, World, launch};
    pub use crate::debug::CommDebugMode;
    pub use crate::nn::{Module, forward};
    pub use crate::optim::Optimizer;
    pub use crate::parallel::{
        ColwiseParallel, DistributeModule, ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput,
        PrepareModuleOutput, RowwiseParallel, SequenceParallel, distribute_module, local_map, loss_parallel,
        parallelize_module,
    };
    pub use crate::plan;
    pub use crate::{
        Attention, CrossEntropy, DType, Device, DeviceMesh, Error, FromLocal, Gelu, ImplicitCommunication,
        Layout, Partial, Placement, Reduction, Replicate, Result, Shape, Shard, StridedShard, Tensor,
        autocast, checkpoint, checkpoint_all, distribute_tensor, explicit_communication,
        implicit_replication, init_device_mesh, manual_seed, no_grad, sharded, use_mesh,
    };
}

/// The example in the README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So do those of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide.md")]
struct Guide;

/// So do those of the map from PyTorch's names.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/api-map.md")]
struct ApiMap;
