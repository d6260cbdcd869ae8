//! Checkpoints: two tensor-parallel ranks save, three fully sharded ranks continue.
//!
//! `cargo run --example checkpoint_files`

use dtensor::checkpoint::{Checkpoint, CheckpointManager};
use dtensor::nn::Linear;
use dtensor::optim::AdamW;
use dtensor::parallel::{FullyShardOptions, fully_shard};
use dtensor::prelude::*;
use dtensor::{Device, on_device};

/// Takes a step on the same batch every time, and returns the loss before it.
fn step(model: &Linear, optimizer: &AdamW, batch: &Tensor) -> Result<f32> {
    optimizer.zero_grad();
    let loss = model.forward(batch)?.pow(2)?.mean_all()?;
    loss.backward()?;
    optimizer.step()?;
    loss.item::<f32>()
}

pub(crate) fn main() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("dtensor-example-{}", std::process::id()));
    let steps = CheckpointManager::new(&folder).keep(1);
    let batch = Tensor::rand([12, 6], DType::F32)?;

    let saved = launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let model = parallelize_module(
            Linear::new(6, 10, true)?,
            &mesh,
            plan! { "" => ColwiseParallel::new().output_layouts(Replicate) },
        )?;
        let optimizer = AdamW::new(model.parameters(), 0.01)?;
        let mut saving = None;
        for number in 1..=3u64 {
            let loss = step(&model, &optimizer, &batch)?;
            let contents = Checkpoint::new().model(&model).optimizer(&optimizer).value("loss", loss);
            // The files are written while the next step runs.
            if let Some(earlier) = saving.replace(steps.save_async(number, &contents)?) {
                earlier.wait()?;
            }
        }
        saving.map_or(Ok(()), |last| last.wait())?;
        step(&model, &optimizer, &batch) // the loss that the next run must find
    })?;

    let newest = steps.latest()?.expect("a step was saved");
    launch(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "dp")?;
        let model = on_device(Device::Meta, || Linear::new(6, 10, true))?; // no memory yet
        let model = fully_shard(model, &mesh, FullyShardOptions::default())?;
        model.to_empty(Device::Cpu)?;
        let optimizer = AdamW::new(model.parameters(), 0.01)?;
        let loaded = Checkpoint::new().model(&model).optimizer(&optimizer).load(steps.path(newest))?;
        let slice = batch.narrow(0, 4 * world.rank(), 4)?;
        let loss =
            mesh.group(())?.all_reduce(&Tensor::scalar(step(&model, &optimizer, &slice)?)?, ReduceOp::Avg)?;
        let (loss, expected) = (loss.item::<f32>()?, saved[0]);
        assert!((loss - expected).abs() < 1e-5, "{loss}, on two ranks {expected}");
        if world.rank() == 0 {
            println!(
                "loss {:.4} was saved at step {newest}; the next is {loss:.4}",
                loaded.value::<f32>("loss")?
            );
        }
        Ok(())
    })?;
    std::fs::remove_dir_all(&folder).expect("the folder exists");
    Ok(())
}
