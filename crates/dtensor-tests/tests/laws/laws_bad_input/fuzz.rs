//! Random arguments: no operator panics, meta tensors predict shape and dtype, and backward works if forward does.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use dtensor::op::Meta;
use dtensor::{DType, Device, Result, Tensor};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestCaseResult, TestRunner};

use crate::common::table::{Call, Examples, Fuzzed, Row, assert_complete, table};

fn calls() -> impl Strategy<Value = Call> {
    // Shapes and dtypes are often equal, because otherwise nearly every call would return an error.
    let size = prop_oneof![4 => 1usize..4, 1 => Just(0usize)];
    let shape = prop::collection::vec(size, 0..4);
    let dtype = prop::sample::select(DType::ALL.to_vec());
    let shapes = (shape.clone(), shape.clone(), shape, 0u8..8).prop_map(|(a, b, c, same)| {
        [a.clone(), if same & 1 == 0 { a.clone() } else { b }, if same & 2 == 0 { a } else { c }]
    });
    let dtypes = (dtype.clone(), dtype.clone(), dtype, 0u8..8).prop_map(|(a, b, c, same)| {
        [a, if same & 1 == 0 { a } else { b }, if same & 2 == 0 { a } else { c }]
    });
    (shapes, dtypes, -4isize..4, -4isize..4, 0usize..5, any::<bool>())
        .prop_map(|(shapes, dtypes, dim, other, n, strided)| Call { shapes, dtypes, dim, other, n, strided })
}

/// Makes a tensor of small numbers, so that they are often valid indices. They are not all equal.
fn content(shape: &[usize], dtype: DType, strided: bool) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| (i % 3) as f64).collect();
    let x = Tensor::from_vec(values, shape)?.to_dtype(dtype)?;
    if strided && x.ndim() > 1 { x.transpose(0, 1)?.contiguous()?.transpose(0, 1) } else { Ok(x) }
}

/// Runs one call. Counts it in `done` if it succeeds.
fn fuzz(row: &Row, operator: &Fuzzed, call: &Call, done: &Cell<u32>) -> TestCaseResult {
    let inputs: [Tensor; 3] =
        std::array::from_fn(|i| content(&call.shapes[i], call.dtypes[i], call.strided).unwrap());
    let leaves: [Tensor; 3] = std::array::from_fn(|i| {
        if inputs[i].dtype().is_float() { inputs[i].requires_grad_(true).unwrap() } else { inputs[i].clone() }
    });
    let run = |x: &[Tensor; 3]| operator(x, call);
    let ghosts = || std::array::from_fn(|i| inputs[i].to_device(Device::Meta).unwrap());
    let outcome = catch_unwind(AssertUnwindSafe(|| run(&inputs)));
    let outcome = outcome.map_err(|_| TestCaseError::fail("panicked"))?;
    if let Ok(outputs) = &outcome {
        done.set(done.get() + 1);
        for y in outputs {
            prop_assert_eq!(y.to_f64_vec().unwrap().len(), y.shape().numel());
        }
        // Meta tensors give the same shapes and dtypes, unless the shape depends on values.
        if row.shape_from_values {
            prop_assert!(run(&ghosts()).is_err());
        } else {
            let promised: Vec<Meta> = run(&ghosts()).unwrap().iter().map(|y| y.meta()).collect();
            let kept: Vec<Meta> = outputs.iter().map(|y| Meta { device: Device::Meta, ..y.meta() }).collect();
            prop_assert_eq!(promised, kept);
        }
    }
    // Backward must work too. Only a mask or class weights that require a gradient may be an error.
    let back = catch_unwind(AssertUnwindSafe(|| -> Result<()> {
        for y in run(&leaves)? {
            if y.requires_grad() {
                y.sum_all()?.backward()?;
            }
        }
        Ok(())
    }));
    match back {
        Err(_) => return Err(TestCaseError::fail("panicked on the way back")),
        Ok(Err(error)) if outcome.is_ok() => {
            let excused = error.to_string().contains("detach");
            prop_assert!(excused, "forward works, but backward does not: {}", error);
        }
        Ok(_) => {}
    }
    for (x, leaf) in inputs.iter().zip(&leaves) {
        if let Some(g) = leaf.grad() {
            prop_assert_eq!(g.meta(), x.meta());
        }
    }
    Ok(())
}

/// The number of random arguments for each call of the table.
const CASES: u32 = 800;

#[test]
fn no_argument_makes_an_operator_panic() {
    assert_complete(Examples::Calls);
    let mut failures = Vec::new();
    let mut seed = 20;
    for row in table() {
        let done = Cell::new(0);
        for (i, operator) in row.calls.iter().enumerate() {
            seed += 1;
            let rng_seed = RngSeed::Fixed(seed);
            let config =
                ProptestConfig { cases: CASES, failure_persistence: None, rng_seed, ..Default::default() };
            let outcome = TestRunner::new(config).run(&calls(), |call| fuzz(&row, operator, &call, &done));
            if let Err(error) = outcome {
                failures.push(format!("{}, call {i}: {error}", row.name));
            }
        }
        if done.get() == 0 {
            failures.push(format!("{}: no arguments were accepted", row.name));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
