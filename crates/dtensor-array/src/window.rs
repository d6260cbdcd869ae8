//! Which elements of a whole array a part of it has.

use std::ops::Range;

use smallvec::SmallVec;

use crate::Shape;
use crate::{Error, Result};

type Ranges = SmallVec<[Range<usize>; 1]>;

/// A part of an array: along every dim of the whole some ranges of indices, one after the other. What is made from the
/// indices of its elements can be made for the part alone, and has the bits it would have in the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    whole: Shape,
    shape: Shape,
    /// The ranges along each dim: inside the whole, ascending, apart or touching, none of them empty. The lengths of a
    /// dim's add up to its size in `shape`. A window of all of the whole has no lists.
    ranges: SmallVec<[Ranges; 4]>,
}

impl Window {
    /// All of an array.
    pub fn whole(shape: &[usize]) -> Self {
        Window { whole: shape.into(), shape: shape.into(), ranges: SmallVec::new() }
    }

    /// The elements whose index along every dim is in one of that dim's ranges, which must be inside the whole,
    /// ascending and without overlap. Empty ones count for nothing.
    pub fn new(
        whole: &[usize],
        ranges: impl IntoIterator<Item = impl IntoIterator<Item = Range<usize>>>,
    ) -> Result<Self> {
        let mut ranges: SmallVec<[Ranges; 4]> =
            ranges.into_iter().map(|list| list.into_iter().collect()).collect();
        if ranges.len() != whole.len() {
            let message = format!("{} lists of ranges for the dims of {whole:?}", ranges.len());
            return Err(Error::argument("window", message));
        }
        for (list, &size) in ranges.iter_mut().zip(whole) {
            let mut end = 0;
            for range in list.iter() {
                if !(end <= range.start && range.start <= range.end && range.end <= size) {
                    let message = format!(
                        "expected ascending ranges inside {end}..{size}, but got {range:?} of {whole:?}"
                    );
                    return Err(Error::argument("window", message));
                }
                end = range.end;
            }
            list.retain(|range| range.start < range.end);
        }
        let shape: Shape = ranges.iter().map(|list| list.iter().map(Range::len).sum()).collect();
        if shape[..] == *whole {
            ranges.clear();
        }
        Ok(Window { whole: whole.into(), shape, ranges })
    }

    /// The shape of the part.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The shape of the whole.
    pub fn whole_shape(&self) -> &Shape {
        &self.whole
    }

    /// Calls `run(at, first, n)` for all of the part in row-major order: its elements `at` to `at + n` are elements
    /// `first` to `first + n` of the whole, and `n` is as large as can be.
    pub fn each_run(&self, mut run: impl FnMut(usize, usize, usize)) {
        if self.shape.contains(&0) {
            return;
        }
        // Dims inside the last one that is cut are complete, so a range of that one is contiguous.
        let Some(cut) = (0..self.shape.len()).rfind(|&d| self.shape[d] != self.whole[d]) else {
            return run(0, 0, self.shape.numel());
        };
        let inner = self.whole[cut + 1..].iter().product();
        let mut at = 0;
        let mut open = 0..0;
        self.each_range(0, cut, 0, inner, &mut |first, n| {
            // The end of one row and the beginning of the next may touch, too.
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

    /// Calls `run(first, n)` for every range of dim `cut`, inside every index of the dims `dim` to `cut`. `above` is the
    /// index, row by row, over the dims before `dim`; `inner` is the number of elements inside dim `cut`.
    fn each_range(
        &self,
        dim: usize,
        cut: usize,
        above: usize,
        inner: usize,
        run: &mut impl FnMut(usize, usize),
    ) {
        let above = above * self.whole[dim];
        for range in &self.ranges[dim] {
            if dim == cut {
                run((above + range.start) * inner, range.len() * inner);
            } else {
                range.clone().for_each(|i| self.each_range(dim + 1, cut, above + i, inner, run));
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

    fn window(whole: &[usize], ranges: Lists) -> Result<Window> {
        Window::new(whole, ranges.iter().map(|list| list.iter().map(|&(start, end)| start..end)))
    }

    fn runs(window: &Window) -> Vec<Run> {
        let mut runs = Vec::new();
        window.each_run(|at, first, n| runs.push((at, first, n)));
        runs
    }

    #[test]
    fn runs_are_as_long_as_can_be() {
        let check = |whole: &[usize], ranges: Lists, expected: &[Run]| {
            assert_eq!(runs(&window(whole, ranges).unwrap()), expected, "{ranges:?} of {whole:?}");
        };
        // A cut of the first dim only: a run per range.
        check(&[6, 2, 3], &[&[(1, 3), (4, 5)], &[(0, 2)], &[(0, 3)]], &[(0, 6, 12), (12, 24, 6)]);
        check(&[6, 5], &[&[(1, 3), (3, 5)], &[(0, 5)]], &[(0, 5, 20)]);
        // Ranges that touch, empty ones among them, can be a complete dim.
        check(&[2, 5], &[&[(0, 2)], &[(0, 2), (2, 2), (2, 5)]], &[(0, 0, 10)]);
        // Inner cuts: a run per row and range.
        check(&[2, 5], &[&[(0, 2)], &[(1, 2), (3, 4)]], &[(0, 1, 1), (1, 3, 1), (2, 6, 1), (3, 8, 1)]);
        check(&[2, 3, 4], &[&[(0, 2)], &[(1, 3)], &[(0, 4)]], &[(0, 4, 8), (8, 16, 8)]);
        check(&[3, 1, 4], &[&[(2, 3)], &[(0, 1)], &[(1, 3)]], &[(0, 9, 2)]);
        // The end of a row and the beginning of the next.
        check(&[2, 4], &[&[(0, 2)], &[(0, 1), (3, 4)]], &[(0, 0, 1), (1, 3, 2), (3, 7, 1)]);
    }

    #[test]
    fn a_whole_is_one_run() {
        for shape in [&[][..], &[1], &[7], &[2, 3], &[2, 1, 3, 4, 5]] {
            let whole = Window::whole(shape);
            assert_eq!((&whole.shape()[..], &whole.whole_shape()[..]), (shape, shape));
            assert_eq!(runs(&whole), [(0, 0, shape.iter().product())]);
            assert_eq!(Window::new(shape, shape.iter().map(|&size| iter::once(0..size))).unwrap(), whole);
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
    fn empty_parts_have_no_runs() {
        for ranges in [&[&[][..], &[(0, 3)]][..], &[&[(0, 2)], &[(1, 1), (3, 3)]], &[&[], &[]]] {
            let window = window(&[2, 3], ranges).unwrap();
            assert_eq!(window.shape().numel(), 0);
            assert_eq!(window.whole_shape()[..], [2, 3]);
            assert_eq!(runs(&window), []);
        }
        assert_eq!(window(&[2, 3], &[&[], &[(0, 1), (2, 3)]]).unwrap().shape()[..], [0, 2]);
    }

    #[test]
    fn runs_cover_the_part_in_order() {
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
        for (whole, ranges) in bad {
            assert!(window(whole, ranges).is_err(), "{ranges:?} of {whole:?}");
        }
    }
}
