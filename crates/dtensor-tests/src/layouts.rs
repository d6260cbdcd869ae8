//! The oracle of the layout tests: for every rank the global indices of its shard along each dim, computed index by index,
//! and the elements at these indices.
//!
//! Every rank can compute the shard of every other rank. Nothing here communicates, and nothing asks the library where an
//! element is located. All numbers are small integers, so that they and their sums are exact in every dtype.

use dtensor::comm::{ReduceOp, World};
use dtensor::{DType, DeviceMesh, Partial, Placement, Replicate, Result, Shard, StridedShard, Tensor};

use crate::ranks::Random;

pub const R: Placement = Replicate;
pub const P: Placement = Partial(ReduceOp::Sum);
pub const AVG: Placement = Partial(ReduceOp::Avg);
pub const MAX: Placement = Partial(ReduceOp::Max);
pub const MIN: Placement = Partial(ReduceOp::Min);
pub const PRODUCT: Placement = Partial(ReduceOp::Product);

pub fn strided(dim: isize, split_factor: usize) -> Placement {
    StridedShard { dim, split_factor }
}

/// The sizes of a mesh, and the rank at each coordinate in row-major order.
#[derive(Clone, Debug)]
pub struct Grid {
    pub sizes: Vec<usize>,
    pub ranks: Vec<usize>,
}

impl Grid {
    pub fn new(sizes: &[usize]) -> Grid {
        Grid { sizes: sizes.to_vec(), ranks: (0..sizes.iter().product()).collect() }
    }

    pub fn of(sizes: &[usize], ranks: &[usize]) -> Grid {
        Grid { sizes: sizes.to_vec(), ranks: ranks.to_vec() }
    }

    pub fn mesh(&self, world: &World) -> Result<DeviceMesh> {
        DeviceMesh::from_ranks(world, &self.ranks, &self.sizes[..], ())
    }

    /// Returns all coordinates in row-major order.
    pub fn coordinates(&self) -> Vec<Vec<usize>> {
        let mut all = vec![Vec::new()];
        for &size in &self.sizes {
            all = all.iter().flat_map(|at| (0..size).map(move |i| [&at[..], &[i]].concat())).collect();
        }
        all
    }

    pub fn coordinate(&self, rank: usize) -> Option<Vec<usize>> {
        let i = self.ranks.iter().position(|&member| member == rank)?;
        Some(self.coordinates().swap_remove(i))
    }

    /// Returns the number of ranks along some mesh dims, and the index of a coordinate among them. The first dim varies slowest.
    pub fn place(&self, at: &[usize], dims: &[usize]) -> (usize, usize) {
        dims.iter().fold((1, 0), |(n, i), &dim| (n * self.sizes[dim], i * self.sizes[dim] + at[dim]))
    }
}

/// Returns the indices of chunk `i` of `n`. With `c` as the number of indices divided by `n` and rounded up, the first `c`
/// belong to the first chunk, the next `c` to the second, and so on.
fn chunk(indices: &[usize], n: usize, i: usize) -> Vec<usize> {
    let c = indices.len().div_ceil(n);
    (0..indices.len()).filter(|position| position / c == i).map(|position| indices[position]).collect()
}

/// Returns the global indices along each dim of the shard at a coordinate, in the order in which the shard has them.
/// Placements apply from left to right: each splits what the ones before it have left.
pub fn indices(shape: &[usize], sizes: &[usize], at: &[usize], placements: &[Placement]) -> Vec<Vec<usize>> {
    let mut lists: Vec<Vec<usize>> = shape.iter().map(|&len| (0..len).collect()).collect();
    for (mesh_dim, placement) in placements.iter().enumerate() {
        let (n, i) = (sizes[mesh_dim], at[mesh_dim]);
        match *placement {
            Shard(dim) => lists[dim as usize] = chunk(&lists[dim as usize], n, i),
            StridedShard { dim, split_factor } => {
                let list = &mut lists[dim as usize];
                let pieces = (0..split_factor).map(|piece| chunk(list, split_factor, piece));
                *list = pieces.flat_map(|piece| chunk(&piece, n, i)).collect();
            }
            Replicate | Partial(_) => {}
        }
    }
    lists
}

/// The shard of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    pub dims: Vec<usize>,
    /// The first global index along each dim, or the global size along a dim in which the shard is empty.
    pub offset: Vec<usize>,
    pub values: Vec<f64>,
}

impl Held {
    pub fn tensor(&self, dtype: DType) -> Result<Tensor> {
        tensor(&self.values, &self.dims, dtype)
    }
}

pub fn tensor(values: &[f64], dims: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(values.to_vec(), dims)?.to_dtype(dtype)
}

/// A full tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Whole {
    pub fn random(shape: &[usize], seed: u64) -> Whole {
        let mut random = Random::new(&[seed]);
        let values = (0..shape.iter().product::<usize>()).map(|_| random.below(81) as f64 - 40.0).collect();
        Whole { shape: shape.to_vec(), values }
    }

    /// Returns the row-major positions of the elements at these indices.
    fn positions(&self, lists: &[Vec<usize>]) -> Vec<usize> {
        let mut positions = vec![0];
        for (list, len) in lists.iter().zip(&self.shape) {
            positions = positions.iter().flat_map(|&p| list.iter().map(move |i| p * len + i)).collect();
        }
        positions
    }

    /// Returns the shard at a coordinate. Partial values differ between ranks and reduce to the element; `seed` chooses them.
    pub fn held(&self, grid: &Grid, at: &[usize], placements: &[Placement], seed: u64) -> Held {
        let lists = indices(&self.shape, &grid.sizes, at, placements);
        let dims: Vec<usize> = lists.iter().map(Vec::len).collect();
        let first = |(list, &len): (&Vec<usize>, &usize)| list.first().copied().unwrap_or(len);
        let offset = lists.iter().zip(&self.shape).map(first).collect();
        let partial: Vec<usize> = (0..placements.len()).filter(|&m| placements[m].is_partial()).collect();
        let (n, me) = grid.place(at, &partial);
        let averaged = partial.iter().filter(|&&m| placements[m] == AVG).map(|&m| grid.sizes[m]).product();
        let share = |position: usize| match partial.first().map(|&m| placements[m]) {
            Some(Partial(op)) => {
                let mut random = Random::new(&[seed, position as u64]);
                shares(self.values[position], op, averaged, n, &mut random)[me]
            }
            _ => self.values[position],
        };
        Held { dims, offset, values: self.positions(&lists).into_iter().map(share).collect() }
    }

    /// Assembles the full tensor from the shards of all ranks, in the order of their coordinates. Panics if replicas differ, or
    /// if no rank has an element.
    pub fn of_parts(shape: &[usize], grid: &Grid, placements: &[Placement], parts: &[Vec<f64>]) -> Whole {
        let mut whole = Whole { shape: shape.to_vec(), values: vec![0.0; shape.iter().product()] };
        // For every element, its value on the rank at each coordinate.
        let mut seen = vec![vec![None; parts.len()]; whole.values.len()];
        for (i, at) in grid.coordinates().iter().enumerate() {
            let positions = whole.positions(&indices(shape, &grid.sizes, at, placements));
            assert_eq!(positions.len(), parts[i].len(), "the part at {at:?}");
            positions.iter().zip(&parts[i]).for_each(|(&position, &value)| seen[position][i] = Some(value));
        }
        for (value, mut seen) in whole.values.iter_mut().zip(seen) {
            for (&n, placement) in grid.sizes.iter().zip(placements).rev() {
                seen = seen.chunks(n).map(|along| one_of(along, *placement)).collect();
            }
            *value = seen[0].expect("every element is somewhere");
        }
        whole
    }
}

/// Returns one number for each of `n` ranks that reduce to `value`. `averaged` is the number of ranks along the mesh dims that
/// are averaged.
fn shares(value: f64, op: ReduceOp, averaged: usize, n: usize, random: &mut Random) -> Vec<f64> {
    let special = random.below(n);
    let mut shares: Vec<f64> = match op {
        // Multiples of `averaged`, so that averaging along one mesh dim after the other gives integers.
        ReduceOp::Sum | ReduceOp::Avg => {
            (0..n).map(|_| (random.below(13) as f64 - 6.0) * averaged as f64).collect()
        }
        ReduceOp::Max => (0..n).map(|_| value - random.below(4) as f64).collect(),
        ReduceOp::Min => (0..n).map(|_| value + random.below(4) as f64).collect(),
        ReduceOp::Product => (0..n).map(|_| random.pick(&[1.0, -1.0])).collect(),
    };
    match op {
        ReduceOp::Sum | ReduceOp::Avg => {
            // This entry is excluded before the sum and not subtracted afterwards: the value may be infinite.
            shares[special] = 0.0;
            shares[special] = value * averaged as f64 - shares.iter().sum::<f64>();
        }
        ReduceOp::Product => {
            shares[special] = value;
            shares[special] = shares.iter().product();
        }
        ReduceOp::Max | ReduceOp::Min => shares[special] = value,
    }
    shares
}

/// Combines the values of one element along a mesh dim into one value.
fn one_of(along: &[Option<f64>], placement: Placement) -> Option<f64> {
    let there: Vec<f64> = along.iter().flatten().copied().collect();
    if there.is_empty() {
        return None;
    }
    let all = || assert_eq!(there.len(), along.len(), "all ranks must have the element: {along:?}");
    Some(match placement {
        Replicate => {
            all();
            assert!(there.iter().all(|x| *x == there[0]), "ranks have different replicas: {there:?}");
            there[0]
        }
        Shard(_) | StridedShard { .. } => {
            assert_eq!(there.len(), 1, "several ranks have the same element: {along:?}");
            there[0]
        }
        Partial(op) => {
            all();
            match op {
                ReduceOp::Sum => there.iter().sum(),
                ReduceOp::Avg => there.iter().sum::<f64>() / there.len() as f64,
                ReduceOp::Max => there.iter().copied().fold(f64::MIN, f64::max),
                ReduceOp::Min => there.iter().copied().fold(f64::MAX, f64::min),
                ReduceOp::Product => there.iter().product(),
            }
        }
    })
}

/// Returns all lists with one placement of `each` per mesh dim.
pub fn all_lists(each: &[Placement], mesh_dims: usize) -> Vec<Vec<Placement>> {
    let mut lists = vec![Vec::new()];
    for _ in 0..mesh_dims {
        lists = lists.iter().flat_map(|list| each.iter().map(move |&p| [&list[..], &[p]].concat())).collect();
    }
    lists
}

/// Returns `R`, `P(sum)`, and a shard along each tensor dim.
pub fn plain(rank: usize) -> Vec<Placement> {
    let mut each = vec![R, P];
    each.extend((0..rank as isize).map(Shard));
    each
}

/// Returns the placements that shard one tensor dim over mesh dims in this order. A split factor is the number of ranks along
/// the mesh dims that shard earlier but are listed further right.
pub fn in_order(sizes: &[usize], dim: isize, order: &[usize]) -> Vec<Placement> {
    let mut list = vec![R; sizes.len()];
    for (i, &mesh_dim) in order.iter().enumerate() {
        let before = order[..i].iter().filter(|&&other| other > mesh_dim);
        list[mesh_dim] = match before.map(|&other| sizes[other]).product() {
            1 => Shard(dim),
            split => strided(dim, split),
        };
    }
    list
}

/// Returns all layouts in which several mesh dims shard one tensor dim in another order than their own. The other mesh dims
/// are `R`.
pub fn reordered(sizes: &[usize], rank: usize) -> Vec<Vec<Placement>> {
    let mut orders: Vec<Vec<usize>> = vec![Vec::new()];
    let mut all = Vec::new();
    while let Some(order) = orders.pop() {
        let rest = (0..sizes.len()).filter(|m| !order.contains(m));
        orders.extend(rest.map(|m| [&order[..], &[m]].concat()));
        if !order.is_sorted() {
            all.extend((0..rank as isize).map(|dim| in_order(sizes, dim, &order)));
        }
    }
    all
}
