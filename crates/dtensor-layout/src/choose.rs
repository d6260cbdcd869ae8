//! The layouts an operator is run on: of all that its rule allows, those that cost least to bring the inputs to.
//!
//! In this order: nothing has to change; only changes that move nothing; results are brought together instead
//! of inputs; the cheapest, where outputs that will still have to be reduced count as if they were; and last
//! what uncuts a dim that is to stay cut. Among equals the first one: whole inputs come first, then factors
//! in the order of the rule, then partial values.

use std::sync::Arc;

use dtensor_array::{Meta, ReduceOp, Shape};
use smallvec::SmallVec;

use crate::placement::{clashing, shown};
use crate::rule::{Carried, Kind, Rule};
use crate::{
    Error, MeshDims, Partial, Placement, PlacementList, Plan, Planner, Replicate, Result, Shard, Spec,
    SpecKey, StridedShard,
};

/// What has to be decided: an operator with its rule, on these inputs.
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

/// How an operator is run on inputs of given specs.
#[derive(Debug)]
pub struct Decision {
    /// Shape and dtype of the full inputs.
    pub inputs: SmallVec<[Meta; 2]>,
    /// The spec that each input has to have. Not layouts: a mesh remembers decisions, and must not keep itself alive.
    pub specs: SmallVec<[Arc<Spec>; 2]>,
    /// The inputs that do not have it yet, and how to redistribute each.
    pub moved: SmallVec<[(usize, Arc<Plan>); 2]>,
    /// Shape and dtype of the full outputs.
    pub outputs: SmallVec<[Meta; 1]>,
    /// Shape and dtype of this rank's shards of the outputs.
    pub shards: SmallVec<[Meta; 1]>,
    /// The specs of the outputs.
    pub out_specs: SmallVec<[Arc<Spec>; 1]>,
    /// The mesh dims along which ranks find out the outputs together.
    pub merged: MeshDims,
}

/// What happens along one mesh dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// All inputs are whole.
    Whole,
    /// A factor is cut; its indices first into `split` pieces.
    Cut { factor: usize, split: usize },
    /// The partial values of a flow of the rule go through.
    Flow { flow: usize, op: ReduceOp },
}

/// What one candidate comes to. Less is better, from the first field on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Price {
    class: Class,
    /// What the inputs cost, and what outputs will that are left partial.
    total: u64,
    /// What the inputs cost alone.
    now: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    AsItIs,
    Free,
    Merged,
    Moved,
    /// What is to stay cut is brought together.
    Uncut,
}

/// One way to run an operator: the placements of all inputs and outputs.
#[derive(Debug)]
pub struct Candidate {
    /// Those of the inputs.
    pub inputs: SmallVec<[PlacementList; 4]>,
    /// Those of the outputs.
    pub outputs: SmallVec<[PlacementList; 2]>,
    /// The mesh dims along which ranks find out the outputs together.
    pub merged: MeshDims,
}

/// Lists all that a rule offers on a mesh of these sizes, whatever the inputs.
pub fn candidates(rule: &Rule, sizes: &[usize]) -> Vec<Candidate> {
    let mut choices = vec![Choice::Whole];
    for (factor, known) in rule.factors.iter().enumerate().filter(|(_, f)| f.kind != Kind::Whole) {
        let splits = if known.contiguous { 1..=1 } else { 1..=2 };
        choices.extend(splits.map(|split| Choice::Cut { factor, split }));
    }
    for (flow, row) in rule.flows.iter().enumerate() {
        choices.extend(row.ops.iter().map(|&(op, _)| Choice::Flow { flow, op }));
    }
    let mut all = vec![Vec::new()];
    for _ in sizes {
        let longer = |list: Vec<Choice>| choices.clone().into_iter().map(move |c| [&list[..], &[c]].concat());
        all = all.into_iter().flat_map(longer).collect();
    }
    let found = all.iter().filter_map(|list| candidate(rule, sizes, list));
    found
        .filter(|c| c.inputs.iter().chain(&c.outputs).all(|placements| clashing(placements).is_none()))
        .collect()
}

/// Chooses the cheapest way that a rule offers.
#[cold]
pub(crate) fn choose(planner: &Planner, question: Question) -> Result<Decision> {
    let Question { op, rule, inputs, outputs, specs: given } = question;
    check(op, &rule, &inputs, &outputs)?;
    let sizes = planner.mesh().shape();
    let stays = stays_cut(&rule, &given, sizes);
    let chooser =
        Chooser { rule: &rule, planner, sizes, inputs: &inputs, outputs: &outputs, given: &given, stays };
    let (candidate, price) = chooser.best();
    if rule.strict && price.class > Class::Free {
        return Err(chooser.refused(op, &candidate));
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

/// Returns an error for a rule that is for other tensors than these: it would be read out of bounds.
pub fn check(op: &'static str, rule: &Rule, inputs: &[Meta], outputs: &[Meta]) -> Result<()> {
    let fits = |carried: &[Carried], metas: &[Meta]| {
        carried.len() == metas.len() && carried.iter().zip(metas).all(|(c, m)| c.len() == m.shape.rank())
    };
    if fits(&rule.inputs, inputs) && fits(&rule.outputs, outputs) {
        return Ok(());
    }
    let message = "the sharding rule is for other tensors than the operator has: use the metas it is given";
    Err(Error::argument(op, message))
}

/// How many candidates are all tried.
const LIMIT: usize = 1 << 10;

/// The best candidate so far.
struct Best<'a> {
    chooser: &'a Chooser<'a>,
    choices: &'a [SmallVec<[Choice; 4]>],
    found: Option<(Candidate, Price)>,
}

impl Best<'_> {
    /// Whether this one of the choices of each mesh dim is better.
    fn consider(&mut self, at: &[usize]) -> bool {
        let chooser = self.chooser;
        let chosen: SmallVec<[Choice; 4]> = at.iter().zip(self.choices).map(|(&i, list)| list[i]).collect();
        let Some(candidate) = candidate(chooser.rule, chooser.sizes, &chosen) else { return false };
        let Some(price) = chooser.price(&candidate) else { return false };
        // Inputs that can stay can only stay in another way if outputs are cut where it was wished for.
        let wished = price.class == Class::AsItIs;
        let better =
            self.found.as_ref().is_none_or(|(_, least)| price < *least || (price == *least && wished));
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
    /// The mesh dims that cut what is to stay cut.
    stays: MeshDims,
}

/// The mesh dims along which an input is cut that is [to stay so](Rule::merging_along).
fn stays_cut(rule: &Rule, given: &[Arc<Spec>], sizes: &[usize]) -> MeshDims {
    let mut dims = MeshDims::new();
    if rule.merged_item > 0 || rule.factors.iter().all(|factor| factor.kind != Kind::Merging) {
        return dims;
    }
    for (carried, spec) in rule.inputs.iter().zip(given) {
        for (m, cut) in decode(rule, carried, spec, sizes).into_iter().enumerate() {
            if matches!(cut, Some(Choice::Cut { factor, .. }) if rule.factors[factor].kind == Kind::Merging)
                && !dims.contains(&m)
            {
                dims.push(m);
            }
        }
    }
    dims
}

impl Chooser<'_> {
    fn spec(&self, placements: &PlacementList, meta: &Meta) -> Arc<Spec> {
        self.planner.intern(SpecKey { placements: placements.clone(), shape: meta.shape.clone() })
    }

    fn best(&self) -> (Candidate, Price) {
        let choices = self.choices();
        let mut best = Best { chooser: self, choices: &choices, found: None };
        let mut at: MeshDims = SmallVec::from_elem(0, choices.len());
        if choices.iter().try_fold(1usize, |n, list| n.checked_mul(list.len())).is_none_or(|n| n > LIMIT) {
            // Too many to try them all: mesh dim by mesh dim, while that helps.
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
        // All inputs whole is always possible.
        best.found.expect("the first candidate is possible")
    }

    /// What may happen along each mesh dim. Nothing is cut that is not cut so already somewhere: a value that has to be
    /// reduced is not scattered unless another one is.
    fn choices(&self) -> SmallVec<[SmallVec<[Choice; 4]>; 4]> {
        let mut lists: SmallVec<[SmallVec<[Choice; 4]>; 4]> =
            SmallVec::from_elem(SmallVec::from_elem(Choice::Whole, 1), self.sizes.len());
        for (carried, spec) in self.rule.inputs.iter().zip(self.given) {
            for (list, cut) in lists.iter_mut().zip(decode(self.rule, carried, spec, self.sizes)) {
                if let Some(cut) = cut
                    && !list.contains(&cut)
                {
                    list.push(cut);
                }
            }
        }
        for &(m, factor) in &self.rule.wanted {
            lists[m].push(Choice::Cut { factor, split: 1 });
        }
        for list in &mut lists {
            list[1..].sort_by_key(|choice| match *choice {
                Choice::Cut { factor, split } => (factor, split),
                _ => (0, 0),
            });
        }
        for (flow, row) in self.rule.flows.iter().enumerate() {
            for (list, m) in lists.iter_mut().zip(0..) {
                for &(op, _) in &row.ops {
                    let here = |i: usize| self.given[i].key.placements[m] == Partial(op);
                    if (0..self.given.len()).any(|i| has(row.inputs | self.rule.addends, i) && here(i)) {
                        list.push(Choice::Flow { flow, op });
                    }
                }
            }
        }
        lists
    }

    /// What a candidate costs, if it is one.
    fn price(&self, candidate: &Candidate) -> Option<Price> {
        let mut now = 0u64;
        let mut as_it_is = true;
        for ((placements, meta), given) in candidate.inputs.iter().zip(self.inputs).zip(self.given) {
            if *placements == given.key.placements {
                continue;
            }
            as_it_is = false;
            if clashing(placements).is_some() {
                return None;
            }
            let to = self.spec(placements, meta);
            let cost = self.planner.plan(given, &to, meta.dtype).picos();
            if cost > 0 && !worth_cutting(placements, &meta.shape, self.sizes) {
                return None;
            }
            now = now.saturating_add(cost);
        }
        if !candidate.merged.is_empty() && self.merged_bytes(candidate) > self.gathered_bytes(candidate) {
            return None;
        }
        let mut total = now;
        for (placements, meta) in candidate.outputs.iter().zip(self.outputs) {
            if clashing(placements).is_some() {
                return None;
            }
            if now > 0 && placements.iter().any(|p| p.is_partial()) {
                let left = self.spec(placements, meta);
                let reduced = self.planner.intern(left.key.without_partials());
                let debt = self.planner.plan(&left, &reduced, meta.dtype).picos();
                total = total.saturating_add(debt);
            }
        }
        let class = match (now, as_it_is, candidate.merged.is_empty()) {
            _ if self.stays.iter().any(|m| !candidate.merged.contains(m)) => Class::Uncut,
            (0, true, true) => Class::AsItIs,
            (0, false, true) => Class::Free,
            (0, _, false) => Class::Merged,
            _ => Class::Moved,
        };
        Some(Price { class, total, now })
    }

    /// What a rank sends to bring results together.
    fn merged_bytes(&self, candidate: &Candidate) -> usize {
        let ranks: usize = candidate.merged.iter().map(|&m| self.sizes[m]).product();
        let elements = self.spec(&candidate.outputs[0], &self.outputs[0]).largest(self.sizes);
        elements.saturating_mul(self.rule.merged_item).saturating_mul(ranks - 1)
    }

    /// What a rank sends if inputs are brought together instead.
    fn gathered_bytes(&self, candidate: &Candidate) -> usize {
        let gathered = |(placements, meta): (&PlacementList, &Meta)| {
            let mut whole = placements.clone();
            candidate.merged.iter().for_each(|&m| whole[m] = Replicate);
            self.planner.plan(&self.spec(placements, meta), &self.spec(&whole, meta), meta.dtype).bytes()
        };
        candidate.inputs.iter().zip(self.inputs).map(gathered).sum()
    }

    /// Why a strict operator cannot be run, and what would help.
    fn refused(&self, op: &'static str, candidate: &Candidate) -> Error {
        let (given, needed) = (&self.given[0].key.placements, &candidate.inputs[0]);
        let cut = |dim: usize| given.iter().any(|p| p.cut().is_some_and(|(d, _)| d == dim));
        let composed = self.rule.inputs[0].iter().enumerate().any(|(d, dim)| cut(d) && dim.len() > 1);
        let what = if composed { "unflatten" } else { "flatten" };
        let message = format!(
            "cannot {what} a tensor that is sharded {} this way: {} to {} requires redistribution. Please redistribute the \
             input to {} first, or use `reshape`, which does",
            shown(given),
            self.inputs[0].shape,
            self.outputs[0].shape,
            shown(needed),
        );
        Error::argument(op, message)
    }
}

/// Whether the i-th bit is set.
fn has(bits: u32, i: usize) -> bool {
    bits.checked_shr(i as u32).unwrap_or(0) & 1 == 1
}

/// Whether a dim that is to be cut has at least as many indices as there are ranks to share them.
fn worth_cutting(placements: &[Placement], shape: &Shape, sizes: &[usize]) -> bool {
    let parts = |dim: usize| {
        let along = placements.iter().zip(sizes).filter(move |(p, _)| p.cut().is_some_and(|(d, _)| d == dim));
        along.map(|(_, size)| size).product::<usize>()
    };
    (0..shape.rank()).all(|dim| parts(dim) == 1 || parts(dim) <= shape[dim])
}

/// Along each mesh dim the factor that an input is cut along, if it is one that may be cut.
fn decode(rule: &Rule, carried: &Carried, spec: &Spec, sizes: &[usize]) -> SmallVec<[Option<Choice>; 4]> {
    let mut lens: SmallVec<[usize; 8]> = rule.factors.iter().map(|f| f.size).collect();
    let found = spec.key.placements.iter().zip(sizes).map(|(placement, &n)| {
        let (dim, split) = placement.cut()?;
        let dim = &carried[dim];
        let (factor, split) = match dim[..] {
            [factor] => (factor, split),
            _ => {
                // A dim of several factors in as many pieces as those before one have indices is cut along that one.
                // What has been cut down to one index is not meant again.
                let before = |at: usize| dim[..at].iter().map(|&f| lens[f]).product::<usize>();
                let meant = |&at: &usize| before(at) == split && (lens[dim[at]] > 1 || at + 1 == dim.len());
                ((0..dim.len()).find(meant).map(|at| dim[at])?, 1)
            }
        };
        lens[factor] = lens[factor].div_ceil(n);
        let whole = rule.factors[factor].kind == Kind::Whole;
        let scattered = rule.factors[factor].contiguous && split > 1;
        (!whole && !scattered).then_some(Choice::Cut { factor, split })
    });
    found.collect()
}

/// The placements that some choices come to, if there are any.
fn candidate(rule: &Rule, sizes: &[usize], choices: &[Choice]) -> Option<Candidate> {
    let mut merged = MeshDims::new();
    for (m, choice) in choices.iter().enumerate() {
        if let Choice::Cut { factor, .. } = *choice
            && rule.factors[factor].kind == Kind::Merging
        {
            merged.push(m);
        }
    }
    let input = |(i, carried): (usize, &Carried)| {
        placements(rule, carried, sizes, choices, |choice| match choice {
            Choice::Whole => Replicate,
            Choice::Cut { factor, .. } => match rule.factors[factor].kind {
                Kind::Reducing(op) if has(rule.addends, i) => Partial(op),
                _ => Replicate,
            },
            Choice::Flow { flow, op } if has(rule.flows[flow].inputs | rule.addends, i) => Partial(op),
            Choice::Flow { .. } => Replicate,
        })
    };
    let output = |carried: &Carried| {
        placements(rule, carried, sizes, choices, |choice| match choice {
            Choice::Whole => Replicate,
            Choice::Cut { factor, .. } => match rule.factors[factor].kind {
                Kind::Reducing(op) => Partial(op),
                _ => Replicate,
            },
            Choice::Flow { flow, op } => {
                let to = rule.flows[flow].ops.iter().find(|(from, _)| *from == op);
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

/// The placements of one tensor: cuts of the factors that it carries, and `other` for what else is chosen.
fn placements(
    rule: &Rule,
    carried: &Carried,
    sizes: &[usize],
    choices: &[Choice],
    other: impl Fn(Choice) -> Placement,
) -> Option<PlacementList> {
    let mut lens: SmallVec<[usize; 8]> = rule.factors.iter().map(|f| f.size).collect();
    let along = |(&choice, &n): (&Choice, &usize)| -> Option<Placement> {
        let Choice::Cut { factor, split } = choice else { return Some(other(choice)) };
        let found = carried.iter().enumerate().find_map(|(dim, factors)| {
            factors.iter().position(|&f| f == factor).map(|at| (dim as isize, at, factors))
        });
        let len = lens[factor];
        lens[factor] = len.div_ceil(n);
        let Some((dim, at, factors)) = found else { return Some(other(choice)) };
        // Indices of a factor with others inside it lie together only if all ranks have equally many.
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

    fn decided(
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
        let made = choose(&planner, Question { op: "test", rule, inputs, outputs, specs }).unwrap();
        let shown = |specs: &[Arc<Spec>]| {
            specs.iter().map(|spec| spec.key.placements[0].to_string()).collect::<Vec<_>>().join(", ")
        };
        format!("{} -> {}", shown(&made.specs), shown(&made.out_specs))
    }

    #[test]
    fn inputs_stay_where_they_are_if_they_can() {
        let mm = |x: &[Meta], out: &[Meta]| Rule::of("m k, k n -> m n", x, out);
        let of = |a, b| decided(mm, &[(&[8, 8], a), (&[8, 8], b)], &[8, 8]);
        assert_eq!(of(Shard(1), Shard(0)), "S(1), S(0) -> P(sum)");
        assert_eq!(of(Replicate, Shard(0)), "S(1), S(0) -> P(sum)");
        assert_eq!(of(Shard(0), Shard(0)), "S(0), R -> S(0)");
        // A strided shard is a shard in another order.
        let strided = StridedShard { dim: 0, split_factor: 2 };
        assert_eq!(of(strided, Replicate), "_S(0, 2), R -> _S(0, 2)");
    }

    #[test]
    fn nothing_is_cut_that_has_less_than_one_index_for_each_rank() {
        let add = |x: &[Meta], out: &[Meta]| Rule::pointwise(x, out);
        assert_eq!(decided(add, &[(&[3], Shard(0)), (&[3], Shard(0))], &[3]), "S(0), S(0) -> S(0)");
        assert_eq!(decided(add, &[(&[3], Shard(0)), (&[3], Partial(ReduceOp::Sum))], &[3]), "R, R -> R");
        assert_eq!(
            decided(add, &[(&[5], Shard(0)), (&[5], Partial(ReduceOp::Sum))], &[5]),
            "S(0), S(0) -> S(0)"
        );
        // But what costs nothing is done.
        assert_eq!(decided(add, &[(&[3], Shard(0)), (&[3], Replicate)], &[3]), "S(0), S(0) -> S(0)");
    }

    #[test]
    fn what_is_to_stay_cut_does_whatever_that_costs() {
        let loss = |x: &[Meta], out: &[Meta]| Rule::of("n c, n -> n", x, out)?.merging_along("c");
        let of = |scores, target| decided(loss, &[(&[64, 4], scores), (&[64], target)], &[64]);
        assert_eq!(of(Shard(1), Replicate), "S(1), R -> R");
        assert_eq!(of(Shard(1), Shard(0)), "S(1), R -> R");
        assert_eq!(of(Shard(0), Shard(0)), "S(0), S(0) -> S(0)");
        let strided = StridedShard { dim: 1, split_factor: 2 };
        assert_eq!(of(strided, Shard(0)), "_S(1, 2), R -> R");
        // Unless that cannot be.
        let ranges =
            |x: &[Meta], out: &[Meta]| Rule::of("n c, n -> n", x, out)?.merging_along("c")?.contiguous("c");
        let of = |scores, target| decided(ranges, &[(&[64, 4], scores), (&[64], target)], &[64]);
        assert_eq!(of(Shard(1), Shard(0)), "S(1), R -> R");
        assert_eq!(of(strided, Shard(0)), "S(0), S(0) -> S(0)");
    }

    #[test]
    fn outputs_are_cut_where_it_is_wished_for() {
        let add = |cut: Placement| {
            move |x: &[Meta], out: &[Meta]| Rule::of("i, i n -> v n", x, out)?.wanting("v", 0, &[cut])
        };
        let of = |cut, ids| decided(add(cut), &[(&[8], ids), (&[8, 4], ids)], &[16, 4]);
        assert_eq!(of(Shard(0), Replicate), "R, R -> S(0)");
        assert_eq!(of(Shard(1), Replicate), "R, R -> R");
        assert_eq!(of(Shard(0), Shard(0)), "S(0), S(0) -> P(sum)");
    }

    /// On a mesh of many dims not all combinations are tried, but what can stay does.
    #[test]
    fn many_mesh_dims_are_decided_one_by_one() {
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
        let made = decide([&a, &b]).unwrap();
        assert!(made.moved.is_empty());
        let expected = [Shard(0), p, Shard(1), p, Shard(0), p, Shard(1), Shard(0)];
        assert_eq!(made.out_specs[0].key.placements[..], expected);
        // Two that do not fit together.
        let c = layout([Shard(1), Shard(1), r, Shard(1), Shard(0), Shard(1), Shard(0), Shard(0)]);
        assert!(decide([&c, &c]).is_ok());
    }
}
