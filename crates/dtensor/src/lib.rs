//! Distributed tensors for Rust: tensors with automatic gradients, on one device or sharded over a mesh of ranks.
//!
//! dtensor is to Rust what `torch.distributed.tensor` is to PyTorch. Write a model for one device, choose a placement for each
//! parameter, and run it on many ranks. The library shards the storage, runs operators and gradients on the shards, and adds the
//! collectives that are needed. The results match those of one device.
//!
//! # One device
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
//! # A mesh of ranks
//!
//! [`launch`](comm::launch) runs ranks as threads of this process, so this needs no setup. With the feature `mpi`, ranks can be
//! processes.
//!
//! ```
//! use dtensor::prelude::*;
//!
//! # fn main() -> dtensor::Result<()> {
//! launch(4, |world| {
//!     let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
//!     let x = distribute_tensor(&Tensor::ones([8, 6], DType::F32)?, &mesh, [Shard(0), Replicate])?;
//!     let w = distribute_tensor(&Tensor::ones([6, 10], DType::F32)?, &mesh, [Replicate, Shard(1)])?;
//!     let y = x.matmul(&w)?;
//!     assert_eq!(y.placements(), [Shard(0), Shard(1)]);
//!     assert_eq!(y.to_local()?.dims(), [4, 5]);
//!     assert_eq!(y.full_tensor()?.dims(), [8, 10]);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # A model
//!
//! A plan names the modules to shard, and a style for each.
//!
//! ```
//! use dtensor::{nn::Linear, optim::AdamW, prelude::*};
//!
//! #[derive(Module)]
//! struct Mlp {
//!     up: Linear,
//!     down: Linear,
//! }
//!
//! #[forward]
//! impl Mlp {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.down.forward(self.up.forward(x)?.relu())
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! launch(4, |world| {
//!     let mesh = DeviceMesh::new(&world, [4], "tp")?;
//!     let model = Mlp { up: Linear::new(6, 10, true)?, down: Linear::new(10, 6, true)? };
//!     let plan = plan! { "up" => ColwiseParallel::new(), "down" => RowwiseParallel::new() };
//!     let model = parallelize_module(model, &mesh, plan)?;
//!     let optimizer = AdamW::new(model.parameters(), 0.01)?;
//!     let x = Tensor::rand([16, 6], DType::F32)?;
//!     model.forward(&x)?.mse_loss(&x, Reduction::Mean)?.backward()?;
//!     optimizer.step()
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # What to look for
//!
//! | to do this | use |
//! | --- | --- |
//! | create a tensor | [`Tensor::from_slice`], [`Tensor::zeros`], [`Tensor::randn`] |
//! | start ranks; call a collective | [`comm::launch`], [`comm::World`], [`comm::Group`] |
//! | create a mesh | [`DeviceMesh::new`] |
//! | create a distributed tensor | [`distribute_tensor`], [`Tensor::from_local`], [`sharded`] |
//! | change its placements | [`Tensor::redistribute`]; [`Tensor::explain_redistribute`] shows the collectives |
//! | get a local tensor | [`Tensor::to_local`], [`Tensor::full_tensor`] |
//! | compute gradients | [`Tensor::backward`], [`grad`], [`no_grad`], [`checkpoint()`] |
//! | write a model | [`nn`], [`nn::Module`], [`module!`]; [`models`] has small examples |
//! | shard a model | [`parallel`], [`plan!`], [`parallel::parallelize_module`] |
//! | train | [`optim`], [`autocast`], [`parallel::DataParallel`], [`parallel::fully_shard`] |
//! | save and load files | [`mod@checkpoint`] |
//! | find out what communicates | [`debug::CommDebugMode`], [`explicit_communication`] |
//! | find ranks that pass different batches | [`check_replicated`] |
//! | see which rank owns what | [`debug::visualize_sharding`] |
//! | compute on a GPU | [`Tensor::to_device`], [`on_device`], and the module `cuda` |
//! | write an operator | [`op::Op`], [`op::apply`]; [`testing::validate`] checks its sharding rule |
//! | test on several ranks | [`testing::spmd`] |
//!
//! In the repository, `docs/guide.md` is the guide, `crates/dtensor/examples` has one program per concept, and `docs/api-map.md` maps
//! the names of `torch.distributed.tensor` to those here. `ARCHITECTURE.md` describes the crates behind this one.
//!
//! # Features
//!
//! | feature | default | adds |
//! | --- | --- | --- |
//! | `mpi` | no | ranks as processes over MPI: `comm::World::mpi`, `comm::mpirun`. Needs an MPI library and libclang |
//! | `cuda` | no | tensors on NVIDIA GPUs, and the module `cuda`. Needs no CUDA to build |
//! | `candle` | no | conversions between [`Tensor`] and `candle_core::Tensor`, by `try_from` |
#![warn(missing_docs)]

// The code that the derive macro generates names this crate `dtensor`, also inside this crate.
extern crate self as dtensor;

mod autograd;
#[cfg(feature = "candle")]
mod candle;
pub mod checkpoint;
mod collectives;
pub mod comm;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda;
pub mod debug;
mod declare;
mod dispatch;
mod distributed;
mod journal;
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

pub use autograd::{BackwardOptions, checkpoint, checkpoint_all, enable_grad, grad, no_grad};
pub use dispatch::{
    ImplicitCommunication, autocast, autocast_dtype, autocast_off, explicit_communication,
    implicit_replication,
};
pub use distributed::{
    FromLocalOptions, RedistributeOptions, check_replicated, distribute_tensor, distribute_tensor_from,
    redistribute_coalesced, redistribute_coalesced_async, sharded,
};
pub use dtensor_array::shape::{Dim, Dims, INFER, NewShape};
pub use dtensor_array::{
    Array, DType, Device, Element, Scalar, Shape, num_threads, set_num_threads, with_num_threads,
};
pub use dtensor_array::{Error, Located, Other, Result};
pub use dtensor_layout::Placement::{self, Partial, Replicate, Shard, StridedShard};
pub use dtensor_layout::{CacheStats, Chunk, MeshDim, MeshNames, Placements};
pub use layout::Layout;
pub use mesh::{DeviceMesh, init_device_mesh, use_mesh};
pub use ops::{
    AttentionOptions, ConvOptions, CrossEntropyOptions, Gelu, Interpolation, Padding, QuantileOptions,
    Reduction,
};
pub use random::{
    Generator, GeneratorState, manual_seed, rng_state, set_rng_state, synchronize_rng, with_generator,
};
pub use tensor::{Operand, Tensor, default_device, on_device};

/// The items that an author of operators needs: [`Op`](op::Op) and [`apply`](op::apply), which has a complete example.
///
/// Outputs are short lists: `Ok([y].into())` for one, `Ok(vec![y, z].into())` for several, and [`grads!`](op::grads) for gradients.
/// A kernel reads typed elements with [`Array::with_host_slice`] and creates arrays with [`Array::from_vec`], which does not copy.
pub mod op {
    pub use crate::autograd::{Backward, Grads, Saves};
    pub use crate::dispatch::{apply, apply_all};
    pub use crate::grads;
    pub use crate::ops::{Arrays, Aside, Bits, Here, Metas, Op, Precision, Together};
    pub use dtensor_array::Meta;
    pub use dtensor_layout::{Attributes, Operator, Rule};
    #[doc(hidden)]
    pub use smallvec::smallvec;
}

/// Redistribution plans, as [`Tensor::explain_redistribute`] and [`Layout::plan_to`] return them, and their cost model.
pub mod redistribute {
    pub use dtensor_layout::{CostModel, Link, Plan, Step};
}

/// The items that most programs use: `use dtensor::prelude::*`.
pub mod prelude {
    pub use crate::comm::{Group, ReduceOp, World, launch};
    pub use crate::debug::CommDebugMode;
    pub use crate::nn::{Module, deep_copy, forward};
    pub use crate::optim::Optimizer;
    pub use crate::parallel::{
        ColwiseParallel, DataParallel, DistributeModule, FullyShardOptions, ParallelPlan, ParallelStyle,
        PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, RowwiseParallel, SequenceParallel,
        distribute_module, fully_shard, local_map, loss_parallel, parallelize_module,
    };
    pub use crate::{
        AttentionOptions, CrossEntropyOptions, DType, Device, DeviceMesh, Error, FromLocalOptions, Gelu,
        INFER, ImplicitCommunication, Layout, Partial, Placement, Reduction, Replicate, Result, Shape, Shard,
        StridedShard, Tensor, autocast, check_replicated, checkpoint, checkpoint_all, distribute_tensor,
        explicit_communication, implicit_replication, init_device_mesh, manual_seed, no_grad, sharded,
        use_mesh,
    };
    pub use crate::{module, plan};
}

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Compiles and runs the examples of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide.md")]
struct Guide;

/// Compiles and runs the examples of the map from PyTorch's names.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/api-map.md")]
struct ApiMap;
