//! A function that knows of ranks, and is called like any other: the softmax of rows whose columns lie on several ranks.
//!
//! Inside, every rank has some of the columns and says itself what is communicated. Outside, tensors lie on a mesh,
//! gradients flow, and nobody needs to know.
//!
//! `cargo run --example local_map`

use dtensor::comm::record;
use dtensor::prelude::*;

/// The ranks find the largest of each row and the sum together; the rest each does for its own columns.
fn softmax_of_columns(mesh: &DeviceMesh, x: &Tensor) -> Result<Tensor> {
    let group = mesh.group("tp")?;
    // Nothing depends on what is subtracted, so that no gradient has to go through it.
    let largest = group.all_reduce(&x.detach().max_keepdim(1)?, ReduceOp::Max)?;
    let e = x.sub(&largest)?.exp()?;
    e.div(&group.all_reduce(&e.sum_keepdim(1)?, ReduceOp::Sum)?)
}

pub(crate) fn main() -> Result<()> {
    launch(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        manual_seed(0);
        let (x, weights) = (Tensor::randn([4, 8], DType::F32)?, Tensor::randn([4, 8], DType::F32)?);
        let softmax =
            local_map(softmax_of_columns).in_placements((None, [Shard(1)])).out_placements([Shard(1)]);

        // Columns 0 to 2, 3 to 5, 6 and 7.
        let laid = distribute_tensor(&x, &mesh, [Shard(1)])?.requires_grad_(true)?;
        let (y, calls) = record(|| softmax.call((&mesh, &laid)));
        let y = y?;
        let laid_weights = distribute_tensor(&weights, &mesh, [Shard(1)])?;
        y.mul(&laid_weights)?.sum_all()?.backward()?;
        if world.rank() == 0 {
            println!("input   {} {:?}: {} here", laid.shape(), laid.placements(), laid.to_local()?.shape());
            println!("output  {} {:?}: {} here", y.shape(), y.placements(), y.to_local()?.shape());
            calls.iter().for_each(|call| println!("forward {call}"));
        }

        // As on one device, where the operator is there already.
        let whole = x.requires_grad_(true)?;
        let due = whole.softmax(1)?;
        due.mul(&weights)?.sum_all()?.backward()?;
        let far = |a: &Tensor, b: &Tensor| a.sub(b)?.abs()?.max_all()?.item::<f32>();
        assert!(far(&y.full_tensor()?, &due)? < 1e-6);
        let (grad, due) = (laid.grad().expect("a leaf"), whole.grad().expect("a leaf"));
        assert!(far(&grad.full_tensor()?, &due)? < 1e-5);
        assert_eq!(calls.iter().filter(|call| call.collective.name() == "all_reduce").count(), 2);
        Ok(())
    })?;
    Ok(())
}
