//! PyTorch's `common_dtensor.py`: `DTensorConverter` and `_test_op`, over all operators.
//!
//! The converter there tries every combination of `Replicate` and of shards that the mesh divides evenly; tensors of `bool` it
//! only replicates, as the collectives there cannot carry them. Here a mask is `u8`, which every collective carries, and is
//! sharded like any other tensor.

use std::collections::BTreeMap;

use dtensor::comm::launch;
use dtensor::testing::{DTensorConverter, spmd};
use dtensor::{DType, DeviceMesh, Replicate, Result, Shard, Tensor};

use crate::common::laid::difference;
use crate::common::operators::{Operator, half, operators};

const RANKS: usize = 4;

/// How many combinations the converter of PyTorch has for these tensors.
fn combinations(tensors: &[Tensor]) -> usize {
    let choices = |x: &Tensor| 1 + x.dims().iter().filter(|&&size| size > 1 && size % RANKS == 0).count();
    tensors.iter().map(choices).product()
}

/// `_test_op`: the operator gives the same on every combination. Returns how many there were.
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
fn every_operator_on_every_combination() {
    let table = operators();
    let counts = launch(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [RANKS], ())?;
        // Of each operator, how many combinations there were, and the most of one list of inputs.
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
    // Every operator has inputs that can be cut.
    let uncut: Vec<_> = counts.iter().filter(|(_, (_, most))| *most < 2).collect();
    assert!(uncut.is_empty(), "never cut: {uncut:?}");
}

#[test]
fn a_known_operator_has_these_combinations() {
    spmd(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [RANKS], ())?;
        // Both dims of the input can be cut, the one of 8 of the weight, and that of the bias.
        let linear = Operator::one("linear", "", |x| x[0].linear(&x[1], Some(&x[2])));
        let inputs = [half(&[12, 4], 1), half(&[8, 4], 2), half(&[8], 3)];
        assert_eq!(test_op(&mesh, &linear, &inputs)?, 3 * 3 * 2);
        let inputs = [half(&[12, 3], 1), half(&[8, 3], 2), half(&[8], 3)];
        assert_eq!(test_op(&mesh, &linear, &inputs)?, 2 * 2 * 2);
        // Without a dim there is one way, and a dim of size 1 is not worth cutting.
        let add = Operator::one("add", "", |x| x[0].add(&x[1]));
        assert_eq!(test_op(&mesh, &add, &[half(&[], 1), half(&[1, 6], 2)])?, 1);
        Ok(())
    });
}

#[test]
fn masks_are_cut_like_any_other_tensor() {
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
