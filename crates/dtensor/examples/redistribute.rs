//! Distributes a tensor, draws its layout, and redistributes it: the plan, its cost and the collectives that run.
//!
//! `cargo run --example redistribute`

use dtensor::comm::record;
use dtensor::debug::visualize_sharding;
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let full = Tensor::arange(0, 30, 1, DType::F32)?.view([6, 5])?;

        // Rows sharded along `dp`, columns along `tp`: of five columns, the first rank has three.
        let x = distribute_tensor(&full, &mesh, [Shard(0), Shard(1)])?.requires_grad_(true)?;
        assert_eq!(x.to_local()?.dims(), [3, [3, 2][mesh.local_rank("tp")?]]);
        visualize_sharding(&x, "x")?;

        // The plan can be read before anything moves. No other plan costs less.
        let to = [Replicate, Shard(0)];
        let plan = x.explain_redistribute(to)?;
        assert_eq!((&plan.trace()[..], plan.bytes()), ("S(0)S(1) -> RS(1) -> RS(0)", 72));
        let (y, calls) = record(|| x.redistribute(to));
        let y = y?;
        let names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
        assert_eq!(names, plan.collectives());
        assert_eq!(y.to_local()?.dims(), [3, 5]);
        assert_eq!(y.full_tensor()?.to_vec::<f32>()?, full.to_vec::<f32>()?);
        visualize_sharding(&y, "y")?;

        // Gradients are redistributed back: a leaf's gradient has the leaf's layout.
        y.mul(2.0)?.sum_all()?.backward()?;
        let grad = x.grad().expect("a leaf that was used");
        assert_eq!(grad.placements(), x.placements());
        assert_eq!(grad.full_tensor()?.to_vec::<f32>()?, [2.0; 30]);

        // Partial sums: each rank has one term, and they are added only when the sum is needed.
        let term = Tensor::full([2], world.rank() as f64, DType::F32)?;
        let sum = Tensor::from_local(&term, &mesh, [Placement::PARTIAL, Placement::PARTIAL])?;
        assert_eq!(sum.full_tensor()?.to_vec::<f32>()?, [6.0; 2]);
        if world.rank() == 0 {
            println!("{plan}");
        }
        Ok(())
    })?;
    Ok(())
}
