//! The engine of the reductions: folds any set of dims of a strided array with one [`Fold`].
//!
//! Dims are taken in the order in which they lie in memory, so a transposed array is folded where it is. Then
//! there are two loops: *rows*, where what lies innermost is folded, and *columns*, where it is kept and whole
//! rows are accumulated at once. Both add in a cascade, whose error grows with the logarithm of the number of
//! terms. The order of the additions depends on sizes and strides alone.

use smallvec::SmallVec;

use super::layout::{Axes, Axis, push_axis};
use super::wide::Source;
use super::{copy, fill_vec, simd};
use crate::{Array, Elem, Element, Result, Shape, Vectors};

mod loops;

/// How elements are folded into one. `merge` must be associative and commutative but for rounding. Everything
/// must be `#[inline(always)]`.
pub(crate) trait Fold: Copy {
    /// The element folded.
    type In: Vectors + Copy + Default;
    /// What a fold knows of each output beforehand, such as the mean it measures from; mostly nothing.
    type Ctx: Copy;
    /// What it accumulates in.
    type Acc: Copy;
    /// What it gives.
    type Out: Copy;
    /// The fold of nothing.
    fn identity(self) -> Self::Acc;
    /// The fold of one element.
    fn lift(self, x: Self::In, ctx: Self::Ctx) -> Self::Acc;
    /// The fold of two folds.
    fn merge(self, a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// The result.
    fn finish(self, acc: Self::Acc) -> Self::Out;
}

/// How one set of dims of one array is folded. The same plan can run several folds.
#[derive(Debug)]
pub(crate) struct Plan {
    x: Array,
    dims: SmallVec<[usize; 4]>,
    /// Kept axes but for the innermost of a fold by columns, by descending stride.
    kept: Axes<1>,
    /// Folded axes but for the innermost of a fold by rows, by descending stride.
    folded: Axes<1>,
    /// The length of the innermost axis, which is contiguous.
    run: usize,
    by_rows: bool,
    /// The kept dims that have more than one element, in the order in which results come.
    order: SmallVec<[usize; 4]>,
    outputs: usize,
    count: usize,
}

impl Plan {
    /// Plans a fold of `dims` (ascending) of `x`. A scalar may be addressed as if it had one dim.
    pub(crate) fn new(x: &Array, dims: &[usize]) -> Result<Self> {
        let sizes = x.dims();
        let dims: SmallVec<[usize; 4]> = dims.iter().copied().filter(|&d| d < sizes.len()).collect();
        let count = dims.iter().map(|&d| sizes[d]).product();
        let outputs = (0..sizes.len()).filter(|d| !dims.contains(d)).map(|d| sizes[d]).product();
        let mut plan = Plan {
            x: x.clone(),
            dims,
            kept: Axes::new(),
            folded: Axes::new(),
            run: 1,
            by_rows: true,
            order: SmallVec::new(),
            outputs,
            count,
        };
        if outputs > 0 && count > 0 && !plan.lay_out() {
            plan.x = copy::contiguous(x)?;
            let dense = plan.lay_out();
            debug_assert!(dense);
        }
        Ok(plan)
    }

    /// Sorts the axes. False if no axis is contiguous.
    fn lay_out(&mut self) -> bool {
        let (sizes, strides) = (self.x.dims(), self.x.strides());
        let mut memory_order: SmallVec<[usize; 4]> = (0..sizes.len()).filter(|&d| sizes[d] > 1).collect();
        // Expanded dims (stride 0) count as outermost. The sort is stable.
        memory_order.sort_by_key(|&d| usize::MAX - strides[d].wrapping_sub(1));
        (self.kept, self.folded) = (Axes::new(), Axes::new());
        self.order.clear();
        for &d in &memory_order {
            let axis = Axis { size: sizes[d], strides: [strides[d]] };
            if self.dims.contains(&d) {
                push_axis(&mut self.folded, axis);
            } else {
                push_axis(&mut self.kept, axis);
                self.order.push(d);
            }
        }
        let contiguous = |axes: &Axes<1>| axes.last().is_some_and(|axis| axis.strides == [1]);
        self.by_rows = !contiguous(&self.kept);
        if contiguous(&self.folded) {
            self.run = self.folded.pop().expect("has a last axis").size;
        } else if contiguous(&self.kept) {
            self.run = self.kept.pop().expect("has a last axis").size;
        } else {
            return memory_order.is_empty();
        }
        true
    }

    /// The number of elements folded into each.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Runs a fold that knows nothing beforehand, over elements of type `T`.
    pub(crate) fn run<T: Elem<Acc = F::In>, F: Fold<Ctx = ()>>(&self, f: F) -> Result<Vec<F::Out>> {
        self.run_with::<T, F>(f, &vec![(); self.outputs])
    }

    /// Runs a fold over elements of type `T`: one context and one result per output, in the plan's own order.
    pub(crate) fn run_with<T: Elem<Acc = F::In>, F: Fold>(
        &self,
        f: F,
        ctx: &[F::Ctx],
    ) -> Result<Vec<F::Out>> {
        let read = self.x.read::<T>()?;
        self.fold(f, Source::new(&read.data()), ctx)
    }

    fn fold<F: Fold>(&self, f: F, data: Source<F::In>, ctx: &[F::Ctx]) -> Result<Vec<F::Out>> {
        assert_eq!(ctx.len(), self.outputs);
        if self.outputs == 0 || self.count == 0 {
            return Ok(vec![f.finish(f.identity()); self.outputs]);
        }
        // SAFETY: there is one result per kept index, and both loops write each of them: `rows` one per step
        // of its walk, `columns` `run` per step.
        unsafe {
            fill_vec(self.outputs, |out| {
                if self.by_rows {
                    simd::<F::In, _>(
                        #[inline(always)]
                        || loops::rows(f, self, data, ctx, out),
                    );
                } else {
                    simd::<F::In, _>(
                        #[inline(always)]
                        || loops::columns(f, self, data, ctx, out),
                    );
                }
            })
        }
    }

    /// The shape of the result.
    pub(crate) fn shape(&self, keepdim: bool) -> Shape {
        let sizes = self.x.dims();
        let all = (0..sizes.len()).map(|d| (d, self.dims.contains(&d)));
        all.filter(|&(_, folded)| keepdim || !folded)
            .map(|(d, folded)| if folded { 1 } else { sizes[d] })
            .collect()
    }

    /// Makes an array of results. `shape` is that of [`shape`](Self::shape), with or without dims of one.
    pub(crate) fn array<O: Element>(&self, results: Vec<O>, shape: &[usize]) -> Result<Array> {
        if self.order.is_sorted() {
            return Array::from_vec(results, shape);
        }
        // Results came in memory order: put them in the order of the dims.
        let sizes = self.x.dims();
        let mut strides: SmallVec<[usize; 4]> = SmallVec::from_elem(0, sizes.len());
        let mut stride = 1;
        for &d in self.order.iter().rev() {
            strides[d] = stride;
            stride *= sizes[d];
        }
        let mut axes = Axes::new();
        let mut dense = self.outputs;
        for d in (0..sizes.len()).filter(|d| self.order.contains(d)) {
            dense /= sizes[d];
            push_axis(&mut axes, Axis { size: sizes[d], strides: [strides[d], dense] });
        }
        // SAFETY: the target strides are those of a dense array, so every element is written.
        let data = unsafe { fill_vec(self.outputs, |out| copy::assign(&axes, &results, out))? };
        Array::from_vec(data, shape)
    }
}
