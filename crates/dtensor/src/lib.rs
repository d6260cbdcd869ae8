//! Tensors for Rust: one [`Tensor`] type with automatic gradients, ranks that exchange tensors, tensors that lie on a mesh of
//! ranks, and models that are spread over one.
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
//! The rooms of this house, from the ground up: the local engine (the only one that names Candle), operators
//! with their shape and sharding rules, kernels and gradients, the one dispatch they all go through, the
//! graph of gradients, ranks and what they do together ([`comm`]), ranks in a grid ([`DeviceMesh`]), how a
//! tensor lies on it ([`Layout`]) and moves from one layout to another ([`redistribute`]), modules ([`nn`]),
//! plans that spread them over a mesh ([`parallel`]) and optimizers ([`optim`]); and, beside them all, those
//! who look on ([`debug`]).
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
