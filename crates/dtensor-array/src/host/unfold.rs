//! The sliding windows of a convolution as columns of a matrix (`im2col`), and the adjoint (`col2im`).

use std::mem::MaybeUninit;

use super::{copy, fill_array, simd};
use crate::Result;
use crate::{Array, Elem, Num, with_elem};

/// The sliding windows along one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Windows {
    /// The number of elements of a window.
    pub kernel: usize,
    /// The distance between the first elements of neighbouring windows.
    pub stride: usize,
    /// The distance between neighbouring elements of a window.
    pub dilation: usize,
    /// The number of padding zeros before the dim.
    pub before: usize,
    /// The number of padding zeros after the dim.
    pub after: usize,
}

impl Windows {
    /// Returns the size of a dim with its padding, or `None` if it overflows.
    pub fn padded(&self, size: usize) -> Option<usize> {
        size.checked_add(self.before)?.checked_add(self.after)
    }

    /// Returns the number of elements from the first element of a window to its last, or `None` if it overflows or the window is
    /// empty.
    pub fn reach(&self) -> Option<usize> {
        self.dilation.checked_mul(self.kernel.checked_sub(1)?)?.checked_add(1)
    }

    /// Returns these windows for a dim of this size, and their number, or `None` if no window fits. Limits the stride to the
    /// padded size, so that later arithmetic does not overflow.
    pub fn along(mut self, size: usize) -> Option<(Windows, usize)> {
        let padded = self.padded(size)?;
        let last = padded.checked_sub(self.reach()?)?;
        self.stride = self.stride.min(padded);
        Some((self, last / self.stride + 1))
    }

    /// Returns `(from, to, first)` for the `k`-th element of each of `count` windows: it is inside a dim of this size for the
    /// windows `from..to`, and for the first of them it has index `first` in the dim.
    fn inside(&self, k: usize, count: usize, size: usize) -> (usize, usize, usize) {
        let at = k * self.dilation;
        // The element of window i has index i · stride + at − before.
        let from = self.before.saturating_sub(at).div_ceil(self.stride).min(count);
        let to = (size + self.before).saturating_sub(at).div_ceil(self.stride).clamp(from, count);
        (from, to, (from * self.stride + at).saturating_sub(self.before))
    }

    /// Returns true if the windows are the single elements of the dim.
    pub fn are_elements(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.before == 0 && self.after == 0
    }
}

/// Copies the sliding windows of `[n, c, h, w]` into `[n, c · kernel, positions]`, as `im2col` does. Each column holds the
/// elements of one window.
pub(crate) fn unfold(x: &Array, windows: [Windows; 2], counts: [usize; 2]) -> Result<Array> {
    let &[n, c, h, w] = x.dims() else { return wrong_ndim("unfold") };
    let [kh, kw] = windows.map(|along| along.kernel);
    let [oh, ow] = counts;
    let x = x.contiguous()?;
    with_elem!(x.dtype(), T => {
        let read = x.read::<T>()?;
        let data = &read.data()[..x.numel()];
        let fill = |out: &mut [MaybeUninit<T>]| {
            if oh * ow == 0 {
                return;
            }
            let mut rows = out.chunks_exact_mut(ow);
            for plane in 0..n * c {
                let plane = &data[plane * h * w..][..h * w];
                for k in 0..kh * kw {
                    let (top, bottom, mut y) = windows[0].inside(k / kw, oh, h);
                    let (left, right, first) = windows[1].inside(k % kw, ow, w);
                    for i in 0..oh {
                        let Some(row) = rows.next() else { return };
                        if !(top..bottom).contains(&i) || left == right {
                            copy::fill(row, T::default());
                            continue;
                        }
                        copy::fill(&mut row[..left], T::default());
                        copy::fill(&mut row[right..], T::default());
                        copy_every(&mut row[left..right], &plane[y * w + first..], windows[1].stride);
                        y += windows[0].stride;
                    }
                }
            }
        };
        // SAFETY: there are n · c · kh · kw · oh rows of ow elements, and each is written completely, or there are no elements.
        unsafe { fill_array::<T>(&[n, c * kh * kw, oh * ow], fill) }
    })
}

/// Copies every `step`-th element.
fn copy_every<T: Copy>(out: &mut [MaybeUninit<T>], from: &[T], step: usize) {
    if step == 1 {
        return copy::write_run(&from[..out.len()], out);
    }
    for (out, x) in out.iter_mut().zip(from.iter().step_by(step)) {
        out.write(*x);
    }
}

/// Computes the adjoint of [`unfold`]: each element of `[n, c, h, w]` is the sum of its copies in all windows. `sizes` are
/// h and w.
pub(crate) fn fold(
    cols: &Array,
    windows: [Windows; 2],
    counts: [usize; 2],
    sizes: [usize; 2],
) -> Result<Array> {
    let &[n, rows, _] = cols.dims() else { return wrong_ndim("fold") };
    let [kh, kw] = windows.map(|along| along.kernel);
    let ([oh, ow], [h, w]) = (counts, sizes);
    let c = rows / (kh * kw).max(1);
    let cols = cols.contiguous()?;
    with_elem!(cols.dtype(), T => {
        let read = cols.read::<T>()?;
        let data = &read.data()[..cols.numel()];
        // Without images, nothing is allocated, because the size of one image may exceed the memory.
        let mut sums = vec![<T as Elem>::Acc::ZERO; if n * c == 0 { 0 } else { h * w }];
        let fill = |out: &mut [MaybeUninit<T>]| {
            for (plane, out) in out.chunks_exact_mut((h * w).max(1)).enumerate() {
                sums.fill(<T as Elem>::Acc::ZERO);
                for k in 0..kh * kw {
                    let (top, bottom, mut y) = windows[0].inside(k / kw, oh, h);
                    let (left, right, first) = windows[1].inside(k % kw, ow, w);
                    let rows = &data[(plane * kh * kw + k) * oh * ow..][..oh * ow];
                    for i in top..bottom {
                        let row = &rows[i * ow..][left..right];
                        if !row.is_empty() {
                            simd::<T, _>(
                                #[inline(always)]
                                || add::<T>(&mut sums[y * w + first..], row, windows[1].stride),
                            );
                        }
                        y += windows[0].stride;
                    }
                }
                for (out, &sum) in out.iter_mut().zip(&sums) {
                    out.write(T::from_acc(sum));
                }
            }
        };
        // SAFETY: the planes cover the array, and each is written completely.
        unsafe { fill_array::<T>(&[n, c, h, w], fill) }
    })
}

/// Adds a row to every `step`-th sum.
#[inline(always)]
fn add<T: Elem>(sums: &mut [T::Acc], row: &[T], step: usize) {
    if step == 1 {
        for (sum, x) in sums[..row.len()].iter_mut().zip(row) {
            *sum = *sum + x.acc();
        }
    } else {
        for (sum, x) in sums.iter_mut().step_by(step).zip(row) {
            *sum = *sum + x.acc();
        }
    }
}

#[cold]
fn wrong_ndim(op: &'static str) -> Result<Array> {
    Err(crate::Error::argument(op, "the array has the wrong number of dims for an image"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::host::testing::{small, strided, values};

    impl Windows {
        fn count(self, size: usize) -> Option<usize> {
            self.along(size).map(|(_, count)| count)
        }
    }

    fn windows(kernel: usize, stride: usize, dilation: usize, before: usize, after: usize) -> Windows {
        Windows { kernel, stride, dilation, before, after }
    }

    /// Returns the index in a dim of the k-th element of the i-th window, or `None` if it is in the padding.
    fn place(along: &Windows, i: usize, k: usize, size: usize) -> Option<usize> {
        (i * along.stride + k * along.dilation).checked_sub(along.before).filter(|&at| at < size)
    }

    fn some() -> Vec<Windows> {
        let mut all = vec![windows(1, 1, 1, 0, 0), windows(2, 3, 1, 0, 1), windows(3, 1, 4, 9, 9)];
        for (stride, dilation) in [(1, 1), (2, 1), (3, 2), (1, 3), (2, 2)] {
            for (before, after) in [(0, 0), (1, 1), (2, 0), (4, 5)] {
                all.push(windows(3, stride, dilation, before, after));
            }
        }
        all
    }

    #[test]
    fn unfold_copies_every_window() {
        for dtype in DType::ALL {
            let [n, c, h, w] = [2, 3, 5, 7];
            let x = small(dtype, &[n, c, h, w]);
            let data = values(&x);
            for (i, down) in some().iter().enumerate() {
                let across = some()[(i * 7 + 3) % some().len()];
                let (Some(oh), Some(ow)) = (down.count(h), across.count(w)) else { continue };
                let mut want = Vec::new();
                for plane in 0..n * c {
                    for k in 0..down.kernel * across.kernel {
                        for at in 0..oh * ow {
                            let y = place(down, at / ow, k / across.kernel, h);
                            let x = place(&across, at % ow, k % across.kernel, w);
                            want.push(y.zip(x).map_or(0.0, |(y, x)| data[(plane * h + y) * w + x]));
                        }
                    }
                }
                for x in [&x, &strided(&x)] {
                    let cols = unfold(x, [*down, across], [oh, ow]).unwrap();
                    assert_eq!(cols.dims(), [n, c * down.kernel * across.kernel, oh * ow]);
                    assert_eq!(values(&cols), want, "{dtype} {down:?} {across:?}");
                }
            }
        }
    }

    /// ⟨unfold x, y⟩ = ⟨x, fold y⟩.
    #[test]
    fn fold_is_the_adjoint() {
        let dot = |a: &Array, b: &Array| values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum::<f64>();
        for dtype in [DType::F32, DType::F64, DType::I64] {
            let x = small(dtype, &[2, 2, 6, 5]);
            for (i, down) in some().iter().enumerate() {
                let across = some()[(i * 5 + 1) % some().len()];
                let (Some(oh), Some(ow)) = (down.count(6), across.count(5)) else { continue };
                let (both, counts) = ([*down, across], [oh, ow]);
                let cols = unfold(&x, both, counts).unwrap();
                let y = small(dtype, cols.dims());
                let back = fold(&strided(&y), both, counts, [6, 5]).unwrap();
                assert_eq!(back.dims(), x.dims());
                assert_eq!(dot(&cols, &y), dot(&x, &back), "{dtype} {down:?} {across:?}");
            }
        }
    }

    #[test]
    fn empty_arrays_stay_empty_or_zero() {
        let both = [windows(3, 1, 1, 1, 1); 2];
        let none = small(DType::F32, &[0, 2, 4, 4]);
        assert_eq!(unfold(&none, both, [4, 4]).unwrap().dims(), [0, 18, 16]);
        assert_eq!(
            fold(&unfold(&none, both, [4, 4]).unwrap(), both, [4, 4], [4, 4]).unwrap().dims(),
            [0, 2, 4, 4]
        );
        let both = [windows(2, 1, 1, 1, 1); 2];
        let flat = small(DType::F32, &[1, 1, 0, 3]);
        assert_eq!(values(&unfold(&flat, both, [1, 4]).unwrap()), [0.0; 16]);
        assert_eq!(both[0].count(0), Some(1));
        assert_eq!(windows(3, 1, 1, 0, 0).count(2), None);
        assert_eq!(windows(usize::MAX, 1, 2, 0, 0).count(9), None);
    }

    /// Half precision is summed in `f32`. A sum in bf16 would stop at 256.
    #[test]
    fn sums_of_halves_round_once() {
        let cols = Array::from_vec(vec![half::bf16::ONE; 300 * 300], &[1, 300, 300]).unwrap();
        let (down, across) = (windows(300, 1, 1, 299, 299), windows(1, 1, 1, 0, 0));
        assert_eq!(down.count(1), Some(300));
        assert_eq!(values(&fold(&cols, [down, across], [300, 1], [1, 1]).unwrap()), [300.0]);
    }
}
