//! Gradients of every operator match one device for inputs in any layout, and the gradient of a leaf has the leaf's
//! layout.
//!
//! A case is an operator of the table, one list of inputs, a mesh, and a layout for each input. `DTENSOR_LONG=1` tries
//! many more layouts.

use std::collections::BTreeSet;

use dtensor::comm::{World, launch};
use dtensor::testing::spmd;
use dtensor::{Placement, Replicate, Result, Shard, Tensor};

use crate::common::inputs::half;
use crate::common::laid::{Combination, Field, Sample, Stop, Tally, difference, long, shown};
use crate::common::layouts::{AVG, Grid, MAX, P};
use crate::common::operators::{Operator, operators};
use crate::common::ranks::Random;
use crate::common::table::steps;

/// Returns a scalar that depends differently on each element of all results, or `None` if no result is a float.
fn loss(results: &[Tensor], field: Option<&Field>) -> Result<Option<Tensor>> {
    let mut total: Option<Tensor> = None;
    for (i, y) in results.iter().enumerate().filter(|(_, y)| y.dtype().is_float()) {
        let mut weight = half(y.dims(), 50 + i as u64).to_dtype(y.dtype())?;
        if let Some(field) = field {
            weight = field.lay(&weight, &vec![Replicate; field.grid.sizes.len()], 0)?;
        }
        let sum = y.mul(&weight)?.sum_all()?;
        total = Some(match total {
            Some(total) => total.add(&sum.to_dtype(total.dtype())?)?,
            None => sum,
        });
    }
    Ok(total)
}

/// Makes a leaf of each input; only the differentiable ones require a gradient.
fn leaves(operator: &Operator, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let wanted = operator.differentiable(inputs);
    let leaf = |(i, x): (usize, &Tensor)| x.detach().requires_grad_(wanted.contains(&i));
    inputs.iter().enumerate().map(leaf).collect()
}

/// Returns the gradients of all inputs, or `None` if the results depend on none of them.
fn gradients(leaves: &[Tensor], loss: Option<Tensor>) -> Result<Option<Vec<Option<Tensor>>>> {
    let Some(loss) = loss.filter(Tensor::requires_grad) else { return Ok(None) };
    loss.backward()?;
    Ok(Some(leaves.iter().map(Tensor::grad).collect()))
}

/// Checks one case and returns what is wrong with it, if anything.
fn check(
    field: &Field,
    operator: &Operator,
    inputs: &[Tensor],
    lists: &Combination,
    expected: &[Option<Tensor>],
    seed: u64,
) -> Result<Option<String>> {
    let leaves = leaves(operator, &field.lay_all(inputs, lists, seed)?)?;
    let Some(results) = operator.run_laid(&leaves)? else { return Ok(None) };
    let Some(got) = gradients(&leaves, loss(&results, Some(field))?)? else {
        return Ok(Some("no result requires a gradient".into()));
    };
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (got, expected) = match (got, expected) {
            (Some(got), Some(expected)) => (got, expected),
            (None, None) => continue,
            (Some(_), None) => {
                return Ok(Some(format!("input {i} has a gradient, which on one device it has not")));
            }
            (None, Some(_)) => return Ok(Some(format!("input {i} has no gradient"))),
        };
        if got.layout() != leaves[i].layout() {
            return Ok(Some(format!("the gradient of input {i} is {got:?}, which is not how the leaf lies")));
        }
        let whole = got.full_tensor()?;
        if !field.inside() {
            continue;
        }
        if let Some(difference) = difference(&whole, expected, false)? {
            return Ok(Some(format!("the gradient of input {i}: {difference}")));
        }
    }
    Ok(None)
}

/// Checks one of every `one_of` examples on one mesh. Also returns the names of the operators that have a gradient.
fn check_all(
    table: &[Operator],
    world: &World,
    grid: Grid,
    sample: Sample,
    one_of: usize,
) -> Result<(Tally, BTreeSet<&'static str>)> {
    let field = Field::new(world, grid)?;
    let sizes = &field.grid.sizes;
    let (mut tally, mut names) = (Tally::default(), BTreeSet::new());
    let mut number = 0;
    for operator in table {
        for inputs in &operator.examples {
            number += 1;
            if Random::new(&[number]).below(one_of) > 0 || operator.differentiable(inputs).is_empty() {
                continue;
            }
            let whole = leaves(operator, inputs)?;
            // An operator that fails on one device has no gradient to compare.
            let Ok(results) = operator.run(&whole) else { continue };
            let Some(expected) = gradients(&whole, loss(&results, None)?)? else { continue };
            names.insert(operator.name);
            for lists in sample.combinations(inputs, sizes, number) {
                let label = || format!("{}, laid as {}", operator.label(inputs), shown(&lists, sizes));
                let seed = number * 1000 + tally.cases as u64;
                let body = || check(&field, operator, inputs, &lists, &expected, seed);
                if let Err(Stop) = tally.case(label, body) {
                    return Ok((tally, names));
                }
            }
        }
    }
    Ok((tally, names))
}

#[test]
fn gradients_match_one_device_on_sampled_placements() {
    let (table, steps) = (operators(), steps());
    let began = std::time::Instant::now();
    let sample = if long() { Sample { common: 500, rare: 50 } } else { Sample { common: 4, rare: 1 } };
    let mut total = 0;
    for sizes in [&[2][..], &[4], &[2, 2]] {
        let ranks = sizes.iter().product();
        let outcomes = launch(ranks, |world| check_all(&table, &world, Grid::new(sizes), sample, 1)).unwrap();
        let (tallies, names): (Vec<Tally>, Vec<_>) = outcomes.into_iter().unzip();
        let cases = Tally::judge(&tallies);
        println!("{cases} cases on a mesh {sizes:?}, {:?} so far", began.elapsed());
        total += cases;
        let smooth = table.iter().map(|operator| operator.name).filter(|name| !steps.contains(name));
        assert_eq!(names[0], smooth.collect(), "the operators with gradients");
    }
    println!("{total} gradients of (operator, placements, shape, mesh)");
    assert!(total >= 5_000, "only {total} cases");
}

#[test]
fn some_gradients_match_one_device_on_every_kind_of_world() {
    let table = operators();
    let body = |world: World, sizes: &[usize]| -> Result<()> {
        let (tally, _) = check_all(&table, &world, Grid::new(sizes), Sample { common: 1, rare: 1 }, 16)?;
        let cases = Tally::judge(&[tally]);
        if world.rank() == 0 {
            println!("{cases} gradients on a mesh {sizes:?} of a world of {:?}", world.kind());
        }
        assert!(cases >= 50, "only {cases} cases on a mesh {sizes:?}");
        Ok(())
    };
    spmd(2, |world| body(world, &[2]));
    spmd(4, |world| {
        body(world.clone(), &[4])?;
        body(world, &[2, 2])
    });
}

/// Mesh coordinates differ from rank numbers here, and some ranks are outside the mesh.
#[test]
fn gradients_match_one_device_on_some_ranks_in_any_order() {
    let table = operators();
    let sample = Sample { common: 1, rare: 1 };
    for (world, grid) in [(3, Grid::of(&[2], &[2, 0])), (5, Grid::of(&[2, 2], &[3, 0, 4, 1]))] {
        let outcomes = launch(world, |world| check_all(&table, &world, grid.clone(), sample, 4)).unwrap();
        let tallies: Vec<Tally> = outcomes.into_iter().map(|(tally, _)| tally).collect();
        let cases = Tally::judge(&tallies);
        println!("{cases} gradients on {grid:?} of {world} ranks");
        assert!(cases >= 300, "only {cases} cases");
    }
}

/// Runs `test` on a mesh of 4 and on one of 2 × 2, with several placements on each.
fn on_every_layout(world: &World, test: impl Fn(&Field, &[Placement]) -> Result<()>) -> Result<()> {
    let line = Field::new(world, Grid::new(&[4]))?;
    for placement in [Replicate, Shard(0), Shard(1), P, AVG, MAX] {
        test(&line, &[placement])?;
    }
    let square = Field::new(world, Grid::new(&[2, 2]))?;
    for list in [[Shard(0), Shard(0)], [Shard(1), Shard(0)], [P, Shard(1)], [Replicate, P], [P, P]] {
        test(&square, &list)?;
    }
    Ok(())
}

/// The sum of a sharded tensor is partial. Backward works from such a loss as from any other.
#[test]
fn a_partial_loss_has_the_gradients_of_one_device() {
    type Loss = fn(&Tensor) -> Result<Tensor>;
    type Derivative = fn(f64) -> f64;
    let losses: [(&str, Loss, Derivative); 4] = [
        ("sum", |x| x.sum_all(), |_| 1.0),
        ("sum of squares", |x| x.mul(x)?.sum_all(), |x| 2.0 * x),
        ("mean", |x| x.mean_all(), |_| 1.0 / 18.0),
        ("twice the sum of rows", |x| x.sum(1)?.sum_all()?.mul(2.0), |_| 2.0),
    ];
    spmd(4, |world| {
        on_every_layout(&world, |field, placements| {
            for (name, loss, derivative) in losses {
                let whole = half(&[6, 3], 1);
                let x = field.lay(&whole, placements, 7)?.detach().requires_grad_(true)?;
                loss(&x)?.backward()?;
                let grad = x.grad().expect("a leaf that was used");
                assert_eq!(grad.layout(), x.layout(), "{name} of {x:?}");
                let values = whole.to_f64_vec()?.into_iter().map(derivative).collect();
                let wrong = difference(&grad.full_tensor()?, &Tensor::from_vec(values, [6, 3])?, false)?;
                assert_eq!(wrong, None, "{name} of a leaf {placements:?}");
            }
            Ok(())
        })
    });
}

/// Gradients of several passes, and of several uses in one pass, add up in the layout of the leaf.
#[test]
fn gradients_accumulate_in_the_layout_of_the_leaf() {
    spmd(4, |world| {
        on_every_layout(&world, |field, placements| {
            let (whole, other) = (half(&[6, 3], 1), half(&[3, 6], 2));
            let lay = |x: &Tensor| field.lay(x, placements, 9)?.detach().requires_grad_(true);
            let (x, y) = (lay(&whole)?, lay(&other)?);
            let (a, b) = (whole.requires_grad_(true)?, other.requires_grad_(true)?);
            let loss =
                |x: &Tensor, y: &Tensor| x.matmul(y)?.sum_all()?.add(&x.mul(&y.t()?)?.mul(x)?.sum_all()?);
            for pass in 1..=2 {
                loss(&x, &y)?.backward()?;
                loss(&a, &b)?.backward()?;
                for (leaf, expected) in [(&x, &a), (&y, &b)] {
                    let grad = leaf.grad().expect("a leaf that was used");
                    assert_eq!(grad.layout(), leaf.layout(), "pass {pass}");
                    let expected = expected.grad().expect("a leaf that was used");
                    let wrong = difference(&grad.full_tensor()?, &expected, false)?;
                    assert_eq!(wrong, None, "pass {pass} on a leaf {placements:?}");
                }
            }
            Ok(())
        })
    });
}

/// The results of these operators are right; only their gradients are wrong or missing.
#[test]
fn the_check_finds_wrong_and_missing_gradients() {
    type Spoiled = fn(&Tensor) -> Result<Tensor>;
    let spoiled: [(&str, Spoiled, &str); 2] = [
        ("twice as much", |x| x.mul(2.0)?.sub(&x.detach()), "the gradient of input 0: element [0, 0] is"),
        ("nothing", |x| Ok(x.detach()), "no result requires a gradient"),
    ];
    for (form, f, words) in spoiled {
        let spoil = move |x: &[Tensor]| if x[0].is_distributed() { f(&x[0]) } else { x[0].mul(1.0) };
        let table = [Operator::one("mul", form, spoil).on([half(&[4, 2], 1)])];
        let sample = Sample { common: 4, rare: 0 };
        let outcomes = launch(2, |world| check_all(&table, &world, Grid::new(&[2]), sample, 1)).unwrap();
        let failures = &outcomes[0].0.failures;
        assert_eq!(failures.len(), 4, "{form}: {failures:?}");
        assert!(failures.iter().all(|(_, text)| text.contains(words)), "{form}: {failures:?}");
    }
}
