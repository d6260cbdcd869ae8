//! Tests values made outside `launch`: an attempt by several ranks to change one is an error on every rank and leaves
//! it unchanged. Reading is fine.

use dtensor::comm::{WorldKind, launch};
use dtensor::models::MLPModule;
use dtensor::nn::{Linear, Module, deep_copy};
use dtensor::optim::{Optimizer, Sgd};
use dtensor::parallel::DistributeModule;
use dtensor::prelude::*;
use dtensor::testing::spmd;

/// Checks that each rank's error names what is shared and what to do.
fn refused<T: std::fmt::Debug>(result: Result<T>, op: &str) {
    let message = result.unwrap_err().to_string();
    for word in [op, "shared between ranks", "make it inside `launch`", "`deep_copy`"] {
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn parallelizing_a_module_made_outside_is_an_error_on_every_rank() -> Result<()> {
    let outer = MLPModule::new(true)?;
    let before = outer.net1.weight.get();
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let plan = || plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
        refused(parallelize_module(outer.clone(), &mesh, plan()), "parallelize_module: `net1.weight`");
        refused(distribute_module(outer.clone(), &mesh, DistributeModule::default()), "distribute_module");
        // Each rank may change its own copy and read the original.
        let own = parallelize_module(deep_copy(&outer)?, &mesh, plan())?;
        let x = Tensor::ones([2, 10], DType::F32)?;
        let (one, many) = (outer.forward(&x)?, own.forward(&x)?);
        let close = |(a, b): (f32, f32)| (a - b).abs() < 1e-5;
        assert!(one.to_vec::<f32>()?.into_iter().zip(many.to_vec::<f32>()?).all(close));
        world.group().barrier()
    })?;
    assert!(!outer.net1.weight.get().is_distributed());
    assert_eq!(outer.net1.weight.get().to_vec::<f32>()?, before.to_vec::<f32>()?);
    Ok(())
}

#[test]
fn changing_leaves_parameters_and_optimizers_made_outside_is_an_error() -> Result<()> {
    let leaf = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
    let layer = Linear::new(2, 2, true)?;
    let optimizer = Sgd::new(layer.parameters(), 0.5)?;
    layer.forward(&Tensor::ones([1, 2], DType::F32)?)?.sum_all()?.backward()?;
    let grad = layer.weight.grad().unwrap().to_vec::<f32>()?;
    let value = layer.weight.get().to_vec::<f32>()?;
    launch(2, |world| {
        refused(leaf.mul(2.0)?.sum_all()?.backward(), "backward");
        refused(layer.forward(&leaf.detach().view([1, 2])?)?.sum_all()?.backward(), "backward");
        refused(layer.weight.set(&Tensor::zeros([2, 2], DType::F32)?), "set");
        refused(optimizer.step(), "step");
        // Gradients that do not accumulate in the shared leaf are fine.
        let d = dtensor::grad(&leaf.mul(3.0)?.sum_all()?, &[&leaf], Default::default())?;
        assert_eq!(d[0].as_ref().unwrap().to_vec::<f32>()?, [3.; 2]);
        world.group().barrier()
    })?;
    assert!(leaf.grad().is_none());
    assert_eq!(
        (layer.weight.grad().unwrap().to_vec::<f32>()?, layer.weight.get().to_vec::<f32>()?),
        (grad, value)
    );
    optimizer.step()
}

#[test]
fn a_module_made_by_a_rank_can_be_changed_after_the_launch() -> Result<()> {
    let made = launch(2, |_| {
        let layer = Linear::new(2, 2, true)?;
        layer.forward(&Tensor::ones([1, 2], DType::F32)?)?.sum_all()?.backward()?;
        Ok(layer)
    })?;
    Sgd::new(made[0].parameters(), 0.5)?.step()?;
    // The ranks of a later launch may not change it.
    launch(2, |world| {
        refused(made[world.rank()].weight.set(&Tensor::zeros([2, 2], DType::F32)?), "set");
        Ok(())
    })?;
    Ok(())
}

/// A single rank shares nothing.
#[test]
fn a_single_rank_may_change_a_module_made_outside() -> Result<()> {
    let layer = Linear::new(2, 2, true)?;
    launch(1, |_| layer.forward(&Tensor::ones([1, 2], DType::F32)?)?.sum_all()?.backward())?;
    assert!(layer.weight.grad().is_some());
    Ok(())
}

#[test]
fn ranks_as_processes_may_change_a_module_made_outside_but_threads_may_not() {
    let layer = Linear::new(2, 2, true).unwrap();
    spmd(2, |world| {
        let result = layer.forward(&Tensor::ones([1, 2], DType::F32)?)?.sum_all()?.backward();
        assert_eq!(result.is_ok(), world.kind() == WorldKind::Mpi);
        Ok(())
    });
}
