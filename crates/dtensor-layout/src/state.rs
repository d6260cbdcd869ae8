//! The states between two layouts, and the moves from one to the next.
//!
//! A state says for every mesh dim what the ranks along it hold, and for every tensor dim in which order mesh dims cut it. Cuts
//! are undone in the reverse of that order, and new ones come last. So every part is what the chunk rule makes of it, whatever
//! the sizes, and all moves are exact.

use smallvec::SmallVec;

use crate::MAX_DIMS;
use crate::chunk::cut_len;
use crate::cost::{Cost, CostModel, Rate};
use crate::{Partial, Placement, Replicate, Shard, Spec, StridedShard};
use dtensor_array::ReduceOp;

/// What the ranks along one mesh dim hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    All,
    Partial(ReduceOp),
    /// A part each: the dim is cut by `place` mesh dims before.
    Cut {
        dim: usize,
        place: usize,
        split: usize,
    },
}

/// What the ranks along every mesh dim hold: 16 bits each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) struct State(u128);

impl State {
    /// `split` is a number of the field's list of split factors here.
    fn code(holds: Holds) -> u16 {
        match holds {
            Holds::All => 0,
            Holds::Partial(op) => 1 | (op as u16) << 2,
            Holds::Cut { dim, place, split } => {
                2 | (place as u16) << 2 | (split as u16) << 5 | (dim as u16) << 10
            }
        }
    }

    pub(crate) fn get(self, mesh_dim: usize) -> Holds {
        let code = (self.0 >> (16 * mesh_dim)) as u16;
        match code & 3 {
            0 => Holds::All,
            1 => Holds::Partial(ReduceOp::ALL[usize::from(code >> 2)]),
            _ => Holds::Cut {
                place: usize::from(code >> 2 & 7),
                split: usize::from(code >> 5 & 31),
                dim: usize::from(code >> 10),
            },
        }
    }

    pub(crate) fn with(self, mesh_dim: usize, holds: Holds) -> State {
        let shift = 16 * mesh_dim;
        State(self.0 & !(0xffff << shift) | u128::from(State::code(holds)) << shift)
    }

    /// How what the ranks along a mesh dim hold is reduced.
    pub(crate) fn op_along(self, mesh_dim: usize) -> ReduceOp {
        match self.get(mesh_dim) {
            Holds::Partial(op) => op,
            _ => ReduceOp::Sum,
        }
    }

    /// The mesh dims, of so many, that cut a tensor dim, in the order in which they do: the place, the mesh
    /// dim and the split of each.
    pub(crate) fn cutters(self, ndim: usize, dim: usize) -> SmallVec<[(usize, usize, usize); 8]> {
        let cut = |m| match self.get(m) {
            Holds::Cut { dim: d, place, split } if d == dim => Some((place, m, split)),
            _ => None,
        };
        let mut list: SmallVec<[_; 8]> = (0..ndim).filter_map(cut).collect();
        list.sort_unstable();
        list
    }
}

/// Mesh dims in an order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dims {
    len: u8,
    dims: [u8; MAX_DIMS],
}

impl Dims {
    pub(crate) fn one(dim: usize) -> Dims {
        let mut dims = Dims::default();
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

    /// The last so many.
    fn tail(&self, len: usize) -> Dims {
        let mut tail = Dims::default();
        self.iter().skip(self.len() - len).for_each(|dim| tail.push(dim));
        tail
    }
}

/// One change on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) kind: Kind,
    /// The mesh dims, in the order in which they cut.
    pub(crate) over: Dims,
}

/// What is done. Dims are those of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All parts come together.
    Gather { dim: usize },
    /// Parts along one dim become parts along another.
    Exchange { from: usize, to: usize },
    /// Values are reduced, and everybody has the result.
    Reduce,
    /// Values are reduced, and everybody has a part of the result.
    ReduceScatter { dim: usize },
    /// Everybody keeps a part; `split` as in [`Holds`].
    Take { dim: usize, split: usize },
    /// Everybody sets its part into zeros.
    Embed { dim: usize },
    /// Together the values are to make up what everybody has now.
    Divide { op: ReduceOp },
}

impl Kind {
    /// The name of the collective, if there is one.
    pub(crate) fn collective(self) -> Option<&'static str> {
        match self {
            Kind::Gather { .. } => Some("all_gather"),
            Kind::Exchange { .. } => Some("all_to_all"),
            Kind::Reduce => Some("all_reduce"),
            Kind::ReduceScatter { .. } => Some("reduce_scatter"),
            Kind::Take { .. } | Kind::Embed { .. } | Kind::Divide { .. } => None,
        }
    }
}

/// All that a search is about.
pub(crate) struct Field {
    /// The sizes of the mesh dims. Those of size 1 never matter and are left out of states.
    pub(crate) sizes: [usize; MAX_DIMS],
    pub(crate) ndim: usize,
    pub(crate) shape: SmallVec<[usize; 6]>,
    item: usize,
    rates: [Rate; MAX_DIMS],
    /// The split factors that occur; the first is 1.
    pub(crate) splits: SmallVec<[usize; 4]>,
    across: bool,
    pub(crate) source: State,
    pub(crate) target: State,
    /// The tensor dims that are worth cutting.
    candidates: SmallVec<[usize; 6]>,
    /// One over the sizes of the mesh dims, the number of elements and the fastest of the links, for estimates.
    shares: [f64; MAX_DIMS],
    elements: f64,
    /// The number of elements of a part if every mesh dim cuts.
    smallest: f64,
    fastest: Rate,
}

/// The order in which mesh dims cut each tensor dim, and how large the largest part is.
pub(crate) struct Cuts {
    lists: SmallVec<[Dims; 6]>,
    lens: SmallVec<[usize; 6]>,
    /// The number of elements of the largest part.
    local: usize,
    /// How many there are for each index of a dim.
    across: SmallVec<[usize; 6]>,
}

impl Field {
    pub(crate) fn new(sizes: &[usize], cost: &CostModel, from: &Spec, to: &Spec, item: usize) -> Field {
        let mut field = Field {
            sizes: [1; MAX_DIMS],
            ndim: sizes.len(),
            shape: from.key.shape[..].into(),
            item,
            rates: [Rate::default(); MAX_DIMS],
            splits: SmallVec::from_elem(1, 1),
            across: cost.is_across_dims(),
            source: State::default(),
            target: State::default(),
            candidates: SmallVec::new(),
            shares: [1.0; MAX_DIMS],
            elements: from.key.shape.iter().map(|&len| len as f64).product(),
            smallest: 0.0,
            fastest: Rate::NEVER,
        };
        field.sizes[..sizes.len()].copy_from_slice(sizes);
        for (dim, rate) in field.rates[..sizes.len()].iter_mut().enumerate() {
            *rate = Rate::of(cost.link(dim));
            field.shares[dim] = 1.0 / sizes[dim] as f64;
            if sizes[dim] > 1 {
                field.fastest = field.fastest.faster(*rate);
            }
        }
        field.smallest = field.elements * field.shares.iter().product::<f64>();
        field.source = field.state(from);
        field.target = field.state(to);
        let cut = |spec: &Spec, dim: usize| spec.cuts.iter().any(|cut| cut.dim == dim);
        let mut spare: SmallVec<[usize; 4]> = SmallVec::new();
        for (dim, &len) in from.key.shape.iter().enumerate() {
            let named = cut(from, dim) || cut(to, dim);
            // Of dims that neither end cuts, as many of each length will do as there are mesh dims to cut them.
            let alike = spare.iter().filter(|&&known| known == len).count();
            if named || (len > 1 && alike < sizes.len()) {
                field.candidates.push(dim);
                if !named {
                    spare.push(len);
                }
            }
        }
        field
    }

    /// The state that a layout is.
    fn state(&mut self, spec: &Spec) -> State {
        let mut state = State::default();
        for (mesh_dim, placement) in spec.key.placements.iter().enumerate() {
            if let (Partial(op), true) = (*placement, self.sizes[mesh_dim] > 1) {
                state = state.with(mesh_dim, Holds::Partial(op));
            }
        }
        let mut places: SmallVec<[usize; 6]> = SmallVec::from_elem(0, self.shape.len());
        for cut in spec.cuts.iter().filter(|cut| self.sizes[cut.mesh_dim] > 1) {
            let split = self.splits.iter().position(|&known| known == cut.split).unwrap_or_else(|| {
                self.splits.push(cut.split);
                self.splits.len() - 1
            });
            let place = places[cut.dim];
            places[cut.dim] += 1;
            state = state.with(cut.mesh_dim, Holds::Cut { dim: cut.dim, place, split });
        }
        state
    }

    /// The placements that a state stands for, for people to read.
    pub(crate) fn placements(&self, state: State) -> Vec<Placement> {
        let cuts = self.cuts(state);
        let shown = |mesh_dim| match state.get(mesh_dim) {
            Holds::All => Replicate,
            Holds::Partial(op) => Partial(op),
            Holds::Cut { dim, place, split } => {
                // Cuts by mesh dims further right that came before show as pieces.
                let before = cuts.lists[dim].iter().take(place).filter(|&other| other > mesh_dim);
                let factor = self.splits[split] * before.map(|other| self.sizes[other]).product::<usize>();
                match factor {
                    1 => Shard(dim as isize),
                    split_factor => StridedShard { dim: dim as isize, split_factor },
                }
            }
        };
        (0..self.ndim).map(shown).collect()
    }

    pub(crate) fn cuts(&self, state: State) -> Cuts {
        let lists = SmallVec::from_elem(Dims::default(), self.shape.len());
        let mut cuts = Cuts { lists, lens: self.shape.clone(), local: 0, across: SmallVec::new() };
        for mesh_dim in 0..self.ndim {
            if let Holds::Cut { dim, place, .. } = state.get(mesh_dim) {
                let list = &mut cuts.lists[dim];
                list.dims[place] = mesh_dim as u8;
                list.len += 1;
            }
        }
        for (list, len) in cuts.lists.iter().zip(&mut cuts.lens) {
            let strided = |m: usize| matches!(state.get(m), Holds::Cut { split, .. } if split > 0);
            if list.iter().skip(1).any(strided) {
                *len = self.largest(*len, state, list);
                continue;
            }
            for mesh_dim in list.iter() {
                let Holds::Cut { split, .. } = state.get(mesh_dim) else { continue };
                *len = self.first_len(*len, split, self.sizes[mesh_dim]);
            }
        }
        cuts.local = cuts.lens.iter().product();
        cuts.across = cuts.lens.iter().map(|&len| cuts.local / len.max(1)).collect();
        cuts
    }

    /// The size of the first of `n` parts, which is the largest.
    fn first_len(&self, len: usize, split: usize, n: usize) -> usize {
        if split == 0 || len == 0 {
            return len.div_ceil(n);
        }
        let piece = len.div_ceil(self.splits[split]);
        (len / piece) * piece.div_ceil(n) + (len % piece).div_ceil(n)
    }

    /// The size of the largest part that some cuts leave. Of fewer indices, a strided cut may leave more: seven cut in two
    /// are four and three, and of these the first of two ranks has two and three when they are cut into three pieces.
    fn largest(&self, len: usize, state: State, list: &Dims) -> usize {
        let mut lens: SmallVec<[usize; 8]> = SmallVec::from_elem(len, 1);
        for mesh_dim in list.iter() {
            let Holds::Cut { split, .. } = state.get(mesh_dim) else { continue };
            let n = self.sizes[mesh_dim];
            let mut parts: SmallVec<[usize; 8]> = SmallVec::new();
            for &len in &lens {
                for part in (0..n).map(|i| cut_len(len, self.splits[split], n, i)) {
                    if !parts.contains(&part) {
                        parts.push(part);
                    }
                }
            }
            lens = parts;
        }
        lens.into_iter().max().unwrap_or(0)
    }

    /// A cost that remains at least.
    ///
    /// In numbers of elements, as if all parts were equal, and with an all-reduce as a reduction and a gather: let `y` be the
    /// least that a rank holds on the way.
    ///
    /// - Gathering, or setting into zeros, costs what the value grows by: from `y` to what is wanted, and by what it shrank before,
    ///   which is what reductions send.
    /// - A reduction over `n` ranks leaves at least `y`, so it costs `(n - 1) * y`. And of `n` summands all but one have to be sent
    ///   for every element, a job that ranks with the same summands can share.
    /// - A cut that has to go to another tensor dim takes an exchange, which costs a share of `y`, or a gather that has to be
    ///   undone; and one exchange undoes cuts of one tensor dim.
    ///
    /// The sum is convex in `y` and made of straight pieces: it is least at one of its corners.
    pub(crate) fn remaining(&self, state: State) -> Cost {
        let (mut size, mut wanted) = (self.elements, self.elements);
        let (mut misplaced, mut exchanged) = (0u64, 0u64);
        let (mut slope, mut share) = (0.0, 1.0f64);
        let (mut summands, mut sharing) = (1.0, 1.0);
        for m in 0..self.ndim {
            let (here, there) = (state.get(m), self.target.get(m));
            match here {
                Holds::All => sharing *= self.shares[m],
                Holds::Cut { dim, .. } => {
                    size *= self.shares[m];
                    if here != there {
                        misplaced |= 1 << dim;
                        if matches!(there, Holds::Cut { .. }) {
                            exchanged |= 1 << dim;
                            share = share.min(1.0 - self.shares[m]);
                        }
                    }
                }
                Holds::Partial(_) if here != there => {
                    slope += self.sizes[m] as f64 - 1.0;
                    summands *= self.shares[m];
                }
                // It may be reduced for a while, to make others smaller.
                Holds::Partial(_) => sharing *= self.shares[m],
            }
            if matches!(there, Holds::Cut { .. }) {
                wanted *= self.shares[m];
            }
        }
        let collectives = u64::from(misplaced.count_ones()) + u64::from(slope > 0.0);
        let moved = f64::from(exchanged.count_ones()) * share;
        let sent = (1.0 - summands) * size * sharing;
        let high = size.min(wanted);
        // Products in another order may differ in their last digit.
        let low = self.smallest.min(high);
        let corner = if slope > 0.0 { (sent / slope).clamp(low, high) } else { high };
        let grown = wanted - size + sent;
        let bend = (size - sent).clamp(low, high);
        let at = |y: f64| (wanted - y).max(grown) + (slope * y).max(sent) + moved * y;
        let elements = at(low).min(at(corner)).min(at(bend)).min(at(high));
        // Less than all that rounding could add, here and in the costs of moves.
        let bytes = elements * self.item as f64 * (1.0 - 1e-12) - 8.0;
        self.fastest.least(collectives, bytes.max(0.0) as usize)
    }

    /// The state after a move, which must be possible.
    pub(crate) fn after(&self, state: State, cuts: &Cuts, done: Move) -> State {
        let mut next = state;
        let cuts = |dim: usize| cuts.lists[dim].len();
        match done.kind {
            Kind::Gather { .. } | Kind::Reduce => {
                done.over.iter().for_each(|m| next = next.with(m, Holds::All));
            }
            Kind::Exchange { to: dim, .. } | Kind::ReduceScatter { dim } => {
                for (place, m) in (cuts(dim)..).zip(done.over.iter()) {
                    next = next.with(m, Holds::Cut { dim, place, split: 0 });
                }
            }
            Kind::Take { dim, split } => {
                for (place, m) in (cuts(dim)..).zip(done.over.iter()) {
                    next = next.with(m, Holds::Cut { dim, place, split });
                }
            }
            Kind::Embed { .. } => {
                done.over.iter().for_each(|m| next = next.with(m, Holds::Partial(ReduceOp::Sum)));
            }
            Kind::Divide { op } => done.over.iter().for_each(|m| next = next.with(m, Holds::Partial(op))),
        }
        next
    }

    /// The bytes that a rank sends, at most.
    pub(crate) fn bytes(&self, cuts: &Cuts, done: Move) -> usize {
        self.bytes_among(cuts, done.kind, done.over.iter().map(|m| self.sizes[m]).product())
    }

    /// As [`bytes`](Field::bytes), for a number of ranks.
    fn bytes_among(&self, cuts: &Cuts, kind: Kind, n: usize) -> usize {
        let local = cuts.local;
        // The largest of the parts that a cut makes of what a rank has.
        let part = |dim: usize| cuts.across[dim].saturating_mul(cuts.lens[dim].div_ceil(n));
        let elements = match kind {
            Kind::Gather { .. } => local.saturating_mul(n - 1),
            Kind::Exchange { to, .. } => local.min(part(to).saturating_mul(n - 1)),
            Kind::ReduceScatter { dim } => part(dim).saturating_mul(n - 1),
            Kind::Reduce => local.div_ceil(n).saturating_mul(2 * (n - 1)),
            Kind::Take { .. } | Kind::Embed { .. } | Kind::Divide { .. } => 0,
        };
        elements.saturating_mul(self.item)
    }

    pub(crate) fn cost(&self, cuts: &Cuts, done: Move) -> Cost {
        self.cost_among(cuts, done.kind, self.among(&done.over))
    }

    /// How many ranks there are along some mesh dims, and how fast they are.
    fn among(&self, over: &Dims) -> (usize, Rate) {
        let rate = over.iter().map(|m| self.rates[m]).reduce(Rate::slower).unwrap_or_default();
        (over.iter().map(|m| self.sizes[m]).product(), rate)
    }

    fn cost_among(&self, cuts: &Cuts, kind: Kind, (n, rate): (usize, Rate)) -> Cost {
        match kind {
            Kind::Take { .. } | Kind::Divide { .. } => Cost(0),
            // Zeros are written, not sent. If they cost nothing, what is cut would become a sum to be reduced
            // together with others, and sums that are to stay would be reduced for a while. So they cost what
            // the gather does that they stand for.
            Kind::Embed { dim } => rate.cost(self.bytes_among(cuts, Kind::Gather { dim }, n)),
            _ => rate.cost(self.bytes_among(cuts, kind, n)),
        }
    }

    /// Whether values may be divided to be reduced by `op`: not while others are to be reduced in another way.
    fn may_divide(&self, state: State, op: ReduceOp) -> bool {
        (0..self.ndim).all(|m| match state.get(m) {
            Holds::Partial(other) => other.commutes_with(op),
            _ => true,
        })
    }

    /// Calls `visit` with every move that is possible in a state, and its cost.
    pub(crate) fn moves(&self, state: State, cuts: &Cuts, mut visit: impl FnMut(Move, Cost)) {
        for (dim, list) in cuts.lists.iter().enumerate() {
            for len in 1..=list.len() {
                let over = list.tail(len);
                let plain = over.iter().all(|m| matches!(state.get(m), Holds::Cut { split: 0, .. }));
                if len > 1 && !(self.across && plain) {
                    break;
                }
                let among = self.among(&over);
                let mut visit = |kind| visit(Move { kind, over }, self.cost_among(cuts, kind, among));
                visit(Kind::Gather { dim });
                for &to in self.candidates.iter().filter(|&&to| to != dim) {
                    visit(Kind::Exchange { from: dim, to });
                }
                let wanted = |m| self.target.get(m) == Holds::Partial(ReduceOp::Sum);
                if len == 1 && plain && over.iter().all(wanted) {
                    visit(Kind::Embed { dim });
                }
            }
        }
        let mut partial = Dims::default();
        // What everybody has can be reduced together with what is partial, too.
        let mut ops: SmallVec<[ReduceOp; 2]> = SmallVec::new();
        for m in 0..self.ndim {
            if let Holds::Partial(op) = state.get(m) {
                partial.push(m);
                if self.across && !ops.contains(&op) {
                    ops.push(op);
                }
            }
        }
        for m in 0..self.ndim {
            match (state.get(m), self.target.get(m)) {
                (Holds::All, wanted) if self.sizes[m] > 1 => {
                    let over = Dims::one(m);
                    let mut visit = |kind| visit(Move { kind, over }, Cost(0));
                    for &dim in &self.candidates {
                        visit(Kind::Take { dim, split: 0 });
                    }
                    match wanted {
                        Holds::Cut { dim, split, .. } if split > 0 => visit(Kind::Take { dim, split }),
                        Holds::Partial(op) if self.may_divide(state, op) && !ops.contains(&op) => {
                            visit(Kind::Divide { op });
                        }
                        _ => {}
                    }
                    ops.iter().for_each(|&op| visit(Kind::Divide { op }));
                }
                _ => {}
            }
        }
        self.reductions(state, cuts, &partial, &mut visit);
    }

    /// Reductions along any of the mesh dims that hold partial values, as many at once as may be.
    fn reductions(&self, state: State, cuts: &Cuts, partial: &Dims, visit: &mut impl FnMut(Move, Cost)) {
        for set in 1u32..1 << partial.len() {
            if set.count_ones() > 1 && !self.across {
                continue;
            }
            let mut over = Dims::default();
            partial.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).for_each(|(_, m)| over.push(m));
            let first = state.op_along(over.dims[0].into());
            if !over.iter().all(|m| state.op_along(m).commutes_with(first)) {
                continue;
            }
            let among = self.among(&over);
            let mut visit = |kind, over| visit(Move { kind, over }, self.cost_among(cuts, kind, among));
            visit(Kind::Reduce, over);
            for &dim in &self.candidates {
                self.orders(over, dim, |over| visit(Kind::ReduceScatter { dim }, over));
            }
        }
    }

    /// The orders in which mesh dims may come to cut a dim at once: all of them on meshes of few dims; else that in which they
    /// are wanted, here or where they will go to together.
    fn orders(&self, over: Dims, dim: usize, mut visit: impl FnMut(Dims)) {
        let len = over.len();
        if self.ndim <= 3 {
            // A step of the usual walk through all permutations, as often as there are any.
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
            Holds::Cut { dim: wanted, place, .. } => (wanted != dim, wanted, place, m),
            _ => (true, usize::MAX, MAX_DIMS, m),
        });
        visit(over);
    }
}
