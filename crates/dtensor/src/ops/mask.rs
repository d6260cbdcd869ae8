//! Selecting and overwriting elements by a mask, and triangular matrices.

use super::{Arrays, Aside, Here, Metas, Op, Precision, SELECTING, grads, need_dtype, one, same_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::tensor::Operand;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::select as kernel;
use dtensor_array::{DType, Meta, Scalar};
use dtensor_layout::Rule;

/// The second input where the first is not 0, else the third.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Where;

impl Op for Where {
    fn name(&self) -> &'static str {
        "where"
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_dtype("where", "the condition", &x[0], DType::U8)?;
        let dtype = same_dtype("where", &x[1..])?;
        let shape = x[1].shape.broadcast("where", &x[2].shape)?.broadcast("where", &x[0].shape)?;
        Ok(one(Meta { shape, dtype, device: x[0].device }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)?.passing(&SELECTING, &[1, 2])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::where_(x[0], x[1], x[2])?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[0])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (mask, dy) = (cx.input(0)?, cx.dy()?);
        Ok(grads![
            None,
            cx.when_broadcast(1, || mask.where_(&dy, 0))?,
            cx.when_broadcast(2, || dy.masked_fill(&mask, 0))?,
        ])
    }
}

/// The first input, with `value` where the second is not 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MaskedFill {
    value: Aside<f64>,
    /// True if the value is 0: sums then pass through.
    zero: bool,
}

impl Op for MaskedFill {
    fn name(&self) -> &'static str {
        "masked_fill"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_dtype("masked_fill", "the mask", &x[1], DType::U8)?;
        let shape = x[0].shape.broadcast("masked_fill", &x[1].shape)?;
        if shape != x[0].shape {
            return Err(Error::ShapeMismatch {
                op: "masked_fill",
                why: "the mask (second) must broadcast to the tensor",
                left: x[0].shape.clone(),
                right: x[1].shape.clone(),
            });
        }
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = Rule::pointwise(x, out)?.passing(&[ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min], &[0])?;
        if self.zero { rule.passing(&[ReduceOp::Sum], &[0]) } else { Ok(rule) }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::masked_fill(x[0], x[1], self.value.0)?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![cx.when(0, || cx.dy()?.masked_fill(&cx.input(1)?, 0))?, None])
    }
}

/// The lower (`lower`) or upper triangle of each matrix, with zeros elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Triangle {
    diagonal: i64,
    lower: bool,
}

impl Op for Triangle {
    fn name(&self) -> &'static str {
        if self.lower { "tril" } else { "triu" }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        if x[0].shape.ndim() < 2 {
            let message = format!("the input must have at least 2 dims, but its shape is {}", x[0].shape);
            return Err(Error::argument(self.name(), message));
        }
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::of("… r c -> … r c", x, out)?.contiguous("r")?.contiguous("c")?.passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let rank = x[0].dims().len();
        let first = (here.offset(0, rank - 2), here.offset(0, rank - 1));
        Ok(one(kernel::triangle(x[0], self.diagonal, self.lower, first)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(apply(self.clone(), &[&cx.dy()?])?)])
    }
}

impl Tensor {
    /// Uses this tensor as a mask (`u8`): returns `a` where it is not 0, else `b`. All three broadcast, and one of
    /// `a` and `b` may be a number.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[-1f32, 2.], [2])?;
    /// assert_eq!(x.gt(0.0)?.where_(&x, 0.0)?.to_vec::<f32>()?, [0., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn where_<'a>(&self, a: impl Into<Operand<'a>>, b: impl Into<Operand<'a>>) -> Result<Tensor> {
        let scalar_like = |t: &Tensor, s: Scalar| t.scalar_like("where", s);
        match (a.into(), b.into()) {
            (Operand::Tensor(a), Operand::Tensor(b)) => apply(Where, &[self, a, b]),
            (Operand::Tensor(a), Operand::Scalar(b)) => apply(Where, &[self, a, &scalar_like(a, b)?]),
            (Operand::Scalar(a), Operand::Tensor(b)) => apply(Where, &[self, &scalar_like(b, a)?, b]),
            _ => Err(Error::argument(
                "where",
                "a, b: one of the two must be a tensor, because the result takes its dtype",
            )),
        }
    }

    /// Returns a copy with `value` where the mask (`u8`, broadcast) is not 0.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, -2., 3.], [3])?;
    /// assert_eq!(x.masked_fill(&x.lt(0.0)?, 0)?.to_vec::<f32>()?, [1., 0., 3.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn masked_fill(&self, mask: &Tensor, value: impl Into<Scalar>) -> Result<Tensor> {
        let value = value.into();
        if value.exceeds_f64(self.dtype()) && mask.shape().broadcasts_to(&self.shape()) {
            return mask.where_(value, self);
        }
        let value = value.for_dtype("masked_fill", self.dtype())?;
        apply(MaskedFill { value: Aside(value), zero: value == 0.0 }, &[self, mask])
    }

    /// Returns the lower triangle of each matrix, with zeros above the given diagonal (0 is the main one; positive
    /// ones are above it).
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::ones([2, 2], DType::I64)?;
    /// assert_eq!(x.tril(0)?.to_vec2::<i64>()?, [[1, 0], [1, 1]]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn tril(&self, diagonal: i64) -> Result<Tensor> {
        apply(Triangle { diagonal, lower: true }, &[self])
    }

    /// Returns the upper triangle of each matrix, with zeros below the given diagonal (0 is the main one; positive
    /// ones are above it).
    #[track_caller]
    pub fn triu(&self, diagonal: i64) -> Result<Tensor> {
        apply(Triangle { diagonal, lower: false }, &[self])
    }
}
