//! Tests the results of collectives.

use dtensor::comm::ReduceOp;
use dtensor::testing::spmd;
use dtensor::{DType, Result, Tensor};

use super::{prefixes, with};
use crate::common::ranks::{Array, Inputs, OPS, cat, exchange, reduce, same};
use crate::common::refused::refused;

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
fn reduce_scatter_splits_the_reduction_along_any_dim() {
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
                        // The same dim as a negative index.
                        let back = dim as isize - 3;
                        same(&group.reduce_scatter_tensor(&x.mine, op, back)?, &part);

                        // Uneven sizes: some of them 0, and all of them 0.
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
fn all_gather_concatenates_the_shards_along_any_dim() {
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
fn all_to_all_sends_piece_i_to_rank_i() {
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
                // Every pair of ranks `r` and `t` exchanges a piece of its own size, often 0.
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
                // From a tensor sharded along one dim to one sharded along another, and back.
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
fn broadcast_scatter_gather_and_permute_move_values_unchanged() {
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
                    // Every rank has another shape, and one of them is empty.
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
            // Scattered and gathered tensors may also differ in dtype.
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
fn reductions_handle_nan_infinity_and_integer_overflow() {
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
