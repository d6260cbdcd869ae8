//! The largest and the smallest along a dim, and where they are.

use super::reduce::{Over, reduced};
use super::{Arrays, Here, Metas, Op, Together, grads, one, reshaped};
use crate::autograd::{Backward, Grads, Saves};
use crate::{Error, Result, Tensor, apply, apply_all};
use dtensor_array::Array;
use dtensor_array::kernels::extremum::{self as kernel, Extremum};
use dtensor_array::shape::{Dim, DimList};
use dtensor_array::{DType, Meta};
use dtensor_layout::Rule;
use dtensor_layout::unravel;

/// Indices in a part that begins at `start` as indices in the whole. Those below 0 stand for nothing.
pub(super) fn shifted(indices: &Array, start: usize) -> Result<Array> {
    let indices_in_whole =
        indices.copy_to_host::<i64>()?.into_iter().map(|i| if i < 0 { i } else { i + start as i64 });
    Array::from_vec(indices_in_whole.collect(), indices.dims())
}

/// The extremum over one dim and where it is: two outputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Extreme {
    f: Extremum,
    dim: usize,
    keepdim: bool,
}

impl Extreme {
    /// The dim, if there is one: that of a number is not.
    fn over(&self, x: &Meta) -> Over {
        let dims = if x.shape.rank() == 0 { DimList::new() } else { DimList::from_elem(self.dim, 1) };
        Over { dims, keepdim: self.keepdim }
    }

    fn out(&self, op: &'static str, x: &Meta) -> Result<Meta> {
        if x.shape.rank() > 0 && x.shape[self.dim] == 0 {
            let message = format!("dim {} of shape {} is empty: nothing to choose from", self.dim, x.shape);
            return Err(Error::argument(op, message));
        }
        Ok(reshaped(x, reduced(&x.shape, &[self.dim], self.keepdim)))
    }
}

impl Op for Extreme {
    fn name(&self) -> &'static str {
        match self.f {
            Extremum::Max => "max_dim",
            Extremum::Min => "min_dim",
        }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let values = self.out(self.name(), &x[0])?;
        let indices = Meta { dtype: DType::I64, ..values.clone() };
        Ok([values, indices].into_iter().collect())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        self.over(&x[0]).located_rule(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let (values, indices) = kernel::extremum(self.f, x[0], self.dim, self.keepdim)?;
        Ok([values, indices].into_iter().collect())
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        if let [values, indices, ..] = known {
            let (values, indices) = kernel::merge(self.f, values, indices)?;
            return Ok(Together::Done([values, indices].into_iter().collect()));
        }
        let (values, indices) = kernel::extremum(self.f, x[0], self.dim, self.keepdim)?;
        let indices = shifted(&indices, here.offset(0, self.dim))?;
        Ok(Together::Stack([values, indices].into_iter().collect()))
    }

    fn saves(&self) -> Saves {
        Saves::only(&[], &[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let meta = cx.input_meta(0);
        let over = self.over(meta);
        let zeros = cx.zeros(0)?;
        if meta.shape.rank() == 0 {
            return Ok(grads![Some(cx.dy()?)]);
        }
        let dy = over.restore(&cx.dy()?, &meta.shape)?;
        let indices = over.restore(&cx.output(1)?, &meta.shape)?;
        Ok(grads![Some(zeros.scatter_add(self.dim, &indices, &dy)?)])
    }
}

/// Where the extremum over one dim is, or over all of them: then as an index in row-by-row order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ArgExtreme {
    f: Extremum,
    dim: Option<usize>,
    keepdim: bool,
}

impl ArgExtreme {
    fn over(&self, x: &Meta) -> Over {
        let dims = match self.dim {
            Some(dim) if dim < x.shape.rank() => DimList::from_elem(dim, 1),
            Some(_) => DimList::new(),
            None => (0..x.shape.rank()).collect(),
        };
        Over { dims, keepdim: self.keepdim }
    }

    /// The extremes and where they are in this part.
    fn found(&self, x: &Array) -> Result<(Array, Array)> {
        Ok(match self.dim {
            Some(dim) => kernel::extremum(self.f, x, dim, self.keepdim)?,
            None => kernel::extremum(self.f, &x.flatten()?, 0, false)?,
        })
    }
}

impl Op for ArgExtreme {
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
            let message = format!("the reduced dims of shape {} hold nothing to choose from", x[0].shape);
            return Err(Error::argument(self.name(), message));
        }
        Ok(one(Meta { dtype: DType::I64, ..reshaped(&x[0], shape) }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        self.over(&x[0]).located_rule(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(self.found(x[0])?.1))
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        if let [values, indices, ..] = known {
            return Ok(Together::Done(one(kernel::merge(self.f, values, indices)?.1)));
        }
        let (values, indices) = self.found(x[0])?;
        let indices = match self.dim {
            Some(dim) => shifted(&indices, here.offset(0, dim))?,
            None => {
                let whole = &here.whole(0).shape;
                let in_whole = |i: i64| {
                    let at = unravel(i as usize, x[0].dims());
                    let index = |index, d| index * whole[d] + here.offset(0, d) + at[d];
                    (0..whole.rank()).fold(0, index) as i64
                };
                let index =
                    indices.copy_to_host::<i64>()?.into_iter().map(|i| if i < 0 { i } else { in_whole(i) });
                Array::from_vec(index.collect(), indices.dims())?
            }
        };
        Ok(Together::Stack([values, indices].into_iter().collect()))
    }

    fn differentiable(&self) -> bool {
        false
    }
}

impl Tensor {
    /// The largest along one dim and the index of its first occurrence, which alone gets the gradient.
    #[track_caller]
    pub fn max_dim(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.extreme("max_dim", Extremum::Max, dim.into(), keepdim)
    }

    /// The smallest along one dim and the index of its first occurrence, which alone gets the gradient.
    #[track_caller]
    pub fn min_dim(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.extreme("min_dim", Extremum::Min, dim.into(), keepdim)
    }

    #[track_caller]
    fn extreme(&self, op: &'static str, f: Extremum, dim: Dim, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let mut out = apply_all(Extreme { f, dim: self.dim(op, dim)?, keepdim }, &[self])?;
        let indices = out.remove(1);
        Ok((out.remove(0), indices))
    }

    /// The index of the first largest element along one dim (a NaN counts as the largest).
    #[track_caller]
    pub fn argmax(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<Tensor> {
        let dim = Some(self.dim("argmax", dim)?);
        apply(ArgExtreme { f: Extremum::Max, dim, keepdim }, &[self])
    }

    /// The index of the first smallest element along one dim (a NaN counts as the smallest).
    #[track_caller]
    pub fn argmin(&self, dim: impl Into<Dim>, keepdim: bool) -> Result<Tensor> {
        let dim = Some(self.dim("argmin", dim)?);
        apply(ArgExtreme { f: Extremum::Min, dim, keepdim }, &[self])
    }

    /// The index, in row-by-row order, of the first largest element of all.
    #[track_caller]
    pub fn argmax_all(&self) -> Result<Tensor> {
        apply(ArgExtreme { f: Extremum::Max, dim: None, keepdim: false }, &[self])
    }

    /// The index, in row-by-row order, of the first smallest element of all.
    #[track_caller]
    pub fn argmin_all(&self) -> Result<Tensor> {
        apply(ArgExtreme { f: Extremum::Min, dim: None, keepdim: false }, &[self])
    }
}
