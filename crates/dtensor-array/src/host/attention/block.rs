//! The scores and probabilities of one block of queries and keys.

use super::super::matmul::{Mat, product};
use super::{AttentionOptions, Sizes};
use crate::{Float, Num, Real};

/// Queries per block.
pub(super) const QUERIES: usize = 64;
/// Keys per block.
pub(super) const KEYS: usize = 512;

/// Vector lanes that reductions keep apart.
const LANES: usize = 32;

/// Elements of a mask.
#[derive(Clone, Copy)]
pub(super) enum MaskData<'a, T> {
    /// Nonzero where a query may attend.
    Bytes(&'a [u8]),
    /// Added to the scores.
    Added(&'a [T]),
}

/// The mask of one head.
#[derive(Clone, Copy)]
pub(super) struct Mask<'a, T> {
    pub(super) data: MaskData<'a, T>,
    /// Where the head begins.
    pub(super) at: usize,
    /// From a query to the next.
    pub(super) row: usize,
    /// From a key to the next: 0 or 1.
    pub(super) column: usize,
}

impl<T: Float> Mask<'_, T> {
    /// Masks the scores of a query for the keys from `key` on.
    #[inline(always)]
    fn apply(&self, query: usize, key: usize, scores: &mut [T::Acc]) {
        if scores.is_empty() {
            return;
        }
        let at = self.at + query * self.row + key * self.column;
        let hide = |hidden: bool, score: &mut T::Acc| {
            if hidden {
                *score = T::Acc::LOWEST;
            }
        };
        match (self.data, self.column) {
            (MaskData::Bytes(data), 0) => {
                let hidden = data[at] == 0;
                scores.iter_mut().for_each(|score| hide(hidden, score));
            }
            (MaskData::Bytes(data), _) => {
                for (score, &seen) in scores.iter_mut().zip(&data[at..]) {
                    *score = if seen == 0 { T::Acc::LOWEST } else { *score };
                }
            }
            (MaskData::Added(data), 0) => {
                let term = data[at].acc();
                scores.iter_mut().for_each(|score| *score = *score + term);
            }
            (MaskData::Added(data), _) => {
                for (score, term) in scores.iter_mut().zip(&data[at..]) {
                    *score = *score + term.acc();
                }
            }
        }
    }
}

/// A block of queries and keys.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// The first query, and how many.
    pub(super) query: usize,
    pub(super) queries: usize,
    /// The first key, and how many.
    pub(super) key: usize,
    pub(super) keys: usize,
}

impl Block {
    /// `out = scale × left × right` for the block's rows of `left` and columns of `right`, which are `width` wide and
    /// high. The rows of `out` are as long as the block has keys.
    ///
    /// # Safety
    /// The matrices have these rows and columns in memory that may be read, and `out` has room.
    pub(super) unsafe fn scores<A: Real + Default>(
        self,
        left: Mat<A>,
        right: Mat<A>,
        width: usize,
        scale: A,
        out: &mut [A],
    ) {
        debug_assert!(out.len() >= self.queries * self.keys);
        // SAFETY: passed on to the caller.
        unsafe {
            product(
                [self.queries, self.keys, width],
                out.as_mut_ptr(),
                self.keys,
                false,
                scale,
                left.row(self.query),
                right.at(self.key * right.cs),
                gemm_common::Parallelism::None,
            )
        }
    }

    /// How many of the block's keys its query number `i` sees.
    #[inline(always)]
    pub(super) fn seen(self, i: usize, options: &AttentionOptions<'_>) -> usize {
        let before = options.first_query + self.query + i;
        if options.causal { (before + 1).saturating_sub(self.key).min(self.keys) } else { self.keys }
    }

    /// The scores that query number `i` sees, masked.
    #[inline(always)]
    pub(super) fn masked<'s, T: Float>(
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

    /// The index, in the matrix of probabilities of all heads of the whole, of the block's first key for its query number `i`.
    #[inline(always)]
    pub(super) fn index(self, i: usize, head: usize, sizes: Sizes, options: &AttentionOptions<'_>) -> u64 {
        ((head * options.all_queries + options.first_query + self.query + i) * sizes.keys + self.key) as u64
    }
}

/// The largest of some numbers, and NaN or not of those that are NaN.
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

/// Replaces each by `e` to the power of its difference from `shift`, and gives the sum.
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
