//! Sorting along one dim: `sort` and `topk`.

use super::extremum::shift_indices;
use super::{Arrays, Here, Metas, Op, Together, grads, reshaped};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply_all;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::sort as kernel;
use dtensor_array::shape::Dim;
use dtensor_array::{DType, Meta};
use dtensor_layout::{Rule, around};

/// The elements along `dim` in order, and their original indices: two outputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Order {
    Sort { dim: usize, descending: bool },
    Top { dim: usize, k: usize, largest: bool },
}

impl Op for Order {
    fn name(&self) -> &'static str {
        match self {
            Order::Sort { .. } => "sort",
            Order::Top { .. } => "topk",
        }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let shape = match *self {
            Order::Top { dim, k, .. } => {
                let size = x[0].shape.get(dim).copied().unwrap_or(1);
                if k > size {
                    let message = format!("k ({k}) is out of range for dim {dim} of size {size}");
                    return Err(Error::argument("topk", message));
                }
                if x[0].shape.ndim() == 0 { x[0].shape.clone() } else { x[0].shape.with_dim(dim, k) }
            }
            Order::Sort { .. } => x[0].shape.clone(),
        };
        let values = reshaped(&x[0], shape);
        let indices = Meta { dtype: DType::I64, ..values.clone() };
        Ok(vec![values, indices].into())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rank = x[0].shape.ndim();
        match *self {
            _ if rank == 0 => Ok(Rule::replicated(x, out)),
            Order::Sort { dim, .. } => Rule::along(dim, x, out),
            Order::Top { dim, .. } => {
                let top = around(dim, rank, "1");
                let text = format!("{} -> {top}, {top}", around(dim, rank, "v"));
                Rule::of(&text, x, out)?.merging(x[0].dtype.size() + DType::I64.size()).contiguous("v")
            }
        }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let (values, indices) = match *self {
            Order::Sort { dim, descending } => kernel::sort(x[0], dim, descending)?,
            Order::Top { dim, k, largest } => kernel::topk(x[0], k, dim, largest)?,
        };
        Ok(vec![values, indices].into())
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        let Order::Top { dim, k, largest } = *self else {
            return Err(Error::argument("sort", "the sorted dim must not be sharded"));
        };
        if let [values, indices, ..] = known {
            let (values, indices) = kernel::merge_top(values, indices, k, dim, largest)?;
            return Ok(Together::Done(vec![values, indices].into()));
        }
        let (values, indices) = kernel::topk_part(x[0], k, dim, largest)?;
        Ok(Together::Stack(vec![values, shift_indices(&indices, here.offset(0, dim))?].into()))
    }

    fn saves(&self) -> Saves {
        Saves::only(&[], &[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (Order::Sort { dim, .. } | Order::Top { dim, .. }) = *self;
        let zeros = cx.zeros(0)?;
        if zeros.ndim() == 0 {
            return Ok(grads![Some(cx.dy()?)]);
        }
        Ok(grads![Some(zeros.scatter_add(dim, &cx.output(1)?, &cx.dy()?)?)])
    }
}

impl Tensor {
    /// Sorts along one dim. Returns the elements and their original indices. The sort is stable; NaN counts as
    /// greater than any number.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let (values, indices) = Tensor::from_slice(&[3f32, 9., 4.], [3])?.sort(0, false)?;
    /// assert_eq!((values.to_vec::<f32>()?, indices.to_vec::<i64>()?), (vec![3., 4., 9.], vec![0, 2, 1]));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn sort(&self, dim: impl Into<Dim>, descending: bool) -> Result<(Tensor, Tensor)> {
        self.order(Order::Sort { dim: self.dim("sort", dim)?, descending })
    }

    /// Returns the `k` largest (or smallest) elements along one dim in order, and their indices.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let (values, indices) = Tensor::from_slice(&[3f32, 9., 4.], [3])?.topk(2, 0, true)?;
    /// assert_eq!((values.to_vec::<f32>()?, indices.to_vec::<i64>()?), (vec![9., 4.], vec![1, 2]));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn topk(&self, k: usize, dim: impl Into<Dim>, largest: bool) -> Result<(Tensor, Tensor)> {
        self.order(Order::Top { dim: self.dim("topk", dim)?, k, largest })
    }

    #[track_caller]
    fn order(&self, op: Order) -> Result<(Tensor, Tensor)> {
        let mut out = apply_all(op, &[self])?;
        let indices = out.remove(1);
        Ok((out.remove(0), indices))
    }
}
