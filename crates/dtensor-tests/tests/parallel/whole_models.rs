//! Tests that count the collectives of complete models in forward, backward and the optimizer on four ranks, as PyTorch's
//! `test_tp_examples` does.
//!
//! One thing differs from PyTorch. Here the gradients of leaves are redistributed together, at the end of backward, to the
//! layouts of the leaves, so optimizers never communicate. PyTorch leaves the gradients of the ten norm parameters under
//! sequence parallelism partial, and its Adam reduces each of them three times in every step.

use dtensor::models::{MLPModule, ModelArgs, Transformer};
use dtensor::optim::Sgd;
use dtensor::parallel::{ColwiseParallel, RowwiseParallel, parallelize_module};
use dtensor::plan;
use dtensor::prelude::*;
use dtensor::testing::spmd;

use crate::common::modules::counted;

fn mlp(world: &World, sequence: bool, input_grad: bool) -> Result<[String; 3]> {
    let mesh = DeviceMesh::new(world, [4], "tp")?;
    let plan = if sequence {
        plan! {
            "net1" => ColwiseParallel::new().input_layouts(Shard(0)),
            "net2" => RowwiseParallel::new().output_layouts(Shard(0)),
        }
    } else {
        plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() }
    };
    let model = parallelize_module(MLPModule::new(true)?, &mesh, plan)?;
    manual_seed(if sequence { world.rank() as u64 } else { 0 });
    let x = Tensor::rand([20, 10], DType::F32)?.requires_grad_(input_grad)?;
    let (y, forward) = counted(|| model.forward(&x))?;
    let ((), backward) = counted(|| y.sum_all()?.backward())?;
    let ((), step) = counted(|| Sgd::new(model.parameters(), 0.25)?.step())?;
    // Inference has the same collectives as forward.
    model.eval();
    let (_, eval) = counted(|| no_grad(|| model.forward(&x)))?;
    assert_eq!(eval, forward);
    Ok([forward, backward, step])
}

#[test]
fn test_mlp_training_and_inference() {
    spmd(4, |world| {
        // Forward, backward, optimizer.
        assert_eq!(mlp(&world, false, false)?, ["AR 1", "0", "0"]);
        assert_eq!(mlp(&world, false, true)?, ["AR 1", "AR 1", "0"]);
        assert_eq!(mlp(&world, true, false)?, ["AG 1 + RS 1", "AG 1", "0"]);
        assert_eq!(mlp(&world, true, true)?, ["AG 1 + RS 1", "AG 1 + RS 1", "0"]);
        Ok(())
    });
}

fn transformer(world: &World, args: &ModelArgs, sequence: bool) -> Result<[String; 3]> {
    let mesh = DeviceMesh::new(world, [4], "tp")?;
    manual_seed(5);
    let model = Transformer::parallelize(Transformer::new(args)?, &mesh, sequence)?;
    let tokens = Tensor::randint(0, args.vocab_size as i64, [8, 8])?;
    let (y, forward) = counted(|| model.forward(&tokens))?;
    let ((), backward) = counted(|| y.sum_all()?.backward())?;
    let ((), step) = counted(|| Sgd::new(model.parameters(), 0.25)?.step())?;
    model.eval();
    let (_, eval) = counted(|| no_grad(|| model.forward(&tokens)))?;
    assert_eq!(eval, forward);
    if args.weight_tying {
        assert!(model.output.weight.is(&model.tok_embeddings.weight));
    }
    Ok([forward, backward, step])
}

#[test]
fn test_transformer_training_and_inference() {
    spmd(4, |world| {
        for weight_tying in [true, false] {
            let args = ModelArgs { dropout_p: 0.0, weight_tying, ..ModelArgs::default() };
            assert_eq!(transformer(&world, &args, false)?, ["AG 1 + AR 6", "AR 9", "0"]);
            // Five norms have a weight and a bias each. Their ten partial gradients are reduced together.
            assert_eq!(transformer(&world, &args, true)?, ["AG 6 + RS 6", "AG 6 + AR 1 + RS 5", "0"]);
        }
        Ok(())
    });
}

/// Recomputation repeats the collectives of a layer's forward pass and nothing else.
#[test]
fn checkpointed_layers_repeat_the_collectives_of_forward() {
    spmd(4, |world| {
        let args = ModelArgs { dropout_p: 0.1, checkpoint_activations: true, ..ModelArgs::default() };
        // Two layers with two all-reduces each.
        assert_eq!(transformer(&world, &args, false)?, ["AG 1 + AR 6", "AR 13", "0"]);
        // Two layers with two gathers and two scatters each.
        assert_eq!(transformer(&world, &args, true)?, ["AG 6 + RS 6", "AG 10 + AR 1 + RS 9", "0"]);
        Ok(())
    });
}
