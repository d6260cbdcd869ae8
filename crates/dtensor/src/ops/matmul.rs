//! Matrix products: `matmul`, `mm`, `bmm`, `addmm` and `linear`.

use super::{Arrays, Here, Metas, Op, Precision, grads, one, reshaped, same_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::matmul as kernel;
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::Rule;

fn check_inner_sizes(op: &'static str, a: &Meta, b: &Meta, left: usize, right: usize) -> Result<()> {
    if left == right {
        return Ok(());
    }
    Err(Error::ShapeMismatch {
        op,
        why: "shapes cannot be multiplied: the contracted sizes differ",
        left: a.shape.clone(),
        right: b.shape.clone(),
    })
}

fn check_product_dtype(op: &'static str, x: &[Meta]) -> Result<DType> {
    match same_dtype(op, x)? {
        dtype @ DType::U8 => {
            Err(Error::DType { op, dtype, why: "u8 has no matrix product; cast to another dtype first" })
        }
        dtype => Ok(dtype),
    }
}

fn transpose_last_dims(x: &Array) -> Result<Array> {
    let rank = x.dims().len();
    x.transpose(rank - 2, rank - 1)
}

/// `a · b (+ bias)`: `[…, m, k] · […, k, n] → […, m, n]`, with broadcast leading dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Matmul {
    pub(super) op: &'static str,
}

impl Op for Matmul {
    fn name(&self) -> &'static str {
        self.op
    }

    fn precision(&self) -> Precision {
        Precision::Low
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        check_product_dtype(self.op, x)?;
        let (a, b) = (&x[0], &x[1]);
        let (ra, rb) = (a.shape.ndim(), b.shape.ndim());
        if ra < 2 || rb < 2 {
            let message =
                format!("both operands must have at least 2 dims, got shapes {} and {}", a.shape, b.shape);
            return Err(Error::argument(self.op, message));
        }
        check_inner_sizes(self.op, a, b, a.shape[ra - 1], b.shape[rb - 2])?;
        let batch = Shape::from(&a.shape[..ra - 2]).broadcast(self.op, &Shape::from(&b.shape[..rb - 2]))?;
        let shape: Shape = batch.iter().copied().chain([a.shape[ra - 2], b.shape[rb - 1]]).collect();
        if let Some(bias) = x.get(2)
            && !bias.shape.broadcasts_to(&shape)
        {
            return Err(Error::ShapeMismatch {
                op: self.op,
                why: "the first shape does not broadcast to the product's",
                left: bias.shape.clone(),
                right: shape,
            });
        }
        Ok(one(reshaped(a, shape)))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = if x.len() == 3 {
            Rule::of("… m k, … k n, … m n -> … m n", x, out)?.addend(2)?
        } else {
            Rule::of("… m k, … k n -> … m n", x, out)?
        };
        rule.linear(&[0])?.linear(&[1])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::matmul(x[0], x[1], x.get(2).copied())?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[0, 1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let (a, b) = (cx.input(0)?, cx.input(1)?);
        let mut grads: Grads = grads![
            // The gradient of a matrix shared by a batch is one product over the folded batch dims.
            cx.when_broadcast(0, || if a.ndim() == 2 && b.ndim() == dy.ndim() && dy.ndim() > 2 {
                apply(FoldedMatmul { out: dy.dtype() }, &[&dy.transpose(-2, -1)?, &b.transpose(-2, -1)?])
            } else {
                dy.matmul(&b.transpose(-2, -1)?)
            })?,
            cx.when_broadcast(1, || if b.ndim() == 2 && a.ndim() == dy.ndim() {
                apply(FoldedMatmul { out: dy.dtype() }, &[&a, &dy])
            } else {
                a.transpose(-2, -1)?.matmul(&dy)
            })?,
        ];
        if cx.inputs() == 3 {
            grads.push(cx.when_broadcast(2, || Ok(dy))?);
        }
        Ok(grads)
    }
}

/// `x · weightᵀ (+ bias)`: `[…, k] · [n, k] → […, n]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Linear;

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn precision(&self) -> Precision {
        Precision::Low
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        check_product_dtype("linear", x)?;
        let (input, weight) = (&x[0], &x[1]);
        super::need_ndim("linear", "the weight", weight, 2)?;
        let Some((&k, lead)) = input.shape.split_last() else {
            return Err(Error::argument("linear", "the input must have at least 1 dim"));
        };
        check_inner_sizes("linear", input, weight, k, weight.shape[1])?;
        if let Some(bias) = x.get(2)
            && bias.shape[..] != weight.shape[..1]
        {
            return Err(Error::ShapeMismatch {
                op: "linear",
                why: "the bias must have one element per row of the weight",
                left: bias.shape.clone(),
                right: weight.shape.clone(),
            });
        }
        Ok(one(reshaped(input, lead.iter().copied().chain([weight.shape[0]]).collect())))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = if x.len() == 3 {
            Rule::of("… k, n k, n -> … n", x, out)?.addend(2)?
        } else {
            Rule::of("… k, n k -> … n", x, out)?
        };
        rule.linear(&[0])?.linear(&[1])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let (weight, bias) = (transpose_last_dims(x[1])?, x.get(2).copied());
        if x[0].dims().len() > 1 {
            return Ok(one(kernel::matmul(x[0], &weight, bias)?));
        }
        let y = kernel::matmul(&x[0].unsqueeze(0)?, &weight, bias)?;
        Ok(one(y.reshape(&here.out()[0].shape)?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[0, 1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let mut grads: Grads = grads![
            cx.when(0, || {
                let weight = cx.input(1)?;
                if dy.ndim() == 1 { dy.unsqueeze(0)?.matmul(&weight)?.squeeze(0) } else { dy.matmul(&weight) }
            })?,
            cx.when(1, || {
                // A gradient that would be widened is computed in the wider dtype.
                let is_half = matches!(dy.dtype(), DType::F16 | DType::BF16);
                let wide = if is_half && cx.may_have_any_float(1) { DType::F32 } else { dy.dtype() };
                apply(FoldedMatmul { out: wide }, &[&dy, &cx.input(0)?])
            })?,
        ];
        if cx.inputs() == 3 {
            grads.push(cx.when_broadcast(2, || Ok(dy))?);
        }
        Ok(grads)
    }
}

/// `Σ aᵀ · b` over all leading dims: `[…, m], […, n] → [m, n]`. This is the gradient of a matrix shared by a batch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FoldedMatmul {
    /// The dtype of the result: that of the inputs, or a wider one.
    out: DType,
}

impl Op for FoldedMatmul {
    fn name(&self) -> &'static str {
        "folded_matmul"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        check_product_dtype(self.name(), x)?;
        let lead = |meta: &Meta| meta.shape.split_last().map(|(&n, lead)| (n, lead.to_vec()));
        match (lead(&x[0]), lead(&x[1])) {
            (Some((m, a)), Some((n, b))) if a == b => {
                Ok(one(Meta { dtype: self.out, ..reshaped(&x[0], Shape::from([m, n])) }))
            }
            _ => Err(Error::ShapeMismatch {
                op: self.name(),
                why: "all dims but the last must agree",
                left: x[0].shape.clone(),
                right: x[1].shape.clone(),
            }),
        }
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::of("… m, … n -> m n", x, out)?.linear(&[0])?.linear(&[1])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::folded(x[0], x[1], self.out)?))
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let g = cx.dy()?.to_dtype(cx.input_meta(0).dtype)?;
        Ok(grads![
            cx.when(0, || cx.input(1)?.linear(&g, None))?,
            cx.when(1, || cx.input(0)?.linear(&g.t()?, None))?,
        ])
    }
}

impl Tensor {
    /// Computes the matrix product over the last two dims; the other dims broadcast as a batch. A 1-d tensor on the
    /// left is a row, on the right a column, and that dim is removed from the result.
    ///
    /// On a mesh, sharded rows or columns stay sharded, and a sharded inner dim gives a partial result.
    ///
    /// ```
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let a = Tensor::ones([5, 2, 3], DType::F32)?;
    /// assert_eq!(a.matmul(&Tensor::ones([3, 4], DType::F32)?)?.dims(), [5, 2, 4]);
    /// assert_eq!(a.matmul(&Tensor::ones([3], DType::F32)?)?.dims(), [5, 2]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        const OP: &str = "matmul";
        if self.ndim() == 0 || other.ndim() == 0 {
            return Err(Error::argument(OP, "both arguments need to be at least 1-D"));
        }
        let op = Matmul { op: OP };
        match (self.ndim(), other.ndim()) {
            (1, 1) => apply(op, &[&self.unsqueeze(0)?, &other.unsqueeze(1)?])?.reshape(Shape::scalar()),
            (1, _) => apply(op, &[&self.unsqueeze(0)?, other])?.squeeze(-2),
            (_, 1) => apply(op, &[self, &other.unsqueeze(1)?])?.squeeze(-1),
            _ => apply(op, &[self, other]),
        }
    }

    /// Computes the product of two matrices. Returns an error unless both have 2 dims.
    #[track_caller]
    pub fn mm(&self, other: &Tensor) -> Result<Tensor> {
        self.product_with_ndim("mm", other, 2)
    }

    /// Computes the products of two batches of matrices. Returns an error unless both have 3 dims and equal batch
    /// sizes.
    #[track_caller]
    pub fn bmm(&self, other: &Tensor) -> Result<Tensor> {
        if let (&[a, _, _], &[b, _, _]) = (self.dims(), other.dims())
            && a != b
        {
            return Err(Error::ShapeMismatch {
                op: "bmm",
                why: "the batch sizes must agree",
                left: self.shape(),
                right: other.shape(),
            });
        }
        self.product_with_ndim("bmm", other, 3)
    }

    #[track_caller]
    fn product_with_ndim(&self, op: &'static str, other: &Tensor, rank: usize) -> Result<Tensor> {
        super::need_ndim(op, "the left operand", &self.meta(), rank)?;
        super::need_ndim(op, "the right operand", &other.meta(), rank)?;
        apply(Matmul { op }, &[self, other])
    }

    /// Computes this tensor, broadcast, plus the product of two matrices, in one fused kernel.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let (a, b) = (Tensor::ones([2, 3], DType::F32)?, Tensor::ones([3, 2], DType::F32)?);
    /// let bias = Tensor::from_slice(&[10f32, 20.], [2])?;
    /// assert_eq!(bias.addmm(&a, &b)?.to_vec2::<f32>()?, [[13., 23.], [13., 23.]]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn addmm(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        super::need_ndim("addmm", "mat1", &a.meta(), 2)?;
        super::need_ndim("addmm", "mat2", &b.meta(), 2)?;
        apply(Matmul { op: "addmm" }, &[a, b, self])
    }

    /// Computes `self · weightᵀ + bias` over the last dim, for a weight of shape `[outputs, inputs]`.
    ///
    /// ```
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::ones([2, 5, 3], DType::F32)?;
    /// let (weight, bias) = (Tensor::ones([4, 3], DType::F32)?, Tensor::ones([4], DType::F32)?);
    /// let y = x.linear(&weight, Some(&bias))?;
    /// assert_eq!(y.dims(), [2, 5, 4]);
    /// assert_eq!(y.to_vec::<f32>()?[0], 4.0);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match bias {
            Some(bias) => apply(Linear, &[self, weight, bias]),
            None => apply(Linear, &[self, weight]),
        }
    }
}
