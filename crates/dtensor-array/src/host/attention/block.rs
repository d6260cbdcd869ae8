//! The logits and probabilities of one block of queries and keys.

use super::super::matmul::{Mat, product};
use super::{AttentionOptions, Sizes};
use crate::{Float, Num, Real};

/// The number of queries per block.
pub(super) const QUERIES: usize = 64;
/// The number of keys per block.
pub(super) const KEYS: usize = 512;

/// The number of independent accumulators of a reduction.
const LANES: usize = 32;

/// The elements of a mask.
#[derive(Clone, Copy)]
pub(super) enum MaskData<'a, T> {
    /// Nonzero where a query attends to a key.
    Bytes(&'a [u8]),
    /// Added to the logits.
    Added(&'a [T]),
}

/// The mask of one head.
#[derive(Clone, Copy)]
pub(super) struct Mask<'a, T> {
    pub(super) data: MaskData<'a, T>,
    /// The offset of the head.
    pub(super) at: usize,
    /// The stride from one query to the next.
    pub(super) row: usize,
    /// The stride from one key to the next: 0 or 1.
    pub(super) column: usize,
}

impl<T: Float> Mask<'_, T> {
    /// Masks the logits of a query, for the keys starting at `key`.
    #[inline(always)]
    fn apply(&self, query: usize, key: usize, logits: &mut [T::Acc]) {
        if logits.is_empty() {
            return;
        }
        let at = self.at + query * self.row + key * self.column;
        let hide = |hidden: bool, logit: &mut T::Acc| {
            if hidden {
                *logit = T::Acc::LOWEST;
            }
        };
        match (self.data, self.column) {
            (MaskData::Bytes(data), 0) => {
                let hidden = data[at] == 0;
                logits.iter_mut().for_each(|logit| hide(hidden, logit));
            }
            (MaskData::Bytes(data), _) => {
                for (logit, &visible) in logits.iter_mut().zip(&data[at..]) {
                    *logit = if visible == 0 { T::Acc::LOWEST } else { *logit };
                }
            }
            (MaskData::Added(data), 0) => {
                let term = data[at].acc();
                logits.iter_mut().for_each(|logit| *logit = *logit + term);
            }
            (MaskData::Added(data), _) => {
                for (logit, term) in logits.iter_mut().zip(&data[at..]) {
                    *logit = *logit + term.acc();
                }
            }
        }
    }
}

/// A block of queries and keys.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// The first query.
    pub(super) query: usize,
    /// The number of queries.
    pub(super) queries: usize,
    /// The first key.
    pub(super) key: usize,
    /// The number of keys.
    pub(super) keys: usize,
}

impl Block {
    /// Computes `out = scale × left × right` for the block's rows of `left` and columns of `right`. `width` is the inner size, and
    /// a row of `out` has one element for each key of the block.
    ///
    /// # Safety
    /// The block's rows of `left` and columns of `right` must be readable, and `out` must be large enough.
    pub(super) unsafe fn dot_products<A: Real + Default>(
        self,
        left: Mat<A>,
        right: Mat<A>,
        width: usize,
        scale: A,
        out: &mut [A],
    ) {
        debug_assert!(out.len() >= self.queries * self.keys);
        // SAFETY: the caller guarantees the same.
        unsafe {
            product(
                [self.queries, self.keys, width],
                out.as_mut_ptr(),
                self.keys,
                None,
                scale,
                left.row(self.query),
                right.at(self.key * right.cs),
                gemm_common::Parallelism::None,
            )
        }
    }

    /// Returns how many of the block's keys its query `i` attends to.
    #[inline(always)]
    pub(super) fn seen(self, i: usize, options: &AttentionOptions<'_>) -> usize {
        let before = options.first_query + self.query + i;
        if options.causal { (before + 1).saturating_sub(self.key).min(self.keys) } else { self.keys }
    }

    /// Applies the mask to the logits of query `i`. Returns the logits of the keys that it attends to, and the rest of the row.
    #[inline(always)]
    pub(super) fn apply_mask<'s, T: Float>(
        self,
        i: usize,
        row: &'s mut [T::Acc],
        mask: Option<&Mask<'_, T>>,
        options: &AttentionOptions<'_>,
    ) -> (&'s mut [T::Acc], &'s mut [T::Acc]) {
        let (seen, hidden) = row.split_at_mut(self.seen(i, options));
        if let Some(mask) = mask {
            mask.apply(self.query + i, self.key, seen);
        }
        (seen, hidden)
    }

    /// Returns the index in the full tensor of attention weights of query `i` and the block's first key.
    #[inline(always)]
    pub(super) fn index(self, i: usize, head: usize, sizes: Sizes, options: &AttentionOptions<'_>) -> u64 {
        ((head * options.all_queries + options.first_query + self.query + i) * sizes.keys + self.key) as u64
    }
}

/// Returns the largest number. Ignores NaN.
#[inline(always)]
pub(super) fn largest<A: Real>(x: &[A]) -> A {
    let mut lanes = [A::LOWEST; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    rest.iter().chain(&lanes).fold(A::LOWEST, |max, &x| if x > max { x } else { max })
}

/// Replaces each element by `exp(x − shift)` and returns the sum.
#[inline(always)]
pub(super) fn exponentials<A: Real>(x: &mut [A], shift: A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = (*x - shift).exp();
            *lane = *lane + *x;
        }
    }
    let mut sum = A::ZERO;
    for x in rest {
        *x = (*x - shift).exp();
        sum = sum + *x;
    }
    lanes.iter().fold(sum, |sum, &lane| sum + lane)
}
