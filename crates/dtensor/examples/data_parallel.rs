//! Data parallelism over tensor parallelism: two replicas of a model that is sharded over two ranks. Each replica gets
//! half of the batch.
//!
//! `cargo run --example data_parallel`

use dtensor::models::MLPModule;
use dtensor::nn::deep_copy;
use dtensor::optim::AdamW;
use dtensor::parallel::{DataParallel, DataParallelOptions};
use dtensor::prelude::*;

/// Runs one training step on a slice of the batch. `average` runs between backward and the optimizer step.
fn step(
    model: &MLPModule,
    optimizer: &AdamW,
    slice: &Tensor,
    average: impl Fn() -> Result<()>,
) -> Result<Tensor> {
    optimizer.zero_grad();
    let loss = model.forward(slice)?.sub(slice)?.pow(2)?.mean_all()?;
    loss.backward()?;
    average()?;
    optimizer.step()?;
    Ok(loss.detach())
}

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        manual_seed(0);
        let single = MLPModule::with_sizes(10, 32, 10, true)?;
        let batch = Tensor::rand([8, 10], DType::F32)?;

        let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
        let model = parallelize_module(deep_copy(&single)?, &mesh["tp"], plan)?;
        let replicas = DataParallel::new(&model, &mesh["dp"], DataParallelOptions::default())?;
        let (replicated, alone) =
            (AdamW::new(model.parameters(), 0.01)?, AdamW::new(single.parameters(), 0.01)?);
        let slice = batch.narrow(0, 4 * replicas.rank(), 4)?;
        for number in 0..20 {
            let loss = step(&model, &replicated, &slice, || replicas.average_gradients())?;
            let loss = mesh["dp"].group(())?.all_reduce(&loss, ReduceOp::Avg)?.item::<f32>()?;
            let expected = step(&single, &alone, &batch, || Ok(()))?.item::<f32>()?;
            assert!((loss - expected).abs() < 1e-5, "{loss}, on one device {expected}");
            if world.rank() == 0 && number % 5 == 0 {
                println!("step {number:>2}  loss {loss:.5}, on one device {expected:.5}");
            }
        }
        Ok(())
    })?;
    Ok(())
}
