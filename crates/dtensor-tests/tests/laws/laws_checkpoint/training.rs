//! A training goes on from its checkpoint: with the same bits on the same mesh, and with the same losses on any other.

use dtensor::checkpoint::{Checkpoint, CheckpointManager};
use dtensor::comm::World;
use dtensor::models::{ModelArgs, Transformer, TransformerParallel};
use dtensor::nn::Dropout;
use dtensor::optim::AdamW;
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{default_device, on_device, rng_state};

use crate::common::scratch::Scratch;

const STEPS: usize = 6;

fn args() -> ModelArgs {
    ModelArgs { dropout_p: 0.0, dim: 20, n_layers: 2, weight_tying: false, ..ModelArgs::default() }
}

/// A transformer on a mesh with dims `dp` and `tp`, fully sharded over `dp`.
struct Job {
    model: Transformer,
    optimizer: AdamW,
    dp: Option<DeviceMesh>,
}

impl Job {
    fn new(world: &World, shape: Option<[usize; 2]>) -> Result<Job> {
        let mesh = shape.map(|shape| DeviceMesh::new(world, shape, ["dp", "tp"])).transpose()?;
        let mut model = on_device(Device::Meta, || Transformer::new(&args()))?;
        let dp = mesh.as_ref().map(|mesh| mesh["dp"].clone());
        if let Some(mesh) = &mesh {
            if mesh["tp"].size() > 1 {
                let options = TransformerParallel { sequence_parallel: true, loss_parallel: false };
                model = Transformer::parallelize(model, &mesh["tp"], options)?;
            }
            for block in &model.layers {
                fully_shard(block, &mesh["dp"], FullyShardOptions::default())?;
            }
            fully_shard(&model, &mesh["dp"], FullyShardOptions::default())?;
        }
        model.to_empty(default_device()?)?;
        manual_seed(3);
        model.reset_parameters()?;
        let optimizer = AdamW::new(model.parameters(), 0.01)?;
        Ok(Job { model, optimizer, dp })
    }

    /// Takes a step on its slice of a batch that depends on the step's number. Returns the loss of the full batch.
    fn step(&self, number: usize) -> Result<f32> {
        let mut batch = dtensor::Generator::new(number as u64);
        let rows = Tensor::randint_with(0, args().vocab_size as i64, [8, 6], &mut batch)?;
        let (index, count) =
            self.dp.as_ref().map_or(Ok((0, 1)), |dp| Result::Ok((dp.local_rank(())?, dp.size())))?;
        let own = rows.narrow(0, index * 8 / count, 8 / count)?;
        self.optimizer.zero_grad();
        let logits = self.model.forward(&own)?.reshape([own.numel(), args().vocab_size])?;
        let loss = logits.cross_entropy(&own.flatten_all()?, CrossEntropyOptions::default())?;
        loss.backward()?;
        self.optimizer.step()?;
        let loss = if loss.is_distributed() { loss.full_tensor()? } else { loss };
        match &self.dp {
            Some(dp) => dp.group(())?.all_reduce(&loss.detach(), ReduceOp::Avg)?.item::<f32>(),
            None => loss.item::<f32>(),
        }
    }

    fn contents(&self) -> Checkpoint<'_> {
        Checkpoint::new().model(&self.model).optimizer(&self.optimizer).generator()
    }
}

#[test]
fn training_goes_on_from_a_checkpoint_on_any_mesh() {
    spmd(4, |world| {
        let scratch = Scratch::shared(&world)?;
        let shapes = [[4, 1], [2, 2], [1, 2], [2, 1], [1, 4]];
        let mut continued = Vec::new();
        for shape in shapes {
            let manager = CheckpointManager::new(scratch.join(format!("{shape:?}")));
            let ranks = shape[0] * shape[1];
            if world.rank() >= ranks {
                // The ranks of a smaller mesh create it without the others.
                DeviceMesh::new(&world, shape, ["dp", "tp"])?;
                continued.push(Vec::new());
                continue;
            }
            let job = Job::new(&world, Some(shape))?;
            let mut losses = Vec::new();
            for step in 0..STEPS {
                if step == STEPS / 2 {
                    // In the background, while training goes on.
                    let saving = manager.save_async(
                        step as u64,
                        &job.contents().value("step", step).value("losses", &losses),
                    )?;
                    losses.push(job.step(step)?);
                    saving.wait()?;
                } else {
                    losses.push(job.step(step)?);
                }
            }
            continued.push(losses);
        }
        world.group().barrier()?;
        for to in shapes {
            if world.rank() >= to[0] * to[1] {
                DeviceMesh::new(&world, to, ["dp", "tp"])?;
                continue;
            }
            for (from, expected) in shapes.iter().zip(&continued) {
                let manager = CheckpointManager::new(scratch.join(format!("{from:?}")));
                let job = Job::new(&world, Some(to))?;
                let step = manager.latest()?.expect("was saved");
                let loaded = manager.load(step, &job.contents())?;
                let mut losses: Vec<f32> = loaded.value("losses")?;
                for step in loaded.value::<usize>("step")?..STEPS {
                    losses.push(job.step(step)?);
                }
                if to == *from {
                    assert_eq!(losses, *expected, "{from:?}");
                }
                for (a, b) in losses.iter().zip(&continued[0]) {
                    assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{from:?} to {to:?}: {a} and {b}");
                }
            }
        }
        world.group().barrier()
    });
}

#[test]
fn one_device_goes_on_with_the_same_bits() -> Result<()> {
    let (scratch, world) = (Scratch::new(), World::simulated(1, 0)?);
    let manager = CheckpointManager::new(scratch.join("run")).keep(2);
    let job = Job::new(&world, None)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        manager.save(step as u64, &job.contents())?;
        losses.push(job.step(step)?);
    }
    assert_eq!(manager.steps()?, [4, 5]);
    let again = Job::new(&world, None)?;
    manager.load(4, &again.contents())?;
    assert_eq!([again.step(4)?, again.step(5)?], losses[4..]);
    Ok(())
}

#[test]
fn the_generator_of_each_rank_is_restored_where_it_can_be() {
    spmd(4, |world| {
        let scratch = Scratch::shared(&world)?;
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let model = Dropout::new(0.5)?;
        let contents = || Checkpoint::new().model(&model).generator().group(world.group());
        // As many draws as the rank's number.
        manual_seed(5);
        for _ in 0..world.rank() {
            Tensor::rand([1], DType::F32)?;
        }
        contents().save(scratch.join("different"))?;
        let own = rng_state();
        manual_seed(9);
        assert!(contents().load(scratch.join("different"))?.generator);
        assert_eq!(rng_state(), own);
        manual_seed(9);
        contents().save(scratch.join("equal"))?;
        manual_seed(1);
        // Two ranks cannot have the states of four, but one state that all had.
        let pair = mesh["dp"].group(())?;
        assert!(!Checkpoint::new().generator().group(pair).load(scratch.join("different"))?.generator);
        assert_eq!(rng_state().seed, 1);
        assert!(Checkpoint::new().generator().group(pair).load(scratch.join("equal"))?.generator);
        assert_eq!(rng_state().seed, 9);
        Checkpoint::new().model(&model).group(world.group()).save(scratch.join("none"))?;
        let error = contents().load(scratch.join("none")).unwrap_err().to_string();
        assert!(error.contains("no generator was saved"), "{error}");
        world.group().barrier()
    });
}
