//! [`DeviceMesh`]: ranks in a grid with named dims, and a group of ranks along each dim.

mod alike;
mod argument;
mod cache;
mod cut;
mod display;
mod draws;
mod groups;
mod origin;
mod overrides;
mod scope;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use smallvec::SmallVec;

pub use argument::{MeshDim, MeshNames};
use cache::Cache;
use draws::{Draws, Reach};
use origin::Origin;
use overrides::Overrides;
pub use scope::use_mesh;
pub(crate) use scope::{active_mesh, chosen, with_active_mesh};

use crate::comm::{Group, Site, World};
use crate::placement::unravel;
use crate::redistribute::CostModel;
use crate::sharding::{CacheStats, Decisions};
use crate::tensor::Shape;
use crate::{Error, Result};

/// The number of dims a mesh may have.
pub(crate) const MAX_DIMS: usize = 8;

/// The names of the dims of a mesh.
pub(crate) type Names = Arc<[Arc<str>]>;

/// Sizes, positions or indices of mesh dims.
pub(crate) type MeshDims = SmallVec<[usize; 4]>;

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
    shared: Arc<Shared>,
    /// The ranks, row by row.
    ranks: Vec<usize>,
    shape: MeshDims,
    names: Option<Names>,
    /// The mesh that this one was cut out of, or itself, and which dims of that one each dim here consists of.
    origin: Arc<Origin>,
    root_dims: Vec<MeshDims>,
    /// Where this rank is, if it is in the mesh.
    coordinate: Option<MeshDims>,
    /// One per dim, on a rank that is in the mesh.
    groups: Vec<Group>,
    /// All groups that have to know what is drawn of tensors on this mesh.
    reach: Reach,
    /// The meshes of one dim each, made when first asked for.
    lines: Vec<OnceLock<DeviceMesh>>,
    /// Other meshes cut out of this one, so that what they remember is not lost.
    taken: Mutex<HashMap<Taken, DeviceMesh>>,
    cost: CostModel,
    cache: Mutex<Cache>,
    decisions: Mutex<Decisions>,
}

/// What a mesh is made of.
struct Parts {
    shared: Arc<Shared>,
    ranks: Vec<usize>,
    shape: MeshDims,
    names: Option<Names>,
    cost: CostModel,
    /// The mesh that it is cut out of, and which dims of that one each of its dims consists of. Without, it
    /// is one that others are cut out of.
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
    overrides: Mutex<Overrides>,
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
        let shape = shape.into();
        let count = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        let count = count.filter(|&count| count <= world.size()).ok_or_else(|| too_big(world, &shape))?;
        DeviceMesh::from_ranks(world, &(0..count).collect::<Vec<_>>(), shape, names)
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
        DeviceMesh::made(world, ranks, shape.into(), names.into(), &[])
    }

    /// A mesh that is not cut out of another, with these groups, one along each of its dims, or with its own if none are given.
    #[track_caller]
    fn made(
        world: &World,
        ranks: &[usize],
        shape: Shape,
        names: MeshNames,
        groups: &[&Group],
    ) -> Result<DeviceMesh> {
        const OP: &str = "DeviceMesh";
        if shape.is_empty() || shape.len() > MAX_DIMS || shape.contains(&0) {
            let message =
                format!("a mesh has between 1 and {MAX_DIMS} dims, none of size 0, but the shape is {shape}");
            return Err(Error::argument(OP, message));
        }
        if ranks.len() > world.size() {
            return Err(too_big(world, &shape));
        }
        if shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)) != Some(ranks.len()) {
            let message = format!("a mesh of shape {shape} does not have {} ranks", ranks.len());
            return Err(Error::argument(OP, message));
        }
        let mut seen = vec![false; world.size()];
        for &rank in ranks {
            let message = match seen.get_mut(rank).map(|seen| std::mem::replace(seen, true)) {
                None => format!("rank {rank} is not in the world, which has {}", world.size()),
                Some(true) => format!("duplicate ranks: rank {rank} is there twice"),
                Some(false) => continue,
            };
            return Err(Error::argument(OP, message));
        }
        let names = names.checked(OP, shape.len())?;
        groups::check(world, ranks, &shape, groups)?;
        let dims = Mutex::new(names.iter().flat_map(|names| names.iter().cloned()).collect());
        let shared = Shared {
            world: world.clone(),
            groups: Mutex::default(),
            draws: Draws::new(),
            dims,
            flattened: Mutex::default(),
            overrides: Mutex::default(),
            meshes: Mutex::default(),
        };
        DeviceMesh::assemble(Parts {
            shared: Arc::new(shared),
            ranks: ranks.to_vec(),
            shape: shape[..].into(),
            names,
            cost: CostModel::default(),
            from: None,
            known: groups.iter().map(|&group| Some(group.clone())).collect(),
        })
    }

    /// From parts that fit together.
    #[track_caller]
    fn assemble(parts: Parts) -> Result<DeviceMesh> {
        let Parts { shared, ranks, shape, names, cost, from, known } = parts;
        let me = shared.world.rank();
        let coordinate = ranks.iter().position(|&rank| rank == me).map(|at| unravel(at, &shape));
        let mut groups = Vec::new();
        if let Some(coordinate) = &coordinate {
            for dim in 0..shape.len() {
                let line = along(&ranks, &shape, coordinate, &[dim]);
                if let Some(Some(group)) = known.get(dim) {
                    shared.groups.lock().entry(line).or_insert_with(|| group.clone());
                    groups.push(group.clone());
                    continue;
                }
                let name =
                    names.as_ref().map_or_else(|| format!("mesh dim {dim}"), |names| names[dim].to_string());
                groups.push(shared.group(&line, &name, Site::caller())?);
            }
        }
        let lines = shape.iter().map(|_| OnceLock::new()).collect();
        let (taken, cache, decisions) = (Mutex::default(), Mutex::default(), Mutex::default());
        let core = Arc::new_cyclic(|this| {
            let (origin, root_dims) = from.unwrap_or_else(|| {
                let origin = Origin {
                    ranks: ranks.clone(),
                    shape: shape.clone(),
                    names: names.clone(),
                    groups: groups.clone(),
                    cost: cost.clone(),
                    mesh: Mutex::new(this.clone()),
                };
                (Arc::new(origin), origin::each(shape.len()))
            });
            Core {
                shared,
                ranks,
                shape,
                names,
                origin,
                root_dims,
                coordinate,
                groups,
                reach: Reach::default(),
                lines,
                taken,
                cost,
                cache,
                decisions,
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
            shared: core.shared.clone(),
            ranks: core.ranks.clone(),
            shape: core.shape.clone(),
            names: core.names.clone(),
            cost,
            from: (!self.is_root()).then(|| (core.origin.clone(), core.root_dims.clone())),
            known: core.groups.iter().cloned().map(Some).collect(),
        })
    }

    /// What communication is taken to cost.
    pub fn cost(&self) -> &CostModel {
        &self.0.cost
    }

    /// The number of dims.
    pub fn ndim(&self) -> usize {
        self.0.shape.len()
    }

    /// The size of each dim.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.ranks.len()
    }

    /// The number of ranks along one dim, given by its position or its name.
    pub fn size_of<'a>(&self, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        Ok(self.0.shape[self.dim("size_of", dim)?])
    }

    /// The ranks, row by row.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// The names of the dims, if they have some.
    pub fn names(&self) -> Option<&[Arc<str>]> {
        self.0.names.as_deref()
    }

    /// The names of the dims, to be kept.
    pub(crate) fn shared_names(&self) -> Option<Names> {
        self.0.names.clone()
    }

    /// This rank's number in the world.
    pub fn rank(&self) -> usize {
        self.0.shared.world.rank()
    }

    /// Where in the mesh this rank is, if it is.
    pub fn coordinate(&self) -> Option<&[usize]> {
        self.0.coordinate.as_deref()
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

    /// A dim's name, or its position.
    pub(crate) fn name_of(&self, dim: usize) -> String {
        self.names().map_or_else(|| dim.to_string(), |names| names[dim].to_string())
    }

    /// Whether [`flatten`](DeviceMesh::flatten) gave this name to dims.
    fn knows(&self, name: &str) -> bool {
        self.0.shared.flattened(name).is_some()
    }

    /// The position of a dim.
    fn dim<'a>(&self, op: &'static str, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        dim.into().resolve(op, self)
    }

    pub(crate) fn outside(&self, op: &'static str) -> Error {
        Error::argument(op, format!("rank {} is not in the mesh {self}", self.rank()))
    }

    /// Whether both are handles of one mesh. Equal ones may be two.
    pub(crate) fn is_handle_of(&self, other: &DeviceMesh) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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
        self.0.decisions.lock().stats()
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
        self.0.decisions.lock().restart();
        self.0.cache.lock().clear();
    }
}

fn too_big(world: &World, shape: &Shape) -> Error {
    let message = format!(
        "mesh should not be bigger than default world size: its shape is {shape}, and the world has {}",
        world.size()
    );
    Error::argument("DeviceMesh", message)
}

/// The ranks met by varying some dims, the first slowest, from a coordinate.
fn along(ranks: &[usize], shape: &[usize], coordinate: &[usize], dims: &[usize]) -> Vec<usize> {
    let sizes: MeshDims = dims.iter().map(|&dim| shape[dim]).collect();
    let rank_at = |i: usize| {
        let mut at: MeshDims = coordinate.into();
        dims.iter().zip(unravel(i, &sizes)).for_each(|(&dim, along)| at[dim] = along);
        ranks[at.iter().zip(shape).fold(0, |index, (at, size)| index * size + at)]
    };
    (0..sizes.iter().product()).map(rank_at).collect()
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
