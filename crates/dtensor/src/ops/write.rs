//! Copies of tensors with some elements replaced: `slice_scatter`, `select_scatter`, `index_copy`.
//!
//! Tensors are immutable, so these operators return new tensors. No write can be lost in a view or in a gathered
//! copy.

use super::slice::{LocalSlice, Slice};
use super::{Arrays, Here, Metas, Op, Precision, SELECTING, grads, need_dtype, need_ndim, one, same_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::index::DimShard;
use dtensor_array::kernels::write as kernel;
use dtensor_array::shape::Dim;
use dtensor_array::{DType, Meta};
use dtensor_layout::{Rule, around};

/// The first input, with every `step`-th element of one dim replaced by the second input.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SliceScatter {
    op: &'static str,
    slice: Slice,
}

impl Op for SliceScatter {
    fn name(&self) -> &'static str {
        self.op
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        same_dtype(self.op, x)?;
        let expected = x[0].shape.with_dim(self.slice.dim, self.slice.len);
        if x[1].shape != expected {
            let message = format!(
                "expected src to have a size equal to the slice of self, which is {expected}, but it is {}",
                x[1].shape
            );
            return Err(Error::argument(self.op, message));
        }
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rank = x[0].shape.ndim();
        let all = around(self.slice.dim, rank, "v");
        let rule = Rule::of(&format!("{all}, {} -> {all}", around(self.slice.dim, rank, "1")), x, out)?;
        rule.contiguous("v")?.passing(&SELECTING, &[0, 1])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let Slice { dim, start, len, step } = self.slice;
        let local = LocalSlice::of(here.offset(0, dim), x[0].dims()[dim], start, len, step);
        if local.len == 0 {
            return Ok(one(x[0].clone()));
        }
        let source = x[1].narrow(dim, local.before, local.len)?;
        Ok(one(kernel::slice_write(x[0], &source, dim, local.first, step)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        Ok(grads![
            cx.when(0, || apply(self.clone(), &[&dy, &cx.zeros(1)?]))?,
            cx.when(1, || apply(self.slice.clone(), &[&dy]))?,
        ])
    }
}

/// The first input, with the slices of one dim at the indices (second input) replaced by those of the third.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct IndexCopy {
    dim: usize,
}

impl Op for IndexCopy {
    fn name(&self) -> &'static str {
        "index_copy"
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        const OP: &str = "index_copy";
        let (target, ids, source) = (&x[0], &x[1], &x[2]);
        need_dtype(OP, "the index", ids, DType::I64)?;
        need_ndim(OP, "the index", ids, 1)?;
        same_dtype(OP, &[target.clone(), source.clone()])?;
        if source.shape != target.shape.with_dim(self.dim, ids.shape[0]) {
            return Err(Error::ShapeMismatch {
                op: OP,
                why: "the source (second) must have one slice per index, each of the tensor's shape",
                left: target.shape.clone(),
                right: source.shape.clone(),
            });
        }
        Ok(one(target.clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rank = x[0].shape.ndim();
        let all = around(self.dim, rank, "v");
        let rule = Rule::of(&format!("{all}, 1, {} -> {all}", around(self.dim, rank, "1")), x, out)?;
        rule.contiguous("v")?.passing(&SELECTING, &[0, 2])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let part = DimShard { start: here.offset(0, self.dim), whole: here.whole(0).shape[self.dim] };
        Ok(one(kernel::index_write(x[0], x[1], x[2], self.dim, part)?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (dy, ids) = (cx.dy()?, cx.input(1)?);
        Ok(grads![
            cx.when(0, || apply(self.clone(), &[&dy, &ids, &cx.zeros(2)?]))?,
            None,
            cx.when(2, || dy.index_select(self.dim, &ids))?,
        ])
    }
}

impl Tensor {
    /// Returns a copy in which [`slice`](Tensor::slice)`(dim, start, end, step)` is replaced by `source`, which
    /// must have the same dtype. This tensor does not change.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{DType, DeviceMesh, Replicate, Shard, Tensor, distribute_tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], ())?;
    ///     let x = distribute_tensor(&Tensor::zeros([6], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let ones = distribute_tensor(&Tensor::ones([2], DType::F32)?, &mesh, [Replicate])?;
    ///     let y = x.slice_scatter(&ones, 0, 2, 5, 2)?; // x[2:5:2] = 1
    ///     assert_eq!(y.placements(), [Shard(0)]);
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [0., 0., 1., 0., 1., 0.]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn slice_scatter(
        &self,
        source: &Tensor,
        dim: impl Into<Dim>,
        start: isize,
        end: isize,
        step: usize,
    ) -> Result<Tensor> {
        const OP: &str = "slice_scatter";
        let slice = self.slice_of(OP, dim.into(), start, end, step)?;
        apply(SliceScatter { op: OP, slice }, &[self, source])
    }

    /// Returns a copy in which [`select`](Tensor::select)`(dim, index)` is replaced by `source`.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::zeros([2, 3], DType::F32)?;
    /// let y = x.select_scatter(&Tensor::ones([3], DType::F32)?, 0, -1)?; // x[-1] = 1
    /// assert_eq!(y.to_vec::<f32>()?, [0., 0., 0., 1., 1., 1.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn select_scatter(&self, source: &Tensor, dim: impl Into<Dim>, index: isize) -> Result<Tensor> {
        const OP: &str = "select_scatter";
        let (dim, start) = self.index_of(OP, dim.into(), index)?;
        let expected = self.shape().without_dim(dim);
        if source.shape() != expected {
            let message = format!(
                "expected src to have a size equal to the slice of self, which is {expected}, but it is {}",
                source.shape()
            );
            return Err(Error::argument(OP, message));
        }
        let slice = Slice { dim, start, len: 1, step: 1 };
        apply(SliceScatter { op: OP, slice }, &[self, &source.unsqueeze(dim)?])
    }

    /// Returns a copy in which the slices of one dim at the given indices (a 1-d `i64` tensor) are replaced by
    /// those of `source`. Returns an error if an index occurs twice.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::zeros([3, 2], DType::F32)?;
    /// let rows = Tensor::from_slice(&[2i64, 0], [2])?;
    /// let source = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2])?;
    /// assert_eq!(x.index_copy(0, &rows, &source)?.to_vec::<f32>()?, [3., 4., 0., 0., 1., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn index_copy(&self, dim: impl Into<Dim>, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        const OP: &str = "index_copy";
        let dim = self.dim(OP, dim)?;
        if self.ndim() == 0 {
            return Err(Error::argument(OP, "a scalar (0-d tensor) has no slices"));
        }
        apply(IndexCopy { dim }, &[self, index, source])
    }
}
