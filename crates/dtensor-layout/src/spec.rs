//! [`Spec`]: placements and global shape of a tensor on a mesh, and what this rank holds of it.

use std::fmt;

use dtensor_array::Shape;
use smallvec::SmallVec;

use crate::chunk::{Cut, Ranges, chunk_of_each, unravel};
use crate::placement::shown;
use crate::{Mesh, Placement, PlacementList, Replicate};

/// Placements and global shape of a tensor on a mesh, as one rank sees it. Made by [`Planner::spec`](crate::Planner::spec).
#[derive(Debug)]
pub struct Spec {
    /// Tells specs of one planner apart.
    pub id: u64,
    /// Placements and global shape.
    pub key: SpecKey,
    /// The shardings that the placements amount to. Those of one tensor dim are in the order in which they are applied.
    pub(crate) cuts: SmallVec<[Cut; 4]>,
    /// The shape of this rank's shard.
    pub local: Shape,
    /// Where this rank's shard begins in the full tensor.
    pub offset: SmallVec<[usize; 4]>,
}

/// Placements and global shape.
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
        write!(f, "{} {}", self.shape, shown(&self.placements))
    }
}

impl fmt::Display for Spec {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)
    }
}

impl SpecKey {
    /// The same shape with other placements.
    #[inline]
    pub fn map(&self, other: impl FnMut(&Placement) -> Placement) -> SpecKey {
        SpecKey { placements: self.placements.iter().map(other).collect(), shape: self.shape.clone() }
    }

    /// Replicated where it is partial.
    #[inline]
    pub fn without_partials(&self) -> SpecKey {
        self.map(|&p| if p.is_partial() { Replicate } else { p })
    }

    /// The indices of each tensor dim that the rank at a coordinate of a mesh of these sizes holds.
    #[inline]
    pub fn ranges_at(&self, sizes: &[usize], coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
        ranges(self, sizes, coordinate)
    }

    /// The shape of the shard of the rank at a coordinate, and where it begins in the full tensor.
    #[inline]
    pub fn shard_at(&self, sizes: &[usize], coordinate: &[usize]) -> (Shape, SmallVec<[usize; 4]>) {
        part(&self.shape, &ranges(self, sizes, coordinate))
    }

    /// Returns true if every rank holds the same elements of a tensor in both, in the same order.
    pub fn has_shards_of(&self, other: &SpecKey, sizes: &[usize]) -> bool {
        let cuts = |key: &SpecKey| key.placements.iter().map(|p| p.cut()).collect::<SmallVec<[_; 4]>>();
        let alike = |position: usize| {
            let at = unravel(position, sizes);
            let (here, there) = (ranges(self, sizes, &at), ranges(other, sizes, &at));
            let (shape, _) = part(&self.shape, &here);
            // Of shards without elements, there is nothing but the shape.
            here == there || shape.numel() == 0 && shape == part(&other.shape, &there).0
        };
        cuts(self) == cuts(other) || (0..sizes.iter().product()).all(alike)
    }
}

impl Spec {
    /// For a mesh of these sizes, on the rank at this coordinate (if it is in the mesh). The placements are checked.
    pub(crate) fn new(id: u64, key: SpecKey, mesh: &Mesh) -> Self {
        let sizes = mesh.shape();
        let mut cuts = SmallVec::new();
        for dim in 0..key.shape.rank() {
            cuts.extend(cuts_of(&key, dim, sizes));
        }
        let (local, offset) = match mesh.coordinate() {
            Some(coordinate) => part(&key.shape, &ranges(&key, sizes, coordinate)),
            None => (Shape::from(0), SmallVec::new()),
        };
        Spec { id, key, cuts, local, offset }
    }
}

impl Spec {
    /// How many elements the largest part has, as if all cuts were plain.
    pub(crate) fn largest(&self, sizes: &[usize]) -> usize {
        let mut dims: SmallVec<[usize; 4]> = self.key.shape[..].into();
        for (placement, size) in self.key.placements.iter().zip(sizes) {
            if let Some((dim, _)) = placement.cut() {
                dims[dim] = dims[dim].div_ceil(*size);
            }
        }
        dims.iter().product()
    }
}

/// The cuts of one tensor dim as the placements say them, from left to right.
#[inline]
fn written(key: &SpecKey, dim: usize) -> SmallVec<[Cut; 4]> {
    let cuts = key.placements.iter().enumerate();
    let cuts = cuts.filter_map(|(mesh_dim, p)| p.cut().map(|(dim, split)| Cut { dim, mesh_dim, split }));
    cuts.filter(|cut| cut.dim == dim).collect()
}

/// The cuts of one tensor dim.
///
/// Strided shards that stand for cuts in another order than that of the mesh dims are turned into plain cuts in that order:
/// a split factor is then the number of ranks along mesh dims that cut before but stand further right.
fn cuts_of(key: &SpecKey, dim: usize, sizes: &[usize]) -> SmallVec<[Cut; 4]> {
    let written = written(key, dim);
    if written.iter().all(|cut| cut.split == 1) {
        return written;
    }
    let mut ordered: SmallVec<[Cut; 4]> = SmallVec::new();
    for &cut in written.iter().rev() {
        let before = |at: usize| ordered[..at].iter().map(|cut| sizes[cut.mesh_dim]).product::<usize>();
        match (0..=ordered.len()).find(|&at| before(at) == cut.split) {
            Some(at) => ordered.insert(at, Cut { split: 1, ..cut }),
            None => return written,
        }
    }
    // With uneven parts, cuts in that order may be other cuts.
    let len = key.shape[dim];
    let counts: SmallVec<[usize; 4]> = written.iter().map(|cut| sizes[cut.mesh_dim]).collect();
    let alike = (0..counts.iter().product()).map(|i| unravel(i, &counts)).all(|at| {
        let along = |cut: &Cut| at[written.iter().position(|w| w.mesh_dim == cut.mesh_dim).unwrap_or(0)];
        follow(len, &written, sizes, along) == follow(len, &ordered, sizes, along)
    });
    if alike { ordered } else { written }
}

/// What the cuts leave of a dim at a coordinate.
#[inline]
fn follow(len: usize, cuts: &[Cut], sizes: &[usize], along: impl Fn(&Cut) -> usize) -> Ranges {
    let whole = if len == 0 { Ranges::new() } else { SmallVec::from_elem(0..len, 1) };
    cuts.iter().fold(whole, |ranges, cut| chunk_of_each(&ranges, cut.split, sizes[cut.mesh_dim], along(cut)))
}

/// The indices of each dim that the rank at a coordinate has.
#[inline]
fn ranges(key: &SpecKey, sizes: &[usize], coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
    let of_dim =
        |(dim, &len): (usize, &usize)| follow(len, &written(key, dim), sizes, |cut| coordinate[cut.mesh_dim]);
    key.shape.iter().enumerate().map(of_dim).collect()
}

/// The shape of a part, and where it begins: an empty one at the end.
#[inline]
fn part(shape: &Shape, ranges: &[Ranges]) -> (Shape, SmallVec<[usize; 4]>) {
    let local = ranges.iter().map(|ranges| ranges.iter().map(ExactSizeIterator::len).sum()).collect();
    let start = |(ranges, &len): (&Ranges, &usize)| ranges.first().map_or(len, |range| range.start);
    (local, ranges.iter().zip(shape.iter()).map(start).collect())
}
