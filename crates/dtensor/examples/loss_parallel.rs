//! An output layer whose classes are sharded, and its loss: the logits are never gathered.
//!
//! `cargo run --example loss_parallel`

use dtensor::comm::record;
use dtensor::nn::{Linear, deep_copy};
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(0);
        // 1,000 classes for six positions: each rank has 250 logits per position.
        let single = Linear::new(16, 1000, true)?;
        let (x, target) = (Tensor::randn([6, 16], DType::F32)?, Tensor::randint(0, 1000, [6])?);
        // The logits stay sharded.
        let style = ColwiseParallel::new().output_layouts(Shard(-1)).use_local_output(false);
        let head = parallelize_module(deep_copy(&single)?, &mesh, style)?;

        let options = CrossEntropyOptions { label_smoothing: 0.1, ..CrossEntropyOptions::default() };
        let (loss, forward) = record(|| loss_parallel(|| head.forward(&x)?.cross_entropy(&target, options)));
        let loss = loss?;
        let (result, backward) = record(|| loss.backward());
        result?;
        if world.rank() == 0 {
            forward.iter().for_each(|call| println!("forward   {call}"));
            println!("backward  {} collectives", backward.len());
            println!("loss      {}", loss.item::<f32>()?);
        }

        let alone = single.forward(&x)?.cross_entropy(&target, options)?;
        alone.backward()?;
        assert!((loss.item::<f32>()? - alone.item::<f32>()?).abs() < 1e-5);
        let (grad, expected) = (head.weight.grad().unwrap(), single.weight.grad().unwrap());
        assert_eq!(grad.placements(), [Shard(0)]);
        assert!(grad.full_tensor()?.sub(&expected)?.abs()?.max_all()?.item::<f32>()? < 1e-6);
        assert_eq!((forward.len(), backward.len()), (3, 0));
        Ok(())
    })?;
    Ok(())
}
