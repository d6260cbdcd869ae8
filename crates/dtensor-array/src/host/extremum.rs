//! The largest or smallest element along a dim, with its index.

use crate::Shape;
use crate::{Array, Elem, Num, with_elem};
use crate::{Element, Result};

use super::simd;

/// Whether to find the maximum or the minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extremum {
    /// The maximum.
    Max,
    /// The minimum.
    Min,
}

/// Finds the maximum or minimum along `dim`, and its index (`i64`). Of equal elements the first counts; if there is a NaN,
/// the first NaN. If `x` is empty along `dim`, as an empty shard may be, the index is −1 and the value is the worst one.
pub(crate) fn extremum(f: Extremum, x: &Array, dim: usize, keepdim: bool) -> Result<(Array, Array)> {
    with_elem!(x.dtype(), T => match f {
        Extremum::Max => along::<T>(x, dim, keepdim, LargestFirst),
        Extremum::Min => along::<T>(x, dim, keepdim, SmallestFirst),
    })
}

/// An order of elements, best first, in which NaN is better than every number.
trait Order: Copy {
    /// Returns the worst value.
    fn worst<A: Num>(self) -> A;
    /// Returns true if `a` is strictly better than `b`.
    fn is_better<A: Num>(self, a: A, b: A) -> bool;
}

#[derive(Clone, Copy)]
struct LargestFirst;
impl Order for LargestFirst {
    #[inline(always)]
    fn worst<A: Num>(self) -> A {
        A::LOWEST
    }
    #[inline(always)]
    fn is_better<A: Num>(self, a: A, b: A) -> bool {
        (a > b) | (a.is_nan() & !b.is_nan())
    }
}

#[derive(Clone, Copy)]
struct SmallestFirst;
impl Order for SmallestFirst {
    #[inline(always)]
    fn worst<A: Num>(self) -> A {
        A::HIGHEST
    }
    #[inline(always)]
    fn is_better<A: Num>(self, a: A, b: A) -> bool {
        (a < b) | (a.is_nan() & !b.is_nan())
    }
}

/// Merges the results of [`extremum`] of several shards into that of the full array. The first dim of both arrays counts
/// the shards, and `indices` are those in the full array. Entries with a negative index are ignored; each element must
/// have an entry that is not.
pub(crate) fn merge(f: Extremum, values: &Array, indices: &Array) -> Result<(Array, Array)> {
    with_elem!(values.dtype(), T => match f {
        Extremum::Max => merge_parts::<T>(values, indices, LargestFirst),
        Extremum::Min => merge_parts::<T>(values, indices, SmallestFirst),
    })
}

fn merge_parts<T: Element>(values: &Array, indices: &Array, order: impl Order) -> Result<(Array, Array)> {
    let shape = &values.dims()[1..];
    let (values, indices) = (values.contiguous()?, indices.contiguous()?);
    let (read, read_indices) = (values.read::<T>()?, indices.read::<i64>()?);
    let n = shape.iter().product::<usize>();
    let (mut best, mut places) = (vec![T::from_acc(order.worst()); n], vec![-1; n]);
    let parts = read.data().chunks_exact(n.max(1)).zip(read_indices.data().chunks_exact(n.max(1)));
    for (values, indices) in parts.take(if n == 0 { 0 } else { values.dims()[0] }) {
        for (((best, place), &x), &at) in best.iter_mut().zip(&mut places).zip(values).zip(indices) {
            let (a, b) = (x.acc(), best.acc());
            let first = *place < 0 || order.is_better(a, b) || (at < *place && !order.is_better(b, a));
            if at >= 0 && first {
                (*best, *place) = (x, at);
            }
        }
    }
    Ok((Array::from_vec(best, shape)?, Array::from_vec(places, shape)?))
}

fn along<T: Element>(x: &Array, dim: usize, keepdim: bool, order: impl Order) -> Result<(Array, Array)> {
    let sizes = x.dims();
    // A scalar accepts the dims of a 1-d array.
    let n = sizes.get(dim).copied().unwrap_or(1);
    let shape = match (sizes.is_empty(), keepdim) {
        (true, _) => Shape::scalar(),
        (_, true) => Shape::from(sizes).with_dim(dim, 1),
        (_, false) => Shape::from(sizes).without_dim(dim),
    };
    let outputs = shape.numel();
    let inner: usize = sizes.iter().skip(dim + 1).product();
    let (mut values, mut indices) = (vec![T::from_acc(order.worst()); outputs], vec![-1; outputs]);
    if outputs > 0 && n > 0 {
        let x = x.contiguous()?;
        let read = x.read::<T>()?;
        let data = &read.data()[..outputs * n];
        if inner == 1 {
            simd::<T, _>(
                #[inline(always)]
                || {
                    for (i, row) in data.chunks_exact(n).enumerate() {
                        (values[i], indices[i]) = first_best(order, row);
                    }
                },
            );
        } else {
            let parts = values.chunks_exact_mut(inner).zip(indices.chunks_exact_mut(inner));
            let mut scratch = Scratch { best: Vec::new(), narrow: Vec::new(), wide: Vec::new() };
            for (rows, (values, indices)) in data.chunks_exact(n * inner).zip(parts) {
                // 32-bit indices vectorise as well as 32-bit elements, so they are used if they are large enough.
                if u32::try_from(n).is_ok() {
                    simd::<T, _>(
                        #[inline(always)]
                        || columns(order, rows, inner, &mut scratch.best, &mut scratch.narrow, |i| i as u32),
                    );
                    widen(&scratch.narrow, indices, |i| i as i64);
                } else {
                    simd::<T, _>(
                        #[inline(always)]
                        || columns(order, rows, inner, &mut scratch.best, &mut scratch.wide, |i| i as i64),
                    );
                    widen(&scratch.wide, indices, |i| i);
                }
                widen(&scratch.best, values, T::from_acc);
            }
        }
    }
    Ok((Array::from_vec(values, &shape)?, Array::from_vec(indices, &shape)?))
}

/// Buffers that calls of [`columns`] reuse.
struct Scratch<A> {
    best: Vec<A>,
    narrow: Vec<u32>,
    wide: Vec<i64>,
}

fn widen<A: Copy, B>(from: &[A], to: &mut [B], cast: impl Fn(A) -> B) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = cast(from);
    }
}

/// The number of elements compared together.
const CHUNK: usize = 64;

/// Returns the best element of a row and its index. Finds the value first, in lanes, and then its index.
#[inline(always)]
fn first_best<T: Elem, O: Order>(order: O, row: &[T]) -> (T, i64) {
    let (chunks, rest) = row.as_chunks::<CHUNK>();
    let mut lanes = [order.worst::<T::Acc>(); CHUNK];
    for chunk in chunks {
        for i in 0..CHUNK {
            let x = chunk[i].acc();
            lanes[i] = if order.is_better(x, lanes[i]) { x } else { lanes[i] };
        }
    }
    let mut best = order.worst::<T::Acc>();
    if !chunks.is_empty() {
        for x in lanes {
            best = if order.is_better(x, best) { x } else { best };
        }
    }
    for &x in rest {
        best = if order.is_better(x.acc(), best) { x.acc() } else { best };
    }
    let mut place = row.len();
    for (c, chunk) in chunks.iter().enumerate() {
        let mut found = false;
        for &x in chunk {
            found |= !order.is_better(best, x.acc());
        }
        if found {
            place = c * CHUNK;
            break;
        }
    }
    place = place.min(chunks.len() * CHUNK);
    while place + 1 < row.len() && order.is_better(best, row[place].acc()) {
        place += 1;
    }
    (row[place], place as i64)
}

/// Finds the best element of each column, and its index, in rows of `w` elements.
#[inline(always)]
fn columns<T: Elem, O: Order, I: Copy>(
    order: O,
    data: &[T],
    w: usize,
    best: &mut Vec<T::Acc>,
    places: &mut Vec<I>,
    index: impl Fn(usize) -> I,
) {
    best.clear();
    places.clear();
    best.extend(data[..w].iter().map(|x| x.acc()));
    places.resize(w, index(0));
    let (best, places) = (&mut best[..w], &mut places[..w]);
    for (i, row) in data.chunks_exact(w).enumerate().skip(1) {
        let here = index(i);
        for j in 0..w {
            let x = row[j].acc();
            let better = order.is_better(x, best[j]);
            best[j] = if better { x } else { best[j] };
            places[j] = if better { here } else { places[j] };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::host::testing::{local, values};

    fn make(dtype: DType, shape: &[usize]) -> Array {
        let n = shape.iter().product::<usize>();
        with_elem!(dtype, T => {
            // Many ties, in no particular order.
            let data = (0..n).map(|i| T::from_acc(Num::from_f64((i * 31 % 17) as f64))).collect();
            Array::from_vec::<T>(data, shape)
        })
        .unwrap()
    }

    fn check(x: &Array) {
        let v = values(x);
        for dim in 0..x.dims().len() {
            let (n, inner) = (x.dims()[dim], x.dims()[dim + 1..].iter().product::<usize>());
            for f in [Extremum::Max, Extremum::Min] {
                let (best, index) = extremum(f, x, dim, true).unwrap();
                assert_eq!((best.dims()[dim], index.dtype(), best.dtype()), (1, DType::I64, x.dtype()));
                assert_eq!(extremum(f, x, dim, false).unwrap().1.dims().len(), x.dims().len() - 1);
                let (best, index) = (values(&best), values(&index));
                for (out, start) in (0..v.len()).filter(|at| at / inner % n == 0).enumerate() {
                    let line: Vec<f64> = (0..n).map(|i| v[start + i * inner]).collect();
                    let mut at = 0;
                    for i in 1..n {
                        let better = if f == Extremum::Max { line[i] > line[at] } else { line[i] < line[at] };
                        if !line[at].is_nan() && (better || line[i].is_nan()) {
                            at = i;
                        }
                    }
                    assert_eq!(index[out], at as f64, "{f:?} {x:?} {dim} {line:?}");
                    assert!(best[out] == line[at] || (best[out].is_nan() && line[at].is_nan()));
                }
            }
        }
    }

    #[test]
    fn the_first_of_equal_elements_is_found() {
        for dtype in DType::ALL {
            for shape in [[1, 1, 1], [2, 3, 5], [4, 70, 2], [1, 2, 64], [3, 1, 200], [130, 2, 3]] {
                let x = make(dtype, &shape);
                check(&x);
                check(&x.permute(&[2, 0, 1]).unwrap());
                check(&x.narrow(2, shape[2] / 2, 1).unwrap());
            }
            check(&make(dtype, &[3, 1]).expand(&[3, 40]).unwrap());
        }
    }

    #[test]
    fn nan_wins_and_infinities_are_numbers() {
        for n in [1, 3, 64, 150] {
            for at in 0..n {
                let mut data = vec![1.0f32; 2 * n];
                data[at] = f32::NAN;
                data[n - 1] = f32::NAN;
                check(&Array::from_vec(data.clone(), &[2, n]).unwrap());
                check(&Array::from_vec(data, &[n, 2]).unwrap());
            }
            check(&Array::from_vec(vec![f32::NEG_INFINITY; n], &[n]).unwrap());
            check(&Array::from_vec(vec![f32::INFINITY; n], &[n]).unwrap());
            check(&Array::from_vec(vec![i64::MIN; n], &[n]).unwrap());
        }
    }

    #[test]
    fn an_empty_dim_gives_index_minus_one() {
        let x = make(DType::F32, &[2, 0]);
        let (value, index) = extremum(Extremum::Max, &x, 1, false).unwrap();
        assert_eq!((values(&value), values(&index)), (vec![f64::NEG_INFINITY; 2], vec![-1.0; 2]));
        let (value, index) = extremum(Extremum::Min, &make(DType::U8, &[0, 2]), 0, true).unwrap();
        assert_eq!((values(&value), values(&index)), (vec![255.0; 2], vec![-1.0; 2]));
        assert_eq!(extremum(Extremum::Max, &x, 0, false).unwrap().0.dims(), [0]);
        let none = make(DType::F32, &[0, 0]);
        assert_eq!(extremum(Extremum::Min, &none, 1, true).unwrap().1.dims(), [0, 1]);
        let (value, index) = extremum(Extremum::Min, &make(DType::U8, &[]), 0, false).unwrap();
        assert_eq!((values(&value), values(&index)), (vec![0.0], vec![0.0]));
    }

    /// Stacks the results of shards of `x` along `dim`, in any order, with indices in the full array.
    fn extremes_of_parts(f: Extremum, x: &Array, dim: usize, parts: &[(usize, usize)]) -> (Array, Array) {
        let (mut all, mut places, mut shape) = (vec![], vec![], vec![parts.len()]);
        for &(start, len) in parts {
            let part = x.narrow(dim, start, len).unwrap();
            let (value, index) = extremum(f, &part, dim, false).unwrap();
            shape.splice(1.., value.dims().iter().copied());
            all.extend(values(&value));
            let index = index.copy_to_host::<i64>().unwrap();
            places.extend(index.into_iter().map(|i| if i < 0 { i } else { i + start as i64 }));
        }
        (local(x.dtype(), &all, &shape), Array::from_vec(places, &shape).unwrap())
    }

    #[test]
    fn extrema_of_shards_merge_into_that_of_the_full_array() {
        let mut arrays: Vec<Array> = DType::ALL
            .iter()
            .flat_map(|&t| [make(t, &[40]), make(t, &[3, 40, 2]), make(t, &[40, 0])])
            .collect();
        for at in [&[][..], &[5], &[12, 13], &[39, 30, 2]] {
            let mut data = vec![f32::NEG_INFINITY; 40];
            data[..20].fill(f32::INFINITY);
            at.iter().for_each(|&i| data[i] = f32::NAN);
            arrays.push(Array::from_vec(data, &[40]).unwrap());
        }
        arrays.push(Array::from_vec(vec![f32::NEG_INFINITY; 40], &[40]).unwrap());
        arrays.push(Array::from_vec(vec![f32::INFINITY; 40], &[40]).unwrap());
        arrays.push(
            Array::from_vec(
                (0..40).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect::<Vec<f64>>(),
                &[40],
            )
            .unwrap(),
        );
        for x in &arrays {
            let dim = x.dims().iter().position(|&size| size == 40).unwrap();
            for parts in [
                &[(0, 40)][..],
                &[(0, 0), (0, 40)],
                &[(0, 13), (13, 13), (26, 1), (27, 0), (27, 13)],
                &[(20, 20), (40, 0), (0, 20)],
            ] {
                for f in [Extremum::Max, Extremum::Min] {
                    let (best, index) = extremes_of_parts(f, x, dim, parts);
                    let (best, index) = merge(f, &best, &index).unwrap();
                    let (want, want_index) = extremum(f, x, dim, false).unwrap();
                    assert_eq!((best.dims(), best.dtype()), (want.dims(), want.dtype()));
                    assert_eq!(values(&index), values(&want_index), "{f:?} {x:?} {parts:?}");
                    let same = |(a, b): (f64, f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    assert!(values(&best).into_iter().zip(values(&want)).all(same), "{f:?} {x:?} {parts:?}");
                }
            }
        }
    }
}
