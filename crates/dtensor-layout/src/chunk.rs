//! The chunk rule: which indices of a sharded dim each rank holds.

use std::ops::Range;

use smallvec::SmallVec;

/// Indices of a dim, as ranges in the order in which a rank stores them.
pub type Ranges = SmallVec<[Range<usize>; 1]>;

/// The sharding of one tensor dim along one mesh dim. Lists hold the shardings of a tensor dim in the order in which they apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sharding {
    /// The tensor dim.
    pub(crate) dim: usize,
    /// The mesh dim.
    pub(crate) mesh_dim: usize,
    /// The split factor: the dim is first split into so many pieces, and every rank holds its shard of each piece.
    pub(crate) split: usize,
}

/// Returns the coordinate of the i-th position of a grid, in row-major order.
pub fn unravel(mut i: usize, sizes: &[usize]) -> SmallVec<[usize; 4]> {
    let mut at = SmallVec::from_elem(0, sizes.len());
    for (at, &size) in at.iter_mut().zip(sizes).rev() {
        *at = i % size;
        i /= size;
    }
    at
}

/// Returns the indices, of `len`, that rank `i` of `n` holds. The first ranks hold equally many, one may hold fewer, and the last
/// ones may hold none.
pub(crate) fn chunk(len: usize, n: usize, i: usize) -> Range<usize> {
    let size = len.div_ceil(n);
    (i * size).min(len)..((i + 1) * size).min(len)
}

/// Splits `len` indices into `split` pieces and returns the pieces that are not empty.
pub(crate) fn pieces(len: usize, split: usize) -> impl Iterator<Item = Range<usize>> {
    let size = len.div_ceil(split).max(1);
    (0..len.div_ceil(size)).map(move |piece| piece * size..((piece + 1) * size).min(len))
}

/// Returns how many of `len` indices rank `i` of `n` holds if they are first split into `split` pieces.
pub(crate) fn shard_len(len: usize, split: usize, n: usize, i: usize) -> usize {
    let size = len.div_ceil(split).max(1);
    (len / size) * chunk(size, n, i).len() + chunk(len % size, n, i).len()
}

/// Returns which of the given indices rank `i` of `n` holds if they are first split into `split` pieces.
pub fn chunk_of_each(ranges: &Ranges, split: usize, n: usize, i: usize) -> Ranges {
    let len = ranges.iter().map(ExactSizeIterator::len).sum();
    if split >= len {
        // Every piece has one index, which the first rank holds.
        return if i == 0 { ranges.clone() } else { Ranges::new() };
    }
    let mut held = Ranges::new();
    for piece in pieces(len, split) {
        let part = chunk(piece.len(), n, i);
        append(ranges, piece.start + part.start..piece.start + part.end, &mut held);
    }
    held
}

/// Appends the indices of `ranges` at the given positions to `held`.
fn append(ranges: &Ranges, positions: Range<usize>, held: &mut Ranges) {
    let mut before = 0;
    for range in ranges {
        let within = |position: usize| range.start + position.clamp(before, before + range.len()) - before;
        let part = within(positions.start)..within(positions.end);
        before += range.len();
        match held.last_mut() {
            _ if part.is_empty() => {}
            Some(last) if last.end == part.start => last.end = part.end,
            _ => held.push(part),
        }
    }
}

/// Returns the sizes of all shards of `len` indices that are sharded over `counts[0]` ranks, each shard over `counts[1]` ranks, and
/// so on. The sizes are in row-major order of the ranks.
pub(crate) fn nested_sizes(len: usize, counts: &[usize]) -> SmallVec<[usize; 4]> {
    let mut sizes = SmallVec::from_elem(len, 1);
    for &n in counts {
        sizes = sizes.iter().flat_map(|&len| (0..n).map(move |i| chunk(len, n, i).len())).collect();
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_chunks_are_equal_and_last_may_be_empty() {
        let sizes = |len, n| (0..n).map(|i| chunk(len, n, i).len()).collect::<Vec<_>>();
        assert_eq!(sizes(9, 4), [3, 3, 3, 0]);
        assert_eq!(sizes(5, 4), [2, 2, 1, 0]);
        assert_eq!(sizes(10, 4), [3, 3, 3, 1]);
        assert_eq!(sizes(1, 4), [1, 0, 0, 0]);
        assert_eq!(sizes(0, 3), [0, 0, 0]);
        assert_eq!(chunk(5, 4, 3), 5..5);
    }

    #[test]
    fn sharding_twice_differs_from_sharding_once_over_as_many_ranks() {
        assert_eq!(nested_sizes(6, &[2, 2])[..], [2, 1, 2, 1]);
        assert_eq!(nested_sizes(6, &[4])[..], [2, 2, 2, 0]);
        assert_eq!(nested_sizes(5, &[2, 2])[..], [2, 1, 1, 1]);
        assert_eq!(nested_sizes(7, &[])[..], [7]);
    }

    #[test]
    fn a_strided_shard_has_a_chunk_of_each_piece() {
        let full: Ranges = SmallVec::from_elem(0..9, 1);
        let shard = |i| chunk_of_each(&full, 2, 4, i).to_vec();
        assert_eq!(shard(0), [0..2, 5..6]);
        assert_eq!(shard(1), [2..4, 6..7]);
        assert_eq!(shard(2), [4..5, 7..8]);
        assert_eq!(shard(3), [8..9; 1]);
        // With more pieces than indices, every piece has one index.
        assert_eq!(shard_len(9, usize::MAX, 4, 0), 9);
        assert_eq!(chunk_of_each(&full, usize::MAX, 4, 0), full);
        assert!(chunk_of_each(&full, 9, 4, 1).is_empty() && shard_len(0, 3, 2, 0) == 0);
        assert!((0..4).all(|i| shard_len(9, 2, 4, i) == shard(i).iter().map(Range::len).sum::<usize>()));
        // A second sharding applies to the concatenated chunks.
        assert_eq!(chunk_of_each(&chunk_of_each(&full, 2, 2, 0), 1, 2, 1).to_vec(), [5..7; 1]);
    }
}
