//! A training step that is recorded as a CUDA graph once and replayed, with the losses of a step that is not.
//!
//! `cargo run --features cuda --example cuda_graph`. Without a GPU, or without the feature, every run calls the step.

use dtensor::models::MLPStacked;
use dtensor::optim::{AdamW, ClipOptions, Schedule, clip_grad_norm};
use dtensor::prelude::*;
use dtensor::{manual_seed, on_device};

/// Trains a model for 20 steps and returns the losses.
fn train(records: bool) -> Result<Vec<f32>> {
    manual_seed(1);
    let model = MLPStacked::new(2)?;
    let optimizer = AdamW::new(model.parameters(), 0.01)?;
    let step = |inputs: &[Tensor]| {
        let loss = model.forward(&inputs[0])?.dropout(0.1)?.mse_loss(&inputs[1], Reduction::Mean)?;
        loss.backward()?;
        clip_grad_norm(&model.parameters(), 1.0, ClipOptions::default())?;
        optimizer.step()?;
        optimizer.zero_grad();
        Ok(vec![loss])
    };
    #[cfg(feature = "cuda")]
    let mut graph = dtensor::cuda::graph(&step);
    let schedule = Schedule::linear_warmup(5);
    let mut losses = Vec::new();
    for i in 0..20 {
        // What changes from step to step is an input, a random number, or an option of the optimizer.
        schedule.apply(&optimizer, i)?;
        let x = Tensor::rand([8, 10], DType::F32)?;
        let inputs = [x.clone(), x.mul(0.5)?];
        #[cfg(feature = "cuda")]
        let outputs = if records { graph.run(&inputs)? } else { step(&inputs)? };
        #[cfg(not(feature = "cuda"))]
        let outputs = step(&inputs)?;
        losses.push(outputs[0].detach()); // not read: nothing has waited for the GPU so far
    }
    #[cfg(feature = "cuda")]
    println!("{graph:?}");
    let _ = records;
    Tensor::stack(&losses.iter().collect::<Vec<_>>(), 0)?.to_vec::<f32>()
}

pub(crate) fn main() -> Result<()> {
    #[cfg(feature = "cuda")]
    let device = if dtensor::cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
    #[cfg(not(feature = "cuda"))]
    let device = Device::Cpu;
    let (eager, replayed) = on_device(device, || Ok::<_, Error>((train(false)?, train(true)?)))?;
    assert_eq!(eager, replayed);
    println!("20 steps on {device}: loss {:.4} -> {:.4}, the same bits", eager[0], eager[19]);
    Ok(())
}
