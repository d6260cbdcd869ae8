//! First and second gradients of every operator on one device: both match finite differences. Results and gradients do
//! not depend on the strides of the inputs.

use std::collections::BTreeSet;

use dtensor::{BackwardOptions, DType, Error, Result, Tensor, grad};

use crate::common::cases::{Case, Second, cases};
use crate::common::inputs::Numbers;
use crate::common::table::{Examples, assert_complete, steps};

/// Half the distance of the two inner points of a difference quotient. The formula is of fourth order: its truncation
/// error is about 1e-13 times the fifth derivative, its rounding error about 1e-12.
const STEP: f64 = 5e-4;

fn numbers(shape: &[usize], which: u64) -> Tensor {
    let mut numbers = Numbers(which);
    let n = shape.iter().product();
    Tensor::from_vec((0..n).map(|_| numbers.unit() * 2.0 - 1.0).collect(), shape).unwrap()
}

fn leaf(x: &Tensor) -> Tensor {
    x.detach().requires_grad_(true).unwrap()
}

/// `Σ a·b` over all pairs.
fn dot<'a>(pairs: impl IntoIterator<Item = (&'a Tensor, &'a Tensor)>) -> Result<Tensor> {
    let mut total = Tensor::zeros((), DType::F64)?;
    for (a, b) in pairs {
        total = total.add(&a.mul(b)?.sum_all()?)?;
    }
    Ok(total)
}

/// The weighted sum of the float outputs.
fn weighted(outputs: &[Tensor], weights: &[Tensor]) -> Result<Tensor> {
    dot(outputs.iter().filter(|y| y.dtype().is_float()).zip(weights))
}

/// A case as a scalar function: the weighted sum of its outputs. The variables are the differentiable inputs and the
/// weights, one for each element of each output.
struct Problem<'a> {
    case: &'a Case,
    weights: Vec<Tensor>,
}

impl<'a> Problem<'a> {
    fn new(case: &'a Case) -> Result<Self> {
        let outputs = (case.f)(&case.inputs)?;
        let smooth = outputs.iter().filter(|y| y.dtype().is_float());
        Ok(Problem { case, weights: smooth.zip(100..).map(|(y, i)| numbers(y.dims(), i)).collect() })
    }

    fn variables(&self) -> Vec<Tensor> {
        self.case.wrt.iter().map(|&i| self.case.inputs[i].clone()).collect()
    }

    fn outputs(&self, variables: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut inputs = self.case.inputs.clone();
        for (&i, x) in self.case.wrt.iter().zip(variables) {
            inputs[i] = x.clone();
        }
        (self.case.f)(&inputs)
    }

    fn value(&self, variables: &[Tensor], weights: &[Tensor]) -> Result<Tensor> {
        weighted(&self.outputs(variables)?, weights)
    }

    /// Returns the gradients of the variables, or `None` if the outputs do not depend on them.
    fn gradients(
        &self,
        variables: &[Tensor],
        weights: &[Tensor],
        create_graph: bool,
    ) -> Result<Option<Vec<Tensor>>> {
        let outputs = self.outputs(variables)?;
        if !outputs.iter().any(Tensor::requires_grad) {
            return Ok(None);
        }
        let value = weighted(&outputs, weights)?;
        let options = BackwardOptions { create_graph, ..Default::default() };
        let grads = grad(&value, &variables.iter().collect::<Vec<_>>(), options)?;
        let given = |(i, g): (usize, Option<Tensor>)| {
            g.unwrap_or_else(|| panic!("{}: variable {i} has no gradient", self.case.label()))
        };
        Ok(Some(grads.into_iter().enumerate().map(given).collect()))
    }
}

/// The derivative of `f` by every element of every variable, from finite differences.
fn differences(variables: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<Vec<Vec<f64>>> {
    let mut all = Vec::new();
    for (i, x) in variables.iter().enumerate() {
        let values = x.to_vec::<f64>()?;
        let moved = |at: usize, by: f64| {
            let mut values = values.clone();
            values[at] += by;
            let mut variables = variables.to_vec();
            variables[i] = Tensor::from_vec(values, x.shape())?;
            f(&variables)?.item::<f64>()
        };
        let slope = |at: usize| -> Result<f64> {
            let near = moved(at, STEP)? - moved(at, -STEP)?;
            let far = moved(at, 2.0 * STEP)? - moved(at, -2.0 * STEP)?;
            Ok((8.0 * near - far) / (12.0 * STEP))
        };
        all.push((0..values.len()).map(slope).collect::<Result<_>>()?);
    }
    Ok(all)
}

#[track_caller]
fn assert_close(what: &str, got: &Tensor, want: &[f64], tolerance: f64) {
    let got = got.to_vec::<f64>().unwrap();
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "{what}, element {i}: {g} but {w} is expected");
    }
}

fn check_first(case: &Case) -> Result<()> {
    let problem = Problem::new(case)?;
    let variables: Vec<Tensor> = problem.variables().iter().map(leaf).collect();
    let Some(grads) = problem.gradients(&variables, &problem.weights, false)? else {
        let smooth = problem.weights.iter().any(|w| w.numel() > 0) && !steps().contains(case.name);
        assert!(!smooth, "{}: the result does not require a gradient", case.label());
        return Ok(());
    };
    let plain = problem.variables();
    let want = differences(&plain, |x| problem.value(x, &problem.weights))?;
    for (i, ((x, g), want)) in plain.iter().zip(&grads).zip(&want).enumerate() {
        let what = format!("{}, gradient of variable {i}", case.label());
        assert_eq!((g.dims(), g.dtype()), (x.dims(), x.dtype()), "{what}");
        assert!(!g.requires_grad(), "{what}: the pass was not recorded");
        assert_close(&what, g, want, case.tolerance);
    }
    Ok(())
}

/// Differentiates `Σ gradient · direction` by the variables and by the weights of the outputs. It is linear in the
/// weights.
fn check_second(case: &Case) -> Result<()> {
    let problem = Problem::new(case)?;
    let count = case.wrt.len();
    let plain: Vec<Tensor> = problem.variables().into_iter().chain(problem.weights.clone()).collect();
    let directions: Vec<Tensor> =
        plain[..count].iter().zip(500..).map(|(x, i)| numbers(x.dims(), i)).collect();
    let along = |all: &[Tensor], create_graph: bool| -> Result<Option<Tensor>> {
        let grads = problem.gradients(&all[..count], &all[count..], create_graph)?;
        grads.map(|grads| dot(grads.iter().zip(&directions))).transpose()
    };
    let leaves: Vec<Tensor> = plain.iter().map(leaf).collect();
    let Some(total) = along(&leaves, true)? else { return Ok(()) };
    let wanted: Vec<&Tensor> = leaves.iter().collect();
    // A gradient that is zero everywhere depends on no variable.
    let second = match total.requires_grad() {
        true => grad(&total, &wanted, BackwardOptions::default()),
        false => Ok(vec![None; wanted.len()]),
    };
    if case.second == Second::Fused {
        let error = second.expect_err(&case.label());
        let message = error.to_string();
        assert!(
            matches!(error, Error::Argument { op, .. } if op == case.name),
            "{}: {error:?}",
            case.label()
        );
        assert!(message.contains("fused") && message.contains("gradient"), "{}: {message}", case.label());
        return Ok(());
    }
    let second = second?;
    let difference = |all: &[Tensor]| {
        let leaves: Vec<Tensor> = all.iter().map(leaf).collect();
        along(&leaves, false).map(|total| total.expect("it had a gradient before"))
    };
    // The mean of an empty tensor is NaN, and so is the derivative by its weight: the weights are not compared then.
    let outputs = problem.outputs(&plain)?;
    let defined = outputs.iter().all(|y| y.to_f64_vec().unwrap().iter().all(|v| !v.is_nan()));
    let compared = if defined { plain.len() } else { count };
    let want = differences(&plain, difference)?;
    for (i, (got, want)) in second.iter().zip(&want).enumerate().take(compared) {
        let what = format!("{}, second gradient of variable {i}", case.label());
        match got {
            Some(got) => assert_close(&what, got, want, case.tolerance),
            // The gradient does not depend on this variable, so the difference must be zero.
            None => assert!(want.iter().all(|&w| w == 0.0), "{what}: none, but {want:?} is expected"),
        }
    }
    Ok(())
}

/// Runs a check on every case and reports all failures, not only the first.
fn check_all(check: impl Fn(&Case) -> Result<()> + std::panic::RefUnwindSafe) {
    let mut failures = BTreeSet::new();
    let all = cases();
    for case in &all {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(case)));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => drop(failures.insert(format!("{}: {error}", case.label()))),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or(panic.downcast_ref::<&str>().map(|s| s.to_string()));
                failures.insert(format!("{}: panicked: {}", case.label(), text.unwrap_or_default()));
            }
        }
    }
    let report = failures.iter().cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} cases fail:\n{report}", failures.len(), all.len());
}

#[test]
fn the_table_covers_every_operator() {
    assert_complete(Examples::Local);
}

#[test]
fn gradients_agree_with_finite_differences() {
    check_all(check_first);
}

#[test]
fn second_gradients_agree_with_finite_differences_or_are_an_error() {
    check_all(check_second);
}

/// Returns the same elements, but strided and with an offset into the storage.
fn strided(x: &Tensor) -> Result<Tensor> {
    let twice = |dim: usize| Tensor::stack(&[x, x], dim);
    match x.ndim() {
        0 => twice(0)?.select(0, 1),
        1 => twice(1)?.select(1, 1),
        rank => {
            let reversed: Vec<usize> = (0..rank).rev().collect();
            let turned = x.permute(&reversed[..])?;
            Tensor::stack(&[&turned, &turned], 0)?.select(0, 1)?.permute(&reversed[..])
        }
    }
}

/// Returns the outputs of a case on these inputs, and the gradients of the differentiable inputs.
fn run(problem: &Problem<'_>, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let case = problem.case;
    let leaves: Vec<Tensor> = case.wrt.iter().map(|&i| leaf(&inputs[i])).collect();
    let mut inputs = inputs.to_vec();
    case.wrt.iter().zip(&leaves).for_each(|(&i, x)| inputs[i] = x.clone());
    let mut results = (case.f)(&inputs)?;
    let value = weighted(&results, &problem.weights)?;
    if value.requires_grad() {
        let grads = grad(&value, &leaves.iter().collect::<Vec<_>>(), BackwardOptions::default())?;
        results.extend(grads.into_iter().flatten());
    }
    Ok(results)
}

#[test]
fn results_and_gradients_do_not_depend_on_strides() {
    check_all(|case| {
        let problem = Problem::new(case)?;
        let moved: Vec<Tensor> = case.inputs.iter().map(strided).collect::<Result<_>>()?;
        for (x, y) in case.inputs.iter().zip(&moved) {
            assert_eq!(x.to_f64_vec()?, y.to_f64_vec()?);
            let flat = y.dims().iter().filter(|&&n| n != 1).count() < 2;
            assert!(flat || y.numel() == 0 || !y.is_contiguous(), "{} is to be strided", y.shape());
        }
        let (plain, strided) = (run(&problem, &case.inputs)?, run(&problem, &moved)?);
        assert_eq!(plain.len(), strided.len());
        for (i, (a, b)) in plain.iter().zip(&strided).enumerate() {
            assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
            for (a, b) in a.to_f64_vec()?.iter().zip(b.to_f64_vec()?) {
                // The order of summation may differ.
                let same = a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-14 * (1.0 + a.abs());
                assert!(same, "{}, result {i}: {a} but strided {b}", case.label());
            }
        }
        Ok(())
    });
}

#[test]
fn the_padding_row_of_an_embedding_gets_no_gradient() -> Result<()> {
    let ids = Tensor::from_slice(&[1i64, 2, 1, 0, 2, 4], [2, 3])?;
    let weights = numbers(&[2, 3, 3], 1);
    let weight = leaf(&numbers(&[5, 3], 2));
    let gradient = |padding| -> Result<(Vec<f64>, Vec<f64>)> {
        let dy = leaf(&weights);
        let value = dot([(&ids.embedding(&weight, padding)?, &dy)])?;
        let options = BackwardOptions { create_graph: true, ..Default::default() };
        let first = grad(&value, &[&weight], options)?.remove(0).unwrap();
        // The gradient is linear in `dy`, so the second gradient picks the same rows again.
        let second = grad(&dot([(&first, &numbers(&[5, 3], 3))])?, &[&dy], Default::default())?.remove(0);
        Ok((first.to_vec()?, second.unwrap().to_vec()?))
    };
    let (plain, plain_second) = gradient(None)?;
    for padding in [2, -3] {
        let (padded, padded_second) = gradient(Some(padding))?;
        for (i, (a, b)) in plain.iter().zip(&padded).enumerate() {
            assert_eq!(*b, if i / 3 == 2 { 0.0 } else { *a });
        }
        for (i, (a, b)) in plain_second.iter().zip(&padded_second).enumerate() {
            let row = ids.to_vec::<i64>()?[i / 3];
            assert_eq!(*b, if row == 2 { 0.0 } else { *a });
        }
    }
    assert!(plain[6..9].iter().all(|g| *g != 0.0));
    Ok(())
}
