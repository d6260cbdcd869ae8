//! Two linear layers, the first sharded along its outputs, the second along its inputs: one all-reduce for both.
//!
//! `cargo run --example rowwise_parallel`

use dtensor::comm::record;
use dtensor::nn::{Linear, Relu, Sequential, deep_copy};
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(0);
        // 4 ranks do not divide 10: they have 3, 3, 3 and 1.
        let single = Sequential::new()
            .push(Linear::new(8, 10, true)?)
            .push(Relu::new())
            .push(Linear::new(10, 6, true)?);
        let plan = plan! { "0" => ColwiseParallel::new(), "2" => RowwiseParallel::new() };
        let model = parallelize_module(deep_copy(&single)?, &mesh, plan)?;
        let x = Tensor::rand([2, 8], DType::F32)?;

        let (y, calls) = record(|| model.forward(&x));
        let y = y?;
        if world.rank() == 0 {
            for (name, parameter) in model.named_parameters() {
                let value = parameter.get();
                println!(
                    "{name:9} {} {:?}: {} here",
                    value.shape(),
                    value.placements(),
                    value.to_local()?.shape()
                );
            }
            println!("output    {}", y.shape());
            calls.iter().for_each(|call| println!("forward   {call}"));
        }

        let error = y.sub(&single.forward(&x)?)?.abs()?.max_all()?.item::<f32>()?;
        assert!(error < 1e-6, "{error}");
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0].collective.name(), "all_reduce");
        Ok(())
    })?;
    Ok(())
}
