//! [`DeviceMesh`]: an n-dimensional grid of ranks with named dims, and a group along each dim.

mod derive;
mod draws;
mod groups;
mod origin;
mod overrides;
mod scope;
mod sharding;

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock, Weak};

use dtensor_array::Shape;
use dtensor_layout::{CacheStats, CostModel, Mesh, MeshDim, MeshDims, MeshNames, Names, Overrides, Planner};
use parking_lot::Mutex;

use draws::{Draws, InnerGroups};
use origin::Origin;
pub(crate) use scope::mesh_or_active;
pub use scope::use_mesh;
use sharding::Sharding;

use crate::comm::{Group, Site, World};
use crate::{Error, Result};

/// An n-dimensional grid of ranks. Clones are handles of the same mesh.
///
/// Along each dim, this rank has a [`Group`] with the ranks that differ from it only in that coordinate. A group is in the order of
/// the mesh's coordinates, whatever the ranks' numbers. A rank of the world outside the mesh has no coordinate and no groups; it can
/// run the same program as the others, and takes no part in collectives.
///
/// ```
/// use dtensor::DeviceMesh;
/// use dtensor::comm::launch;
/// # fn main() -> dtensor::Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
///     assert_eq!(mesh.size_of("tp")?, 2);
///     assert_eq!(mesh.local_rank("tp")?, world.rank() % 2);
///     assert_eq!(mesh["dp"].group(())?.rank(), world.rank() / 2);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DeviceMesh(Arc<Core>);

struct Core {
    topology: Mesh,
    shared: Arc<Shared>,
    /// The root that this mesh was derived from; itself for a root.
    origin: Arc<Origin>,
    /// The dims of the root that each dim consists of.
    root_dims: Vec<MeshDims>,
    /// One group per dim; empty on a rank outside the mesh.
    groups: Vec<Group>,
    /// The 1-d mesh of each dim, made at first use.
    dim_meshes: Vec<OnceLock<DeviceMesh>>,
    /// Other meshes derived from this one. Owned here so that their caches outlive the caller's handle.
    submeshes: Mutex<HashMap<SubmeshKey, DeviceMesh>>,
    /// The caches of plans and decisions.
    sharding: Sharding,
}

/// The arguments of [`DeviceMesh::assemble`].
struct MeshParts {
    topology: Mesh,
    shared: Arc<Shared>,
    /// The root that the mesh is derived from, and the root dims that each of its dims consists of. `None` for a new root.
    from: Option<(Arc<Origin>, Vec<MeshDims>)>,
    /// The groups that exist already, by dim. By dim and not by ranks, because the groups of several dims of size 1 have the same
    /// ranks and are still different groups.
    known: Vec<Option<Group>>,
}

/// The dims that each dim of a submesh is made of, and their names.
type SubmeshKey = (Vec<MeshDims>, Option<Names>);

/// The data that a mesh shares with the meshes derived from it.
struct Shared {
    world: World,
    groups: Mutex<HashMap<Vec<usize>, Group>>,
    /// The random draws of tensors on these meshes.
    draws: Draws,
    /// The names of all dims of all of these meshes.
    dims: Mutex<Vec<Arc<str>>>,
    /// The names given by `flatten`, with the dims that they stand for.
    flattened: Mutex<Vec<(Arc<str>, Names)>>,
    /// Sharding rules that replace those of operators.
    overrides: Overrides,
    /// All meshes that share this. Their cached decisions are cleared when a rule is registered.
    meshes: Mutex<Vec<Weak<Core>>>,
}

impl Shared {
    /// Returns the dims that `flatten` gave this name to, if any.
    fn flattened(&self, name: &str) -> Option<Names> {
        let known = self.flattened.lock();
        known.iter().find(|(known, _)| **known == *name).map(|(_, dims)| dims.clone())
    }

    /// Returns an error if a name is already in use.
    fn check_new_name(&self, op: &'static str, name: &str) -> Result<()> {
        let message = match self.flattened(name) {
            Some(dims) => format!("`{name}` already exists for submesh {dims:?}"),
            None if self.dims.lock().iter().any(|dim| **dim == *name) => {
                format!("`{name}` already exists: it is the name of a dim")
            }
            None => return Ok(()),
        };
        Err(Error::argument(op, message))
    }

    /// Returns the group of these ranks, created if it does not exist. All of them must call this at the same time.
    fn group(&self, ranks: &[usize], name: &str, at: Site) -> Result<Group> {
        if let Some(group) = self.groups.lock().get(ranks) {
            return Ok(group.clone());
        }
        let group = self.world.group_at(ranks, name, at)?;
        let group = group.ok_or_else(|| Error::argument("DeviceMesh", "this rank is not in the group"))?;
        self.draws.init_group(&group);
        self.groups.lock().insert(ranks.to_vec(), group.clone());
        Ok(group)
    }
}

/// Creates a mesh: [`DeviceMesh::new`] under PyTorch's name.
#[track_caller]
pub fn init_device_mesh(
    world: &World,
    shape: impl Into<Shape>,
    names: impl Into<MeshNames>,
) -> Result<DeviceMesh> {
    DeviceMesh::new(world, shape, names)
}

impl DeviceMesh {
    /// Creates a mesh of the first ranks of the world, in row-major order. `names` names the dims, or is `()`.
    ///
    /// All ranks of the mesh must call this at the same time. Returns an error if the world has too few ranks.
    #[track_caller]
    pub fn new(world: &World, shape: impl Into<Shape>, names: impl Into<MeshNames>) -> Result<DeviceMesh> {
        DeviceMesh::make(world, None, shape.into(), names.into(), &[])
    }

    /// Creates a mesh of the given ranks, in row-major order.
    ///
    /// ```
    /// use dtensor::DeviceMesh;
    /// use dtensor::comm::World;
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::from_ranks(&World::simulated(8, 6)?, &[7, 1, 6, 0], [2, 2], ["dp", "tp"])?;
    /// assert_eq!(mesh.coordinate(), Some(&[1, 0][..]));
    /// assert_eq!(mesh.group("dp")?.ranks(), [7, 6]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn from_ranks(
        world: &World,
        ranks: &[usize],
        shape: impl Into<Shape>,
        names: impl Into<MeshNames>,
    ) -> Result<DeviceMesh> {
        DeviceMesh::make(world, Some(ranks), shape.into(), names.into(), &[])
    }

    #[track_caller]
    fn make(
        world: &World,
        ranks: Option<&[usize]>,
        shape: Shape,
        names: MeshNames,
        groups: &[&Group],
    ) -> Result<DeviceMesh> {
        let topology = Mesh::from_ranks(world.rank(), world.size(), ranks, shape, names)?;
        groups::check(world, &topology, groups)?;
        let dims = topology.names().iter().flat_map(|names| names.iter().cloned()).collect();
        let shared = Shared {
            world: world.clone(),
            groups: Mutex::default(),
            draws: Draws::new(),
            dims: Mutex::new(dims),
            flattened: Mutex::default(),
            overrides: Overrides::default(),
            meshes: Mutex::default(),
        };
        DeviceMesh::assemble(MeshParts {
            topology,
            shared: Arc::new(shared),
            from: None,
            known: groups.iter().map(|&group| Some(group.clone())).collect(),
        })
    }

    /// Creates a mesh, and the groups that do not exist yet.
    #[track_caller]
    fn assemble(parts: MeshParts) -> Result<DeviceMesh> {
        let MeshParts { topology, shared, from, known } = parts;
        let mut groups = Vec::new();
        if topology.coordinate().is_some() {
            for dim in 0..topology.ndim() {
                let line = topology.line(&[dim]);
                if let Some(Some(group)) = known.get(dim) {
                    shared.groups.lock().entry(line).or_insert_with(|| group.clone());
                    groups.push(group.clone());
                    continue;
                }
                let name = topology
                    .names()
                    .map_or_else(|| format!("mesh dim {dim}"), |names| names[dim].to_string());
                groups.push(shared.group(&line, &name, Site::caller())?);
            }
        }
        let ndim = topology.ndim();
        let core = Arc::new_cyclic(|this| {
            let (origin, root_dims) = from.unwrap_or_else(|| {
                let (topology, groups, mesh) =
                    (topology.clone(), groups.clone(), Mutex::new(Weak::clone(this)));
                (Arc::new(Origin { topology, groups, mesh }), origin::single_dims(ndim))
            });
            Core {
                dim_meshes: topology.shape().iter().map(|_| OnceLock::new()).collect(),
                sharding: Sharding {
                    planner: Planner::new(topology.clone()),
                    inner_groups: InnerGroups::default(),
                },
                topology,
                shared,
                origin,
                root_dims,
                groups,
                submeshes: Mutex::default(),
            }
        });
        let mut meshes = core.shared.meshes.lock();
        meshes.retain(|mesh| mesh.strong_count() > 0);
        meshes.push(Arc::downgrade(&core));
        drop(meshes);
        Ok(DeviceMesh(core))
    }

    /// Returns this mesh with another cost model, by which redistributions are planned.
    pub fn with_cost(&self, cost: CostModel) -> Result<DeviceMesh> {
        let core = &*self.0;
        DeviceMesh::assemble(MeshParts {
            topology: core.topology.with_cost(cost),
            shared: core.shared.clone(),
            from: (!self.is_root()).then(|| (core.origin.clone(), core.root_dims.clone())),
            known: core.groups.iter().cloned().map(Some).collect(),
        })
    }

    /// Returns the grid of ranks, without the groups.
    #[inline]
    pub(crate) fn topology(&self) -> &Mesh {
        &self.0.topology
    }

    /// Returns the cost model, by which redistributions are planned.
    pub fn cost(&self) -> &CostModel {
        self.0.topology.cost()
    }

    /// Returns the number of dims.
    pub fn ndim(&self) -> usize {
        self.0.topology.ndim()
    }

    /// Returns the size of each dim.
    pub fn shape(&self) -> &[usize] {
        self.0.topology.shape()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.topology.size()
    }

    /// Returns the size of one dim, given by index or name.
    pub fn size_of<'a>(&self, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        Ok(self.shape()[self.dim("size_of", dim)?])
    }

    /// Returns the ranks, in row-major order.
    pub fn ranks(&self) -> &[usize] {
        self.0.topology.ranks()
    }

    /// Returns the names of the dims, if they have names.
    pub fn names(&self) -> Option<&[Arc<str>]> {
        self.0.topology.names().map(|names| &names[..])
    }

    /// Returns this process's rank in the world.
    pub fn rank(&self) -> usize {
        self.0.topology.rank()
    }

    /// Returns this rank's coordinate in the mesh; `None` if it is outside.
    #[inline]
    pub fn coordinate(&self) -> Option<&[usize]> {
        self.0.topology.coordinate()
    }

    /// Returns this rank's coordinate along one dim; `()` stands for the only dim.
    pub fn local_rank<'a>(&self, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        let dim = self.dim("local_rank", dim)?;
        self.coordinate().map(|at| at[dim]).ok_or_else(|| self.not_in_mesh_error("local_rank"))
    }

    /// Returns this rank's group along one dim; `()` stands for the only dim.
    pub fn group<'a>(&self, dim: impl Into<MeshDim<'a>>) -> Result<&Group> {
        let dim = self.dim("group", dim)?;
        self.0.groups.get(dim).ok_or_else(|| self.not_in_mesh_error("group"))
    }

    /// Returns this rank's groups, one per dim; empty if it is outside the mesh.
    pub fn groups(&self) -> &[Group] {
        &self.0.groups
    }

    /// Returns the name of a dim, or its index if it has none.
    pub(crate) fn name_of(&self, dim: usize) -> String {
        self.0.topology.name_of(dim)
    }

    fn dim<'a>(&self, op: &'static str, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        let dim = dim.into();
        match dim {
            MeshDim::Named(name) if self.0.shared.flattened(name).is_some() => {
                self.0.topology.dim(op, dim).map_err(|_| {
                    let message = format!(
                        "`{name}` is a name given by `flatten`, not a dim of this mesh: get its mesh with `slice` first"
                    );
                    Error::argument(op, message)
                })
            }
            _ => self.0.topology.dim(op, dim),
        }
    }

    /// The error for a rank that is not in the mesh.
    pub(crate) fn not_in_mesh_error(&self, op: &'static str) -> Error {
        Error::argument(op, format!("rank {} is not in the mesh {self}", self.rank()))
    }

    /// Describes two unequal meshes so that the difference is visible.
    pub(crate) fn show_difference(&self, other: &DeviceMesh) -> String {
        let (a, b) = (self.topology(), other.topology());
        if a.to_string() != b.to_string() {
            return format!("{a} and {b}");
        }
        if self.0.shared.world != other.0.shared.world {
            return format!(
                "{a} of one world and {b} of another: a mesh does not outlive the `World` it was made with"
            );
        }
        format!("{a} seen from rank {} and from rank {}", a.rank(), b.rank())
    }

    /// Returns true if both are handles of one mesh, not only equal.
    #[inline]
    pub(crate) fn is_handle_of(&self, other: &DeviceMesh) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the cache of plans and decisions.
    #[inline]
    pub(crate) fn planner(&self) -> &Planner {
        &self.0.sharding.planner
    }

    /// Returns the hits, misses and entries of the cache of decisions and plans.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], ())?;
    /// let x = sharded::ones([4], DType::F32, &mesh, [Shard(0)])?;
    /// x.add(&x)?;
    /// x.add(&x)?;
    /// assert_eq!((mesh.cache_stats().hits, mesh.cache_stats().misses), (1, 1));
    /// # Ok(())
    /// # }
    /// ```
    pub fn cache_stats(&self) -> CacheStats {
        self.planner().stats()
    }

    /// Clears the cache of decisions and plans and resets its counts. Useful to measure what a decision costs.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{CacheStats, DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], ())?;
    /// let x = sharded::ones([4], DType::F32, &mesh, [Shard(0)])?;
    /// x.add(&x)?;
    /// mesh.clear_cache();
    /// assert_eq!(mesh.cache_stats(), CacheStats::default());
    /// # Ok(())
    /// # }
    /// ```
    pub fn clear_cache(&self) {
        self.planner().clear();
    }
}

impl PartialEq for DeviceMesh {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.0.topology == other.0.topology && self.0.shared.world == other.0.shared.world)
    }
}

impl Eq for DeviceMesh {}

impl Hash for DeviceMesh {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.topology.hash(state);
    }
}

impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.topology.fmt(f)
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.topology.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Shard, sharded};

    /// Cached decisions do not keep their mesh alive.
    #[test]
    fn a_mesh_is_freed_with_its_last_tensor() {
        let mesh = DeviceMesh::new(&World::simulated(2, 0).unwrap(), [2], ()).unwrap();
        let x = sharded::ones([4, 4], DType::F32, &mesh, [Shard(0)]).unwrap().requires_grad_(true).unwrap();
        x.mm(&x).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(mesh.cache_stats().entries > 3);
        let with_module_listener = Arc::downgrade(&mesh.0);
        drop((mesh, x));
        assert!(with_module_listener.upgrade().is_none());
    }
}
