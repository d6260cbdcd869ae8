//! Slices of one dim: a range, every `step`-th element, or one index.

use super::view::Reshape;
use super::{ANY, Arrays, Here, Metas, Op, SELECTING, grads, one, reshaped};
use crate::autograd::{Backward, Grads};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::copy::NOTHING;
use dtensor_array::kernels::{cat, index};
use dtensor_array::shape::Dim;
use dtensor_layout::{Placement, PlacementList};
use dtensor_layout::{Rule, around};

/// A contiguous range of one dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Narrow {
    dim: usize,
    start: usize,
    len: usize,
}

impl Op for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let size = x[0].shape[self.dim];
        match self.start.checked_add(self.len) {
            Some(end) if end <= size => Ok(one(reshaped(&x[0], x[0].shape.with_dim(self.dim, self.len)))),
            _ => {
                let message = format!(
                    "start ({}) + length ({}) exceeds the size ({size}) of dim {}",
                    self.start, self.len, self.dim
                );
                Err(Error::argument("narrow", message))
            }
        }
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        // The full range is the identity, so the dim may stay sharded in any way.
        if x[0].shape == out[0].shape {
            return Rule::pointwise(x, out)?.passing(&ANY, &[0]);
        }
        slice_rule(self.dim, self.len, x, out)
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let whole = here.whole(0).shape[self.dim];
        if self.len == whole {
            return Ok(one(x[0].clone()));
        }
        if x[0].dims()[self.dim] == whole {
            return Ok(one(x[0].narrow(self.dim, self.start, self.len)?));
        }
        let local = LocalSlice::of(here.offset(0, self.dim), x[0].dims()[self.dim], self.start, self.len, 1);
        let part = x[0].narrow(self.dim, local.first, local.len)?;
        Ok(one(cat::pad_slice(&part, self.dim, local.before, self.len, NOTHING)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let size = cx.input_meta(0).shape[self.dim];
        let onto = cx.layout(0).map(|layout| layout.placements().into()).unwrap_or_default();
        Ok(grads![Some(apply(Pad { dim: self.dim, start: self.start, size, onto }, &[&cx.dy()?])?)])
    }
}

/// Returns the rule of operators that select `len` of the indices of a dim. If these are less than half, a sharded
/// dim gives partial results: reducing the small result moves less than gathering the dim.
fn slice_rule(dim: usize, len: usize, x: &[Meta], out: &[Meta]) -> Result<Rule> {
    let rank = x[0].shape.ndim();
    if 2 * len >= x[0].shape[dim] {
        return Rule::along(dim, x, out)?.passing(&SELECTING, &[0]);
    }
    let text = format!("{} -> {}", around(dim, rank, "v"), around(dim, rank, "1"));
    let rule = Rule::of(&text, x, out)?;
    rule.contiguous("v")?.passing(&SELECTING, &[0])
}

/// Which of the global indices `start`, `start + step`, … this rank's shard has.
pub(super) struct LocalSlice {
    /// Number of selected indices before the shard.
    pub(super) before: usize,
    /// Local index of the first selected element.
    pub(super) first: usize,
    /// Number of selected indices in the shard.
    pub(super) len: usize,
}

impl LocalSlice {
    /// Selects from the shard of `size` indices at `offset`, for a slice of `len` indices in total.
    pub(super) fn of(offset: usize, size: usize, start: usize, len: usize, step: usize) -> LocalSlice {
        let before = |index: usize| index.saturating_sub(start).div_ceil(step).min(len);
        let (from, to) = (before(offset), before(offset + size));
        if from == to {
            return LocalSlice { before: 0, first: 0, len: 0 };
        }
        LocalSlice { before: from, first: start + from * step - offset, len: to - from }
    }
}

/// Places the input at a range of a dim among zeros: the gradient of [`Narrow`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pad {
    pub(super) dim: usize,
    pub(super) start: usize,
    pub(super) size: usize,
    /// Placements of the tensor that was narrowed, per mesh dim. The gradient is sharded likewise, so that each
    /// rank computes only its shard.
    pub(super) onto: PlacementList,
}

impl Op for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(reshaped(&x[0], x[0].shape.with_dim(self.dim, self.size))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        pad_rule(self.dim, &self.onto, x, out)
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let (n, size) = (x[0].dims()[self.dim], here.out()[0].shape[self.dim]);
        if size == self.size {
            return Ok(one(cat::pad_slice(x[0], self.dim, self.start, size, 0.0)?));
        }
        let offset = here.out_offset(0, self.dim);
        let local = LocalSlice::of(offset, size, self.start, n, 1);
        let part = x[0].narrow(self.dim, local.before, local.len)?;
        Ok(one(cat::pad_slice(&part, self.dim, local.first, size, 0.0)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let len = cx.input_meta(0).shape[self.dim];
        Ok(grads![Some(cx.dy()?.narrow(self.dim, self.start, len)?)])
    }
}

/// Returns the rule of operators that place their input among zeros along a dim, with the output sharded like
/// `onto`.
fn pad_rule(dim: usize, onto: &[Placement], x: &[Meta], out: &[Meta]) -> Result<Rule> {
    let rank = x[0].shape.ndim();
    let text = format!("{} -> {}", around(dim, rank, "1"), around(dim, rank, "v"));
    let rule = Rule::of(&text, x, out)?;
    rule.contiguous("v")?.preferring("v", dim, onto)?.passing(&SELECTING, &[0])
}

/// Every `step`-th element of one dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Slice {
    pub(super) dim: usize,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) step: usize,
}

impl Op for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let size = x[0].shape[self.dim];
        if self.len > 0 && self.start + (self.len - 1) * self.step >= size {
            let message = format!("{self:?} goes beyond the size ({size}) of dim {}", self.dim);
            return Err(Error::argument("slice", message));
        }
        Ok(one(reshaped(&x[0], x[0].shape.with_dim(self.dim, self.len))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        slice_rule(self.dim, self.len, x, out)
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let (dim, part) = (self.dim, x[0].dims()[self.dim]);
        if part == here.whole(0).shape[dim] {
            return Ok(one(index::slice_step(x[0], dim, self.start, self.len, self.step)?));
        }
        let local = LocalSlice::of(here.offset(0, dim), part, self.start, self.len, self.step);
        let selected = index::slice_step(x[0], dim, local.first, local.len, self.step)?;
        Ok(one(cat::pad_slice(&selected, dim, local.before, self.len, NOTHING)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let size = cx.input_meta(0).shape[self.dim];
        Ok(grads![Some(apply(SliceGrad { forward: self.clone(), size }, &[&cx.dy()?])?)])
    }
}

/// Places the input at every `step`-th index among zeros: the gradient of [`Slice`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SliceGrad {
    forward: Slice,
    size: usize,
}

impl Op for SliceGrad {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(reshaped(&x[0], x[0].shape.with_dim(self.forward.dim, self.size))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::along(self.forward.dim, x, out)?.passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let Slice { dim, start, step, .. } = self.forward;
        Ok(one(index::slice_step_backward(x[0], dim, start, step, self.size)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(apply(self.forward.clone(), &[&cx.dy()?])?)])
    }
}

impl Tensor {
    /// Returns `len` elements of one dim, beginning at `start`. Returns an error if the range exceeds the dim.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::arange(0, 6, 1, DType::I64)?;
    /// assert_eq!(x.narrow(0, 2, 3)?.to_vec::<i64>()?, [2, 3, 4]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn narrow(&self, dim: impl Into<Dim>, start: usize, len: usize) -> Result<Tensor> {
        let dim = self.dim("narrow", dim)?;
        if self.ndim() == 0 {
            return Err(Error::argument("narrow", "a scalar (0-d tensor) has no dim to narrow"));
        }
        apply(Narrow { dim, start, len }, &[self])
    }

    /// Returns every `step`-th element of one dim from `start` up to but not including `end`. As in Python,
    /// negative positions count from the back, and positions are clipped to the dim.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::arange(0, 10, 1, DType::I64)?;
    /// assert_eq!(x.slice(0, 1, -1, 3)?.to_vec::<i64>()?, [1, 4, 7]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn slice(&self, dim: impl Into<Dim>, start: isize, end: isize, step: usize) -> Result<Tensor> {
        let slice = self.slice_of("slice", dim.into(), start, end, step)?;
        if slice.step == 1 {
            let Slice { dim, start, len, .. } = slice;
            return apply(Narrow { dim, start, len }, &[self]);
        }
        apply(slice, &[self])
    }

    /// Resolves the arguments of a slice.
    pub(super) fn slice_of(
        &self,
        op: &'static str,
        dim: Dim,
        start: isize,
        end: isize,
        step: usize,
    ) -> Result<Slice> {
        let dim = self.dim(op, dim)?;
        let Some(&size) = self.dims().get(dim) else {
            return Err(Error::argument(op, "a scalar (0-d tensor) has no dim to slice"));
        };
        if step == 0 {
            return Err(Error::argument(op, "step must be greater than zero"));
        }
        // A larger step also selects the first element only; the limit avoids overflow.
        let step = step.min(size.max(1));
        let clip =
            |p: isize| if p < 0 { size.saturating_sub(p.unsigned_abs()) } else { size.min(p as usize) };
        let (start, end) = (clip(start), clip(end));
        Ok(Slice { dim, start, len: end.saturating_sub(start).div_ceil(step), step })
    }

    /// Returns the slice at one index of a dim, which is removed. Negative indices count from the back.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::arange(0, 6, 1, DType::I64)?.reshape([2, 3])?;
    /// assert_eq!(x.select(0, -1)?.to_vec::<i64>()?, [3, 4, 5]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn select(&self, dim: impl Into<Dim>, index: isize) -> Result<Tensor> {
        let (dim, start) = self.index_of("select", dim.into(), index)?;
        let part = apply(Narrow { dim, start, len: 1 }, &[self])?;
        apply(Reshape { op: "select", shape: self.shape().without_dim(dim), strict: false }, &[&part])
    }

    /// Resolves a dim and an index of it, which may be negative.
    pub(super) fn index_of(&self, op: &'static str, dim: Dim, index: isize) -> Result<(usize, usize)> {
        let dim = self.dim(op, dim)?;
        let Some(&size) = self.dims().get(dim) else {
            return Err(Error::argument(op, "a scalar (0-d tensor) has no dim to select from"));
        };
        let from_front = if index < 0 { index + size as isize } else { index };
        if from_front < 0 || from_front as usize >= size {
            return Err(Error::IndexOutOfBounds { op, index: index as i64, dim, size });
        }
        Ok((dim, from_front as usize))
    }
}
