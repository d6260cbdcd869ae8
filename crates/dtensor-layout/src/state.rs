//! The states between two layouts, and the transitions from one state to the next.
//!
//! A state says how the tensor is distributed along every mesh dim, and in which order mesh dims shard each tensor dim. The last
//! sharding of a tensor dim is undone first, and a new one is added last. So every shard follows the chunk rule, for all sizes, and
//! every transition is exact without padding.

use smallvec::SmallVec;

use crate::MAX_DIMS;
use crate::chunk::shard_len;
use crate::cost::{Cost, CostModel, Rate};
use crate::{Partial, Placement, Replicate, Shard, Spec, StridedShard};
use dtensor_array::ReduceOp;

/// How a tensor is distributed along one mesh dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DimState {
    Replicated,
    Partial(ReduceOp),
    /// Tensor dim `dim` is sharded, after `order` other mesh dims sharded it. `split` is the index of the split factor in
    /// [`SearchSpace::splits`].
    Sharded {
        dim: usize,
        order: usize,
        split: usize,
    },
}

/// How a tensor is distributed along every mesh dim, in 16 bits each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) struct ShardState(u128);

impl ShardState {
    /// Encodes one mesh dim in 16 bits.
    fn encode(dim_state: DimState) -> u16 {
        match dim_state {
            DimState::Replicated => 0,
            DimState::Partial(op) => 1 | (op as u16) << 2,
            DimState::Sharded { dim, order, split } => {
                2 | (order as u16) << 2 | (split as u16) << 5 | (dim as u16) << 10
            }
        }
    }

    pub(crate) fn get(self, mesh_dim: usize) -> DimState {
        let code = (self.0 >> (16 * mesh_dim)) as u16;
        match code & 3 {
            0 => DimState::Replicated,
            1 => DimState::Partial(ReduceOp::ALL[usize::from(code >> 2)]),
            _ => DimState::Sharded {
                order: usize::from(code >> 2 & 7),
                split: usize::from(code >> 5 & 31),
                dim: usize::from(code >> 10),
            },
        }
    }

    /// Returns the state with another distribution along one mesh dim.
    pub(crate) fn with(self, mesh_dim: usize, dim_state: DimState) -> ShardState {
        let shift = 16 * mesh_dim;
        ShardState(self.0 & !(0xffff << shift) | u128::from(ShardState::encode(dim_state)) << shift)
    }

    /// Returns the reduction of the partial values along a mesh dim.
    pub(crate) fn op_along(self, mesh_dim: usize) -> ReduceOp {
        match self.get(mesh_dim) {
            DimState::Partial(op) => op,
            _ => ReduceOp::Sum,
        }
    }

    /// Returns which of the `ndim` mesh dims shard a tensor dim, in the order in which they do: the position in that order, the mesh
    /// dim and the split of each.
    pub(crate) fn sharding_order(self, ndim: usize, dim: usize) -> SmallVec<[(usize, usize, usize); 8]> {
        let sharding = |m| match self.get(m) {
            DimState::Sharded { dim: d, order, split } if d == dim => Some((order, m, split)),
            _ => None,
        };
        let mut list: SmallVec<[_; 8]> = (0..ndim).filter_map(sharding).collect();
        list.sort_unstable();
        list
    }
}

/// A list of mesh dims in a fixed order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MeshDimList {
    len: u8,
    dims: [u8; MAX_DIMS],
}

impl MeshDimList {
    pub(crate) fn one(dim: usize) -> MeshDimList {
        let mut dims = MeshDimList::default();
        dims.push(dim);
        dims
    }

    fn push(&mut self, dim: usize) {
        self.dims[usize::from(self.len)] = dim as u8;
        self.len += 1;
    }

    pub(crate) fn len(&self) -> usize {
        usize::from(self.len)
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.dims[..self.len()].iter().map(|&dim| usize::from(dim))
    }

    /// Returns the last `len` mesh dims.
    fn tail(&self, len: usize) -> MeshDimList {
        let mut tail = MeshDimList::default();
        self.iter().skip(self.len() - len).for_each(|dim| tail.push(dim));
        tail
    }
}

/// A transition from one state to the next, along one or several mesh dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transition {
    pub(crate) kind: TransitionKind,
    /// The mesh dims, in the order in which they shard.
    pub(crate) over: MeshDimList,
}

/// What happens in a transition. MeshDimList are those of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransitionKind {
    /// Sharded -> replicated: an all-gather.
    Gather { dim: usize },
    /// Sharded along one dim -> sharded along another: an all-to-all.
    Exchange { from: usize, to: usize },
    /// Partial -> replicated: an all-reduce.
    Reduce,
    /// Partial -> sharded: a reduce-scatter.
    ReduceScatter { dim: usize },
    /// Replicated -> sharded: every rank keeps its shard, without communication. `split` as in [`DimState`].
    Slice { dim: usize, split: usize },
    /// Sharded -> partial sum: every rank pads its shard with zeros, without communication.
    Embed { dim: usize },
    /// Replicated -> partial, without communication: in a sum, for example, one rank keeps the value and the others take zeros.
    Divide { op: ReduceOp },
}

impl TransitionKind {
    /// Returns the name of the collective, if it communicates.
    pub(crate) fn collective(self) -> Option<&'static str> {
        match self {
            TransitionKind::Gather { .. } => Some("all_gather"),
            TransitionKind::Exchange { .. } => Some("all_to_all"),
            TransitionKind::Reduce => Some("all_reduce"),
            TransitionKind::ReduceScatter { .. } => Some("reduce_scatter"),
            TransitionKind::Slice { .. } | TransitionKind::Embed { .. } | TransitionKind::Divide { .. } => {
                None
            }
        }
    }
}

/// The search for the cheapest path: source, target, and everything that transitions and costs depend on.
pub(crate) struct SearchSpace {
    /// The sizes of the mesh dims. States leave out mesh dims of size 1, because these never matter.
    pub(crate) sizes: [usize; MAX_DIMS],
    pub(crate) ndim: usize,
    pub(crate) shape: SmallVec<[usize; 6]>,
    /// The bytes of one element.
    item: usize,
    rates: [Rate; MAX_DIMS],
    /// The split factors that occur. The first is 1.
    pub(crate) splits: SmallVec<[usize; 4]>,
    /// True if one collective may run along several mesh dims.
    across: bool,
    pub(crate) source: ShardState,
    pub(crate) target: ShardState,
    /// The tensor dims that the search may shard.
    candidates: SmallVec<[usize; 6]>,
    /// One divided by the size of each mesh dim, for estimates.
    shares: [f64; MAX_DIMS],
    /// The number of elements of the full tensor.
    elements: f64,
    /// The number of elements of a shard if every mesh dim shards.
    smallest: f64,
    /// The lowest latency and the highest speed of all links.
    fastest: Rate,
}

/// For one state: the order in which mesh dims shard each tensor dim, and the size of the largest shard.
pub(crate) struct ShardSizes {
    orders: SmallVec<[MeshDimList; 6]>,
    /// The largest shard size along each tensor dim.
    lens: SmallVec<[usize; 6]>,
    /// The number of elements of the largest shard.
    local: usize,
    /// The number of elements of the largest shard for each index of a tensor dim.
    per_index: SmallVec<[usize; 6]>,
}

impl SearchSpace {
    pub(crate) fn new(sizes: &[usize], cost: &CostModel, from: &Spec, to: &Spec, item: usize) -> SearchSpace {
        let mut space = SearchSpace {
            sizes: [1; MAX_DIMS],
            ndim: sizes.len(),
            shape: from.key.shape[..].into(),
            item,
            rates: [Rate::default(); MAX_DIMS],
            splits: SmallVec::from_elem(1, 1),
            across: cost.is_across_dims(),
            source: ShardState::default(),
            target: ShardState::default(),
            candidates: SmallVec::new(),
            shares: [1.0; MAX_DIMS],
            elements: from.key.shape.iter().map(|&len| len as f64).product(),
            smallest: 0.0,
            fastest: Rate::SLOWEST,
        };
        space.sizes[..sizes.len()].copy_from_slice(sizes);
        for (dim, rate) in space.rates[..sizes.len()].iter_mut().enumerate() {
            *rate = Rate::of(cost.link(dim));
            space.shares[dim] = 1.0 / sizes[dim] as f64;
            if sizes[dim] > 1 {
                space.fastest = space.fastest.faster(*rate);
            }
        }
        space.smallest = space.elements * space.shares.iter().product::<f64>();
        space.source = space.state(from);
        space.target = space.state(to);
        let is_sharded = |spec: &Spec, dim: usize| spec.shardings.iter().any(|sharding| sharding.dim == dim);
        let mut extra: SmallVec<[usize; 4]> = SmallVec::new();
        for (dim, &len) in from.key.shape.iter().enumerate() {
            let needed = is_sharded(from, dim) || is_sharded(to, dim);
            // Other dims can help on the way. Of those of equal size, as many are enough as there are mesh dims to shard them.
            let alike = extra.iter().filter(|&&other| other == len).count();
            if needed || (len > 1 && alike < sizes.len()) {
                space.candidates.push(dim);
                if !needed {
                    extra.push(len);
                }
            }
        }
        space
    }

    /// Returns the state of a spec.
    fn state(&mut self, spec: &Spec) -> ShardState {
        let mut state = ShardState::default();
        for (mesh_dim, placement) in spec.key.placements.iter().enumerate() {
            if let (Partial(op), true) = (*placement, self.sizes[mesh_dim] > 1) {
                state = state.with(mesh_dim, DimState::Partial(op));
            }
        }
        let mut orders: SmallVec<[usize; 6]> = SmallVec::from_elem(0, self.shape.len());
        for sharding in spec.shardings.iter().filter(|sharding| self.sizes[sharding.mesh_dim] > 1) {
            let split = self.splits.iter().position(|&split| split == sharding.split).unwrap_or_else(|| {
                self.splits.push(sharding.split);
                self.splits.len() - 1
            });
            let order = orders[sharding.dim];
            orders[sharding.dim] += 1;
            state = state.with(sharding.mesh_dim, DimState::Sharded { dim: sharding.dim, order, split });
        }
        state
    }

    /// Returns the placements of a state, to be displayed.
    pub(crate) fn placements(&self, state: ShardState) -> Vec<Placement> {
        let shards = self.shard_sizes(state);
        let placement = |mesh_dim| match state.get(mesh_dim) {
            DimState::Replicated => Replicate,
            DimState::Partial(op) => Partial(op),
            DimState::Sharded { dim, order, split } => {
                // If mesh dims further right sharded the dim before, the placement is a strided shard.
                let before = shards.orders[dim].iter().take(order).filter(|&other| other > mesh_dim);
                let factor = self.splits[split] * before.map(|other| self.sizes[other]).product::<usize>();
                match factor {
                    1 => Shard(dim as isize),
                    split_factor => StridedShard { dim: dim as isize, split_factor },
                }
            }
        };
        (0..self.ndim).map(placement).collect()
    }

    /// Returns the sharding orders and shard sizes of a state.
    pub(crate) fn shard_sizes(&self, state: ShardState) -> ShardSizes {
        let orders = SmallVec::from_elem(MeshDimList::default(), self.shape.len());
        let mut shards =
            ShardSizes { orders, lens: self.shape.clone(), local: 0, per_index: SmallVec::new() };
        for mesh_dim in 0..self.ndim {
            if let DimState::Sharded { dim, order, .. } = state.get(mesh_dim) {
                let list = &mut shards.orders[dim];
                list.dims[order] = mesh_dim as u8;
                list.len += 1;
            }
        }
        for (list, len) in shards.orders.iter().zip(&mut shards.lens) {
            let strided = |m: usize| matches!(state.get(m), DimState::Sharded { split, .. } if split > 0);
            if list.iter().skip(1).any(strided) {
                *len = self.largest_shard_len(*len, state, list);
                continue;
            }
            for mesh_dim in list.iter() {
                let DimState::Sharded { split, .. } = state.get(mesh_dim) else { continue };
                *len = self.first_shard_len(*len, split, self.sizes[mesh_dim]);
            }
        }
        shards.local = shards.lens.iter().product();
        shards.per_index = shards.lens.iter().map(|&len| shards.local / len.max(1)).collect();
        shards
    }

    /// Returns the size of the first of `n` shards, which is the largest.
    fn first_shard_len(&self, len: usize, split: usize, n: usize) -> usize {
        if split == 0 || len == 0 {
            return len.div_ceil(n);
        }
        let piece = len.div_ceil(self.splits[split]);
        (len / piece) * piece.div_ceil(n) + (len % piece).div_ceil(n)
    }

    /// Returns the size of the largest shard after all shardings in `list`. With strided shardings it need not be that of the first
    /// ranks, because a strided sharding may give a larger shard of fewer indices. For example, seven indices over two ranks are four
    /// and three. Split into three pieces and sharded over two ranks, the first rank then holds two of the four, but three of the
    /// three.
    fn largest_shard_len(&self, len: usize, state: ShardState, list: &MeshDimList) -> usize {
        let mut lens: SmallVec<[usize; 8]> = SmallVec::from_elem(len, 1);
        for mesh_dim in list.iter() {
            let DimState::Sharded { split, .. } = state.get(mesh_dim) else { continue };
            let n = self.sizes[mesh_dim];
            let mut shard_lens: SmallVec<[usize; 8]> = SmallVec::new();
            for &len in &lens {
                for shard in (0..n).map(|i| shard_len(len, self.splits[split], n, i)) {
                    if !shard_lens.contains(&shard) {
                        shard_lens.push(shard);
                    }
                }
            }
            lens = shard_lens;
        }
        lens.into_iter().max().unwrap_or(0)
    }

    /// Returns a lower bound of the cost from a state to the target: the estimate of the A* search.
    ///
    /// It counts elements, treats all shards as equal, and treats an all-reduce as a reduce-scatter and an all-gather. Let `y` be the
    /// smallest number of elements that a rank holds on the path.
    ///
    /// - Gathering, or padding with zeros, costs what the value grows by: from `y` to its size in the target, plus what it shrank
    ///   before, which is what reductions send.
    /// - A reduction over `n` ranks leaves at least `y` elements, so it costs at least `(n - 1) * y`. And for every element, all but
    ///   one of the `n` summands must be sent. Ranks that hold the same summands can share this work.
    /// - If a mesh dim must shard another tensor dim, this takes an exchange, which costs a share of `y`, or a gather that must be
    ///   undone. One exchange moves mesh dims from one tensor dim only.
    ///
    /// The sum is convex and piecewise linear in `y`, so its minimum is at one of the corners.
    pub(crate) fn min_remaining_cost(&self, state: ShardState) -> Cost {
        let (mut size, mut target_size) = (self.elements, self.elements);
        let (mut misplaced, mut exchanged) = (0u64, 0u64);
        let (mut slope, mut share) = (0.0, 1.0f64);
        let (mut summands, mut sharing) = (1.0, 1.0);
        for m in 0..self.ndim {
            let (here, there) = (state.get(m), self.target.get(m));
            match here {
                DimState::Replicated => sharing *= self.shares[m],
                DimState::Sharded { dim, .. } => {
                    size *= self.shares[m];
                    if here != there {
                        misplaced |= 1 << dim;
                        if matches!(there, DimState::Sharded { .. }) {
                            exchanged |= 1 << dim;
                            share = share.min(1.0 - self.shares[m]);
                        }
                    }
                }
                DimState::Partial(_) if here != there => {
                    slope += self.sizes[m] as f64 - 1.0;
                    summands *= self.shares[m];
                }
                // It may be reduced on the path for a while, so that other transitions send less.
                DimState::Partial(_) => sharing *= self.shares[m],
            }
            if matches!(there, DimState::Sharded { .. }) {
                target_size *= self.shares[m];
            }
        }
        let collectives = u64::from(misplaced.count_ones()) + u64::from(slope > 0.0);
        let moved = f64::from(exchanged.count_ones()) * share;
        let sent = (1.0 - summands) * size * sharing;
        let high = size.min(target_size);
        // Products in another order may differ in the last digit.
        let low = self.smallest.min(high);
        let corner = if slope > 0.0 { (sent / slope).clamp(low, high) } else { high };
        let grown = target_size - size + sent;
        let bend = (size - sent).clamp(low, high);
        let at = |y: f64| (target_size - y).max(grown) + (slope * y).max(sent) + moved * y;
        let elements = at(low).min(at(corner)).min(at(bend)).min(at(high));
        // Subtract more than rounding could add, here and in the costs of transitions.
        let bytes = elements * self.item as f64 * (1.0 - 1e-12) - 8.0;
        self.fastest.total_cost(collectives, bytes.max(0.0) as usize)
    }

    /// Returns the state after a transition, which must be possible.
    pub(crate) fn after(&self, state: ShardState, shards: &ShardSizes, transition: Transition) -> ShardState {
        let mut next = state;
        let count = |dim: usize| shards.orders[dim].len();
        match transition.kind {
            TransitionKind::Gather { .. } | TransitionKind::Reduce => {
                transition.over.iter().for_each(|m| next = next.with(m, DimState::Replicated));
            }
            TransitionKind::Exchange { to: dim, .. } | TransitionKind::ReduceScatter { dim } => {
                for (order, m) in (count(dim)..).zip(transition.over.iter()) {
                    next = next.with(m, DimState::Sharded { dim, order, split: 0 });
                }
            }
            TransitionKind::Slice { dim, split } => {
                for (order, m) in (count(dim)..).zip(transition.over.iter()) {
                    next = next.with(m, DimState::Sharded { dim, order, split });
                }
            }
            TransitionKind::Embed { .. } => {
                transition.over.iter().for_each(|m| next = next.with(m, DimState::Partial(ReduceOp::Sum)));
            }
            TransitionKind::Divide { op } => {
                transition.over.iter().for_each(|m| next = next.with(m, DimState::Partial(op)))
            }
        }
        next
    }

    /// Returns the largest number of bytes that a rank sends in a transition.
    pub(crate) fn bytes(&self, shards: &ShardSizes, transition: Transition) -> usize {
        self.bytes_over(shards, transition.kind, transition.over.iter().map(|m| self.sizes[m]).product())
    }

    /// Same as [`bytes`](SearchSpace::bytes), for a transition over `n` ranks.
    fn bytes_over(&self, shards: &ShardSizes, kind: TransitionKind, n: usize) -> usize {
        let local = shards.local;
        // The size of the largest shard if the largest shard of the state is sharded again over the ranks.
        let shard = |dim: usize| shards.per_index[dim].saturating_mul(shards.lens[dim].div_ceil(n));
        let elements = match kind {
            TransitionKind::Gather { .. } => local.saturating_mul(n - 1),
            TransitionKind::Exchange { to, .. } => local.min(shard(to).saturating_mul(n - 1)),
            TransitionKind::ReduceScatter { dim } => shard(dim).saturating_mul(n - 1),
            TransitionKind::Reduce => local.div_ceil(n).saturating_mul(2 * (n - 1)),
            TransitionKind::Slice { .. } | TransitionKind::Embed { .. } | TransitionKind::Divide { .. } => 0,
        };
        elements.saturating_mul(self.item)
    }

    /// Returns the cost of a transition.
    pub(crate) fn cost(&self, shards: &ShardSizes, transition: Transition) -> Cost {
        self.cost_over(shards, transition.kind, self.ranks_and_rate(&transition.over))
    }

    /// Returns the number of ranks along some mesh dims, and the rate of a collective over them.
    fn ranks_and_rate(&self, over: &MeshDimList) -> (usize, Rate) {
        let rate = over.iter().map(|m| self.rates[m]).reduce(Rate::across).unwrap_or_default();
        (over.iter().map(|m| self.sizes[m]).product(), rate)
    }

    /// Same as [`cost`](SearchSpace::cost), for a transition over `n` ranks at this rate.
    fn cost_over(&self, shards: &ShardSizes, kind: TransitionKind, (n, rate): (usize, Rate)) -> Cost {
        match kind {
            TransitionKind::Slice { .. } | TransitionKind::Divide { .. } => Cost(0),
            // Padding with zeros sends nothing. But if it were free, shards would be turned into partial sums to be reduced
            // together with others, and partial sums that the target keeps would be reduced for a while. So it costs as much
            // as the gather that it replaces.
            TransitionKind::Embed { dim } => {
                rate.cost(self.bytes_over(shards, TransitionKind::Gather { dim }, n))
            }
            _ => rate.cost(self.bytes_over(shards, kind, n)),
        }
    }

    /// Returns true if a value may become partial with `op`: the reductions of all partial mesh dims must be compatible.
    fn can_divide(&self, state: ShardState, op: ReduceOp) -> bool {
        (0..self.ndim).all(|m| match state.get(m) {
            DimState::Partial(other) => other.commutes_with(op),
            _ => true,
        })
    }

    /// Calls `visit` with every transition that is possible in a state, and its cost.
    pub(crate) fn transitions(
        &self,
        state: ShardState,
        shards: &ShardSizes,
        mut visit: impl FnMut(Transition, Cost),
    ) {
        for (dim, list) in shards.orders.iter().enumerate() {
            for len in 1..=list.len() {
                let over = list.tail(len);
                let plain = over.iter().all(|m| matches!(state.get(m), DimState::Sharded { split: 0, .. }));
                if len > 1 && !(self.across && plain) {
                    break;
                }
                let ranks = self.ranks_and_rate(&over);
                let mut visit = |kind| visit(Transition { kind, over }, self.cost_over(shards, kind, ranks));
                visit(TransitionKind::Gather { dim });
                for &to in self.candidates.iter().filter(|&&to| to != dim) {
                    visit(TransitionKind::Exchange { from: dim, to });
                }
                let becomes_sum = |m| self.target.get(m) == DimState::Partial(ReduceOp::Sum);
                if len == 1 && plain && over.iter().all(becomes_sum) {
                    visit(TransitionKind::Embed { dim });
                }
            }
        }
        let mut partial = MeshDimList::default();
        // A replicated mesh dim may become partial, to be reduced together with the partial ones in one collective.
        let mut ops: SmallVec<[ReduceOp; 2]> = SmallVec::new();
        for m in 0..self.ndim {
            if let DimState::Partial(op) = state.get(m) {
                partial.push(m);
                if self.across && !ops.contains(&op) {
                    ops.push(op);
                }
            }
        }
        for m in 0..self.ndim {
            match (state.get(m), self.target.get(m)) {
                (DimState::Replicated, target) if self.sizes[m] > 1 => {
                    let over = MeshDimList::one(m);
                    let mut visit = |kind| visit(Transition { kind, over }, Cost(0));
                    for &dim in &self.candidates {
                        visit(TransitionKind::Slice { dim, split: 0 });
                    }
                    match target {
                        DimState::Sharded { dim, split, .. } if split > 0 => {
                            visit(TransitionKind::Slice { dim, split })
                        }
                        DimState::Partial(op) if self.can_divide(state, op) && !ops.contains(&op) => {
                            visit(TransitionKind::Divide { op });
                        }
                        _ => {}
                    }
                    ops.iter().for_each(|&op| visit(TransitionKind::Divide { op }));
                }
                _ => {}
            }
        }
        self.reductions(state, shards, &partial, &mut visit);
    }

    /// Visits the reductions over every subset of the partial mesh dims whose reductions are compatible.
    fn reductions(
        &self,
        state: ShardState,
        shards: &ShardSizes,
        partial: &MeshDimList,
        visit: &mut impl FnMut(Transition, Cost),
    ) {
        for set in 1u32..1 << partial.len() {
            if set.count_ones() > 1 && !self.across {
                continue;
            }
            let mut over = MeshDimList::default();
            partial.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).for_each(|(_, m)| over.push(m));
            let first = state.op_along(over.dims[0].into());
            if !over.iter().all(|m| state.op_along(m).commutes_with(first)) {
                continue;
            }
            let ranks = self.ranks_and_rate(&over);
            let mut visit =
                |kind, over| visit(Transition { kind, over }, self.cost_over(shards, kind, ranks));
            visit(TransitionKind::Reduce, over);
            for &dim in &self.candidates {
                self.orders(over, dim, |over| visit(TransitionKind::ReduceScatter { dim }, over));
            }
        }
    }

    /// Visits the orders in which several mesh dims may begin to shard a dim at once. On meshes of up to three dims these are all
    /// orders. On larger meshes it is only the order in which the mesh dims shard a tensor dim in the target.
    fn orders(&self, over: MeshDimList, dim: usize, mut visit: impl FnMut(MeshDimList)) {
        let len = over.len();
        if self.ndim <= 3 {
            // The next permutation in lexicographic order, until there is none.
            let mut over = over;
            loop {
                visit(over);
                let dims = &mut over.dims[..len];
                let Some(i) = (1..len).rev().find(|&i| dims[i - 1] < dims[i]) else { return };
                let Some(j) = (i..len).rev().find(|&j| dims[i - 1] < dims[j]) else { return };
                dims.swap(i - 1, j);
                dims[i..].reverse();
            }
        }
        let mut over = over;
        over.dims[..len].sort_by_key(|&m| match self.target.get(m.into()) {
            DimState::Sharded { dim: target, order, .. } => (target != dim, target, order, m),
            _ => (true, usize::MAX, MAX_DIMS, m),
        });
        visit(over);
    }
}
