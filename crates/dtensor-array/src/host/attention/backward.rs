//! The backward pass.

use std::any::TypeId;

use super::super::matmul::{Mat, product};
use super::super::{random, simd};
use super::block::{Block, KEYS, Mask, QUERIES, exponentials};
use super::{AttentionOptions, Masks, Operand, Sizes};
use crate::{Array, Float, Num, Real};
use crate::{Element, Result};

/// The results of the forward pass, and the gradient of its output.
pub(super) struct Saved<'a> {
    pub(super) grad: &'a Array,
    pub(super) out: &'a Array,
    /// The log-sum-exp, contiguous.
    pub(super) lse: &'a Array,
}

/// The operands of one head, some of them transposed as the products need them.
struct Head<'a, A> {
    q: Mat<A>,
    k: Mat<A>,
    k_t: Mat<A>,
    v_t: Mat<A>,
    grad: Mat<A>,
    out: Mat<A>,
    lse: &'a [A],
}

pub(super) fn backward<T: Float<Acc: Element + Default> + Element>(
    saved: Saved<'_>,
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array, Array)> {
    let sizes = Sizes::new(q, v);
    let shapes = [q.dims(), k.dims(), v.dims()];
    let heads: usize = q.dims()[..q.dims().len() - 2].iter().product();
    let head_indices = options.head_indices();
    let masks = mask.map(|mask| Masks::<T>::new(mask, q)).transpose()?;
    let (mut q, mut k, mut v) = (Operand::<T>::new(q)?, Operand::<T>::new(k)?, Operand::<T>::new(v)?);
    let (mut grad, mut out) = (Operand::<T>::new(saved.grad)?, Operand::<T>::new(saved.out)?);
    let lse = saved.lse.read::<T::Acc>()?;
    let zero = <T::Acc as Num>::ZERO;
    let per_head = [sizes.queries * sizes.width, sizes.keys * sizes.width, sizes.keys * sizes.value_width];
    let mut grads = per_head.map(|n| vec![T::default(); heads * n]);
    let same = TypeId::of::<T>() == TypeId::of::<T::Acc>();
    let mut wide = per_head.map(|n| vec![zero; if same { 0 } else { n }]);
    let block = QUERIES * KEYS.min(sizes.keys);
    let mut scratch = [vec![zero; block], vec![zero; block]];
    // Without queries or keys all gradients are zero.
    let count = if sizes.queries * sizes.keys == 0 { 0 } else { heads };
    for head in 0..count {
        let (k_head, v_head) = (k.head(head), v.head(head));
        let operands = Head {
            q: q.head(head),
            k: k_head,
            k_t: k.transposed(k_head),
            v_t: v.transposed(v_head),
            grad: grad.head(head),
            out: out.head(head),
            lse: &lse.data()[head * sizes.queries..][..sizes.queries],
        };
        let mask = masks.as_ref().map(|masks| masks.head(head));
        let mut dst = [std::ptr::null_mut(); 3];
        for i in 0..3 {
            wide[i].fill(zero);
            dst[i] =
                if same { grads[i][head * per_head[i]..].as_mut_ptr().cast() } else { wide[i].as_mut_ptr() };
        }
        let index = head_indices.get(head).copied().unwrap_or(head);
        // SAFETY: the operands are matrices of these sizes. The destinations are large enough and zero.
        unsafe { one_head(sizes, index, &operands, mask.as_ref(), options, dst, &mut scratch) };
        if !same {
            for ((grads, wide), n) in grads.iter_mut().zip(&wide).zip(per_head) {
                simd::<T, _>(
                    #[inline(always)]
                    || {
                        for (grad, &x) in grads[head * n..].iter_mut().zip(wide) {
                            *grad = T::from_acc(x);
                        }
                    },
                );
            }
        }
    }
    let [dq, dk, dv] = grads;
    Ok((Array::from_vec(dq, shapes[0])?, Array::from_vec(dk, shapes[1])?, Array::from_vec(dv, shapes[2])?))
}

/// Computes one head, whose index in the full tensor is `head`. Adds its gradients to `dq`, `dk` and `dv`.
///
/// # Safety
/// The operands must be readable. `dq`, `dk` and `dv` must be initialised, writable contiguous matrices of the sizes of `q`, `k`
/// and `v`.
unsafe fn one_head<T: Float<Acc: Default>>(
    sizes: Sizes,
    head: usize,
    x: &Head<'_, T::Acc>,
    mask: Option<&Mask<'_, T>>,
    options: &AttentionOptions<'_>,
    [dq, dk, dv]: [*mut T::Acc; 3],
    [p, ds]: &mut [Vec<T::Acc>; 2],
) {
    let Sizes { width, value_width, .. } = sizes;
    let one = <T::Acc as Num>::ONE;
    let scale = <T::Acc as Num>::from_f64(options.scale);
    for query in (0..sizes.queries).step_by(QUERIES) {
        let queries = QUERIES.min(sizes.queries - query);
        let mut dots = [T::Acc::ZERO; QUERIES];
        for (i, dot) in dots[..queries].iter_mut().enumerate() {
            // SAFETY: the rows are inside both matrices.
            *dot = simd::<T, _>(
                #[inline(always)]
                || unsafe { row_dot(x.grad.row(query + i), x.out.row(query + i), value_width) },
            );
        }
        let end = options.keys_seen(query + queries, sizes.keys);
        for key in (0..end).step_by(KEYS) {
            let block = Block { query, queries, key, keys: KEYS.min(end - key) };
            // SAFETY: the block is inside the matrices.
            unsafe {
                block.dot_products(x.q, x.k_t, width, scale, p);
                block.dot_products(x.grad, x.v_t, value_width, one, ds);
                simd::<T, _>(
                    #[inline(always)]
                    || logit_gradients(block, sizes, head, mask, options, x.lse, &dots, p, ds),
                );
                let p = Mat { ptr: p.as_ptr(), rs: block.keys, cs: 1 };
                let ds = Mat { ptr: ds.as_ptr(), ..p };
                let add = |size, dst: *mut T::Acc, row, a, b| {
                    let [_, n, _]: [usize; 3] = size;
                    let dst = dst.add(row * n);
                    product(
                        size,
                        dst,
                        n,
                        Some(Mat::of_rows(dst, n)),
                        one,
                        a,
                        b,
                        gemm_common::Parallelism::None,
                    )
                };
                add([block.keys, value_width, queries], dv, key, p.t(), x.grad.row(query));
                add([block.keys, width, queries], dk, key, ds.t(), x.q.row(query));
                add([queries, width, block.keys], dq, query, ds, x.k.row(key));
            }
        }
    }
}

/// Replaces the logits in `p` by the probabilities (with dropout), and the gradients of the probabilities in `ds` by the gradients
/// of the unscaled logits.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn logit_gradients<T: Float>(
    block: Block,
    sizes: Sizes,
    head: usize,
    mask: Option<&Mask<'_, T>>,
    options: &AttentionOptions<'_>,
    lse: &[T::Acc],
    dots: &[T::Acc],
    p: &mut [T::Acc],
    ds: &mut [T::Acc],
) {
    let scale = <T::Acc as Num>::from_f64(options.scale);
    let rows = p.chunks_exact_mut(block.keys).zip(ds.chunks_exact_mut(block.keys)).take(block.queries);
    for (i, (p, ds)) in rows.enumerate() {
        let (p, hidden) = block.apply_mask(i, p, mask, options);
        hidden.fill(T::Acc::ZERO);
        let (ds, hidden) = ds.split_at_mut(p.len());
        hidden.fill(T::Acc::ZERO);
        let lse = lse[block.query + i];
        // If a query attends to no key, its logits are −∞, and a shift of 0 makes their exponentials 0.
        exponentials(p, if lse == T::Acc::LOWEST { T::Acc::ZERO } else { lse });
        let first = block.index(i, head, sizes, options);
        if options.dropout > 0.0 {
            random::dropout_run(options.draw, options.dropout, first, ds);
        }
        let dot = dots[i];
        for (ds, &p) in ds.iter_mut().zip(&*p) {
            *ds = p * (*ds - dot) * scale;
        }
        if options.dropout > 0.0 {
            random::dropout_run(options.draw, options.dropout, first, p);
        }
    }
}

/// Computes the dot product of the first rows of two matrices.
///
/// # Safety
/// The rows, of `width` elements, must be readable.
#[inline(always)]
unsafe fn row_dot<A: Real>(a: Mat<A>, b: Mat<A>, width: usize) -> A {
    const LANES: usize = 16;
    let mut lanes = [A::ZERO; LANES];
    // SAFETY: the caller guarantees the same.
    unsafe {
        if a.cs == 1 && b.cs == 1 {
            let (a, b) = (std::slice::from_raw_parts(a.ptr, width), std::slice::from_raw_parts(b.ptr, width));
            let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
            for (a, b) in a.iter().zip(b) {
                for i in 0..LANES {
                    lanes[i] = a[i].mul_add(b[i], lanes[i]);
                }
            }
            for (i, (&a, &b)) in a_rest.iter().zip(b_rest).enumerate() {
                lanes[i] = a.mul_add(b, lanes[i]);
            }
        } else {
            for i in 0..width {
                let lane = &mut lanes[i % LANES];
                *lane = (*a.ptr.add(i * a.cs)).mul_add(*b.ptr.add(i * b.cs), *lane);
            }
        }
    }
    lanes.iter().fold(A::ZERO, |sum, &lane| sum + lane)
}
