//! Collectives without a mesh: on all ranks or some of them, asynchronous ones, and messages between two ranks.
//!
//! `cargo run --example collectives`

use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let (group, rank, size) = (world.group(), world.rank(), world.size());
        let mine = Tensor::full([2], rank as f64, DType::F32)?;

        // Each rank gets the sum, all shards, or its shard of the sum.
        assert_eq!(group.all_reduce(&mine, ReduceOp::Sum)?.to_vec::<f32>()?, [6., 6.]);
        let all = group.all_gather_tensor(&mine, 0)?;
        assert_eq!(all.to_vec::<f32>()?, [0., 0., 1., 1., 2., 2., 3., 3.]);
        let shard = group.reduce_scatter_tensor(&Tensor::arange(0, 4, 1, DType::F32)?, ReduceOp::Sum, 0)?;
        assert_eq!(shard.to_vec::<f32>()?, [4.0 * rank as f32]);

        // Shards may be uneven: rank r has r rows.
        let rows = Tensor::full([rank, 2], rank as f64, DType::F32)?;
        assert_eq!(group.all_gather_uneven(&rows, 0, &[0, 1, 2, 3])?.dims(), [6, 2]);

        // A group of some ranks, in any order: rank 2 is its first member.
        if let Some(pair) = world.new_group(&[2, 0])? {
            assert_eq!(pair.ranks()[pair.rank()], rank);
            assert_eq!(pair.broadcast(&mine, 0)?.to_vec::<f32>()?, [2., 2.]);
        }

        // An asynchronous collective overlaps with other work.
        let largest = group.all_reduce_async(&mine, ReduceOp::Max)?;
        let meanwhile = mine.exp()?;
        assert_eq!((largest.wait()?.to_vec::<f32>()?, meanwhile.numel()), (vec![3., 3.], 2));

        // A ring: send to the next rank, receive from the previous one.
        group.send(&mine, (rank + 1) % size, 0)?;
        let received = group.recv::<Tensor>((rank + size - 1) % size, 0)?;
        assert_eq!(received.to_vec::<f32>()?, [((rank + size - 1) % size) as f32; 2]);
        assert_eq!(group.all_gather_object(&format!("rank {rank}"))?[3], "rank 3");

        // The gradient of an all-reduce is an all-reduce: the loss is the sum over the ranks.
        let x = mine.requires_grad_(true)?;
        group.all_reduce(&x, ReduceOp::Sum)?.sum_all()?.backward()?;
        assert_eq!(x.grad().expect("a leaf").to_vec::<f32>()?, [4., 4.]);
        if rank == 0 {
            println!("gathered {all}\ngradient {}", x.grad().expect("a leaf"));
        }
        Ok(())
    })?;
    Ok(())
}
