//! Redistributing several tensors at once, or without waiting, gives what one redistribution after the other gives.

use dtensor::comm::record;
use dtensor::prelude::*;
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{Placements, redistribute_coalesced, redistribute_coalesced_async};

use crate::common::layouts::{P, R, all_lists};

const SHAPES: [[usize; 2]; 5] = [[4, 6], [5, 3], [2, 7], [1, 2], [0, 3]];

/// Returns leaves on a mesh: one for each shape, placements and dtype.
fn leaves(mesh: &DeviceMesh, from: &[Vec<Placement>]) -> Result<Vec<Tensor>> {
    let mut leaves = Vec::new();
    for (i, shape) in SHAPES.iter().enumerate() {
        for (j, placements) in from.iter().enumerate() {
            let dtype = if (i + j) % 3 == 0 { DType::F64 } else { DType::F32 };
            let n = shape.iter().product::<usize>();
            let values = (0..n).map(|k| ((7 * i + 5 * j + 3 * k) % 11) as f64 - 4.0).collect();
            let full = Tensor::from_vec(values, *shape)?.to_dtype(dtype)?;
            leaves.push(distribute_tensor(&full, mesh, placements.clone())?.requires_grad_(true)?);
        }
    }
    Ok(leaves)
}

/// Pairs each tensor with the same new placements.
fn pairs<'a>(set: &'a [Tensor], to: &[Placement]) -> Vec<(&'a Tensor, Placements)> {
    set.iter().map(|x| (x, to.to_vec().into())).collect()
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    x.detach().to_local()?.to_f64_vec()
}

#[test]
fn coalesced_and_asynchronous_redistributions_equal_separate_ones() {
    for (ranks, shape) in [(2, vec![2]), (3, vec![3]), (4, vec![2, 2])] {
        spmd(ranks, move |world| {
            let mesh = DeviceMesh::new(&world, shape.clone(), ())?;
            let all = all_lists(&[R, Shard(0), Shard(1), P], shape.len());
            for to in &all {
                let sets = [leaves(&mesh, &all)?, leaves(&mesh, &all)?, leaves(&mesh, &all)?];
                let separate =
                    sets[0].iter().map(|x| x.redistribute(to.clone())).collect::<Result<Vec<_>>>()?;
                let coalesced = redistribute_coalesced(&pairs(&sets[1], to))?;
                let deferred = redistribute_coalesced_async(&pairs(&sets[2], to))?;
                // Other collectives may run in between, and the results may be used in any order.
                world.group().barrier()?;
                for (i, y) in deferred.iter().enumerate().rev() {
                    assert_eq!(y.layout(), separate[i].layout());
                    assert_eq!(values(y)?, values(&separate[i])?, "{:?} to {to:?}", sets[0][i].layout());
                }
                for (y, expected) in coalesced.iter().zip(&separate) {
                    assert_eq!((y.layout(), values(y)?), (expected.layout(), values(expected)?));
                }
                for (set, results) in sets.iter().zip([&separate, &coalesced, &deferred]) {
                    for (x, y) in set.iter().zip(results) {
                        y.mul(y)?.sum_all()?.backward()?;
                        assert_eq!(x.grad().expect("a leaf has a gradient").layout(), x.layout());
                    }
                }
                let grads = |set: &[Tensor]| -> Result<Vec<_>> {
                    set.iter().map(|x| values(&x.grad().expect("a leaf has a gradient"))).collect()
                };
                assert_eq!(grads(&sets[1])?, grads(&sets[0])?);
                assert_eq!(grads(&sets[2])?, grads(&sets[0])?);
            }
            Ok(())
        });
    }
}

#[test]
fn redistributions_of_one_kind_are_one_collective() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let lay = |dtype, placements: [Placement; 2]| {
            distribute_tensor(&Tensor::ones([4, 6], dtype)?, &mesh, placements)
        };
        let (a, b) = (lay(DType::F32, [Shard(0), Replicate])?, lay(DType::F32, [Shard(1), Shard(0)])?);
        let (c, d) = (lay(DType::F64, [Shard(0), Replicate])?, lay(DType::F32, [P, Replicate])?);
        let to = |x: &Tensor| Placements::from([Replicate, x.placements()[1]]);
        let (results, calls) = record(|| {
            redistribute_coalesced(&[(&a, to(&a)), (&b, to(&b)), (&c, to(&c)), (&d, to(&d)), (&a, to(&a))])
        });
        assert_eq!(results?.len(), 5);
        let mut kinds: Vec<(&str, DType, usize)> = calls
            .iter()
            .map(|call| {
                (call.collective.name(), call.meta.dtype, call.bundle.as_ref().map_or(1, |b| b.values))
            })
            .collect();
        kinds.sort_by_key(|(name, _, values)| (*name, *values));
        assert_eq!(
            kinds,
            [("all_gather", DType::F64, 1), ("all_gather", DType::F32, 3), ("all_reduce", DType::F32, 1)]
        );
        // A tensor that has its layout already is returned as it is.
        let (same, calls) = record(|| a.redistribute_async([Shard(0), Replicate]));
        assert_eq!((same?.layout(), calls.len()), (a.layout(), 0));
        Ok(())
    });
}

#[test]
fn a_failed_redistribution_is_an_error_at_every_use() {
    spmd_outcomes(
        2,
        |world| {
            let mesh = DeviceMesh::new(&world, [2], ())?;
            let x = distribute_tensor(&Tensor::ones([4], DType::F32)?, &mesh, [Shard(0)])?;
            if world.rank() == 1 {
                return Err(Error::argument("test", "rank 1 leaves"));
            }
            let y = x.redistribute_async([Replicate])?;
            assert_eq!(y.dims(), [4]);
            let first = y.add(&y).unwrap_err().to_string();
            assert_eq!(
                y.to_local()?.to_vec::<f32>().unwrap_err().to_string().lines().count(),
                first.lines().count()
            );
            Err(y.sum_all().unwrap_err())
        },
        |rank, result: Result<()>| {
            let error = result.unwrap_err().to_string();
            assert!(
                error.contains("rank 1 leaves") || (rank == 0 && error.contains("all_gather")),
                "{error}"
            );
        },
    );
}
