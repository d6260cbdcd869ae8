//! [`Plan`]: the steps that redistribute a tensor from one layout to another. It only describes them; nothing here communicates.

use std::fmt;

use dtensor_array::ReduceOp;
use smallvec::SmallVec;

use crate::chunk::{Ranges, chunk, chunk_of_each, nested_sizes, pieces, shard_len};
use crate::cost::Cost;
use crate::placement::format_short;
use crate::search::{Path, cheapest, dim_by_dim};
use crate::state::{DimState, SearchSpace, ShardState, Transition, TransitionKind};
use crate::{Mesh, MeshDims, Names, PerRank, Placement, PlacementList, Spec};

/// The steps that redistribute a tensor from one layout to another, and their cost.
///
/// Made by [`Planner::plan`](crate::Planner::plan). `Display` shows the steps and why they were chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    steps: Vec<Step>,
    from: PlacementList,
    to: PlacementList,
    shape: SmallVec<[usize; 6]>,
    /// The bytes of one element.
    item: usize,
    cost: Cost,
    /// The cost of the path that changes one mesh dim at a time, if a cheaper one was chosen.
    dim_by_dim: Option<DimByDimCost>,
    /// The names of the mesh dims.
    names: Option<Names>,
}

/// The cost of the path that changes one mesh dim at a time.
#[derive(Clone, Debug, PartialEq)]
struct DimByDimCost {
    cost: Cost,
    collectives: usize,
    bytes: usize,
}

/// One step of a [`Plan`]. It is the same on all ranks, except for its [`actions`](Step::actions).
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The placements after the step.
    pub placements: Vec<Placement>,
    /// The mesh dims whose placements change.
    pub mesh_dims: Vec<usize>,
    /// The name of the collective, or `None` if the step needs no communication.
    pub collective: Option<&'static str>,
    /// The largest number of bytes that a rank sends.
    pub bytes: usize,
    /// The estimated cost in microseconds.
    pub micros: f64,
    transition: Transition,
    actions: SmallVec<[Action; 1]>,
}

/// What this rank does in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Runs a collective.
    Communicate {
        /// The mesh dims that the collective runs along.
        over: MeshDims,
        /// The collective.
        transfer: Transfer,
    },
    /// Keeps some indices of a dim, and concatenates the ranges in the given order.
    Keep {
        /// The dim.
        dim: usize,
        /// The ranges of indices.
        ranges: Ranges,
    },
    /// Pads the value with zeros, so that it becomes a term of a sum.
    Embed {
        /// The dim to pad.
        dim: usize,
        /// The index at which the value begins.
        start: usize,
        /// The size of the dim after padding.
        len: usize,
    },
    /// Makes a replicated value partial. For a sum or product, one rank keeps its value and the others take the neutral element. For
    /// other reductions every rank keeps its value.
    Divide {
        /// The reduction.
        op: ReduceOp,
        /// If true, this rank keeps its value in any case.
        all: bool,
    },
    /// Divides the value by a number.
    Scale {
        /// The number.
        by: usize,
    },
}

/// The collective of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Transfer {
    /// Reduces the values of all ranks and returns the result on every rank.
    AllReduce {
        /// The reduction.
        op: ReduceOp,
    },
    /// Concatenates the shards of all ranks and returns the result on every rank.
    AllGather {
        /// The dim to concatenate along.
        dim: usize,
        /// The size of each rank's shard along `dim`.
        sizes: PerRank,
    },
    /// Reduces the values of all ranks and returns one shard of the result on each rank.
    ReduceScatter {
        /// The reduction.
        op: ReduceOp,
        /// The dim to shard.
        dim: usize,
        /// The size of each rank's shard along `dim`.
        sizes: PerRank,
    },
    /// Splits each rank's value, sends one slice to every rank, and concatenates the received slices.
    AllToAll {
        /// The dim to split.
        split_dim: usize,
        /// The size, along `split_dim`, of the slice sent to each rank.
        send: PerRank,
        /// The dim to concatenate along.
        cat_dim: usize,
        /// The size, along `cat_dim`, of the slice received from each rank.
        receive: PerRank,
    },
}

impl Plan {
    pub(crate) fn new(mesh: &Mesh, from: &Spec, to: &Spec, item: usize) -> Plan {
        let space = SearchSpace::new(mesh.shape(), mesh.cost(), from, to, item);
        let plain = dim_by_dim(&space);

        // Only a path that is strictly cheaper is taken, because users expect the path that changes one mesh dim at a time.
        let better = if plain.cost > Cost(0) { cheapest(&space, plain.cost) } else { None };
        let dim_by_dim = better.as_ref().map(|_| DimByDimCost {
            cost: plain.cost,
            collectives: plain
                .transitions
                .iter()
                .filter(|transition| transition.kind.collective().is_some())
                .count(),
            bytes: plain.bytes(&space),
        });
        let Path { transitions, cost } = better.unwrap_or(plain);
        let mut steps = Vec::with_capacity(transitions.len());
        let mut state = space.source;
        for transition in transitions {
            steps.push(Step::new(&space, mesh, state, transition));
            state = space.after(state, &space.shard_sizes(state), transition);
        }
        Plan {
            steps,
            from: from.key.placements.clone(),
            to: to.key.placements.clone(),
            shape: from.key.shape[..].into(),
            item,
            cost,
            dim_by_dim,
            names: mesh.names().cloned(),
        }
    }

    /// Returns a readable text of the steps, their cost and why they were chosen. `Display` shows the same.
    ///
    /// ```
    /// use dtensor_array::DType;
    /// use dtensor_layout::{Mesh, Planner, Replicate, Shard};
    /// # fn main() -> dtensor_layout::Result<()> {
    /// let planner = Planner::new(Mesh::new([4], ["tp"])?);
    /// let (rows, full) = (planner.spec("example", Shard(0), [8, 8])?, planner.spec("example", Replicate, [8, 8])?);
    /// let plan = planner.plan(&rows, &full, DType::F32);
    /// assert_eq!(plan.trace(), "S(0) -> R");
    /// assert!(plan.explain().contains("all_gather along tp"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn explain(&self) -> String {
        self.to_string()
    }

    /// Returns the steps in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the largest number of bytes that a rank sends in all steps.
    pub fn bytes(&self) -> usize {
        self.steps.iter().fold(0, |sum, step| sum.saturating_add(step.bytes))
    }

    /// Returns the estimated cost in microseconds.
    pub fn micros(&self) -> f64 {
        self.cost.micros()
    }

    /// Returns the estimated cost in picoseconds, as an integer, so that sums can be compared exactly.
    #[doc(hidden)]
    pub fn picos(&self) -> u64 {
        self.cost.0
    }

    /// Returns the names of the collectives in order.
    pub fn collectives(&self) -> Vec<&'static str> {
        self.steps.iter().filter_map(|step| step.collective).collect()
    }

    /// Returns the placements before, between and after the steps, as `S(0)R -> RR`.
    pub fn trace(&self) -> String {
        let mut trace = format_short(&self.from);
        for step in &self.steps {
            trace += " -> ";
            trace += &format_short(&step.placements);
        }
        trace
    }
}

impl Step {
    /// Returns what this rank does in the step, in order. Empty if the rank is not in the mesh.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Describes the step in words.
    fn description(&self) -> String {
        match self.transition.kind {
            TransitionKind::Gather { dim } => format!("gather dim {dim}"),
            TransitionKind::Exchange { from, to } => format!("shard dim {to} instead of dim {from}"),
            TransitionKind::Reduce => "reduce".into(),
            TransitionKind::ReduceScatter { dim } => format!("reduce and shard dim {dim}"),
            TransitionKind::Slice { dim, .. } => format!("keep this rank's shard of dim {dim}"),
            TransitionKind::Embed { dim } => format!("pad dim {dim} with zeros"),
            TransitionKind::Divide { .. } => "make the value partial".into(),
        }
    }

    fn new(space: &SearchSpace, mesh: &Mesh, state: ShardState, transition: Transition) -> Step {
        let shards = space.shard_sizes(state);
        Step {
            placements: space.placements(space.after(state, &shards, transition)),
            mesh_dims: transition.over.iter().collect(),
            collective: transition.kind.collective(),
            bytes: space.bytes(&shards, transition),
            micros: space.cost(&shards, transition).micros(),
            transition,
            actions: mesh.coordinate().map_or_else(SmallVec::new, |at| actions(space, at, state, transition)),
        }
    }
}

/// Returns the size of a tensor dim on the rank at a coordinate, if the mesh dims of the transition `without` do not shard it.
fn len_without(
    space: &SearchSpace,
    state: ShardState,
    at: &[usize],
    dim: usize,
    without: &Transition,
) -> usize {
    let shardings = state.sharding_order(space.ndim, dim).into_iter();
    shardings
        .filter(|&(_, m, _)| !without.over.iter().any(|gone| gone == m))
        .fold(space.shape[dim], |len, (_, m, split)| {
            shard_len(len, space.splits[split], space.sizes[m], at[m])
        })
}

/// Returns what the rank at a coordinate does in a transition.
fn actions(
    space: &SearchSpace,
    at: &[usize],
    state: ShardState,
    transition: Transition,
) -> SmallVec<[Action; 1]> {
    let over: MeshDims = transition.over.iter().collect();
    let counts: MeshDims = over.iter().map(|&m| space.sizes[m]).collect();
    let len = |dim: usize| len_without(space, state, at, dim, &transition);
    // The sizes of the shards that a gathered dim is concatenated from, and the action that then reorders its indices, if needed.
    let gathered = |dim: usize| -> (PerRank, Option<Action>) {
        let len = len(dim);
        match over.iter().map(|&m| state.get(m)).next() {
            Some(DimState::Sharded { split, .. }) if split > 0 => {
                let (split, n) = (space.splits[split], counts[0]);
                let sizes = (0..n).map(|i| shard_len(len, split, n, i)).collect();
                (sizes, Some(Action::Keep { dim, ranges: original_order(len, split, n) }))
            }
            _ => (nested_sizes(len, &counts), None),
        }
    };
    let communicate = |transfer| Action::Communicate { over: over.clone(), transfer };
    let mut actions = SmallVec::new();
    match transition.kind {
        TransitionKind::Gather { dim } => {
            let (sizes, order) = gathered(dim);
            actions.push(communicate(Transfer::AllGather { dim, sizes }));
            actions.extend(order);
        }
        TransitionKind::Exchange { from, to } => {
            let (receive, order) = gathered(from);
            let send = nested_sizes(len(to), &counts);
            actions.push(communicate(Transfer::AllToAll { split_dim: to, send, cat_dim: from, receive }));
            actions.extend(order);
        }
        TransitionKind::Reduce => {
            let (op, by) = reduction(space, state, &over);
            actions.push(communicate(Transfer::AllReduce { op }));
            actions.extend((by > 1).then_some(Action::Scale { by }));
        }
        TransitionKind::ReduceScatter { dim } => {
            let (op, by) = reduction(space, state, &over);
            let sizes = nested_sizes(len(dim), &counts);
            actions.push(communicate(Transfer::ReduceScatter { op, dim, sizes }));
            actions.extend((by > 1).then_some(Action::Scale { by }));
        }
        TransitionKind::Slice { dim, split } => {
            let (full, m) = (SmallVec::from_elem(0..len(dim), 1), over[0]);
            let ranges = chunk_of_each(&full, space.splits[split], space.sizes[m], at[m]);
            actions.push(Action::Keep { dim, ranges });
        }
        TransitionKind::Embed { dim } => {
            let (len, m) = (len(dim), over[0]);
            actions.push(Action::Embed { dim, start: chunk(len, space.sizes[m], at[m]).start, len });
        }
        TransitionKind::Divide { op } => actions.push(Action::Divide { op, all: at[over[0]] == 0 }),
    }
    actions
}

/// Returns the reduction that reduces partial values along several mesh dims at once, and the number by which the result must then
/// be divided.
fn reduction(space: &SearchSpace, state: ShardState, over: &[usize]) -> (ReduceOp, usize) {
    let first = state.op_along(over[0]);
    if over.iter().all(|&m| state.op_along(m) == first) {
        return (first, 1);
    }
    // A mixture of sums and averages is summed. The averaged mesh dims are divided out afterwards.
    let averaged = over.iter().filter(|&&m| state.op_along(m) == ReduceOp::Avg);
    (ReduceOp::Sum, averaged.map(|&m| space.sizes[m]).product())
}

/// Returns where the indices of a dim, in their original order, are in the concatenation of the strided shards of all ranks.
fn original_order(len: usize, split: usize, n: usize) -> Ranges {
    // For each rank: where the remaining part of its shard begins.
    let mut next: PerRank = (0..n)
        .scan(0, |start, i| {
            let here = *start;
            *start += shard_len(len, split, n, i);
            Some(here)
        })
        .collect();
    let mut ranges = Ranges::new();
    for piece in pieces(len, split) {
        for (i, start) in next.iter_mut().enumerate() {
            let chunk = *start..*start + chunk(piece.len(), n, i).len();
            *start = chunk.end;
            match ranges.last_mut() {
                _ if chunk.is_empty() => {}
                Some(last) if last.end == chunk.start => last.end = chunk.end,
                _ => ranges.push(chunk),
            }
        }
    }
    ranges
}

impl fmt::Display for Plan {
    /// Writes a summary line, one line per step, and one line that says why this plan was chosen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (format_short(&self.from), format_short(&self.to));
        write!(f, "{from} -> {to} of {:?} ({} bytes each): ", self.shape, self.item)?;
        if self.steps.is_empty() {
            return f.write_str("nothing to do");
        }
        write!(f, "{} bytes sent per rank at most, {:.1} µs", self.bytes(), self.micros())?;
        let mut before = from;
        for (i, step) in self.steps.iter().enumerate() {
            let after = format_short(&step.placements);
            write!(f, "\n  {}. {before} -> {after}: ", i + 1)?;
            match step.collective {
                Some(name) => {
                    let dim = |&dim: &usize| match &self.names {
                        Some(names) => names[dim].to_string(),
                        None => dim.to_string(),
                    };
                    let along: Vec<String> = step.mesh_dims.iter().map(dim).collect();
                    let (along, what) = (along.join("×"), step.description());
                    write!(f, "{name} along {along} ({what}), {} bytes, {:.1} µs", step.bytes, step.micros)?;
                }
                None => write!(f, "{}, without communication", step.description())?,
            }
            before = after;
        }
        match &self.dim_by_dim {
            _ if self.collectives().is_empty() => {
                f.write_str("\n  why: every rank already holds what it needs")
            }
            None => f.write_str("\n  why: no other path costs less"),
            Some(DimByDimCost { cost, collectives, bytes }) => write!(
                f,
                "\n  why: one mesh dim at a time would send {bytes} bytes in {collectives} collectives, {:.1} µs",
                cost.micros()
            ),
        }
    }
}
