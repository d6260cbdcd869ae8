//! Proof by trying: every row that an operator's rule offers is run on real parts and compared with the whole.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use super::numbers::{Close, Numbers};
use crate::autograd::grad_enabled;
use crate::comm::{ReduceOp, World};
use crate::dispatch::{Described, Heard, OPERATORS};
use crate::mesh::DeviceMesh;
use crate::ops::{Arrays, Here, Op, ROUNDS, Together};
use crate::{Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::{cat, reduce};
use dtensor_layout::{Candidate, candidates};
use dtensor_layout::{Partial, Placement, PlacementList, Replicate, Shard, Spec, SpecKey, shown};

/// What came of trying all rows of all operators in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Validation {
    /// How many rows were run: an operator, a mesh, shapes, and the placements of all inputs.
    pub cases: usize,
    /// Rows that do not give what one device does, and how they differ.
    pub unsound: Vec<String>,
    /// Placements along one mesh dim that no rule offers, with how often they were tried and how often they were right. Where
    /// they always are, they are a chance that was missed, not a fault. Only [`search`] tries them.
    pub others: BTreeMap<String, (usize, usize)>,
    /// The names of the operators.
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
    /// Sound rows that no rule offers.
    pub fn missed(&self) -> impl Iterator<Item = &str> {
        self.others.iter().filter(|(_, (tried, sound))| tried == sound).map(|(row, _)| &row[..])
    }

    /// Adds what came of another body.
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

/// Runs `body`, and with every operator that it applies to plain tensors, forward or backward, all rows that the operator's rule
/// offers: on meshes of 2, 4 and 2×2 ranks, with parts cut by the chunk rule and partial values that differ between ranks and
/// change their sign. What does not equal the result on the whole is listed. No rank is needed: parts are computed one after the
/// other.
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
    noting(None, false, body)
}

/// As [`validate`], with the rules that operators have on a mesh: where one was
/// [registered](DeviceMesh::register_sharding), that one. Of the mesh nothing else is used.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::testing::validate_on;
/// use dtensor::{DType, DeviceMesh, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], ())?;
/// // As if a square were linear.
/// mesh.register_sharding("pow", |op, x, out| op.rule(x, out)?.linear(&[0]).map(Some))?;
/// let (y, validation) = validate_on(&mesh, || Tensor::arange(0, 8, 1, DType::F64)?.pow(2));
/// y?;
/// assert!(validation.unsound.iter().all(|row| row.contains("P(")) && !validation.unsound.is_empty());
/// # Ok(())
/// # }
/// ```
pub fn validate_on<R>(mesh: &DeviceMesh, body: impl FnOnce() -> R) -> (R, Validation) {
    noting(Some(mesh), false, body)
}

/// As [`validate`], and tries what the rules of forward operators do not offer, too: for more examples, [`Validation::missed`]
/// says the better which sound rows a rule lacks.
///
/// ```
/// use dtensor::Tensor;
/// use dtensor::testing::search;
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::from_slice(&[1f64, -2., 3., -4.], [4])?;
/// let (y, validation) = search(|| x.relu());
/// y?;
/// // The largest of several go through, and the rule says so; sums do not.
/// assert!(!validation.missed().any(|row| row.contains("P(max)")));
/// # Ok(())
/// # }
/// ```
pub fn search<R>(body: impl FnOnce() -> R) -> (R, Validation) {
    noting(None, true, body)
}

/// Runs `body` and tries every operator in it, by the rules of a mesh if one is given. An operator that cannot be tried is listed
/// as unsound.
fn noting<R>(rules: Option<&DeviceMesh>, search: bool, body: impl FnOnce() -> R) -> (R, Validation) {
    let found = Rc::new(RefCell::new(Validation::default()));
    let (all, busy, rules) = (found.clone(), Cell::new(false), rules.cloned());
    let listener = move |heard: &Heard<'_>| {
        let local = heard.inputs.iter().all(|x| !x.is_distributed() && !x.is_meta());
        // Trials apply operators themselves.
        let Some(op) = heard.op.filter(|_| local && !busy.replace(true)) else { return };
        match try_all(op, heard.inputs, heard.outputs, rules.as_ref(), search) {
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

fn try_all(
    op: &dyn Op,
    inputs: &[&Tensor],
    outputs: &[Tensor],
    rules: Option<&DeviceMesh>,
    search: bool,
) -> Result<Validation> {
    let metas: Vec<Meta> = inputs.iter().map(|x| x.meta()).collect();
    let outs: Vec<Meta> = outputs.iter().map(Tensor::meta).collect();
    let rule = match rules {
        Some(mesh) => mesh.rule_of(&Described(op), &metas, &outs, false)?,
        None => op.rule(&metas, &outs)?,
    };
    let inputs = inputs.iter().map(|x| Numbers::of(x.part(op.name())?)).collect::<Result<Vec<_>>>()?;
    let values = outputs.iter().map(|x| Numbers::of(x.part(op.name())?));
    let expected = values.collect::<Result<Vec<_>>>()?;
    let all = || inputs.iter().chain(&expected);
    if all().any(Numbers::is_inexact) {
        return Ok(Validation::default());
    }
    let finite = all().all(Numbers::is_finite);
    let mut found = Validation { operators: BTreeSet::from([op.name()]), ..Validation::default() };
    for sizes in MESHES {
        let trial = Trial::new(op, sizes, &metas, &outs, &inputs, &expected)?;
        let offered = candidates(&rule, sizes);
        for candidate in offered.iter().filter(|row| possible(row, &metas) && (finite || !sums(row))) {
            found.cases += 1;
            if let Err(why) = trial.run(candidate) {
                found.unsound.push(trial.described(candidate, &why));
            }
        }
        // Kernels trust their shapes, and the shape rules of gradients trust those who wrote them.
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
    /// The mesh as each of its ranks sees it.
    meshes: Vec<DeviceMesh>,
    metas: &'a [Meta],
    outputs: &'a [Meta],
    inputs: &'a [Numbers],
    expected: &'a [Numbers],
}

impl<'a> Trial<'a> {
    fn new(
        op: &'a dyn Op,
        sizes: &'a [usize],
        metas: &'a [Meta],
        outputs: &'a [Meta],
        inputs: &'a [Numbers],
        expected: &'a [Numbers],
    ) -> Result<Self> {
        let n = sizes.iter().product();
        let mesh = |rank| DeviceMesh::new(&World::simulated(n, rank)?, sizes, ());
        let meshes = (0..n).map(mesh).collect::<Result<_>>()?;
        Ok(Trial { op, sizes, meshes, metas, outputs, inputs, expected })
    }

    /// What a row does and why it is wrong.
    fn described(&self, row: &Candidate, why: &str) -> String {
        let all = |lists: &[PlacementList]| lists.iter().map(|p| shown(p)).collect::<Vec<_>>().join(", ");
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

    /// The parts of all ranks, computed and put together, compared with the whole.
    fn run(&self, row: &Candidate) -> std::result::Result<(), String> {
        // What all ranks have of each input.
        let mut parts: Vec<Vec<Array>> = Vec::new();
        for ((x, placements), meta) in self.inputs.iter().zip(&row.inputs).zip(self.metas) {
            let split = x.split(placements, self.sizes, parts.len());
            let local = |part: &Numbers| part.local(meta.dtype).map_err(|error| error.to_string());
            parts.push(split.iter().map(local).collect::<std::result::Result<_, _>>()?);
        }
        let mut results: Vec<Vec<Numbers>> = vec![Vec::new(); self.outputs.len()];
        // What each rank has been told by the others.
        let mut known: Vec<Vec<Array>> = vec![Vec::new(); self.meshes.len()];
        for round in 0.. {
            if round > ROUNDS {
                return Err(format!("after {ROUNDS} rounds ranks have not found out the outputs together"));
            }
            let mut asked = Vec::new();
            for (rank, mesh) in self.meshes.iter().enumerate() {
                let (specs, _) = parts_on(mesh, &row.inputs, self.metas);
                let (out_specs, out) = parts_on(mesh, &row.outputs, self.outputs);
                let here = Here::on_mesh(mesh, self.metas, &out, &specs, &out_specs);
                let locals: Vec<&Array> = parts.iter().map(|parts| &parts[rank]).collect();
                let made = catch_unwind(AssertUnwindSafe(|| match row.merged.is_empty() {
                    true => self.op.kernel(&locals, &here).map(Together::Done),
                    false => self.op.together(&locals, &known[rank], &here),
                }));
                match made.map_err(|_| format!("rank {rank}: the kernel panicked"))? {
                    Ok(Together::Done(values)) => collect(&mut results, rank, &values, &out)?,
                    Ok(question) => asked.push(question),
                    Err(error) => return Err(format!("rank {rank}: {error}")),
                }
            }
            if asked.is_empty() {
                break;
            }
            self.answer(row, &asked, &mut known)?;
        }
        for (i, (ranks, placements)) in results.iter().zip(&row.outputs).enumerate() {
            let (whole, close) = (&self.expected[i], Close::for_dtype(self.outputs[i].dtype));
            let joined = Numbers::join(ranks, placements, self.sizes, whole.dims(), close)
                .map_err(|why| format!("output {i}: {why}"))?;
            joined.compare(whole, close).map_err(|why| format!("output {i}: {why}"))?;
        }
        Ok(())
    }

    /// Tells every rank what those along the merged mesh dims ask of each other.
    fn answer(
        &self,
        row: &Candidate,
        asked: &[Together],
        known: &mut [Vec<Array>],
    ) -> std::result::Result<(), String> {
        if asked.len() != self.meshes.len() {
            return Err("some ranks are done and others are not".into());
        }
        for (rank, mesh) in self.meshes.iter().enumerate() {
            let at = mesh.coordinate().unwrap_or_default();
            let same_line = |other: &usize| {
                let other = self.meshes[*other].coordinate().unwrap_or_default();
                (0..at.len()).all(|m| row.merged.contains(&m) || at[m] == other[m])
            };
            let line: Vec<usize> = (0..self.meshes.len()).filter(same_line).collect();
            let stacked = |of: &dyn Fn(&Together) -> Option<Array>| {
                let each = line.iter().map(|&r| of(&asked[r])).collect::<Option<Vec<Array>>>();
                let each = each.ok_or("ranks ask for different things")?;
                let each = each.iter().map(|x| x.unsqueeze(0));
                let each =
                    each.collect::<dtensor_array::Result<Vec<Array>>>().map_err(|error| error.to_string())?;
                cat::cat(&each.iter().collect::<Vec<_>>(), 0).map_err(|error| error.to_string())
            };
            match &asked[rank] {
                Together::Stack(parts) => {
                    for i in 0..parts.len() {
                        known[rank].push(stacked(&|other| match other {
                            Together::Stack(parts) => parts.get(i).cloned(),
                            _ => None,
                        })?);
                    }
                }
                Together::Reduce(_, op) => {
                    let all = stacked(&|other| match other {
                        Together::Reduce(part, same) if same == op => Some(part.clone()),
                        _ => None,
                    })?;
                    let reduced = reduce::reduce((*op).into(), &all, &[0], false);
                    known[rank].push(reduced.map_err(|error| error.to_string())?);
                }
                Together::Done(_) => return Err("some ranks are done and others are not".into()),
            }
        }
        Ok(())
    }

    /// Rows along one mesh dim that are not offered, tried.
    fn others(&self, offered: &[Candidate]) -> BTreeMap<String, (usize, usize)> {
        let n = self.sizes[0];
        let each = |meta: &Meta, ops: &[ReduceOp]| {
            let cut = (0..meta.shape.rank()).filter(|&d| meta.shape[d] >= n).map(|d| Shard(d as isize));
            let partial = ops.iter().filter(|_| meta.dtype.is_float()).map(|&op| Partial(op));
            std::iter::once(Replicate).chain(cut).chain(partial).collect::<Vec<Placement>>()
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
            let chosen = nth(&inputs, index);
            if chosen.iter().all(|&p| p == Replicate)
                || offered.iter().any(|row| starts(&row.inputs, &chosen))
            {
                continue;
            }
            for to in 0..outputs.iter().map(Vec::len).product() {
                let row = Candidate {
                    inputs: chosen.iter().map(|&p| SmallVec::from_elem(p, 1)).collect(),
                    outputs: nth(&outputs, to).iter().map(|&p| SmallVec::from_elem(p, 1)).collect(),
                    merged: SmallVec::new(),
                };
                if possible(&row, self.metas) && self.shapes_fit(&row) && !self.says_less(&row) {
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

    /// Whether an output is called partial that is simply the same on all ranks: the largest of equals is each of them.
    fn says_less(&self, row: &Candidate) -> bool {
        let idle = |list: &PlacementList| {
            matches!(list[..], [Partial(ReduceOp::Avg | ReduceOp::Max | ReduceOp::Min)])
        };
        let whole =
            |list: &PlacementList| if idle(list) { SmallVec::from_elem(Replicate, 1) } else { list.clone() };
        let outputs = row.outputs.iter().map(whole).collect();
        row.outputs.iter().any(idle)
            && self.run(&Candidate { inputs: row.inputs.clone(), outputs, merged: SmallVec::new() }).is_ok()
    }

    /// Whether the shape rule makes parts of the outputs of parts of the inputs.
    fn shapes_fit(&self, row: &Candidate) -> bool {
        self.meshes.iter().all(|mesh| {
            let (_, inputs) = parts_on(mesh, &row.inputs, self.metas);
            let (_, outputs) = parts_on(mesh, &row.outputs, self.outputs);
            self.op.shape(&inputs).is_ok_and(|made| made[..] == outputs[..])
        })
    }
}

/// How tensors lie on a mesh, and what a rank of it has of them.
fn parts_on(mesh: &DeviceMesh, lists: &[PlacementList], metas: &[Meta]) -> (Vec<Arc<Spec>>, Vec<Meta>) {
    let spec = |(placements, meta): (&PlacementList, &Meta)| {
        mesh.planner().intern(SpecKey { placements: placements.clone(), shape: meta.shape.clone() })
    };
    let specs: Vec<Arc<Spec>> = lists.iter().zip(metas).map(spec).collect();
    let part = |(spec, meta): (&Arc<Spec>, &Meta)| Meta { shape: spec.local.clone(), ..meta.clone() };
    let parts = specs.iter().zip(metas).map(part).collect();
    (specs, parts)
}

/// Whether tensors of these dtypes can lie so: there is no average of integers, and integers have no parts of a product.
fn possible(row: &Candidate, metas: &[Meta]) -> bool {
    let fits = |(list, meta): (&PlacementList, &Meta)| {
        list.iter().all(|p| !matches!(p, Partial(ReduceOp::Avg | ReduceOp::Product)) || meta.dtype.is_float())
    };
    row.inputs.iter().zip(metas).all(fits)
}

/// Whether summands take part. With infinities, a sum of products need not be the product of a sum: that is how floats are.
fn sums(row: &Candidate) -> bool {
    let lists = row.inputs.iter().flatten();
    lists.into_iter().any(|p| matches!(p, Partial(ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product)))
}

/// Notes what a rank has made, if it is of the shapes promised.
fn collect(
    results: &mut [Vec<Numbers>],
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
        result.push(Numbers::of(value).map_err(|error| error.to_string())?);
    }
    Ok(())
}

fn starts(lists: &[PlacementList], chosen: &[Placement]) -> bool {
    lists.iter().zip(chosen).all(|(list, p)| list[..] == [*p])
}

/// The n-th combination of one of each.
fn nth(choices: &[Vec<Placement>], mut index: usize) -> Vec<Placement> {
    let pick = |list: &Vec<Placement>| {
        let chosen = list[index % list.len()];
        index /= list.len();
        chosen
    };
    choices.iter().map(pick).collect()
}
