//! The product `aᵀ · b` of all rows of two arrays, as in the gradient of a linear layer's weight.

use std::mem::MaybeUninit;

use super::{Mat, Plan, matmul, product};
use crate::host::cast::cast;
use crate::host::fill_array;
use crate::{Array, Num, Real};
use crate::{DType, Element, Result};

/// Computes `aᵀ · b`, summed over all leading dims: `[..., m]` and `[..., n]` give `[m, n]`. The leading dims must be the
/// same. The result has dtype `out`: that of the arrays, or a wider one.
pub(crate) fn folded(a: &Array, b: &Array, out: DType) -> Result<Array> {
    let product = match a.dtype() {
        DType::F32 if avoids_copies(a, b) => sum_of_products::<f32>(a, b),
        DType::F64 if avoids_copies(a, b) => sum_of_products::<f64>(a, b),
        _ => matmul(&flatten_rows(a)?.transpose(0, 1)?, &flatten_rows(b)?, None),
    };
    cast(&product?, out)
}

/// Merges all dims except the last into one.
pub(crate) fn flatten_rows(x: &Array) -> Result<Array> {
    let width = x.dims()[x.dims().len() - 1];
    let rows = x.dims()[..x.dims().len() - 1].iter().product();
    x.reshape(&[rows, width])
}

/// Returns true if [`sum_of_products`] is cheaper than one product. It takes one more pass over the result for each matrix, but
/// one product must first copy operands that are not contiguous.
fn avoids_copies(a: &Array, b: &Array) -> bool {
    let ndim = a.dims().len();
    if ndim < 3 || a.numel() == 0 || b.numel() == 0 || (a.is_contiguous() && b.is_contiguous()) {
        return false;
    }
    let (k, m, n) = (a.dims()[ndim - 2], a.dims()[ndim - 1], b.dims()[ndim - 1]);
    let copied = |x: &Array, width: usize| if x.is_contiguous() { 0 } else { k * width };
    m * n <= copied(a, m) + copied(b, n)
}

/// Computes one product for each index of the dims before the last two, and sums them in place.
fn sum_of_products<T: Element<Acc = T> + Real>(a: &Array, b: &Array) -> Result<Array> {
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
        let mut added = None;
        plan.each(|a_at, b_at, _| {
            let a = Mat { ptr: a, rs: plan.a.0, cs: plan.a.1 }.at(a_at);
            let b = Mat { ptr: b, rs: plan.b.0, cs: plan.b.1 }.at(b_at);
            // SAFETY: the plan has the strides of the arrays being read, and the first product writes every element of the
            // `m` by `n` result.
            unsafe { product(plan.mnk, out, n, added, <T as Num>::ONE, a, b, parallelism) };
            added = Some(Mat::of_rows(out, n));
        });
    };
    // SAFETY: neither array is empty, so there is at least one product, and the first one writes every element.
    unsafe { fill_array(&plan.shape, fill) }
}
