//! Fully sharded parameters: each rank stores a quarter of the model, and learns what one device learns.
//!
//! `cargo run --example fully_shard`

use dtensor::comm::record;
use dtensor::debug::record_memory;
use dtensor::models::MLPStacked;
use dtensor::optim::AdamW;
use dtensor::parallel::{FullyShardOptions, fully_shard};
use dtensor::prelude::*;
use dtensor::{Device, on_device};

/// Runs one training step on a slice of the batch.
fn step(model: &MLPStacked, optimizer: &AdamW, slice: &Tensor) -> Result<Tensor> {
    optimizer.zero_grad();
    let loss = model.forward(slice)?.sub(slice)?.pow(2)?.mean_all()?;
    loss.backward()?;
    optimizer.step()?;
    Ok(loss.detach())
}

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "dp")?;
        // No rank ever has the full model: it is created without memory, sharded, and then each rank draws its shards.
        let model = on_device(Device::Meta, || MLPStacked::new(3))?;
        for block in &model.layers {
            fully_shard(block, &mesh, FullyShardOptions::default())?;
        }
        let model = fully_shard(model, &mesh, FullyShardOptions::default())?;
        model.to_empty(Device::Cpu)?;
        model.reset_parameters()?;
        let single = MLPStacked::new(3)?;
        for (one, sharded) in single.parameters().iter().zip(model.parameters()) {
            one.set(&sharded.get().full_tensor()?)?;
        }

        let batch = Tensor::rand([8, 10], DType::F32)?;
        let slice = batch.narrow(0, 2 * world.rank(), 2)?;
        let (sharded, alone) =
            (AdamW::new(model.parameters(), 0.01)?, AdamW::new(single.parameters(), 0.01)?);
        for number in 0..20 {
            let ((loss, peaks), calls) = record(|| record_memory(|| step(&model, &sharded, &slice)));
            let loss = mesh.group(())?.all_reduce(&loss?, ReduceOp::Avg)?.item::<f32>()?;
            let expected = step(&single, &alone, &batch)?.item::<f32>()?;
            assert!((loss - expected).abs() < 1e-5, "{loss}, on one device {expected}");
            // Three blocks: gathered forward, gathered backward, gradients reduced.
            assert_eq!(calls.len(), 9);
            if world.rank() == 0 && number % 5 == 0 {
                let bytes = peaks.gradients;
                println!(
                    "step {number:>2}  loss {loss:.5}, on one device {expected:.5}; {bytes} bytes of gradients"
                );
            }
        }
        Ok(())
    })?;
    Ok(())
}
