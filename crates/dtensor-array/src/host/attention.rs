//! Scaled dot-product attention, fused: the matrix of scores exists one block at a time.
//!
//! Forward keeps a running maximum and sum per query (the online softmax), and returns the logarithm of the sum
//! beside the result. Backward computes the probabilities of each block again from it. Heads are taken one after the
//! other and blocks in a fixed order, so results have the same bits every time.
//!
//! A query that may attend to nothing gets zeros, −∞ for its logarithm, and gradients of zero (PyTorch's fused kernels
//! do the same; its plain formula gives NaN). There is no gradient with respect to the mask.

mod backward;
mod block;
mod forward;

use std::any::TypeId;

use block::{Mask, MaskData};

use super::matmul::{Mat, dense, transpose, widen};
use super::random::Draw;
use crate::window::Window;
use crate::{Array, Elem, Float, Read, Real, with_float};
use crate::{DType, Element, Error, Result};

/// What attention computes, beside its operands.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    /// What the products of queries and keys are multiplied by.
    pub scale: f64,
    /// Whether query `i` sees only keys `j ≤ i`.
    pub causal: bool,
    /// The probability with which a probability is dropped.
    pub dropout: f64,
    /// Where dropout's numbers come from. Its elements are those of the matrix of probabilities.
    pub draw: Draw,
    /// Which heads of a whole (that is, indices of the dims before the last two) these are, if not all: so that each
    /// drops what it would drop there.
    pub heads: Option<&'a Window>,
    /// The number in the whole of the first query here: a causal mask and dropout go by the number that a query has there.
    /// The keys are always all.
    pub first_query: usize,
    /// How many queries the whole has.
    pub all_queries: usize,
}

impl AttentionOptions<'_> {
    /// The number in the whole of each of the heads here; none where it is its number here, or of no interest.
    fn numbers(&self) -> Vec<usize> {
        let mut numbers = Vec::new();
        if let Some(heads) = self.heads
            && self.dropout > 0.0
        {
            heads.each_run(|_, first, n| numbers.extend(first..first + n));
        }
        numbers
    }

    /// How many keys, of those before `end`, the queries before `query_end` see.
    fn keys_seen(&self, query_end: usize, end: usize) -> usize {
        if self.causal { end.min(self.first_query + query_end) } else { end }
    }
}

/// The sizes of one head.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    queries: usize,
    keys: usize,
    /// Of a query and of a key.
    width: usize,
    /// Of a value.
    value_width: usize,
}

impl Sizes {
    fn new(q: &Array, v: &Array) -> Self {
        let (q, v) = (q.dims(), v.dims());
        let rank = q.len();
        Sizes { queries: q[rank - 2], keys: v[rank - 2], width: q[rank - 1], value_width: v[rank - 1] }
    }
}

/// Computes scaled dot-product attention of queries `q` `[..., Lq, D]`, keys `k` `[..., Lk, D]` and values `v`
/// `[..., Lk, Dv]`. Their leading dims must be the same.
pub(crate) fn attention_forward(
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array)> {
    let mask = mask.map(|mask| row_mask(mask, q)).transpose()?;
    with_float!("attention", q.dtype(), T => forward::forward::<T>(q, k, v, mask.as_ref(), options))
}

/// Computes the gradients of `q`, `k` and `v` from the gradient of the output, and from the inputs and results of
/// [`attention_forward`].
#[allow(clippy::too_many_arguments)] // all that forward has seen
pub(crate) fn attention_backward(
    grad: &Array,
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    out: &Array,
    lse: &Array,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array, Array)> {
    let mask = mask.map(|mask| row_mask(mask, q)).transpose()?;
    let lse = lse.contiguous()?;
    let saved = backward::Saved { grad, out, lse: &lse };
    with_float!("attention", q.dtype(), T => backward::backward::<T>(saved, q, k, v, mask.as_ref(), options))
}

/// The mask, checked, with elements of a row side by side or all the same.
fn row_mask(mask: &Array, q: &Array) -> Result<Array> {
    if mask.dtype() != DType::U8 && mask.dtype() != q.dtype() {
        return Err(Error::DTypeMismatch { op: "attention", left: q.dtype(), right: mask.dtype() });
    }
    match (mask.dims().last(), mask.strides().last()) {
        (Some(&size), Some(&stride)) if size > 1 && stride > 1 => mask.contiguous(),
        _ => Ok(mask.clone()),
    }
}

/// Where head number `head` begins in an array with these dims before its last two.
fn head_offset(dims: &[usize], strides: &[usize], mut head: usize) -> usize {
    let mut offset = 0;
    for (&size, &stride) in dims.iter().zip(strides).rev() {
        offset += head % size * stride;
        head /= size;
    }
    offset
}

/// One operand, head by head, in the type of the computation.
struct Operand<'a, T: Elem> {
    read: Read<'a, T>,
    wide: Vec<T::Acc>,
    transposed: Vec<T::Acc>,
}

impl<'a, T: Elem> Operand<'a, T> {
    fn new(x: &'a Array) -> Result<Self> {
        Ok(Operand { read: x.read()?, wide: Vec::new(), transposed: Vec::new() })
    }

    /// The matrix of a head: where it lies, or widened. It is valid until the next call.
    fn head(&mut self, head: usize) -> Mat<T::Acc> {
        let (dims, strides) = (self.read.dims, self.read.strides);
        let last = dims.len() - 2;
        let at = head_offset(&dims[..last], &strides[..last], head);
        let matrix = (strides[last], strides[last + 1]);
        if TypeId::of::<T>() == TypeId::of::<T::Acc>() {
            return Mat { ptr: self.read.data().as_ptr().cast(), rs: matrix.0, cs: matrix.1 }.at(at);
        }
        let size = [dims[last], dims[last + 1]];
        widen(self.read.data(), at, size, matrix, &mut self.wide);
        dense(&self.wide, size, matrix)
    }

    /// The transpose of what [`head`](Self::head) gave, with dense rows. It is valid until the next call.
    fn transposed(&mut self, head: Mat<T::Acc>) -> Mat<T::Acc>
    where
        T::Acc: Real + Default,
    {
        if head.rs == 1 {
            return head.t();
        }
        let last = self.read.dims.len() - 2;
        let size = [self.read.dims[last], self.read.dims[last + 1]];
        // SAFETY: the head is a matrix of this size, in the storage being read or in the widened copy.
        unsafe { transpose(head, size, size[0], &mut self.transposed) }
    }
}

/// The mask, head by head.
struct Masks<'a, T> {
    data: MaskReads<'a, T>,
    /// The sizes of the leading dims of `q`, and the strides of the mask along them.
    dims: Vec<usize>,
    strides: Vec<usize>,
    /// From a query to the next, and from a key to the next.
    row: usize,
    column: usize,
}

enum MaskReads<'a, T> {
    Bytes(Read<'a, u8>),
    Added(Read<'a, T>),
}

impl<'a, T: Float + Element> Masks<'a, T> {
    fn new(mask: &'a Array, q: &Array) -> Result<Self> {
        let (dims, strides) = (mask.dims(), mask.strides());
        let rank = q.dims().len();
        let stride = |dim: usize| match (dim + dims.len()).checked_sub(rank) {
            Some(dim) if dims[dim] != 1 => strides[dim],
            _ => 0,
        };
        let data = if mask.dtype() == DType::U8 {
            MaskReads::Bytes(mask.read()?)
        } else {
            MaskReads::Added(mask.read()?)
        };
        Ok(Masks {
            data,
            dims: q.dims()[..rank - 2].to_vec(),
            strides: (0..rank - 2).map(stride).collect(),
            row: stride(rank - 2),
            column: stride(rank - 1),
        })
    }

    fn head(&self, head: usize) -> Mask<'_, T> {
        let at = head_offset(&self.dims, &self.strides, head);
        let data = match &self.data {
            MaskReads::Bytes(read) => MaskData::Bytes(read.data()),
            MaskReads::Added(read) => MaskData::Added(read.data()),
        };
        Mask { data, at, row: self.row, column: self.column }
    }
}

#[cfg(test)]
mod tests;
