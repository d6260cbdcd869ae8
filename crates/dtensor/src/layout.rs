//! [`Layout`]: a mesh, one placement per mesh dim, and the shape of the full tensor.

use std::fmt;
use std::sync::Arc;

use dtensor_array::{DType, Shape};
use dtensor_layout::{Chunk, Placement, Placements, Plan, Ranges, Replicate, Spec, SpecKey};
use smallvec::SmallVec;

use crate::mesh::DeviceMesh;
use crate::{Error, Result};

/// The layout of a tensor: a mesh, one placement per mesh dim, and the global shape.
///
/// The placements fit the mesh and the shape: the constructor checks this once.
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
    /// Creates the layout of a tensor of this shape. Returns an error if the placements do not fit the mesh or the shape.
    pub fn new(
        mesh: &DeviceMesh,
        placements: impl Into<Placements>,
        shape: impl Into<Shape>,
    ) -> Result<Layout> {
        Layout::checked("Layout", mesh, placements.into(), shape.into())
    }

    /// Creates a layout like [`new`](Layout::new); errors name `op`.
    pub(crate) fn checked(
        op: &'static str,
        mesh: &DeviceMesh,
        placements: Placements,
        shape: Shape,
    ) -> Result<Layout> {
        Ok(Layout { mesh: mesh.clone(), spec: mesh.planner().spec(op, placements, shape)? })
    }

    /// Creates a layout of placements that have been checked.
    pub(crate) fn of(mesh: &DeviceMesh, key: SpecKey) -> Layout {
        Layout { mesh: mesh.clone(), spec: mesh.planner().intern(key) }
    }

    /// Creates a layout of a spec that this mesh has made.
    #[inline]
    pub(crate) fn with(mesh: &DeviceMesh, spec: &Arc<Spec>) -> Layout {
        Layout { mesh: mesh.clone(), spec: spec.clone() }
    }

    /// Returns this layout on another mesh object that is equal to its own.
    pub(crate) fn on(&self, mesh: &DeviceMesh) -> Layout {
        if mesh.is_handle_of(&self.mesh) {
            return self.clone();
        }
        Layout::of(mesh, self.spec.key.clone())
    }

    /// Returns this layout with each placement mapped by `other`.
    pub(crate) fn map(&self, other: impl FnMut(&Placement) -> Placement) -> Layout {
        Layout::of(&self.mesh, self.spec.key.map(other))
    }

    /// Returns this layout, replicated along all mesh dims.
    pub(crate) fn replicated(&self) -> Layout {
        self.map(|_| Replicate)
    }

    /// Creates the layout of a replicated tensor.
    pub(crate) fn replicated_on(mesh: &DeviceMesh, shape: &Shape) -> Layout {
        let placements = SmallVec::from_elem(Replicate, mesh.ndim());
        Layout::of(mesh, SpecKey { placements, shape: shape.clone() })
    }

    /// Returns this layout with every partial placement replaced by a replicated one.
    pub(crate) fn without_partials(&self) -> Layout {
        Layout::of(&self.mesh, self.spec.key.without_partials())
    }

    /// Creates the layout of a gradient. Returns an error unless each rank holds the same elements of the gradient as of the tensor.
    pub(crate) fn for_gradient(&self, op: &'static str, placements: Placements) -> Result<Layout> {
        let grad = Layout::checked(op, &self.mesh, placements, self.shape().clone())?;
        if self.spec.key.has_shards_of(&grad.spec.key, self.mesh.shape()) {
            return Ok(grad);
        }
        let message = format!(
            "a gradient of a tensor {self} cannot be {grad}: each rank must hold the same elements of both"
        );
        Err(Error::argument(op, message))
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns the placements, one per mesh dim.
    pub fn placements(&self) -> &[Placement] {
        &self.spec.key.placements
    }

    /// Returns the global shape: that of the full tensor.
    pub fn shape(&self) -> &Shape {
        &self.spec.key.shape
    }

    /// Returns placements and shape, without the mesh.
    #[inline]
    pub(crate) fn spec(&self) -> &Arc<Spec> {
        &self.spec
    }

    /// Returns the shape of this rank's shard; `[0]` on a rank outside the mesh.
    pub fn local_shape(&self) -> &Shape {
        &self.spec.local
    }

    /// Returns the index in the full tensor at which this rank's shard begins; empty on a rank outside the mesh. Along a dim of
    /// which the rank holds no elements, the offset is the size of the dim.
    pub fn global_offset(&self) -> &[usize] {
        &self.spec.offset
    }

    /// Returns the shape and the offset of the shard of the rank at a coordinate.
    pub(crate) fn shard_at(&self, coordinate: &[usize]) -> (Shape, SmallVec<[usize; 4]>) {
        self.spec.key.shard_at(self.mesh.shape(), coordinate)
    }

    /// Returns the ranges of indices, per tensor dim, that the rank at a coordinate holds.
    pub(crate) fn ranges_at(&self, coordinate: &[usize]) -> SmallVec<[Ranges; 4]> {
        self.spec.key.ranges_at(self.mesh.shape(), coordinate)
    }

    /// Returns the cheapest plan that redistributes a tensor of this dtype to another layout. Nothing is communicated. Returns an
    /// error if the layouts have different meshes or shapes.
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

    /// Returns the blocks of the full tensor that each rank holds, in the order of the mesh. Nothing is communicated.
    ///
    /// A rank without elements has no block. A rank with a [strided shard](crate::StridedShard) has several.
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

    /// Returns the blocks that one rank holds; `rank` is its rank in the world. Returns an error if it is not in the mesh.
    pub fn chunks_of(&self, rank: usize) -> Result<Vec<Chunk>> {
        let position = self.mesh.ranks().iter().position(|&known| known == rank);
        let position = position.ok_or_else(|| {
            Error::argument("chunks", format!("rank {rank} is not in the mesh {}", self.mesh))
        })?;
        self.spec.key.chunks_at(self.mesh.topology(), position)
    }

    /// The error for two tensors that must have the same layout but differ.
    pub(crate) fn mismatch(op: &'static str, left: Option<&Layout>, right: Option<&Layout>) -> Error {
        let shown = |layout: Option<&Layout>| {
            layout.map_or_else(|| "a local tensor".into(), |layout| format!("{layout} on {}", layout.mesh()))
        };
        if let (Some(left), Some(right)) = (left, right)
            && left.mesh != right.mesh
        {
            let meshes = left.mesh.show_difference(&right.mesh);
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
