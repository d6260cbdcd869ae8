//! Concatenation along a dim, and its adjoint: padding.

use super::assign::Assign;
use super::stream_of;
use crate::{Array, Error, Result, Shape};

pub(crate) fn cat(xs: &[&Array], dim: usize) -> Result<Array> {
    let Some(first) = xs.first() else {
        return Err(Error::argument("cat", "expected a non-empty list of tensors"));
    };
    if first.dims().is_empty() {
        return Err(Error::argument("cat", "zero-dimensional tensors cannot be concatenated"));
    }
    let stream = stream_of(first)?;
    let size = xs.iter().map(|x| x.dims()[dim]).sum();
    let out = stream.empty(first.dtype(), &first.shape().with_dim(dim, size))?;
    let strides = out.shape().strides();
    let mut pieces = Assign::new(stream, first.dtype(), 0);
    let mut start = 0;
    for x in xs {
        pieces.copy(x, &out, start * strides[dim], &strides)?;
        start += x.dims()[dim];
    }
    pieces.run()?;
    Ok(out)
}

pub(crate) fn pad_slice(x: &Array, dim: usize, start: usize, size: usize, around: f64) -> Result<Array> {
    let n = x.dims()[dim];
    if start.checked_add(n).is_none_or(|end| end > size) {
        return Err(Error::argument(
            "slice",
            format!("{n} elements at index {start} do not fit into a dim of size {size}"),
        ));
    }
    let stream = stream_of(x)?;
    let shape = |size: usize| -> Shape { x.shape().with_dim(dim, size) };
    let out = stream.empty(x.dtype(), &shape(size))?;
    let strides = out.shape().strides();
    let mut pieces = Assign::new(stream, x.dtype(), super::copy::element(x.dtype(), around)?);
    pieces.fill(&shape(start), &out, 0, &strides)?;
    pieces.copy(x, &out, start * strides[dim], &strides)?;
    pieces.fill(&shape(size - start - n), &out, (start + n) * strides[dim], &strides)?;
    pieces.run()?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, same_error};
    use super::*;
    use crate::DType;
    use crate::host::testing::strided;
    use crate::kernels::cat as kernels;

    #[test]
    fn arrays_are_concatenated_along_any_dim() {
        for dtype in DType::ALL {
            for (inner, n) in [(5, 3), (16, 40)] {
                let inputs: Vec<Array> = (0..4).map(|seed| numbers(n * 8 * inner, dtype, seed)).collect();
                for dim in 0..3 {
                    compare(&inputs, 0.0, |x| {
                        let shape = [n, 8, inner];
                        let [a, b, c, d] = [0, 1, 2, 3].map(|k| x[k].reshape(&shape).unwrap());
                        let piece = |x: &Array, start: usize, len: usize| x.narrow(dim, start, len).unwrap();
                        let other = if dim == 2 { 1 } else { 2 };
                        let (none, one) = (piece(&a, 1, 0), piece(&b, 2, 1));
                        let view = c.narrow(other, 1, 4)?;
                        let mut all = vec![
                            kernels::cat(&[&a, &b, &c], dim)?,
                            kernels::cat(&[&none, &strided(&a), &one, &none, &d], dim)?,
                            kernels::cat(&[&view, &view, &d.narrow(other, 0, 4)?], dim)?,
                            kernels::cat(&[&none], dim)?,
                            kernels::cat(&[&a], dim)?,
                        ];
                        let many: Vec<Array> = (0..60).map(|i| piece(&a, i % 3, i % 2)).collect();
                        all.push(kernels::cat(&many.iter().collect::<Vec<_>>(), dim)?);
                        let row = x[0].narrow(0, 0, inner)?.expand(&shape)?;
                        all.push(kernels::cat(&[&row, &a], dim)?);
                        Ok(all)
                    });
                }
            }
            let large: Vec<Array> = (0..2).map(|seed| numbers(130 * 140, dtype, seed)).collect();
            compare(&large, 0.0, |x| {
                let (a, b) = (x[0].reshape(&[140, 130])?.transpose(0, 1)?, x[1].reshape(&[130, 140])?);
                Ok(vec![kernels::cat(&[&a, &b], 0)?, kernels::cat(&[&a, &b], 1)?])
            });
        }
    }

    #[test]
    fn a_view_may_have_many_dims() {
        compare(&[numbers(256 * 2, DType::BF16, 1)], 0.0, |x| {
            let x = x[0].reshape(&[4, 2, 2, 2, 2, 2, 2, 2])?;
            let view = x.permute(&[5, 1, 7, 0, 3, 6, 2, 4])?;
            Ok(vec![kernels::cat(&[&view, &view], 3)?, kernels::pad_slice(&view, 2, 1, 5, 2.0)?])
        });
    }

    #[test]
    fn slices_are_padded() {
        for dtype in DType::ALL {
            for shape in [[4, 3, 2], [3, 16, 8], [2, 0, 3]] {
                compare(&[numbers(shape.iter().product(), dtype, 1)], 0.0, |x| {
                    let x = x[0].reshape(&shape)?;
                    let mut all = vec![];
                    for dim in 0..3 {
                        for (start, after) in [(0, 0), (0, 3), (2, 0), (4, 1), (16, 16)] {
                            for x in [x.clone(), x.transpose(0, 2)?] {
                                let size = start + x.dims()[dim] + after;
                                all.push(kernels::pad_slice(&x, dim, start, size, 0.0)?);
                                all.push(kernels::pad_slice(&x, dim, start, size, 3.1)?);
                            }
                        }
                    }
                    Ok(all)
                });
            }
        }
    }

    #[test]
    fn invalid_arguments_are_errors() {
        same_error(&[numbers(3, DType::F32, 0)], |x| kernels::pad_slice(&x[0], 0, 1, 3, 0.0));
        same_error(&[numbers(1, DType::F32, 0)], |x| kernels::cat(&[&x[0].reshape(&[])?], 0));
    }
}
