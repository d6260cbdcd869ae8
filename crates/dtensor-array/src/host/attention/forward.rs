//! The forward pass.

use std::any::TypeId;
use std::mem::MaybeUninit;

use super::super::matmul::{Mat, product};
use super::super::{fill_vec, random, simd};
use super::block::{Block, KEYS, Mask, QUERIES, exponentials, largest};
use super::{AttentionOptions, Masks, Operand, Sizes};
use crate::{Array, Float, Num, Real};
use crate::{Element, Result};

/// What is kept between heads, so as to be allocated once.
struct Scratch<A> {
    scores: Vec<A>,
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
    let numbers = options.numbers();
    let masks = mask.map(|mask| Masks::<T>::new(mask, q)).transpose()?;
    let (mut q, mut k, mut v) = (Operand::<T>::new(q)?, Operand::<T>::new(k)?, Operand::<T>::new(v)?);
    let zero = <T::Acc as Num>::ZERO;
    let mut scratch = Scratch {
        scores: vec![zero; QUERIES * KEYS.min(sizes.keys)],
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
        // A head without elements has nothing to say; the logarithms start at what nothing sums to.
        for head in 0..if sizes.queries == 0 { 0 } else { heads } {
            let (q, k_head, v) = (q.head(head), k.head(head), v.head(head));
            let k = k.transposed(k_head);
            let mask = masks.as_ref().map(|masks| masks.head(head));
            let out = &mut out[head * per_head..][..per_head];
            let lse = &mut lse[head * sizes.queries..][..sizes.queries];
            let dst = if same { out.as_mut_ptr().cast() } else { narrow.as_mut_ptr() };
            let number = numbers.get(head).copied().unwrap_or(head);
            // SAFETY: the operands are matrices of these sizes; `dst` has room for the head's result.
            unsafe { one_head(sizes, number, [q, k, v], mask.as_ref(), options, dst, lse, &mut scratch) };
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
    // SAFETY: `one_head` writes every element of the head's result.
    let out = unsafe { fill_vec(heads * per_head, fill)? };
    let shape = |tail: &[usize]| -> Vec<usize> { batch.iter().chain(tail).copied().collect() };
    Ok((
        Array::from_vec(out, &shape(&[sizes.queries, sizes.value_width]))?,
        Array::from_vec(lse, &shape(&[sizes.queries]))?,
    ))
}

/// One head, number `head` of the whole: `out` (`queries` by `value_width`) and `lse` are written whole.
///
/// # Safety
/// `q` (`queries` by `width`), `k` (`width` by `keys`, that is transposed) and `v` (`keys` by `value_width`) are in
/// memory that may be read, `out` in memory that may be written.
#[allow(clippy::too_many_arguments)] // one head's share of everything
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
            // SAFETY: the block is inside the matrices; from the second on `out` has been written.
            unsafe {
                block.scores(q, k, sizes.width, scale, &mut scratch.scores);
                let rows = (key > 0).then_some(out);
                simd::<T, _>(
                    #[inline(always)]
                    || probabilities(block, sizes, head, mask, options, rows, scratch),
                );
                let p = Mat { ptr: scratch.scores.as_ptr(), rs: block.keys, cs: 1 };
                let size = [queries, sizes.value_width, block.keys];
                let stride = sizes.value_width;
                product(size, out, stride, key > 0, one, p, v.row(key), gemm_common::Parallelism::None);
            }
        }
        let lse = &mut lse[query..query + queries];
        // SAFETY: the rows are inside the result, and written wherever there was a key.
        simd::<T, _>(
            #[inline(always)]
            || unsafe { finish(out, sizes.value_width, end > 0, lse, scratch) },
        );
    }
}

/// Turns the block's scores into probabilities up to a factor per query, and carries what is known of that factor on;
/// `out`, if there is one, is brought to the new factor.
///
/// # Safety
/// `out` has a row of `value_width` initialised elements for each query.
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
    for (i, row) in scratch.scores.chunks_exact_mut(block.keys).take(block.queries).enumerate() {
        let (seen, hidden) = block.masked(i, row, mask, options);
        hidden.fill(T::Acc::ZERO);
        let before = scratch.max[i];
        let highest = largest(seen);
        let max = if highest > before { highest } else { before };
        // Where all is −∞ so far, −∞ less 0 is what gives zeros (and lets NaN through).
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
            // SAFETY: passed on to the caller.
            let out =
                unsafe { std::slice::from_raw_parts_mut(out.add(i * sizes.value_width), sizes.value_width) };
            for x in out {
                *x = *x * factor;
            }
        }
    }
}

/// Divides by the sums.
///
/// # Safety
/// `out` has a row of `width` elements for each of `lse`, initialised if there were keys.
#[inline(always)]
unsafe fn finish<A: Real>(out: *mut A, width: usize, any: bool, lse: &mut [A], scratch: &Scratch<A>) {
    for (i, lse) in lse.iter_mut().enumerate() {
        let (max, sum) = (scratch.max[i], scratch.sum[i]);
        *lse = if sum == A::ZERO { A::LOWEST } else { max + sum.ln() };
        let factor = A::ONE / sum;
        for j in 0..width {
            // SAFETY: passed on to the caller.
            unsafe {
                let x = out.add(i * width + j);
                x.write(if !any || sum == A::ZERO { A::ZERO } else { *x * factor });
            }
        }
    }
}
