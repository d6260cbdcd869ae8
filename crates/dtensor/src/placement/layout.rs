//! [`Layout`]: a mesh, one placement per mesh dim, and the shape of the whole tensor.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Cut, Placement, PlacementList, Placements, Ranges, Replicate, chunk_of_each, shown, unravel};
use crate::mesh::DeviceMesh;
use crate::tensor::{Shape, checked_numel};
use crate::{Error, Result};

/// How a tensor of some shape lies on a mesh. Its placements fit the mesh and the shape: this is checked once, when the
/// layout is made.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DeviceMesh, Layout, Replicate, Shard};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 3)?, [2, 2], ["dp", "tp"])?;
/// let layout = Layout::new(&mesh, [Shard(0), Shard(-1)], [5, 5])?;
/// assert_eq!(layout.to_string(), "[5, 5] [S(0), S(1)]");
/// assert_eq!(layout.local_shape()[..], [2, 2]);
/// assert_eq!(layout.global_offset(), [3, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Layout {
    mesh: DeviceMesh,
    spec: Arc<Spec>,
}

/// The number of dims a distributed tensor may have.
const MAX_RANK: usize = 64;

/// A layout without its mesh, as one rank sees it.
#[derive(Debug)]
pub(crate) struct Spec {
    /// Tells specs of one mesh apart.
    pub(crate) id: u64,
    pub(crate) key: SpecKey,
    /// The cuts that the placements amount to. Those of one tensor dim are in the order in which they are made.
    pub(crate) cuts: SmallVec<[Cut; 4]>,
    /// The shape of this rank's part, and where in the whole it begins.
    pub(crate) local: Shape,
    pub(crate) offset: SmallVec<[usize; 4]>,
}

/// What makes a layout on a given mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SpecKey {
    pub(crate) placements: PlacementList,
    pub(crate) shape: Shape,
}

impl Spec {
    /// For a mesh of these sizes, on the rank at this coordinate (if it is in the mesh). The placements are checked.
    pub(crate) fn new(id: u64, key: SpecKey, sizes: &[usize], coordinate: Option<&[usize]>) -> Self {
        let mut cuts = SmallVec::new();
        for dim in 0..key.shape.rank() {
            cuts.extend(cuts_of(&key, dim, sizes));
        }
        let (local, offset) = match coordinate {
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
fn follow(len: usize, cuts: &[Cut], sizes: &[usize], along: impl Fn(&Cut) -> usize) -> Ranges {
    let whole = if len == 0 { Ranges::new() } else { SmallVec::from_elem(0..len, 1) };
    cuts.iter().fold(whole, |ranges, cut| chunk_of_each(&ranges, cut.split, sizes[cut.mesh_dim], along(cut)))
}

/// The indices of each dim that the rank at a coordinate has.
fn ranges(key: &SpecKey, sizes: &[usize], coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
    let of_dim =
        |(dim, &len): (usize, &usize)| follow(len, &written(key, dim), sizes, |cut| coordinate[cut.mesh_dim]);
    key.shape.iter().enumerate().map(of_dim).collect()
}

/// The shape of a part, and where it begins: an empty one at the end.
fn part(shape: &Shape, ranges: &[Ranges]) -> (Shape, SmallVec<[usize; 4]>) {
    let local = ranges.iter().map(|ranges| ranges.iter().map(ExactSizeIterator::len).sum()).collect();
    let start = |(ranges, &len): (&Ranges, &usize)| ranges.first().map_or(len, |range| range.start);
    (local, ranges.iter().zip(shape.iter()).map(start).collect())
}

impl Layout {
    /// A tensor of this shape laid on a mesh.
    pub fn new(
        mesh: &DeviceMesh,
        placements: impl Into<Placements>,
        shape: impl Into<Shape>,
    ) -> Result<Layout> {
        Layout::checked("Layout", mesh, placements.into(), shape.into())
    }

    /// As [`new`](Layout::new), with the function that errors name.
    pub(crate) fn checked(
        op: &'static str,
        mesh: &DeviceMesh,
        placements: Placements,
        shape: Shape,
    ) -> Result<Layout> {
        checked_numel(op, &shape)?;
        if shape.rank() > MAX_RANK {
            let message =
                format!("a distributed tensor has at most {MAX_RANK} dims, but the shape is {shape}");
            return Err(Error::argument(op, message));
        }
        let placements = placements.checked(op, mesh.ndim(), shape.rank())?;
        Ok(Layout::of(mesh, SpecKey { placements, shape }))
    }

    /// From what has been checked.
    pub(crate) fn of(mesh: &DeviceMesh, key: SpecKey) -> Layout {
        Layout { mesh: mesh.clone(), spec: mesh.spec(key) }
    }

    /// On a mesh whose spec this is.
    #[inline]
    pub(crate) fn with(mesh: &DeviceMesh, spec: &Arc<Spec>) -> Layout {
        Layout { mesh: mesh.clone(), spec: spec.clone() }
    }

    /// The same tensor with other placements, each derived from the one it has. They must fit.
    pub(crate) fn map(&self, other: impl FnMut(&Placement) -> Placement) -> Layout {
        let placements = self.placements().iter().map(other).collect();
        Layout::of(&self.mesh, SpecKey { placements, shape: self.shape().clone() })
    }

    /// The same tensor, all of it on every rank.
    pub(crate) fn replicated(&self) -> Layout {
        self.map(|_| Replicate)
    }

    /// A tensor of this shape, all of it on every rank of a mesh.
    pub(crate) fn everywhere(mesh: &DeviceMesh, shape: &Shape) -> Layout {
        let placements = SmallVec::from_elem(Replicate, mesh.ndim());
        Layout::of(mesh, SpecKey { placements, shape: shape.clone() })
    }

    /// The same tensor with [`Replicate`] in place of every [`Partial`](super::Partial).
    pub(crate) fn without_partials(&self) -> Layout {
        self.map(|&p| if p.is_partial() { Replicate } else { p })
    }

    /// How gradients of the parts lie, as somebody has said it: in any way in which every rank has the
    /// elements that it has here. Whether they are partial or whole is no difference.
    pub(crate) fn of_gradient(&self, op: &'static str, placements: Placements) -> Result<Layout> {
        let grad = Layout::checked(op, &self.mesh, placements, self.shape().clone())?;
        if self.has_parts_of(&grad) {
            return Ok(grad);
        }
        let message = format!("gradients of parts of a tensor {self} are no parts of one that is {grad}");
        Err(Error::argument(op, message))
    }

    /// Whether every rank has the same elements in both layouts of one tensor, in the same order.
    fn has_parts_of(&self, other: &Layout) -> bool {
        let (sizes, one, two) = (self.mesh.shape(), &self.spec.key, &other.spec.key);
        let cuts = |key: &SpecKey| key.placements.iter().map(|p| p.cut()).collect::<SmallVec<[_; 4]>>();
        let alike = |position: usize| {
            let at = unravel(position, sizes);
            let (here, there) = (ranges(one, sizes, &at), ranges(two, sizes, &at));
            let (shape, _) = part(&one.shape, &here);
            // Of parts without elements, there is nothing but the shape.
            here == there || shape.numel() == 0 && shape == part(&two.shape, &there).0
        };
        cuts(one) == cuts(two) || (0..self.mesh.size()).all(alike)
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// One placement per mesh dim.
    pub fn placements(&self) -> &[Placement] {
        &self.spec.key.placements
    }

    /// The shape of the whole tensor.
    pub fn shape(&self) -> &Shape {
        &self.spec.key.shape
    }

    pub(crate) fn spec(&self) -> &Arc<Spec> {
        &self.spec
    }

    /// The shape of this rank's part; `[0]` on a rank outside the mesh.
    pub fn local_shape(&self) -> &Shape {
        &self.spec.local
    }

    /// Where in the whole this rank's part begins; nowhere on a rank outside the mesh. A dim of which the rank has nothing
    /// begins at its end.
    pub fn global_offset(&self) -> &[usize] {
        &self.spec.offset
    }

    /// The shape of the part at another coordinate of the mesh, and where it begins.
    pub(crate) fn part_at(&self, coordinate: &[usize]) -> (Shape, SmallVec<[usize; 4]>) {
        part(self.shape(), &self.ranges_at(coordinate))
    }

    /// The indices of each dim that the rank at a coordinate has, as ranges in the order in which they lie there.
    pub(crate) fn ranges_at(&self, coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
        ranges(&self.spec.key, self.mesh.shape(), coordinate)
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        self.mesh == other.mesh && (Arc::ptr_eq(&self.spec, &other.spec) || self.spec.key == other.spec.key)
    }
}

impl Eq for Layout {}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.shape(), shown(self.placements()))
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Layout({self} on {})", self.mesh)
    }
}
