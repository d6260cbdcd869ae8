//! [`DeviceMesh`]: ranks in a grid with named dims, and a group of ranks along each dim.

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

use draws::{Draws, Reach};
use origin::Origin;
pub(crate) use scope::chosen;
pub use scope::use_mesh;
use sharding::Sharding;

use crate::comm::{Group, Site, World};
use crate::{Error, Result};

/// Ranks in a grid. A handle: clones are the same mesh.
///
/// Each dim has a group per line of ranks along it. The ranks of a group are in the order of the mesh's coordinates, whatever
/// their numbers. A rank of the world that is not in the mesh has no coordinate; it may call everything the others call, and
/// takes no part.
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
    /// The mesh that this one was derived from, or itself, and the dims of that one that each dim here consists of.
    origin: Arc<Origin>,
    root_dims: Vec<MeshDims>,
    /// One per dim, on a rank that is in the mesh.
    groups: Vec<Group>,
    /// The meshes of one dim each, made when first asked for.
    lines: Vec<OnceLock<DeviceMesh>>,
    /// Other meshes derived from this one, so that what they remember is not lost.
    taken: Mutex<HashMap<Taken, DeviceMesh>>,
    /// Plans, decisions and draws: what is remembered of tensors on this mesh.
    sharding: Sharding,
}

/// What a mesh is made of.
struct Parts {
    topology: Mesh,
    shared: Arc<Shared>,
    /// The mesh that it is derived from, and the dims of that one that each of its dims consists of. Without, it is one that
    /// others are derived from.
    from: Option<(Arc<Origin>, Vec<MeshDims>)>,
    /// The groups along its dims, as far as they are known: several of size 1 have the same ranks, and still each its own.
    known: Vec<Option<Group>>,
}

/// The dims that each dim of a mesh is made of, and their names.
type Taken = (Vec<MeshDims>, Option<Names>);

/// What a mesh shares with those that were cut out of it.
struct Shared {
    world: World,
    groups: Mutex<HashMap<Vec<usize>, Group>>,
    /// What has been drawn of tensors on these meshes.
    draws: Draws,
    /// The names of all dims that there have been.
    dims: Mutex<Vec<Arc<str>>>,
    /// The names given to several dims taken as one.
    flattened: Mutex<Vec<(Arc<str>, Names)>>,
    /// Sharding rules that stand for those of operators.
    overrides: Overrides,
    /// All meshes that share this, and remember decisions made by these rules.
    meshes: Mutex<Vec<Weak<Core>>>,
}

impl Shared {
    /// The dims that a name was given to.
    fn flattened(&self, name: &str) -> Option<Names> {
        let known = self.flattened.lock();
        known.iter().find(|(known, _)| **known == *name).map(|(_, dims)| dims.clone())
    }

    /// That a name is not in use.
    fn unknown(&self, op: &'static str, name: &str) -> Result<()> {
        let message = match self.flattened(name) {
            Some(dims) => format!("`{name}` already exists for submesh {dims:?}"),
            None if self.dims.lock().iter().any(|dim| **dim == *name) => {
                format!("`{name}` already exists: it is the name of a dim")
            }
            None => return Ok(()),
        };
        Err(Error::argument(op, message))
    }

    /// The group of these ranks, which all of them ask for at the same time.
    fn group(&self, ranks: &[usize], name: &str, at: Site) -> Result<Group> {
        if let Some(group) = self.groups.lock().get(ranks) {
            return Ok(group.clone());
        }
        let group = self.world.group_at(ranks, name, at)?;
        let group = group.ok_or_else(|| Error::argument("DeviceMesh", "this rank is not in the group"))?;
        self.draws.begin(&group);
        self.groups.lock().insert(ranks.to_vec(), group.clone());
        Ok(group)
    }
}

/// [`DeviceMesh::new`], under PyTorch's name.
#[track_caller]
pub fn init_device_mesh(
    world: &World,
    shape: impl Into<Shape>,
    names: impl Into<MeshNames>,
) -> Result<DeviceMesh> {
    DeviceMesh::new(world, shape, names)
}

impl DeviceMesh {
    /// The first ranks of the world in a grid of this shape, row by row. `names` names the dims, or is `()`.
    ///
    /// All ranks of the mesh must call this at the same time.
    #[track_caller]
    pub fn new(world: &World, shape: impl Into<Shape>, names: impl Into<MeshNames>) -> Result<DeviceMesh> {
        DeviceMesh::make(world, None, shape.into(), names.into(), &[])
    }

    /// The given ranks in a grid of this shape, row by row.
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
        DeviceMesh::assemble(Parts {
            topology,
            shared: Arc::new(shared),
            from: None,
            known: groups.iter().map(|&group| Some(group.clone())).collect(),
        })
    }

    /// Puts a mesh together, and makes the groups that it does not have yet.
    #[track_caller]
    fn assemble(parts: Parts) -> Result<DeviceMesh> {
        let Parts { topology, shared, from, known } = parts;
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
                (Arc::new(Origin { topology, groups, mesh }), origin::each(ndim))
            });
            Core {
                lines: topology.shape().iter().map(|_| OnceLock::new()).collect(),
                sharding: Sharding { planner: Planner::new(topology.clone()), reach: Reach::default() },
                topology,
                shared,
                origin,
                root_dims,
                groups,
                taken: Mutex::default(),
            }
        });
        let mut meshes = core.shared.meshes.lock();
        meshes.retain(|mesh| mesh.strong_count() > 0);
        meshes.push(Arc::downgrade(&core));
        drop(meshes);
        Ok(DeviceMesh(core))
    }

    /// The same mesh with another idea of what communication costs along its dims.
    pub fn with_cost(&self, cost: CostModel) -> Result<DeviceMesh> {
        let core = &*self.0;
        DeviceMesh::assemble(Parts {
            topology: core.topology.with_cost(cost),
            shared: core.shared.clone(),
            from: (!self.is_root()).then(|| (core.origin.clone(), core.root_dims.clone())),
            known: core.groups.iter().cloned().map(Some).collect(),
        })
    }

    /// Ranks in a grid, without their groups.
    #[inline]
    pub(crate) fn topology(&self) -> &Mesh {
        &self.0.topology
    }

    /// What communication is taken to cost.
    pub fn cost(&self) -> &CostModel {
        self.0.topology.cost()
    }

    /// The number of dims.
    pub fn ndim(&self) -> usize {
        self.0.topology.ndim()
    }

    /// The size of each dim.
    pub fn shape(&self) -> &[usize] {
        self.0.topology.shape()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.topology.size()
    }

    /// The number of ranks along one dim, given by its position or its name.
    pub fn size_of<'a>(&self, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        Ok(self.shape()[self.dim("size_of", dim)?])
    }

    /// The ranks, row by row.
    pub fn ranks(&self) -> &[usize] {
        self.0.topology.ranks()
    }

    /// The names of the dims, if they have some.
    pub fn names(&self) -> Option<&[Arc<str>]> {
        self.0.topology.names().map(|names| &names[..])
    }

    /// This rank's number in the world.
    pub fn rank(&self) -> usize {
        self.0.topology.rank()
    }

    /// Where in the mesh this rank is, if it is.
    #[inline]
    pub fn coordinate(&self) -> Option<&[usize]> {
        self.0.topology.coordinate()
    }

    /// This rank's position along one dim; `()` stands for the only one.
    pub fn local_rank<'a>(&self, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        let dim = self.dim("local_rank", dim)?;
        self.coordinate().map(|at| at[dim]).ok_or_else(|| self.outside("local_rank"))
    }

    /// The ranks along one dim that this rank is among; `()` stands for the only dim.
    pub fn group<'a>(&self, dim: impl Into<MeshDim<'a>>) -> Result<&Group> {
        let dim = self.dim("group", dim)?;
        self.0.groups.get(dim).ok_or_else(|| self.outside("group"))
    }

    /// The groups this rank is in, one per dim; none if it is not in the mesh.
    pub fn groups(&self) -> &[Group] {
        &self.0.groups
    }

    /// The name of a dim, or its number.
    pub(crate) fn name_of(&self, dim: usize) -> String {
        self.0.topology.name_of(dim)
    }

    fn dim<'a>(&self, op: &'static str, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        let dim = dim.into();
        match dim {
            MeshDim::Named(name) if self.0.shared.flattened(name).is_some() => {
                self.0.topology.dim(op, dim).map_err(|_| {
                    let message = format!(
                        "`{name}` is the name of several dims taken as one: get their mesh with `slice` first"
                    );
                    Error::argument(op, message)
                })
            }
            _ => self.0.topology.dim(op, dim),
        }
    }

    /// The error of a rank that is not in the mesh.
    pub(crate) fn outside(&self, op: &'static str) -> Error {
        Error::argument(op, format!("rank {} is not in the mesh {self}", self.rank()))
    }

    /// Shows two meshes that are not equal, so that one sees how they differ.
    pub(crate) fn and_other(&self, other: &DeviceMesh) -> String {
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

    /// Returns true if these are the same mesh, not only an equal one.
    #[inline]
    pub(crate) fn is_handle_of(&self, other: &DeviceMesh) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// What is remembered of tensors on this mesh.
    #[inline]
    pub(crate) fn planner(&self) -> &Planner {
        &self.0.sharding.planner
    }

    /// How often operators on this mesh found that they had been run on such layouts before.
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

    /// Forgets the decisions and plans that have been made on this mesh, and counts anew: for measuring what they cost.
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

    /// Decisions are remembered by the mesh that they are about, and do not keep it.
    #[test]
    fn a_mesh_goes_when_its_last_tensor_does() {
        let mesh = DeviceMesh::new(&World::simulated(2, 0).unwrap(), [2], ()).unwrap();
        let x = sharded::ones([4, 4], DType::F32, &mesh, [Shard(0)]).unwrap().requires_grad_(true).unwrap();
        x.mm(&x).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(mesh.cache_stats().entries > 3);
        let watched = Arc::downgrade(&mesh.0);
        drop((mesh, x));
        assert!(watched.upgrade().is_none());
    }
}
