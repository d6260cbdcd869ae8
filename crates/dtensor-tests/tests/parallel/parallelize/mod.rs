//! Tests of `parallelize_module`: plans, layouts, errors, and results that match a single device.

mod laid;
mod plans;
mod refused;
mod values;

use std::collections::BTreeMap;

use dtensor::comm::{World, launch, record};
use dtensor::models::{MLPModule, MLPStacked, ModelArgs, Transformer};
use dtensor::nn::{
    Base, Buffer, Embedding, Identity, LayerNorm, Linear, MultiHeadAttention, Parameter, Relu, StateDict,
    deep_copy,
};
use dtensor::optim::Sgd;
use dtensor::parallel::{ParallelPlan, ParallelizeOptions, Partition, parallelize_module_with};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{distribute_tensor_from, on_device};

use crate::common::modules::{close, counted, raises};
use crate::common::warnings::warnings;

const RANKS: usize = 4;

fn line(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], "tp")
}

fn mlp() -> ParallelPlan {
    plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() }
}

/// Returns the name and the placements of every parameter and buffer, with `-` for a plain tensor.
fn laid(module: &dyn Module) -> Vec<String> {
    let shown = |x: &Tensor| match x.placements() {
        [] => "-".to_string(),
        placements => placements.iter().map(Placement::to_string).collect(),
    };
    let parameters = module.named_parameters().into_iter().map(|(name, p)| (name, p.get()));
    let buffers = module.named_buffers().into_iter().map(|(name, b)| (name, b.get()));
    parameters.chain(buffers).map(|(name, x)| format!("{name} {}", shown(&x))).collect()
}

/// Returns everything that a plan could change in a module: values, layouts, `requires_grad`, gradients and hooks.
fn whole_state(module: &dyn Module) -> BTreeMap<String, String> {
    let value = |x: &Tensor| {
        let local = if x.is_distributed() { x.to_local().unwrap() } else { x.clone() };
        let values = if x.is_meta() { Vec::new() } else { local.to_f64_vec().unwrap() };
        format!("{:?} {} {:?}", values, x.requires_grad(), x.layout())
    };
    let mut all = BTreeMap::new();
    for (name, parameter) in module.named_parameters() {
        all.insert(format!("{name} grad"), format!("{:?}", parameter.grad().as_ref().map(value)));
        all.insert(name, value(&parameter.get()));
    }
    for (name, buffer) in module.named_buffers() {
        all.insert(name, value(&buffer.get()));
    }
    for (name, part) in module.named_modules() {
        all.insert(format!("{name} hooks"), format!("{:?}", part.base()));
    }
    all
}

/// Asserts that a plan returns an error with all of `words`, without communication, and leaves the module unchanged.
#[track_caller]
fn refused(module: &dyn Module, mesh: &DeviceMesh, plan: impl Into<ParallelPlan>, words: &[&str]) {
    let before = whole_state(module);
    let (error, counts) = counted(|| Ok(parallelize_module(module, mesh, plan).err())).unwrap();
    let error = error.unwrap_or_else(|| panic!("accepted, but expected {words:?}")).to_string();
    for words in words {
        assert!(error.contains(words), "{words:?} is not in {error}");
    }
    assert_eq!(counts, "0");
    assert_eq!(whole_state(module), before);
}
