//! Sequence parallelism: each rank normalises its shard of the sequence between two tensor-parallel layers.
//!
//! `cargo run --example sequence_parallel`

use dtensor::comm::record;
use dtensor::nn::{LayerNorm, Linear, Sequential, deep_copy};
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(0);
        let single = Sequential::new()
            .push(LayerNorm::new(8)?)
            .push(Linear::new(8, 16, true)?)
            .push(Linear::new(16, 8, true)?)
            .push(LayerNorm::new(8)?);
        let plan = plan! {
            "0" => SequenceParallel::new(),
            "1" => ColwiseParallel::new().input_layouts(Shard(1)),
            "2" => RowwiseParallel::new().output_layouts(Shard(1)),
            "3" => SequenceParallel::new().use_local_output(true),
        };
        let model = parallelize_module(deep_copy(&single)?, &mesh, plan)?;
        // Two sequences of 12 positions; each rank has 3 positions.
        let x = Tensor::rand([2, 12, 8], DType::F32)?;
        let own = x.narrow(1, 3 * world.rank(), 3)?;

        let (y, calls) = record(|| model.forward(&own));
        let y = y?;
        if world.rank() == 0 {
            println!("input   [2, 12, 8] sharded along dim 1: {} here", own.shape());
            println!("output  [2, 12, 8] sharded along dim 1: {} here", y.shape());
            calls.iter().for_each(|call| println!("forward {call}"));
        }

        let expected = single.forward(&x)?.narrow(1, 3 * world.rank(), 3)?;
        let error = y.sub(&expected)?.abs()?.max_all()?.item::<f32>()?;
        assert!(error < 1e-5, "{error}");
        let names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
        assert_eq!(names, ["all_gather", "reduce_scatter"]);
        Ok(())
    })?;
    Ok(())
}
