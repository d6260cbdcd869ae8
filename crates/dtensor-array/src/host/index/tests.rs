//! Tests that compare the index kernels with loops over coordinates.

use super::super::testing::{FLOATS, assert_close, ids, local, noise, strided, tolerance, values};
use super::*;
use crate::DType;

/// Returns integers that every dtype holds exactly.
fn integers(n: usize, seed: u64) -> Vec<f64> {
    noise(n, seed).iter().map(|x| ((x + 2.0) * 30.0).floor()).collect()
}

fn some_ids(n: usize, size: usize, seed: u64) -> Vec<i64> {
    noise(n, seed).iter().map(|x| ((x + 2.0) / 4.0 * size as f64) as i64).collect()
}

fn out_of_bounds<V: std::fmt::Debug>(result: Result<V>, bad: i64) {
    match result.unwrap_err() {
        Error::IndexOutOfBounds { index, .. } => assert_eq!(index, bad),
        other => panic!("{other}"),
    }
}

/// Returns the coordinates of every element of a shape, in row-major order.
fn coordinates(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, &size| {
        all.iter().flat_map(|at| (0..size).map(move |i| [&at[..], &[i]].concat())).collect()
    })
}

fn flat(at: &[usize], shape: &[usize]) -> usize {
    at.iter().zip(shape).fold(0, |n, (i, size)| n * size + i)
}

#[test]
fn select_and_its_adjoint() {
    for dtype in DType::ALL {
        for (shape, dim, ids_shape) in [
            (vec![5, 7], 0, vec![4]),
            (vec![5, 7], 1, vec![2, 3]),
            (vec![3, 4, 9], 1, vec![6]),
            (vec![6, 40], 0, vec![200]),
            (vec![6], 0, vec![]),
            (vec![2, 3], 0, vec![0]),
            (vec![4, 0], 0, vec![3]),
            (vec![0, 3], 1, vec![2]),
        ] {
            let n: usize = shape.iter().product();
            let m: usize = ids_shape.iter().product();
            let size = shape[dim];
            let (xs, at) = (integers(n, 1), some_ids(m, size, 2));
            let out_shape = [&shape[..dim], &ids_shape, &shape[dim + 1..]].concat();
            let (_, _, inner) = split(&shape, dim);
            let outer: usize = shape[..dim].iter().product();
            let (x, id) = (local(dtype, &xs, &shape), ids(&at, &ids_shape));
            let mut want: Vec<f64> = vec![];
            for o in 0..outer {
                for &id in &at {
                    let from = (o * size + id as usize) * inner;
                    want.extend(&xs[from..from + inner]);
                }
            }
            for (x, id) in [(x.clone(), id.clone()), (strided(&x), strided(&id))] {
                let got = index_select("index_select", &x, dim, &id, DimShard::whole(size)).unwrap();
                assert_eq!(got.dims(), &out_shape[..]);
                assert_eq!(values(&got), want);
            }

            let dys = noise(want.len(), 3).iter().map(|x| (x + 2.0).floor()).collect::<Vec<_>>();
            let dy = local(dtype, &dys, &out_shape);
            for padding in [None, Some(1), Some(-1)] {
                let mut want = vec![0.0; n];
                for (i, dy) in dys.iter().enumerate() {
                    let (o, k, j) = (i / inner / m, i / inner % m, i % inner);
                    if Some(at[k]) != padding {
                        want[(o * size + at[k] as usize) * inner + j] += dy;
                    }
                }
                let want = local(dtype, &want, &shape);
                for dy in [dy.clone(), strided(&dy)] {
                    let got = index_add(&id, &dy, dim, size, padding, DimShard::whole(size)).unwrap();
                    assert_eq!(got.dims(), &shape[..]);
                    assert_eq!(values(&got), values(&want));
                }
            }
        }
    }
}

#[test]
fn rows_of_a_narrowed_array_are_selected() {
    let x = local(DType::F32, &integers(40, 1), &[8, 5]);
    let view = x.narrow(0, 2, 4).and_then(|t| t.narrow(1, 1, 3)).unwrap();
    let got = index_select("index_select", &view, 0, &ids(&[3, 0], &[2]), DimShard::whole(4)).unwrap();
    let all = integers(40, 1);
    assert_eq!(values(&got), [&all[26..29], &all[11..14]].concat());
}

#[test]
fn half_precision_is_summed_in_single() {
    // 2048 ones: a sum in bf16 would stop at 256.
    for dtype in FLOATS {
        let dy = local(dtype, &[1.0; 2048], &[2048, 1]);
        let id = ids(&[0; 1], &[1]).expand(&[2048]).unwrap();
        assert_eq!(values(&index_add(&id, &dy, 0, 1, None, DimShard::whole(1)).unwrap()), [2048.0]);
        let x = local(dtype, &[0.0], &[1]);
        let src = dy.reshape(&[2048]).unwrap();
        assert_eq!(values(&scatter_add(&x, 0, &id, &src, DimShard::whole(1)).unwrap()), [2048.0]);
    }
}

#[test]
fn gather_and_scatter() {
    for dtype in DType::ALL {
        for (shape, dim, ids_shape) in [
            (vec![5, 7], 0, vec![9, 6]),
            (vec![5, 7], 1, vec![5, 1]),
            (vec![3, 4, 9], 1, vec![2, 11, 9]),
            (vec![3, 4, 9], 2, vec![3, 4, 2]),
            (vec![6], 0, vec![10]),
            (vec![6], 0, vec![0]),
            (vec![3, 2], 0, vec![4, 0]),
        ] {
            let n: usize = shape.iter().product();
            let m: usize = ids_shape.iter().product();
            let xs = integers(n, 1);
            let at = some_ids(m, shape[dim], 2);
            let places: Vec<usize> = coordinates(&ids_shape)
                .into_iter()
                .zip(&at)
                .map(|(mut place, &id)| {
                    place[dim] = id as usize;
                    flat(&place, &shape)
                })
                .collect();
            let (x, id) = (local(dtype, &xs, &shape), ids(&at, &ids_shape));
            let want: Vec<f64> = places.iter().map(|&p| xs[p]).collect();
            for (x, id) in [(x.clone(), id.clone()), (strided(&x), strided(&id))] {
                let got = gather(&x, dim, &id, DimShard::whole(shape[dim])).unwrap();
                assert_eq!((values(&got), got.dims()), (want.clone(), &ids_shape[..]));
            }

            // The source may be larger than the indices.
            let src_shape: Vec<usize> = ids_shape.iter().map(|s| s + 1).collect();
            let srcs: Vec<f64> =
                noise(src_shape.iter().product(), 3).iter().map(|x| (x + 2.0).floor()).collect();
            let src = local(dtype, &srcs, &src_shape);
            let mut want = xs.clone();
            for (at, &place) in coordinates(&ids_shape).iter().zip(&places) {
                want[place] += srcs[flat(at, &src_shape)];
            }
            for (x, src) in [(x.clone(), src.clone()), (strided(&x), strided(&src))] {
                let got = scatter_add(&x, dim, &id, &src, DimShard::whole(shape[dim])).unwrap();
                assert_close(&got, &want, if dtype.is_float() { tolerance(dtype) } else { 0.0 });
                assert_eq!(got.dims(), &shape[..]);
            }
        }
    }
    let scalar = local(DType::F32, &[3.0], &[]);
    let one = DimShard::whole(1);
    assert_eq!(values(&gather(&scalar, 0, &ids(&[0], &[]), one).unwrap()), [3.0]);
    assert_eq!(values(&scatter_add(&scalar, 0, &ids(&[0], &[]), &scalar, one).unwrap()), [6.0]);
    assert_eq!(values(&index_select("index_select", &scalar, 0, &ids(&[0], &[]), one).unwrap()), [3.0]);
}

#[test]
fn bad_indices_are_errors() {
    let x = local(DType::F32, &integers(6, 1), &[2, 3]);
    // A shard, even an empty one, checks indices against the full dim.
    for (start, len) in [(0, 3), (1, 2), (2, 1), (3, 0), (0, 0)] {
        let part = DimShard { start, whole: 3 };
        let shard = x.narrow(1, start, len).unwrap();
        for bad in [-1, 3, i64::MAX, i64::MIN] {
            let id = ids(&[0, bad], &[2]);
            out_of_bounds(index_select("index_select", &shard, 1, &id, part), bad);
            let dy = x.narrow(1, 0, 2).unwrap();
            out_of_bounds(index_add(&id, &dy, 1, len, None, part), bad);
            let id = ids(&[0, bad], &[2, 1]);
            out_of_bounds(gather(&shard, 1, &id, part), bad);
            out_of_bounds(scatter_add(&shard, 1, &id, &x, part), bad);
        }
    }
    out_of_bounds(
        index_select("index_select", &local(DType::F32, &[], &[0]), 0, &ids(&[0], &[1]), DimShard::whole(0)),
        0,
    );
}

/// Returns ways to shard a dim, with uneven, short and empty shards, as (start, length).
fn splits(size: usize) -> Vec<Vec<(usize, usize)>> {
    let at = |ends: &[usize]| {
        let starts = [&[0][..], ends].concat();
        starts.iter().zip(ends).map(|(&start, &end)| (start, end - start)).collect()
    };
    vec![at(&[size]), at(&[0, size]), at(&[size / 2, size]), at(&[1, 1, size - 1, size, size])]
}

fn narrow(x: &Array, dim: usize, start: usize, len: usize) -> Array {
    x.narrow(dim, start, len).unwrap()
}

/// Sums arrays of one shape.
fn total(parts: &[Array]) -> Vec<f64> {
    let mut sum = vec![0.0; parts[0].numel()];
    for part in parts {
        sum.iter_mut().zip(values(part)).for_each(|(sum, x)| *sum += x);
    }
    sum
}

/// Asserts that these are the shards of an array along `dim`.
#[track_caller]
fn assert_shards(shards: &[Array], split: &[(usize, usize)], dim: usize, of: &Array) {
    for (shard, &(start, len)) in shards.iter().zip(split) {
        let want = narrow(of, dim, start, len);
        assert_eq!((shard.dims(), values(shard)), (want.dims(), values(&want)), "{start} {len} {of:?}");
    }
}

#[test]
fn shards_of_the_indexed_dim_give_the_full_result() {
    for dtype in DType::ALL {
        for (shape, dim, rows, picks) in [
            (vec![7], 0, vec![5], vec![9]),
            (vec![7, 3], 0, vec![2, 4], vec![9, 2]),
            (vec![2, 7], 1, vec![6], vec![2, 5]),
            (vec![2, 7, 12], 1, vec![], vec![2, 4, 12]),
            (vec![7, 4, 3], 0, vec![20], vec![1, 4, 3]),
            (vec![7, 0], 0, vec![2], vec![3, 0]),
        ] {
            let size = shape[dim];
            let x = local(dtype, &integers(shape.iter().product(), 1), &shape);
            let id = ids(&some_ids(rows.iter().product(), size, 2), &rows);
            let pick = ids(&some_ids(picks.iter().product(), size, 3), &picks);
            let src = local(dtype, &integers(picks.iter().product(), 4), &picks);
            let all = DimShard::whole(size);
            let selected = index_select("index_select", &x, dim, &id, all).unwrap();
            let gathered = gather(&x, dim, &pick, all).unwrap();
            for (split, x) in splits(size).iter().flat_map(|split| [(split, x.clone()), (split, strided(&x))])
            {
                let each = |f: &dyn Fn(&Array, usize, DimShard) -> Result<Array>| -> Vec<Array> {
                    let part = |&(start, len)| {
                        f(&narrow(&x, dim, start, len), len, DimShard { start, whole: size }).unwrap()
                    };
                    split.iter().map(part).collect()
                };
                let parts = each(&|x, _, part| index_select("index_select", x, dim, &id, part));
                assert_eq!((parts[0].dims(), total(&parts)), (selected.dims(), values(&selected)));
                let parts = each(&|x, _, part| gather(x, dim, &pick, part));
                assert_eq!((parts[0].dims(), total(&parts)), (gathered.dims(), values(&gathered)));
                let parts = each(&|x, _, part| scatter_add(x, dim, &pick, &src, part));
                assert_shards(&parts, split, dim, &scatter_add(&x, dim, &pick, &src, all).unwrap());
                for padding in [None, Some(4), Some(-1), Some(7)] {
                    let parts = each(&|_, len, part| index_add(&id, &selected, dim, len, padding, part));
                    assert_shards(
                        &parts,
                        split,
                        dim,
                        &index_add(&id, &selected, dim, size, padding, all).unwrap(),
                    );
                }
            }
        }
    }
}

#[test]
fn slices_and_their_adjoint() {
    for dtype in DType::ALL {
        for (shape, dim) in
            [(vec![11], 0), (vec![11, 3], 0), (vec![3, 11], 1), (vec![2, 11, 12], 1), (vec![0, 11], 1)]
        {
            let n: usize = shape.iter().product();
            let xs = integers(n, 1);
            let x = local(dtype, &xs, &shape);
            let inner: usize = shape[dim + 1..].iter().product();
            for (start, len, step) in [(0, 11, 1), (2, 3, 1), (0, 6, 2), (1, 4, 3), (10, 1, 5), (11, 0, 2)] {
                let entry = |i: usize| i / inner % 11;
                let keep = |i: usize| {
                    let j = entry(i);
                    j >= start && (j - start) % step == 0 && (j - start) / step < len
                };
                let want: Vec<f64> = (0..n).filter(|&i| keep(i)).map(|i| xs[i]).collect();
                for x in [x.clone(), strided(&x)] {
                    let got = slice_step(&x, dim, start, len, step).unwrap();
                    assert_eq!((values(&got), got.dims()[dim]), (want.clone(), len));
                    let back: Vec<f64> = (0..n).map(|i| if keep(i) { xs[i] } else { 0.0 }).collect();
                    let got = slice_step_backward(&strided(&got), dim, start, step, 11).unwrap();
                    assert_eq!((values(&got), got.dims()), (back, &shape[..]));
                }
            }
        }
    }
}
