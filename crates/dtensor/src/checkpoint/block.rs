//! [`Block`]: a block of a tensor that a rank holds, and where its elements are in a file.

use serde::{Deserialize, Serialize};

use crate::{Chunk, Layout, Result, Tensor};

/// A block of a full tensor: its offset and its shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Block {
    pub(super) offset: Vec<usize>,
    pub(super) shape: Vec<usize>,
}

/// A block that this rank holds.
#[derive(Clone, Debug)]
pub(super) struct LocalBlock {
    pub(super) block: Block,
    /// The offset in the local tensor.
    pub(super) local_offset: Vec<usize>,
}

/// A run of elements that are consecutive both in the full tensor and in the local one.
pub(super) struct Run {
    /// The position of the first element in the full tensor, and in the local one.
    pub(super) full: usize,
    pub(super) local: usize,
    pub(super) len: usize,
}

impl Block {
    pub(super) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if the blocks share an element.
    pub(super) fn overlaps(&self, other: &Block) -> bool {
        let ends = |block: &Block, dim: usize| block.offset[dim] + block.shape[dim];
        (0..self.shape.len())
            .all(|dim| self.offset[dim] < ends(other, dim) && other.offset[dim] < ends(self, dim))
            && self.numel() > 0
            && other.numel() > 0
    }
}

impl LocalBlock {
    /// Lists the blocks of a tensor that this rank holds. Returns an error if a placement is partial.
    pub(super) fn of(tensor: &Tensor) -> Result<Vec<LocalBlock>> {
        match tensor.layout() {
            Some(layout) => LocalBlock::of_layout(layout),
            None => Ok(LocalBlock::full(tensor.dims())),
        }
    }

    /// Lists the blocks of a layout that this rank holds.
    pub(super) fn of_layout(layout: &Layout) -> Result<Vec<LocalBlock>> {
        let mesh = layout.mesh();
        if mesh.coordinate().is_none() {
            return Ok(Vec::new());
        }
        let block = |chunk: Chunk| LocalBlock {
            block: Block { offset: chunk.offset, shape: chunk.shape.to_vec() },
            local_offset: chunk.local_offset,
        };
        Ok(layout.chunks_of(mesh.rank())?.into_iter().map(block).collect())
    }

    /// Returns the one block of a tensor that is not distributed.
    pub(super) fn full(shape: &[usize]) -> Vec<LocalBlock> {
        let offset = vec![0; shape.len()];
        vec![LocalBlock { local_offset: offset.clone(), block: Block { offset, shape: shape.to_vec() } }]
    }

    /// Calls `each` with the longest runs of the block, in the order of the full tensor.
    pub(super) fn for_each_run<E>(
        &self,
        full: &[usize],
        local: &[usize],
        mut each: impl FnMut(Run) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let Block { offset, shape } = &self.block;
        if self.block.numel() == 0 {
            return Ok(());
        }
        // The dims after `inner` are complete in both tensors, so a run continues across them.
        let mut inner = shape.len().saturating_sub(1);
        while inner > 0 && shape[inner] == full[inner] && shape[inner] == local[inner] {
            inner -= 1;
        }
        let (outer, run) = (shape.get(..inner).unwrap_or(&[]), shape.iter().skip(inner).product());
        let position =
            |sizes: &[usize], at: &[usize]| sizes.iter().zip(at).fold(0, |n, (size, at)| n * size + at);
        for i in 0..outer.iter().product() {
            let mut at = vec![0; shape.len()];
            let mut rest = i;
            for (at, size) in at[..inner].iter_mut().zip(outer).rev() {
                (*at, rest) = (rest % size, rest / size);
            }
            let shifted = |by: &[usize]| at.iter().zip(by).map(|(at, by)| at + by).collect::<Vec<_>>();
            each(Run {
                full: position(full, &shifted(offset)),
                local: position(local, &shifted(&self.local_offset)),
                len: run,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::World;
    use crate::{DType, DeviceMesh, Placement, Replicate, Shard, StridedShard, sharded};

    /// The runs of all ranks copy a tensor from its shards, element by element, and are as long as they can be.
    #[test]
    fn runs_cover_every_element() -> Result<()> {
        let strided = StridedShard { dim: 0, split_factor: 2 };
        let cases: [([Placement; 2], [usize; 3], usize); 8] = [
            ([Shard(0), Shard(0)], [5, 3, 2], 4),
            ([Shard(0), Shard(1)], [4, 6, 2], 8),
            ([Shard(2), Replicate], [3, 2, 5], 24),
            ([Shard(1), Shard(2)], [2, 3, 4], 12),
            ([strided, Replicate], [8, 2, 3], 8),
            ([Shard(0), Shard(0)], [1, 3, 2], 1),
            ([Shard(0), Shard(1)], [0, 3, 2], 0),
            ([Replicate, Replicate], [2, 3, 2], 4),
        ];
        for (placements, shape, runs) in cases {
            let numel = shape.iter().product::<usize>();
            let (mut seen, mut count) = (vec![0; numel], 0);
            for rank in 0..4 {
                let mesh = DeviceMesh::new(&World::simulated(4, rank)?, [2, 2], ())?;
                let x = sharded::zeros(shape, DType::F32, &mesh, placements)?;
                let local = x.to_local()?.dims().to_vec();
                let mut elements = 0;
                for block in LocalBlock::of(&x)? {
                    block.for_each_run(&shape, &local, |run| {
                        assert!(run.local + run.len <= local.iter().product());
                        seen[run.full..run.full + run.len].iter_mut().for_each(|n| *n += 1);
                        (elements, count) = (elements + run.len, count + 1);
                        Result::Ok(())
                    })?;
                }
                assert_eq!(elements, local.iter().product::<usize>());
            }
            let copies: usize = placements.iter().map(|p| if *p == Replicate { 2 } else { 1 }).product();
            assert!(seen.iter().all(|&n| n == copies), "{placements:?} {shape:?}: {seen:?}");
            assert_eq!(count, runs, "{placements:?} {shape:?}");
        }
        Ok(())
    }
}
