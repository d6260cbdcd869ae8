//! Tests groups and worlds of several sizes.

use dtensor::comm::{ReduceOp, World, WorldKind};
use dtensor::testing::spmd;
use dtensor::{DType, Result, Tensor};

use crate::common::ranks::{Array, Inputs, Random, begin_any, cat, reduce, same};
use crate::common::refused::refused;

#[test]
fn a_group_may_have_any_ranks_in_any_order() {
    spmd(4, |world| {
        let me = world.rank();
        let lists: [&[usize]; 8] =
            [&[2, 0], &[3, 1, 0], &[1], &[0, 1, 2, 3], &[3, 2, 1, 0], &[0, 2], &[1, 3, 2, 0], &[2, 0]];
        let mut groups = Vec::new();
        for list in lists {
            let group = world.new_group(list)?;
            assert_eq!(group.is_some(), list.contains(&me), "{list:?} on rank {me}");
            if let Some(group) = &group {
                assert_eq!((group.ranks(), group.size()), (list, list.len()));
                assert_eq!(list[group.rank()], me);
            }
            groups.push(group);
        }
        // The same list twice makes two groups; a clone is the same group.
        if let (Some(first), Some(second)) = (&groups[0], &groups[7]) {
            assert_ne!(first, second);
            assert_eq!(first, &first.clone());
        }
        // Collectives of overlapping groups, in the same order on all ranks. A sum is over the ranks of the group only.
        for round in 0..3 {
            for (i, group) in groups.iter().enumerate() {
                let Some(group) = group else { continue };
                let x = Inputs::new(group, DType::F32, (10 * round + i) as u64, |_| vec![3, 2])?;
                same(&group.all_reduce(&x.mine, ReduceOp::Sum)?, &reduce(ReduceOp::Sum, &x.all));
                same(&group.all_gather_tensor(&x.mine, 1)?, &cat(&x.all, 1));
                same(&group.broadcast(&x.mine, group.size() - 1)?, &x.all[group.size() - 1]);
                let names = group.all_gather_object(&me)?;
                assert_eq!(names, group.ranks());
            }
        }
        // Two groups of the same ranks, whose collectives begin in a different order on each rank: they match by group.
        if let (Some(first), Some(second)) = (&groups[0], &groups[7]) {
            let x = Inputs::new(first, DType::I64, 50, |_| vec![5])?;
            let y = Inputs::new(second, DType::F64, 51, |_| vec![2])?;
            let (a, b);
            if me == 0 {
                a = first.all_reduce_async(&x.mine, ReduceOp::Sum)?;
                b = second.all_reduce_async(&y.mine, ReduceOp::Max)?;
            } else {
                b = second.all_reduce_async(&y.mine, ReduceOp::Max)?;
                a = first.all_reduce_async(&x.mine, ReduceOp::Sum)?;
            }
            same(&a.wait()?, &reduce(ReduceOp::Sum, &x.all));
            same(&b.wait()?, &reduce(ReduceOp::Max, &y.all));
        }
        for (ranks, words) in [
            (&[][..], &["new_group", "at least one rank"][..]),
            (&[0, 4], &["new_group", "rank 4 is not in the world, which has 4"]),
            (&[0, 1, 0], &["new_group", "rank 0 is there twice"]),
        ] {
            refused(world.new_group(ranks), words);
        }
        // A group outlives the handle to its world, and does not need the ranks outside it.
        drop(world);
        if let Some(pair) = &groups[5] {
            let x = Inputs::new(pair, DType::U8, 60, |_| vec![7])?;
            same(&pair.all_reduce(&x.mine, ReduceOp::Min)?, &reduce(ReduceOp::Min, &x.all));
        }
        Ok(())
    });
}

#[test]
fn every_collective_works_in_worlds_of_several_sizes() {
    for n in [1, 2, 3, 6] {
        spmd(n, |world| {
            assert_eq!(world.size(), n);
            assert_eq!(world.group().ranks(), (0..n).collect::<Vec<_>>());
            for step in 0..150 {
                begin_any(world.group(), &mut Random::new(&[n as u64, step]), false)?.finish(&mut 0)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_simulated_world_returns_the_shapes_of_a_real_one() -> Result<()> {
    let (n, me) = (5, 2);
    let world = World::simulated(n, me)?;
    let group = world.group();
    assert_eq!((world.kind(), world.size(), world.rank()), (WorldKind::Simulated, n, me));
    let sizes = [1, 0, 2, 3, 4];
    let real = |dims: &[usize]| Array::random(DType::BF16, dims, &[1]).tensor();
    let meta = |dims: &[usize]| Tensor::meta_of(dims, DType::BF16);
    for make in [&real as &dyn Fn(&[usize]) -> Result<Tensor>, &meta] {
        let check = |x: &Tensor, y: Result<Tensor>, dims: &[usize]| -> Result<()> {
            let y = y?;
            assert_eq!((y.dims(), y.dtype(), y.is_meta()), (dims, x.dtype(), x.is_meta()));
            if !y.is_meta() {
                assert_eq!(Array::of(&y)?.bits.len(), y.numel());
            }
            Ok(())
        };
        let x = make(&[10, 2])?;
        for op in [ReduceOp::Sum, ReduceOp::Product] {
            check(&x, group.all_reduce(&x, op), &[10, 2])?;
            check(&x, group.reduce_scatter_tensor(&x, op, 0), &[2, 2])?;
            check(&x, group.reduce_scatter_uneven(&x, op, 0, &sizes), &[2, 2])?;
        }
        check(&x, group.all_gather_tensor(&x, 1), &[10, 10])?;
        check(&x, group.all_gather_uneven(&x, 1, &[2, 0, 2, 3, 4]), &[10, 11])?;
        check(&x, group.all_to_all_single(&x, None, None), &[10, 2])?;
        check(&x, group.all_to_all_single(&x, Some(&[1, 1, 2, 0, 9]), Some(&sizes)), &[13, 2])?;
        check(&x, group.all_to_all(&x, 0, &sizes, 1, &[2, 0, 2, 3, 4]), &[2, 11])?;
        check(&x, group.broadcast(&x, 4), &[10, 2])?;
        check(&x, group.permute_tensor(&x, &[1, 2, 3, 4, 0]), &[10, 2])?;
        check(&x, group.all_reduce(&make(&[])?, ReduceOp::Sum), &[])?;
        refused(group.reduce_scatter_tensor(&make(&[7])?, ReduceOp::Sum, 0), &["multiple", "5"]);
    }
    let x = real(&[2])?;
    assert_eq!(group.gather(&x, me)?.map(|all| all.len()), Some(n));
    assert!(group.gather(&x, 0)?.is_none());
    assert_eq!(group.reduce(&x, ReduceOp::Sum, me)?.map(|x| x.dims().to_vec()), Some(vec![2]));
    assert!(group.reduce(&x, ReduceOp::Sum, 0)?.is_none());
    let pieces = (0..n).map(|r| real(&[r])).collect::<Result<Vec<_>>>()?;
    assert_eq!(group.scatter(Some(&pieces), me)?.dims(), [me]);
    refused(group.scatter::<Tensor>(None, 0), &["scatter", "simulated"]);
    refused(group.recv::<Tensor>(0, 0), &["recv", "simulated"]);
    group.send(&x, 0, 0)?;
    group.barrier()?;
    assert_eq!(group.all_gather_object(&3u8)?, [3; 5]);
    assert!(world.new_group(&[0, 1])?.is_none());
    let pair = world.new_group(&[4, 2])?.expect("this rank is in it");
    assert_eq!((pair.rank(), pair.all_gather_tensor(&x, 0)?.dims()), (1, &[4][..]));
    refused(World::simulated(3, 3), &["simulated", "no rank 3", "3"]);
    refused(World::simulated(0, 0), &["simulated", "at least one rank"]);
    Ok(())
}
