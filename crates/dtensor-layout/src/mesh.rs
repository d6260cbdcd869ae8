//! [`Mesh`]: ranks in a grid with named dims. It holds the topology only; it cannot communicate.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use dtensor_array::Shape;
use smallvec::SmallVec;

use crate::chunk::unravel;
use crate::{CostModel, Error, MeshDim, MeshNames, Result};

/// The maximum number of mesh dims.
pub const MAX_DIMS: usize = 8;

/// The names of all dims of a mesh.
pub type Names = Arc<[Arc<str>]>;

/// A list of mesh dims, or one number for each of them.
pub type MeshDims = SmallVec<[usize; 4]>;

const OP: &str = "DeviceMesh";

/// A grid of ranks with named dims, as one rank sees it. Cheap to clone.
///
/// ```
/// use dtensor_layout::Mesh;
/// # fn main() -> dtensor_layout::Result<()> {
/// let mesh = Mesh::new([2, 4], ["dp", "tp"])?.seen_from(6);
/// assert_eq!(mesh.coordinate(), Some(&[1, 2][..]));
/// assert_eq!(mesh.line(&[1]), [4, 5, 6, 7]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Mesh(Arc<Grid>);

#[derive(Clone)]
struct Grid {
    /// The ranks in row-major order.
    ranks: Vec<usize>,
    shape: MeshDims,
    names: Option<Names>,
    /// This rank.
    rank: usize,
    /// This rank's coordinate, or `None` if it is not in the mesh.
    coordinate: Option<MeshDims>,
    cost: CostModel,
}

impl Mesh {
    /// Creates a mesh of ranks `0..n`, as rank 0 sees it. `n` is the product of the sizes in `shape`.
    #[inline]
    pub fn new(shape: impl Into<Shape>, names: impl Into<MeshNames>) -> Result<Mesh> {
        let shape = shape.into();
        let count = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)).unwrap_or(usize::MAX);
        Mesh::from_ranks(0, count, None, shape, names)
    }

    /// Creates a mesh of the given ranks of a world, in row-major order, as `rank` sees it. `None` stands for the first ranks of
    /// the world.
    ///
    /// Returns an error if the shape is empty, has a size of 0 or more than [`MAX_DIMS`] dims, if the ranks do not fit the shape
    /// or the world, or if a rank occurs twice.
    pub fn from_ranks(
        rank: usize,
        world_size: usize,
        ranks: Option<&[usize]>,
        shape: impl Into<Shape>,
        names: impl Into<MeshNames>,
    ) -> Result<Mesh> {
        let shape = shape.into();
        if shape.is_empty() || shape.len() > MAX_DIMS || shape.contains(&0) {
            let message =
                format!("a mesh has between 1 and {MAX_DIMS} dims, none of size 0, but the shape is {shape}");
            return Err(Error::argument(OP, message));
        }
        let count = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)).unwrap_or(usize::MAX);
        if ranks.map_or(count, <[usize]>::len) > world_size {
            let message = format!(
                "mesh should not be bigger than default world size: its shape is {shape}, and the world has {world_size}"
            );
            return Err(Error::argument(OP, message));
        }
        let ranks = ranks.map_or_else(|| (0..count).collect(), <[usize]>::to_vec);
        if count != ranks.len() {
            let message = format!("a mesh of shape {shape} does not have {} ranks", ranks.len());
            return Err(Error::argument(OP, message));
        }
        let mut seen = vec![false; world_size];
        for &rank in &ranks {
            let message = match seen.get_mut(rank).map(|seen| std::mem::replace(seen, true)) {
                None => format!("rank {rank} is not in the world, which has {world_size}"),
                Some(true) => format!("duplicate ranks: rank {rank} is there twice"),
                Some(false) => continue,
            };
            return Err(Error::argument(OP, message));
        }
        let names = names.into().checked(OP, shape.len())?;
        Ok(Mesh::of(ranks, shape[..].into(), names, rank, CostModel::default()))
    }

    #[inline]
    fn of(ranks: Vec<usize>, shape: MeshDims, names: Option<Names>, rank: usize, cost: CostModel) -> Mesh {
        let coordinate = ranks.iter().position(|&r| r == rank).map(|at| unravel(at, &shape));
        Mesh(Arc::new(Grid { ranks, shape, names, rank, coordinate, cost }))
    }

    /// Returns the same mesh as another rank sees it.
    #[inline]
    pub fn seen_from(&self, rank: usize) -> Mesh {
        let Grid { ranks, shape, names, cost, .. } = Grid::clone(&self.0);
        Mesh::of(ranks, shape, names, rank, cost)
    }

    /// Returns the same mesh with another cost model.
    #[inline]
    pub fn with_cost(&self, cost: CostModel) -> Mesh {
        Mesh(Arc::new(Grid { cost, ..Grid::clone(&self.0) }))
    }

    /// Returns the submesh that contains this rank and has one dim for each list in `dims`: the mesh dims of that list, flattened
    /// into one. Along all other mesh dims, this rank's coordinate is fixed.
    #[inline]
    pub fn take(&self, dims: &[MeshDims], names: Option<Names>) -> Mesh {
        let Grid { shape, rank, cost, .. } = &*self.0;
        let all: MeshDims = dims.iter().flatten().copied().collect();
        let sizes = dims.iter().map(|dims| dims.iter().map(|&dim| shape[dim]).product()).collect();
        Mesh::of(self.line(&all), sizes, names, *rank, cost.submesh(dims))
    }

    /// Returns the mesh with one dim split into several dims of the given sizes.
    #[inline]
    pub fn unflatten(&self, dim: usize, sizes: &[usize], names: Option<Names>) -> Mesh {
        let Grid { ranks, shape, rank, cost, .. } = &*self.0;
        let mut shape = shape.clone();
        shape.remove(dim);
        shape.insert_many(dim, sizes.iter().copied());
        Mesh::of(ranks.clone(), shape, names, *rank, cost.unflatten(dim, sizes.len()))
    }

    /// Returns the ranks along the given dims, in row-major order. Along the other dims they share this rank's coordinates, or
    /// coordinate 0 if this rank is not in the mesh.
    pub fn line(&self, dims: &[usize]) -> Vec<usize> {
        let Grid { ranks, shape, coordinate, .. } = &*self.0;
        let from = coordinate.clone().unwrap_or_else(|| SmallVec::from_elem(0, shape.len()));
        let sizes: MeshDims = dims.iter().map(|&dim| shape[dim]).collect();
        let rank_at = |i: usize| {
            let mut at = from.clone();
            dims.iter().zip(unravel(i, &sizes)).for_each(|(&dim, along)| at[dim] = along);
            ranks[at.iter().zip(shape).fold(0, |index, (at, size)| index * size + at)]
        };
        (0..sizes.iter().product()).map(rank_at).collect()
    }

    /// Returns the cost model that the planner uses.
    #[inline]
    pub fn cost(&self) -> &CostModel {
        &self.0.cost
    }

    /// Returns the number of dims.
    #[inline]
    pub fn ndim(&self) -> usize {
        self.0.shape.len()
    }

    /// Returns the size of each dim.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Returns the number of ranks.
    #[inline]
    pub fn size(&self) -> usize {
        self.0.ranks.len()
    }

    /// Returns the ranks, by their numbers in the world, in row-major order.
    #[inline]
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// Returns the names of the dims, if they have any.
    #[inline]
    pub fn names(&self) -> Option<&Names> {
        self.0.names.as_ref()
    }

    /// Returns this rank, by its number in the world.
    #[inline]
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns this rank's coordinate along each dim, or `None` if it is not in the mesh.
    #[inline]
    pub fn coordinate(&self) -> Option<&[usize]> {
        self.0.coordinate.as_deref()
    }

    /// Returns the name of a dim, or its number if the dims have no names.
    #[inline]
    pub fn name_of(&self, dim: usize) -> String {
        self.names().map_or_else(|| dim.to_string(), |names| names[dim].to_string())
    }

    /// Returns the number of the dim that `dim` names. Returns an error, which names `op`, if there is no such dim.
    #[inline]
    pub fn dim<'a>(&self, op: &'static str, dim: impl Into<MeshDim<'a>>) -> Result<usize> {
        dim.into().resolve(op, self)
    }
}

impl PartialEq for Mesh {
    /// Compares ranks, shape, names and this rank. Ignores the cost model.
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.0, &*other.0);
        Arc::ptr_eq(&self.0, &other.0)
            || (a.ranks == b.ranks && a.shape == b.shape && a.names == b.names && a.rank == b.rank)
    }
}

impl Eq for Mesh {}

impl Hash for Mesh {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.0.ranks, &self.0.shape, &self.0.names).hash(state);
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims = self.shape().iter().enumerate().map(|(dim, size)| match self.names() {
            Some(names) => format!("{}={size}", names[dim]),
            None => size.to_string(),
        });
        write!(f, "DeviceMesh(({}), 'cpu', ranks=", dims.collect::<Vec<_>>().join(", "))?;
        match (self.ranks(), self.ranks().first()) {
            (ranks, Some(&first)) if ranks.iter().enumerate().all(|(i, &rank)| rank == first + i) => {
                write!(f, "{first}..{})", first + ranks.len())
            }
            (ranks, _) => write!(f, "{ranks:?})"),
        }
    }
}

impl fmt::Debug for Mesh {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
