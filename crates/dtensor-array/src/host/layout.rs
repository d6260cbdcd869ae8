//! Iteration over strided arrays: [`Axis`], a dim with its strides in one or more arrays, and [`Walk`], the loop over axes.

use smallvec::SmallVec;

/// A dim with its stride in each of `N` arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axis<const N: usize> {
    /// The size of the dim.
    pub(crate) size: usize,
    /// The stride in each array, in elements.
    pub(crate) strides: [usize; N],
}

/// Axes, outermost first.
pub(crate) type Axes<const N: usize> = SmallVec<[Axis<N>; 4]>;

/// Appends an axis as the innermost one. Drops it if its size is 1, and merges it with the previous axis if the two are
/// contiguous with each other in every array.
pub(crate) fn push_axis<const N: usize>(axes: &mut Axes<N>, axis: Axis<N>) {
    if axis.size == 1 {
        return;
    }
    match axes.last_mut() {
        Some(last) if (0..N).all(|k| last.strides[k] == axis.size * axis.strides[k]) => {
            *last = Axis { size: last.size * axis.size, strides: axis.strides };
        }
        _ => axes.push(axis),
    }
}

/// An iterator over the offsets of every index of some axes, in row-major order. Without axes there is one index.
#[derive(Debug)]
pub(crate) struct Walk<'a, const N: usize> {
    axes: &'a [Axis<N>],
    index: SmallVec<[usize; 4]>,
    at: [usize; N],
    done: bool,
}

impl<'a, const N: usize> Walk<'a, N> {
    /// Starts at the first index.
    #[inline(always)]
    pub(crate) fn new(axes: &'a [Axis<N>]) -> Self {
        let done = axes.iter().any(|axis| axis.size == 0);
        Walk { axes, index: SmallVec::from_elem(0, axes.len()), at: [0; N], done }
    }
}

impl<const N: usize> Iterator for Walk<'_, N> {
    type Item = [usize; N];

    #[inline(always)]
    fn next(&mut self) -> Option<[usize; N]> {
        if self.done {
            return None;
        }
        let at = self.at;
        let mut d = self.axes.len();
        loop {
            if d == 0 {
                self.done = true;
                break;
            }
            d -= 1;
            let axis = self.axes[d];
            self.index[d] += 1;
            if self.index[d] < axis.size {
                for k in 0..N {
                    self.at[k] += axis.strides[k];
                }
                break;
            }
            self.index[d] = 0;
            for k in 0..N {
                self.at[k] -= axis.strides[k] * (axis.size - 1);
            }
        }
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(list: &[(usize, usize)]) -> Axes<1> {
        let mut axes = Axes::new();
        for &(size, stride) in list {
            push_axis(&mut axes, Axis { size, strides: [stride] });
        }
        axes
    }

    #[test]
    fn contiguous_axes_are_merged() {
        assert_eq!(axes(&[(2, 12), (3, 4), (1, 99), (4, 1)]).as_slice(), &[Axis { size: 24, strides: [1] }]);
        assert_eq!(axes(&[(2, 1), (3, 2)]).len(), 2);
        assert_eq!(axes(&[(2, 0), (3, 0)]).as_slice(), &[Axis { size: 6, strides: [0] }]);
        let mut two: Axes<2> = Axes::new();
        push_axis(&mut two, Axis { size: 2, strides: [3, 3] });
        push_axis(&mut two, Axis { size: 3, strides: [1, 2] });
        assert_eq!(two.len(), 2);
    }

    #[test]
    fn a_walk_visits_every_index_in_order() {
        let offsets = |list: &[(usize, usize)]| Walk::new(&axes(list)).map(|[at]| at).collect::<Vec<_>>();
        assert_eq!(offsets(&[(2, 1), (3, 2)]), [0, 2, 4, 1, 3, 5]);
        assert_eq!(offsets(&[(2, 10), (2, 0), (2, 3)]), [0, 3, 0, 3, 10, 13, 10, 13]);
        assert_eq!(offsets(&[]), [0]);
        assert_eq!(offsets(&[(3, 1), (0, 1)]), [] as [usize; 0]);
    }
}
