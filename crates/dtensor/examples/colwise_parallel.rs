//! A linear layer that is sharded along its outputs: each rank computes some of the output columns.
//!
//! `cargo run --example colwise_parallel`

use dtensor::comm::record;
use dtensor::nn::{Linear, deep_copy};
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(0);
        let single = Linear::new(8, 16, true)?;
        let layer = parallelize_module(deep_copy(&single)?, &mesh, ColwiseParallel::new())?;
        let x = Tensor::rand([2, 8], DType::F32)?.requires_grad_(true)?;

        let (y, forward) = record(|| layer.forward(&x));
        let y = y?;
        let (result, backward) = record(|| y.sum_all()?.backward());
        result?;
        if world.rank() == 0 {
            let weight = layer.weight.get();
            println!(
                "weight  {} {:?}: {} here",
                weight.shape(),
                weight.placements(),
                weight.to_local()?.shape()
            );
            println!("output  [2, 16] sharded along the last dim: {} here", y.shape());
            println!("forward {} collectives, backward {}: {}", forward.len(), backward.len(), backward[0]);
        }

        // The shards, concatenated, are the output of a single device.
        let full = world.group().all_gather_tensor(&y.detach(), 1)?;
        let error = full.sub(&single.forward(&x)?.detach())?.abs()?.max_all()?.item::<f32>()?;
        assert!(error < 1e-6, "{error}");
        assert_eq!(y.dims(), [2, 4]);
        assert!(forward.is_empty());
        assert_eq!(backward.len(), 1);
        assert_eq!(backward[0].collective.name(), "all_reduce");
        Ok(())
    })?;
    Ok(())
}
