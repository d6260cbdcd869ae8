//! [`Placement`]: how a tensor is distributed along one mesh dim.
//!
//! A mesh of `n` dims takes `n` placements, one per mesh dim, applied from left to right: the first to the full tensor, the second
//! to the shard that the first leaves on a rank, and so on.

use std::fmt;
use std::hash::{Hash, Hasher};

use smallvec::SmallVec;

use dtensor_array::ReduceOp;

pub(crate) use Placement::{Partial, Replicate, Shard, StridedShard};

use crate::{Error, Result};

/// How a tensor is distributed over the ranks along one mesh dim: sharded, replicated or partial.
///
/// ```
/// use dtensor_array::ReduceOp;
/// use dtensor_layout::{Partial, Replicate, Shard};
/// assert_eq!(format!("{} {} {}", Shard(0), Replicate, Partial(ReduceOp::Sum)), "S(0) R P(sum)");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank holds the full tensor.
    Replicate,
    /// Every rank holds a shard along one tensor dim. A negative dim counts from the back.
    ///
    /// For a dim of size `len` and `n` ranks, rank `i` holds the indices from `i * c` up to, but not including, `(i + 1) * c`,
    /// where `c` is `len / n` rounded up. So the first ranks have shards of equal size, one may have a smaller shard, and the
    /// last ones may have empty shards.
    Shard(isize),
    /// Every rank holds a value of full size. The reduction of all these values is the tensor.
    Partial(ReduceOp),
    /// Same as [`Shard`], but the dim is first split into `split_factor` pieces. Each rank holds its shard of every piece, one
    /// after the other. This describes a dim that a mesh dim further right sharded first and this mesh dim sharded again.
    StridedShard {
        /// The tensor dim.
        dim: isize,
        /// The number of pieces.
        split_factor: usize,
    },
}

impl Placement {
    /// A partial sum: [`Partial`] with [`ReduceOp::Sum`].
    pub const PARTIAL: Placement = Partial(ReduceOp::Sum);

    /// Returns true for [`Shard`] of any dim, but not for [`StridedShard`].
    #[inline]
    pub fn is_shard(self) -> bool {
        matches!(self, Shard(_))
    }

    /// Returns true for [`Replicate`].
    #[inline]
    pub fn is_replicate(self) -> bool {
        self == Replicate
    }

    /// Returns true for [`Partial`] with any reduction.
    #[inline]
    pub fn is_partial(self) -> bool {
        matches!(self, Partial(_))
    }

    /// Returns the tensor dim that is sharded, if any. In a [`Spec`](crate::Spec) it is never negative.
    #[inline]
    pub fn dim(self) -> Option<isize> {
        match self {
            Shard(dim) | StridedShard { dim, .. } => Some(dim),
            Replicate | Partial(_) => None,
        }
    }

    /// Returns the tensor dim that is sharded, and its split factor (1 for [`Shard`]). The dim must not be negative, as in a
    /// [`Spec`](crate::Spec).
    #[inline]
    pub fn sharded_dim(self) -> Option<(usize, usize)> {
        match self {
            Shard(dim) => Some((dim as usize, 1)),
            StridedShard { dim, split_factor } => Some((dim as usize, split_factor)),
            Replicate | Partial(_) => None,
        }
    }

    /// Returns the placement with its dim counted from the front. Returns an error if the dim is out of range.
    fn checked(self, op: &'static str, rank: usize) -> Result<Placement> {
        let Some(dim) = self.dim() else { return Ok(self) };
        let from_front = if dim < 0 { dim + rank as isize } else { dim };
        if from_front < 0 {
            let message = format!("sharding dim {dim} is less than -{rank}, the negative of the tensor ndim");
            return Err(Error::argument(op, message));
        }
        if from_front >= rank as isize {
            let message = format!("sharding dim {dim} is equal to or greater than tensor ndim {rank}");
            return Err(Error::argument(op, message));
        }
        Ok(match self {
            StridedShard { split_factor: 0, .. } => {
                return Err(Error::argument(op, "the split factor of a strided shard must not be 0"));
            }
            StridedShard { split_factor, .. } => StridedShard { dim: from_front, split_factor },
            _ => Shard(from_front),
        })
    }
}

impl Hash for Placement {
    /// Hashes a single word, because every lookup of a spec hashes placements.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(match *self {
            Replicate => 0,
            Partial(op) => 1 | (op as u64) << 2,
            Shard(dim) => 2 | (dim as u64) << 2,
            StridedShard { dim, split_factor } => 3 | (dim as u64) << 2 | (split_factor as u64) << 16,
        });
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Replicate => f.write_str("R"),
            Shard(dim) => write!(f, "S({dim})"),
            Partial(op) => write!(f, "P({op})"),
            StridedShard { dim, split_factor } => write!(f, "_S({dim}, {split_factor})"),
        }
    }
}

/// One placement per mesh dim.
pub type PlacementList = SmallVec<[Placement; 4]>;

/// An argument of one placement per mesh dim, or `()` for [`Replicate`] on all. Arrays, vectors and slices of placements, and a
/// single placement, convert to it.
///
/// ```
/// use dtensor_layout::{Placements, Replicate, Shard};
/// for _placements in [Placements::from([Shard(0), Replicate]), vec![Shard(-1)].into(), Shard(1).into(), ().into()] {}
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placements(Option<PlacementList>);

impl Placements {
    /// Checks the placements for a mesh and a tensor with these numbers of dims, and returns them with all dims counted from the
    /// front. Returns an error if their number is wrong, a tensor dim is out of range, or their reductions cannot be mixed.
    pub fn checked(self, op: &'static str, mesh_dims: usize, rank: usize) -> Result<PlacementList> {
        self.check_len(op, mesh_dims)?;
        let Some(mut list) = self.0 else { return Ok(SmallVec::from_elem(Replicate, mesh_dims)) };
        for placement in &mut list {
            *placement = placement.checked(op, rank)?;
        }
        if let Some((first, other)) = incompatible_partials(&list) {
            let message = format!(
                "mixed Partial reduce types are not supported: {} and {} in {}",
                Partial(first),
                Partial(other),
                format_list(&list)
            );
            return Err(Error::argument(op, message));
        }
        Ok(list)
    }

    /// Returns an error if there is not one placement for each of `mesh_dims` mesh dims. This needs no tensor.
    pub fn check_len(&self, op: &'static str, mesh_dims: usize) -> Result<()> {
        match &self.0 {
            Some(list) if list.len() != mesh_dims => {
                let message = format!(
                    "`placements` must have the same length as `device_mesh.ndim`: {} has {} for a mesh of {mesh_dims} dims",
                    format_list(list),
                    list.len(),
                );
                Err(Error::argument(op, message))
            }
            _ => Ok(()),
        }
    }

    /// Returns true if one of them shards a dim.
    #[inline]
    pub fn cut(&self) -> bool {
        self.0.iter().flatten().any(|placement| placement.dim().is_some())
    }
}

impl fmt::Display for Placements {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(list) => f.write_str(&format_list(list)),
            None => f.write_str("R everywhere"),
        }
    }
}

/// Formats placements as a list: `[S(0), R]`.
#[inline]
pub fn format_list(placements: &[Placement]) -> String {
    let list: Vec<String> = placements.iter().map(Placement::to_string).collect();
    format!("[{}]", list.join(", "))
}

/// Formats placements in short form: `S(0)R`.
#[inline]
pub fn format_short(placements: &[Placement]) -> String {
    placements.iter().map(Placement::to_string).collect()
}

/// Returns two reductions of partial placements that cannot be mixed, if there are any.
#[inline]
pub(crate) fn incompatible_partials(placements: &[Placement]) -> Option<(ReduceOp, ReduceOp)> {
    let mut partials = placements.iter().filter_map(|p| if let Partial(op) = p { Some(*op) } else { None });
    let first = partials.next()?;
    partials.find(|&other| !first.commutes_with(other)).map(|other| (first, other))
}

impl<const N: usize> From<[Placement; N]> for Placements {
    #[inline]
    fn from(list: [Placement; N]) -> Self {
        Placements(Some(list.into_iter().collect()))
    }
}

impl<const N: usize> From<&[Placement; N]> for Placements {
    #[inline]
    fn from(list: &[Placement; N]) -> Self {
        Placements(Some(list.iter().copied().collect()))
    }
}

impl From<&[Placement]> for Placements {
    #[inline]
    fn from(list: &[Placement]) -> Self {
        Placements(Some(list.into()))
    }
}

impl From<Vec<Placement>> for Placements {
    #[inline]
    fn from(list: Vec<Placement>) -> Self {
        Placements(Some(list.into()))
    }
}

impl From<Placement> for Placements {
    #[inline]
    fn from(only: Placement) -> Self {
        Placements(Some(SmallVec::from_elem(only, 1)))
    }
}

impl From<()> for Placements {
    #[inline]
    fn from((): ()) -> Self {
        Placements(None)
    }
}
