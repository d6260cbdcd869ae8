//! Fused scaled dot-product attention: only one block of the logits is in memory at a time.
//!
//! The forward pass keeps a running maximum and sum for each query (online softmax), and also returns the log-sum-exp. The backward
//! pass recomputes the probabilities of each block from it. Heads and blocks are processed in a fixed order, so results are
//! bit-identical on every run.
//!
//! If all keys of a query are masked, its output and gradients are 0 and its log-sum-exp is −∞. PyTorch's fused kernels do the
//! same, while its plain formula gives NaN. There is no gradient with respect to the mask.

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

/// The options of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    /// The factor of the dot products of queries and keys.
    pub scale: f64,
    /// Whether query `i` attends only to keys `j ≤ i`.
    pub causal: bool,
    /// The dropout probability of an attention weight.
    pub dropout: f64,
    /// The random draw of dropout. Its elements are indexed like the full matrix of attention weights.
    pub draw: Draw,
    /// The heads (indices of the dims before the last two) that this shard holds; `None` for all. Dropout uses the index of a
    /// head in the full tensor.
    pub heads: Option<&'a Window>,
    /// The index in the full tensor of this shard's first query. The causal mask and dropout use the index of a query in the
    /// full tensor. Keys are never sharded.
    pub first_query: usize,
    /// The number of queries in the full tensor.
    pub all_queries: usize,
}

impl AttentionOptions<'_> {
    /// Returns the index in the full tensor of each local head. Empty if it equals the local index, or is not needed.
    fn head_indices(&self) -> Vec<usize> {
        let mut indices = Vec::new();
        if let Some(heads) = self.heads
            && self.dropout > 0.0
        {
            heads.each_run(|_, first, n| indices.extend(first..first + n));
        }
        indices
    }

    /// Returns how many of the keys before `end` any query before `query_end` attends to.
    fn keys_seen(&self, query_end: usize, end: usize) -> usize {
        if self.causal { end.min(self.first_query + query_end) } else { end }
    }
}

/// The sizes of one head.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    queries: usize,
    keys: usize,
    /// The size of a query and of a key.
    width: usize,
    /// The size of a value.
    value_width: usize,
}

impl Sizes {
    fn new(q: &Array, v: &Array) -> Self {
        let (q, v) = (q.dims(), v.dims());
        let ndim = q.len();
        Sizes { queries: q[ndim - 2], keys: v[ndim - 2], width: q[ndim - 1], value_width: v[ndim - 1] }
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
    let mask = mask.map(|mask| prepare_mask(mask, q)).transpose()?;
    with_float!("attention", q.dtype(), T => forward::forward::<T>(q, k, v, mask.as_ref(), options))
}

/// Computes the gradients of `q`, `k` and `v` from the gradient of the output, and from the inputs and results of
/// [`attention_forward`].
#[allow(clippy::too_many_arguments)] // the inputs and results of the forward pass
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
    let mask = mask.map(|mask| prepare_mask(mask, q)).transpose()?;
    let lse = lse.contiguous()?;
    let saved = backward::Saved { grad, out, lse: &lse };
    with_float!("attention", q.dtype(), T => backward::backward::<T>(saved, q, k, v, mask.as_ref(), options))
}

/// Checks the dtype of the mask, and makes it contiguous unless its rows are contiguous or broadcast.
fn prepare_mask(mask: &Array, q: &Array) -> Result<Array> {
    if mask.dtype() != DType::U8 && mask.dtype() != q.dtype() {
        return Err(Error::DTypeMismatch { op: "attention", left: q.dtype(), right: mask.dtype() });
    }
    match (mask.dims().last(), mask.strides().last()) {
        (Some(&size), Some(&stride)) if size > 1 && stride > 1 => mask.contiguous(),
        _ => Ok(mask.clone()),
    }
}

/// Returns the offset of a head in an array, given the dims and strides before the last two.
fn head_offset(dims: &[usize], strides: &[usize], mut head: usize) -> usize {
    let mut offset = 0;
    for (&size, &stride) in dims.iter().zip(strides).rev() {
        offset += head % size * stride;
        head /= size;
    }
    offset
}

/// An operand, read head by head in the accumulation type.
struct Operand<'a, T: Elem> {
    read: Read<'a, T>,
    wide: Vec<T::Acc>,
    transposed: Vec<T::Acc>,
}

impl<'a, T: Elem> Operand<'a, T> {
    fn new(x: &'a Array) -> Result<Self> {
        Ok(Operand { read: x.read()?, wide: Vec::new(), transposed: Vec::new() })
    }

    /// Returns the matrix of a head, in place or widened into a buffer. It is valid until the next call.
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

    /// Returns the transpose of a matrix returned by [`head`](Self::head), with contiguous rows. It is valid until the next call.
    fn transposed(&mut self, head: Mat<T::Acc>) -> Mat<T::Acc>
    where
        T::Acc: Real + Default,
    {
        if head.rs == 1 {
            return head.t();
        }
        let last = self.read.dims.len() - 2;
        let size = [self.read.dims[last], self.read.dims[last + 1]];
        // SAFETY: the head is a matrix of this size, in the storage being read or in the buffer.
        unsafe { transpose(head, size, size[0], &mut self.transposed) }
    }
}

/// The mask, read head by head.
struct Masks<'a, T> {
    data: MaskReads<'a, T>,
    /// The sizes of the leading dims of `q`, and the strides of the mask along them.
    dims: Vec<usize>,
    strides: Vec<usize>,
    /// The stride from one query to the next.
    row: usize,
    /// The stride from one key to the next.
    column: usize,
}

enum MaskReads<'a, T> {
    Bytes(Read<'a, u8>),
    Added(Read<'a, T>),
}

impl<'a, T: Float + Element> Masks<'a, T> {
    fn new(mask: &'a Array, q: &Array) -> Result<Self> {
        let (dims, strides) = (mask.dims(), mask.strides());
        let ndim = q.dims().len();
        let stride = |dim: usize| match (dim + dims.len()).checked_sub(ndim) {
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
            dims: q.dims()[..ndim - 2].to_vec(),
            strides: (0..ndim - 2).map(stride).collect(),
            row: stride(ndim - 2),
            column: stride(ndim - 1),
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
