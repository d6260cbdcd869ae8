//! The engine of the reductions: folds any set of dims of a strided array with one [`Fold`].
//!
//! Dims are visited in memory order, so a transposed array is folded without a copy. There are two loops: *rows* folds the
//! innermost dim, and *columns* keeps it and accumulates complete rows. Both sum in a cascade, whose rounding error grows with
//! the logarithm of the number of terms. The order of the additions depends only on sizes and strides.

use smallvec::SmallVec;

use super::layout::{Axes, Axis, push_axis};
use super::wide::Source;
use super::{copy, fill_vec, simd};
use crate::{Array, Elem, Element, Result, Shape, SimdTargets};

mod loops;

/// A way to fold many elements into one result. `merge` must be associative and commutative, except for rounding. All methods
/// must be `#[inline(always)]`.
pub(crate) trait Fold: Copy {
    /// The type of an element.
    type In: SimdTargets + Copy + Default;
    /// An input for each output, such as the mean that a variance needs; mostly `()`.
    type Ctx: Copy;
    /// The type of an accumulator.
    type Acc: Copy;
    /// The type of a result.
    type Out: Copy;
    /// Returns the accumulator of no elements.
    fn identity(self) -> Self::Acc;
    /// Returns the accumulator of one element.
    fn lift(self, x: Self::In, ctx: Self::Ctx) -> Self::Acc;
    /// Merges two accumulators.
    fn merge(self, a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// Turns an accumulator into the result.
    fn finish(self, acc: Self::Acc) -> Self::Out;
}

/// A plan to fold one set of dims of one array. One plan can run several folds.
#[derive(Debug)]
pub(crate) struct Plan {
    x: Array,
    dims: SmallVec<[usize; 4]>,
    /// The axes of the result by descending stride, without the innermost one of a fold by columns.
    outer: Axes<1>,
    /// The folded axes by descending stride, without the innermost one of a fold by rows.
    folded: Axes<1>,
    /// The length of the innermost axis, which is contiguous.
    run: usize,
    by_rows: bool,
    /// The dims of the result that have more than one element, in the order in which the loops produce results.
    order: SmallVec<[usize; 4]>,
    outputs: usize,
    count: usize,
}

impl Plan {
    /// Plans a fold of `dims` (ascending) of `x`. A scalar accepts the dims of a 1-d array.
    pub(crate) fn new(x: &Array, dims: &[usize]) -> Result<Self> {
        let sizes = x.dims();
        let dims: SmallVec<[usize; 4]> = dims.iter().copied().filter(|&d| d < sizes.len()).collect();
        let count = dims.iter().map(|&d| sizes[d]).product();
        let outputs = (0..sizes.len()).filter(|d| !dims.contains(d)).map(|d| sizes[d]).product();
        let mut plan = Plan {
            x: x.clone(),
            dims,
            outer: Axes::new(),
            folded: Axes::new(),
            run: 1,
            by_rows: true,
            order: SmallVec::new(),
            outputs,
            count,
        };
        if outputs > 0 && count > 0 && !plan.sort_axes() {
            plan.x = copy::contiguous(x)?;
            let has_contiguous_axis = plan.sort_axes();
            debug_assert!(has_contiguous_axis);
        }
        Ok(plan)
    }

    /// Sorts the axes by stride and chooses the loop. Returns false if no axis is contiguous.
    fn sort_axes(&mut self) -> bool {
        let (sizes, strides) = (self.x.dims(), self.x.strides());
        let mut memory_order: SmallVec<[usize; 4]> = (0..sizes.len()).filter(|&d| sizes[d] > 1).collect();
        // Broadcast dims (stride 0) count as outermost. The sort is stable.
        memory_order.sort_by_key(|&d| usize::MAX - strides[d].wrapping_sub(1));
        (self.outer, self.folded) = (Axes::new(), Axes::new());
        self.order.clear();
        for &d in &memory_order {
            let axis = Axis { size: sizes[d], strides: [strides[d]] };
            if self.dims.contains(&d) {
                push_axis(&mut self.folded, axis);
            } else {
                push_axis(&mut self.outer, axis);
                self.order.push(d);
            }
        }
        let contiguous = |axes: &Axes<1>| axes.last().is_some_and(|axis| axis.strides == [1]);
        self.by_rows = !contiguous(&self.outer);
        if contiguous(&self.folded) {
            self.run = self.folded.pop().expect("it has a contiguous last axis").size;
        } else if contiguous(&self.outer) {
            self.run = self.outer.pop().expect("it has a contiguous last axis").size;
        } else {
            return memory_order.is_empty();
        }
        true
    }

    /// Returns the number of elements folded into each output.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Runs a fold without contexts over elements of type `T`.
    pub(crate) fn run<T: Elem<Acc = F::In>, F: Fold<Ctx = ()>>(&self, f: F) -> Result<Vec<F::Out>> {
        self.run_with::<T, F>(f, &vec![(); self.outputs])
    }

    /// Runs a fold over elements of type `T`, with one context for each output. Contexts and results are in the plan's order.
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
        // SAFETY: both loops write every output: `rows` one for each step over the outer axes, `columns` `run` for each step.
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

    /// Returns the shape of the result.
    pub(crate) fn shape(&self, keepdim: bool) -> Shape {
        let sizes = self.x.dims();
        let all = (0..sizes.len()).map(|d| (d, self.dims.contains(&d)));
        all.filter(|&(_, folded)| keepdim || !folded)
            .map(|(d, folded)| if folded { 1 } else { sizes[d] })
            .collect()
    }

    /// Creates an array of the results, which are in the plan's order. `shape` must come from [`shape`](Self::shape).
    pub(crate) fn array<O: Element>(&self, results: Vec<O>, shape: &[usize]) -> Result<Array> {
        if self.order.is_sorted() {
            return Array::from_vec(results, shape);
        }
        // The results are in memory order, so they are permuted into the order of the dims.
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
        // SAFETY: the target strides are those of a contiguous array, so every element is written.
        let data = unsafe { fill_vec(self.outputs, |out| copy::assign(&axes, &results, out))? };
        Array::from_vec(data, shape)
    }
}
