//! [`Chunk`]: a contiguous block of a tensor and the rank that holds it, for code that writes shards to files or reads them.

use dtensor_array::Shape;
use smallvec::SmallVec;

use crate::chunk::unravel;
use crate::{Error, Mesh, Result, SpecKey};

/// A contiguous block of a tensor that one rank holds.
///
/// ```
/// use dtensor_layout::{Chunk, Mesh, Planner, Replicate, Result, Shard};
/// # fn main() -> Result<()> {
/// let planner = Planner::new(Mesh::new([2, 2], ["dp", "tp"])?);
/// let spec = planner.spec("example", [Replicate, Shard(0)], [3, 5])?;
/// let of_rank = |rank: usize| -> Result<Chunk> { Ok(spec.key.chunks_at(planner.mesh(), rank)?.remove(0)) };
/// let Chunk { offset, shape, .. } = of_rank(3)?;
/// assert_eq!((&offset[..], &shape[..]), (&[2, 0][..], &[1, 5][..]));
/// // Rank 1 holds a copy of the same block.
/// assert!(of_rank(1)?.is_copy_of(&of_rank(3)?));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Chunk {
    /// The rank, by its number in the world.
    pub rank: usize,
    /// The offset of the block in the full tensor.
    pub offset: Vec<usize>,
    /// The offset of the block in the rank's shard.
    pub local_offset: Vec<usize>,
    /// The shape of the block.
    pub shape: Shape,
}

impl Chunk {
    /// Returns true if both are the same block of the full tensor. Only one of them needs to be written to a file.
    pub fn is_copy_of(&self, other: &Chunk) -> bool {
        self.offset == other.offset && self.shape == other.shape
    }
}

impl SpecKey {
    /// Lists the blocks that a rank holds: the rank at `position` in the row-major order of the mesh. Returns an error if a placement
    /// is partial.
    pub fn chunks_at(&self, mesh: &Mesh, position: usize) -> Result<Vec<Chunk>> {
        if self.placements.iter().any(|p| p.is_partial()) {
            let message =
                format!("not supported for a tensor with partial placements, {self}: reduce it first");
            return Err(Error::argument("chunks", message));
        }
        let ranges = self.ranges_at(mesh.shape(), &unravel(position, mesh.shape()));
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
    use crate::{Placement, Planner, Replicate, Shard, StridedShard};

    /// Every element is in one chunk of each rank that holds it, at its position in the rank's shard.
    #[test]
    fn chunks_cover_every_shard() -> Result<()> {
        let mesh = Mesh::from_ranks(0, 6, Some(&[5, 4, 3, 2, 1, 0]), [2, 3], ["a", "b"])?;
        let planner = Planner::new(mesh.clone());
        let each: [Placement; 5] = [
            Replicate,
            Shard(0),
            Shard(1),
            StridedShard { dim: 0, split_factor: 3 },
            StridedShard { dim: 1, split_factor: 2 },
        ];
        for shape in [[6, 6], [5, 7], [1, 4], [0, 3]] {
            for placements in each.iter().flat_map(|&a| each.map(|b| [a, b])) {
                let layout = &planner.spec("test", placements, shape)?.key;
                let copies: usize =
                    placements.iter().zip([2, 3]).map(|(p, n)| if *p == Replicate { n } else { 1 }).product();
                let mut seen = vec![0; shape[0] * shape[1]];
                let chunks = (0..6).map(|at| layout.chunks_at(&mesh, at)).collect::<Result<Vec<_>>>()?;
                for chunk in chunks.into_iter().flatten() {
                    let at = mesh.ranks().iter().position(|&rank| rank == chunk.rank).expect("in the mesh");
                    let ranges = layout.ranges_at(mesh.shape(), &unravel(at, mesh.shape()));
                    let index = |dim: usize, local: usize| {
                        ranges[dim].iter().cloned().flatten().nth(local).expect("inside the shard")
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
        let partial = planner.spec("test", [Placement::PARTIAL, Shard(0)], [6, 6])?;
        assert!(partial.key.chunks_at(&mesh, 0).unwrap_err().to_string().contains("partial placements"));
        let scalar = planner.spec("test", (), Shape::scalar())?;
        assert_eq!(scalar.key.chunks_at(&mesh, 1)?[0].rank, 4);
        Ok(())
    }
}
