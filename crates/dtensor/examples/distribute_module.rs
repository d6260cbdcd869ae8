//! A model placed on a mesh by functions: here every parameter and the batch are sharded along dim 0.
//!
//! `cargo run --example distribute_module`

use dtensor::comm::record;
use dtensor::models::MLPModule;
use dtensor::nn::deep_copy;
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "dp")?;
        let single = MLPModule::new(true)?;
        let how = DistributeModule::new()
            // Called for every module of the tree. Parameters that it leaves local are replicated.
            .partition_fn(|_, module, mesh| {
                for (_, parameter) in module.own_parameters() {
                    parameter.replace(&distribute_tensor(&parameter.get(), mesh, [Shard(0)])?)?;
                }
                Ok(())
            })
            // Run before and after the model's `forward`: local tensors in, local tensors out.
            .input_fn(|_, inputs, mesh| Tensor::from_local(inputs.tensor(0)?, mesh, [Shard(0)]))
            .output_fn(|_, outputs, _| outputs.tensor(0)?.redistribute([Shard(0)])?.to_local());
        let model = distribute_module(deep_copy(&single)?, &mesh, how)?;

        let x = Tensor::rand([8, 10], DType::F32)?;
        let own = x.narrow(0, 2 * world.rank(), 2)?;
        let (y, forward) = record(|| model.forward(&own));
        let y = y?;
        assert_eq!((y.dims(), y.is_distributed()), (&[2, 10][..], false));
        y.pow(2)?.sum_all()?.backward()?;
        if world.rank() == 0 {
            for (name, parameter) in model.named_parameters() {
                let value = parameter.get();
                println!("{name:12} {}: {} here", value.shape(), value.to_local()?.shape());
            }
            forward.iter().for_each(|call| println!("forward      {call}"));
        }

        // Each rank computed its share of the loss; the gradients are those of the full batch.
        single.forward(&x)?.pow(2)?.sum_all()?.backward()?;
        for (sharded, full) in model.parameters().iter().zip(single.parameters()) {
            let (grad, expected) = (sharded.grad().expect("it was used"), full.grad().expect("it was used"));
            assert_eq!(grad.placements(), [Shard(0)]);
            assert!(grad.full_tensor()?.sub(&expected)?.abs()?.max_all()?.item::<f32>()? < 1e-4);
        }
        Ok(())
    })?;
    Ok(())
}
