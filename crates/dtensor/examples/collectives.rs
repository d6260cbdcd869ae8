//! What ranks do together without a mesh: collectives of all or some of them, such as are waited for later, and messages.
//!
//! `cargo run --example collectives`

use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let (group, rank, size) = (world.group(), world.rank(), world.size());
        let mine = Tensor::full([2], rank as f64, DType::F32)?;

        // Everybody gets the sum, all of the parts, or a part of the sum.
        assert_eq!(group.all_reduce(&mine, ReduceOp::Sum)?.to_vec::<f32>()?, [6., 6.]);
        let all = group.all_gather_tensor(&mine, 0)?;
        assert_eq!(all.to_vec::<f32>()?, [0., 0., 1., 1., 2., 2., 3., 3.]);
        let part = group.reduce_scatter_tensor(&Tensor::arange(0, 4, 1, DType::F32)?, ReduceOp::Sum, 0)?;
        assert_eq!(part.to_vec::<f32>()?, [4.0 * rank as f32]);

        // Parts need not be even: rank r brings r rows.
        let rows = Tensor::full([rank, 2], rank as f64, DType::F32)?;
        assert_eq!(group.all_gather_uneven(&rows, 0, &[0, 1, 2, 3])?.dims(), [6, 2]);

        // Some of the ranks, in an order of their own: the first of them is rank 2.
        if let Some(pair) = world.new_group(&[2, 0])? {
            assert_eq!(pair.ranks()[pair.rank()], rank);
            assert_eq!(pair.broadcast(&mine, 0)?.to_vec::<f32>()?, [2., 2.]);
        }

        // Begun now, needed later.
        let largest = group.all_reduce_async(&mine, ReduceOp::Max)?;
        let meanwhile = mine.exp()?;
        assert_eq!((largest.wait()?.to_vec::<f32>()?, meanwhile.numel()), (vec![3., 3.], 2));

        // Once round: to the next, from the one before.
        group.send(&mine, (rank + 1) % size, 0)?;
        let before = group.recv::<Tensor>((rank + size - 1) % size, 0)?;
        assert_eq!(before.to_vec::<f32>()?, [((rank + size - 1) % size) as f32; 2]);
        assert_eq!(group.all_gather_object(&format!("rank {rank}"))?[3], "rank 3");

        // Gradients are collectives, too. The loss is the sum of what all ranks go back from.
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
