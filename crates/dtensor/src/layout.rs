//! [`Layout`]: a mesh, one placement per mesh dim, and the shape of the full tensor.

use std::fmt;
use std::sync::Arc;

use dtensor_array::{DType, Shape};
use dtensor_layout::{Chunk, Placement, Placements, Plan, Ranges, Replicate, Spec, SpecKey};
use smallvec::SmallVec;

use crate::mesh::DeviceMesh;
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

impl Layout {
    /// A tensor of this shape laid on a mesh.
    pub fn new(
        mesh: &DeviceMesh,
        placements: impl Into<Placements>,
        shape: impl Into<Shape>,
    ) -> Result<Layout> {
        Layout::checked("Layout", mesh, placements.into(), shape.into())
    }

    /// As [`new`](Layout::new), with errors in the name of `op`.
    pub(crate) fn checked(
        op: &'static str,
        mesh: &DeviceMesh,
        placements: Placements,
        shape: Shape,
    ) -> Result<Layout> {
        Ok(Layout { mesh: mesh.clone(), spec: mesh.planner().spec(op, placements, shape)? })
    }

    /// Of placements that have been checked.
    pub(crate) fn of(mesh: &DeviceMesh, key: SpecKey) -> Layout {
        Layout { mesh: mesh.clone(), spec: mesh.planner().intern(key) }
    }

    /// Of a spec of this mesh.
    #[inline]
    pub(crate) fn with(mesh: &DeviceMesh, spec: &Arc<Spec>) -> Layout {
        Layout { mesh: mesh.clone(), spec: spec.clone() }
    }

    /// The same on another handle of an equal mesh.
    pub(crate) fn on(&self, mesh: &DeviceMesh) -> Layout {
        if mesh.is_handle_of(&self.mesh) {
            return self.clone();
        }
        Layout::of(mesh, self.spec.key.clone())
    }

    /// The same shape with other placements.
    pub(crate) fn map(&self, other: impl FnMut(&Placement) -> Placement) -> Layout {
        Layout::of(&self.mesh, self.spec.key.map(other))
    }

    /// Replicated along all mesh dims.
    pub(crate) fn replicated(&self) -> Layout {
        self.map(|_| Replicate)
    }

    /// Replicated on a mesh.
    pub(crate) fn everywhere(mesh: &DeviceMesh, shape: &Shape) -> Layout {
        let placements = SmallVec::from_elem(Replicate, mesh.ndim());
        Layout::of(mesh, SpecKey { placements, shape: shape.clone() })
    }

    /// Replicated where it is partial.
    pub(crate) fn without_partials(&self) -> Layout {
        Layout::of(&self.mesh, self.spec.key.without_partials())
    }

    /// The layout of a gradient of this rank's shard. Ranks must have the same elements in both.
    pub(crate) fn of_gradient(&self, op: &'static str, placements: Placements) -> Result<Layout> {
        let grad = Layout::checked(op, &self.mesh, placements, self.shape().clone())?;
        if self.spec.key.has_shards_of(&grad.spec.key, self.mesh.shape()) {
            return Ok(grad);
        }
        let message = format!("gradients of parts of a tensor {self} are no parts of one that is {grad}");
        Err(Error::argument(op, message))
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

    /// Placements and shape, without the mesh.
    #[inline]
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

    /// The shape of the shard of the rank at a coordinate, and where it begins.
    pub(crate) fn shard_at(&self, coordinate: &[usize]) -> (Shape, SmallVec<[usize; 4]>) {
        self.spec.key.shard_at(self.mesh.shape(), coordinate)
    }

    /// The indices of each dim that the rank at a coordinate holds.
    pub(crate) fn ranges_at(&self, coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
        self.spec.key.ranges_at(self.mesh.shape(), coordinate)
    }

    /// Returns the cheapest way to another layout of a tensor of this dtype. Both must be on one mesh and of one shape. No rank is
    /// asked.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Layout, Replicate, Shard};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(64, 0)?, [8, 8], ["dp", "tp"])?;
    /// let layout = |placements: [_; 2]| Layout::new(&mesh, placements, [1024, 1024]);
    /// let plan = layout([Shard(0), Shard(0)])?.plan_to(&layout([Replicate, Replicate])?, DType::F32)?;
    /// assert_eq!(plan.collectives(), ["all_gather"]);
    /// assert_eq!(plan.bytes(), 63 * 16 * 1024 * 4);
    /// # Ok(())
    /// # }
    /// ```
    pub fn plan_to(&self, to: &Layout, dtype: DType) -> Result<Arc<Plan>> {
        if self.mesh != to.mesh || self.shape() != to.shape() {
            return Err(Layout::mismatch("plan_to", Some(self), Some(to)));
        }
        Ok(self.mesh.planner().plan(&self.spec, to.on(&self.mesh).spec(), dtype))
    }

    /// The blocks that each rank of the mesh has, in the mesh's order. Ranks without elements have none; one whose part is cut
    /// [in several pieces](crate::StridedShard) has one for each. A rank can make the list alone, for all.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DeviceMesh, Layout, Shard};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], ())?;
    /// let chunks = Layout::new(&mesh, [Shard(1)], [2, 5])?.chunks()?;
    /// let columns: Vec<_> = chunks.iter().map(|chunk| (chunk.rank, chunk.offset[1], chunk.shape[1])).collect();
    /// assert_eq!(columns, [(0, 0, 2), (1, 2, 2), (2, 4, 1)]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn chunks(&self) -> Result<Vec<Chunk>> {
        let mut all = Vec::new();
        for position in 0..self.mesh.size() {
            all.extend(self.spec.key.chunks_at(self.mesh.topology(), position)?);
        }
        Ok(all)
    }

    /// The blocks that a rank of the mesh has, given by its number in the world.
    pub fn chunks_of(&self, rank: usize) -> Result<Vec<Chunk>> {
        let position = self.mesh.ranks().iter().position(|&known| known == rank);
        let position = position.ok_or_else(|| {
            Error::argument("chunks", format!("rank {rank} is not in the mesh {}", self.mesh))
        })?;
        self.spec.key.chunks_at(self.mesh.topology(), position)
    }

    /// The error of tensors that must have the same layout and do not.
    pub(crate) fn mismatch(op: &'static str, left: Option<&Layout>, right: Option<&Layout>) -> Error {
        let shown = |layout: Option<&Layout>| {
            layout.map_or_else(|| "a local tensor".into(), |layout| format!("{layout} on {}", layout.mesh()))
        };
        if let (Some(left), Some(right)) = (left, right)
            && left.mesh != right.mesh
        {
            let meshes = left.mesh.and_other(&right.mesh);
            let message =
                format!("expected tensors of the same layout, but found {left} and {right} on {meshes}");
            return Error::argument(op, message);
        }
        let message =
            format!("expected tensors of the same layout, but found {} and {}", shown(left), shown(right));
        Error::argument(op, message)
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
        self.spec.key.fmt(f)
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Layout({self} on {})", self.mesh)
    }
}
