//! Element-wise loops over broadcast operands: one function applied to the elements of one, two or more arrays.
//!
//! Dims that are contiguous with each other in every operand are merged, so that most calls are one long row. A row vectorises
//! if each operand has stride 1, or is broadcast along it. An operand with a larger innermost stride is made contiguous first,
//! unless it is tiny. The result is always contiguous, so rows are written in order.

use std::mem::MaybeUninit;

use super::layout::{Axes, Axis, Walk, push_axis};
use super::wide::Widen;
use super::{fill_array, simd};
use crate::{Array, Elem, Element, Num, Result, Shape, SimdTargets};

/// The number of elements from which making an operand contiguous costs less than reading it with a stride.
const COPY_THRESHOLD: usize = 256;

/// The nested loops that visit every element of the result, innermost last. There is at least one axis, and a size is 0 only if
/// there are no elements.
#[derive(Debug)]
pub(super) struct Nest<const N: usize> {
    axes: Axes<N>,
    numel: usize,
}

impl<const N: usize> Nest<N> {
    /// Creates the loops for operands given by their dims and strides, each of which broadcasts to `shape`.
    pub(super) fn new(shape: &[usize], operands: [(&[usize], &[usize]); N]) -> Self {
        let mut axes = Axes::new();
        for (dim, &size) in shape.iter().enumerate() {
            let stride =
                |(dims, strides): (&[usize], &[usize])| match (dim + dims.len()).checked_sub(shape.len()) {
                    Some(own) if dims[own] != 1 => strides[own],
                    _ => 0,
                };
            push_axis(&mut axes, Axis { size, strides: operands.map(stride) });
        }
        if axes.is_empty() {
            axes.push(Axis { size: 1, strides: [1; N] });
        }
        Nest { axes, numel: shape.iter().product() }
    }

    /// Creates the single loop for operands that are contiguous and have the shape of the result.
    #[inline(always)]
    fn dense(numel: usize) -> Self {
        let mut axes = Axes::new();
        axes.push(Axis { size: numel, strides: [1; N] });
        Nest { axes, numel }
    }

    /// Returns which operands should be made contiguous first, because their innermost stride does not vectorise.
    pub(super) fn needs_copy(&self) -> [bool; N] {
        self.axes[self.axes.len() - 1].strides.map(|stride| stride > 1 && self.numel >= COPY_THRESHOLD)
    }

    /// Calls `row(range, at, strides)` for each row of the result in order: its index range in the result, and the index of its
    /// first element and its stride in each operand.
    #[inline(always)]
    pub(super) fn rows(&self, mut row: impl FnMut(std::ops::Range<usize>, [usize; N], [usize; N])) {
        let (inner, outer) = self.axes.split_last().expect("there is at least one axis");
        if self.numel == 0 {
            return;
        }
        // The innermost of the outer axes is a plain loop, because it may have many short rows.
        let single = Axis { size: 1, strides: [0; N] };
        let (middle, outer) = outer.split_last().map_or((&single, outer), |(middle, outer)| (middle, outer));
        let mut start = 0;
        for mut at in Walk::new(outer) {
            for _ in 0..middle.size {
                row(start..start + inner.size, at, inner.strides);
                start += inner.size;
                (0..N).for_each(|i| at[i] += middle.strides[i]);
            }
        }
    }
}

/// The elements of one operand along a row.
#[derive(Clone, Copy)]
pub(super) enum RowView<'a, T> {
    /// One element, broadcast along the row.
    Broadcast(T),
    /// Contiguous elements.
    Contiguous(&'a [T]),
    /// Elements with a stride.
    Strided(&'a [T], usize),
}

impl<'a, T: Copy> RowView<'a, T> {
    /// Creates the view of `len` elements of `data`, starting at index `at`, with stride `step`.
    #[inline(always)]
    pub(super) fn new(data: &'a [T], at: usize, len: usize, step: usize) -> Self {
        match step {
            0 => RowView::Broadcast(data[at]),
            1 => RowView::Contiguous(&data[at..at + len]),
            _ => RowView::Strided(&data[at..], step),
        }
    }

    /// Returns element `i` of the row.
    #[inline(always)]
    pub(super) fn get(&self, i: usize) -> T {
        match *self {
            RowView::Broadcast(x) => x,
            RowView::Contiguous(run) => run[i],
            RowView::Strided(data, step) => data[i * step],
        }
    }
}

/// Returns the shape that two operands broadcast to. They must be broadcastable.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Shape {
    if a == b {
        return Shape::from(a);
    }
    let ndim = a.len().max(b.len());
    let at = |dims: &[usize], i: usize| (i + dims.len()).checked_sub(ndim).map_or(1, |own| dims[own]);
    (0..ndim).map(|i| if at(a, i) == 1 { at(b, i) } else { at(a, i) }).collect()
}

/// The number of narrow elements that are widened, computed and rounded together.
const TILE: usize = 512;

/// An element type for the results of loops that compute `O`: it is `O`, or `O` is rounded to it.
pub(crate) trait Output<O: Copy + Default>: Element {
    /// Returns the elements to write as `O`, or `None` if that is another type.
    fn same_as_result(out: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<O>]>;
    /// Rounds a result to this type.
    fn from_result(x: O) -> Self;
}

impl<T: Element> Output<T::Acc> for T {
    #[inline(always)]
    fn same_as_result(out: &mut [MaybeUninit<T>]) -> Option<&mut [MaybeUninit<T::Acc>]> {
        T::same_as_acc_mut(out)
    }
    #[inline(always)]
    fn from_result(x: T::Acc) -> T {
        T::from_acc(x)
    }
}

/// The result of a comparison.
impl Output<u8> for u8 {
    #[inline(always)]
    fn same_as_result(out: &mut [MaybeUninit<u8>]) -> Option<&mut [MaybeUninit<u8>]> {
        Some(out)
    }
    #[inline(always)]
    fn from_result(x: u8) -> u8 {
        x
    }
}

/// Returns the loops over operands that broadcast to `shape`, and the operands to read: `dense` holds those that were made contiguous
/// first.
#[inline(always)]
pub(super) fn prepare<'a, const N: usize>(
    shape: &[usize],
    operands: [&'a Array; N],
    dense: &'a mut [Option<Array>; N],
) -> Result<(Nest<N>, [&'a Array; N])> {
    let loops = |operands: [&Array; N]| Nest::new(shape, operands.map(|x| (x.dims(), x.strides())));
    if operands.iter().all(|x| x.dims() == shape && x.is_contiguous()) {
        return Ok((Nest::dense(shape.iter().product()), operands));
    }
    let nest = loops(operands);
    let needs_copy = nest.needs_copy();
    if !needs_copy.contains(&true) {
        return Ok((nest, operands));
    }
    for i in (0..N).filter(|&i| needs_copy[i]) {
        dense[i] = Some(operands[i].contiguous()?);
    }
    let dense = &*dense;
    let operands = std::array::from_fn(|i| dense[i].as_ref().unwrap_or(operands[i]));
    Ok((loops(operands), operands))
}

/// A loop over the rows of a nest. It writes every element.
type Loop<'a, A, O, const N: usize> = &'a dyn Fn(&Nest<N>, [&[A]; N], &mut [MaybeUninit<O>]);

/// Runs a loop over operands that broadcast to `shape`, and returns an array of `U`. The loop is a `dyn` parameter, so that the
/// code around it is compiled once for all functions.
///
/// # Safety
/// The loop must write every element.
unsafe fn run<T: Element, U: Output<O>, O: Copy + Default, const N: usize>(
    shape: &[usize],
    operands: [&Array; N],
    run: Loop<'_, T::Acc, O, N>,
) -> Result<Array> {
    let mut dense = [const { None }; N];
    let (nest, operands) = prepare(shape, operands, &mut dense)?;
    let mut reads = [const { None }; N];
    for i in 0..N {
        reads[i] = Some(operands[i].read::<T>()?);
    }
    let data: [&[T]; N] = std::array::from_fn(|i| reads[i].as_ref().map_or(&[][..], |read| read.data()));
    // SAFETY: the caller's loop writes every element of its output: the result, or each tile of it.
    unsafe {
        fill_array::<U>(shape, |out| {
            if let (true, Some(out)) = (T::same_as_acc(&[]).is_some(), U::same_as_result(out)) {
                let data = data.map(|data| T::same_as_acc(data).expect("it is `Some` for every slice"));
                run(&nest, data, out);
            } else {
                run_tiled::<T, U, O, N>(&nest, data, out, run);
            }
        })
    }
}

/// Runs a loop tile by tile: operands are widened into contiguous tiles, and a tile of results is rounded to the output.
///
/// # Safety
/// The loop must write every element.
unsafe fn run_tiled<T: Element, U: Output<O>, O: Copy + Default, const N: usize>(
    nest: &Nest<N>,
    data: [&[T]; N],
    out: &mut [MaybeUninit<U>],
    run: Loop<'_, T::Acc, O, N>,
) {
    let mut wide = [[T::Acc::ZERO; TILE]; N];
    let mut results = [MaybeUninit::<O>::uninit(); TILE];
    let (mut done, mut filled) = (0, 0);
    let flush = |wide: &[[T::Acc; TILE]; N], results: &mut [MaybeUninit<O>], out: &mut [MaybeUninit<U>]| {
        let n = out.len();
        run(&Nest::dense(n), std::array::from_fn(|i| &wide[i][..n]), &mut results[..n]);
        simd::<T, _>(
            #[inline(always)]
            || {
                for (out, x) in out.iter_mut().zip(&*results) {
                    // SAFETY: the loop has written the first `n` results, and `out` has `n` elements.
                    out.write(U::from_result(unsafe { x.assume_init() }));
                }
            },
        )
    };
    nest.rows(|row, at, steps| {
        let mut first = 0;
        while first < row.len() {
            let n = (row.len() - first).min(TILE - filled);
            for i in 0..N {
                let part = RowView::new(data[i], at[i] + first * steps[i], n, steps[i]);
                widen(part, &mut wide[i][filled..filled + n]);
            }
            (first, filled) = (first + n, filled + n);
            if filled == TILE {
                flush(&wide, &mut results, &mut out[done..done + TILE]);
                (done, filled) = (done + TILE, 0);
            }
        }
    });
    flush(&wide, &mut results, &mut out[done..done + filled]);
}

/// Widens the elements of a row.
fn widen<T: Elem>(row: RowView<T>, out: &mut [T::Acc]) {
    match row {
        RowView::Broadcast(x) => out.fill(x.acc()),
        RowView::Contiguous(run) => run.widen(0, out),
        RowView::Strided(..) => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = row.get(i).acc();
            }
        }
    }
}

/// Applies `f` to every element of `x`, widened to the accumulation type.
#[inline(always)]
pub(crate) fn map<T: Element>(x: &Array, f: impl Fn(T::Acc) -> T::Acc + Copy) -> Result<Array> {
    // SAFETY: `map_rows` writes every element.
    unsafe { run::<T, T, T::Acc, 1>(x.dims(), [x], &|nest, [x], out| map_rows(nest, x, out, f)) }
}

/// Applies `f` to every element of `x`.
#[inline(always)]
pub(crate) fn convert<T: Element, U: Element>(x: &Array, f: impl Fn(T) -> U + Copy) -> Result<Array> {
    let mut dense = [None];
    let (nest, [x]) = prepare(x.dims(), [x], &mut dense)?;
    let read = x.read::<T>()?;
    // SAFETY: `map_rows` writes every element.
    unsafe { fill_array::<U>(x.dims(), |out| map_rows(&nest, read.data(), out, f)) }
}

/// Writes `f` of every element. The rows of the nest cover the result, and each is written completely.
#[inline(always)]
fn map_rows<T: Copy + SimdTargets, U: Copy>(
    nest: &Nest<1>,
    data: &[T],
    out: &mut [MaybeUninit<U>],
    f: impl Fn(T) -> U + Copy,
) {
    simd::<T, _>(
        #[inline(always)]
        || {
            nest.rows(
                #[inline(always)]
                |row, at, steps| {
                    let x = RowView::new(data, at[0], row.len(), steps[0]);
                    map_row(&mut out[row], x, f);
                },
            )
        },
    )
}

#[inline(always)]
pub(super) fn map_row<T: Copy, U: Copy>(
    out: &mut [MaybeUninit<U>],
    x: RowView<T>,
    f: impl Fn(T) -> U + Copy,
) {
    match x {
        RowView::Contiguous(x) => {
            for (out, &x) in out.iter_mut().zip(x) {
                out.write(f(x));
            }
        }
        RowView::Broadcast(x) => {
            out.fill(MaybeUninit::new(f(x)));
        }
        RowView::Strided(..) => {
            for (i, out) in out.iter_mut().enumerate() {
                out.write(f(x.get(i)));
            }
        }
    }
}

/// Applies `f` to each pair of elements, broadcast and widened to the accumulation type.
#[inline(always)]
pub(crate) fn zip<T: Element, U: Output<O>, O: Copy + Default>(
    a: &Array,
    b: &Array,
    f: impl Fn(T::Acc, T::Acc) -> O + Copy,
) -> Result<Array> {
    let common;
    let shape = if a.dims() == b.dims() {
        a.dims()
    } else {
        common = broadcast(a.dims(), b.dims());
        &common
    };
    // SAFETY: `zip_rows` writes every element.
    unsafe { run::<T, U, O, 2>(shape, [a, b], &|nest, operands, out| zip_rows(nest, operands, out, f)) }
}

/// Writes `f` of every pair. The rows of the nest cover the result, and each is written completely.
#[inline(always)]
fn zip_rows<A: Copy + SimdTargets, O: Copy>(
    nest: &Nest<2>,
    [a, b]: [&[A]; 2],
    out: &mut [MaybeUninit<O>],
    f: impl Fn(A, A) -> O + Copy,
) {
    simd::<A, _>(
        #[inline(always)]
        || {
            nest.rows(
                #[inline(always)]
                |row, at, steps| {
                    let len = row.len();
                    let a = RowView::new(a, at[0], len, steps[0]);
                    let b = RowView::new(b, at[1], len, steps[1]);
                    zip_row(&mut out[row], a, b, f);
                },
            )
        },
    )
}

#[inline(always)]
fn zip_row<A: Copy, O: Copy>(
    out: &mut [MaybeUninit<O>],
    a: RowView<A>,
    b: RowView<A>,
    f: impl Fn(A, A) -> O + Copy,
) {
    match (a, b) {
        (RowView::Contiguous(a), RowView::Contiguous(b)) => {
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                out.write(f(a, b));
            }
        }
        (RowView::Contiguous(a), RowView::Broadcast(b)) => {
            for (out, &a) in out.iter_mut().zip(a) {
                out.write(f(a, b));
            }
        }
        (RowView::Broadcast(a), RowView::Contiguous(b)) => {
            for (out, &b) in out.iter_mut().zip(b) {
                out.write(f(a, b));
            }
        }
        _ => {
            for (i, out) in out.iter_mut().enumerate() {
                out.write(f(a.get(i), b.get(i)));
            }
        }
    }
}

/// Applies `f` to each triple of elements, broadcast and widened to the accumulation type.
#[inline(always)]
pub(crate) fn zip3<T: Element, U: Output<O>, O: Copy + Default>(
    operands: [&Array; 3],
    f: impl Fn(T::Acc, T::Acc, T::Acc) -> O + Copy,
) -> Result<Array> {
    let shape = broadcast3(operands);
    // SAFETY: `zip3_rows` and `zip3_row` write every element.
    unsafe {
        run::<T, U, O, 3>(&shape, operands, &|nest, [a, b, c], out| {
            zip3_rows(
                nest,
                (a, b, c),
                out,
                #[inline(always)]
                |out, a, b, c| zip3_row(out, a, b, c, f),
            )
        })
    }
}

/// Returns the shape that three operands broadcast to. They must be broadcastable.
pub(super) fn broadcast3([a, b, c]: [&Array; 3]) -> Shape {
    broadcast(&broadcast(a.dims(), b.dims()), c.dims())
}

/// Calls `row` for every row of three operands, which may have different types. It must write the row completely; the rows of the
/// nest cover the result. The loop is compiled for the instruction sets of the second operand.
#[inline(always)]
pub(super) fn zip3_rows<A: Copy, B: Copy + SimdTargets, C: Copy, O: Copy>(
    nest: &Nest<3>,
    (a, b, c): (&[A], &[B], &[C]),
    out: &mut [MaybeUninit<O>],
    row: impl Fn(&mut [MaybeUninit<O>], RowView<A>, RowView<B>, RowView<C>) + Copy,
) {
    simd::<B, _>(
        #[inline(always)]
        || {
            nest.rows(
                #[inline(always)]
                |range, at, steps| {
                    let len = range.len();
                    let a = RowView::new(a, at[0], len, steps[0]);
                    let b = RowView::new(b, at[1], len, steps[1]);
                    let c = RowView::new(c, at[2], len, steps[2]);
                    row(&mut out[range], a, b, c);
                },
            )
        },
    )
}

/// Writes `f` of every triple of a row.
#[inline(always)]
pub(super) fn zip3_row<A: Copy, B: Copy, C: Copy, O: Copy>(
    out: &mut [MaybeUninit<O>],
    a: RowView<A>,
    b: RowView<B>,
    c: RowView<C>,
    f: impl Fn(A, B, C) -> O + Copy,
) {
    use RowView::{Broadcast as One, Contiguous as Run};
    // One loop for each way to broadcast, because each vectorises by itself.
    match (a, b, c) {
        (Run(a), Run(b), Run(c)) => {
            for (((out, &a), &b), &c) in out.iter_mut().zip(a).zip(b).zip(c) {
                out.write(f(a, b, c));
            }
        }
        (Run(a), Run(b), One(c)) => {
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                out.write(f(a, b, c));
            }
        }
        (Run(a), One(b), Run(c)) => {
            for ((out, &a), &c) in out.iter_mut().zip(a).zip(c) {
                out.write(f(a, b, c));
            }
        }
        (One(a), Run(b), Run(c)) => {
            for ((out, &b), &c) in out.iter_mut().zip(b).zip(c) {
                out.write(f(a, b, c));
            }
        }
        (Run(a), One(b), One(c)) => {
            for (out, &a) in out.iter_mut().zip(a) {
                out.write(f(a, b, c));
            }
        }
        (One(a), Run(b), One(c)) => {
            for (out, &b) in out.iter_mut().zip(b) {
                out.write(f(a, b, c));
            }
        }
        (One(a), One(b), Run(c)) => {
            for (out, &c) in out.iter_mut().zip(c) {
                out.write(f(a, b, c));
            }
        }
        _ => {
            for (i, out) in out.iter_mut().enumerate() {
                out.write(f(a.get(i), b.get(i), c.get(i)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes<const N: usize>(shape: &[usize], operands: [(&[usize], &[usize]); N]) -> Vec<Axis<N>> {
        Nest::new(shape, operands).axes.to_vec()
    }

    #[test]
    fn contiguous_dims_are_merged() {
        let dense = (&[2, 3, 4][..], &[12, 4, 1][..]);
        assert_eq!(axes(&[2, 3, 4], [dense, dense]), [Axis { size: 24, strides: [1, 1] }]);
        let row = (&[4][..], &[1][..]);
        let want = [Axis { size: 6, strides: [4, 0] }, Axis { size: 4, strides: [1, 1] }];
        assert_eq!(axes(&[2, 3, 4], [dense, row]), want);
        let scalar = (&[][..], &[][..]);
        assert_eq!(axes(&[2, 3, 4], [dense, scalar]), [Axis { size: 24, strides: [1, 0] }]);
        let column = (&[2, 1, 1][..], &[1, 1, 1][..]);
        let want = [Axis { size: 2, strides: [12, 1] }, Axis { size: 12, strides: [1, 0] }];
        assert_eq!(axes(&[2, 3, 4], [dense, column]), want);
        assert_eq!(axes(&[], [scalar, scalar]), [Axis { size: 1, strides: [1, 1] }]);
        assert_eq!(axes(&[1, 1], [scalar]), [Axis { size: 1, strides: [1] }]);
    }

    #[test]
    fn rows_visit_every_element_in_order() {
        let nest = Nest::new(&[3, 2, 4], [(&[3, 2, 4], &[1, 12, 3]), (&[2, 1], &[1, 1])]);
        let mut seen = Vec::new();
        nest.rows(|row, at, steps| {
            for (i, out) in row.enumerate() {
                assert_eq!(out, seen.len());
                seen.push([at[0] + i * steps[0], at[1] + i * steps[1]]);
            }
        });
        let mut want = Vec::new();
        for i in 0..3 {
            for j in 0..2 {
                for k in 0..4 {
                    want.push([i + 12 * j + 3 * k, j]);
                }
            }
        }
        assert_eq!(seen, want);
        for shape in [&[0][..], &[2, 0, 3], &[0, 1]] {
            let strides = vec![1; shape.len()];
            Nest::new(shape, [(shape, &strides)]).rows(|_, _, _| panic!("there are no rows"));
        }
    }

    /// Elements that are exact in every dtype, so that widening tile by tile must give the same bits as `f64`.
    #[test]
    fn narrow_elements_are_computed_tile_by_tile() {
        use crate::DType;
        use crate::host::cast::cast;

        let doubles = |n: usize| Array::from_vec((0..n).map(|i| (i % 11) as f64).collect(), &[n]).unwrap();
        for dtype in [DType::U8, DType::F16, DType::BF16] {
            for n in [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 300] {
                let check = |x: &Array, y: &Array| {
                    let (narrow_x, narrow_y) = (cast(x, dtype).unwrap(), cast(y, dtype).unwrap());
                    let sum = |x: &Array, y: &Array| {
                        crate::with_elem!(x.dtype(), T => zip::<T, T, _>(x, y, |a, b| a + b)).unwrap()
                    };
                    let double =
                        |x: &Array| crate::with_elem!(x.dtype(), T => map::<T>(x, |a| a + a)).unwrap();
                    let wide = |x: Array| x.copy_to_host_f64().unwrap();
                    assert_eq!(wide(sum(&narrow_x, &narrow_y)), wide(sum(x, y)), "{dtype} {n}");
                    assert_eq!(wide(double(&narrow_x)), wide(double(x)), "{dtype} {n}");
                };
                let x = doubles(n);
                check(&x, &x);
                // Rows that end inside of a tile, a transposed operand, and broadcast ones.
                let matrix = doubles(3 * n).reshape(&[3, n]).unwrap();
                check(&matrix, &x);
                check(&matrix.transpose(0, 1).unwrap(), &doubles(3));
                check(&matrix, &doubles(3).reshape(&[3, 1]).unwrap());
            }
        }
    }

    /// Every combination of contiguous, broadcast and transposed operands, in every dtype.
    #[test]
    fn triples_broadcast_in_every_way() {
        use crate::DType;
        use crate::host::cast::cast;

        let (rows, columns) = (3, TILE + 5);
        let doubles = |dims: &[usize], first: usize| {
            let n = dims.iter().product();
            Array::from_vec((0..n).map(|i| ((i + first) % 5) as f64).collect(), dims).unwrap()
        };
        let forms = |first: usize| {
            [
                doubles(&[rows, columns], first),
                doubles(&[columns], first),
                doubles(&[rows, 1], first),
                doubles(&[], first),
                doubles(&[columns, rows], first).transpose(0, 1).unwrap(),
            ]
        };
        let values = |x: &Array| -> Vec<f64> {
            let x = x.expand(&[rows, columns]).and_then(|x| x.contiguous()).unwrap();
            x.copy_to_host_f64().unwrap()
        };
        for dtype in DType::ALL {
            for (a, b, c) in forms(1).iter().flat_map(|a| {
                forms(2).into_iter().flat_map(move |b| forms(4).map(|c| (a.clone(), b.clone(), c)))
            }) {
                let [x, y, z] = [&a, &b, &c].map(|x| cast(x, dtype).unwrap());
                let got = crate::with_elem!(dtype, T => {
                    zip3::<T, T, _>([&x, &y, &z], |a, b, c| a + b * c * c)
                });
                let each = values(&a).into_iter().zip(values(&b)).zip(values(&c));
                let want: Vec<f64> = each.map(|((a, b), c)| a + b * c * c).collect();
                let label = format!("{dtype} {:?} {:?} {:?}", a.dims(), b.dims(), c.dims());
                assert_eq!(values(&got.unwrap()), want, "{label}");
            }
        }
    }
}
