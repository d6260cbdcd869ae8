//! Concatenation along a dim, and its adjoint: padding. Every byte is written once.

use super::copy::{assign, axes_to, fill};
use super::fill_array;
use crate::Shape;
use crate::{Array, Elem, Num, with_elem};
use crate::{Error, Result};

/// Concatenates arrays along `dim`. They must have the same dtype, and the same sizes in all other dims.
pub(crate) fn cat(xs: &[&Array], dim: usize) -> Result<Array> {
    let Some(first) = xs.first() else {
        return Err(Error::argument("cat", "expected a non-empty list of tensors"));
    };
    if first.dims().is_empty() {
        return Err(Error::argument("cat", "zero-dimensional tensors cannot be concatenated"));
    }
    let size = xs.iter().map(|x| x.dims()[dim]).sum();
    let shape = Shape::from(first.dims()).with_dim(dim, size);
    let strides = shape.strides();
    with_elem!(first.dtype(), T => {
        let reads = xs.iter().map(|x| x.read::<T>()).collect::<Result<Vec<_>>>()?;
        // SAFETY: the sizes along `dim` add up to that of the result, and each array writes its range completely.
        unsafe {
            fill_array::<T>(&shape, |out| {
                let mut start = 0;
                for read in &reads {
                    let axes = axes_to(read.dims, read.strides, &strides);
                    assign(&axes, read.data(), tail(out, start));
                    start += read.dims[dim] * strides[dim];
                }
            })
        }
    })
}

/// Pads `x` along `dim` to `size` with the number `around`. `x` begins at index `start` of the result.
pub(crate) fn pad_slice(x: &Array, dim: usize, start: usize, size: usize, around: f64) -> Result<Array> {
    let n = x.dims()[dim];
    if start.checked_add(n).is_none_or(|end| end > size) {
        return Err(Error::argument(
            "slice",
            format!("{n} elements at index {start} do not fit into a dim of size {size}"),
        ));
    }
    let shape = Shape::from(x.dims()).with_dim(dim, size);
    let strides = shape.strides();
    let inner = strides[dim];
    with_elem!(x.dtype(), T => {
        let read = x.read::<T>()?;
        let around = T::from_acc(Num::from_f64(around));
        let axes = axes_to(read.dims, read.strides, &strides);
        // SAFETY: in each run of `size` along `dim`, the elements before and after `x` are filled, and the rest is copied.
        unsafe {
            fill_array::<T>(&shape, |out| {
                if size * inner > 0 {
                    for run in out.chunks_exact_mut(size * inner) {
                        fill(&mut run[..start * inner], around);
                        fill(&mut run[(start + n) * inner..], around);
                    }
                }
                assign(&axes, read.data(), tail(out, start * inner));
            })
        }
    })
}

/// Returns the elements from `start`. For an empty piece, `start` may be beyond the end.
fn tail<T>(out: &mut [T], start: usize) -> &mut [T] {
    let start = start.min(out.len());
    &mut out[start..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::host::testing::values;

    fn iota(dtype: DType, shape: &[usize], start: usize) -> Array {
        let n = shape.iter().product::<usize>();
        with_elem!(dtype, T => {
            let data = (start..start + n).map(|i| T::from_acc(Num::from_f64((i % 200) as f64))).collect();
            Array::from_vec::<T>(data, shape)
        })
        .unwrap()
    }

    /// Concatenates element by element: finds the piece that holds each index of the result.
    fn naive(xs: &[&Array], dim: usize) -> Vec<f64> {
        let shape = {
            let mut shape = xs[0].dims().to_vec();
            shape[dim] = xs.iter().map(|x| x.dims()[dim]).sum();
            shape
        };
        let pieces: Vec<Vec<f64>> = xs.iter().map(|x| values(x)).collect();
        let (mut out, total) = (vec![], shape.iter().product::<usize>());
        for flat in 0..total {
            let (mut rest, mut index) = (flat, vec![0; shape.len()]);
            for d in (0..shape.len()).rev() {
                index[d] = rest % shape[d];
                rest /= shape[d];
            }
            let mut piece = 0;
            while index[dim] >= xs[piece].dims()[dim] {
                index[dim] -= xs[piece].dims()[dim];
                piece += 1;
            }
            let at = index.iter().zip(xs[piece].dims()).fold(0, |at, (i, size)| at * size + i);
            out.push(pieces[piece][at]);
        }
        out
    }

    #[test]
    fn arrays_are_concatenated_along_any_dim() {
        for dtype in DType::ALL {
            for dim in 0..3 {
                let piece = |size: usize, start: usize| {
                    let mut shape = [3, 4, 5];
                    shape[dim] = size;
                    iota(dtype, &shape, start)
                };
                let (a, b, none) = (piece(2, 0), piece(7, 50), piece(0, 0));
                // Two views: one transposed, one narrowed from a larger array.
                let transposed = iota(dtype, &[5, 4, 3], 90).permute(&[2, 1, 0]).unwrap();
                let narrowed = iota(dtype, &[3, 4, 9], 7).narrow(2, 3, 5).unwrap();
                for xs in [
                    vec![&a, &b],
                    vec![&none, &a, &none, &transposed, &narrowed],
                    vec![&none],
                    vec![&none, &b, &a],
                ] {
                    let y = cat(&xs, dim).unwrap();
                    assert_eq!(values(&y), naive(&xs, dim));
                    assert_eq!(y.dims()[dim], xs.iter().map(|x| x.dims()[dim]).sum::<usize>());
                }
            }
        }
        assert!(cat(&[], 0).is_err());
        assert!(cat(&[&iota(DType::F32, &[], 0)], 0).is_err());
    }

    #[test]
    fn a_padded_slice_is_zero_elsewhere() {
        for dtype in DType::ALL {
            for dim in 0..3 {
                for (start, after) in [(0, 0), (0, 3), (2, 0), (4, 1)] {
                    let x = iota(dtype, &[4, 3, 2], 1).transpose(0, 2).unwrap();
                    let zeros = |size: usize| {
                        let shape = Shape::from(x.dims()).with_dim(dim, size);
                        super::super::copy::full(dtype, &shape, 0.0).unwrap()
                    };
                    let y = pad_slice(&x, dim, start, start + x.dims()[dim] + after, 0.0).unwrap();
                    assert_eq!(values(&y), naive(&[&zeros(start), &x, &zeros(after)], dim));
                }
            }
        }
        let none = iota(DType::F32, &[2, 0], 0);
        assert_eq!(values(&pad_slice(&none, 1, 1, 3, 0.0).unwrap()), [0.0; 6]);
        assert_eq!(pad_slice(&none, 0, 1, 3, 0.0).unwrap().dims(), [3, 0]);
        assert!(pad_slice(&iota(DType::F32, &[3], 0), 0, 1, 3, 0.0).is_err());
    }
}
