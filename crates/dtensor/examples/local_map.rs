//! A function of local tensors, called with distributed ones: a softmax over columns that are sharded.
//!
//! Inside, each rank has some of the columns and calls collectives itself. Outside, tensors are on a mesh and gradients
//! flow, as with any operator.
//!
//! `cargo run --example local_map`

use dtensor::comm::record;
use dtensor::prelude::*;

/// Ranks reduce the maximum and the sum of each row; each computes the rest for its own columns.
fn softmax_of_columns(mesh: &DeviceMesh, x: &Tensor) -> Result<Tensor> {
    let group = mesh.group("tp")?;
    // The result does not depend on the subtracted maximum, so it needs no gradient.
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
        let sharded_x = distribute_tensor(&x, &mesh, [Shard(1)])?.requires_grad_(true)?;
        let (y, calls) = record(|| softmax.call((&mesh, &sharded_x)));
        let y = y?;
        let sharded_weights = distribute_tensor(&weights, &mesh, [Shard(1)])?;
        y.mul(&sharded_weights)?.sum_all()?.backward()?;
        if world.rank() == 0 {
            let local = sharded_x.to_local()?;
            println!("input   {} {:?}: {} here", sharded_x.shape(), sharded_x.placements(), local.shape());
            println!("output  {} {:?}: {} here", y.shape(), y.placements(), y.to_local()?.shape());
            calls.iter().for_each(|call| println!("forward {call}"));
        }

        // The built-in operator on one device gives the same.
        let full = x.requires_grad_(true)?;
        let expected = full.softmax(1)?;
        expected.mul(&weights)?.sum_all()?.backward()?;
        let error = |a: &Tensor, b: &Tensor| a.sub(b)?.abs()?.max_all()?.item::<f32>();
        assert!(error(&y.full_tensor()?, &expected)? < 1e-6);
        let (grad, expected) = (sharded_x.grad().expect("a leaf"), full.grad().expect("a leaf"));
        assert!(error(&grad.full_tensor()?, &expected)? < 1e-5);
        assert_eq!(calls.iter().filter(|call| call.collective.name() == "all_reduce").count(), 2);
        Ok(())
    })?;
    Ok(())
}
