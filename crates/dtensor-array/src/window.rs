//! [`Window`]: which elements of a full array a shard holds.

use std::ops::Range;

use smallvec::SmallVec;

use crate::Shape;
use crate::{Error, Result};

type Ranges = SmallVec<[Range<usize>; 1]>;

/// The elements of a full array that a shard holds: for each dim, a list of index ranges.
///
/// Kernels that compute values from element indices, such as random numbers, take a window. The shard they return is
/// bit-identical to the same elements of the full array.
///
/// ```
/// use dtensor_array::{Device, Window};
/// use dtensor_array::kernels::copy::arange_i64;
/// # fn main() -> dtensor_array::Result<()> {
/// // Indices 0, 1 and 4 of an array with six elements.
/// let window = Window::new(&[6], [[0..2, 4..5]])?;
/// assert_eq!(arange_i64(Device::Cpu, 10, 1, &window)?.copy_to_host::<i64>()?, [10, 11, 14]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    full: Shape,
    shape: Shape,
    /// The ranges along each dim: ascending, without overlap, non-empty and inside the full array. Neighbouring ranges may
    /// touch. The lengths of a dim's ranges add up to its size in `shape`. Empty if the window covers the full array.
    ranges: SmallVec<[Ranges; 4]>,
}

impl Window {
    /// Creates the window that covers the full array.
    pub fn whole(shape: &[usize]) -> Self {
        Window { full: shape.into(), shape: shape.into(), ranges: SmallVec::new() }
    }

    /// Creates the window of the elements whose index along every dim is in one of that dim's ranges.
    ///
    /// There must be one list of ranges for each dim of `full`. Returns an error if the ranges of a dim are not ascending,
    /// overlap, or exceed its size. Empty ranges are ignored.
    pub fn new(
        full: &[usize],
        ranges: impl IntoIterator<Item = impl IntoIterator<Item = Range<usize>>>,
    ) -> Result<Self> {
        let mut ranges: SmallVec<[Ranges; 4]> =
            ranges.into_iter().map(|list| list.into_iter().collect()).collect();
        if ranges.len() != full.len() {
            let message =
                format!("{} lists of ranges for the {} dims of shape {full:?}", ranges.len(), full.len());
            return Err(Error::argument("window", message));
        }
        for (list, &size) in ranges.iter_mut().zip(full) {
            let mut end = 0;
            for range in list.iter() {
                if !(end <= range.start && range.start <= range.end && range.end <= size) {
                    let message = format!(
                        "expected ascending ranges, the next one inside {end}..{size}, but got {range:?} (shape {full:?})"
                    );
                    return Err(Error::argument("window", message));
                }
                end = range.end;
            }
            list.retain(|range| range.start < range.end);
        }
        let shape: Shape = ranges.iter().map(|list| list.iter().map(Range::len).sum()).collect();
        if shape[..] == *full {
            ranges.clear();
        }
        Ok(Window { full: full.into(), shape, ranges })
    }

    /// Returns the shape of the shard.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the shape of the full array.
    pub fn whole_shape(&self) -> &Shape {
        &self.full
    }

    /// Returns the ranges along a dim, unless the window covers the full array.
    #[cfg(feature = "cuda")]
    pub(crate) fn ranges_of(&self, dim: usize) -> &[Range<usize>] {
        self.ranges.get(dim).map_or(&[], |ranges| ranges)
    }

    /// Calls `run(at, first, n)` for each contiguous run of the shard, in row-major order: elements `at..at + n` of the shard
    /// are elements `first..first + n` of the full array. Runs are as long as possible.
    pub fn each_run(&self, mut run: impl FnMut(usize, usize, usize)) {
        if self.shape.contains(&0) {
            return;
        }
        // The dims inside the last incomplete dim are complete, so each of its ranges is contiguous.
        let Some(last) = (0..self.shape.len()).rfind(|&d| self.shape[d] != self.full[d]) else {
            return run(0, 0, self.shape.numel());
        };
        let inner = self.full[last + 1..].iter().product();
        let mut at = 0;
        let mut open = 0..0;
        self.each_range(0, last, 0, inner, &mut |first, n| {
            // Also merges the last range of one row with the first of the next if they touch.
            if first == open.end {
                open.end += n;
                return;
            }
            if !open.is_empty() {
                run(at, open.start, open.len());
                at += open.len();
            }
            open = first..first + n;
        });
        run(at, open.start, open.len());
    }

    /// Calls `run(first, n)` for every range of dim `last`, for every index of the window in the dims from `dim` to before
    /// `last`. `above` is the row-major index over the dims before `dim`, and `inner` the number of elements inside one index
    /// of dim `last`.
    fn each_range(
        &self,
        dim: usize,
        last: usize,
        above: usize,
        inner: usize,
        run: &mut impl FnMut(usize, usize),
    ) {
        let above = above * self.full[dim];
        for range in &self.ranges[dim] {
            if dim == last {
                run((above + range.start) * inner, range.len() * inner);
            } else {
                range.clone().for_each(|i| self.each_range(dim + 1, last, above + i, inner, run));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;
    use crate::host::testing::windows;

    type Run = (usize, usize, usize);
    type Lists<'a> = &'a [&'a [(usize, usize)]];

    fn window(full: &[usize], ranges: Lists) -> Result<Window> {
        Window::new(full, ranges.iter().map(|list| list.iter().map(|&(start, end)| start..end)))
    }

    fn runs(window: &Window) -> Vec<Run> {
        let mut runs = Vec::new();
        window.each_run(|at, first, n| runs.push((at, first, n)));
        runs
    }

    #[test]
    fn runs_are_as_long_as_possible() {
        let check = |full: &[usize], ranges: Lists, expected: &[Run]| {
            assert_eq!(runs(&window(full, ranges).unwrap()), expected, "{ranges:?} of {full:?}");
        };
        // Sharded along the first dim only: one run for each range.
        check(&[6, 2, 3], &[&[(1, 3), (4, 5)], &[(0, 2)], &[(0, 3)]], &[(0, 6, 12), (12, 24, 6)]);
        check(&[6, 5], &[&[(1, 3), (3, 5)], &[(0, 5)]], &[(0, 5, 20)]);
        // Ranges that touch, with an empty one between them, make a complete dim.
        check(&[2, 5], &[&[(0, 2)], &[(0, 2), (2, 2), (2, 5)]], &[(0, 0, 10)]);
        // Sharded along an inner dim: one run for each row and range.
        check(&[2, 5], &[&[(0, 2)], &[(1, 2), (3, 4)]], &[(0, 1, 1), (1, 3, 1), (2, 6, 1), (3, 8, 1)]);
        check(&[2, 3, 4], &[&[(0, 2)], &[(1, 3)], &[(0, 4)]], &[(0, 4, 8), (8, 16, 8)]);
        check(&[3, 1, 4], &[&[(2, 3)], &[(0, 1)], &[(1, 3)]], &[(0, 9, 2)]);
        // The last range of a row touches the first range of the next row.
        check(&[2, 4], &[&[(0, 2)], &[(0, 1), (3, 4)]], &[(0, 0, 1), (1, 3, 2), (3, 7, 1)]);
    }

    #[test]
    fn a_full_window_is_one_run() {
        for shape in [&[][..], &[1], &[7], &[2, 3], &[2, 1, 3, 4, 5]] {
            let full = Window::whole(shape);
            assert_eq!((&full.shape()[..], &full.whole_shape()[..]), (shape, shape));
            assert_eq!(runs(&full), [(0, 0, shape.iter().product())]);
            assert_eq!(Window::new(shape, shape.iter().map(|&size| iter::once(0..size))).unwrap(), full);
        }
        for shape in [&[0][..], &[3, 0], &[0, 3]] {
            assert_eq!(runs(&Window::whole(shape)), []);
            assert_eq!(
                Window::new(shape, shape.iter().map(|&size| iter::once(0..size))).unwrap(),
                Window::whole(shape)
            );
        }
    }

    #[test]
    fn empty_windows_have_no_runs() {
        for ranges in [&[&[][..], &[(0, 3)]][..], &[&[(0, 2)], &[(1, 1), (3, 3)]], &[&[], &[]]] {
            let window = window(&[2, 3], ranges).unwrap();
            assert_eq!(window.shape().numel(), 0);
            assert_eq!(window.whole_shape()[..], [2, 3]);
            assert_eq!(runs(&window), []);
        }
        assert_eq!(window(&[2, 3], &[&[], &[(0, 1), (2, 3)]]).unwrap().shape()[..], [0, 2]);
    }

    #[test]
    fn runs_cover_the_window_in_order() {
        for (window, indices) in windows() {
            let mut seen = Vec::new();
            let mut end = None;
            window.each_run(|at, first, n| {
                assert_eq!(at, seen.len());
                assert!(n > 0 && end != Some(first), "two runs of {window:?} touch at {first}");
                seen.extend(first..first + n);
                end = Some(first + n);
            });
            assert_eq!(seen, indices, "{window:?}");
            assert_eq!(window.shape().numel(), indices.len());
        }
    }

    #[test]
    fn ranges_must_fit() {
        let bad: [(&[usize], Lists); 8] = [
            (&[4], &[&[(2, 5)]]),
            (&[4], &[&[(5, 5)]]),
            (&[4], &[&[(3, 2)]]),
            (&[4], &[&[(0, 2), (1, 3)]]),
            (&[4], &[&[(2, 3), (0, 1)]]),
            (&[4, 4], &[&[(0, 4)]]),
            (&[4], &[&[(0, 4)], &[]]),
            (&[], &[&[(0, 1)]]),
        ];
        for (full, ranges) in bad {
            assert!(window(full, ranges).is_err(), "{ranges:?} of {full:?}");
        }
    }
}
