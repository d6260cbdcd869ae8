//! Every operator gives the same results as on one device for inputs in any layout.
//!
//! A case is an operator of the table, one list of inputs, a mesh, and a layout for each input. `DTENSOR_LONG=1` tries
//! all layouts of replicas, shards and partial sums, but at most 5,000 per example (attention on a 2-d mesh has more).

use dtensor::comm::{World, launch, launch_each, record};
use dtensor::op::{Arrays, Backward, Grads, Here, Meta, Metas, Op, Rule, apply};
use dtensor::testing::{Validation, search, spmd, validate};
use dtensor::{Array, BackwardOptions, DType, Error, Result, Shard, Tensor, distribute_tensor};

use crate::common::inputs::half;
use crate::common::laid::{Combination, Field, Sample, Stop, Tally, difference, long, shown};
use crate::common::layouts::Grid;
use crate::common::operators::{Operator, operators};
use crate::common::ranks::Random;
use crate::common::table::{Examples, Row, assert_complete, gaps, table};

/// Checks one case and returns what is wrong with it, if anything.
fn check(
    field: &Field,
    operator: &Operator,
    inputs: &[Tensor],
    lists: &Combination,
    expected: &Result<Vec<Tensor>>,
    seed: u64,
) -> Result<Option<String>> {
    let laid = field.lay_all(inputs, lists, seed)?;
    let expected = match expected {
        Ok(expected) => expected,
        Err(error) => {
            let done = operator.run(&laid).is_ok();
            return Ok(done.then(|| format!("accepted, but on one device it fails: {error}")));
        }
    };
    let (got, calls) = record(|| operator.run_laid(&laid));
    // Every collective must be attributed to the operator's call in the table.
    if let Some(call) = calls.iter().find(|call| !call.at.file.contains("tests/")) {
        return Ok(Some(format!("{call} is not where it was asked for")));
    }
    let Some(got) = got? else { return Ok(None) };
    if got.len() != expected.len() {
        return Ok(Some(format!("{} results instead of {}", got.len(), expected.len())));
    }
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        if got.mesh() != Some(&field.mesh) {
            return Ok(Some(format!("result {i} is not on the mesh of the inputs")));
        }
        let whole = got.full_tensor()?;
        if !field.inside() {
            let same = (got.dims(), got.dtype()) == (expected.dims(), expected.dtype());
            return Ok((!same).then(|| format!("result {i}, outside the mesh: {got:?}")));
        }
        if let Some(difference) = difference(&whole, expected, operator.exact)? {
            let layout = got.layout().map_or_else(String::new, ToString::to_string);
            return Ok(Some(format!("result {i}, which lies as {layout}: {difference}")));
        }
    }
    Ok(None)
}

/// Checks one of every `one_of` examples on one mesh.
fn check_all(table: &[Operator], world: &World, grid: Grid, sample: Sample, one_of: usize) -> Result<Tally> {
    let field = Field::new(world, grid)?;
    let sizes = &field.grid.sizes;
    let mut tally = Tally::default();
    let mut number = 0;
    for operator in table {
        for inputs in &operator.examples {
            number += 1;
            if Random::new(&[number]).below(one_of) > 0 {
                continue;
            }
            let expected = operator.run(inputs);
            for lists in sample.combinations(inputs, sizes, number) {
                let label = || format!("{}, laid as {}", operator.label(inputs), shown(&lists, sizes));
                let seed = number * 1000 + tally.cases as u64;
                let body = || check(&field, operator, inputs, &lists, &expected, seed);
                if let Err(Stop) = tally.case(label, body) {
                    return Ok(tally);
                }
            }
        }
    }
    Ok(tally)
}

#[test]
fn every_operator_on_all_placements() {
    let table = operators();
    let began = std::time::Instant::now();
    let sample = if long() { Sample { common: 5_000, rare: 100 } } else { Sample { common: 16, rare: 4 } };
    let few = Sample { common: 2, rare: 1 };
    let mut total = 0;
    for (sizes, sample) in [(&[2][..], sample), (&[4], sample), (&[2, 2], sample), (&[2, 2, 2], few)] {
        let ranks = sizes.iter().product();
        let tallies = launch(ranks, |world| check_all(&table, &world, Grid::new(sizes), sample, 1)).unwrap();
        let cases = Tally::judge(&tallies);
        println!("{cases} cases on a mesh {sizes:?}, {:?} so far", began.elapsed());
        total += cases;
    }
    println!("{total} cases of (operator, placements, shape, mesh)");
    assert!(total >= 20_000, "only {total} cases");
}

#[test]
fn some_operators_match_one_device_on_every_kind_of_world() {
    let table = operators();
    // Each rank judges its own cases, because over MPI the ranks are separate processes.
    let body = |world: World, sizes: &[usize]| -> Result<()> {
        let sample = Sample { common: 1, rare: 1 };
        let tally = check_all(&table, &world, Grid::new(sizes), sample, 12)?;
        let cases = Tally::judge(&[tally]);
        if world.rank() == 0 {
            println!("{cases} cases on a mesh {sizes:?} of a world of {:?}", world.kind());
        }
        assert!(cases >= 100, "only {cases} cases on a mesh {sizes:?}");
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
fn operators_match_one_device_on_some_ranks_in_any_order() {
    let table = operators();
    let sample = Sample { common: 2, rare: 1 };
    for (world, grid) in [(3, Grid::of(&[2], &[2, 0])), (5, Grid::of(&[2, 2], &[3, 0, 4, 1]))] {
        let tallies = launch(world, |world| check_all(&table, &world, grid.clone(), sample, 2)).unwrap();
        let cases = Tally::judge(&tallies);
        println!("{cases} cases on {grid:?} of {world} ranks");
        assert!(cases >= 1000, "only {cases} cases");
    }
}

/// Only the rank that holds the value can find the error. The other ranks return an error too, at the latest when they
/// wait for that rank.
#[test]
fn an_index_out_of_range_on_one_rank_is_an_error_on_all() {
    let index = Tensor::from_slice(&[0i64, 1, 2, 9], [4]).unwrap();
    let weight = half(&[4, 8], 1);
    let row = index.reshape([1, 4]).unwrap();
    type Lookup = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    let lookups: [Lookup; 4] = [
        |x, index, _| x.index_select(0, index),
        |x, index, _| index.embedding(x, None),
        |x, _, row| x.t()?.gather(1, row),
        |x, index, _| x.t()?.narrow(0, 0, 4)?.cross_entropy(index, Default::default()),
    ];
    for (i, lookup) in lookups.into_iter().enumerate() {
        // A GPU finds it later: when values are read.
        let alone = lookup(&weight, &index, &row).and_then(|found| found.to_f64_vec());
        assert!(alone.is_err(), "lookup {i} on one device");
        let outcomes = launch_each(4, |world| {
            let field = Field::new(&world, Grid::new(&[4]))?;
            let mesh = &field.mesh;
            let x = distribute_tensor(&weight, mesh, ())?;
            let index = distribute_tensor(&index, mesh, [Shard(0)])?;
            let row = distribute_tensor(&row, mesh, [Shard(1)])?;
            let found = lookup(&x, &index, &row)?.full_tensor()?.to_f64_vec()?;
            world.group().barrier()?;
            Ok(found)
        });
        let errors: Vec<&Error> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert_eq!(errors.len(), 4, "lookup {i}: {outcomes:?}");
        let named = errors.iter().any(|error| error.to_string().contains('9'));
        assert!(named, "lookup {i}: no error names the index: {errors:?}");
    }
}

/// The check finds a wrong element, a missing result, an unexpected error, and an error that is missing.
#[test]
fn the_check_finds_wrong_and_missing_results() {
    type Spoiled = fn(&[Tensor]) -> Result<Vec<Tensor>>;
    let local = |x: &Tensor| !x.is_distributed();
    let spoiled: [(&str, Spoiled, &str); 4] = [
        // Squares partial values before they are summed.
        (
            "pow",
            |x| {
                let part = if x[0].is_distributed() { x[0].to_local()? } else { x[0].clone() };
                let squared = part.pow(2)?;
                let Some(mesh) = x[0].mesh() else { return Ok(vec![squared]) };
                Ok(vec![Tensor::from_local(&squared, mesh, x[0].placements())?])
            },
            "instead of",
        ),
        (
            "split",
            |x| if x[0].is_distributed() { Ok(vec![]) } else { x[0].split(&[2, 2], 0) },
            "0 results instead of 2",
        ),
        (
            "mm",
            |x| if x[0].is_distributed() { x[0].mm(&x[0]).map(|y| vec![y]) } else { Ok(vec![x[0].clone()]) },
            "fails",
        ),
        (
            "t",
            |x| if x[0].is_distributed() { Ok(vec![x[0].clone()]) } else { x[0].mm(&x[0]).map(|y| vec![y]) },
            "accepted",
        ),
    ];
    for (name, f, words) in spoiled {
        let table = [Operator::several(name, "spoiled", f).on([half(&[4, 2], 1)])];
        assert!(table[0].examples[0].iter().all(local));
        let sample = Sample { common: 16, rare: 0 };
        let tallies = launch(2, |world| check_all(&table, &world, Grid::new(&[2]), sample, 1)).unwrap();
        let found: Vec<&String> = tallies[0].failures.iter().map(|(_, text)| text).collect();
        let expected = if name == "pow" { 1 } else { 4 };
        assert_eq!(found.len(), expected, "{name}: {found:?}");
        let told = format!("{name}(spoiled) of f64 [4, 2], laid as [");
        assert!(found.iter().all(|text| text.starts_with(&told) && text.contains(words)), "{found:?}");
        // Squaring is wrong for the partial sum only, so the check must not report other layouts.
        assert!(name != "pow" || found[0].contains("laid as [P(sum)]"), "{found:?}");
    }
}

#[test]
fn the_table_has_every_operator() {
    assert_complete(Examples::Meshes);
    for operator in operators() {
        assert!(!operator.examples.is_empty(), "{}({}) has no inputs", operator.name, operator.form);
    }
}

/// Names each operator without a row, with two rows, without examples, or with examples that its row excludes.
#[test]
fn a_gap_in_the_table_is_named() {
    let without = |name: &str| -> Vec<Row> { table().into_iter().filter(|row| row.name != name).collect() };
    // Three ways to declare an operator: a method, a macro, and a macro for reductions along dims.
    for name in ["matmul", "tanh", "sum_keepdim"] {
        assert_eq!(gaps(&without(name), Examples::Meshes), [format!("`{name}` has no row")]);
    }
    let changed = |name: &str, change: fn(&mut Row)| {
        let mut rows = table();
        rows.iter_mut().filter(|row| row.name == name).for_each(change);
        rows
    };
    let cleared = gaps(&changed("softmax", |row| row.casts.clear()), Examples::Casts);
    assert_eq!(cleared, ["`softmax` has no examples (Casts)"]);
    for examples in [Examples::Meshes, Examples::Local] {
        let cleared = gaps(&changed("softmax", |row| row.forms.clear()), examples);
        assert_eq!(cleared, [format!("`softmax` has no examples ({examples:?})")]);
    }
    let cleared = gaps(&changed("softmax", |row| row.calls.clear()), Examples::Calls);
    assert_eq!(cleared, ["`softmax` has no examples (Calls)"]);
    let renamed = gaps(&changed("softmax", |row| row.name = "softmin"), Examples::Calls);
    assert_eq!(renamed, ["`softmax` has no row"]);
    let renamed = gaps(&changed("softmax", |row| row.name = "relu"), Examples::Calls);
    assert_eq!(renamed, ["`softmax` has no row", "`relu` has two rows"]);
    let moved = gaps(
        &changed("rand_like", |row| row.forms.iter_mut().for_each(|form| form.device = form.meshes.clone())),
        Examples::Local,
    );
    assert_eq!(moved, ["`rand_like` has examples (Local) although its numbers are drawn"]);
}

/// Runs an operator forward and backward, so that a validator around it sees the operators of both passes.
fn there_and_back(operator: &Operator, inputs: &[Tensor]) -> Result<()> {
    let wanted = operator.differentiable(inputs);
    let leaf =
        |(i, x): (usize, &Tensor)| if wanted.contains(&i) { x.requires_grad_(true) } else { Ok(x.clone()) };
    let inputs: Vec<Tensor> = inputs.iter().enumerate().map(leaf).collect::<Result<_>>()?;
    for y in operator.run(&inputs)?.iter().filter(|y| y.requires_grad()) {
        let gradient = Some(half(y.dims(), 9).to_dtype(y.dtype())?);
        y.backward_with(BackwardOptions { gradient, retain_graph: true, ..Default::default() })?;
    }
    Ok(())
}

/// Validates all rows that rules offer, including the rules in backward passes. The long mode also searches for sound
/// rows that no rule offers.
#[test]
fn every_row_of_every_rule_is_sound() {
    let began = std::time::Instant::now();
    let mut all = Validation::default();
    for operator in operators() {
        for (number, inputs) in operator.examples.iter().enumerate() {
            // Some examples also run in single precision.
            let narrow =
                |x: &Tensor| if x.dtype().is_float() { x.to_dtype(DType::F32) } else { Ok(x.clone()) };
            let mut forms = vec![inputs.clone()];
            if number % 3 == 0 || long() {
                forms.push(inputs.iter().map(narrow).collect::<Result<_>>().unwrap());
            }
            for inputs in forms {
                let body = || there_and_back(&operator, &inputs);
                let (done, found) = if long() { search(body) } else { validate(body) };
                let alone = there_and_back(&operator, &inputs);
                assert_eq!(
                    done.is_ok(),
                    alone.is_ok(),
                    "{}: {done:?} and {alone:?}",
                    operator.label(&inputs)
                );
                let label = |row: String| format!("{}: {row}", operator.label(&inputs));
                let unsound = found.unsound.into_iter().map(label).collect();
                all.extend(Validation { unsound, ..found });
            }
        }
    }
    println!("{} rows of {} operators in {:?}", all.cases, all.operators.len(), began.elapsed());
    all.missed().for_each(|row| println!("not offered: {row}"));
    let worst = &all.unsound[..all.unsound.len().min(20)];
    assert!(worst.is_empty(), "{} unsound rows, among them {worst:#?}", all.unsound.len());
    assert!(all.cases > 20_000, "only {}", all.cases);
}

/// Subtracts from each row its largest element. The rule is wrong: it lets rows be sharded, or claims that the operator
/// is linear.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Planted {
    linear: bool,
}

impl Op for Planted {
    fn name(&self) -> &'static str {
        "planted"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(x.iter().cloned().collect())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        if self.linear { Rule::along(1, x, out)?.linear(&[0]) } else { Rule::pointwise(x, out) }
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let [rows, columns] = *x[0].dims() else { return Ok(Arrays::new()) };
        let mut values = x[0].copy_to_host::<f64>()?;
        for row in values.chunks_mut(columns.max(1)) {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter_mut().for_each(|value| *value -= largest);
        }
        Ok([Array::from_vec(values, &[rows, columns])?.to_device(x[0].device())?].into())
    }
    fn gradient(&self, _: &Backward<'_>) -> Result<Grads> {
        Ok(Grads::new())
    }
}

/// Returns its input. Its rule offers fewer rows than are sound.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Idle;

impl Op for Idle {
    fn name(&self) -> &'static str {
        "idle"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(x.iter().cloned().collect())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Ok(Rule::replicated(x, out))
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok([x[0].clone()].into())
    }
}

fn unsound(planted: Planted) -> Vec<String> {
    let x = Tensor::from_slice(&[3f64, -1., 4., 1., -5., 9., 2., -6., 5., 3., 5., -8.], [3, 4]).unwrap();
    let (y, validation) = validate(|| apply(planted, &[&x]));
    y.unwrap();
    validation.unsound
}

#[test]
fn an_unsound_rule_is_found() {
    let cut = unsound(Planted { linear: false });
    assert!(cut.iter().any(|row| row.contains("on [2]: [S(1)] -> [S(1)]")), "{cut:#?}");
    assert!(!cut.iter().any(|row| row.contains("[S(0)] ->")), "{cut:#?}");
    let linear = unsound(Planted { linear: true });
    assert!(linear.iter().any(|row| row.contains("[P(sum)] -> [P(sum)]")), "{linear:#?}");
}

#[test]
fn sound_rows_that_are_not_offered_are_listed() {
    let x = Tensor::from_slice(&[1f64, -2., 3., -4.], [4]).unwrap();
    let (y, validation) = search(|| apply(Idle, &[&x]));
    y.unwrap();
    assert!(validation.unsound.is_empty(), "{validation}");
    let missed: Vec<&str> = validation.missed().collect();
    assert!(
        missed.contains(&"Idle: P(sum) -> P(sum)") && !missed.contains(&"Idle: P(sum) -> R"),
        "{missed:?}"
    );
}
