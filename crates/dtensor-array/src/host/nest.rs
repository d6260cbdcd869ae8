//! Loops over broadcast operands: one function applied to the elements of one, two or more arrays.
//!
//! Dims that lie behind each other in every operand are merged, so that most calls are one long row. A row
//! whose operands advance by one or stand still is a loop over vectors. An operand whose innermost step is longer
//! is copied row by row first, unless it is tiny. The result is always row by row, so rows are written in order.

use std::mem::MaybeUninit;

use super::layout::{Axes, Axis, Walk, push_axis};
use super::wide::Widen;
use super::{fill_array, simd};
use crate::{Array, Elem, Element, Num, Result, Shape, Vectors};

/// From this many elements on, copying an operand row by row costs less than stepping through it.
const WORTH_A_COPY: usize = 256;

/// The loops that visit every element of the result, innermost last. There is at least one, and its size is
/// 0 only if there are no elements.
#[derive(Debug)]
pub(super) struct Nest<const N: usize> {
    axes: Axes<N>,
    numel: usize,
}

impl<const N: usize> Nest<N> {
    /// For operands given by their dims and strides, each of which broadcasts to `shape`.
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

    /// For operands that all lie row by row in the shape of the result.
    #[inline(always)]
    fn dense(numel: usize) -> Self {
        let mut axes = Axes::new();
        axes.push(Axis { size: numel, strides: [1; N] });
        Nest { axes, numel }
    }

    /// Which operands have an innermost step that no vector loop can take.
    pub(super) fn gathers(&self) -> [bool; N] {
        self.axes[self.axes.len() - 1].strides.map(|step| step > 1 && self.numel >= WORTH_A_COPY)
    }

    /// Calls `row` for each row of the result in order, with the position of its first element in each operand.
    /// The row is given as its place in the result and its steps.
    #[inline(always)]
    pub(super) fn rows(&self, mut row: impl FnMut(std::ops::Range<usize>, [usize; N], [usize; N])) {
        let (inner, outer) = self.axes.split_last().expect("there is at least one axis");
        if self.numel == 0 {
            return;
        }
        // The rows of the innermost of the outer axes are a plain loop: they may be many and short.
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

/// One operand's share of a row.
#[derive(Clone, Copy)]
pub(super) enum Lane<'a, T> {
    /// The same element all along.
    Still(T),
    /// The elements of the row.
    Run(&'a [T]),
    /// Every so manyth element.
    Steps(&'a [T], usize),
}

impl<'a, T: Copy> Lane<'a, T> {
    /// `len` elements of `data` from `at` on, `step` apart.
    #[inline(always)]
    pub(super) fn new(data: &'a [T], at: usize, len: usize, step: usize) -> Self {
        match step {
            0 => Lane::Still(data[at]),
            1 => Lane::Run(&data[at..at + len]),
            _ => Lane::Steps(&data[at..], step),
        }
    }

    /// The element at place `i` of the row.
    #[inline(always)]
    pub(super) fn get(&self, i: usize) -> T {
        match *self {
            Lane::Still(x) => x,
            Lane::Run(run) => run[i],
            Lane::Steps(data, step) => data[i * step],
        }
    }
}

/// The shape two operands broadcast to. They must be broadcastable.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Shape {
    if a == b {
        return Shape::from(a);
    }
    let rank = a.len().max(b.len());
    let at = |dims: &[usize], i: usize| (i + dims.len()).checked_sub(rank).map_or(1, |own| dims[own]);
    (0..rank).map(|i| if at(a, i) == 1 { at(b, i) } else { at(a, i) }).collect()
}

/// Elements of a narrow type that are widened, computed with and rounded together.
const TILE: usize = 512;

/// A kind of result of loops that give `O`: elements that are `O`, or that `O` is rounded to.
pub(crate) trait Output<O: Copy + Default>: Element {
    /// The elements to be written, if they are `O`.
    fn same(out: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<O>]>;
    /// Rounds.
    fn of(x: O) -> Self;
}

impl<T: Element> Output<T::Acc> for T {
    #[inline(always)]
    fn same(out: &mut [MaybeUninit<T>]) -> Option<&mut [MaybeUninit<T::Acc>]> {
        T::same_as_acc_mut(out)
    }
    #[inline(always)]
    fn of(x: T::Acc) -> T {
        T::from_acc(x)
    }
}

/// What a comparison gives.
impl Output<u8> for u8 {
    #[inline(always)]
    fn same(out: &mut [MaybeUninit<u8>]) -> Option<&mut [MaybeUninit<u8>]> {
        Some(out)
    }
    #[inline(always)]
    fn of(x: u8) -> u8 {
        x
    }
}

/// A loop over the rows of a nest. It writes every element.
type Loop<'a, A, O, const N: usize> = &'a dyn Fn(&Nest<N>, [&[A]; N], &mut [MaybeUninit<O>]);

/// Runs a loop over operands that broadcast to `shape`, giving an array of `U`. The loop is a parameter, so that what is around
/// it is compiled once for all functions.
///
/// # Safety
/// The loop must write every element.
unsafe fn run<T: Element, U: Output<O>, O: Copy + Default, const N: usize>(
    shape: &[usize],
    operands: [&Array; N],
    run: Loop<'_, T::Acc, O, N>,
) -> Result<Array> {
    let mut nest = if operands.iter().all(|x| x.dims() == shape && x.is_contiguous()) {
        Nest::dense(shape.iter().product())
    } else {
        Nest::new(shape, operands.map(|x| (x.dims(), x.strides())))
    };
    let gathers = nest.gathers();
    let mut dense = [const { None }; N];
    if gathers.contains(&true) {
        for i in (0..N).filter(|&i| gathers[i]) {
            dense[i] = Some(operands[i].contiguous()?);
        }
    }
    let operands: [&Array; N] = std::array::from_fn(|i| dense[i].as_ref().unwrap_or(operands[i]));
    if gathers.contains(&true) {
        nest = Nest::new(shape, operands.map(|x| (x.dims(), x.strides())));
    }
    let mut reads = [const { None }; N];
    for i in 0..N {
        reads[i] = Some(operands[i].read::<T>()?);
    }
    let data: [&[T]; N] = std::array::from_fn(|i| reads[i].as_ref().map_or(&[][..], |read| read.data()));
    // SAFETY: the caller's loop writes every element of what it is given: all of the result, or each of its tiles.
    unsafe {
        fill_array::<U>(shape, |out| {
            if let (true, Some(out)) = (T::same_as_acc(&[]).is_some(), U::same(out)) {
                let data = data.map(|data| T::same_as_acc(data).expect("asked above"));
                run(&nest, data, out);
            } else {
                tiles::<T, U, O, N>(&nest, data, out, run);
            }
        })
    }
}

/// Runs a loop tile by tile: operands are widened to tiles that lie row by row, the result is rounded from one.
///
/// # Safety
/// The loop must write every element.
unsafe fn tiles<T: Element, U: Output<O>, O: Copy + Default, const N: usize>(
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
                    // SAFETY: the loop has written the first `n` results, and there are `n` elements of `out`.
                    out.write(U::of(unsafe { x.assume_init() }));
                }
            },
        )
    };
    nest.rows(|row, at, steps| {
        let mut first = 0;
        while first < row.len() {
            let n = (row.len() - first).min(TILE - filled);
            for i in 0..N {
                let lane = Lane::new(data[i], at[i] + first * steps[i], n, steps[i]);
                widen(lane, &mut wide[i][filled..filled + n]);
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

/// Widens the elements of a lane.
fn widen<T: Elem>(lane: Lane<T>, out: &mut [T::Acc]) {
    match lane {
        Lane::Still(x) => out.fill(x.acc()),
        Lane::Run(run) => run.widen(0, out),
        Lane::Steps(..) => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = lane.get(i).acc();
            }
        }
    }
}

/// `f` of every element of `x`, in the type that arithmetic is done in.
#[inline(always)]
pub(crate) fn map<T: Element>(x: &Array, f: impl Fn(T::Acc) -> T::Acc + Copy) -> Result<Array> {
    // SAFETY: `map_rows` writes every element.
    unsafe { run::<T, T, T::Acc, 1>(x.dims(), [x], &|nest, [x], out| map_rows(nest, x, out, f)) }
}

/// `f` of every element of `x`.
#[inline(always)]
pub(crate) fn convert<T: Element, U: Element>(x: &Array, f: impl Fn(T) -> U + Copy) -> Result<Array> {
    let mut nest = Nest::new(x.dims(), [(x.dims(), x.strides())]);
    let dense = nest.gathers()[0].then(|| x.contiguous()).transpose()?;
    let x = dense.as_ref().unwrap_or(x);
    if dense.is_some() {
        nest = Nest::new(x.dims(), [(x.dims(), x.strides())]);
    }
    let read = x.read::<T>()?;
    // SAFETY: `map_rows` writes every element.
    unsafe { fill_array::<U>(x.dims(), |out| map_rows(&nest, read.data(), out, f)) }
}

/// Writes `f` of every element: the rows of the nest make up the whole result, and each is written from end to end.
#[inline(always)]
fn map_rows<T: Copy + Vectors, U: Copy>(
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
                    let x = Lane::new(data, at[0], row.len(), steps[0]);
                    map_row(&mut out[row], x, f);
                },
            )
        },
    )
}

#[inline(always)]
fn map_row<T: Copy, U: Copy>(out: &mut [MaybeUninit<U>], x: Lane<T>, f: impl Fn(T) -> U + Copy) {
    match x {
        Lane::Run(x) => {
            for (out, &x) in out.iter_mut().zip(x) {
                out.write(f(x));
            }
        }
        Lane::Still(x) => {
            out.fill(MaybeUninit::new(f(x)));
        }
        Lane::Steps(..) => {
            for (i, out) in out.iter_mut().enumerate() {
                out.write(f(x.get(i)));
            }
        }
    }
}

/// `f` of each pair of elements, broadcast, in the types that arithmetic is done in.
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

/// Writes `f` of every pair: the rows of the nest make up the whole result, and each is written from end to end.
#[inline(always)]
fn zip_rows<A: Copy + Vectors, O: Copy>(
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
                    let a = Lane::new(a, at[0], len, steps[0]);
                    let b = Lane::new(b, at[1], len, steps[1]);
                    zip_row(&mut out[row], a, b, f);
                },
            )
        },
    )
}

#[inline(always)]
fn zip_row<A: Copy, O: Copy>(
    out: &mut [MaybeUninit<O>],
    a: Lane<A>,
    b: Lane<A>,
    f: impl Fn(A, A) -> O + Copy,
) {
    match (a, b) {
        (Lane::Run(a), Lane::Run(b)) => {
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                out.write(f(a, b));
            }
        }
        (Lane::Run(a), Lane::Still(b)) => {
            for (out, &a) in out.iter_mut().zip(a) {
                out.write(f(a, b));
            }
        }
        (Lane::Still(a), Lane::Run(b)) => {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn axes<const N: usize>(shape: &[usize], operands: [(&[usize], &[usize]); N]) -> Vec<Axis<N>> {
        Nest::new(shape, operands).axes.to_vec()
    }

    #[test]
    fn dims_merge_where_they_can() {
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
}
