//! Selecting values by a condition, or by position in a triangle.

use super::kernel::{ALL, file, units};
use super::map::{Function, NONE, broadcast};
use super::scalar::number;
use super::stream_of;
use crate::{Array, DType, Error, Result};

units! {
    static SELECT: "select",
        [file!("map.cuh"), file!("pointwise.cuh"), file!("select.cuh"), file!("triangle.cuh")], ALL;
}

/// Returns an error if a condition is not of dtype `u8`.
fn check_mask(op: &'static str, mask: &Array) -> Result<()> {
    match mask.dtype() {
        DType::U8 => Ok(()),
        dtype => Err(Error::DType { op, dtype, why: "a condition must have dtype u8" }),
    }
}

pub(crate) fn where_(cond: &Array, a: &Array, b: &Array) -> Result<Array> {
    check_mask("where", cond)?;
    let (left, right) = (a.dtype(), b.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: "where", left, right });
    }
    let function = Function { unit: &SELECT, dtype: left, name: "where" };
    stream_of(a)?.pointwise(function, (left, broadcast(&[cond, a, b])), [cond, a, b], NONE)
}

pub(crate) fn masked_fill(x: &Array, mask: &Array, value: f64) -> Result<Array> {
    check_mask("masked_fill", mask)?;
    let dtype = x.dtype();
    let function = Function { unit: &SELECT, dtype, name: "masked_fill" };
    let numbers = [number(dtype, value), 0, 0, 0, 0];
    stream_of(x)?.pointwise(function, (dtype, broadcast(&[x, mask])), [x, mask], numbers)
}

/// Must match `Triangle` in `kernels/triangle.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Triangle {
    rows: u64,
    columns: u64,
    diagonal: i64,
    lower: u32,
    reserved: u32,
}

pub(crate) fn triangle(x: &Array, diagonal: i64, lower: bool, first: (usize, usize)) -> Result<Array> {
    let &[.., rows, columns] = x.dims() else {
        return Err(Error::argument(
            if lower { "tril" } else { "triu" },
            "input tensor must have at least 2 dimensions",
        ));
    };
    let triangle = Triangle {
        rows: rows as u64,
        columns: columns as u64,
        diagonal: diagonal.saturating_add(first.0 as i64).saturating_sub(first.1 as i64),
        lower: u32::from(lower),
        reserved: 0,
    };
    stream_of(x)?.map(&SELECT, x.dtype(), "triangle", (x.dtype(), x.dims()), [x], triangle)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers};
    use super::*;
    use crate::Device;
    use crate::host::testing::strided;
    use crate::kernels::select as kernels;

    fn mask(n: usize) -> Array {
        Array::from_vec((0..n).map(|i| (i * i % 3) as u8).collect(), &[n]).unwrap()
    }

    #[test]
    fn where_broadcasts_all_three() {
        let cases: [[&[usize]; 3]; 10] = [
            [&[5, 33], &[5, 33], &[5, 33]],
            [&[5, 64], &[], &[5, 64]],
            [&[5, 33], &[], &[]],
            [&[5, 1], &[64], &[5, 64]],
            [&[33], &[5, 1], &[1, 33]],
            [&[], &[4], &[4]],
            [&[], &[], &[]],
            [&[4, 4], &[2, 3, 4, 4], &[3, 1, 1]],
            [&[1, 3], &[0, 1], &[]],
            [&[20_000], &[20_000], &[]],
        ];
        for dtype in DType::ALL {
            for shapes in cases {
                let of = |k: usize| numbers(shapes[k].iter().product(), dtype, k);
                let inputs = [mask(shapes[0].iter().product()), of(1), of(2)];
                compare(&inputs, 0.0, |x| {
                    let [cond, a, b] = [0, 1, 2].map(|k| x[k].reshape(shapes[k]).unwrap());
                    let all = kernels::where_(&cond, &a, &b)?;
                    Ok(vec![all, kernels::where_(&strided(&cond), &a, &strided(&b))?])
                });
            }
        }
    }

    #[test]
    fn masked_fill_of_every_dtype() {
        for dtype in DType::ALL {
            for (shape, masks) in
                [(&[2, 3, 16][..], &[3, 16][..]), (&[4, 5], &[4, 1]), (&[3], &[]), (&[0, 2], &[2])]
            {
                let inputs = [numbers(shape.iter().product(), dtype, 1), mask(masks.iter().product())];
                compare(&inputs, 0.0, |x| {
                    let (x, mask) = (x[0].reshape(shape)?, x[1].reshape(masks)?);
                    let values = [7.0, f64::NEG_INFINITY, 0.1];
                    values.iter().map(|&value| kernels::masked_fill(&strided(&x), &mask, value)).collect()
                });
            }
        }
    }

    #[test]
    fn triangles_and_their_shards() {
        for dtype in DType::ALL {
            for shape in
                [&[4, 4][..], &[3, 5], &[8, 16], &[2, 3, 4, 6], &[1, 1], &[0, 3], &[3, 0], &[0, 2, 2]]
            {
                compare(&[numbers(shape.iter().product(), dtype, 1)], 0.0, |x| {
                    let x = x[0].reshape(shape)?;
                    let mut all = vec![];
                    for diagonal in [-9, -1, 0, 3, 9, i64::MAX, i64::MIN] {
                        for lower in [true, false] {
                            for first in [(0, 0), (3, 1), (0, 4)] {
                                all.push(kernels::triangle(&x, diagonal, lower, first)?);
                            }
                            all.push(kernels::triangle(&strided(&x), diagonal, lower, (1, 0))?);
                        }
                    }
                    Ok(all)
                });
            }
        }
    }

    #[test]
    fn unsupported_arguments_are_errors() {
        let on_gpu = |dtype| numbers(2, dtype, 0).to_device(Device::Cuda(0)).unwrap();
        let (x, y, mask) = (on_gpu(DType::F32), on_gpu(DType::F64), on_gpu(DType::U8));
        assert!(matches!(where_(&x, &x, &x), Err(Error::DType { .. })));
        assert!(matches!(where_(&mask, &x, &y), Err(Error::DTypeMismatch { .. })));
        assert!(matches!(masked_fill(&x, &x, 0.0), Err(Error::DType { .. })));
        assert!(triangle(&x, 0, true, (0, 0)).is_err());
    }
}
