//! The layouts an operator is run on: of all that its rule allows, those that cost least to bring the inputs to.
//!
//! In this order: nothing has to change; only changes that move nothing; results are brought together instead
//! of inputs; the cheapest, where outputs that will still have to be reduced count as if they were; and last
//! what uncuts a dim that is to stay cut. Among equals the first one: whole inputs come first, then factors
//! in the order of the rule, then partial values.

use std::sync::Arc;

use smallvec::SmallVec;

use super::rule::{Carried, Kind, Rule};
use crate::comm::ReduceOp;
use crate::mesh::{DeviceMesh, MeshDims};
use crate::ops::Metas;
use crate::placement::{
    Layout, Partial, Placement, PlacementList, Replicate, Shard, Spec, SpecKey, StridedShard, clashing, shown,
};
use crate::tensor::{Meta, Shape};
use crate::{Error, Result};

/// How an operator is run on inputs that lie as they do.
#[derive(Debug)]
pub(crate) struct Decision {
    /// What is known of the whole inputs.
    pub(crate) inputs: SmallVec<[Meta; 2]>,
    /// How each input has to lie. Not layouts: a mesh remembers decisions, and must not keep itself alive.
    pub(crate) specs: SmallVec<[Arc<Spec>; 2]>,
    /// The inputs that do not lie so yet.
    pub(crate) moved: SmallVec<[usize; 2]>,
    /// What is known of the whole outputs, and of this rank's parts of them.
    pub(crate) outputs: Metas,
    pub(crate) parts: Metas,
    pub(crate) out_specs: SmallVec<[Arc<Spec>; 1]>,
    /// The mesh dims along which ranks find out the outputs together.
    pub(crate) merged: MeshDims,
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

/// The placements of all inputs and outputs.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) inputs: SmallVec<[PlacementList; 4]>,
    pub(crate) outputs: SmallVec<[PlacementList; 2]>,
    pub(crate) merged: MeshDims,
}

/// All that a rule offers on a mesh of these sizes, whatever the inputs.
pub(crate) fn candidates(rule: &Rule, sizes: &[usize]) -> Vec<Candidate> {
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

/// Decides for an operator with this rule on inputs in these layouts.
pub(crate) fn choose(
    op: &'static str,
    rule: &Rule,
    mesh: &DeviceMesh,
    inputs: SmallVec<[Meta; 2]>,
    outputs: Metas,
    layouts: &[&Layout],
) -> Result<Decision> {
    check(op, rule, &inputs, &outputs)?;
    let stays = stays_cut(rule, layouts);
    let chooser = Chooser { rule, mesh, inputs: &inputs, outputs: &outputs, layouts, stays };
    let (candidate, price) = chooser.best();
    let spec = |(placements, meta): (&PlacementList, &Meta)| {
        mesh.spec(SpecKey { placements: placements.clone(), shape: meta.shape.clone() })
    };
    let specs: SmallVec<[Arc<Spec>; 2]> = candidate.inputs.iter().zip(&inputs).map(spec).collect();
    let lies_so = |i: usize| candidate.inputs[i][..] == *layouts[i].placements();
    let moved = (0..inputs.len()).filter(|&i| !lies_so(i)).collect();
    if rule.strict && price.class > Class::Free {
        return Err(chooser.refused(op, &candidate));
    }
    let out_specs: SmallVec<[Arc<Spec>; 1]> = candidate.outputs.iter().zip(&outputs).map(spec).collect();
    let part = |(meta, spec): (&Meta, &Arc<Spec>)| Meta { shape: spec.local.clone(), ..meta.clone() };
    let parts = outputs.iter().zip(&out_specs).map(part).collect();
    Ok(Decision { inputs, specs, moved, outputs, parts, out_specs, merged: candidate.merged })
}

/// A rule for other tensors than there are would be read out of bounds.
pub(crate) fn check(op: &'static str, rule: &Rule, inputs: &[Meta], outputs: &[Meta]) -> Result<()> {
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
        let Some(candidate) = candidate(chooser.rule, chooser.mesh.shape(), &chosen) else { return false };
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
    mesh: &'a DeviceMesh,
    inputs: &'a [Meta],
    outputs: &'a [Meta],
    layouts: &'a [&'a Layout],
    /// The mesh dims that cut what is to stay cut.
    stays: MeshDims,
}

/// The mesh dims along which an input is cut that is [to stay so](Rule::merging_along).
fn stays_cut(rule: &Rule, layouts: &[&Layout]) -> MeshDims {
    let mut dims = MeshDims::new();
    if rule.merged_item > 0 || rule.factors.iter().all(|factor| factor.kind != Kind::Merging) {
        return dims;
    }
    for (carried, layout) in rule.inputs.iter().zip(layouts) {
        for (m, cut) in decode(rule, carried, layout).into_iter().enumerate() {
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
            SmallVec::from_elem(SmallVec::from_elem(Choice::Whole, 1), self.mesh.ndim());
        for (carried, layout) in self.rule.inputs.iter().zip(self.layouts) {
            for (list, cut) in lists.iter_mut().zip(decode(self.rule, carried, layout)) {
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
                    let here = |i: usize| self.layouts[i].placements()[m] == Partial(op);
                    if (0..self.layouts.len()).any(|i| has(row.inputs | self.rule.addends, i) && here(i)) {
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
        for ((placements, meta), layout) in candidate.inputs.iter().zip(self.inputs).zip(self.layouts) {
            if placements[..] == *layout.placements() {
                continue;
            }
            as_it_is = false;
            if clashing(placements).is_some() {
                return None;
            }
            let to = self.mesh.spec(SpecKey { placements: placements.clone(), shape: meta.shape.clone() });
            let cost = self.mesh.plan(layout.spec(), &to, meta.dtype.size()).picos();
            if cost > 0 && !worth_cutting(placements, &meta.shape, self.mesh.shape()) {
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
                let key = SpecKey { placements: placements.clone(), shape: meta.shape.clone() };
                let left = Layout::of(self.mesh, key);
                let reduced = left.without_partials();
                let debt = self.mesh.plan(left.spec(), reduced.spec(), meta.dtype.size()).picos();
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
        let ranks: usize = candidate.merged.iter().map(|&m| self.mesh.shape()[m]).product();
        let key = SpecKey { placements: candidate.outputs[0].clone(), shape: self.outputs[0].shape.clone() };
        let elements = self.mesh.spec(key).largest(self.mesh.shape());
        elements.saturating_mul(self.rule.merged_item).saturating_mul(ranks - 1)
    }

    /// What a rank sends if inputs are brought together instead.
    fn gathered_bytes(&self, candidate: &Candidate) -> usize {
        let gathered = |(placements, meta): (&PlacementList, &Meta)| {
            let (from, mut whole) = (placements.clone(), placements.clone());
            candidate.merged.iter().for_each(|&m| whole[m] = Replicate);
            let spec = |placements| self.mesh.spec(SpecKey { placements, shape: meta.shape.clone() });
            self.mesh.plan(&spec(from), &spec(whole), meta.dtype.size()).bytes()
        };
        candidate.inputs.iter().zip(self.inputs).map(gathered).sum()
    }

    /// Why a strict operator cannot be run, and what would help.
    fn refused(&self, op: &'static str, candidate: &Candidate) -> Error {
        let (layout, needed) = (self.layouts[0], &candidate.inputs[0]);
        let cut = |dim: usize| layout.placements().iter().any(|p| p.cut().is_some_and(|(d, _)| d == dim));
        let composed = self.rule.inputs[0].iter().enumerate().any(|(d, dim)| cut(d) && dim.len() > 1);
        let what = if composed { "unflatten" } else { "flatten" };
        let message = format!(
            "cannot {what} a tensor that is sharded {} this way: {} to {} requires redistribution. Please redistribute the \
             input to {} first, or use `reshape`, which does",
            shown(layout.placements()),
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
fn decode(rule: &Rule, carried: &Carried, layout: &Layout) -> SmallVec<[Option<Choice>; 4]> {
    let mut lens: SmallVec<[usize; 8]> = rule.factors.iter().map(|f| f.size).collect();
    let found = layout.placements().iter().zip(layout.mesh().shape()).map(|(placement, &n)| {
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
    use crate::comm::World;
    use crate::tensor::{DType, Device};

    fn decided(
        rule: impl Fn(&[Meta], &[Meta]) -> Result<Rule>,
        x: &[(&[usize], Placement)],
        out: &[usize],
    ) -> String {
        let mesh = DeviceMesh::new(&World::simulated(4, 1).unwrap(), [4], ()).unwrap();
        let meta = |dims: &[usize]| Meta { shape: dims.into(), dtype: DType::F32, device: Device::Cpu };
        let inputs: SmallVec<[Meta; 2]> = x.iter().map(|(dims, _)| meta(dims)).collect();
        let outputs: Metas = SmallVec::from_elem(meta(out), 1);
        let layouts: Vec<Layout> =
            x.iter().map(|(dims, p)| Layout::new(&mesh, [*p], *dims).unwrap()).collect();
        let rule = rule(&inputs, &outputs).unwrap();
        let layouts: Vec<&Layout> = layouts.iter().collect();
        let made = choose("test", &rule, &mesh, inputs, outputs, &layouts).unwrap();
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
        let mesh = DeviceMesh::new(&World::simulated(256, 7).unwrap(), [2; 8], ()).unwrap();
        let meta = Meta { shape: [256, 256].into(), dtype: DType::F32, device: Device::Cpu };
        let (inputs, outputs) = (SmallVec::from_elem(meta.clone(), 2), SmallVec::from_elem(meta, 1));
        let rule = Rule::of("m k, k n -> m n", &inputs, &outputs).unwrap();
        let layout = |placements: [Placement; 8]| Layout::new(&mesh, placements, [256, 256]).unwrap();
        let (r, p) = (Replicate, Partial(ReduceOp::Sum));
        let a = layout([Shard(0), Shard(1), r, Shard(1), Shard(0), Shard(1), r, Shard(0)]);
        let b = layout([r, Shard(0), Shard(1), Shard(0), r, Shard(0), Shard(1), r]);
        let made = choose("test", &rule, &mesh, inputs.clone(), outputs.clone(), &[&a, &b]).unwrap();
        assert!(made.moved.is_empty());
        let expected = [Shard(0), p, Shard(1), p, Shard(0), p, Shard(1), Shard(0)];
        assert_eq!(made.out_specs[0].key.placements[..], expected);
        // Two that do not fit together.
        let c = layout([Shard(1), Shard(1), r, Shard(1), Shard(0), Shard(1), Shard(0), Shard(0)]);
        assert!(choose("test", &rule, &mesh, inputs, outputs, &[&c, &c]).is_ok());
    }
}
