//! Tests memory layouts of inputs, and which ranks share the memory of a result.

use dtensor::comm::{ReduceOp, WorldKind, launch};
use dtensor::testing::spmd;
use dtensor::{DType, Result, Tensor};

use crate::common::peek::value;
use crate::common::ranks::{Array, Inputs, Layout, cat, exchange, reduce, same};

#[test]
fn inputs_may_have_any_memory_layout() {
    spmd(3, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        for dtype in DType::ALL {
            for layout in [Layout::Transposed, Layout::Narrowed] {
                let x = Inputs::laid(group, dtype, 3, layout, |_| vec![3, 6, 3])?;
                assert!(!x.mine.is_contiguous());
                same(&group.all_reduce(&x.mine, ReduceOp::Sum)?, &reduce(ReduceOp::Sum, &x.all));
                for dim in 0..3 {
                    let sum = reduce(ReduceOp::Max, &x.all);
                    let size = x.mine.dims()[dim] / n;
                    let part = sum.narrow(dim, me * size, size);
                    same(&group.reduce_scatter_tensor(&x.mine, ReduceOp::Max, dim)?, &part);
                    same(&group.all_gather_tensor(&x.mine, dim)?, &cat(&x.all, dim));
                    let to = (dim + 1) % 3;
                    let (sizes, whole) = (vec![size; n], vec![x.mine.dims()[to]; n]);
                    let got = group.all_to_all(&x.mine, dim, &sizes, to, &whole)?;
                    same(&got, &exchange(&x.all, dim, |_| sizes.clone(), to, me));
                }
                same(&group.broadcast(&x.mine, 1)?, &x.all[1]);
                same(&group.permute_tensor(&x.mine, &[1, 2, 0])?, &x.all[(me + 2) % 3]);
                if let Some(all) = group.gather(&x.mine, 2)? {
                    all.iter().zip(&x.all).for_each(|(got, expected)| same(got, expected));
                }
                if let Some(sum) = group.reduce(&x.mine, ReduceOp::Min, 0)? {
                    same(&sum, &reduce(ReduceOp::Min, &x.all));
                }
            }
            // Broadcast inputs: one row or one element repeated.
            for base in [vec![1, 4], vec![3, 1], vec![1, 1]] {
                let x = Inputs::new(group, dtype, 4, |_| base.clone())?;
                let wide = x.mine.expand([3, 4])?;
                let all = x.all.iter().map(|x| Array::of(&x.tensor()?.expand([3, 4])?));
                let all = all.collect::<Result<Vec<_>>>()?;
                same(&group.all_reduce(&wide, ReduceOp::Product)?, &reduce(ReduceOp::Product, &all));
                same(&group.all_gather_tensor(&wide, 0)?, &cat(&all, 0));
                same(&group.all_gather_tensor(&wide, 1)?, &cat(&all, 1));
                same(&group.all_to_all_single(&wide, None, None)?, &exchange(&all, 0, |_| vec![1; n], 0, me));
                same(&group.reduce_scatter_tensor(&wide, ReduceOp::Sum, 0)?, &{
                    reduce(ReduceOp::Sum, &all).narrow(0, me, 1)
                });
                same(&group.broadcast(&wide, 2)?, &all[2]);
            }
        }
        // Neither a collective nor an operator on its result changes the input.
        let x = Inputs::new(group, DType::F32, 9, |_| vec![4])?;
        let got = group.broadcast(&x.mine, 0)?;
        let changed = got.add(1.0)?;
        group.barrier()?;
        same(&got, &x.all[0]);
        same(&x.mine, &x.all[me]);
        assert_ne!(Array::of(&changed)?, x.all[0]);
        Ok(())
    });
}

#[test]
fn inputs_of_several_chunks_give_correct_results() {
    spmd(3, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        // Work is done in chunks. Pieces have from a third of a chunk to many, with rows that do not divide one or exceed it.
        for (dtype, dims) in [
            (DType::U8, vec![3, 450_001]),
            (DType::BF16, vec![6, 333, 301]),
            (DType::F32, vec![3, 131_073]),
            (DType::F64, vec![300_003]),
            (DType::I64, vec![1001, 3, 51]),
        ] {
            let x = Inputs::new(group, dtype, 1, |_| dims.clone())?;
            assert!(x.mine.numel() * dtype.size() > 1 << 20);
            let sum = reduce(ReduceOp::Sum, &x.all);
            same(&group.all_reduce(&x.mine, ReduceOp::Sum)?, &sum);
            for (dim, &size) in dims.iter().enumerate() {
                same(&group.all_gather_tensor(&x.mine, dim)?, &cat(&x.all, dim));
                let sizes = [size / 2, 0, size - size / 2];
                let got = group.reduce_scatter_uneven(&x.mine, ReduceOp::Sum, dim, &sizes)?;
                same(&got, &sum.split(dim, &sizes)[me]);
                let to = (dim + 1) % dims.len();
                let receive = if to == dim { [sizes[me]; 3] } else { [dims[to]; 3] };
                let got = group.all_to_all(&x.mine, dim, &sizes, to, &receive)?;
                same(&got, &exchange(&x.all, dim, |_| sizes.to_vec(), to, me));
            }
            if let Some(sum) = group.reduce(&x.mine, ReduceOp::Max, n - 1)? {
                same(&sum, &reduce(ReduceOp::Max, &x.all));
            }
            same(&group.broadcast(&x.mine, 1)?, &x.all[1]);
            if let Some(all) = group.gather(&x.mine, 0)? {
                all.iter().zip(&x.all).for_each(|(got, expected)| same(got, expected));
            }
        }
        Ok(())
    });
}

#[test]
fn a_result_of_all_threads_is_stored_once() -> Result<()> {
    launch(3, |world| {
        assert_eq!(world.kind(), WorldKind::Threads);
        let group = world.group();
        for kind in 0..3 {
            let x = Tensor::full([10, 10], world.rank() as f64, DType::F32)?;
            let y = match kind {
                0 => group.all_reduce(&x, ReduceOp::Sum)?,
                1 => group.all_gather_tensor(&x, 0)?,
                _ => group.broadcast(&x, 1)?,
            };
            drop(x);
            let mut held = value(&y)?;
            drop(y);
            group.barrier()?;
            // All ranks share one array.
            assert!(!held.is_unique(), "rank {} has a copy of its own", world.rank());
            group.barrier()?;
            // After the other ranks have dropped it, rank 0 is the only owner.
            if world.rank() > 0 {
                drop(held);
                group.barrier()?;
            } else {
                group.barrier()?;
                assert!(held.is_unique());
            }
        }
        // A shard that only one rank receives is not shared.
        let x = Tensor::ones([3, 2], DType::F32)?;
        let y = group.reduce_scatter_tensor(&x, ReduceOp::Sum, 0)?;
        let mut held = value(&y)?;
        drop(y);
        group.barrier()?;
        assert!(held.is_unique());
        Ok(())
    })?;
    Ok(())
}
