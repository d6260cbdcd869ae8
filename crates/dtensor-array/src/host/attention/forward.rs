//! The forward pass.

use std::any::TypeId;
use std::mem::MaybeUninit;

use super::super::matmul::{Mat, product};
use super::super::{fill_vec, random, simd};
use super::block::{Block, KEYS, Mask, QUERIES, exponentials, largest};
use super::{AttentionOptions, Masks, Operand, Sizes};
use crate::{Array, Float, Num, Real};
use crate::{Element, Result};

/// Buffers that all heads reuse.
struct Scratch<A> {
    logits: Vec<A>,
    max: [A; QUERIES],
    sum: [A; QUERIES],
}

pub(super) fn forward<T: Float<Acc: Element + Default> + Element>(
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array)> {
    let sizes = Sizes::new(q, v);
    let batch = &q.dims()[..q.dims().len() - 2];
    let heads: usize = batch.iter().product();
    let head_indices = options.head_indices();
    let masks = mask.map(|mask| Masks::<T>::new(mask, q)).transpose()?;
    let (mut q, mut k, mut v) = (Operand::<T>::new(q)?, Operand::<T>::new(k)?, Operand::<T>::new(v)?);
    let zero = <T::Acc as Num>::ZERO;
    let mut scratch = Scratch {
        logits: vec![zero; QUERIES * KEYS.min(sizes.keys)],
        max: [zero; QUERIES],
        sum: [zero; QUERIES],
    };
    let mut lse = vec![zero; heads * sizes.queries];
    let per_head = sizes.queries * sizes.value_width;
    let mut narrow = Vec::<T::Acc>::new();
    let same = TypeId::of::<T>() == TypeId::of::<T::Acc>();
    if !same {
        narrow.resize(per_head, zero);
    }
    let fill = |out: &mut [MaybeUninit<T>]| {
        // Without queries there is nothing to compute.
        for head in 0..if sizes.queries == 0 { 0 } else { heads } {
            let (q, k_head, v) = (q.head(head), k.head(head), v.head(head));
            let k = k.transposed(k_head);
            let mask = masks.as_ref().map(|masks| masks.head(head));
            let out = &mut out[head * per_head..][..per_head];
            let lse = &mut lse[head * sizes.queries..][..sizes.queries];
            let dst = if same { out.as_mut_ptr().cast() } else { narrow.as_mut_ptr() };
            let index = head_indices.get(head).copied().unwrap_or(head);
            // SAFETY: the operands are matrices of these sizes, and `dst` is large enough for the head's output.
            unsafe { one_head(sizes, index, [q, k, v], mask.as_ref(), options, dst, lse, &mut scratch) };
            if !same {
                simd::<T, _>(
                    #[inline(always)]
                    || {
                        for (out, &x) in out.iter_mut().zip(&narrow) {
                            out.write(T::from_acc(x));
                        }
                    },
                );
            }
        }
    };
    // SAFETY: `one_head` writes every element of the head's output.
    let out = unsafe { fill_vec(heads * per_head, fill)? };
    let shape = |tail: &[usize]| -> Vec<usize> { batch.iter().chain(tail).copied().collect() };
    Ok((
        Array::from_vec(out, &shape(&[sizes.queries, sizes.value_width]))?,
        Array::from_vec(lse, &shape(&[sizes.queries]))?,
    ))
}

/// Computes one head, whose index in the full tensor is `head`. Writes all of `out` (`queries` by `value_width`) and `lse`.
///
/// # Safety
/// `q` (`queries` by `width`), the transposed `k` (`width` by `keys`) and `v` (`keys` by `value_width`) must be readable, and
/// `out` writable.
#[allow(clippy::too_many_arguments)]
unsafe fn one_head<T: Float<Acc: Default>>(
    sizes: Sizes,
    head: usize,
    [q, k, v]: [Mat<T::Acc>; 3],
    mask: Option<&Mask<'_, T>>,
    options: &AttentionOptions<'_>,
    out: *mut T::Acc,
    lse: &mut [T::Acc],
    scratch: &mut Scratch<T::Acc>,
) {
    let one = <T::Acc as Num>::ONE;
    let scale = <T::Acc as Num>::from_f64(options.scale);
    for query in (0..sizes.queries).step_by(QUERIES) {
        let queries = QUERIES.min(sizes.queries - query);
        let out = out.wrapping_add(query * sizes.value_width);
        scratch.max.fill(T::Acc::LOWEST);
        scratch.sum.fill(T::Acc::ZERO);
        let end = options.keys_seen(query + queries, sizes.keys);
        for key in (0..end).step_by(KEYS) {
            let block = Block { query, queries, key, keys: KEYS.min(end - key) };
            // SAFETY: the block is inside the matrices. The first block of keys writes `out`, and later ones read it.
            unsafe {
                block.dot_products(q, k, sizes.width, scale, &mut scratch.logits);
                let rows = (key > 0).then_some(out);
                simd::<T, _>(
                    #[inline(always)]
                    || probabilities(block, sizes, head, mask, options, rows, scratch),
                );
                let p = Mat { ptr: scratch.logits.as_ptr(), rs: block.keys, cs: 1 };
                let size = [queries, sizes.value_width, block.keys];
                let stride = sizes.value_width;
                let before = (key > 0).then(|| Mat::of_rows(out, stride));
                product(size, out, stride, before, one, p, v.row(key), gemm_common::Parallelism::None);
            }
        }
        let lse = &mut lse[query..query + queries];
        // SAFETY: the rows are inside the output, and were written if there was a key.
        simd::<T, _>(
            #[inline(always)]
            || unsafe { finish(out, sizes.value_width, end > 0, lse, scratch) },
        );
    }
}

/// Turns the block's logits into probabilities, up to one factor for each query, and updates the running maxima and sums. Rescales
/// `out`, if given, to the new maxima.
///
/// # Safety
/// `out` must have a row of `value_width` initialised elements for each query.
#[inline(always)]
unsafe fn probabilities<T: Float<Acc: Default>>(
    block: Block,
    sizes: Sizes,
    head: usize,
    mask: Option<&Mask<'_, T>>,
    options: &AttentionOptions<'_>,
    out: Option<*mut T::Acc>,
    scratch: &mut Scratch<T::Acc>,
) {
    for (i, row) in scratch.logits.chunks_exact_mut(block.keys).take(block.queries).enumerate() {
        let (seen, hidden) = block.apply_mask(i, row, mask, options);
        hidden.fill(T::Acc::ZERO);
        let before = scratch.max[i];
        let highest = largest(seen);
        let max = if highest > before { highest } else { before };
        // If all logits are −∞ so far, a shift of 0 gives probabilities of 0, and NaN stays NaN.
        let shift = if max == T::Acc::LOWEST { T::Acc::ZERO } else { max };
        let sum = exponentials(seen, shift);
        if options.dropout > 0.0 {
            let first = block.index(i, head, sizes, options);
            random::dropout_run(options.draw, options.dropout, first, seen);
        }
        let factor = (before - shift).exp();
        scratch.max[i] = max;
        scratch.sum[i] = scratch.sum[i] * factor + sum;
        if let Some(out) = out {
            // SAFETY: the caller guarantees the same.
            let out =
                unsafe { std::slice::from_raw_parts_mut(out.add(i * sizes.value_width), sizes.value_width) };
            for x in out {
                *x = *x * factor;
            }
        }
    }
}

/// Divides the output by the sums, and writes the log-sum-exp of each query.
///
/// # Safety
/// `out` must have a row of `width` elements for each element of `lse`, which are initialised if `any` is true.
#[inline(always)]
unsafe fn finish<A: Real>(out: *mut A, width: usize, any: bool, lse: &mut [A], scratch: &Scratch<A>) {
    for (i, lse) in lse.iter_mut().enumerate() {
        let (max, sum) = (scratch.max[i], scratch.sum[i]);
        *lse = if sum == A::ZERO { A::LOWEST } else { max + sum.ln() };
        let factor = A::ONE / sum;
        for j in 0..width {
            // SAFETY: the caller guarantees the same.
            unsafe {
                let x = out.add(i * width + j);
                x.write(if !any || sum == A::ZERO { A::ZERO } else { *x * factor });
            }
        }
    }
}
