//! What is computed again for gradients, and who is meant by it.

use super::CommDebugMode;
use crate::autograd::{Backward, Grads, Phase, Recorded, Saves, in_phase};
use crate::dispatch::record;
use crate::nn::{Base, Linear, Module, forward};
use crate::{
    DType, DeviceMesh, Placement, Replicate, Result, Shard, Tensor, distribute_tensor, no_grad, sharded,
};

/// A part that communicates each time it runs.
#[derive(Clone, Debug, Module)]
struct Block {
    layer: Linear,
    bend: Bend,
    base: Base,
}

/// Nothing tells one of these from another.
#[derive(Clone, Debug, Module)]
struct Bend;

#[forward]
impl Bend {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.relu()
    }
}

#[forward]
impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.bend.forward(&self.layer.forward(x)?.redistribute([Replicate])?)
    }
}

/// Keeps nothing of its block but what goes in, and runs it again when it is asked for the gradient.
#[derive(Clone, Debug, Module)]
struct Again {
    block: Block,
}

#[forward]
impl Again {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = no_grad(|| self.block.forward(x))?;
        Ok(record(Rerun(self.block.clone()), x, y.value().clone()))
    }
}

#[derive(Debug)]
struct Rerun(Block);

impl Recorded for Rerun {
    fn name(&self) -> &'static str {
        "rerun"
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let y = in_phase(Phase::Recomputation, || self.0.forward(&cx.input(0)?.detach()))?;
        Ok(Grads::from_elem(Some(cx.dy()?.mul(&y)?), 1))
    }
}

fn model() -> Result<(Again, Tensor)> {
    let mesh = DeviceMesh::new(&crate::comm::World::simulated(4, 0)?, [4], "tp")?;
    let block = Block { layer: Linear::new(8, 8, false)?, bend: Bend, base: Base::new() };
    let weight = distribute_tensor(&block.layer.weight.get(), &mesh, [Shard(1)])?;
    block.register_parameter("layer.weight", &weight)?;
    let x = sharded::ones([4, 8], DType::F32, &mesh, [Replicate])?.requires_grad_(true)?;
    Ok((Again { block }, x))
}

/// How often each module called all-reduce, forward, backward and again.
fn counts(mode: &CommDebugMode) -> Vec<(&'static str, [usize; 3])> {
    let of = |counts: &super::ModuleCounts| {
        [&counts.forward, &counts.backward, &counts.recomputation].map(|counts| counts["all_reduce"])
    };
    mode.comm_module_counts().iter().map(|(path, counts)| (*path, of(counts))).collect()
}

#[test]
fn what_runs_again_counts_by_itself_under_the_same_names() -> Result<()> {
    let (model, x) = model()?;
    let mode = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
    let expected = [
        ("Global", [1, 0, 1]),
        ("Again", [1, 0, 1]),
        ("Again.block", [1, 0, 1]),
        ("Again.block.layer", [0, 0, 0]),
        ("Again.block.bend", [0, 0, 0]),
    ];
    assert_eq!(counts(&mode), expected);
    let again: Vec<_> = mode
        .operations()
        .into_iter()
        .filter(|op| op.phase == Phase::Recomputation)
        .map(|op| (op.name, op.module))
        .collect();
    let expected =
        [("linear", "Again.block.layer"), ("redistribute", "Again.block"), ("relu", "Again.block.bend")];
    assert_eq!(again, expected);
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
fn the_names_are_the_same_in_another_scope() -> Result<()> {
    let (model, x) = model()?;
    let mode = CommDebugMode::new();
    let loss = mode.run(|| model.forward(&x)?.sum_all())?;
    // Other models may have run in between.
    let (other, y) = self::model()?;
    mode.run(|| other.forward(&y))?;
    mode.run(|| loss.backward())?;
    let expected = [
        ("Global", [0, 0, 1]),
        ("Again", [0, 0, 1]),
        ("Again.block", [0, 0, 1]),
        ("Again.block.layer", [0, 0, 0]),
        ("Again.block.bend", [0, 0, 0]),
    ];
    assert_eq!(counts(&mode), expected);
    let placements: Vec<Placement> = mode.get_sharding_info()["Again.block.layer.weight"].clone();
    assert_eq!(placements, [Shard(1)]);
    Ok(())
}
