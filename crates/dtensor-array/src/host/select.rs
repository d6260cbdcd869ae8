//! Selecting values by a condition, or by position in a triangle.

use std::hint::select_unpredictable;
use std::mem::MaybeUninit;

use super::fill_array;
use super::nest::{RowView, broadcast3, map_row, prepare, zip3_row, zip3_rows};
use crate::{Array, Elem, Num, with_elem};
use crate::{DType, Element, Error, Result};

/// Returns an error if a condition is not of dtype `u8`.
fn check_mask(op: &'static str, mask: &Array) -> Result<()> {
    match mask.dtype() {
        DType::U8 => Ok(()),
        dtype => Err(Error::DType { op, dtype, why: "a condition must have dtype u8" }),
    }
}

/// Selects `a` where `cond` is nonzero, else `b`. All three broadcast.
pub(crate) fn where_(cond: &Array, a: &Array, b: &Array) -> Result<Array> {
    check_mask("where", cond)?;
    let (left, right) = (a.dtype(), b.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: "where", left, right });
    }
    with_elem!(left, T => select::<T>(cond, a, b))
}

/// Returns `x` with `value` wherever `mask` is nonzero. The mask broadcasts to the shape of `x`.
pub(crate) fn masked_fill(x: &Array, mask: &Array, value: f64) -> Result<Array> {
    check_mask("masked_fill", mask)?;
    with_elem!(x.dtype(), T => {
        let value = T::from_acc(<T as Elem>::Acc::from_f64(value));
        select::<T>(mask, &Array::from_vec(vec![value], &[])?, x)
    })
}

/// Selects `a` where `cond` is nonzero, else `b`, broadcast. The elements are copied, not widened and rounded.
fn select<T: Element>(cond: &Array, a: &Array, b: &Array) -> Result<Array> {
    let shape = broadcast3([cond, a, b]);
    let mut dense = [const { None }; 3];
    let (nest, [cond, a, b]) = prepare(&shape, [cond, a, b], &mut dense)?;
    let (cond, a, b) = (cond.read::<u8>()?, a.read::<T>()?, b.read::<T>()?);
    let data = (cond.data(), a.data(), b.data());
    // SAFETY: the rows of the nest cover the result, and `select_row` writes each completely.
    unsafe {
        fill_array::<T>(&shape, |out| {
            zip3_rows(
                &nest,
                data,
                out,
                // A closure, because a function that is passed by name is not always inlined.
                #[inline(always)]
                |out, cond, a, b| select_row(out, cond, a, b),
            )
        })
    }
}

#[inline(always)]
fn select_row<T: Elem>(out: &mut [MaybeUninit<T>], cond: RowView<u8>, a: RowView<T>, b: RowView<T>) {
    if let RowView::Broadcast(cond) = cond {
        let selected = if cond != 0 { a } else { b };
        return map_row(
            out,
            selected,
            #[inline(always)]
            |x| x,
        );
    }
    zip3_row(
        out,
        cond,
        a,
        b,
        #[inline(always)]
        |cond, a, b| {
            // A plain `if` would compile to a branch that loads only one of them.
            select_unpredictable(cond != 0, a, b)
        },
    )
}

/// Keeps the lower (or upper) triangle of each matrix in the last two dims, and sets the other elements to 0. The diagonal
/// `diagonal` places right of the main one belongs to either triangle. `x` must have at least two dims.
pub(crate) fn triangle(x: &Array, diagonal: i64, lower: bool, first: (usize, usize)) -> Result<Array> {
    let &[.., rows, columns] = x.dims() else {
        return Err(Error::argument(
            if lower { "tril" } else { "triu" },
            "input tensor must have at least 2 dimensions",
        ));
    };
    let diagonal = diagonal.saturating_add(first.0 as i64).saturating_sub(first.1 as i64);
    with_elem!(x.dtype(), T => triangle_of::<T>(&x.contiguous()?, rows, columns, diagonal, lower))
}

fn triangle_of<T: Element>(
    x: &Array,
    rows: usize,
    columns: usize,
    diagonal: i64,
    lower: bool,
) -> Result<Array> {
    let read = x.read::<T>()?;
    let data = read.data();
    // SAFETY: each row is written in two adjacent parts. If there are no columns there is nothing to write.
    unsafe {
        fill_array::<T>(x.dims(), |out| {
            let data = &data[..out.len()];
            let width = columns.max(1);
            for (i, (out, x)) in out.chunks_exact_mut(width).zip(data.chunks_exact(width)).enumerate() {
                // The first column right of the boundary.
                let first = ((i % rows) as i64).saturating_add(diagonal);
                let first = if lower { first.saturating_add(1) } else { first };
                let at = first.clamp(0, columns as i64) as usize;
                let (left, right) = out.split_at_mut(at);
                let (copied, source, zeroed) =
                    if lower { (left, &x[..at], right) } else { (right, &x[at..], left) };
                for (out, &x) in copied.iter_mut().zip(source) {
                    out.write(x);
                }
                for out in zeroed {
                    out.write(T::default());
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::cast::cast;
    use super::*;
    use crate::host::testing::values;

    fn array(dims: &[usize], dtype: DType, seed: usize) -> Array {
        let n = dims.iter().product();
        let data: Vec<f64> = (0..n).map(|i| ((i * 7 + seed) % 101 + 1) as f64).collect();
        cast(&Array::from_vec(data, dims).unwrap(), dtype).unwrap()
    }

    fn mask(dims: &[usize]) -> Array {
        let n = dims.iter().product();
        Array::from_vec((0..n).map(|i| (i * i % 3) as u8).collect(), dims).unwrap()
    }

    /// Returns the elements of `x`, broadcast to `shape`.
    fn expanded(x: &Array, shape: &[usize]) -> Vec<f64> {
        values(&x.expand(shape).and_then(|t| t.contiguous()).unwrap())
    }

    fn check(cond: &Array, a: &Array, b: &Array, shape: &[usize]) {
        let got = where_(cond, a, b).unwrap();
        assert_eq!((got.dims(), got.dtype()), (shape, a.dtype()));
        let (cond, a, b) = (expanded(cond, shape), expanded(a, shape), expanded(b, shape));
        let want: Vec<f64> = (0..cond.len()).map(|i| if cond[i] != 0.0 { a[i] } else { b[i] }).collect();
        assert_eq!(values(&got), want);
    }

    #[test]
    fn where_broadcasts_all_three() {
        let cases: [([&[usize]; 3], &[usize]); 12] = [
            ([&[5, 33], &[5, 33], &[5, 33]], &[5, 33]),
            ([&[5, 33], &[], &[5, 33]], &[5, 33]),
            ([&[5, 33], &[5, 33], &[1]], &[5, 33]),
            ([&[5, 33], &[], &[]], &[5, 33]),
            ([&[5, 1], &[33], &[5, 33]], &[5, 33]),
            ([&[5, 1], &[5, 1], &[33]], &[5, 33]),
            ([&[33], &[5, 1], &[1, 33]], &[5, 33]),
            ([&[], &[4], &[4]], &[4]),
            ([&[], &[], &[]], &[]),
            ([&[2, 1, 1], &[3, 1], &[4]], &[2, 3, 4]),
            ([&[4, 4], &[2, 3, 4, 4], &[3, 1, 1]], &[2, 3, 4, 4]),
            ([&[1, 3], &[0, 1], &[]], &[0, 3]),
        ];
        for dtype in DType::ALL {
            for ([cond, a, b], shape) in cases {
                check(&mask(cond), &array(a, dtype, 0), &array(b, dtype, 50), shape);
            }
        }
    }

    #[test]
    fn where_takes_views() {
        for (n, m) in [(3, 4), (40, 33)] {
            let cond = mask(&[m, n]).transpose(0, 1).unwrap();
            let a = array(&[n + 1, m + 2], DType::F32, 0)
                .narrow(0, 1, n)
                .and_then(|t| t.narrow(1, 1, m))
                .unwrap();
            let b = array(&[m, n], DType::F32, 9).transpose(0, 1).unwrap();
            check(&cond, &a, &b, &[n, m]);
            check(&mask(&[n, m]), &b, &a, &[n, m]);
        }
    }

    #[test]
    fn masked_fill_in_every_dtype() {
        for dtype in DType::ALL {
            for (dims, mask_dims) in
                [(&[2, 3, 17][..], &[3, 17][..]), (&[4, 5], &[4, 1]), (&[3], &[]), (&[0, 2], &[2])]
            {
                let (x, mask) = (array(dims, dtype, 0), mask(mask_dims));
                let got = masked_fill(&x, &mask, 7.0).unwrap();
                assert_eq!((got.dims(), got.dtype()), (dims, dtype));
                let (on, x) = (expanded(&mask, dims), values(&x));
                let want: Vec<f64> = (0..x.len()).map(|i| if on[i] != 0.0 { 7.0 } else { x[i] }).collect();
                assert_eq!(values(&got), want);
            }
        }
        let x = Array::from_vec(vec![f32::NAN, 1.0, 2.0], &[3]).unwrap();
        let got =
            masked_fill(&x, &Array::from_vec(vec![0u8, 1, 255], &[3]).unwrap(), f64::NEG_INFINITY).unwrap();
        let got: Vec<f32> = got.copy_to_host().unwrap();
        assert!(got[0].is_nan());
        assert_eq!(got[1..], [f32::NEG_INFINITY; 2]);
    }

    #[test]
    fn conditions_must_be_u8() {
        let x = array(&[2], DType::F32, 0);
        assert!(matches!(where_(&x, &x, &x), Err(Error::DType { .. })));
        assert!(matches!(masked_fill(&x, &x, 0.0), Err(Error::DType { .. })));
        let b = array(&[2], DType::F64, 0);
        assert!(matches!(where_(&mask(&[2]), &x, &b), Err(Error::DTypeMismatch { .. })));
    }

    #[test]
    fn triangles() {
        for dtype in DType::ALL {
            for dims in [
                &[4, 4][..],
                &[3, 5],
                &[5, 3],
                &[2, 3, 4, 6],
                &[1, 1],
                &[0, 3],
                &[3, 0],
                &[2, 0, 0],
                &[0, 2, 2],
            ] {
                let &[.., rows, columns] = dims else { unreachable!() };
                for diagonal in [-9, -2, -1, 0, 1, 3, 9, i64::MAX, i64::MIN] {
                    for lower in [true, false] {
                        let x = array(dims, dtype, 0);
                        let got = triangle(&x, diagonal, lower, (0, 0)).unwrap();
                        assert_eq!(got.dims(), dims);
                        for (i, (got, x)) in values(&got).into_iter().zip(values(&x)).enumerate() {
                            let (row, column) = (i / columns % rows, i % columns);
                            let distance = column as i128 - row as i128 - diagonal as i128;
                            let inside = if lower { distance <= 0 } else { distance >= 0 };
                            assert_eq!(
                                got,
                                if inside { x } else { 0.0 },
                                "{dims:?} {diagonal} {lower} at {i}"
                            );
                        }
                    }
                }
            }
        }
        let view = array(&[3, 3], DType::F32, 0).transpose(0, 1).unwrap();
        let x = values(&view);
        let want = [x[0], 0.0, 0.0, x[3], x[4], 0.0, x[6], x[7], x[8]];
        assert_eq!(values(&triangle(&view, 0, true, (0, 0)).unwrap()), want);
        assert!(triangle(&array(&[3], DType::F32, 0), 0, true, (0, 0)).is_err());
    }

    #[test]
    fn triangles_of_shards() {
        let x = array(&[2, 5, 7], DType::F32, 0);
        for (row, rows) in [(0, 5), (0, 2), (2, 3), (4, 1), (5, 0)] {
            for (column, columns) in [(0, 7), (0, 1), (1, 4), (5, 2), (7, 0)] {
                let part =
                    |x: &Array| x.narrow(1, row, rows).and_then(|t| t.narrow(2, column, columns)).unwrap();
                for (diagonal, lower) in [-9, -2, 0, 3, 9, i64::MAX, i64::MIN]
                    .into_iter()
                    .flat_map(|diagonal| [(diagonal, true), (diagonal, false)])
                {
                    let got = triangle(&part(&x), diagonal, lower, (row, column)).unwrap();
                    let want = part(&triangle(&x, diagonal, lower, (0, 0)).unwrap());
                    assert_eq!((got.dims(), values(&got)), (want.dims(), values(&want)));
                }
            }
        }
    }
}
