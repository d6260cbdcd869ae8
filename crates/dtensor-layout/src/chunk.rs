//! The chunk rule: which indices of a dim each rank has.

use std::ops::Range;

use smallvec::SmallVec;

/// Indices of a dim: ranges in the order in which a rank has them.
pub type Ranges = SmallVec<[Range<usize>; 1]>;

/// One cut of a tensor's dim by a mesh dim. Those of one tensor dim are in the order in which they are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cut {
    /// The dim of the tensor.
    pub(crate) dim: usize,
    /// The dim of the mesh.
    pub(crate) mesh_dim: usize,
    /// Into how many pieces the dim is cut first, each of which every rank then has its part of.
    pub(crate) split: usize,
}

/// The coordinate of the i-th place of a grid, row by row.
pub fn unravel(mut i: usize, sizes: &[usize]) -> SmallVec<[usize; 4]> {
    let mut at = SmallVec::from_elem(0, sizes.len());
    for (at, &size) in at.iter_mut().zip(sizes).rev() {
        *at = i % size;
        i /= size;
    }
    at
}

/// The part of `len` indices that rank `i` of `n` has: equal parts for the first ranks, less for one, none for the last.
pub(crate) fn chunk(len: usize, n: usize, i: usize) -> Range<usize> {
    let size = len.div_ceil(n);
    (i * size).min(len)..((i + 1) * size).min(len)
}

/// The pieces of `len` indices that are cut into `split`, but for empty ones.
pub(crate) fn pieces(len: usize, split: usize) -> impl Iterator<Item = Range<usize>> {
    let size = len.div_ceil(split).max(1);
    (0..len.div_ceil(size)).map(move |piece| piece * size..((piece + 1) * size).min(len))
}

/// How many indices rank `i` of `n` has of `len` that are first cut into `split` pieces.
pub(crate) fn cut_len(len: usize, split: usize, n: usize, i: usize) -> usize {
    let size = len.div_ceil(split).max(1);
    (len / size) * chunk(size, n, i).len() + chunk(len % size, n, i).len()
}

/// The part of some indices that rank `i` of `n` has when they are first cut into `split` pieces.
pub fn chunk_of_each(ranges: &Ranges, split: usize, n: usize, i: usize) -> Ranges {
    let len = ranges.iter().map(ExactSizeIterator::len).sum();
    if split >= len {
        // Pieces of one index: the first rank has them all.
        return if i == 0 { ranges.clone() } else { Ranges::new() };
    }
    let mut taken = Ranges::new();
    for piece in pieces(len, split) {
        let part = chunk(piece.len(), n, i);
        take(ranges, piece.start + part.start..piece.start + part.end, &mut taken);
    }
    taken
}

/// Appends the indices at these positions.
fn take(ranges: &Ranges, positions: Range<usize>, taken: &mut Ranges) {
    let mut before = 0;
    for range in ranges {
        let within = |position: usize| range.start + position.clamp(before, before + range.len()) - before;
        let part = within(positions.start)..within(positions.end);
        before += range.len();
        match taken.last_mut() {
            _ if part.is_empty() => {}
            Some(last) if last.end == part.start => last.end = part.end,
            _ => taken.push(part),
        }
    }
}

/// The sizes of the parts of `len` indices that are cut once for each of `counts`, one after the other: those of the first
/// rank along the first, for all ranks along the others, come first.
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
    fn first_ranks_are_full_and_last_may_be_empty() {
        let sizes = |len, n| (0..n).map(|i| chunk(len, n, i).len()).collect::<Vec<_>>();
        assert_eq!(sizes(9, 4), [3, 3, 3, 0]);
        assert_eq!(sizes(5, 4), [2, 2, 1, 0]);
        assert_eq!(sizes(10, 4), [3, 3, 3, 1]);
        assert_eq!(sizes(1, 4), [1, 0, 0, 0]);
        assert_eq!(sizes(0, 3), [0, 0, 0]);
        assert_eq!(chunk(5, 4, 3), 5..5);
    }

    #[test]
    fn cutting_twice_is_not_cutting_once_into_as_many() {
        assert_eq!(nested_sizes(6, &[2, 2])[..], [2, 1, 2, 1]);
        assert_eq!(nested_sizes(6, &[4])[..], [2, 2, 2, 0]);
        assert_eq!(nested_sizes(5, &[2, 2])[..], [2, 1, 1, 1]);
        assert_eq!(nested_sizes(7, &[])[..], [7]);
    }

    #[test]
    fn strided_parts_are_one_of_each_piece() {
        let whole: Ranges = SmallVec::from_elem(0..9, 1);
        let part = |i| chunk_of_each(&whole, 2, 4, i).to_vec();
        assert_eq!(part(0), [0..2, 5..6]);
        assert_eq!(part(1), [2..4, 6..7]);
        assert_eq!(part(2), [4..5, 7..8]);
        assert_eq!(part(3), [8..9; 1]);
        // More pieces than indices are as many as there are.
        assert_eq!(cut_len(9, usize::MAX, 4, 0), 9);
        assert_eq!(chunk_of_each(&whole, usize::MAX, 4, 0), whole);
        assert!(chunk_of_each(&whole, 9, 4, 1).is_empty() && cut_len(0, 3, 2, 0) == 0);
        assert!((0..4).all(|i| cut_len(9, 2, 4, i) == part(i).iter().map(Range::len).sum::<usize>()));
        // What is left of two pieces is cut as one.
        assert_eq!(chunk_of_each(&chunk_of_each(&whole, 2, 2, 0), 1, 2, 1).to_vec(), [5..7; 1]);
    }
}
