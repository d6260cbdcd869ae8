//! Chooses the layouts on which an operator runs: of all candidates that its rule allows, the cheapest.
//!
//! The order of preference: no input changes; inputs change without communication; results are merged instead of inputs gathered;
//! the cheapest redistribution, where partial outputs count as if they were reduced too; and last, candidates that gather a dim
//! that must stay sharded. Among equals the first candidate wins. Replicated inputs come first, then sharded factors in the order
//! of the rule, then partial values.

use std::sync::Arc;

use dtensor_array::{Meta, ReduceOp, Shape};
use smallvec::SmallVec;

use crate::placement::{format_list, incompatible_partials};
use crate::rule::{FactorKind, Rule, TensorFactors};
use crate::{
    Error, MeshDims, Partial, Placement, PlacementList, Plan, Planner, Replicate, Result, Shard, Spec,
    SpecKey, StridedShard,
};

/// The input of a decision: an operator, its rule, and its inputs.
#[derive(Debug)]
pub struct Question {
    /// The operator's name, for errors.
    pub op: &'static str,
    /// Its rule.
    pub rule: Rule,
    /// Shape and dtype of the full inputs.
    pub inputs: SmallVec<[Meta; 2]>,
    /// Shape and dtype of the full outputs.
    pub outputs: SmallVec<[Meta; 1]>,
    /// The specs of the inputs.
    pub specs: SmallVec<[Arc<Spec>; 4]>,
}

/// How an operator runs on inputs of given specs. Made by [`Planner::decide`].
#[derive(Debug)]
pub struct Decision {
    /// Shape and dtype of the full inputs.
    pub inputs: SmallVec<[Meta; 2]>,
    /// The spec that each input must have. Not a layout with its mesh, because meshes cache decisions and would own themselves.
    pub specs: SmallVec<[Arc<Spec>; 2]>,
    /// The inputs that must be redistributed, and the plan for each.
    pub moved: SmallVec<[(usize, Arc<Plan>); 2]>,
    /// Shape and dtype of the full outputs.
    pub outputs: SmallVec<[Meta; 1]>,
    /// Shape and dtype of this rank's shards of the outputs.
    pub shards: SmallVec<[Meta; 1]>,
    /// The specs of the outputs.
    pub out_specs: SmallVec<[Arc<Spec>; 1]>,
    /// The mesh dims along which the ranks merge their results.
    pub merged: MeshDims,
}

/// How the operator is distributed along one mesh dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// All inputs are replicated.
    Replicate,
    /// A factor is sharded, with this split factor.
    Shard { factor: usize, split: usize },
    /// The inputs of a partial rule are partial, with this reduction. `rule` is its number.
    Partial { rule: usize, op: ReduceOp },
}

/// The cost of a candidate. Lower is better, compared field by field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Price {
    class: PriceClass,
    /// The cost of redistributing the inputs, plus that of reducing partial outputs later.
    total: u64,
    /// The cost of redistributing the inputs.
    now: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PriceClass {
    /// No input changes.
    Unchanged,
    /// Inputs change without communication.
    Free,
    /// Results are merged. No input needs communication.
    Merged,
    /// Inputs are redistributed.
    Redistributed,
    /// A dim that must stay sharded is gathered.
    Gathered,
}

/// One way to run an operator: the placements of all inputs and outputs.
#[derive(Debug)]
pub struct Candidate {
    /// The placements of each input.
    pub inputs: SmallVec<[PlacementList; 4]>,
    /// The placements of each output.
    pub outputs: SmallVec<[PlacementList; 2]>,
    /// The mesh dims along which the ranks merge their results.
    pub merged: MeshDims,
}

/// Lists all candidates of a rule on a mesh of these sizes, for any placements of the inputs.
pub fn candidates(rule: &Rule, sizes: &[usize]) -> Vec<Candidate> {
    let mut choices = vec![Choice::Replicate];
    for (number, factor) in rule.factors.iter().enumerate().filter(|(_, f)| f.kind != FactorKind::Unsharded) {
        let splits = if factor.contiguous { 1..=1 } else { 1..=2 };
        choices.extend(splits.map(|split| Choice::Shard { factor: number, split }));
    }
    for (number, partial) in rule.partial_rules.iter().enumerate() {
        choices.extend(partial.ops.iter().map(|&(op, _)| Choice::Partial { rule: number, op }));
    }
    let mut all = vec![Vec::new()];
    for _ in sizes {
        let longer = |list: Vec<Choice>| choices.clone().into_iter().map(move |c| [&list[..], &[c]].concat());
        all = all.into_iter().flat_map(longer).collect();
    }
    let found = all.iter().filter_map(|list| candidate(rule, sizes, list));
    found
        .filter(|c| {
            c.inputs.iter().chain(&c.outputs).all(|placements| incompatible_partials(placements).is_none())
        })
        .collect()
}

/// Chooses the cheapest candidate of a rule.
#[cold]
pub(crate) fn choose(planner: &Planner, question: Question) -> Result<Decision> {
    let Question { op, rule, inputs, outputs, specs: given } = question;
    check(op, &rule, &inputs, &outputs)?;
    let sizes = planner.mesh().shape();
    let stays = dims_that_stay_sharded(&rule, &given, sizes);
    let chooser =
        Chooser { rule: &rule, planner, sizes, inputs: &inputs, outputs: &outputs, given: &given, stays };
    let (candidate, price) = chooser.best();
    if rule.strict && price.class > PriceClass::Free {
        return Err(chooser.strict_error(op, &candidate));
    }
    let spec = |(placements, meta): (&PlacementList, &Meta)| chooser.spec(placements, meta);
    let specs: SmallVec<[Arc<Spec>; 2]> = candidate.inputs.iter().zip(&inputs).map(spec).collect();
    let changed = (0..inputs.len()).filter(|&i| candidate.inputs[i] != given[i].key.placements);
    let moved = changed.map(|i| (i, planner.plan(&given[i], &specs[i], inputs[i].dtype))).collect();
    let out_specs: SmallVec<[Arc<Spec>; 1]> = candidate.outputs.iter().zip(&outputs).map(spec).collect();
    let shard = |(meta, spec): (&Meta, &Arc<Spec>)| Meta { shape: spec.local.clone(), ..meta.clone() };
    let shards = outputs.iter().zip(&out_specs).map(shard).collect();
    Ok(Decision { inputs, specs, moved, outputs, shards, out_specs, merged: candidate.merged })
}

/// Returns an error if a rule does not fit the operator's tensors: their number and their numbers of dims.
pub fn check(op: &'static str, rule: &Rule, inputs: &[Meta], outputs: &[Meta]) -> Result<()> {
    let fits = |tensors: &[TensorFactors], metas: &[Meta]| {
        tensors.len() == metas.len() && tensors.iter().zip(metas).all(|(t, m)| t.len() == m.shape.ndim())
    };
    if fits(&rule.inputs, inputs) && fits(&rule.outputs, outputs) {
        return Ok(());
    }
    let message = "the sharding rule does not fit the operator's tensors: build it from the metas passed to the function";
    Err(Error::argument(op, message))
}

/// The largest number of candidates that are all tried.
const MAX_EXHAUSTIVE: usize = 1 << 10;

/// The best candidate so far.
struct Best<'a> {
    chooser: &'a Chooser<'a>,
    choices: &'a [SmallVec<[Choice; 4]>],
    found: Option<(Candidate, Price)>,
}

impl Best<'_> {
    /// Prices the candidate that makes choice number `at[m]` along each mesh dim `m`. Returns true if it is the best so far.
    fn consider(&mut self, at: &[usize]) -> bool {
        let chooser = self.chooser;
        let chosen: SmallVec<[Choice; 4]> = at.iter().zip(self.choices).map(|(&i, list)| list[i]).collect();
        let Some(candidate) = candidate(chooser.rule, chooser.sizes, &chosen) else { return false };
        let Some(price) = chooser.price(&candidate) else { return false };
        // If two candidates leave all inputs unchanged, they differ only in `Rule::preferred`, and the later one follows it.
        let unchanged = price.class == PriceClass::Unchanged;
        let better =
            self.found.as_ref().is_none_or(|(_, least)| price < *least || (price == *least && unchanged));
        if better {
            self.found = Some((candidate, price));
        }
        better
    }
}

struct Chooser<'a> {
    rule: &'a Rule,
    planner: &'a Planner,
    /// The sizes of the mesh dims.
    sizes: &'a [usize],
    inputs: &'a [Meta],
    outputs: &'a [Meta],
    /// The specs of the inputs.
    given: &'a [Arc<Spec>],
    /// The mesh dims that shard a factor that must stay sharded.
    stays: MeshDims,
}

/// Returns the mesh dims along which an input shards a factor that [must stay sharded](Rule::merging_along).
fn dims_that_stay_sharded(rule: &Rule, given: &[Arc<Spec>], sizes: &[usize]) -> MeshDims {
    let mut dims = MeshDims::new();
    let merging = |factor: usize| rule.factors[factor].kind == FactorKind::Merging;
    if rule.merge_bytes > 0 || !(0..rule.factors.len()).any(merging) {
        return dims;
    }
    for (factors, spec) in rule.inputs.iter().zip(given) {
        for (m, choice) in shard_choices(rule, factors, spec, sizes).into_iter().enumerate() {
            if matches!(choice, Some(Choice::Shard { factor, .. }) if merging(factor)) && !dims.contains(&m) {
                dims.push(m);
            }
        }
    }
    dims
}

impl Chooser<'_> {
    /// Returns the spec of a tensor with these placements, which are checked.
    fn spec(&self, placements: &PlacementList, meta: &Meta) -> Arc<Spec> {
        self.planner.intern(SpecKey { placements: placements.clone(), shape: meta.shape.clone() })
    }

    /// Returns the best candidate and its price.
    fn best(&self) -> (Candidate, Price) {
        let choices = self.choices();
        let mut best = Best { chooser: self, choices: &choices, found: None };
        let mut at: MeshDims = SmallVec::from_elem(0, choices.len());
        if choices
            .iter()
            .try_fold(1usize, |n, list| n.checked_mul(list.len()))
            .is_none_or(|n| n > MAX_EXHAUSTIVE)
        {
            // There are too many candidates to try them all, so improve one mesh dim at a time, in two passes.
            best.consider(&at);
            for _ in 0..2 {
                for m in 0..at.len() {
                    let better = (0..choices[m].len()).filter(|&i| {
                        let mut tried = at.clone();
                        tried[m] = i;
                        best.consider(&tried)
                    });
                    if let Some(i) = better.last() {
                        at[m] = i;
                    }
                }
            }
        } else {
            loop {
                best.consider(&at);
                // The last mesh dim varies fastest.
                let Some(m) = (0..at.len()).rev().find(|&m| at[m] + 1 < choices[m].len()) else { break };
                at[m] += 1;
                at[m + 1..].fill(0);
            }
        }
        // The first candidate replicates all inputs, which is always possible.
        best.found.expect("replicating all inputs is always possible")
    }

    /// Returns the choices along each mesh dim. A factor is a choice only along mesh dims where an input already shards it. So a
    /// partial value is not reduce-scattered unless another input is sharded like that.
    fn choices(&self) -> SmallVec<[SmallVec<[Choice; 4]>; 4]> {
        let mut lists: SmallVec<[SmallVec<[Choice; 4]>; 4]> =
            SmallVec::from_elem(SmallVec::from_elem(Choice::Replicate, 1), self.sizes.len());
        for (factors, spec) in self.rule.inputs.iter().zip(self.given) {
            for (list, choice) in lists.iter_mut().zip(shard_choices(self.rule, factors, spec, self.sizes)) {
                if let Some(choice) = choice
                    && !list.contains(&choice)
                {
                    list.push(choice);
                }
            }
        }
        for &(m, factor) in &self.rule.preferred {
            lists[m].push(Choice::Shard { factor, split: 1 });
        }
        for list in &mut lists {
            list[1..].sort_by_key(|choice| match *choice {
                Choice::Shard { factor, split } => (factor, split),
                _ => (0, 0),
            });
        }
        for (rule, partial) in self.rule.partial_rules.iter().enumerate() {
            for (list, m) in lists.iter_mut().zip(0..) {
                for &(op, _) in &partial.ops {
                    let is_partial = |i: usize| self.given[i].key.placements[m] == Partial(op);
                    let inputs = partial.inputs | self.rule.addends;
                    if (0..self.given.len()).any(|i| has_bit(inputs, i) && is_partial(i)) {
                        list.push(Choice::Partial { rule, op });
                    }
                }
            }
        }
        lists
    }

    /// Returns the price of a candidate, or `None` if it is not possible or not worth it.
    fn price(&self, candidate: &Candidate) -> Option<Price> {
        let mut now = 0u64;
        let mut unchanged = true;
        for ((placements, meta), given) in candidate.inputs.iter().zip(self.inputs).zip(self.given) {
            if *placements == given.key.placements {
                continue;
            }
            unchanged = false;
            if incompatible_partials(placements).is_some() {
                return None;
            }
            let to = self.spec(placements, meta);
            let cost = self.planner.plan(given, &to, meta.dtype).picos();
            if cost > 0 && !fills_all_ranks(placements, &meta.shape, self.sizes) {
                return None;
            }
            now = now.saturating_add(cost);
        }
        if !candidate.merged.is_empty() && self.merged_bytes(candidate) > self.gathered_bytes(candidate) {
            return None;
        }
        let mut total = now;
        for (placements, meta) in candidate.outputs.iter().zip(self.outputs) {
            if incompatible_partials(placements).is_some() {
                return None;
            }
            if now > 0 && placements.iter().any(|p| p.is_partial()) {
                let partial = self.spec(placements, meta);
                let reduced = self.planner.intern(partial.key.without_partials());
                let later = self.planner.plan(&partial, &reduced, meta.dtype).picos();
                total = total.saturating_add(later);
            }
        }
        let class = match (now, unchanged, candidate.merged.is_empty()) {
            _ if self.stays.iter().any(|m| !candidate.merged.contains(m)) => PriceClass::Gathered,
            (0, true, true) => PriceClass::Unchanged,
            (0, false, true) => PriceClass::Free,
            (0, _, false) => PriceClass::Merged,
            _ => PriceClass::Redistributed,
        };
        Some(Price { class, total, now })
    }

    /// Returns how many bytes a rank sends to merge results.
    fn merged_bytes(&self, candidate: &Candidate) -> usize {
        let ranks: usize = candidate.merged.iter().map(|&m| self.sizes[m]).product();
        let elements = self.spec(&candidate.outputs[0], &self.outputs[0]).largest(self.sizes);
        elements.saturating_mul(self.rule.merge_bytes).saturating_mul(ranks - 1)
    }

    /// Returns how many bytes a rank sends to gather the inputs instead of merging results.
    fn gathered_bytes(&self, candidate: &Candidate) -> usize {
        let bytes = |(placements, meta): (&PlacementList, &Meta)| {
            let mut gathered = placements.clone();
            candidate.merged.iter().for_each(|&m| gathered[m] = Replicate);
            self.planner.plan(&self.spec(placements, meta), &self.spec(&gathered, meta), meta.dtype).bytes()
        };
        candidate.inputs.iter().zip(self.inputs).map(bytes).sum()
    }

    /// Returns the error of a strict operator that needs redistribution. It names the placements to redistribute to.
    fn strict_error(&self, op: &'static str, candidate: &Candidate) -> Error {
        let (given, needed) = (&self.given[0].key.placements, &candidate.inputs[0]);
        let is_sharded = |dim: usize| given.iter().any(|p| p.sharded_dim().is_some_and(|(d, _)| d == dim));
        let composed = self.rule.inputs[0].iter().enumerate().any(|(d, dim)| is_sharded(d) && dim.len() > 1);
        let what = if composed { "unflatten" } else { "flatten" };
        let message = format!(
            "cannot {what} a tensor that is sharded {} this way: {} to {} requires redistribution. Please redistribute the \
             input to {} first, or use `reshape`, which does",
            format_list(given),
            self.inputs[0].shape,
            self.outputs[0].shape,
            format_list(needed),
        );
        Error::argument(op, message)
    }
}

/// Returns true if the i-th bit is set.
fn has_bit(bits: u32, i: usize) -> bool {
    bits.checked_shr(i as u32).unwrap_or(0) & 1 == 1
}

/// Returns true if every sharded dim has at least as many indices as there are ranks that shard it.
fn fills_all_ranks(placements: &[Placement], shape: &Shape, sizes: &[usize]) -> bool {
    let ranks = |dim: usize| {
        let along =
            placements.iter().zip(sizes).filter(move |(p, _)| p.sharded_dim().is_some_and(|(d, _)| d == dim));
        along.map(|(_, size)| size).product::<usize>()
    };
    (0..shape.ndim()).all(|dim| ranks(dim) == 1 || ranks(dim) <= shape[dim])
}

/// Returns, for each mesh dim, which factor an input shards along it. `None` if it shards none, or one that must not be sharded so.
fn shard_choices(
    rule: &Rule,
    factors: &TensorFactors,
    spec: &Spec,
    sizes: &[usize],
) -> SmallVec<[Option<Choice>; 4]> {
    let mut lens: SmallVec<[usize; 8]> = rule.factors.iter().map(|f| f.size).collect();
    let found = spec.key.placements.iter().zip(sizes).map(|(placement, &n)| {
        let (dim, split) = placement.sharded_dim()?;
        let dim = &factors[dim];
        let (factor, split) = match dim[..] {
            [factor] => (factor, split),
            _ => {
                // In a dim of several factors, the split factor tells which factor is sharded: the one whose outer factors
                // have that many indices together. A factor that is down to one index is skipped, unless it is the last.
                let before = |at: usize| dim[..at].iter().map(|&f| lens[f]).product::<usize>();
                let is_sharded =
                    |&at: &usize| before(at) == split && (lens[dim[at]] > 1 || at + 1 == dim.len());
                ((0..dim.len()).find(is_sharded).map(|at| dim[at])?, 1)
            }
        };
        lens[factor] = lens[factor].div_ceil(n);
        let unsharded = rule.factors[factor].kind == FactorKind::Unsharded;
        let not_contiguous = rule.factors[factor].contiguous && split > 1;
        (!unsharded && !not_contiguous).then_some(Choice::Shard { factor, split })
    });
    found.collect()
}

/// Returns the placements that result from one choice per mesh dim, or `None` if no placements express them.
fn candidate(rule: &Rule, sizes: &[usize], choices: &[Choice]) -> Option<Candidate> {
    let mut merged = MeshDims::new();
    for (m, choice) in choices.iter().enumerate() {
        if let Choice::Shard { factor, .. } = *choice
            && rule.factors[factor].kind == FactorKind::Merging
        {
            merged.push(m);
        }
    }
    let input = |(i, factors): (usize, &TensorFactors)| {
        placements(rule, factors, sizes, choices, |choice| match choice {
            Choice::Replicate => Replicate,
            Choice::Shard { factor, .. } => match rule.factors[factor].kind {
                FactorKind::Reducing(op) if has_bit(rule.addends, i) => Partial(op),
                _ => Replicate,
            },
            Choice::Partial { rule: number, op } => {
                let partial = has_bit(rule.partial_rules[number].inputs | rule.addends, i);
                if partial { Partial(op) } else { Replicate }
            }
        })
    };
    let output = |factors: &TensorFactors| {
        placements(rule, factors, sizes, choices, |choice| match choice {
            Choice::Replicate => Replicate,
            Choice::Shard { factor, .. } => match rule.factors[factor].kind {
                FactorKind::Reducing(op) => Partial(op),
                _ => Replicate,
            },
            Choice::Partial { rule: number, op } => {
                let to = rule.partial_rules[number].ops.iter().find(|(from, _)| *from == op);
                Partial(to.map_or(op, |&(_, to)| to))
            }
        })
    };
    Some(Candidate {
        inputs: rule.inputs.iter().enumerate().map(input).collect::<Option<_>>()?,
        outputs: rule.outputs.iter().map(output).collect::<Option<_>>()?,
        merged,
    })
}

/// Returns the placements of one tensor: shards along the chosen factors that it has, and `other(choice)` along all other mesh
/// dims.
fn placements(
    rule: &Rule,
    tensor: &TensorFactors,
    sizes: &[usize],
    choices: &[Choice],
    other: impl Fn(Choice) -> Placement,
) -> Option<PlacementList> {
    let mut lens: SmallVec<[usize; 8]> = rule.factors.iter().map(|f| f.size).collect();
    let along = |(&choice, &n): (&Choice, &usize)| -> Option<Placement> {
        let Choice::Shard { factor, split } = choice else { return Some(other(choice)) };
        let found = tensor.iter().enumerate().find_map(|(dim, factors)| {
            factors.iter().position(|&f| f == factor).map(|at| (dim as isize, at, factors))
        });
        let len = lens[factor];
        lens[factor] = len.div_ceil(n);
        let Some((dim, at, factors)) = found else { return Some(other(choice)) };
        // A shard of a factor with others inside it is a (strided) shard of the dim only if all ranks have equally many indices.
        if factors.len() > 1 && (split > 1 || (at + 1 < factors.len() && !len.is_multiple_of(n))) {
            return None;
        }
        let before: usize = factors[..at].iter().map(|&f| lens[f]).product();
        Some(match before * split {
            1 => Shard(dim),
            split_factor => StridedShard { dim, split_factor },
        })
    };
    choices.iter().zip(sizes).map(along).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mesh;
    use dtensor_array::{DType, Device};

    /// Returns the placements of inputs and outputs that the chooser picks.
    fn chosen(
        rule: impl Fn(&[Meta], &[Meta]) -> Result<Rule>,
        x: &[(&[usize], Placement)],
        out: &[usize],
    ) -> String {
        let planner = Planner::new(Mesh::new([4], ()).unwrap().seen_from(1));
        let meta = |dims: &[usize]| Meta { shape: dims.into(), dtype: DType::F32, device: Device::Cpu };
        let inputs: SmallVec<[Meta; 2]> = x.iter().map(|(dims, _)| meta(dims)).collect();
        let outputs: SmallVec<[Meta; 1]> = SmallVec::from_elem(meta(out), 1);
        let specs = x.iter().map(|(dims, p)| planner.spec("test", [*p], *dims).unwrap()).collect();
        let rule = rule(&inputs, &outputs).unwrap();
        let decision = choose(&planner, Question { op: "test", rule, inputs, outputs, specs }).unwrap();
        let shown = |specs: &[Arc<Spec>]| {
            specs.iter().map(|spec| spec.key.placements[0].to_string()).collect::<Vec<_>>().join(", ")
        };
        format!("{} -> {}", shown(&decision.specs), shown(&decision.out_specs))
    }

    #[test]
    fn inputs_keep_their_placements_if_possible() {
        let mm = |x: &[Meta], out: &[Meta]| Rule::of("m k, k n -> m n", x, out);
        let of = |a, b| chosen(mm, &[(&[8, 8], a), (&[8, 8], b)], &[8, 8]);
        assert_eq!(of(Shard(1), Shard(0)), "S(1), S(0) -> P(sum)");
        assert_eq!(of(Replicate, Shard(0)), "S(1), S(0) -> P(sum)");
        assert_eq!(of(Shard(0), Shard(0)), "S(0), R -> S(0)");
        // A strided shard works like a shard.
        let strided = StridedShard { dim: 0, split_factor: 2 };
        assert_eq!(of(strided, Replicate), "_S(0, 2), R -> _S(0, 2)");
    }

    #[test]
    fn dims_with_fewer_indices_than_ranks_are_not_sharded() {
        let add = |x: &[Meta], out: &[Meta]| Rule::pointwise(x, out);
        assert_eq!(chosen(add, &[(&[3], Shard(0)), (&[3], Shard(0))], &[3]), "S(0), S(0) -> S(0)");
        assert_eq!(chosen(add, &[(&[3], Shard(0)), (&[3], Partial(ReduceOp::Sum))], &[3]), "R, R -> R");
        assert_eq!(
            chosen(add, &[(&[5], Shard(0)), (&[5], Partial(ReduceOp::Sum))], &[5]),
            "S(0), S(0) -> S(0)"
        );
        // They are sharded if this needs no communication.
        assert_eq!(chosen(add, &[(&[3], Shard(0)), (&[3], Replicate)], &[3]), "S(0), S(0) -> S(0)");
    }

    #[test]
    fn a_merging_factor_stays_sharded_at_any_cost() {
        let loss = |x: &[Meta], out: &[Meta]| Rule::of("n c, n -> n", x, out)?.merging_along("c");
        let of = |logits, target| chosen(loss, &[(&[64, 4], logits), (&[64], target)], &[64]);
        assert_eq!(of(Shard(1), Replicate), "S(1), R -> R");
        assert_eq!(of(Shard(1), Shard(0)), "S(1), R -> R");
        assert_eq!(of(Shard(0), Shard(0)), "S(0), S(0) -> S(0)");
        let strided = StridedShard { dim: 1, split_factor: 2 };
        assert_eq!(of(strided, Shard(0)), "_S(1, 2), R -> R");
        // A strided factor is redistributed if the rule needs contiguous shards.
        let ranges =
            |x: &[Meta], out: &[Meta]| Rule::of("n c, n -> n", x, out)?.merging_along("c")?.contiguous("c");
        let of = |logits, target| chosen(ranges, &[(&[64, 4], logits), (&[64], target)], &[64]);
        assert_eq!(of(Shard(1), Shard(0)), "S(1), R -> R");
        assert_eq!(of(strided, Shard(0)), "S(0), S(0) -> S(0)");
    }

    #[test]
    fn outputs_are_sharded_as_preferred() {
        let add = |preferred: Placement| {
            move |x: &[Meta], out: &[Meta]| {
                Rule::of("i, i n -> v n", x, out)?.preferring("v", 0, &[preferred])
            }
        };
        let of = |preferred, ids| chosen(add(preferred), &[(&[8], ids), (&[8, 4], ids)], &[16, 4]);
        assert_eq!(of(Shard(0), Replicate), "R, R -> S(0)");
        assert_eq!(of(Shard(1), Replicate), "R, R -> R");
        assert_eq!(of(Shard(0), Shard(0)), "S(0), S(0) -> P(sum)");
    }

    /// On a mesh of many dims not all candidates are tried, but inputs still keep their placements if possible.
    #[test]
    fn many_mesh_dims_are_chosen_one_at_a_time() {
        let planner = Planner::new(Mesh::new([2; 8], ()).unwrap().seen_from(7));
        let meta = Meta { shape: [256, 256].into(), dtype: DType::F32, device: Device::Cpu };
        let (inputs, outputs) = (SmallVec::from_elem(meta.clone(), 2), SmallVec::from_elem(meta, 1));
        let decide = |specs: [&Arc<Spec>; 2]| {
            let (inputs, outputs): (SmallVec<[Meta; 2]>, SmallVec<[Meta; 1]>) =
                (inputs.clone(), outputs.clone());
            let rule = Rule::of("m k, k n -> m n", &inputs, &outputs).unwrap();
            let specs = specs.into_iter().cloned().collect();
            choose(&planner, Question { op: "test", rule, inputs, outputs, specs })
        };
        let layout = |placements: [Placement; 8]| planner.spec("test", placements, [256, 256]).unwrap();
        let (r, p) = (Replicate, Partial(ReduceOp::Sum));
        let a = layout([Shard(0), Shard(1), r, Shard(1), Shard(0), Shard(1), r, Shard(0)]);
        let b = layout([r, Shard(0), Shard(1), Shard(0), r, Shard(0), Shard(1), r]);
        let decision = decide([&a, &b]).unwrap();
        assert!(decision.moved.is_empty());
        let expected = [Shard(0), p, Shard(1), p, Shard(0), p, Shard(1), Shard(0)];
        assert_eq!(decision.out_specs[0].key.placements[..], expected);
        // Two inputs whose placements contradict each other.
        let c = layout([Shard(1), Shard(1), r, Shard(1), Shard(0), Shard(1), Shard(0), Shard(0)]);
        assert!(decide([&c, &c]).is_ok());
    }
}
