//! Tests operators on shards and partial tensors, and writes into slices.

use dtensor::comm::{ReduceOp, record};
use dtensor::testing::spmd;
use dtensor::{DType, Partial, Replicate, Result, Shard, Tensor, distribute_tensor, implicit_replication};

use super::{P, line, lists, numbers, ones, plane, refused, same, same_everywhere, whole_or_cut};

/// PyTorch: `x[2:5] = v` on a sharded dim writes into a gathered copy and is silently lost. So are writes into the results
/// of `select`, `slice`, `chunk` and `view`.
#[test]
fn item_04_writes_are_not_lost() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            for shape in [[8, 3], [5, 2], [3, 4], [6, 1]] {
                let [rows, columns] = shape;
                let x = numbers(&shape);
                let index = Tensor::from_slice(&[rows as i64 - 1, 0], [2])?;
                for list in lists(&mesh, &whole_or_cut(2)) {
                    let whole = vec![Replicate; mesh.ndim()];
                    let write = |source: &[usize], f: &dyn Fn(&[Tensor]) -> Result<Tensor>| {
                        same_everywhere(&mesh, &[x.clone(), ones(source)?], &[list.clone(), whole.clone()], f)
                    };
                    write(&[2, columns], &|x| x[0].slice_scatter(&x[1], 0, 1, 3, 1))?;
                    write(&[rows.div_ceil(2), columns], &|x| {
                        x[0].slice_scatter(&x[1], 0, 0, rows as isize, 2)
                    })?;
                    write(&[columns], &|x| x[0].select_scatter(&x[1], 0, -1))?;
                    write(&[rows], &|x| x[0].select_scatter(&x[1], 1, 0))?;
                    let inputs = [x.clone(), index.clone(), numbers(&[2, columns])];
                    let lies = [list.clone(), whole.clone(), whole.clone()];
                    same_everywhere(&mesh, &inputs, &lies, |x| x[0].index_copy(0, &x[1], &x[2]))?;
                    // The result is a new tensor: the input and an earlier view of it do not change.
                    let laid = distribute_tensor(&x, &mesh, list.clone())?;
                    let view = laid.slice(0, 1, 3, 1)?;
                    let source = distribute_tensor(&ones(&[2, columns])?, &mesh, whole.clone())?;
                    let written = laid.slice_scatter(&source, 0, 1, 3, 1)?;
                    same(&laid, &x)?;
                    same(&view, &x.slice(0, 1, 3, 1)?)?;
                    same(&written.slice(0, 1, 3, 1)?, &ones(&[2, columns])?)?;
                }
            }
        }
        Ok(())
    });
}

/// PyTorch: the sum of a replicated and a partial integer tensor has a float dtype.
#[test]
fn item_05_integers_stay_integers() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let large = (1i64 << 60) + 1;
        let x = Tensor::from_slice(&[large, -7, 0], [3])?;
        let replicated = distribute_tensor(&x, &mesh, [Replicate])?;
        let part = Tensor::from_slice(&[world.rank() as i64, 1, -5], [3])?;
        let partial = Tensor::from_local(&part, &mesh, [P])?;
        for sum in [replicated.add(&partial)?, partial.add(&replicated)?] {
            assert_eq!(sum.dtype(), DType::I64);
            // The first element is not exact as an `f64`.
            assert_eq!(sum.full_tensor()?.to_vec::<i64>()?, [large + 6, -3, -20]);
        }
        assert_eq!(replicated.sub(&partial)?.full_tensor()?.to_vec::<i64>()?, [large - 6, -11, 20]);
        Ok(())
    });
}

/// PyTorch: two lookups in a row-sharded embedding table share one mask. If their indices differ, or if one result is used
/// twice, this is an error; the local tensor has rows that belong to other indices.
#[test]
fn item_06_partial_lookups_do_not_share_a_mask() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        for rows in [8, 5, 3] {
            let table = numbers(&[rows, 2]);
            let laid = distribute_tensor(&table, &mesh, [Shard(0)])?;
            let ids =
                |of: fn(i64) -> i64| Tensor::from_vec((0..6).map(|i| of(i) % rows as i64).collect(), [6]);
            let (first, second) = (ids(|i| i)?, ids(|i| 7 * i + 2)?);
            let lookup = |ids: &Tensor| distribute_tensor(ids, &mesh, [Replicate])?.embedding(&laid, None);
            let (a, b) = (lookup(&first)?, lookup(&second)?);
            assert_eq!((a.placements(), b.placements()), (&[P][..], &[P][..]));
            for _ in 0..2 {
                same(&b, &second.embedding(&table, None)?)?;
                same(&a, &first.embedding(&table, None)?)?;
            }
            // The row of an index that another rank owns is zero, not some other row.
            let mine = laid.to_local()?.dims()[0];
            let start = world.rank() * rows.div_ceil(4);
            let part = a.to_local()?.to_vec2::<f64>()?;
            for (row, &id) in part.iter().zip(&first.to_vec::<i64>()?) {
                let here = (start..start + mine).contains(&(id as usize));
                assert!(here || row.iter().all(|&x| x == 0.0), "row {id} on rank {}", world.rank());
            }
        }
        Ok(())
    });
}

/// PyTorch: an error whose message is `0`.
#[test]
fn item_07_a_sharded_dim_of_size_one_is_expanded() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            for list in lists(&mesh, &whole_or_cut(2)) {
                let x = [numbers(&[1, 3])];
                same_everywhere(&mesh, &x, std::slice::from_ref(&list), |x| x[0].expand([4, 3]))?;
                same_everywhere(&mesh, &x, std::slice::from_ref(&list), |x| x[0].expand([2, 5, 3]))?;
                same_everywhere(&mesh, &x, &[list], |x| x[0].expand([0, 3]))?;
            }
        }
        Ok(())
    });
}

/// PyTorch: leaving an inner scope ends the outer one.
#[test]
fn item_14_scopes_of_implicit_replication_nest() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let (x, plain) = (numbers(&[4, 2]), ones(&[2])?);
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let expected = x.add(&plain)?;
        implicit_replication(|| -> Result<()> {
            implicit_replication(|| laid.add(&plain)).and_then(|y| same(&y, &expected))?;
            // An inner scope also ends if its body fails.
            assert!(implicit_replication(|| laid.mm(&plain)).is_err());
            same(&laid.add(&plain)?, &expected)
        })?;
        refused(laid.add(&plain), &["add", "got mixed local and distributed tensors"]);
        Ok(())
    });
}

/// PyTorch: `item()`, `float()` and `bool()` of a partial tensor return the local value.
#[test]
fn item_16_item_returns_the_value_of_the_full_tensor() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            for shape in [&[8, 3][..], &[5, 2], &[2, 2], &[1, 1]] {
                let x = numbers(shape);
                for list in lists(&mesh, &whole_or_cut(2)) {
                    let laid = distribute_tensor(&x, &mesh, list)?;
                    assert_eq!(laid.sum_all()?.item::<f64>()?, x.sum_all()?.item::<f64>()?);
                    assert_eq!(laid.max_all()?.item::<f64>()?, x.max_all()?.item::<f64>()?);
                    assert_eq!(laid.min_all()?.item_f64()?, x.min_all()?.item_f64()?);
                    let positive = |x: &Tensor| x.sum_all()?.gt(0.0)?.item::<u8>();
                    assert_eq!(positive(&laid)?, positive(&x)?);
                }
            }
        }
        let mesh = line(&world)?;
        let part = Tensor::scalar(world.rank() as f64)?;
        for (op, expected) in [(ReduceOp::Sum, 6.0), (ReduceOp::Avg, 1.5), (ReduceOp::Max, 3.0)] {
            let number = Tensor::from_local(&part, &mesh, [Partial(op)])?;
            let (value, calls) = record(|| number.item::<f64>());
            assert_eq!((value?, calls.len()), (expected, 1));
        }
        Ok(())
    });
}
