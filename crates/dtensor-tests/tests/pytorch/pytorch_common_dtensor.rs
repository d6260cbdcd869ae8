//! PyTorch's `common_dtensor.py`: `DTensorConverter` and `_test_op` on all operators.
//!
//! PyTorch's converter tries every combination of `Replicate` and of shards that the mesh divides evenly. It only replicates
//! `bool` tensors, because PyTorch's collectives do not support them. Here a mask is `u8`, which every collective supports, and
//! is sharded like any other tensor.

use std::collections::BTreeMap;

use dtensor::comm::launch;
use dtensor::testing::{DTensorConverter, spmd};
use dtensor::{DType, DeviceMesh, Replicate, Result, Shard, Tensor};

use crate::common::inputs::half;
use crate::common::laid::difference;
use crate::common::operators::{Operator, operators};

const RANKS: usize = 4;

/// Returns the number of combinations that PyTorch's converter tries for these tensors.
fn combinations(tensors: &[Tensor]) -> usize {
    let choices = |x: &Tensor| 1 + x.dims().iter().filter(|&&size| size > 1 && size % RANKS == 0).count();
    tensors.iter().map(choices).product()
}

/// PyTorch's `_test_op`: asserts that the operator gives the same result on every combination. Returns their number.
fn test_op(mesh: &DeviceMesh, operator: &Operator, inputs: &[Tensor]) -> Result<usize> {
    let Ok(expected) = operator.run(inputs) else { return Ok(0) };
    let mut converter = DTensorConverter::new(mesh, &inputs.iter().collect::<Vec<_>>());
    let mut number = 0;
    while let Some(tensors) = converter.next() {
        let tensors = tensors?;
        number += 1;
        assert!(converter.successful());
        let placements: Vec<_> = tensors.iter().map(|x| x.placements()[0]).collect();
        let label = || format!("{} on {placements:?}", operator.label(inputs));
        let results = operator.run_laid(&tensors).unwrap_or_else(|error| panic!("{}: {error}", label()));
        let Some(results) = results else { continue };
        assert_eq!(results.len(), expected.len(), "{}", label());
        for (got, expected) in results.iter().zip(&expected) {
            assert_eq!(difference(&got.full_tensor()?, expected, operator.exact)?, None, "{}", label());
        }
    }
    assert_eq!(number, combinations(inputs), "{}", operator.label(inputs));
    assert_eq!((converter.hit(), converter.miss()), (number * inputs.len(), 0), "{}", operator.label(inputs));
    Ok(number)
}

#[test]
fn every_operator_matches_one_device_on_every_combination() {
    let table = operators();
    let counts = launch(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [RANKS], ())?;
        // For each operator: the total number of combinations, and the largest number for one list of inputs.
        let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for operator in &table {
            for inputs in &operator.examples {
                let number = test_op(&mesh, operator, inputs)?;
                let (total, most) = counts.entry(operator.name).or_default();
                *total += number;
                *most = number.max(*most);
            }
        }
        Ok(counts)
    });
    let counts = counts.unwrap().swap_remove(0);
    println!("{} combinations", counts.values().map(|(total, _)| total).sum::<usize>());
    // Every operator must have inputs that can be sharded.
    let uncut: Vec<_> = counts.iter().filter(|(_, (_, most))| *most < 2).collect();
    assert!(uncut.is_empty(), "never cut: {uncut:?}");
}

#[test]
fn linear_and_add_have_the_expected_number_of_combinations() {
    spmd(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [RANKS], ())?;
        // Dims of size 12, 8 and 4 can be sharded; the dims of size 3 below cannot.
        let linear = Operator::one("linear", "", |x| x[0].linear(&x[1], Some(&x[2])));
        let inputs = [half(&[12, 4], 1), half(&[8, 4], 2), half(&[8], 3)];
        assert_eq!(test_op(&mesh, &linear, &inputs)?, 3 * 3 * 2);
        let inputs = [half(&[12, 3], 1), half(&[8, 3], 2), half(&[8], 3)];
        assert_eq!(test_op(&mesh, &linear, &inputs)?, 2 * 2 * 2);
        // A scalar (0-d) has one combination, and a dim of size 1 is not sharded.
        let add = Operator::one("add", "", |x| x[0].add(&x[1]));
        assert_eq!(test_op(&mesh, &add, &[half(&[], 1), half(&[1, 6], 2)])?, 1);
        Ok(())
    });
}

#[test]
fn masks_are_sharded_like_any_other_tensor() {
    spmd(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [RANKS], ())?;
        let mask = half(&[8], 1).gt(0.0)?;
        assert_eq!(mask.dtype(), DType::U8);
        let mut converter = DTensorConverter::new(&mesh, &[&mask]);
        let mut seen = Vec::new();
        for tensors in &mut converter {
            let laid = tensors?.swap_remove(0);
            assert_eq!(laid.full_tensor()?.to_vec::<u8>()?, mask.to_vec::<u8>()?);
            seen.push(laid.placements()[0]);
        }
        assert_eq!(seen, [Replicate, Shard(0)]);
        assert_eq!((converter.hit(), converter.miss()), (2, 0));
        Ok(())
    });
}
