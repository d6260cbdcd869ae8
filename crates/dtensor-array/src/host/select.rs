//! Choosing between values by a condition, or by position.

use std::hint::select_unpredictable;
use std::mem::MaybeUninit;

use super::nest::{Lane, Nest, broadcast};
use super::{fill_array, simd};
use crate::{Array, Elem, Num, with_elem};
use crate::{DType, Element, Error, Result};

fn logical(op: &'static str, mask: &Array) -> Result<()> {
    match mask.dtype() {
        DType::U8 => Ok(()),
        dtype => Err(Error::DType { op, dtype, why: "a condition has dtype u8" }),
    }
}

/// `a` where `cond` is not 0, else `b`; all three broadcast.
pub(crate) fn where_(cond: &Array, a: &Array, b: &Array) -> Result<Array> {
    logical("where", cond)?;
    let (left, right) = (a.dtype(), b.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: "where", left, right });
    }
    with_elem!(left, T => choose::<T>(cond, Choice::Array(a.clone()), Choice::Array(b.clone())))
}

/// `x` with `value` wherever `mask`, expanded to the shape of `x`, is not 0.
pub(crate) fn masked_fill(x: &Array, mask: &Array, value: f64) -> Result<Array> {
    logical("masked_fill", mask)?;
    with_elem!(x.dtype(), T => {
        let value = T::from_acc(<T as Elem>::Acc::from_f64(value));
        choose::<T>(mask, Choice::Number(value), Choice::Array(x.clone()))
    })
}

/// An operand of [`choose`]: an array, or one number.
#[derive(Clone, Debug)]
enum Choice<T> {
    /// An array.
    Array(Array),
    /// One number, wherever it is looked at.
    Number(T),
}

impl<T> Choice<T> {
    fn layout(&self) -> (&[usize], &[usize]) {
        match self {
            Choice::Array(x) => (x.dims(), x.strides()),
            Choice::Number(_) => (&[], &[]),
        }
    }

    fn settle(self, gathers: bool) -> Result<Self> {
        Ok(match self {
            Choice::Array(x) if gathers => Choice::Array(x.contiguous()?),
            other => other,
        })
    }
}

/// `a` where `cond` is not 0, else `b`; broadcast.
fn choose<T: Element>(cond: &Array, a: Choice<T>, b: Choice<T>) -> Result<Array> {
    let shape = broadcast(&broadcast(cond.dims(), a.layout().0), b.layout().0);
    let mut nest = Nest::new(&shape, [(cond.dims(), cond.strides()), a.layout(), b.layout()]);
    let (mut cond, mut a, mut b) = (cond.clone(), a, b);
    let gathers = nest.gathers();
    if gathers.contains(&true) {
        cond = if gathers[0] { cond.contiguous()? } else { cond };
        a = a.settle(gathers[1])?;
        b = b.settle(gathers[2])?;
        nest = Nest::new(&shape, [(cond.dims(), cond.strides()), a.layout(), b.layout()]);
    }
    let cond = cond.read::<u8>()?;
    let cond = cond.data();
    let [a, b] = [&a, &b].map(|x| match x {
        Choice::Array(x) => x.read::<T>().map(|read| (Some(read), T::default())),
        Choice::Number(x) => Ok((None, *x)),
    });
    let (a, b) = (a?, b?);
    let a = a.0.as_ref().map_or(std::slice::from_ref(&a.1), |read| read.data());
    let b = b.0.as_ref().map_or(std::slice::from_ref(&b.1), |read| read.data());
    // SAFETY: the rows of the nest make up the whole result, and each is written from end to end.
    unsafe {
        fill_array::<T>(&shape, |out| {
            simd::<T, _>(
                #[inline(always)]
                || {
                    nest.rows(
                        #[inline(always)]
                        |row, at, steps| {
                            let len = row.len();
                            let cond = Lane::new(cond, at[0], len, steps[0]);
                            let a = Lane::new(a, at[1], len, steps[1]);
                            let b = Lane::new(b, at[2], len, steps[2]);
                            choose_row(&mut out[row], cond, a, b);
                        },
                    )
                },
            )
        })
    }
}

#[inline(always)]
fn choose_row<T: Elem>(out: &mut [MaybeUninit<T>], cond: Lane<u8>, a: Lane<T>, b: Lane<T>) {
    match (cond, a, b) {
        (Lane::Run(cond), Lane::Run(a), Lane::Run(b)) => {
            for (((out, &cond), &a), &b) in out.iter_mut().zip(cond).zip(a).zip(b) {
                // A plain `if` would load only one of them, by a branch.
                out.write(select_unpredictable(cond != 0, a, b));
            }
        }
        (Lane::Run(cond), Lane::Still(a), Lane::Run(b)) => {
            for ((out, &cond), &b) in out.iter_mut().zip(cond).zip(b) {
                out.write(if cond != 0 { a } else { b });
            }
        }
        (Lane::Run(cond), Lane::Run(a), Lane::Still(b)) => {
            for ((out, &cond), &a) in out.iter_mut().zip(cond).zip(a) {
                out.write(if cond != 0 { a } else { b });
            }
        }
        (Lane::Run(cond), Lane::Still(a), Lane::Still(b)) => {
            for (out, &cond) in out.iter_mut().zip(cond) {
                out.write(if cond != 0 { a } else { b });
            }
        }
        (Lane::Still(cond), ..) => match if cond != 0 { a } else { b } {
            Lane::Run(run) => {
                for (out, &x) in out.iter_mut().zip(run) {
                    out.write(x);
                }
            }
            lane => {
                for (i, out) in out.iter_mut().enumerate() {
                    out.write(lane.get(i));
                }
            }
        },
        _ => {
            for (i, out) in out.iter_mut().enumerate() {
                out.write(if cond.get(i) != 0 { a.get(i) } else { b.get(i) });
            }
        }
    }
}

/// The lower triangle of each matrix in the last two dims, or the upper one: elements up to `diagonal` places
/// right of the main diagonal, or from there on; the others become 0. `x` has at least two dims. Where it is a part
/// of larger matrices, `first` says which row and column of those its first element is in.
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
    // SAFETY: each row is written in two parts that meet; rows without columns have nothing to write.
    unsafe {
        fill_array::<T>(x.dims(), |out| {
            let data = &data[..out.len()];
            let width = columns.max(1);
            for (i, (out, x)) in out.chunks_exact_mut(width).zip(data.chunks_exact(width)).enumerate() {
                // The first column on the far side of the boundary.
                let first = ((i % rows) as i64).saturating_add(diagonal);
                let first = if lower { first.saturating_add(1) } else { first };
                let at = first.clamp(0, columns as i64) as usize;
                let (left, right) = out.split_at_mut(at);
                let (kept, source, cleared) =
                    if lower { (left, &x[..at], right) } else { (right, &x[at..], left) };
                for (out, &x) in kept.iter_mut().zip(source) {
                    out.write(x);
                }
                for out in cleared {
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

    /// `x` expanded to `shape` and copied.
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
    fn conditions_must_be_logical() {
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
                            let kept = if lower { distance <= 0 } else { distance >= 0 };
                            assert_eq!(got, if kept { x } else { 0.0 }, "{dims:?} {diagonal} {lower} at {i}");
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
    fn triangles_of_parts() {
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
