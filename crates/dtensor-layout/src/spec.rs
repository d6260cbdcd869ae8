//! [`Spec`]: placements and global shape of a tensor on a mesh, and this rank's shard of it.

use std::fmt;

use dtensor_array::Shape;
use smallvec::SmallVec;

use crate::chunk::{Ranges, Sharding, chunk_of_each, unravel};
use crate::placement::format_list;
use crate::{Mesh, Placement, PlacementList, Replicate};

/// Placements and global shape of a tensor on a mesh, as one rank sees it. Made by [`Planner::spec`](crate::Planner::spec).
#[derive(Debug)]
pub struct Spec {
    /// Unique among the specs of one planner.
    pub id: u64,
    /// Placements and global shape.
    pub key: SpecKey,
    /// The shardings that the placements stand for. Those of one tensor dim are in the order in which they apply.
    pub(crate) shardings: SmallVec<[Sharding; 4]>,
    /// The shape of this rank's shard.
    pub local: Shape,
    /// Where this rank's shard begins in the full tensor.
    pub offset: SmallVec<[usize; 4]>,
}

/// Placements and global shape of a tensor: a [`Spec`] without the rank's view.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpecKey {
    /// One placement per mesh dim.
    pub placements: PlacementList,
    /// The shape of the full tensor.
    pub shape: Shape,
}

impl fmt::Display for SpecKey {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.shape, format_list(&self.placements))
    }
}

impl fmt::Display for Spec {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)
    }
}

impl SpecKey {
    /// Returns the same shape with `f` applied to every placement.
    #[inline]
    pub fn map(&self, f: impl FnMut(&Placement) -> Placement) -> SpecKey {
        SpecKey { placements: self.placements.iter().map(f).collect(), shape: self.shape.clone() }
    }

    /// Returns the same spec with every partial placement replaced by `Replicate`.
    #[inline]
    pub fn without_partials(&self) -> SpecKey {
        self.map(|&p| if p.is_partial() { Replicate } else { p })
    }

    /// Returns the indices of each tensor dim that a rank holds: the rank at `coordinate`, on a mesh of these sizes.
    #[inline]
    pub fn ranges_at(&self, sizes: &[usize], coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
        ranges(self, sizes, coordinate)
    }

    /// Returns the shape of the shard of the rank at `coordinate`, and its offset in the full tensor.
    #[inline]
    pub fn shard_at(&self, sizes: &[usize], coordinate: &[usize]) -> (Shape, SmallVec<[usize; 4]>) {
        shard(&self.shape, &ranges(self, sizes, coordinate))
    }

    /// Returns true if every rank holds the same elements with both specs, in the same order.
    pub fn has_shards_of(&self, other: &SpecKey, sizes: &[usize]) -> bool {
        let shardings =
            |key: &SpecKey| key.placements.iter().map(|p| p.sharded_dim()).collect::<SmallVec<[_; 4]>>();
        let is_same_shard = |position: usize| {
            let at = unravel(position, sizes);
            let (here, there) = (ranges(self, sizes, &at), ranges(other, sizes, &at));
            let (shape, _) = shard(&self.shape, &here);
            // Shards without elements differ only in their shape.
            here == there || shape.numel() == 0 && shape == shard(&other.shape, &there).0
        };
        shardings(self) == shardings(other) || (0..sizes.iter().product()).all(is_same_shard)
    }
}

impl Spec {
    /// Creates the spec on a mesh, as the mesh's rank sees it. The placements must be checked. If the rank is not in the mesh, its
    /// shard is empty.
    pub(crate) fn new(id: u64, key: SpecKey, mesh: &Mesh) -> Self {
        let sizes = mesh.shape();
        let mut shardings = SmallVec::new();
        for dim in 0..key.shape.ndim() {
            shardings.extend(shardings_of(&key, dim, sizes));
        }
        let (local, offset) = match mesh.coordinate() {
            Some(coordinate) => shard(&key.shape, &ranges(&key, sizes, coordinate)),
            None => (Shape::from(0), SmallVec::new()),
        };
        Spec { id, key, shardings, local, offset }
    }

    /// Returns the number of elements of the largest shard, with every strided shard counted as a plain one.
    pub(crate) fn largest(&self, sizes: &[usize]) -> usize {
        let mut dims: SmallVec<[usize; 4]> = self.key.shape[..].into();
        for (placement, size) in self.key.placements.iter().zip(sizes) {
            if let Some((dim, _)) = placement.sharded_dim() {
                dims[dim] = dims[dim].div_ceil(*size);
            }
        }
        dims.iter().product()
    }
}

/// Returns the shardings of one tensor dim as the placements give them, from left to right.
#[inline]
fn written_shardings(key: &SpecKey, dim: usize) -> SmallVec<[Sharding; 4]> {
    let placements = key.placements.iter().enumerate();
    let shardings = placements
        .filter_map(|(mesh_dim, p)| p.sharded_dim().map(|(dim, split)| Sharding { dim, mesh_dim, split }));
    shardings.filter(|sharding| sharding.dim == dim).collect()
}

/// Returns the shardings of one tensor dim in the order in which they apply.
///
/// A strided shard usually means that mesh dims shard the dim in another order than theirs. Its split factor is then the number of
/// ranks along the mesh dims that shard the dim first but stand further right. Such strided shards are turned into plain shardings
/// in that order.
fn shardings_of(key: &SpecKey, dim: usize, sizes: &[usize]) -> SmallVec<[Sharding; 4]> {
    let written = written_shardings(key, dim);
    if written.iter().all(|sharding| sharding.split == 1) {
        return written;
    }
    let mut ordered: SmallVec<[Sharding; 4]> = SmallVec::new();
    for &sharding in written.iter().rev() {
        let before = |at: usize| ordered[..at].iter().map(|first| sizes[first.mesh_dim]).product::<usize>();
        match (0..=ordered.len()).find(|&at| before(at) == sharding.split) {
            Some(at) => ordered.insert(at, Sharding { split: 1, ..sharding }),
            None => return written,
        }
    }
    // With uneven sizes, the plain shardings may give other shards. Then the strided ones stay.
    let len = key.shape[dim];
    let counts: SmallVec<[usize; 4]> = written.iter().map(|sharding| sizes[sharding.mesh_dim]).collect();
    let alike = (0..counts.iter().product()).map(|i| unravel(i, &counts)).all(|at| {
        let along = |sharding: &Sharding| {
            at[written.iter().position(|w| w.mesh_dim == sharding.mesh_dim).unwrap_or(0)]
        };
        apply(len, &written, sizes, along) == apply(len, &ordered, sizes, along)
    });
    if alike { ordered } else { written }
}

/// Returns the indices of a dim that remain on a rank after the given shardings. `along` returns the rank's coordinate along a
/// sharding's mesh dim.
#[inline]
fn apply(len: usize, shardings: &[Sharding], sizes: &[usize], along: impl Fn(&Sharding) -> usize) -> Ranges {
    let full = if len == 0 { Ranges::new() } else { SmallVec::from_elem(0..len, 1) };
    shardings.iter().fold(full, |ranges, s| chunk_of_each(&ranges, s.split, sizes[s.mesh_dim], along(s)))
}

/// Returns the indices of each dim that the rank at a coordinate holds.
#[inline]
fn ranges(key: &SpecKey, sizes: &[usize], coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
    let of_dim = |(dim, &len): (usize, &usize)| {
        apply(len, &written_shardings(key, dim), sizes, |sharding| coordinate[sharding.mesh_dim])
    };
    key.shape.iter().enumerate().map(of_dim).collect()
}

/// Returns the shape of a shard and its offset. An empty shard begins at the end of the dim.
#[inline]
fn shard(shape: &Shape, ranges: &[Ranges]) -> (Shape, SmallVec<[usize; 4]>) {
    let local = ranges.iter().map(|ranges| ranges.iter().map(ExactSizeIterator::len).sum()).collect();
    let start = |(ranges, &len): (&Ranges, &usize)| ranges.first().map_or(len, |range| range.start);
    (local, ranges.iter().zip(shape.iter()).map(start).collect())
}
