//! Who has what of a tensor, as a list: what somebody needs who writes the parts of a tensor to files, or reads them.

use smallvec::SmallVec;

use super::{Layout, unravel};
use crate::tensor::Shape;
use crate::{Error, Result};

/// A block of a tensor that a rank has, as [`Layout::chunks`] lists them.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{Chunk, DeviceMesh, Layout, Replicate, Shard};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
/// let layout = Layout::new(&mesh, [Replicate, Shard(0)], [3, 5])?;
/// let of_rank = |rank: usize| -> dtensor::Result<Chunk> { Ok(layout.chunks_of(rank)?.remove(0)) };
/// let Chunk { offset, shape, .. } = of_rank(3)?;
/// assert_eq!((&offset[..], &shape[..]), (&[2, 0][..], &[1, 5][..]));
/// // Rank 1 has the same.
/// assert!(of_rank(1)?.is_copy_of(&of_rank(3)?));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Chunk {
    /// The rank, by its number in the world.
    pub rank: usize,
    /// Where in the whole the block begins.
    pub offset: Vec<usize>,
    /// Where in the rank's part it begins.
    pub local_offset: Vec<usize>,
    /// Its shape.
    pub shape: Shape,
}

impl Chunk {
    /// Whether both are the same block of the whole. Only one of such needs to be written.
    pub fn is_copy_of(&self, other: &Chunk) -> bool {
        self.offset == other.offset && self.shape == other.shape
    }
}

impl Layout {
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
        for position in 0..self.mesh().size() {
            all.extend(self.chunks_at(position)?);
        }
        Ok(all)
    }

    /// The blocks that a rank of the mesh has, given by its number in the world.
    pub fn chunks_of(&self, rank: usize) -> Result<Vec<Chunk>> {
        let position = self.mesh().ranks().iter().position(|&known| known == rank);
        let position = position.ok_or_else(|| {
            Error::argument("chunks", format!("rank {rank} is not in the mesh {}", self.mesh()))
        })?;
        self.chunks_at(position)
    }

    /// The blocks of the rank at a position of the mesh.
    fn chunks_at(&self, position: usize) -> Result<Vec<Chunk>> {
        if self.placements().iter().any(|p| p.is_partial()) {
            let message =
                format!("not supported for a tensor with partial placements, {self}: reduce it first");
            return Err(Error::argument("chunks", message));
        }
        let (mesh, ranges) = (self.mesh(), self.ranges_at(&unravel(position, self.mesh().shape())));
        let counts: SmallVec<[usize; 4]> = ranges.iter().map(|ranges| ranges.len()).collect();
        let block = |i: usize| {
            let mut chunk = Chunk {
                rank: mesh.ranks()[position],
                offset: Vec::new(),
                local_offset: Vec::new(),
                shape: Shape::scalar(),
            };
            let mut sizes: SmallVec<[usize; 4]> = SmallVec::new();
            for (ranges, &at) in ranges.iter().zip(&unravel(i, &counts)) {
                chunk.offset.push(ranges[at].start);
                chunk.local_offset.push(ranges[..at].iter().map(ExactSizeIterator::len).sum());
                sizes.push(ranges[at].len());
            }
            chunk.shape = Shape::from(&sizes[..]);
            chunk
        };
        Ok((0..counts.iter().product()).map(block).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::World;
    use crate::{DeviceMesh, Placement, Replicate, Shard, StridedShard};

    /// Every element is in a chunk of as many ranks as have a copy of it, at the place where the rank has it.
    #[test]
    fn chunks_are_what_ranks_have() -> Result<()> {
        let mesh = DeviceMesh::from_ranks(&World::simulated(6, 0)?, &[5, 4, 3, 2, 1, 0], [2, 3], ["a", "b"])?;
        let each: [Placement; 5] = [
            Replicate,
            Shard(0),
            Shard(1),
            StridedShard { dim: 0, split_factor: 3 },
            StridedShard { dim: 1, split_factor: 2 },
        ];
        for shape in [[6, 6], [5, 7], [1, 4], [0, 3]] {
            for placements in each.iter().flat_map(|&a| each.map(|b| [a, b])) {
                let layout = Layout::new(&mesh, placements, shape)?;
                let copies: usize =
                    placements.iter().zip([2, 3]).map(|(p, n)| if *p == Replicate { n } else { 1 }).product();
                let mut seen = vec![0; shape[0] * shape[1]];
                for chunk in layout.chunks()? {
                    let at = mesh.ranks().iter().position(|&rank| rank == chunk.rank).expect("in the mesh");
                    let ranges = layout.ranges_at(&unravel(at, mesh.shape()));
                    let index = |dim: usize, local: usize| {
                        ranges[dim].iter().cloned().flatten().nth(local).expect("inside the part")
                    };
                    for (i, j) in (0..chunk.shape[0]).flat_map(|i| (0..chunk.shape[1]).map(move |j| (i, j))) {
                        let (row, column) = (chunk.offset[0] + i, chunk.offset[1] + j);
                        assert_eq!(row, index(0, chunk.local_offset[0] + i), "{layout}");
                        assert_eq!(column, index(1, chunk.local_offset[1] + j), "{layout}");
                        seen[row * shape[1] + column] += 1;
                    }
                }
                assert!(seen.iter().all(|&n| n == copies), "{layout}: {seen:?}");
            }
        }
        let partial = Layout::new(&mesh, [Placement::PARTIAL, Shard(0)], [6, 6])?;
        assert!(partial.chunks().unwrap_err().to_string().contains("partial placements"));
        let scalar = Layout::new(&mesh, (), Shape::scalar())?;
        assert_eq!((scalar.chunks()?.len(), scalar.chunks_of(4)?[0].rank), (6, 4));
        assert!(scalar.chunks_of(6).unwrap_err().to_string().contains("rank 6 is not in the mesh"));
        Ok(())
    }
}
