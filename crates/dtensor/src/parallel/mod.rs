//! Tensor, sequence and data parallelism for modules: plans, styles, hooks on inputs and outputs.
//!
//! A plan gives each submodule of a model a parallel style. The model's own code stays as it was written for one
//! device:
//!
//! ```
//! use dtensor::nn::{Linear, Module, Relu, forward};
//! use dtensor::prelude::*;
//!
//! #[derive(Module)]
//! struct Mlp {
//!     net1: Linear,
//!     relu: Relu,
//!     net2: Linear,
//! }
//!
//! #[forward]
//! impl Mlp {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.net2.forward(self.relu.forward(self.net1.forward(x)))
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! launch(4, |world| {
//!     let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
//!     let model = Mlp { net1: Linear::new(8, 32, true)?, relu: Relu::new(), net2: Linear::new(32, 8, true)? };
//!     let model = parallelize_module(
//!         model,
//!         &mesh["tp"],
//!         plan! {
//!             "net1" => ColwiseParallel::new(),
//!             "net2" => RowwiseParallel::new(),
//!         },
//!     )?;
//!     assert_eq!(model.net1.weight.get().to_local()?.dims(), [16, 8]);
//!     let x = Tensor::ones([3, 8], DType::F32)?;
//!     let (y, calls) = dtensor::comm::record(|| model.forward(&x));
//!     assert_eq!(y?.dims(), [3, 8]);
//!     assert_eq!(calls.len(), 1);
//!     assert_eq!(calls[0].collective.name(), "all_reduce");
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! | | parameters | input | output |
//! | --- | --- | --- | --- |
//! | [`ColwiseParallel`] | sharded along the output features of a linear layer, or the columns of an embedding | replicated | sharded along the last dim |
//! | [`RowwiseParallel`] | sharded along the input features of a linear layer, or the rows (token ids) of an embedding | sharded along the last dim (token ids: replicated) | replicated |
//! | [`SequenceParallel`] | replicated | sharded along the sequence dim | sharded along the sequence dim |
//! | [`PrepareModuleInput`], [`PrepareModuleOutput`], [`PrepareModuleInputOutput`] | unchanged | redistributed as requested | redistributed as requested |
//!
//! A model with attention heads is written with the size of a head, not the number of heads
//! ([`unflatten`](crate::Tensor::unflatten)), and with a mask that is an attribute
//! ([`causal`](crate::AttentionOptions::causal)). It then runs on the heads of this rank, whether a style returns local or distributed
//! tensors.
//!
//! Each of these implements [`ParallelStyle`], and so can your own type. If no style fits, [`distribute_module`]
//! takes functions that set the placements of the parameters and convert the inputs and outputs.
//!
//! [`DataParallel`] replicates a model over ranks that each see a different slice of the batch. It also works over
//! one mesh dim of a model that is sharded along another.
//!
//! [`local_map`] works one level below modules: it runs a function of plain tensors on this rank's shards of
//! distributed tensors.
//!
//! A plan is checked before anything is changed, and changes are undone if a later one fails: after an error the
//! model is as it was before.
//!
//! This module depends on modules and their hooks, on layouts, and on the conversions between plain and distributed tensors.
//! Only [`DataParallel`] calls collectives directly.

mod colwise;
mod data_parallel;
mod distribute;
mod fully_shard;
mod functions;
mod hooks;
mod layouts;
mod local_map;
mod parallelize;
mod path;
mod plan;
mod prepare_input;
mod prepare_input_output;
mod prepare_output;
mod resolve;
mod rowwise;
mod sequence;
mod style;

pub use crate::distributed::no_sync;
pub use crate::ops::loss_parallel;
pub use crate::plan;
pub use colwise::ColwiseParallel;
pub use data_parallel::{DataParallel, DataParallelOptions};
pub use distribute::distribute_module;
pub use fully_shard::{FullyShardOptions, MixedPrecision, ShardDim, fully_shard};
pub use functions::{DistributeModule, NewInputs};
pub use layouts::{Layouts, NamedLayouts};
pub use local_map::{
    Leaf, Leaves, LocalMap, MapFunction, MapValue, PassThrough, PerTensor, Plain, Tensors, local_map,
};
pub use parallelize::{ParallelizeOptions, parallelize_module, parallelize_module_with};
pub use plan::ParallelPlan;
pub use prepare_input::PrepareModuleInput;
pub use prepare_input_output::PrepareModuleInputOutput;
pub use prepare_output::PrepareModuleOutput;
pub use rowwise::RowwiseParallel;
pub use sequence::SequenceParallel;
pub use style::{ParallelStyle, Partition};
