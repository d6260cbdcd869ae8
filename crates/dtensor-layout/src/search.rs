//! Searches the cheapest path from one state to another.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use crate::cost::Cost;
use crate::state::{DimState, MeshDimList, SearchSpace, ShardState, Transition, TransitionKind};
use dtensor_array::ReduceOp;

/// A path from the source to the target.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) transitions: Vec<Transition>,
    pub(crate) cost: Cost,
}

impl Path {
    /// Returns the largest number of bytes that a rank sends.
    pub(crate) fn bytes(&self, space: &SearchSpace) -> usize {
        let mut state = space.source;
        let mut bytes = 0;
        for &transition in &self.transitions {
            let shards = space.shard_sizes(state);
            bytes += space.bytes(&shards, transition);
            state = space.after(state, &shards, transition);
        }
        bytes
    }
}

/// Returns the path that changes one mesh dim at a time, as PyTorch does. From right to left, every mesh dim moves to its target if
/// the mesh dims to its left shard its tensor dim as in the target, and is replicated otherwise. Then every mesh dim that is not at
/// its target moves there, from left to right.
pub(crate) fn dim_by_dim(space: &SearchSpace) -> Path {
    let mut path = PathBuilder { space, state: space.source, transitions: Vec::new(), cost: Cost(0) };
    let in_order = |state: ShardState| {
        (0..space.ndim).all(|m| match state.get(m) {
            DimState::Sharded { dim, order, split } => split == 0 && order == count_left_of(state, m, dim),
            _ => true,
        })
    };
    if in_order(space.source) && in_order(space.target) {
        let is_sharded = |m: usize| matches!(space.source.get(m), DimState::Sharded { .. });
        if (0..space.ndim).any(is_sharded) {
            for m in (0..space.ndim).rev() {
                let mut target = space.target.get(m);
                if let DimState::Sharded { dim, .. } = target {
                    let shards_left_of_m = |state: ShardState| {
                        (0..m).filter(
                            move |&m| matches!(state.get(m), DimState::Sharded { dim: d, .. } if d == dim),
                        )
                    };
                    if !shards_left_of_m(path.state).eq(shards_left_of_m(space.target)) {
                        target = DimState::Replicated;
                    }
                }
                path.change(m, path.without_divide(m, target));
            }
        }
        for m in 0..space.ndim {
            path.change(m, path.without_divide(m, space.target.get(m)));
        }
        for m in 0..space.ndim {
            path.change(m, space.target.get(m));
        }
    } else {
        path.unshard_and_shard();
    }
    Path { transitions: path.transitions, cost: path.cost }
}

/// Returns how many mesh dims left of `m` shard a tensor dim.
fn count_left_of(state: ShardState, m: usize, dim: usize) -> usize {
    (0..m).filter(|&other| matches!(state.get(other), DimState::Sharded { dim: d, .. } if d == dim)).count()
}

/// A path under construction.
struct PathBuilder<'a> {
    space: &'a SearchSpace,
    state: ShardState,
    transitions: Vec<Transition>,
    cost: Cost,
}

impl PathBuilder<'_> {
    /// Appends a transition along one mesh dim.
    fn push(&mut self, kind: TransitionKind, m: usize) {
        let transition = Transition { kind, over: MeshDimList::one(m) };
        let shards = self.space.shard_sizes(self.state);
        self.cost = self.cost.plus(self.space.cost(&shards, transition));
        self.state = self.space.after(self.state, &shards, transition);
        self.transitions.push(transition);
    }

    /// Returns `target`, or replicated if a replicated value would have to become partial. This is transition last, after all reductions.
    fn without_divide(&self, m: usize, target: DimState) -> DimState {
        match (self.state.get(m), target) {
            (here, DimState::Partial(_)) if here == target => target,
            (DimState::Sharded { .. }, DimState::Partial(ReduceOp::Sum)) => target,
            (_, DimState::Partial(_)) => DimState::Replicated,
            _ => target,
        }
    }

    /// Appends the transitions that bring one mesh dim to `target`.
    fn change(&mut self, m: usize, target: DimState) {
        let alike = |a: DimState, b: DimState| match (a, b) {
            (DimState::Sharded { dim: a, .. }, DimState::Sharded { dim: b, .. }) => a == b,
            (a, b) => a == b,
        };
        let here = self.state.get(m);
        if alike(here, target) {
            return;
        }
        match (here, target) {
            (DimState::Sharded { dim: from, .. }, DimState::Sharded { dim: to, .. }) => {
                return self.push(TransitionKind::Exchange { from, to }, m);
            }
            (DimState::Partial(_), DimState::Sharded { dim, .. }) => {
                return self.push(TransitionKind::ReduceScatter { dim }, m);
            }
            (DimState::Sharded { dim, .. }, DimState::Partial(ReduceOp::Sum)) => {
                return self.push(TransitionKind::Embed { dim }, m);
            }
            (DimState::Sharded { dim, .. }, _) => self.push(TransitionKind::Gather { dim }, m),
            (DimState::Partial(_), _) => self.push(TransitionKind::Reduce, m),
            (DimState::Replicated, _) => {}
        }
        match target {
            DimState::Replicated => {}
            DimState::Sharded { dim, split, .. } => self.push(TransitionKind::Slice { dim, split }, m),
            DimState::Partial(op) => self.push(TransitionKind::Divide { op }, m),
        }
    }

    /// Undoes every sharding that the target does not have, the last one first, then adds those of the target. This is always
    /// possible.
    fn unshard_and_shard(&mut self) {
        for m in 0..self.space.ndim {
            if let (DimState::Partial(op), target) = (self.state.get(m), self.space.target.get(m))
                && target != DimState::Partial(op)
            {
                self.push(TransitionKind::Reduce, m);
            }
        }
        for dim in 0..self.space.shape.len() {
            let sharding_order = |state: ShardState| state.sharding_order(self.space.ndim, dim);
            let (here, there) = (sharding_order(self.state), sharding_order(self.space.target));
            let common = here.iter().zip(&there).take_while(|(a, b)| a == b).count();
            for &(_, m, _) in here[common..].iter().rev() {
                self.push(TransitionKind::Gather { dim }, m);
            }
        }
        // A mesh dim may shard another tensor dim in the target, so all shardings are undone before any is added.
        for dim in 0..self.space.shape.len() {
            for (_, m, split) in self.space.target.sharding_order(self.space.ndim, dim) {
                if self.state.get(m) == DimState::Replicated {
                    self.push(TransitionKind::Slice { dim, split }, m);
                }
            }
        }
        for m in 0..self.space.ndim {
            if let (DimState::Replicated, DimState::Partial(op)) =
                (self.state.get(m), self.space.target.get(m))
            {
                self.push(TransitionKind::Divide { op }, m);
            }
        }
    }
}

/// A state that the search has reached, and the cheapest path to it so far.
struct Node {
    state: ShardState,
    cost: Cost,
    /// A lower bound of the cost from here to the target.
    remaining: Cost,
    steps: u32,
    /// The index of the node before.
    from: u32,
    /// The transition from the node before.
    by: Transition,
    settled: bool,
}

/// Returns the cheapest path if it is cheaper than `limit`, by an A* search. On large meshes the search is cut short (see
/// [`MAX_NODES`]), and the path may not be the cheapest.
pub(crate) fn cheapest(space: &SearchSpace, limit: Cost) -> Option<Path> {
    let no_transition = Transition { kind: TransitionKind::Reduce, over: MeshDimList::default() };
    let remaining = space.min_remaining_cost(space.source);
    let mut nodes = Vec::with_capacity(USUAL);
    nodes.push(Node {
        state: space.source,
        cost: Cost(0),
        remaining,
        steps: 0,
        from: 0,
        by: no_transition,
        settled: false,
    });
    let mut known: FxHashMap<ShardState, u32> =
        FxHashMap::with_capacity_and_hasher(USUAL, Default::default());
    known.insert(space.source, 0);
    // The node with the lowest bound first. Among equals, the one nearest to the target.
    let mut queue = BinaryHeap::with_capacity(USUAL);
    queue.push(Reverse((remaining, remaining, 0u32, 0u32)));
    let mut budget = MAX_NODES;
    while let Some(Reverse((_, _, _, at))) = queue.pop() {
        let here = &mut nodes[at as usize];
        if std::mem::replace(&mut here.settled, true) {
            continue;
        }
        let (state, cost, steps) = (here.state, here.cost, here.steps + 1);
        if state == space.target {
            return Some(path_to(&nodes, at));
        }
        budget -= 1;
        if budget == 0 {
            break;
        }
        let shards = space.shard_sizes(state);
        space.transitions(state, &shards, |by, price| {
            let cost = cost.plus(price);
            if cost >= limit {
                return;
            }
            let next = space.after(state, &shards, by);
            match known.entry(next) {
                Entry::Occupied(old) => {
                    let index = *old.get();
                    let old = &mut nodes[index as usize];
                    if (cost, steps) < (old.cost, old.steps) {
                        *old = Node { cost, steps, from: at, by, settled: false, ..*old };
                        queue.push(Reverse((cost.plus(old.remaining), old.remaining, steps, index)));
                    }
                }
                Entry::Vacant(new) => {
                    let remaining = space.min_remaining_cost(next);
                    let bound = cost.plus(remaining);
                    if bound < limit {
                        let index = nodes.len() as u32;
                        new.insert(index);
                        let settled = false;
                        nodes.push(Node { state: next, cost, remaining, steps, from: at, by, settled });
                        queue.push(Reverse((bound, remaining, steps, index)));
                    }
                }
            }
        });
    }
    // The best path so far, if the target was reached at all.
    known.get(&space.target).map(|&at| path_to(&nodes, at))
}

/// The maximum number of states that the search expands. It is enough for the cheapest path on meshes of up to three dims, and nearly
/// always of four. On larger meshes, a good path in a few milliseconds is better than the best one in minutes. The limit is a count
/// and not a time, so that all ranks find the same path.
const MAX_NODES: u32 = 1 << 12;

/// The number of states that most searches reach.
const USUAL: usize = 512;

/// Returns the path from the source to a node.
fn path_to(nodes: &[Node], mut at: u32) -> Path {
    let cost = nodes[at as usize].cost;
    let mut transitions = Vec::new();
    while at != 0 {
        let node = &nodes[at as usize];
        transitions.push(node.by);
        at = node.from;
    }
    transitions.reverse();
    Path { transitions, cost }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CostModel, Mesh, Partial, Planner, Replicate, Shard};

    /// Returns the costs of the cheapest paths to all states, up to `limit`, found by Dijkstra's algorithm, without an estimate.
    fn costs(space: &SearchSpace, limit: Cost) -> FxHashMap<ShardState, Cost> {
        let mut known: FxHashMap<ShardState, Cost> = FxHashMap::default();
        known.insert(space.source, Cost(0));
        let mut todo = BinaryHeap::from([Reverse((Cost(0), space.source))]);
        while let Some(Reverse((cost, state))) = todo.pop() {
            if known[&state] < cost {
                continue;
            }
            let shards = space.shard_sizes(state);
            space.transitions(state, &shards, |by, price| {
                let (next, total) = (space.after(state, &shards, by), cost.plus(price));
                if total <= limit && known.get(&next).is_none_or(|&old| total < old) {
                    known.insert(next, total);
                    todo.push(Reverse((total, next)));
                }
            });
        }
        known
    }

    /// If the lower bound were ever too high, the search would miss the cheapest path.
    #[test]
    fn the_search_finds_the_cheapest_path() {
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
                    let space = SearchSpace::new(&sizes, &model, &from, &to, 4);
                    let direct = dim_by_dim(&space);
                    let least = costs(&space, direct.cost)[&space.target];
                    let found = cheapest(&space, direct.cost).unwrap_or(direct).cost;
                    assert_eq!(found, least, "{from} to {to} on {sizes:?}");
                }
            }
        }
    }
}
