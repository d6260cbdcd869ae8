//! A training step does not wait for the GPU.

use super::GPU;
use dtensor::comm::launch;
use dtensor::cuda::waits_of_this_thread;
use dtensor::models::{ModelArgs, Transformer};
use dtensor::optim::{AdamW, ClipOptions, clip_grad_norm};
use dtensor::parallel::{FullyShardOptions, MixedPrecision, fully_shard};
use dtensor::prelude::*;
use dtensor::{autocast, on_device};

fn args() -> ModelArgs {
    ModelArgs { dropout_p: 0.1, ..ModelArgs::default() }
}

fn step(model: &Transformer, optimizer: &AdamW, tokens: &Tensor) -> Result<Tensor> {
    let n = tokens.dims()[1] - 1;
    let (now, next) = (tokens.narrow(1, 0, n)?, tokens.narrow(1, 1, n)?);
    let logits = model.forward(&now)?;
    let loss = logits.flatten(0, 1)?.cross_entropy(&next.flatten_all()?, CrossEntropyOptions::default())?;
    loss.backward()?;
    clip_grad_norm(&model.parameters(), 1.0, ClipOptions::default())?;
    optimizer.step()?;
    model.zero_grad();
    Ok(loss.detach())
}

/// Takes steps and asserts that none of them waits. Reading the losses afterwards does.
fn never_waits(model: &Transformer, rank: usize) -> Result<()> {
    let optimizer = AdamW::new(model.parameters(), 1e-3)?;
    let tokens = Tensor::randint(0, args().vocab_size as i64, [4, 9])?;
    let mut losses = Vec::new();
    let before = waits_of_this_thread();
    for _ in 0..3 {
        losses.push(step(model, &optimizer, &tokens)?);
    }
    assert_eq!(waits_of_this_thread(), before, "rank {rank} waited for the GPU");
    for loss in losses {
        assert!(loss.to_local().unwrap_or(loss).item::<f32>()?.is_finite());
    }
    assert!(waits_of_this_thread() >= before + 3);
    Ok(())
}

#[test]
fn one_rank() -> Result<()> {
    manual_seed(1);
    on_device(GPU, || never_waits(&Transformer::new(&args())?, 0))?;
    on_device(GPU, || autocast(DType::BF16, || never_waits(&Transformer::new(&args())?, 0)))
}

#[test]
fn ranks_that_share_the_gpu() -> Result<()> {
    launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        on_device(GPU, || {
            for sequence_parallel in [false, true] {
                manual_seed(2);
                let model = Transformer::new(&args())?;
                let model = Transformer::parallelize(model, &mesh, sequence_parallel)?;
                never_waits(&model, world.rank())?;
            }
            Ok(())
        })
    })
    .map(drop)
}

#[test]
fn fully_sharded() -> Result<()> {
    launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        on_device(GPU, || {
            manual_seed(2);
            let options = FullyShardOptions {
                mixed_precision: MixedPrecision { param_dtype: Some(DType::BF16), ..Default::default() },
                ..Default::default()
            };
            let model = Transformer::new(&args())?;
            for block in &model.layers {
                fully_shard(block, &mesh, options.clone())?;
            }
            never_waits(&fully_shard(model, &mesh, options)?, world.rank())
        })
    })
    .map(drop)
}
