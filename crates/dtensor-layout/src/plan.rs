//! [`Plan`]: the steps from one layout to another. Pure: layouts in, steps out.

use std::fmt;

use dtensor_array::ReduceOp;
use smallvec::SmallVec;

use crate::chunk::{Ranges, chunk, chunk_of_each, cut_len, nested_sizes, pieces};
use crate::cost::Cost;
use crate::placement::joined;
use crate::search::{Way, cheapest, straight};
use crate::state::{Field, Holds, Kind, Move, State};
use crate::{Mesh, MeshDims, Names, PerRank, Placement, PlacementList, Spec};

/// The steps that bring a tensor from one layout to another, and what they cost.
///
/// Made by [`Planner::plan`](crate::Planner::plan); `Display` shows it as a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    steps: Vec<Step>,
    from: PlacementList,
    to: PlacementList,
    shape: SmallVec<[usize; 6]>,
    item: usize,
    cost: Cost,
    /// What the straight way would have been, if it was not taken.
    straight: Option<Straight>,
    /// The names of the mesh dims.
    names: Option<Names>,
}

/// The way that goes mesh dim by mesh dim.
#[derive(Clone, Debug, PartialEq)]
struct Straight {
    cost: Cost,
    collectives: usize,
    bytes: usize,
}

/// One step of a [`Plan`]: the same for all ranks, but for what each does in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The placements after it.
    pub placements: Vec<Placement>,
    /// The mesh dims whose placements it changes.
    pub mesh_dims: Vec<usize>,
    /// The name of the collective, if there is one.
    pub collective: Option<&'static str>,
    /// The bytes that a rank sends, at most.
    pub bytes: usize,
    /// What this is taken to cost, in microseconds.
    pub micros: f64,
    done: Move,
    actions: SmallVec<[Action; 1]>,
}

/// What this rank does in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Takes part in a collective.
    Communicate {
        /// The mesh dims it runs along.
        over: MeshDims,
        /// Which one.
        transfer: Transfer,
    },
    /// Keeps some indices of a dim, one range after the other.
    Keep {
        /// The dim.
        dim: usize,
        /// The ranges.
        ranges: Ranges,
    },
    /// Puts its value into zeros.
    Embed {
        /// The dim along which the zeros are.
        dim: usize,
        /// Where the value begins.
        start: usize,
        /// The size of the dim afterwards.
        len: usize,
    },
    /// Keeps its value, or has the neutral element instead.
    Divide {
        /// Of which reduction.
        op: ReduceOp,
        /// Whether it keeps its value.
        all: bool,
    },
    /// Divides its value by a number.
    Scale {
        /// The number.
        by: usize,
    },
}

/// A collective that a step asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Transfer {
    /// Every rank gets the reduction of all.
    AllReduce {
        /// How.
        op: ReduceOp,
    },
    /// Every rank gets all shards, concatenated.
    AllGather {
        /// The dim.
        dim: usize,
        /// The size of each rank's shard along it.
        sizes: PerRank,
    },
    /// Every rank gets its shard of the reduction of all.
    ReduceScatter {
        /// How.
        op: ReduceOp,
        /// The dim.
        dim: usize,
        /// The size of each rank's shard along it.
        sizes: PerRank,
    },
    /// Every rank splits its value and gets one part from each.
    AllToAll {
        /// The dim that is split.
        split_dim: usize,
        /// The size of what goes to each rank.
        send: PerRank,
        /// The dim along which what arrives is concatenated.
        cat_dim: usize,
        /// The size, along `cat_dim`, of what arrives from each rank.
        receive: PerRank,
    },
}

impl Plan {
    pub(crate) fn new(mesh: &Mesh, from: &Spec, to: &Spec, item: usize) -> Plan {
        let field = Field::new(mesh.shape(), mesh.cost(), from, to, item);
        let plain = straight(&field);

        // Nothing is cheaper than nothing; and where two ways cost the same, the straight one is what people expect.
        let better = if plain.cost > Cost(0) { cheapest(&field, plain.cost) } else { None };
        let straight = better.as_ref().map(|_| Straight {
            cost: plain.cost,
            collectives: plain.moves.iter().filter(|done| done.kind.collective().is_some()).count(),
            bytes: plain.bytes(&field),
        });
        let Way { moves, cost } = better.unwrap_or(plain);
        let mut steps = Vec::with_capacity(moves.len());
        let mut state = field.source;
        for done in moves {
            steps.push(Step::new(&field, mesh, state, done));
            state = field.after(state, &field.cuts(state), done);
        }
        Plan {
            steps,
            from: from.key.placements.clone(),
            to: to.key.placements.clone(),
            shape: from.key.shape[..].into(),
            item,
            cost,
            straight,
            names: mesh.names().cloned(),
        }
    }

    /// The steps, their cost and why they were chosen, for people to read: what `Display` shows.
    pub fn explain(&self) -> String {
        self.to_string()
    }

    /// The steps, in their order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The bytes that a rank sends, at most.
    pub fn bytes(&self) -> usize {
        self.steps.iter().fold(0, |sum, step| sum.saturating_add(step.bytes))
    }

    /// What it is taken to cost, in microseconds.
    pub fn micros(&self) -> f64 {
        self.cost.micros()
    }

    /// What it is taken to cost, in picoseconds: a whole number, of which sums can be compared.
    #[doc(hidden)]
    pub fn picos(&self) -> u64 {
        self.cost.0
    }

    /// The collectives, in their order.
    pub fn collectives(&self) -> Vec<&'static str> {
        self.steps.iter().filter_map(|step| step.collective).collect()
    }

    /// The placements on the way, both ends included, as `S(0)R -> RR`.
    pub fn trace(&self) -> String {
        let mut trace = joined(&self.from);
        for step in &self.steps {
            trace += " -> ";
            trace += &joined(&step.placements);
        }
        trace
    }
}

impl Step {
    /// What this rank does in it, in order; nothing if it is not in the mesh.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// What happens, in words.
    fn what(&self) -> String {
        match self.done.kind {
            Kind::Gather { dim } => format!("gather dim {dim}"),
            Kind::Exchange { from, to } => format!("cut dim {to} instead of dim {from}"),
            Kind::Reduce => "reduce".into(),
            Kind::ReduceScatter { dim } => format!("reduce and cut dim {dim}"),
            Kind::Take { dim, .. } => format!("keep a part of dim {dim}"),
            Kind::Embed { dim } => format!("set the part of dim {dim} into zeros"),
            Kind::Divide { .. } => "keep on one rank only, or on all".into(),
        }
    }

    fn new(field: &Field, mesh: &Mesh, state: State, done: Move) -> Step {
        let cuts = field.cuts(state);
        Step {
            placements: field.placements(field.after(state, &cuts, done)),
            mesh_dims: done.over.iter().collect(),
            collective: done.kind.collective(),
            bytes: field.bytes(&cuts, done),
            micros: field.cost(&cuts, done).micros(),
            done,
            actions: mesh.coordinate().map_or_else(SmallVec::new, |at| actions(field, at, state, done)),
        }
    }
}

/// The length that the first cuts of a dim, all or some, leave on this rank.
fn len_after(field: &Field, state: State, at: &[usize], dim: usize, without: &Move) -> usize {
    let cutters = state.cutters(field.ndim, dim).into_iter();
    cutters
        .filter(|&(_, m, _)| !without.over.iter().any(|gone| gone == m))
        .fold(field.shape[dim], |len, (_, m, split)| cut_len(len, field.splits[split], field.sizes[m], at[m]))
}

/// What the rank at a coordinate does in a move.
fn actions(field: &Field, at: &[usize], state: State, done: Move) -> SmallVec<[Action; 1]> {
    let over: MeshDims = done.over.iter().collect();
    let counts: MeshDims = over.iter().map(|&m| field.sizes[m]).collect();
    let len = |dim: usize| len_after(field, state, at, dim, &done);
    // The sizes of the parts that a cut dim is put together from, and the order they have to be brought into.
    let gathered = |dim: usize| -> (PerRank, Option<Action>) {
        let len = len(dim);
        match over.iter().map(|&m| state.get(m)).next() {
            Some(Holds::Cut { split, .. }) if split > 0 => {
                let (split, n) = (field.splits[split], counts[0]);
                let sizes = (0..n).map(|i| cut_len(len, split, n, i)).collect();
                (sizes, Some(Action::Keep { dim, ranges: in_line(len, split, n) }))
            }
            _ => (nested_sizes(len, &counts), None),
        }
    };
    let communicate = |transfer| Action::Communicate { over: over.clone(), transfer };
    let mut actions = SmallVec::new();
    match done.kind {
        Kind::Gather { dim } => {
            let (sizes, order) = gathered(dim);
            actions.push(communicate(Transfer::AllGather { dim, sizes }));
            actions.extend(order);
        }
        Kind::Exchange { from, to } => {
            let (receive, order) = gathered(from);
            let send = nested_sizes(len(to), &counts);
            actions.push(communicate(Transfer::AllToAll { split_dim: to, send, cat_dim: from, receive }));
            actions.extend(order);
        }
        Kind::Reduce => {
            let (op, by) = reduction(field, state, &over);
            actions.push(communicate(Transfer::AllReduce { op }));
            actions.extend((by > 1).then_some(Action::Scale { by }));
        }
        Kind::ReduceScatter { dim } => {
            let (op, by) = reduction(field, state, &over);
            let sizes = nested_sizes(len(dim), &counts);
            actions.push(communicate(Transfer::ReduceScatter { op, dim, sizes }));
            actions.extend((by > 1).then_some(Action::Scale { by }));
        }
        Kind::Take { dim, split } => {
            let (whole, m) = (SmallVec::from_elem(0..len(dim), 1), over[0]);
            let ranges = chunk_of_each(&whole, field.splits[split], field.sizes[m], at[m]);
            actions.push(Action::Keep { dim, ranges });
        }
        Kind::Embed { dim } => {
            let (len, m) = (len(dim), over[0]);
            actions.push(Action::Embed { dim, start: chunk(len, field.sizes[m], at[m]).start, len });
        }
        Kind::Divide { op } => actions.push(Action::Divide { op, all: at[over[0]] == 0 }),
    }
    actions
}

/// How values along some mesh dims are reduced at once, and by what the result is divided then.
fn reduction(field: &Field, state: State, over: &[usize]) -> (ReduceOp, usize) {
    let first = state.op_along(over[0]);
    if over.iter().all(|&m| state.op_along(m) == first) {
        return (first, 1);
    }
    // Sums and averages together.
    let averaged = over.iter().filter(|&&m| state.op_along(m) == ReduceOp::Avg);
    (ReduceOp::Sum, averaged.map(|&m| field.sizes[m]).product())
}

/// Where the pieces of a dim lie once the parts of all ranks, which have one of each piece, follow one another.
fn in_line(len: usize, split: usize, n: usize) -> Ranges {
    // Where what is left of each rank's part begins.
    let mut next: PerRank = (0..n)
        .scan(0, |start, i| {
            let here = *start;
            *start += cut_len(len, split, n, i);
            Some(here)
        })
        .collect();
    let mut ranges = Ranges::new();
    for piece in pieces(len, split) {
        for (i, start) in next.iter_mut().enumerate() {
            let part = *start..*start + chunk(piece.len(), n, i).len();
            *start = part.end;
            match ranges.last_mut() {
                _ if part.is_empty() => {}
                Some(last) if last.end == part.start => last.end = part.end,
                _ => ranges.push(part),
            }
        }
    }
    ranges
}

impl fmt::Display for Plan {
    /// A line for the whole, one for each step, and one that says why it is this way.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (joined(&self.from), joined(&self.to));
        write!(f, "{from} -> {to} of {:?} ({} bytes each): ", self.shape, self.item)?;
        if self.steps.is_empty() {
            return f.write_str("nothing to do");
        }
        write!(f, "{} bytes sent per rank at most, {:.1} µs", self.bytes(), self.micros())?;
        let mut before = from;
        for (i, step) in self.steps.iter().enumerate() {
            let after = joined(&step.placements);
            write!(f, "\n  {}. {before} -> {after}: ", i + 1)?;
            match step.collective {
                Some(name) => {
                    let dim = |&dim: &usize| match &self.names {
                        Some(names) => names[dim].to_string(),
                        None => dim.to_string(),
                    };
                    let along: Vec<String> = step.mesh_dims.iter().map(dim).collect();
                    let (along, what) = (along.join("×"), step.what());
                    write!(f, "{name} along {along} ({what}), {} bytes, {:.1} µs", step.bytes, step.micros)?;
                }
                None => write!(f, "{}, without communication", step.what())?,
            }
            before = after;
        }
        match &self.straight {
            _ if self.collectives().is_empty() => {
                f.write_str("\n  why: everything needed is on every rank already")
            }
            None => f.write_str("\n  why: no other way costs less"),
            Some(Straight { cost, collectives, bytes }) => write!(
                f,
                "\n  why: one mesh dim after the other it would be {bytes} bytes in {collectives} collectives, {:.1} µs",
                cost.micros()
            ),
        }
    }
}
