//! Concatenating tensors, and splitting one into several.

use super::slice::Pad;
use super::view::Reshape;
use super::{Arrays, Grads, Here, Metas, Op, Precision, SELECTING, grads, one, reshaped, same_dtype};
use crate::autograd::Backward;
use crate::op::{apply, apply_all};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Meta;
use dtensor_array::kernels::cat as kernel;
use dtensor_array::shape::Dim;
use dtensor_layout::{Placement, Rule, Shard, StridedShard};

/// Concatenation of all inputs along `dim`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cat {
    dim: usize,
}

impl Op for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        same_dtype("cat", x)?;
        let first = &x[0].shape;
        for other in &x[1..] {
            let other = &other.shape;
            let agree = other.ndim() == first.ndim()
                && (0..first.ndim()).all(|d| d == self.dim || first[d] == other[d]);
            if !agree {
                return Err(Error::ShapeMismatch {
                    op: "cat",
                    why: "sizes must match except along the dim",
                    left: first.clone(),
                    right: other.clone(),
                });
            }
        }
        let size = x.iter().fold(0usize, |n, meta| n.saturating_add(meta.shape[self.dim]));
        Ok(one(reshaped(&x[0], first.with_dim(self.dim, size))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::along(self.dim, x, out)?.passing(&SELECTING, &(0..x.len()).collect::<Vec<_>>())
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::cat(x, self.dim)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let mut start = 0;
        (0..cx.inputs())
            .map(|i| {
                let len = cx.input_meta(i).shape[self.dim];
                start += len;
                cx.when(i, || dy.narrow(self.dim, start - len, len))
            })
            .collect()
    }
}

/// Consecutive slices of one dim, which add up to it. Its gradient is one concatenation, where a node for each slice would pad the
/// gradient of each one with zeros and add them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Split {
    dim: usize,
    sizes: Vec<usize>,
}

impl Op for Split {
    fn name(&self) -> &'static str {
        "split"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(self.sizes.iter().map(|&size| reshaped(&x[0], x[0].shape.with_dim(self.dim, size))).collect())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::along(self.dim, x, out)?.passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let mut start = 0;
        let slice = |&size: &usize| {
            start += size;
            x[0].narrow(self.dim, start - size, size)
        };
        self.sizes.iter().map(slice).collect()
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let mut used = (0..self.sizes.len()).filter(|&i| cx.grad(i).is_some());
        let dx = match (used.next(), used.next()) {
            (Some(only), None) => {
                let (start, size) = (self.sizes[..only].iter().sum(), self.sizes.iter().sum());
                let onto = cx.layout(0).map(|layout| layout.placements().into()).unwrap_or_default();
                apply(Pad { dim: self.dim, start, size, onto }, &[&cx.dy_of(only)?])?
            }
            _ => {
                let dy = (0..self.sizes.len()).map(|i| cx.dy_of(i)).collect::<Result<Vec<_>>>()?;
                apply(Cat { dim: self.dim }, &dy.iter().collect::<Vec<_>>())?
            }
        };
        Ok(grads![Some(dx)])
    }
}

impl Tensor {
    /// Concatenates tensors along an existing dim.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let (a, b) = (Tensor::zeros([2, 3], DType::F32)?, Tensor::ones([1, 3], DType::F32)?);
    /// assert_eq!(Tensor::cat(&[&a, &b], 0)?.dims(), [3, 3]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn cat(tensors: &[&Tensor], dim: impl Into<Dim>) -> Result<Tensor> {
        let Some(first) = tensors.first() else {
            return Err(Error::argument("cat", "expected a non-empty list of tensors"));
        };
        if tensors.iter().any(|t| t.ndim() == 0) {
            return Err(Error::argument("cat", "a scalar (0-d tensor) cannot be concatenated; use `stack`"));
        }
        apply(Cat { dim: first.dim("cat", dim)? }, tensors)
    }

    /// Stacks tensors of equal shape along a new dim.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let (a, b) = (Tensor::zeros([3], DType::F32)?, Tensor::ones([3], DType::F32)?);
    /// assert_eq!(Tensor::stack(&[&a, &b], 1)?.dims(), [3, 2]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn stack(tensors: &[&Tensor], dim: impl Into<Dim>) -> Result<Tensor> {
        let Some(first) = tensors.first() else {
            return Err(Error::argument("stack", "expected a non-empty list of tensors"));
        };
        let dim = dim.into().resolve_insert("stack", first.ndim())?;
        if let Some(other) = tensors.iter().find(|t| t.dims() != first.dims()) {
            return Err(Error::ShapeMismatch {
                op: "stack",
                why: "each tensor must be of equal size",
                left: first.shape(),
                right: other.shape(),
            });
        }
        let mut rows = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            rows.push(tensor.unsqueeze(dim)?);
        }
        Tensor::cat(&rows.iter().collect::<Vec<_>>(), dim)
    }

    /// Splits a dim into consecutive slices of the given sizes, which must add up to the size of the dim.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let parts = Tensor::arange(0, 5, 1, DType::I64)?.split(&[1, 4], 0)?;
    /// assert_eq!(parts[1].to_vec::<i64>()?, [1, 2, 3, 4]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn split(&self, sizes: &[usize], dim: impl Into<Dim>) -> Result<Vec<Tensor>> {
        let dim = self.dim("split", dim)?;
        let size = self.dims().get(dim).copied().unwrap_or(0);
        let total = sizes.iter().try_fold(0usize, |n, &size| n.checked_add(size));
        if self.ndim() == 0 || total != Some(size) {
            let message =
                format!("sizes {sizes:?} must add up to the size of dim {dim} of shape {}", self.shape());
            return Err(Error::argument("split", message));
        }
        self.slices(dim, sizes.to_vec())
    }

    /// Returns consecutive slices of a dim.
    #[track_caller]
    fn slices(&self, dim: usize, sizes: Vec<usize>) -> Result<Vec<Tensor>> {
        // If the dim is sharded, no rank has all of a slice. Each is redistributed by itself, as much as it needs.
        let is_sharded = |placement: &Placement| match *placement {
            Shard(of) | StridedShard { dim: of, .. } => of == dim as isize,
            _ => false,
        };
        let layout = self.layout();
        if sizes.len() > 1 && !layout.is_some_and(|layout| layout.placements().iter().any(is_sharded)) {
            return Ok(apply_all(Split { dim, sizes }, &[self])?.into_vec());
        }
        // A loop instead of a closure, so that collectives carry the source line of the caller.
        let (mut start, mut parts) = (0, Vec::with_capacity(sizes.len()));
        for len in sizes {
            parts.push(self.narrow(dim, start, len)?);
            start += len;
        }
        Ok(parts)
    }

    /// Splits a dim into at most `chunks` slices of size ⌈size / chunks⌉, the last of which may be smaller. As in
    /// PyTorch, there may be fewer slices than `chunks`.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let parts = Tensor::arange(0, 5, 1, DType::I64)?.chunk(4, 0)?;
    /// let sizes: Vec<usize> = parts.iter().map(|p| p.numel()).collect();
    /// assert_eq!(sizes, [2, 2, 1]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn chunk(&self, chunks: usize, dim: impl Into<Dim>) -> Result<Vec<Tensor>> {
        let dim = self.dim("chunk", dim)?;
        let Some(&size) = self.dims().get(dim) else {
            return Err(Error::argument("chunk", "a scalar (0-d tensor) has no dim to split"));
        };
        if chunks == 0 {
            return Err(Error::argument("chunk", "expects the number of chunks to be greater than 0"));
        }
        if size == 0 {
            // As in PyTorch, an empty dim gives `chunks` empty slices.
            let mut parts = Vec::new();
            let too_many = |_| Error::argument("chunk", format!("not enough memory for {chunks} chunks"));
            parts.try_reserve_exact(chunks).map_err(too_many)?;
            parts.resize(chunks, self.clone());
            return Ok(parts);
        }
        let part = size.div_ceil(chunks);
        self.slices(dim, (0..size).step_by(part).map(|start| part.min(size - start)).collect())
    }

    /// Returns all slices along one dim, which is removed.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let rows = Tensor::zeros([2, 3], DType::F32)?.unbind(0)?;
    /// assert_eq!((rows.len(), rows[0].dims()), (2, &[3][..]));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn unbind(&self, dim: impl Into<Dim>) -> Result<Vec<Tensor>> {
        let dim = self.dim("unbind", dim)?;
        let Some(&size) = self.dims().get(dim) else {
            return Err(Error::argument("unbind", "a scalar (0-d tensor) has no dim to unbind"));
        };
        let mut slices = self.slices(dim, vec![1; size])?;
        for slice in &mut slices {
            let shape = slice.shape().without_dim(dim);
            *slice = apply(Reshape { op: "unbind", shape, strict: false }, &[slice])?;
        }
        Ok(slices)
    }
}
