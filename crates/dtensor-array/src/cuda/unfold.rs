//! The sliding windows of a convolution as columns of a matrix (`im2col`), and the adjoint (`col2im`).

use std::array::from_fn;

use super::driver::Address;
use super::kernel::{ALL, file, units};
use super::map::THREADS;
use super::{grid_for, stream_of};
use crate::host::unfold::Windows;
use crate::{Array, Error, Result};

units! {
    static UNFOLD: "unfold", [file!("unfold.cuh")], ALL;
}

/// Must match `Unfold` in `kernels/unfold.cuh`.
#[repr(C)]
struct Unfold {
    source: Address,
    out: Address,
    planes: u64,
    /// Along each dim: kernel, stride, dilation, padding before, number of windows, and size.
    along: [[u64; 6]; 2],
    vector: u64,
}

/// Runs one of the two kernels.
fn run(
    name: &str,
    x: &Array,
    shape: &[usize],
    planes: usize,
    windows: [Windows; 2],
    counts: [usize; 2],
    sizes: [usize; 2],
) -> Result<Array> {
    let stream = stream_of(x)?;
    let out = stream.empty(x.dtype(), shape)?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let x = x.contiguous()?;
    let most = 16 / x.dtype().size();
    let vector = if name == "unfold" && (counts[0] * counts[1]).is_multiple_of(most) { most } else { 1 };
    let along = from_fn(|d| {
        let Windows { kernel, stride, dilation, before, .. } = windows[d];
        [kernel, stride, dilation, before, counts[d], sizes[d]].map(|n| n as u64)
    });
    let (source, to) = (stream.read(&x)?, stream.read(&out)?);
    let argument = Unfold { source, out: to, planes: planes as u64, along, vector: vector as u64 };
    let grid = grid_for(stream.gpu, out.numel(), THREADS, vector);
    // SAFETY: the shapes of both arrays follow from the argument.
    unsafe { stream.launch(&UNFOLD, x.dtype(), name, grid, THREADS, 0, &argument)? };
    Ok(out)
}

pub(crate) fn unfold(x: &Array, windows: [Windows; 2], counts: [usize; 2]) -> Result<Array> {
    let &[n, c, h, w] = x.dims() else { return wrong_ndim("unfold") };
    let kernel = windows[0].kernel * windows[1].kernel;
    run("unfold", x, &[n, c * kernel, counts[0] * counts[1]], n * c, windows, counts, [h, w])
}

pub(crate) fn fold(
    cols: &Array,
    windows: [Windows; 2],
    counts: [usize; 2],
    sizes: [usize; 2],
) -> Result<Array> {
    let &[n, rows, _] = cols.dims() else { return wrong_ndim("fold") };
    let c = rows / (windows[0].kernel * windows[1].kernel).max(1);
    run("fold", cols, &[n, c, sizes[0], sizes[1]], n * c, windows, counts, sizes)
}

#[cold]
fn wrong_ndim(op: &'static str) -> Result<Array> {
    Err(Error::argument(op, "the array has the wrong number of dims for an image"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, same_error};
    use super::*;
    use crate::DType;
    use crate::host::testing::strided;
    use crate::kernels::unfold as kernels;

    fn windows(kernel: usize, stride: usize, dilation: usize, before: usize, after: usize) -> Windows {
        Windows { kernel, stride, dilation, before, after }
    }

    fn some() -> Vec<Windows> {
        let mut all = vec![windows(1, 1, 1, 0, 0), windows(2, 3, 1, 0, 1), windows(3, 1, 4, 9, 9)];
        for (stride, dilation) in [(1, 1), (2, 1), (3, 2), (1, 3)] {
            for (before, after) in [(0, 0), (1, 1), (4, 5)] {
                all.push(windows(3, stride, dilation, before, after));
            }
        }
        all
    }

    /// The images are large enough for several blocks, and have odd sizes or those that fill vectors.
    #[test]
    fn windows_of_every_dtype() {
        for dtype in DType::ALL {
            for [h, w] in [[5, 7], [16, 16]] {
                let x = numbers(2 * 3 * h * w, dtype, 1);
                for (i, down) in some().iter().enumerate() {
                    let across = some()[(i * 7 + 3) % some().len()];
                    let (Some((down, oh)), Some((across, ow))) = (down.along(h), across.along(w)) else {
                        continue;
                    };
                    let (both, counts) = ([down, across], [oh, ow]);
                    let cols = 2 * 3 * down.kernel * across.kernel * oh * ow;
                    compare(&[x.clone(), numbers(cols, dtype, 2)], 0.0, |x| {
                        let image = x[0].reshape(&[2, 3, h, w])?;
                        let cols = x[1].reshape(&[2, 3 * down.kernel * across.kernel, oh * ow])?;
                        Ok(vec![
                            kernels::unfold(&image, both, counts)?,
                            kernels::unfold(&strided(&image), both, counts)?,
                            kernels::fold(&cols, both, counts, [h, w])?,
                            kernels::fold(&strided(&cols), both, counts, [h, w])?,
                        ])
                    });
                }
            }
        }
    }

    #[test]
    fn empty_arrays_stay_empty_or_zero() {
        let both = [windows(2, 1, 1, 1, 1); 2];
        compare(&[numbers(0, DType::F32, 0)], 0.0, |x| {
            let (none, flat) = (x[0].reshape(&[0, 2, 4, 4])?, x[0].reshape(&[1, 1, 0, 3])?);
            let cols = kernels::unfold(&none, both, [5, 5])?;
            Ok(vec![kernels::fold(&cols, both, [5, 5], [4, 4])?, cols, kernels::unfold(&flat, both, [1, 4])?])
        });
        same_error(&[numbers(1, DType::F32, 0)], |x| kernels::unfold(&x[0], both, [1, 1]));
        same_error(&[numbers(1, DType::F32, 0)], |x| kernels::fold(&x[0], both, [1, 1], [1, 1]));
    }
}
