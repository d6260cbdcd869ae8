//! [`validate`]: runs every row of an operator's sharding rule on real shards and compares with the single-device result.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use super::dense::{DenseArray, Tolerance};
use crate::autograd::grad_enabled;
use crate::comm::{ReduceOp, World};
use crate::dispatch::{AsOperator, OPERATORS, OperatorEvent};
use crate::mesh::DeviceMesh;
use crate::ops::{Arrays, Here, Op, ROUNDS, Together};
use crate::{Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::{cat, reduce};
use dtensor_layout::{Candidate, candidates};
use dtensor_layout::{Partial, Placement, PlacementList, Replicate, Shard, Spec, SpecKey, format_list};

/// The result of [`validate`].
///
/// A row of a sharding rule is one combination of placements of all inputs and outputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Validation {
    /// The number of cases run: one per operator, mesh, shapes and row.
    pub cases: usize,
    /// The rows whose result differs from the single-device result, and how.
    pub unsound: Vec<String>,
    /// Rows along one mesh dim that no rule offers, with the number of trials and of correct results. Only [`search`] fills this. A
    /// row that is always correct is a missed opportunity, not an error.
    pub others: BTreeMap<String, (usize, usize)>,
    /// The names of the operators that were tried.
    pub operators: BTreeSet<&'static str>,
}

impl fmt::Display for Validation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} rows of {} operators: {} unsound, {} sound ones not offered",
            self.cases,
            self.operators.len(),
            self.unsound.len(),
            self.missed().count()
        )?;
        self.unsound.iter().try_for_each(|row| write!(f, "\n  unsound: {row}"))
    }
}

impl Validation {
    /// Iterates over the sound rows that no rule offers.
    pub fn missed(&self) -> impl Iterator<Item = &str> {
        self.others.iter().filter(|(_, (tried, sound))| tried == sound).map(|(row, _)| &row[..])
    }

    /// Adds the results of another validation.
    pub fn extend(&mut self, other: Validation) {
        self.cases += other.cases;
        self.unsound.extend(other.unsound);
        self.operators.extend(other.operators);
        for (row, (tried, sound)) in other.others {
            let all = self.others.entry(row).or_default();
            *all = (all.0 + tried, all.1 + sound);
        }
    }
}

/// Runs `body` and checks the sharding rule of every operator that it applies to local tensors, forward or backward.
///
/// For each operator, it runs all rows that the rule offers on meshes of 2, 4 and 2×2 ranks: it shards the inputs, runs the kernel on
/// each rank's shards one after the other in this thread, merges the outputs, and compares with the single-device result. Partial
/// values differ between ranks and change sign. [`Validation::unsound`] lists the rows that differ.
///
/// ```
/// use dtensor::testing::validate;
/// use dtensor::{DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::arange(0, 15, 1, DType::F64)?.view([5, 3])?;
/// let (y, validation) = validate(|| x.sub(7.0)?.softmax(1)?.sum(0));
/// y?;
/// assert!(validation.unsound.is_empty(), "{validation}");
/// assert!(validation.cases > 10);
/// # Ok(())
/// # }
/// ```
pub fn validate<R>(body: impl FnOnce() -> R) -> (R, Validation) {
    try_operators(None, false, body)
}

/// Validates like [`validate`], with the rules [registered](DeviceMesh::register_sharding) on a mesh instead of the operators' own.
/// Nothing else of the mesh is used.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::testing::validate_on;
/// use dtensor::{DType, DeviceMesh, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], ())?;
/// // A wrong rule: it declares `pow` linear.
/// mesh.register_sharding("pow", |op, x, out| op.rule(x, out)?.linear(&[0]).map(Some))?;
/// let (y, validation) = validate_on(&mesh, || Tensor::arange(0, 8, 1, DType::F64)?.pow(2));
/// y?;
/// assert!(validation.unsound.iter().all(|row| row.contains("P(")) && !validation.unsound.is_empty());
/// # Ok(())
/// # }
/// ```
pub fn validate_on<R>(mesh: &DeviceMesh, body: impl FnOnce() -> R) -> (R, Validation) {
    try_operators(Some(mesh), false, body)
}

/// Validates like [`validate`], and also tries rows that the rules of forward operators do not offer.
///
/// [`Validation::missed`] then lists rows that were correct on the inputs of `body`. A row can be correct by chance, so run it on
/// several inputs and merge the results with [`Validation::extend`].
///
/// ```
/// use dtensor::Tensor;
/// use dtensor::testing::search;
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::from_slice(&[1f64, -2., 3., -4.], [4])?;
/// let (y, validation) = search(|| x.relu());
/// y?;
/// // `relu` of a partial maximum is a partial maximum, and the rule already offers that row.
/// assert!(!validation.missed().any(|row| row.contains("P(max)")));
/// # Ok(())
/// # }
/// ```
pub fn search<R>(body: impl FnOnce() -> R) -> (R, Validation) {
    try_operators(None, true, body)
}

/// Runs `body` and tries every operator in it, by the rules of a mesh if one is given. An operator that cannot be tried is listed
/// as unsound.
fn try_operators<R>(rules: Option<&DeviceMesh>, search: bool, body: impl FnOnce() -> R) -> (R, Validation) {
    let found = Rc::new(RefCell::new(Validation::default()));
    let (all, busy, rules) = (found.clone(), Cell::new(false), rules.cloned());
    let listener = move |event: &OperatorEvent<'_>| {
        let local = event.inputs.iter().all(|x| !x.is_distributed() && !x.is_meta());
        // Ignore the operators that a trial itself applies.
        let Some(op) = event.op.filter(|_| local && !busy.replace(true)) else { return };
        match try_rows(op, event.inputs, event.outputs, rules.as_ref(), search) {
            Ok(found) => all.borrow_mut().extend(found),
            Err(error) => all.borrow_mut().unsound.push(format!("{op:?}: {error}")),
        }
        busy.set(false);
    };
    let result = OPERATORS.listen(Rc::new(listener), body);
    (result, found.take())
}

/// The meshes that rows are tried on.
const MESHES: [&[usize]; 3] = [&[2], &[4], &[2, 2]];

/// Tries all rows of one operator on all meshes.
fn try_rows(
    op: &dyn Op,
    inputs: &[&Tensor],
    outputs: &[Tensor],
    rules: Option<&DeviceMesh>,
    search: bool,
) -> Result<Validation> {
    let metas: Vec<Meta> = inputs.iter().map(|x| x.meta()).collect();
    let outs: Vec<Meta> = outputs.iter().map(Tensor::meta).collect();
    let rule = match rules {
        Some(mesh) => mesh.rule_of(&AsOperator(op), &metas, &outs, false)?,
        None => op.rule(&metas, &outs)?,
    };
    let inputs =
        inputs.iter().map(|x| DenseArray::of(x.local_array(op.name())?)).collect::<Result<Vec<_>>>()?;
    let values = outputs.iter().map(|x| DenseArray::of(x.local_array(op.name())?));
    let expected = values.collect::<Result<Vec<_>>>()?;
    let all = || inputs.iter().chain(&expected);
    if all().any(DenseArray::is_inexact) {
        return Ok(Validation::default());
    }
    let finite = all().all(DenseArray::is_finite);
    let mut found = Validation { operators: BTreeSet::from([op.name()]), ..Validation::default() };
    for sizes in MESHES {
        let trial = Trial::new(op, sizes, &metas, &outs, &inputs, &expected)?;
        let offered = candidates(&rule, sizes);
        let can_run = |row: &&Candidate| is_supported(row, &metas) && (finite || !has_linear_partials(row));
        for row in offered.iter().filter(can_run) {
            found.cases += 1;
            if let Err(why) = trial.run(row) {
                found.unsound.push(trial.describe(row, &why));
            }
        }
        // Not in backward: the operators of gradients check shapes less, so a row that is not offered could pass wrong shapes to a
        // kernel.
        if sizes.len() == 1 && search && grad_enabled() {
            found.others.extend(trial.others(&offered));
        }
    }
    Ok(found)
}

/// One operator on one mesh.
struct Trial<'a> {
    op: &'a dyn Op,
    sizes: &'a [usize],
    /// The mesh, once per rank.
    meshes: Vec<DeviceMesh>,
    metas: &'a [Meta],
    outputs: &'a [Meta],
    inputs: &'a [DenseArray],
    expected: &'a [DenseArray],
}

impl<'a> Trial<'a> {
    fn new(
        op: &'a dyn Op,
        sizes: &'a [usize],
        metas: &'a [Meta],
        outputs: &'a [Meta],
        inputs: &'a [DenseArray],
        expected: &'a [DenseArray],
    ) -> Result<Self> {
        let n = sizes.iter().product();
        let mesh = |rank| DeviceMesh::new(&World::simulated(n, rank)?, sizes, ());
        let meshes = (0..n).map(mesh).collect::<Result<_>>()?;
        Ok(Trial { op, sizes, meshes, metas, outputs, inputs, expected })
    }

    /// Describes a row and the reason why it is unsound.
    fn describe(&self, row: &Candidate, why: &str) -> String {
        let all =
            |lists: &[PlacementList]| lists.iter().map(|p| format_list(p)).collect::<Vec<_>>().join(", ");
        let shapes: Vec<String> = self.metas.iter().map(|meta| meta.shape.to_string()).collect();
        format!(
            "{:?} of {} on {:?}: {} -> {}: {why}",
            self.op,
            shapes.join(", "),
            self.sizes,
            all(&row.inputs),
            all(&row.outputs)
        )
    }

    /// Runs the kernel on the shards of each rank, merges the outputs, and compares them with the expected ones.
    fn run(&self, row: &Candidate) -> std::result::Result<(), String> {
        // The shards of all ranks, for each input.
        let mut shards: Vec<Vec<Array>> = Vec::new();
        for ((x, placements), meta) in self.inputs.iter().zip(&row.inputs).zip(self.metas) {
            let split = x.split(placements, self.sizes, shards.len());
            let array = |shard: &DenseArray| shard.to_array(meta.dtype).map_err(|error| error.to_string());
            shards.push(split.iter().map(array).collect::<std::result::Result<_, _>>()?);
        }
        let mut results: Vec<Vec<DenseArray>> = vec![Vec::new(); self.outputs.len()];
        // The exchanged values that each rank has received.
        let mut known: Vec<Vec<Array>> = vec![Vec::new(); self.meshes.len()];
        for round in 0.. {
            if round > ROUNDS {
                return Err(format!("`together` returned no outputs after {ROUNDS} rounds"));
            }
            let mut requests = Vec::new();
            for (rank, mesh) in self.meshes.iter().enumerate() {
                let (specs, _) = shards_on(mesh, &row.inputs, self.metas);
                let (out_specs, out) = shards_on(mesh, &row.outputs, self.outputs);
                let here = Here::on_mesh(mesh, self.metas, &out, &specs, &out_specs);
                let locals: Vec<&Array> = shards.iter().map(|shards| &shards[rank]).collect();
                let result = catch_unwind(AssertUnwindSafe(|| match row.merged.is_empty() {
                    true => self.op.kernel(&locals, &here).map(Together::Done),
                    false => self.op.together(&locals, &known[rank], &here),
                }));
                match result.map_err(|_| format!("rank {rank}: the kernel panicked"))? {
                    Ok(Together::Done(values)) => collect(&mut results, rank, &values, &out)?,
                    Ok(request) => requests.push(request),
                    Err(error) => return Err(format!("rank {rank}: {error}")),
                }
            }
            if requests.is_empty() {
                break;
            }
            self.exchange(row, &requests, &mut known)?;
        }
        for (i, (shards, placements)) in results.iter().zip(&row.outputs).enumerate() {
            let (expected, tolerance) = (&self.expected[i], Tolerance::for_dtype(self.outputs[i].dtype));
            let merged = DenseArray::merge(shards, placements, self.sizes, expected.dims(), tolerance)
                .map_err(|why| format!("output {i}: {why}"))?;
            merged.compare(expected, tolerance).map_err(|why| format!("output {i}: {why}"))?;
        }
        Ok(())
    }

    /// Stacks or reduces the requested values over the merged mesh dims, and appends the result to what each rank knows.
    fn exchange(
        &self,
        row: &Candidate,
        requests: &[Together],
        known: &mut [Vec<Array>],
    ) -> std::result::Result<(), String> {
        if requests.len() != self.meshes.len() {
            return Err("`together` returned outputs on some ranks only".into());
        }
        for (rank, mesh) in self.meshes.iter().enumerate() {
            let at = mesh.coordinate().unwrap_or_default();
            let same_line = |other: &usize| {
                let other = self.meshes[*other].coordinate().unwrap_or_default();
                (0..at.len()).all(|m| row.merged.contains(&m) || at[m] == other[m])
            };
            let line: Vec<usize> = (0..self.meshes.len()).filter(same_line).collect();
            let stacked = |of: &dyn Fn(&Together) -> Option<Array>| {
                let each = line.iter().map(|&r| of(&requests[r])).collect::<Option<Vec<Array>>>();
                let each = each.ok_or("`together` returned different requests on different ranks")?;
                let each = each.iter().map(|x| x.unsqueeze(0));
                let each =
                    each.collect::<dtensor_array::Result<Vec<Array>>>().map_err(|error| error.to_string())?;
                cat::cat(&each.iter().collect::<Vec<_>>(), 0).map_err(|error| error.to_string())
            };
            match &requests[rank] {
                Together::Stack(values) => {
                    for i in 0..values.len() {
                        known[rank].push(stacked(&|other| match other {
                            Together::Stack(values) => values.get(i).cloned(),
                            _ => None,
                        })?);
                    }
                }
                Together::Reduce(_, op) => {
                    let all = stacked(&|other| match other {
                        Together::Reduce(value, same) if same == op => Some(value.clone()),
                        _ => None,
                    })?;
                    let reduced = reduce::reduce((*op).into(), &all, &[0], false);
                    known[rank].push(reduced.map_err(|error| error.to_string())?);
                }
                Together::Done(_) => return Err("`together` returned outputs on some ranks only".into()),
            }
        }
        Ok(())
    }

    /// Tries the rows along one mesh dim that the rule does not offer.
    fn others(&self, offered: &[Candidate]) -> BTreeMap<String, (usize, usize)> {
        let n = self.sizes[0];
        let each = |meta: &Meta, ops: &[ReduceOp]| {
            let shards = (0..meta.shape.ndim()).filter(|&d| meta.shape[d] >= n).map(|d| Shard(d as isize));
            let partials = ops.iter().filter(|_| meta.dtype.is_float()).map(|&op| Partial(op));
            std::iter::once(Replicate).chain(shards).chain(partials).collect::<Vec<Placement>>()
        };
        let reductions = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min];
        let inputs: Vec<Vec<Placement>> = self.metas.iter().map(|meta| each(meta, &reductions)).collect();
        let outputs: Vec<Vec<Placement>> = self.outputs.iter().map(|meta| each(meta, &reductions)).collect();
        let mut others = BTreeMap::new();
        let all: usize = inputs.iter().map(Vec::len).product();
        if all > 4096 || self.outputs.iter().any(|meta| meta.shape.numel() < 4) {
            return others;
        }
        for index in 0..all {
            let chosen = nth_combination(&inputs, index);
            if chosen.iter().all(|&p| p == Replicate) || offered.iter().any(|row| has_inputs(row, &chosen)) {
                continue;
            }
            for to in 0..outputs.iter().map(Vec::len).product() {
                let row = Candidate {
                    inputs: chosen.iter().map(|&p| SmallVec::from_elem(p, 1)).collect(),
                    outputs: nth_combination(&outputs, to)
                        .iter()
                        .map(|&p| SmallVec::from_elem(p, 1))
                        .collect(),
                    merged: SmallVec::new(),
                };
                if is_supported(&row, self.metas)
                    && self.shapes_fit(&row)
                    && !self.has_replicated_partials(&row)
                {
                    let list = |lists: &[PlacementList]| {
                        lists.iter().map(|p| p[0].to_string()).collect::<Vec<_>>().join(", ")
                    };
                    let name = format!("{:?}: {} -> {}", self.op, list(&row.inputs), list(&row.outputs));
                    others.insert(name, (1, self.run(&row).is_ok() as usize));
                }
            }
        }
        others
    }

    /// Returns true if an output is declared partial but is in fact replicated: the average or extreme of equal values is the value.
    fn has_replicated_partials(&self, row: &Candidate) -> bool {
        let idempotent = |list: &PlacementList| {
            matches!(list[..], [Partial(ReduceOp::Avg | ReduceOp::Max | ReduceOp::Min)])
        };
        let replicated = |list: &PlacementList| match idempotent(list) {
            true => SmallVec::from_elem(Replicate, 1),
            false => list.clone(),
        };
        let outputs = row.outputs.iter().map(replicated).collect();
        row.outputs.iter().any(idempotent)
            && self.run(&Candidate { inputs: row.inputs.clone(), outputs, merged: SmallVec::new() }).is_ok()
    }

    /// Returns true if the shape rule, applied to the shards of the inputs, gives the shards of the outputs.
    fn shapes_fit(&self, row: &Candidate) -> bool {
        self.meshes.iter().all(|mesh| {
            let (_, inputs) = shards_on(mesh, &row.inputs, self.metas);
            let (_, outputs) = shards_on(mesh, &row.outputs, self.outputs);
            self.op.shape(&inputs).is_ok_and(|shapes| shapes[..] == outputs[..])
        })
    }
}

/// Returns the specs of tensors on a mesh, and the metas of the shards of the mesh's rank.
fn shards_on(mesh: &DeviceMesh, lists: &[PlacementList], metas: &[Meta]) -> (Vec<Arc<Spec>>, Vec<Meta>) {
    let spec = |(placements, meta): (&PlacementList, &Meta)| {
        mesh.planner().intern(SpecKey { placements: placements.clone(), shape: meta.shape.clone() })
    };
    let specs: Vec<Arc<Spec>> = lists.iter().zip(metas).map(spec).collect();
    let shard = |(spec, meta): (&Arc<Spec>, &Meta)| Meta { shape: spec.local.clone(), ..meta.clone() };
    let shards = specs.iter().zip(metas).map(shard).collect();
    (specs, shards)
}

/// Returns true if inputs of these dtypes can have these placements: integers can be neither partial averages nor partial products.
fn is_supported(row: &Candidate, metas: &[Meta]) -> bool {
    let fits = |(list, meta): (&PlacementList, &Meta)| {
        list.iter().all(|p| !matches!(p, Partial(ReduceOp::Avg | ReduceOp::Product)) || meta.dtype.is_float())
    };
    row.inputs.iter().zip(metas).all(fits)
}

/// Returns true if an input is a partial sum, average or product. With infinities, floating-point arithmetic is not distributive, so
/// such rows are skipped.
fn has_linear_partials(row: &Candidate) -> bool {
    let mut placements = row.inputs.iter().flatten();
    placements.any(|p| matches!(p, Partial(ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product)))
}

/// Appends the outputs of a rank to the results. Returns an error if their number or shapes are wrong.
fn collect(
    results: &mut [Vec<DenseArray>],
    rank: usize,
    values: &Arrays,
    out: &[Meta],
) -> std::result::Result<(), String> {
    if values.len() != out.len() {
        return Err(format!("rank {rank}: {} outputs instead of {}", values.len(), out.len()));
    }
    for ((result, value), meta) in results.iter_mut().zip(values).zip(out) {
        if value.dims() != &meta.shape[..] {
            return Err(format!("rank {rank}: shape {:?} instead of {}", value.dims(), meta.shape));
        }
        result.push(DenseArray::of(value).map_err(|error| error.to_string())?);
    }
    Ok(())
}

/// Returns true if a row has these placements of its inputs.
fn has_inputs(row: &Candidate, placements: &[Placement]) -> bool {
    row.inputs.iter().zip(placements).all(|(list, p)| list[..] == [*p])
}

/// Returns the combination at `index` of one placement per list; the first list varies fastest.
fn nth_combination(choices: &[Vec<Placement>], mut index: usize) -> Vec<Placement> {
    let pick = |list: &Vec<Placement>| {
        let chosen = list[index % list.len()];
        index /= list.len();
        chosen
    };
    choices.iter().map(pick).collect()
}
