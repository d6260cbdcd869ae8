//! A GPU: two ranks share it and train one model, with the losses of the CPU.
//!
//! `cargo run --features cuda --example gpu`. Without a GPU, or without the feature, it runs on the CPU.

use dtensor::models::MLPStacked;
use dtensor::optim::{AdamW, ClipOptions, clip_grad_norm};
use dtensor::parallel::{FullyShardOptions, fully_shard};
use dtensor::prelude::*;
use dtensor::{Device, manual_seed, on_device};

/// The first GPU, or the CPU.
fn device() -> Device {
    #[cfg(feature = "cuda")]
    if dtensor::cuda::is_available() {
        return Device::Cuda(0);
    }
    Device::Cpu
}

/// Trains a model on a device, fully sharded over two ranks, and returns the losses.
fn train(device: Device) -> Result<Vec<f32>> {
    let losses = launch(2, |world| {
        // Everything that is created here is on the device.
        on_device(device, || {
            manual_seed(1);
            let mesh = DeviceMesh::new(&world, [2], "dp")?;
            let model = fully_shard(MLPStacked::new(2)?, &mesh, FullyShardOptions::default())?;
            let optimizer = AdamW::new(model.parameters(), 0.01)?;
            let batch = Tensor::rand([8, 10], DType::F32)?.narrow(0, 4 * world.rank(), 4)?;
            let mut losses = Vec::new();
            for _ in 0..20 {
                optimizer.zero_grad();
                let loss = model.forward(&batch)?.mse_loss(&batch, Reduction::Mean)?;
                loss.backward()?;
                clip_grad_norm(&model.parameters(), 1.0, ClipOptions::default())?;
                optimizer.step()?;
                losses.push(loss.detach()); // not read: nothing has waited for the GPU so far
            }
            let losses = Tensor::stack(&losses.iter().collect::<Vec<_>>(), 0)?;
            mesh.group(())?.all_reduce(&losses, ReduceOp::Avg)?.to_vec::<f32>()
        })
    })?;
    Ok(losses.into_iter().next().unwrap_or_default())
}

pub(crate) fn main() -> Result<()> {
    let (here, there) = (train(Device::Cpu)?, train(device())?);
    assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-4), "{here:?}\n{there:?}");
    assert!(there[19] < there[0]);
    println!("20 steps on {}: loss {:.4} -> {:.4}, as on the cpu", device(), there[0], there[19]);
    Ok(())
}
