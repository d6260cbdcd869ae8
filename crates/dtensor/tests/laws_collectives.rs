//! Every collective gives, bit by bit, what a loop over the ranks' values gives: for every dtype, dim and way to lie in
//! memory, in every group, whatever else is in flight.

#[path = "common/ranks.rs"]
mod ranks;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use dtensor::comm::{Collective, Group, ReduceOp, World, WorldKind, launch, record};
use dtensor::testing::spmd;
use dtensor::{Aside, DType, Error, Here, Local, Locals, Meta, Metas, Op, Result, Rule, Tensor, apply};
use ranks::{Array, Inputs, Layout, OPS, Random, begin_any, cat, exchange, reduce, same};

/// The groups of the first 1, 2, … ranks, of which this rank is a member.
fn prefixes(world: &World) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    for n in 1..=world.size() {
        groups.extend(world.new_group(&(0..n).collect::<Vec<_>>())?);
    }
    Ok(groups)
}

fn with(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}

/// Asserts that a result is an error whose message has all of these words.
#[track_caller]
fn refused<T>(result: Result<T>, words: &[&str]) {
    let Err(error) = result else { panic!("accepted, but expected an error with {words:?}") };
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn reductions_fold_the_values_in_rank_order() {
    spmd(4, |world| {
        for group in prefixes(&world)? {
            for (i, dtype) in DType::ALL.into_iter().enumerate() {
                for op in OPS {
                    let seed = 100 * i as u64;
                    let floats = dtype.is_float() || op != ReduceOp::Avg;
                    for dims in [&[][..], &[1], &[0], &[3, 0], &[2, 5], &[2, 1, 3]] {
                        let x = Inputs::new(&group, dtype, seed, |_| dims.to_vec())?;
                        if !floats {
                            let words =
                                ["all_reduce", dtype.name(), "an average needs a floating-point dtype"];
                            refused(group.all_reduce(&x.mine, op), &words);
                            refused(group.reduce(&x.mine, op, 0), &["reduce", "average"]);
                            continue;
                        }
                        same(&group.all_reduce(&x.mine, op)?, &reduce(op, &x.all));
                    }
                    if !floats {
                        continue;
                    }
                    for dst in 0..group.size() {
                        let x = Inputs::new(&group, dtype, seed + 1, |_| vec![3, 2])?;
                        let sum = group.reduce(&x.mine, op, dst)?;
                        assert_eq!(sum.is_some(), group.rank() == dst);
                        if let Some(sum) = sum {
                            same(&sum, &reduce(op, &x.all));
                        }
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn reduce_scatter_cuts_the_reduction_along_any_dim() {
    spmd(4, |world| {
        for group in prefixes(&world)? {
            let (n, me) = (group.size(), group.rank());
            for (i, dtype) in DType::ALL.into_iter().enumerate() {
                for op in OPS {
                    let (seed, dims) = (i as u64, [2, 3, 2]);
                    if dtype.is_int() && op == ReduceOp::Avg {
                        let x = Inputs::new(&group, dtype, seed, |_| vec![n])?;
                        refused(group.reduce_scatter_tensor(&x.mine, op, 0), &["reduce_scatter", "average"]);
                        continue;
                    }
                    for dim in 0..3 {
                        let x = Inputs::new(&group, dtype, seed, |_| with(&dims, dim, 2 * n))?;
                        let part = reduce(op, &x.all).narrow(dim, 2 * me, 2);
                        same(&group.reduce_scatter_tensor(&x.mine, op, dim)?, &part);
                        // Counted from the back.
                        let back = dim as isize - 3;
                        same(&group.reduce_scatter_tensor(&x.mine, op, back)?, &part);

                        // Nothing for some, and nothing for all.
                        for sizes in [[3, 0, 1, 2], [0, 2, 0, 5], [0, 0, 0, 0]] {
                            let sizes = &sizes[..n];
                            let x =
                                Inputs::new(&group, dtype, seed, |_| with(&dims, dim, sizes.iter().sum()))?;
                            let part = reduce(op, &x.all).split(dim, sizes).swap_remove(me);
                            same(&group.reduce_scatter_uneven(&x.mine, op, dim, sizes)?, &part);
                        }
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn all_gather_puts_the_parts_one_after_the_other_along_any_dim() {
    spmd(4, |world| {
        for group in prefixes(&world)? {
            let n = group.size();
            for (i, dtype) in DType::ALL.into_iter().enumerate() {
                for dims in [&[3, 2, 2][..], &[1, 0, 2], &[1, 1, 1], &[4]] {
                    for dim in 0..dims.len() {
                        let x = Inputs::new(&group, dtype, i as u64, |_| dims.to_vec())?;
                        let all = cat(&x.all, dim);
                        same(&group.all_gather_tensor(&x.mine, dim)?, &all);
                        same(&group.all_gather_tensor(&x.mine, dim as isize - dims.len() as isize)?, &all);
                        for sizes in [[3, 0, 1, 2], [0, 2, 0, 5], [0, 0, 0, 0]] {
                            let x = Inputs::new(&group, dtype, i as u64, |r| with(dims, dim, sizes[r]))?;
                            same(&group.all_gather_uneven(&x.mine, dim, &sizes[..n])?, &cat(&x.all, dim));
                        }
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn all_to_all_hands_part_i_to_rank_i() {
    spmd(4, |world| {
        for group in prefixes(&world)? {
            let (n, me) = (group.size(), group.rank());
            for (i, dtype) in DType::ALL.into_iter().enumerate() {
                let seed = i as u64;
                for size in [0, 1, 3] {
                    let x = Inputs::new(&group, dtype, seed, |_| vec![size * n, 2])?;
                    let mine = exchange(&x.all, 0, |_| vec![size; n], 0, me);
                    same(&group.all_to_all_single(&x.mine, None, None)?, &mine);
                }
                // r hands t a part of its own size, often nothing.
                for len in [|r: usize, t: usize| (r * 3 + t) % 4, |r, t| if r == t { 0 } else { r }] {
                    let send = |r: usize| (0..n).map(|t| len(r, t)).collect::<Vec<_>>();
                    let receive: Vec<usize> = (0..n).map(|r| len(r, me)).collect();
                    let x = Inputs::new(&group, dtype, seed, |r| vec![send(r).iter().sum(), 3])?;
                    let got = group.all_to_all_single(&x.mine, Some(&receive), Some(&send(me)))?;
                    same(&got, &exchange(&x.all, 0, send, 0, me));
                    // The same along another dim.
                    let x = Inputs::new(&group, dtype, seed, |r| vec![2, send(r).iter().sum()])?;
                    let got = group.all_to_all(&x.mine, -1, &send(me), 1, &receive)?;
                    same(&got, &exchange(&x.all, 1, send, 1, me));
                }
                // What is cut along one dim is then cut along another.
                let whole = Array::random(dtype, &[5, 7, 4], &[seed]);
                let cuts = [[2, 0, 2, 1], [3, 1, 0, 3], [1, 1, 1, 1]];
                for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
                    let whole = whole.narrow(from, 0, cuts[from][..n].iter().sum());
                    let whole = whole.narrow(to, 0, cuts[to][..n].iter().sum());
                    let (rows, columns) = (&cuts[from][..n], &cuts[to][..n]);
                    let mine = whole.split(from, rows).swap_remove(me).tensor()?;
                    let turned = group.all_to_all(&mine, to, columns, from, rows)?;
                    same(&turned, &whole.split(to, columns).swap_remove(me));
                    same(&group.all_to_all(&turned, from, rows, to, columns)?, &Array::of(&mine)?);
                }
            }
        }
        Ok(())
    });
}

#[test]
fn broadcast_scatter_gather_and_permute_move_values_as_they_are() {
    spmd(4, |world| {
        for group in prefixes(&world)? {
            let (n, me) = (group.size(), group.rank());
            for (i, dtype) in DType::ALL.into_iter().enumerate() {
                let seed = i as u64;
                for root in 0..n {
                    for dims in [&[][..], &[1], &[0, 2], &[3, 2]] {
                        let x = Inputs::new(&group, dtype, seed, |_| dims.to_vec())?;
                        same(&group.broadcast(&x.mine, root)?, &x.all[root]);
                    }
                    // Another shape for each, and for one of them nothing.
                    let dims = |r: usize| vec![2; r].into_iter().chain([r ^ 1]).collect::<Vec<_>>();
                    let x = Inputs::new(&group, dtype, seed, dims)?;
                    let pieces = x.all.iter().map(Array::tensor).collect::<Result<Vec<_>>>()?;
                    let mine = group.scatter((me == root).then_some(&pieces[..]), root)?;
                    same(&mine, &x.all[me]);
                    let all = group.gather(&mine, root)?;
                    assert_eq!(all.as_ref().map(Vec::len), (me == root).then_some(n));
                    all.into_iter().flatten().zip(&x.all).for_each(|(got, expected)| same(&got, expected));

                    let to: Vec<usize> = (0..n).map(|r| (root + n - r) % n).collect();
                    let x = Inputs::new(&group, dtype, seed, |_| vec![2, 2])?;
                    let from = to.iter().position(|&t| t == me).expect("a permutation");
                    same(&group.permute_tensor(&x.mine, &to)?, &x.all[from]);
                }
            }
            // Dtypes of scattered and gathered values may differ too.
            let kinds = DType::ALL.map(|dtype| Array::random(dtype, &[3], &[1]));
            let pieces = kinds[..n].iter().map(Array::tensor).collect::<Result<Vec<_>>>()?;
            let mine = group.scatter((me == 0).then_some(&pieces[..]), 0)?;
            same(&mine, &kinds[me]);
            for (got, expected) in group.gather(&mine, n - 1)?.into_iter().flatten().zip(&kinds) {
                same(&got, expected);
            }
        }
        Ok(())
    });
}

#[test]
fn messages_arrive_by_tag_and_in_the_order_sent() {
    spmd(4, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        let letter = |from: usize, to: usize, tag: u32, i: u64| {
            let dims = [[2, 3], [1, 1], [0, 4]][i as usize % 3];
            let dtype = DType::ALL[(tag as usize + i as usize) % 6];
            Array::random(dtype, &dims, &[from as u64, to as u64, tag as u64, i])
        };
        // Everybody to everybody, itself included, and nobody has begun to receive.
        for to in 0..n {
            for i in 0..3 {
                for tag in [0, 7, (1 << 24) - 1] {
                    group.send(&letter(me, to, tag, i).tensor()?, to, tag)?;
                }
            }
        }
        // Taken in another order of tags and of senders.
        for tag in [7, (1 << 24) - 1, 0] {
            for from in (0..n).rev() {
                for i in 0..3 {
                    same(&group.recv(from, tag)?, &letter(from, me, tag, i));
                }
            }
        }
        // Asked for before it is sent, with collectives in between.
        let next = (me + 1) % n;
        let before = (me + n - 1) % n;
        let coming = group.recv_async(before, 1)?;
        group.barrier()?;
        group.send(&letter(me, next, 1, 0).tensor()?, next, 1)?;
        same(&coming.wait()?, &letter(before, me, 1, 0));

        // Round a ring until everybody has had everything; large, so that no mailbox of a transport holds it.
        let large = |r: usize| Array::random(DType::F32, &[300, 1001], &[r as u64]);
        let mut mine = large(me).tensor()?;
        for step in 1..=n {
            group.send(&mine, next, 2)?;
            mine = group.recv(before, 2)?;
            same(&mine, &large((me + n - step) % n));
        }
        // In a group, ranks are the group's; what lies in another order in memory is sent as it reads.
        if let Some(pair) = world.new_group(&[2, 0])? {
            let x = Inputs::laid(&pair, DType::I64, 5, Layout::Transposed, |_| vec![3, 4])?;
            pair.send(&x.mine, 1 - pair.rank(), 0)?;
            same(&pair.recv(1 - pair.rank(), 0)?, &x.all[1 - pair.rank()]);
        }
        Ok(())
    });
}

#[test]
fn values_may_lie_in_memory_in_any_way() {
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
            // One row, many times; one number, many times.
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
        // The value is not changed by being summed, nor by what is done to the sum.
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
fn values_that_are_worked_on_in_several_parts_come_out_whole() {
    spmd(3, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        // From a third of a part to many parts, with rows that fill no number of parts, and rows larger than one.
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
fn what_is_not_a_number_is_kept_and_the_extremes_are_found() {
    spmd(3, |world| {
        let (group, me) = (world.group(), world.rank());
        let specials = [
            [f64::NAN, 1.0, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1e300],
            [1.0, f64::NAN, 1.0, 2.0, f64::INFINITY, 1e300],
            [2.0, 3.0, f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NAN, 0.0],
        ];
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
            let cast = |r: usize| Tensor::from_slice(&specials[r], [6])?.to_dtype(dtype);
            let all = (0..3).map(|r| Array::of(&cast(r)?)).collect::<Result<Vec<_>>>()?;
            for op in OPS {
                same(&group.all_reduce(&cast(me)?, op)?, &reduce(op, &all));
            }
        }
        let integers = [[i64::MAX, i64::MIN, -1], [1, -1, i64::MIN], [i64::MIN, 0, 5]];
        let all = integers.map(|x| Array::of(&Tensor::from_slice(&x, [3]).unwrap()).unwrap());
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
            same(&group.all_reduce(&all[me].tensor()?, op)?, &reduce(op, &all));
        }
        Ok(())
    });
}

#[test]
fn barriers_hold_everybody_and_objects_reach_everybody() {
    spmd(4, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
        for late in 0..n {
            if me == late {
                std::thread::sleep(Duration::from_millis(15));
            }
            let came = now();
            group.barrier()?;
            let times = group.all_gather_object(&(came, now()))?;
            let last_came = times.iter().map(|t| t.0).max();
            let first_went = times.iter().map(|t| t.1).min();
            assert!(last_came <= first_went, "somebody went on before all had come: {times:?}");
        }
        // Of other lengths, and of a type of some depth.
        type Object = (usize, String, Vec<Option<f64>>);
        let object =
            |r: usize| -> Object { (r, "ä\"\n".repeat(r * 100), vec![Some(0.1), None][..r % 3].to_vec()) };
        let all = group.all_gather_object(&object(me))?;
        assert_eq!(all, (0..n).map(object).collect::<Vec<_>>());
        for src in 0..n {
            let mine = object(me);
            let got: Object = group.broadcast_object((me == src).then_some(&mine), src)?;
            assert_eq!(got, object(src));
        }
        assert_eq!(group.all_gather_object(&())?.len(), n);
        refused(
            group.broadcast_object(Some(&1).filter(|_| me != 0), 0),
            &["broadcast_object", "rank 0 must give"],
        );
        refused(group.broadcast_object::<u8>(None, 4), &["broadcast_object", "rank 4 is not in the group"]);
        // What was refused has not been sent: the group goes on.
        let words = group.all_gather_object(&"word".to_string())?;
        assert_eq!(words, vec!["word"; n]);
        // Another type than was sent is an error, with the rank that sent it.
        if me == 0 {
            refused(group.all_gather_object(&7u8), &["all_gather_object", "what rank 1 sent"]);
        } else {
            refused(group.all_gather_object(&"seven".to_string()), &["what rank 0 sent"]);
        }
        group.barrier()
    });
}

#[test]
fn groups_are_any_ranks_in_any_order() {
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
        // The same list twice is two groups, a handle is the same one.
        if let (Some(first), Some(second)) = (&groups[0], &groups[7]) {
            assert_ne!(first, second);
            assert_eq!(first, &first.clone());
        }
        // Overlapping, in an order that is the same for all: the ranks of a sum are the group's.
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
        // In two groups of the same ranks, begun in another order on each: what belongs together meets.
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
        // A group outlives the handle to its world, and does without those who are not in it.
        drop(world);
        if let Some(pair) = &groups[5] {
            let x = Inputs::new(pair, DType::U8, 60, |_| vec![7])?;
            same(&pair.all_reduce(&x.mine, ReduceOp::Min)?, &reduce(ReduceOp::Min, &x.all));
        }
        Ok(())
    });
}

#[test]
fn collectives_in_flight_may_be_waited_for_in_any_order() {
    spmd(4, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        // Every rank waits in an order of its own. Large ones among them are worked on by whoever waits.
        for round in 0..12u64 {
            let mut flying = Vec::new();
            for i in 0..9 {
                let dims = if i == 4 && round % 4 == 0 { vec![200, 1000] } else { vec![3, i as usize] };
                let x = Inputs::new(group, DType::F32, 100 * round + i, |_| dims.clone())?;
                flying.push(match i % 3 {
                    0 => (group.all_gather_tensor_async(&x.mine, 0)?, cat(&x.all, 0)),
                    1 => (group.all_reduce_async(&x.mine, ReduceOp::Sum)?, reduce(ReduceOp::Sum, &x.all)),
                    _ => (group.broadcast_async(&x.mine, 1)?, x.all[1].clone()),
                });
            }
            let mut random = Random::new(&[round, me as u64]);
            while !flying.is_empty() {
                let (pending, expected) = flying.swap_remove(random.below(flying.len()));
                same(&pending.wait()?, &expected);
            }
        }
        // It is not ready before the last has come, and is then, without anybody waiting.
        let x = Inputs::new(group, DType::F64, 1, |_| vec![2, 2])?;
        let word = Tensor::zeros([1], DType::U8)?;
        let mut pending = if me == 0 {
            let mut pending = group.all_reduce_async(&x.mine, ReduceOp::Sum)?;
            assert!(!pending.is_ready());
            for to in 1..n {
                group.send(&word, to, 0)?;
            }
            pending
        } else {
            group.recv(0, 0)?;
            group.all_reduce_async(&x.mine, ReduceOp::Sum)?
        };
        let began = Instant::now();
        while !pending.is_ready() {
            assert!(began.elapsed() < Duration::from_secs(20), "not ready after all have come");
            std::thread::yield_now();
        }
        assert!(pending.is_ready());
        same(&pending.wait()?, &reduce(ReduceOp::Sum, &x.all));

        // A result that a rank does not want is there for the others all the same, large or small.
        for dims in [vec![3], vec![400, 1000]] {
            for idle in 0..n {
                let x = Inputs::new(group, DType::F32, idle as u64, |_| dims.clone())?;
                let sum = group.all_reduce_async(&x.mine, ReduceOp::Sum)?;
                let all = group.all_gather_tensor_async(&x.mine, 0)?;
                if me == idle {
                    drop((sum, all));
                } else {
                    same(&all.wait()?, &cat(&x.all, 0));
                    same(&sum.wait()?, &reduce(ReduceOp::Sum, &x.all));
                }
            }
        }
        // Two groups that overlap, begun in another order on different ranks, and waited for in yet another.
        let left = world.new_group(&[0, 1, 2])?;
        let right = world.new_group(&[3, 2, 1])?;
        for round in 0..20u64 {
            let begin = |group: &Option<Group>, seed: u64| -> Result<_> {
                let Some(group) = group else { return Ok(None) };
                let x = Inputs::new(group, DType::BF16, seed, |_| vec![4])?;
                let pending = group.all_reduce_async(&x.mine, ReduceOp::Product)?;
                Ok(Some((pending, reduce(ReduceOp::Product, &x.all))))
            };
            let mut flying = Vec::new();
            for i in 0..2 {
                let first = (me as u64 + round + i).is_multiple_of(2);
                let seed = 2 * round + u64::from(first);
                flying.extend(begin(if first { &left } else { &right }, seed)?);
            }
            if round % 3 == 0 {
                flying.reverse();
            }
            for (pending, expected) in flying {
                same(&pending.wait()?, &expected);
            }
        }
        // Barriers too.
        let (first, second) = (group.barrier_async()?, group.barrier_async()?);
        second.wait()?;
        first.wait()
    });
}

#[test]
fn worlds_of_every_size_have_every_collective() {
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
fn what_does_not_fit_is_refused_and_the_group_goes_on() {
    spmd(2, |world| {
        let (group, me) = (world.group(), world.rank());
        let x = Tensor::zeros([3, 4], DType::F32)?;
        let scalar = Tensor::zeros((), DType::F32)?;
        let sum = ReduceOp::Sum;
        refused(
            group.reduce_scatter_tensor(&x, sum, 0),
            &["reduce_scatter", "size 3 of dim 0", "multiple", "2"],
        );
        refused(group.reduce_scatter_tensor(&x, sum, 2), &["reduce_scatter", "out of range", "2"]);
        refused(group.reduce_scatter_tensor(&scalar, sum, 0), &["reduce_scatter", "without dims"]);
        refused(group.reduce_scatter_uneven(&x, sum, 0, &[2, 2]), &["[2, 2]", "add up", "dim 0", "[3, 4]"]);
        refused(group.reduce_scatter_uneven(&x, sum, 0, &[3]), &["[3]", "one size for each of the 2 ranks"]);
        refused(group.reduce_scatter_uneven(&x, sum, 0, &[usize::MAX, 4]), &["add up"]);
        refused(group.all_gather_tensor(&x, -3), &["all_gather", "out of range", "-3"]);
        refused(group.all_gather_tensor(&scalar, 0), &["all_gather", "without dims"]);
        let other: Vec<usize> = (0..2).map(|r| if r == me { 4 } else { 3 }).collect();
        refused(group.all_gather_uneven(&x, 0, &other), &["all_gather", "do not give this rank", "[3, 4]"]);
        refused(group.all_gather_uneven(&x, 0, &[3, 3, 3]), &["all_gather", "[3, 3, 3]", "2 ranks"]);
        refused(group.all_to_all_single(&x, None, None), &["all_to_all", "multiple"]);
        refused(group.all_to_all_single(&x, Some(&[1, 2]), None), &["input_splits", "together"]);
        refused(group.all_to_all(&x, 1, &[1, 2], 0, &[3, 3]), &["all_to_all", "add up", "dim 1"]);
        refused(group.all_to_all(&x, 1, &[2, 2], 0, &[3]), &["all_to_all", "receive", "[3]"]);
        refused(group.all_to_all(&x, 1, &[2, 2], 5, &[3, 3]), &["all_to_all", "out of range", "5"]);
        for result in [group.broadcast(&x, 2), group.recv(2, 0), group.scatter(None, 2)] {
            refused(result, &["rank 2 is not in the group, which has 2"]);
        }
        refused(group.reduce(&x, sum, 2), &["reduce", "rank 2 is not in the group"]);
        refused(group.gather(&x, 2), &["gather", "rank 2 is not in the group"]);
        refused(group.send(&x, 2, 0), &["send", "rank 2 is not in the group"]);
        for to in [&[0, 0][..], &[0], &[0, 2], &[0, 1, 2]] {
            refused(group.permute_tensor(&x, to), &["permute", "is not a permutation of the 2 ranks"]);
        }
        let pieces = [x.clone(), x.clone(), x.clone()];
        let given = if me == 0 { &pieces[..] } else { &pieces[..2] };
        refused(group.scatter(Some(given), 0), &["scatter", "rank 0"]);
        // What a rank hands to itself is what it expects from itself.
        let mut receive = vec![3; 2];
        receive[me] = 2;
        refused(group.all_to_all(&x, 1, &[2, 2], 0, &receive), &["all_to_all", "[3, 4]", "itself"]);
        let alone = world.new_group(&[me])?.expect("this rank is in it");
        refused(alone.all_to_all(&x, 1, &[4], 0, &[9]), &["all_to_all", "itself"]);
        same(&alone.all_to_all(&x, 1, &[4], 0, &[3])?, &Array::of(&x)?);
        let meta = Tensor::meta_of([2], DType::F32)?;
        refused(group.send(&meta, 1 - me, 0), &["send", "meta"]);

        // None of this was a collective: the next one is the first, for all.
        let (sum, calls) = record(|| group.all_reduce(&Tensor::ones([1], DType::F32)?, sum));
        assert_eq!(sum?.to_vec::<f32>()?, [2.0]);
        assert_eq!(calls[0].sequence, 0);
        Ok(())
    });
}

#[test]
fn receives_with_one_tag_get_what_was_sent_in_the_order_in_which_they_began() {
    spmd(2, |world| {
        let (group, other) = (world.group(), 1 - world.rank());
        for reversed in [false, true] {
            for value in [1.0, 2.0, 3.0] {
                group.send(&Tensor::full([4], value, DType::F32)?, other, 5)?;
            }
            let (first, dropped, third) =
                (group.recv_async(other, 5)?, group.recv_async(other, 5)?, group.recv_async(other, 5)?);
            drop(dropped);
            let (first, third) = if reversed {
                let third = third.wait()?;
                (first.wait()?, third)
            } else {
                (first.wait()?, third.wait()?)
            };
            assert_eq!(first.to_vec::<f32>()?, [1.0; 4]);
            assert_eq!(third.to_vec::<f32>()?, [3.0; 4]);
            group.barrier()?;
        }
        Ok(())
    });
}

#[test]
fn an_all_to_all_whose_parts_do_not_fit_together_fails_everywhere() {
    spmd(3, |world| {
        let me = world.rank();
        // As many columns go to rank `to` as another rank says, but for those of rank `from`: no rank sees that by itself.
        let cut = |from: usize, to: usize| {
            let mut send = [1; 3];
            send[to] += usize::from(me == from);
            send
        };
        // From rank 1 come fewer rows to rank 0 than it expects.
        let expected = if me == 0 { [2, 1, 2] } else { [2, 2, 2] };
        let mut cases = vec![
            ("rows".to_string(), vec![2, 3], [1, 1, 1], expected),
            ("depth".to_string(), vec![2, 3, 1 + me / 2], [1, 1, 1], [2, 2, 2]),
        ];
        for (from, to) in [(2, 1), (0, 1), (0, 2), (1, 2), (2, 0), (2, 2)] {
            let send = cut(from, to);
            cases.push((format!("columns {from} {to}"), vec![2, send.iter().sum()], send, [2, 2, 2]));
        }
        for (name, dims, send, receive) in cases {
            let group = world.named_group(&[0, 1, 2], &name)?.expect("all are in it");
            let x = Tensor::zeros(dims, DType::F32)?;
            let result = group.all_to_all(&x, 1, &send, 0, &receive);
            refused(result, &["all_to_all", "does not match", &name, "laws_collectives.rs"]);
        }
        world.group().barrier()
    });
}

/// Shows the value of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Peek(Aside<Arc<std::sync::Mutex<Option<Local>>>>);

impl Op for Peek {
    fn name(&self) -> &'static str {
        "peek"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into_iter().collect())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Local], _: &Here<'_>) -> Result<Locals> {
        *self.0.0.lock().unwrap() = Some(x[0].clone());
        Ok([x[0].clone()].into_iter().collect())
    }
}

fn value(x: &Tensor) -> Result<Local> {
    let seen = Arc::default();
    apply(Peek(Aside(Arc::clone(&seen))), &[x])?;
    Ok(seen.lock().unwrap().take().expect("the kernel has run"))
}

#[test]
fn a_result_that_all_threads_get_is_held_once() -> Result<()> {
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
            // Each holds it once, and sees that others do too.
            assert!(!held.is_unique(), "rank {} has a copy of its own", world.rank());
            group.barrier()?;
            // When the others have let go, nobody is left who holds it.
            if world.rank() > 0 {
                drop(held);
                group.barrier()?;
            } else {
                group.barrier()?;
                assert!(held.is_unique());
            }
        }
        // A part that only one gets is its own.
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

#[test]
fn a_simulated_world_has_the_shapes_of_a_real_one() -> Result<()> {
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
    refused(group.scatter(None, 0), &["scatter", "simulated"]);
    refused(group.recv(0, 0), &["recv", "simulated"]);
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

#[test]
fn a_recording_lists_the_calls_with_the_lines_that_made_them() -> Result<()> {
    let world = World::simulated(4, 1)?;
    let group = world.group();
    let x = Tensor::zeros([4, 2], DType::F32)?.requires_grad_(true)?;
    let meta = Tensor::meta_of([8], DType::F16)?;
    let mut lines = Vec::new();
    let mut here = |line: u32| lines.push(line);
    let (result, calls) = record(|| -> Result<()> {
        group.all_reduce(&x, ReduceOp::Avg)?;
        here(line!() - 1);
        let pending = group.all_gather_tensor_async(&x, 1)?;
        here(line!() - 1);
        let gathered = pending.wait()?;
        // A call over several lines is where its name is.
        let _ = world.group().all_to_all(&x, 0, &[1; 4], 1, &[2; 4])?;
        here(line!() - 1);
        let (inner, calls) = record(|| group.reduce_scatter_tensor(&meta, ReduceOp::Sum, 0));
        here(line!() - 1);
        assert_eq!((inner?.dims(), calls.len()), (&[2][..], 1));
        group.barrier()?;
        here(line!() - 1);
        group.all_gather_object(&1)?;
        here(line!() - 1);
        group.send(&x.detach(), 0, 3)?;
        here(line!() - 1);
        // A gradient's collective is where the collective was.
        gathered.sum_all()?.backward()?;
        Ok(())
    });
    result?;
    lines.push(lines[1]);
    let got: Vec<u32> = calls.iter().map(|call| call.at.line).collect();
    assert_eq!(got, lines);
    assert!(calls.iter().all(|call| call.at.file.ends_with("laws_collectives.rs")));
    assert!(calls.iter().all(|call| &*call.group == "world"));
    let names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
    let expected = [
        "all_reduce",
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "barrier",
        "exchange",
        "send",
        "reduce_scatter",
    ];
    assert_eq!(names, expected);
    // Messages are counted by themselves.
    let sequences: Vec<u64> = calls.iter().map(|call| call.sequence).collect();
    assert_eq!(sequences, [0, 1, 2, 3, 4, 5, 0, 6]);
    assert_eq!(calls[0].collective, Collective::AllReduce { op: ReduceOp::Avg });
    assert_eq!((calls[0].bytes(), calls[3].bytes()), (32, 16));
    assert_eq!((&calls[3].meta.shape[..], calls[3].meta.dtype), (&[8][..], DType::F16));
    let text = calls[0].to_string();
    assert_eq!(
        text,
        format!("all_reduce(avg) #0 on `world` (f32 [4, 2], requires grad, at {})", calls[0].at)
    );

    // A call that was refused was not made; nothing is recorded outside.
    let (result, calls) = record(|| group.all_gather_tensor(&x, 5));
    assert!(matches!(result, Err(Error::DimOutOfRange { .. })) && calls.is_empty());

    // On threads, each rank records its own.
    launch(3, |world| {
        let y = Tensor::ones([1], DType::F32)?;
        let (result, calls) = record(|| {
            (0..=world.rank()).try_for_each(|r| world.group().send(&y, r, 0))?;
            world.group().all_reduce(&y, ReduceOp::Sum)
        });
        assert_eq!(result?.to_vec::<f32>()?, [3.0]);
        assert_eq!(calls.len(), world.rank() + 2);
        Ok(())
    })?;
    Ok(())
}
