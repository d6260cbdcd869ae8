//! Maximum and minimum along a dim, with indices.

use super::reduce::{ReducedDims, reduced_shape};
use super::{Arrays, Here, Metas, Op, Together, grads, one, reshaped};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::{apply, apply_all};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::extremum::{self as kernel, Extremum};
use dtensor_array::kernels::locate::locate;
use dtensor_array::shape::{Dim, DimList};
use dtensor_array::{DType, Meta};
use dtensor_layout::Rule;

/// Converts indices in a shard that begins at `start` to indices in the full dim. Negative indices mark empty slots
/// and stay as they are.
pub(super) fn shift_indices(indices: &Array, start: usize) -> Result<Array> {
    // An index is at most `i64::MAX`, so one dim of that size holds all.
    locate(indices, &[i64::MAX as usize], &[1], start)
}

/// Extremum over one dim and its index: two outputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct DimExtremum {
    f: Extremum,
    dim: usize,
    keepdim: bool,
}

impl DimExtremum {
    /// Returns the reduced dims: none for a scalar.
    fn over(&self, x: &Meta) -> ReducedDims {
        let dims = if x.shape.ndim() == 0 { DimList::new() } else { DimList::from_elem(self.dim, 1) };
        ReducedDims { dims, keepdim: self.keepdim }
    }

    fn out(&self, op: &'static str, x: &Meta) -> Result<Meta> {
        if x.shape.ndim() > 0 && x.shape[self.dim] == 0 {
            let message = format!(
                "expected the reduced dim to have non-zero size, but dim {} of shape {} is empty",
                self.dim, x.shape
            );
            return Err(Error::argument(op, message));
        }
        Ok(reshaped(x, reduced_shape(&x.shape, &[self.dim], self.keepdim)))
    }
}

impl Op for DimExtremum {
    fn name(&self) -> &'static str {
        match self.f {
            Extremum::Max => "max_dim",
            Extremum::Min => "min_dim",
        }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let values = self.out(self.name(), &x[0])?;
        let indices = Meta { dtype: DType::I64, ..values.clone() };
        Ok(vec![values, indices].into())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        self.over(&x[0]).index_rule(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let (values, indices) = kernel::extremum(self.f, x[0], self.dim, self.keepdim)?;
        Ok(vec![values, indices].into())
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        if let [values, indices, ..] = known {
            let (values, indices) = kernel::merge(self.f, values, indices)?;
            return Ok(Together::Done(vec![values, indices].into()));
        }
        let (values, indices) = kernel::extremum(self.f, x[0], self.dim, self.keepdim)?;
        let indices = shift_indices(&indices, here.offset(0, self.dim))?;
        Ok(Together::Stack(vec![values, indices].into()))
    }

    fn saves(&self) -> Saves {
        Saves::only(&[], &[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let meta = cx.input_meta(0);
        let over = self.over(meta);
        let zeros = cx.zeros(0)?;
        if meta.shape.ndim() == 0 {
            return Ok(grads![Some(cx.dy()?)]);
        }
        let dy = over.restore(&cx.dy()?, &meta.shape)?;
        let indices = over.restore(&cx.output(1)?, &meta.shape)?;
        Ok(grads![Some(zeros.scatter_add(self.dim, &indices, &dy)?)])
    }
}

/// Index of the extremum over one dim or over all elements; over all, the index counts in row-major order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ArgExtremum {
    f: Extremum,
    dim: Option<usize>,
    keepdim: bool,
}

impl ArgExtremum {
    fn over(&self, x: &Meta) -> ReducedDims {
        let dims = match self.dim {
            Some(dim) if dim < x.shape.ndim() => DimList::from_elem(dim, 1),
            Some(_) => DimList::new(),
            None => (0..x.shape.ndim()).collect(),
        };
        ReducedDims { dims, keepdim: self.keepdim }
    }

    /// Returns the extrema of a local array and their local indices.
    fn find(&self, x: &Array) -> Result<(Array, Array)> {
        Ok(match self.dim {
            Some(dim) => kernel::extremum(self.f, x, dim, self.keepdim)?,
            None => kernel::extremum(self.f, &x.flatten()?, 0, false)?,
        })
    }
}

impl Op for ArgExtremum {
    fn name(&self) -> &'static str {
        match self.f {
            Extremum::Max => "argmax",
            Extremum::Min => "argmin",
        }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let over = self.over(&x[0]);
        let shape = over.shape(&x[0].shape);
        if over.count(&x[0].shape) == 0 && (self.dim.is_some() || shape.numel() > 0) {
            let message =
                format!("expected the reduced dims to have non-zero size, got shape {}", x[0].shape);
            return Err(Error::argument(self.name(), message));
        }
        Ok(one(Meta { dtype: DType::I64, ..reshaped(&x[0], shape) }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        self.over(&x[0]).index_rule(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(self.find(x[0])?.1))
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        if let [values, indices, ..] = known {
            return Ok(Together::Done(one(kernel::merge(self.f, values, indices)?.1)));
        }
        let (values, indices) = self.find(x[0])?;
        let indices = match self.dim {
            Some(dim) => shift_indices(&indices, here.offset(0, dim))?,
            None => {
                let strides = here.whole(0).shape.strides();
                let first =
                    strides.iter().enumerate().map(|(dim, stride)| here.offset(0, dim) * stride).sum();
                locate(&indices, x[0].dims(), &strides, first)?
            }
        };
        Ok(Together::Stack(vec![values, indices].into()))
    }

    fn differentiable(&self) -> bool {
        false
    }
}

impl Tensor {
    /// Returns the maximum along one dim and the index of its first occurrence. Only that element gets the
    /// gradient.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 9., 4., 8., 2., 8.], [2, 3])?;
    /// let (values, indices) = x.max_dim(1, false)?;
    /// assert_eq!((values.to_vec::<f32>()?, indices.to_vec::<i64>()?), (vec![9., 8.], vec![1, 0]));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn max_dim(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.extreme("max_dim", Extremum::Max, dim.into(), keepdim)
    }

    /// Returns the minimum along one dim and the index of its first occurrence. Only that element gets the
    /// gradient.
    #[track_caller]
    pub fn min_dim(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.extreme("min_dim", Extremum::Min, dim.into(), keepdim)
    }

    #[track_caller]
    fn extreme(&self, op: &'static str, f: Extremum, dim: Dim, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let mut out = apply_all(DimExtremum { f, dim: self.dim(op, dim)?, keepdim }, &[self])?;
        let indices = out.remove(1);
        Ok((out.remove(0), indices))
    }

    /// Returns the index of the first maximum along one dim. NaN counts as the largest number.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let logits = Tensor::from_slice(&[1f32, 9., 4., 8., 2., 8.], [2, 3])?;
    /// assert_eq!(logits.argmax(-1, false)?.to_vec::<i64>()?, [1, 0]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn argmax(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<Tensor> {
        let dim = Some(self.dim("argmax", dim)?);
        apply(ArgExtremum { f: Extremum::Max, dim, keepdim }, &[self])
    }

    /// Returns the index of the first minimum along one dim. NaN counts as the smallest number.
    #[track_caller]
    pub fn argmin(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<Tensor> {
        let dim = Some(self.dim("argmin", dim)?);
        apply(ArgExtremum { f: Extremum::Min, dim, keepdim }, &[self])
    }

    /// Returns the index of the first maximum of all elements, counted in row-major order.
    #[track_caller]
    pub fn argmax_all(&self) -> Result<Tensor> {
        apply(ArgExtremum { f: Extremum::Max, dim: None, keepdim: false }, &[self])
    }

    /// Returns the index of the first minimum of all elements, counted in row-major order.
    #[track_caller]
    pub fn argmin_all(&self) -> Result<Tensor> {
        apply(ArgExtremum { f: Extremum::Min, dim: None, keepdim: false }, &[self])
    }
}
