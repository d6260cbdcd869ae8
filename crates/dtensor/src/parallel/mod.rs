//! Models on a mesh of ranks: which parameter lies where, and how inputs and outputs come and go.
//!
//! A plan names the parts of a model and says how each is to be spread. The model itself stays as it was written for one
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
//!         self.net2.forward(&self.relu.forward(&self.net1.forward(x)?)?)
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
//! | | parameters | inputs | outputs |
//! | --- | --- | --- | --- |
//! | [`ColwiseParallel`] | each rank has some of the outputs of a linear layer, or of the columns of an embedding | whole | cut along the last dim |
//! | [`RowwiseParallel`] | each rank has some of the inputs of a linear layer, or of the words of an embedding | cut along the last dim (words: whole) | whole |
//! | [`SequenceParallel`] | whole | cut along the sequence | cut along the sequence |
//! | [`PrepareModuleInput`], [`PrepareModuleOutput`], [`PrepareModuleInputOutput`] | as they are | brought to where they are wanted | brought to where they are wanted |
//!
//! These are all values of [`ParallelStyle`], which anybody may implement. [`distribute_module`] is for what is none of them:
//! functions say what becomes of the parameters, the inputs and the outputs.
//!
//! [`DataParallel`] is for the other way to use several ranks: each has the model, or, with the above, each row of the mesh has it,
//! and sees its part of the batch.
//!
//! [`local_map`] goes one level down: it runs a function of plain tensors on this rank's parts of distributed ones.
//!
//! Everything is checked before anything is changed, and what fails half-way is undone: after an error the model is what it was.
//!
//! This room knows modules, their hooks, layouts, and how tensors come on a mesh and off it. It communicates through these alone.

mod colwise;
mod data_parallel;
mod distribute;
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
mod rowwise;
mod sequence;
mod steps;
mod style;

pub use crate::ops::loss_parallel;
pub use crate::plan;
pub use colwise::ColwiseParallel;
pub use data_parallel::{DataParallel, DataParallelOptions};
pub use distribute::distribute_module;
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
