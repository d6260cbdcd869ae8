//! Scaled dot-product attention, fused: the matrix of scores is never stored.

use super::dropout::probability;
use super::{
    Arrays, Aside, Bits, Here, Metas, Op, Precision, need_float, no_second, reshaped, same_dtype,
    statistics_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::dispatch::cast_metas;
use crate::random::{Draw, next_draw};
use crate::{Error, Result, Tensor, apply_all};
use dtensor_array::Array;
use dtensor_array::Window;
use dtensor_array::kernels::attention::{self as kernel, AttentionOptions};
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::Rule;

const OP: &str = "scaled_dot_product_attention";

/// How [`scaled_dot_product_attention`](Tensor::scaled_dot_product_attention) is to be done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attention<'a> {
    /// Which keys a query may attend to: `u8` (not 0: yes), or a number to add to each score. Broadcasts to
    /// `[…, queries, keys]`. No gradient flows into it.
    pub mask: Option<&'a Tensor>,
    /// Query i sees keys 0 to i only.
    pub causal: bool,
    /// The probability of dropping a weight; for training only.
    pub dropout: f64,
    /// What scores are multiplied with; 1/√(size of a key) if not given.
    pub scale: Option<f64>,
}

/// Inputs q, k, v and the mask if there is one; outputs the result and the log-sum-exp of each query's scores.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sdpa {
    causal: bool,
    mask: bool,
    scale: Bits,
    dropout: Bits,
    draw: Aside<Draw>,
}

impl Sdpa {
    /// Which heads of the whole this rank has, if dropout has to know.
    fn heads(&self, here: &Here<'_>, q: usize) -> Result<Option<Window>> {
        let dropped = self.dropout.get() > 0.0;
        dropped.then(|| here.window(q, 0..here.whole(q).shape.rank() - 2)).transpose()
    }

    /// For the queries that this rank has of the `q`-th input.
    fn options<'a>(&self, here: &Here<'_>, q: usize, heads: Option<&'a Window>) -> AttentionOptions<'a> {
        let sequence = here.whole(q).shape.rank() - 2;
        AttentionOptions {
            scale: self.scale.get(),
            causal: self.causal,
            dropout: self.dropout.get(),
            draw: self.draw.0,
            heads,
            first_query: here.offset(q, sequence),
            all_queries: here.whole(q).shape[sequence],
        }
    }
}

impl Op for Sdpa {
    fn name(&self) -> &'static str {
        OP
    }

    fn precision(&self) -> Precision {
        Precision::Low
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let (q, k, v) = (&x[0], &x[1], &x[2]);
        need_float(OP, same_dtype(OP, &x[..3])?)?;
        let mismatch = |why, a: &Meta, b: &Meta| {
            Err(Error::ShapeMismatch { op: OP, why, left: a.shape.clone(), right: b.shape.clone() })
        };
        let rank = q.shape.rank();
        for other in [k, v] {
            if rank < 2 || other.shape.rank() != rank {
                return mismatch(
                    "query, key and value must have the same number of dims, at least 2",
                    q,
                    other,
                );
            }
        }
        let (batch, last) = (rank - 2, rank - 1);
        if q.shape[..batch] != k.shape[..batch] || q.shape[last] != k.shape[last] {
            return mismatch("query and key must agree in all dims but the length", q, k);
        }
        if k.shape[..last] != v.shape[..last] {
            return mismatch("key and value must agree in all dims but the last", k, v);
        }
        let out: Shape = q.shape[..last].iter().copied().chain([v.shape[last]]).collect();
        if let Some(mask) = x.get(3) {
            if mask.dtype != DType::U8 && mask.dtype != q.dtype {
                let message = format!("the mask must be of dtype u8 or {}, not {}", q.dtype, mask.dtype);
                return Err(Error::argument(OP, message));
            }
            let scores: Shape = q.shape[..last].iter().copied().chain([k.shape[batch]]).collect();
            if !mask.shape.broadcasts_to(&scores) {
                let scores = Meta { shape: scores, ..q.clone() };
                return mismatch("the mask does not broadcast to the scores", mask, &scores);
            }
        }
        let lse =
            Meta { shape: Shape::from(&q.shape[..last]), dtype: statistics_dtype(q.dtype), device: q.device };
        Ok([reshaped(q, out), lse].into_iter().collect())
    }

    /// Queries do not know of each other, but a causal mask and dropout go by where they stand.
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let mask = if self.mask { ", … s t!" } else { "" };
        Rule::of(&format!("… s e!, … t! e!, … t! f!{mask} -> … s f!, … s"), x, out)?.contiguous("s")
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let heads = self.heads(here, 0)?;
        let options = self.options(here, 0, heads.as_ref());
        let (out, lse) = kernel::attention_forward(x[0], x[1], x[2], x.get(3).copied(), &options)?;
        Ok([out, lse].into_iter().collect())
    }

    fn saves(&self) -> Saves {
        Saves::ALL
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (out, lse) = (cx.output(0)?.detach(), cx.output(1)?.detach());
        let mut inputs = vec![cx.dy()?, cx.input(0)?, cx.input(1)?, cx.input(2)?, out, lse];
        if self.mask {
            inputs.push(cx.input(3)?);
        }
        let out = apply_all(SdpaGrad(self.clone()), &inputs.iter().collect::<Vec<_>>())?;
        let mut grads: Grads = out.into_iter().map(Some).collect();
        if self.mask {
            grads.push(None);
        }
        Ok(grads)
    }
}

/// The gradients of q, k and v.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SdpaGrad(Sdpa);

impl Op for SdpaGrad {
    fn name(&self) -> &'static str {
        OP
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(x[1..4].iter().cloned().collect())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let mask = if self.0.mask { ", … s t!" } else { "" };
        let text = format!("… s f!, … s e!, … t! e!, … t! f!, … s f!, … s{mask} -> … s e!, … t! e!, … t! f!");
        Rule::of(&text, x, out)?.summing().contiguous("s")
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let mask = x.get(6).copied();
        let heads = self.0.heads(here, 1)?;
        let options = self.0.options(here, 1, heads.as_ref());
        let (dq, dk, dv) = kernel::attention_backward(x[0], x[1], x[2], x[3], mask, x[4], x[5], &options)?;
        Ok([dq, dk, dv].into_iter().collect())
    }

    fn gradient(&self, _: &Backward<'_>) -> Result<Grads> {
        no_second(OP)
    }
}

impl Tensor {
    /// softmax(q · kᵀ · scale + mask) · v, with this tensor as q: `[…, queries, size]`, k `[…, keys, size]`,
    /// v `[…, keys, any]`. A query that may attend to no key gives zeros.
    ///
    /// On a mesh, batches, heads and queries may be sharded; keys and values are brought together. So where
    /// q, k and v are sharded along their length, each rank computes its own queries, and gradients of keys
    /// and values are summed: context parallelism, without a scope of its own.
    ///
    /// ```
    /// use dtensor::{Attention, DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let q = Tensor::randn([2, 4, 8, 16], DType::F32)?;
    /// let out = q.scaled_dot_product_attention(&q, &q, Attention { causal: true, ..Default::default() })?;
    /// assert_eq!(out.dims(), [2, 4, 8, 16]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        key: &Tensor,
        value: &Tensor,
        options: Attention<'_>,
    ) -> Result<Tensor> {
        if let Some(mask) = options.mask
            && mask.requires_grad()
        {
            let message = "no gradient flows into the mask: detach it".into();
            return Err(Error::Argument { op: OP, message });
        }
        let size = self.dims().last().copied().unwrap_or(1).max(1);
        let dropout = probability(OP, options.dropout)?;
        let mut op = Sdpa {
            causal: options.causal,
            mask: options.mask.is_some(),
            scale: Bits::new(options.scale.unwrap_or_else(|| 1.0 / (size as f64).sqrt())),
            dropout: Bits::new(dropout),
            draw: Aside(Draw::default()),
        };
        let inputs: Vec<&Tensor> =
            [Some(self), Some(key), Some(value), options.mask].into_iter().flatten().collect();
        if dropout > 0.0 {
            // What is refused uses up no draw. It concerns the mesh of all inputs, of which some may not lie on it.
            op.shape(&cast_metas(&op, &inputs))?;
            op.draw = Aside(next_draw(inputs.iter().find_map(|x| x.mesh())));
        }
        Ok(apply_all(op, &inputs)?.swap_remove(0))
    }
}
