//! The cheapest way from one state to another.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use crate::cost::Cost;
use crate::state::{Dims, Field, Holds, Kind, Move, State};
use dtensor_array::ReduceOp;

/// A way from the source to the target.
#[derive(Debug)]
pub(crate) struct Way {
    pub(crate) moves: Vec<Move>,
    pub(crate) cost: Cost,
}

impl Way {
    /// The bytes that a rank sends, at most.
    pub(crate) fn bytes(&self, field: &Field) -> usize {
        let mut state = field.source;
        let mut bytes = 0;
        for &done in &self.moves {
            let cuts = field.cuts(state);
            bytes += field.bytes(&cuts, done);
            state = field.after(state, &cuts, done);
        }
        bytes
    }
}

/// The straight way, mesh dim by mesh dim: what PyTorch does. From right to left every mesh dim takes its target, unless it
/// has to make room for one further left; then from left to right what is left to do.
pub(crate) fn straight(field: &Field) -> Way {
    let mut way = Walk { field, state: field.source, moves: Vec::new(), cost: Cost(0) };
    let in_order = |state: State| {
        (0..field.ndim).all(|m| match state.get(m) {
            Holds::Cut { dim, place, split } => split == 0 && place == left_of(state, m, dim),
            _ => true,
        })
    };
    if in_order(field.source) && in_order(field.target) {
        let cut = |m: usize| matches!(field.source.get(m), Holds::Cut { .. });
        if (0..field.ndim).any(cut) {
            for m in (0..field.ndim).rev() {
                let mut wanted = field.target.get(m);
                if let Holds::Cut { dim, .. } = wanted {
                    let cutters = |state: State| {
                        (0..m).filter(move |&m| matches!(state.get(m), Holds::Cut { dim: d, .. } if d == dim))
                    };
                    if !cutters(way.state).eq(cutters(field.target)) {
                        wanted = Holds::All;
                    }
                }
                way.turn(m, way.undivided(m, wanted));
            }
        }
        for m in 0..field.ndim {
            way.turn(m, way.undivided(m, field.target.get(m)));
        }
        for m in 0..field.ndim {
            way.turn(m, field.target.get(m));
        }
    } else {
        way.unwind();
    }
    Way { moves: way.moves, cost: way.cost }
}

/// How many mesh dims left of `m` cut a dim.
fn left_of(state: State, m: usize, dim: usize) -> usize {
    (0..m).filter(|&other| matches!(state.get(other), Holds::Cut { dim: d, .. } if d == dim)).count()
}

struct Walk<'a> {
    field: &'a Field,
    state: State,
    moves: Vec<Move>,
    cost: Cost,
}

impl Walk<'_> {
    fn go(&mut self, kind: Kind, m: usize) {
        let done = Move { kind, over: Dims::one(m) };
        let cuts = self.field.cuts(self.state);
        self.cost = self.cost.plus(self.field.cost(&cuts, done));
        self.state = self.field.after(self.state, &cuts, done);
        self.moves.push(done);
    }

    /// What is wanted, but that values are divided only when all that are to be reduced have been.
    fn undivided(&self, m: usize, wanted: Holds) -> Holds {
        match (self.state.get(m), wanted) {
            (here, Holds::Partial(_)) if here == wanted => wanted,
            (Holds::Cut { .. }, Holds::Partial(ReduceOp::Sum)) => wanted,
            (_, Holds::Partial(_)) => Holds::All,
            _ => wanted,
        }
    }

    /// Brings one mesh dim to what is wanted of it.
    fn turn(&mut self, m: usize, wanted: Holds) {
        let alike = |a: Holds, b: Holds| match (a, b) {
            (Holds::Cut { dim: a, .. }, Holds::Cut { dim: b, .. }) => a == b,
            (a, b) => a == b,
        };
        let here = self.state.get(m);
        if alike(here, wanted) {
            return;
        }
        match (here, wanted) {
            (Holds::Cut { dim: from, .. }, Holds::Cut { dim: to, .. }) => {
                return self.go(Kind::Exchange { from, to }, m);
            }
            (Holds::Partial(_), Holds::Cut { dim, .. }) => return self.go(Kind::ReduceScatter { dim }, m),
            (Holds::Cut { dim, .. }, Holds::Partial(ReduceOp::Sum)) => {
                return self.go(Kind::Embed { dim }, m);
            }
            (Holds::Cut { dim, .. }, _) => self.go(Kind::Gather { dim }, m),
            (Holds::Partial(_), _) => self.go(Kind::Reduce, m),
            (Holds::All, _) => {}
        }
        match wanted {
            Holds::All => {}
            Holds::Cut { dim, split, .. } => self.go(Kind::Take { dim, split }, m),
            Holds::Partial(op) => self.go(Kind::Divide { op }, m),
        }
    }

    /// Undoes every cut that is not the target's own, last ones first, and makes the target's. Always possible.
    fn unwind(&mut self) {
        for m in 0..self.field.ndim {
            if let (Holds::Partial(op), wanted) = (self.state.get(m), self.field.target.get(m))
                && wanted != Holds::Partial(op)
            {
                self.go(Kind::Reduce, m);
            }
        }
        for dim in 0..self.field.shape.len() {
            let cutters = |state: State| state.cutters(self.field.ndim, dim);
            let (here, there) = (cutters(self.state), cutters(self.field.target));
            let common = here.iter().zip(&there).take_while(|(a, b)| a == b).count();
            for &(_, m, _) in here[common..].iter().rev() {
                self.go(Kind::Gather { dim }, m);
            }
        }
        // A mesh dim may have left one tensor dim for another, so that all room is made before any is taken.
        for dim in 0..self.field.shape.len() {
            for (_, m, split) in self.field.target.cutters(self.field.ndim, dim) {
                if self.state.get(m) == Holds::All {
                    self.go(Kind::Take { dim, split }, m);
                }
            }
        }
        for m in 0..self.field.ndim {
            if let (Holds::All, Holds::Partial(op)) = (self.state.get(m), self.field.target.get(m)) {
                self.go(Kind::Divide { op }, m);
            }
        }
    }
}

/// The cheapest way to a state so far.
struct Reached {
    state: State,
    cost: Cost,
    /// What is left to pay at least.
    remaining: Cost,
    steps: u32,
    /// Where the state before is among those reached.
    from: u32,
    by: Move,
    settled: bool,
}

/// A way that is cheaper than `limit`, and as cheap as any; or nothing.
pub(crate) fn cheapest(field: &Field, limit: Cost) -> Option<Way> {
    let nothing = Move { kind: Kind::Reduce, over: Dims::default() };
    let remaining = field.remaining(field.source);
    let mut reached = Vec::with_capacity(USUAL);
    reached.push(Reached {
        state: field.source,
        cost: Cost(0),
        remaining,
        steps: 0,
        from: 0,
        by: nothing,
        settled: false,
    });
    let mut known: FxHashMap<State, u32> = FxHashMap::with_capacity_and_hasher(USUAL, Default::default());
    known.insert(field.source, 0);
    // The most promising first; among equals the one that has come furthest.
    let mut queue = BinaryHeap::with_capacity(USUAL);
    queue.push(Reverse((remaining, remaining, 0u32, 0u32)));
    let mut budget = BUDGET;
    while let Some(Reverse((_, _, _, at))) = queue.pop() {
        let here = &mut reached[at as usize];
        if std::mem::replace(&mut here.settled, true) {
            continue;
        }
        let (state, cost, steps) = (here.state, here.cost, here.steps + 1);
        if state == field.target {
            return Some(trace(&reached, at));
        }
        budget -= 1;
        if budget == 0 {
            break;
        }
        let cuts = field.cuts(state);
        field.moves(state, &cuts, |by, price| {
            let cost = cost.plus(price);
            if cost >= limit {
                return;
            }
            let next = field.after(state, &cuts, by);
            match known.entry(next) {
                Entry::Occupied(old) => {
                    let index = *old.get();
                    let old = &mut reached[index as usize];
                    if (cost, steps) < (old.cost, old.steps) {
                        *old = Reached { cost, steps, from: at, by, settled: false, ..*old };
                        queue.push(Reverse((cost.plus(old.remaining), old.remaining, steps, index)));
                    }
                }
                Entry::Vacant(new) => {
                    let remaining = field.remaining(next);
                    let bound = cost.plus(remaining);
                    if bound < limit {
                        let index = reached.len() as u32;
                        new.insert(index);
                        let settled = false;
                        reached.push(Reached { state: next, cost, remaining, steps, from: at, by, settled });
                        queue.push(Reverse((bound, remaining, steps, index)));
                    }
                }
            }
        });
    }
    // The best found so far, if the target was reached at all.
    known.get(&field.target).map(|&at| trace(&reached, at))
}

/// How many states are looked at. Up to three mesh dims, and nearly always up to four, fewer are enough to find the cheapest way;
/// beyond, a good one in a few milliseconds is better than the best one in minutes. All ranks count alike.
const BUDGET: u32 = 1 << 12;

/// How many states most searches reach.
const USUAL: usize = 512;

fn trace(reached: &[Reached], mut at: u32) -> Way {
    let cost = reached[at as usize].cost;
    let mut moves = Vec::new();
    while at != 0 {
        let step = &reached[at as usize];
        moves.push(step.by);
        at = step.from;
    }
    moves.reverse();
    Way { moves, cost }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CostModel, Mesh, Partial, Planner, Replicate, Shard};

    /// What the cheapest ways to all states cost that are not dearer than `limit`, found without any estimate.
    fn costs(field: &Field, limit: Cost) -> FxHashMap<State, Cost> {
        let mut known: FxHashMap<State, Cost> = FxHashMap::default();
        known.insert(field.source, Cost(0));
        let mut todo = BinaryHeap::from([Reverse((Cost(0), field.source))]);
        while let Some(Reverse((cost, state))) = todo.pop() {
            if known[&state] < cost {
                continue;
            }
            let cuts = field.cuts(state);
            field.moves(state, &cuts, |by, price| {
                let (next, total) = (field.after(state, &cuts, by), cost.plus(price));
                if total <= limit && known.get(&next).is_none_or(|&old| total < old) {
                    known.insert(next, total);
                    todo.push(Reverse((total, next)));
                }
            });
        }
        known
    }

    /// If the estimate of what remains were ever too high, the search would miss the cheapest way.
    #[test]
    fn no_way_is_cheaper_than_the_one_found() {
        let each = [Replicate, Partial(ReduceOp::Sum), Shard(0), Shard(1), Shard(2)];
        for (sizes, shape) in
            [([2, 3], [4096, 1024, 600]), ([4, 3], [33, 1000, 7]), ([3, 3], [100_000, 10_000, 9])]
        {
            let planner = Planner::new(Mesh::new(sizes, ()).unwrap());
            for across in [true, false] {
                let model = CostModel::default().across_dims(across);
                for i in 0..625 {
                    let placements = |i: usize| [each[i % 5], each[i / 5]];
                    let spec = |i: usize| planner.spec("test", placements(i), shape).unwrap();
                    let (from, to) = (spec(i % 25), spec(i / 25));
                    let field = Field::new(&sizes, &model, &from, &to, 4);
                    let direct = straight(&field);
                    let least = costs(&field, direct.cost)[&field.target];
                    let found = cheapest(&field, direct.cost).unwrap_or(direct).cost;
                    assert_eq!(found, least, "{from} to {to} on {sizes:?}");
                }
            }
        }
    }
}
