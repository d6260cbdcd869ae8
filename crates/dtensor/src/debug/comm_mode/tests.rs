//! Tests of the counts and names of modules that are recomputed in backward.

use super::CommDebugMode;
use crate::autograd::{Backward, Grads, Phase, Recorded, Saves, in_phase};
use crate::dispatch::record;
use crate::nn::{Base, Linear, Module, forward};
use crate::{
    DType, DeviceMesh, Placement, Replicate, Result, Shard, Tensor, distribute_tensor, no_grad, sharded,
};

/// A module that communicates each time it runs.
#[derive(Clone, Debug, Module)]
struct Block {
    layer: Linear,
    relu: Relu,
    base: Base,
}

/// A module without parameters, buffers or a base.
#[derive(Clone, Debug, Module)]
struct Relu;

#[forward]
impl Relu {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.relu()
    }
}

#[forward]
impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.relu.forward(&self.layer.forward(x)?.redistribute([Replicate])?)
    }
}

/// Saves only the input of its block, and recomputes the block in backward.
#[derive(Clone, Debug, Module)]
struct Recompute {
    block: Block,
}

#[forward]
impl Recompute {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = no_grad(|| self.block.forward(x))?;
        Ok(record(RecomputeNode(self.block.clone()), x, y.value().clone()))
    }
}

#[derive(Debug)]
struct RecomputeNode(Block);

impl Recorded for RecomputeNode {
    fn name(&self) -> &'static str {
        "rerun"
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let y = in_phase(Phase::Recomputation, || self.0.forward(cx.input(0)?.detach()))?;
        Ok(Grads::from_elem(Some(cx.dy()?.mul(&y)?), 1))
    }
}

fn model() -> Result<(Recompute, Tensor)> {
    let mesh = DeviceMesh::new(&crate::comm::World::simulated(4, 0)?, [4], "tp")?;
    let block = Block { layer: Linear::new(8, 8, false)?, relu: Relu, base: Base::new() };
    let weight = distribute_tensor(&block.layer.weight.get(), &mesh, [Shard(1)])?;
    block.register_parameter("layer.weight", &weight)?;
    let x = sharded::ones([4, 8], DType::F32, &mesh, [Replicate])?.requires_grad_(true)?;
    Ok((Recompute { block }, x))
}

/// The all-reduce counts of each module: forward, backward, recomputation.
fn counts(mode: &CommDebugMode) -> Vec<(&'static str, [usize; 3])> {
    let of = |counts: &super::ModuleCounts| {
        [&counts.forward, &counts.backward, &counts.recomputation].map(|counts| counts["all_reduce"])
    };
    mode.comm_module_counts().iter().map(|(path, counts)| (*path, of(counts))).collect()
}

#[test]
fn recomputation_is_counted_separately_under_the_same_module_names() -> Result<()> {
    let (model, x) = model()?;
    let mode = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
    let expected = [
        ("Global", [1, 0, 1]),
        ("Recompute", [1, 0, 1]),
        ("Recompute.block", [1, 0, 1]),
        ("Recompute.block.layer", [0, 0, 0]),
        ("Recompute.block.relu", [0, 0, 0]),
    ];
    assert_eq!(counts(&mode), expected);
    let recomputed: Vec<_> = mode
        .operations()
        .into_iter()
        .filter(|op| op.phase == Phase::Recomputation)
        .map(|op| (op.name, op.module))
        .collect();
    let expected = [
        ("linear", "Recompute.block.layer"),
        ("redistribute", "Recompute.block"),
        ("relu", "Recompute.block.relu"),
    ];
    assert_eq!(recomputed, expected);
    let table = mode.tracing_table(0)?;
    assert_eq!(table.matches("ACTIVATION CHECKPOINTING").count(), 3, "{table}");
    let json: serde_json::Value = serde_json::from_str(&mode.to_json(1)?).expect("it is JSON");
    let block = &json["children"][0]["children"][0];
    assert_eq!(block["collectives_checkpointing"][0]["count"], 1);
    assert_eq!(block["operations_checkpointing"][0]["name"], "redistribute");
    assert_eq!(block["children"][0]["operations_checkpointing"][0]["name"], "linear");
    Ok(())
}

#[test]
fn module_names_are_the_same_in_a_later_run() -> Result<()> {
    let (model, x) = model()?;
    let mode = CommDebugMode::new();
    let loss = mode.run(|| model.forward(&x)?.sum_all())?;
    // Another model runs in between.
    let (other, y) = self::model()?;
    mode.run(|| other.forward(&y))?;
    mode.run(|| loss.backward())?;
    let expected = [
        ("Global", [0, 0, 1]),
        ("Recompute", [0, 0, 1]),
        ("Recompute.block", [0, 0, 1]),
        ("Recompute.block.layer", [0, 0, 0]),
        ("Recompute.block.relu", [0, 0, 0]),
    ];
    assert_eq!(counts(&mode), expected);
    let placements: Vec<Placement> = mode.get_sharding_info()["Recompute.block.layer.weight"].clone();
    assert_eq!(placements, [Shard(1)]);
    Ok(())
}
