//! One product of all the rows of two arrays.

use std::mem::MaybeUninit;

use super::{Mat, Plan, matmul, product};
use crate::host::fill_array;
use crate::{Array, Num, Real};
use crate::{DType, Element, Result};

/// Computes `aᵀ · b`, summed over all leading dims: `[..., m]` and `[..., n]` give `[m, n]`. The leading dims must be the
/// same.
pub(crate) fn folded(a: &Array, b: &Array) -> Result<Array> {
    match a.dtype() {
        DType::F32 if by_parts(a, b) => summed::<f32>(a, b),
        DType::F64 if by_parts(a, b) => summed::<f64>(a, b),
        _ => matmul(&rows(a)?.transpose(0, 1)?, &rows(b)?, None),
    }
}

/// All dims but the last as one.
fn rows(x: &Array) -> Result<Array> {
    let width = x.dims()[x.dims().len() - 1];
    let rows = x.dims()[..x.dims().len() - 1].iter().product();
    x.reshape(&[rows, width])
}

/// Whether operands that are no matrices are read where they lie, in several products that are added up: a pass over the
/// result for each, where else what lies apart would be copied.
fn by_parts(a: &Array, b: &Array) -> bool {
    let rank = a.dims().len();
    if rank < 3 || a.numel() == 0 || b.numel() == 0 || (a.is_contiguous() && b.is_contiguous()) {
        return false;
    }
    let (k, m, n) = (a.dims()[rank - 2], a.dims()[rank - 1], b.dims()[rank - 1]);
    let copied = |x: &Array, width: usize| if x.is_contiguous() { 0 } else { k * width };
    m * n <= copied(a, m) + copied(b, n)
}

/// The sum of one product for each index of the dims before the last two.
fn summed<T: Element<Acc = T> + Real>(a: &Array, b: &Array) -> Result<Array> {
    let last = a.dims().len() - 1;
    let (k, m, n) = (a.dims()[last - 1], a.dims()[last], b.dims()[last]);
    let (a_strides, b_strides) = (a.strides(), b.strides());
    let plan = Plan {
        mnk: [m, n, k],
        a: (a_strides[last], a_strides[last - 1]),
        b: (b_strides[last - 1], b_strides[last]),
        batch: (0..last - 1).map(|dim| (a.dims()[dim], a_strides[dim], b_strides[dim])).collect(),
        shape: [m, n].into_iter().collect(),
    };
    let (a, b) = (a.read::<T>()?, b.read::<T>()?);
    let parallelism = plan.parallelism();
    let fill = |out: &mut [MaybeUninit<T>]| {
        let (a, b, out) = (a.data().as_ptr(), b.data().as_ptr(), out.as_mut_ptr().cast::<T>());
        let mut accumulate = false;
        plan.each(|a_at, b_at, _| {
            let a = Mat { ptr: a, rs: plan.a.0, cs: plan.a.1 }.at(a_at);
            let b = Mat { ptr: b, rs: plan.b.0, cs: plan.b.1 }.at(b_at);
            // SAFETY: the plan's strides are those of the arrays being read, and the first product sets every element of the
            // result, which is `m` by `n`.
            unsafe { product(plan.mnk, out, n, accumulate, <T as Num>::ONE, a, b, parallelism) };
            accumulate = true;
        });
    };
    // SAFETY: neither array is empty, so there is a product, and the first one writes all of the result.
    unsafe { fill_array(&plan.shape, fill) }
}
