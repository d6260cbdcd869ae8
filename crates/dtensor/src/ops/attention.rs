//! Fused scaled dot-product attention, which never stores the attention matrix.

use super::dropout::probability;
use super::{
    Arrays, Aside, Bits, Here, Metas, Op, Precision, need_float, no_second, reshaped, same_dtype,
    statistics_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::dispatch::cast_metas;
use crate::op::apply_all;
use crate::random::{Draw, next_draw};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Window;
use dtensor_array::kernels::attention::{self as kernel, AttentionOptions as KernelOptions};
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::Rule;

const OP: &str = "scaled_dot_product_attention";

/// Options of [`scaled_dot_product_attention`](Tensor::scaled_dot_product_attention).
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions<'a> {
    /// The attention mask, broadcast to `[…, queries, keys]`: `u8` (a query attends to keys that are not 0), or a
    /// float to add to the logits. It gets no gradient.
    pub mask: Option<&'a Tensor>,
    /// If true, query i attends to keys 0 to i only.
    pub causal: bool,
    /// The dropout probability of attention weights, for training only.
    pub dropout: f64,
    /// The factor for the logits; 1/√(head size) if `None`.
    pub scale: Option<f64>,
    /// Grouped-query attention: if true, queries may have a multiple of the heads of keys and values, and as many consecutive heads of queries
    /// share each of these. Heads are the third dim from the back.
    pub enable_gqa: bool,
}

/// Inputs: q, k, v and the mask, if any. Outputs: the result, and the log-sum-exp of each query's logits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sdpa {
    causal: bool,
    mask: bool,
    scale: Bits,
    dropout: Bits,
    draw: Aside<Draw>,
}

impl Sdpa {
    /// Returns the leading dims (batch and heads) of this rank's shard if dropout needs them.
    fn heads(&self, here: &Here<'_>, q: usize) -> Result<Option<Window>> {
        let has_dropout = self.dropout.get() > 0.0;
        has_dropout.then(|| here.window(q, 0..here.whole(q).shape.ndim() - 2)).transpose()
    }

    /// Returns the kernel's options for this rank's shard of the queries, input `q`.
    fn options<'a>(&self, here: &Here<'_>, q: usize, heads: Option<&'a Window>) -> KernelOptions<'a> {
        let sequence = here.whole(q).shape.ndim() - 2;
        KernelOptions {
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
        let rank = q.shape.ndim();
        for other in [k, v] {
            if rank < 2 || other.shape.ndim() != rank {
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
            let logits: Shape = q.shape[..last].iter().copied().chain([k.shape[batch]]).collect();
            if !mask.shape.broadcasts_to(&logits) {
                let logits = Meta { shape: logits, ..q.clone() };
                return mismatch("the mask does not broadcast to […, queries, keys]", mask, &logits);
            }
        }
        let lse =
            Meta { shape: Shape::from(&q.shape[..last]), dtype: statistics_dtype(q.dtype), device: q.device };
        Ok(vec![reshaped(q, out), lse].into())
    }

    /// Queries are independent and may be sharded, but into ranges: causal masks and dropout depend on their global
    /// indices.
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let mask = if self.mask { ", … s t!" } else { "" };
        Rule::of(&format!("… s e!, … t! e!, … t! f!{mask} -> … s f!, … s"), x, out)?.contiguous("s")
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let heads = self.heads(here, 0)?;
        let options = self.options(here, 0, heads.as_ref());
        let (out, lse) = kernel::attention_forward(x[0], x[1], x[2], x.get(3).copied(), &options)?;
        Ok(vec![out, lse].into())
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
        Ok(vec![dq, dk, dv].into())
    }

    fn gradient(&self, _: &Backward<'_>) -> Result<Grads> {
        no_second(OP)
    }
}

impl Tensor {
    /// Computes softmax(q · kᵀ · scale + mask) · v with this tensor as q: `[…, queries, size]`, `key` `[…, keys,
    /// size]`, `value` `[…, keys, value size]`. A query that may attend to no key gives zeros.
    ///
    /// On a mesh, batch, heads and queries may be sharded; keys and values are gathered along their length. If q, k
    /// and v are sharded along the sequence, each rank computes its shard of the queries, and the gradients of keys
    /// and values are summed over the ranks: this is context parallelism.
    ///
    /// ```
    /// use dtensor::{AttentionOptions, DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let q = Tensor::randn([2, 4, 8, 16], DType::F32)?;
    /// let out = q.scaled_dot_product_attention(&q, &q, AttentionOptions { causal: true, ..Default::default() })?;
    /// assert_eq!(out.dims(), [2, 4, 8, 16]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        key: &Tensor,
        value: &Tensor,
        options: AttentionOptions<'_>,
    ) -> Result<Tensor> {
        if options.enable_gqa {
            return self.grouped_attention(key, value, options);
        }
        if let Some(mask) = options.mask
            && mask.requires_grad()
        {
            let message = "the mask requires grad, but it gets no gradient: call `detach` on it".into();
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
            // Check first, so that an error uses up no draw. The draw is for the inputs' mesh; some inputs may not
            // be distributed.
            op.shape(&cast_metas(&op, &inputs))?;
            op.draw = Aside(next_draw(inputs.iter().find_map(|x| x.mesh())));
        }
        Ok(apply_all(op, &inputs)?.swap_remove(0))
    }

    /// Splits the heads of queries into groups, and lets each group read the same keys and values. These are views: nothing is copied.
    #[track_caller]
    fn grouped_attention(
        &self,
        key: &Tensor,
        value: &Tensor,
        options: AttentionOptions<'_>,
    ) -> Result<Tensor> {
        let options = AttentionOptions { enable_gqa: false, ..options };
        let heads = |x: &Tensor| x.ndim().checked_sub(3).map(|dim| x.dims()[dim]);
        let groups = match (heads(self), heads(key)) {
            (Some(queries), Some(keys)) if keys > 0 && queries % keys == 0 && heads(value) == Some(keys) => {
                queries / keys
            }
            _ => {
                let message = format!(
                    "with `enable_gqa`, the heads (the third dim from the back) of queries must be a multiple of those of keys and values, \
                     but the shapes are {}, {} and {}",
                    self.shape(),
                    key.shape(),
                    value.shape()
                );
                return Err(Error::argument(OP, message));
            }
        };
        let share = |x: &Tensor| -> Result<Tensor> {
            let x = x.unsqueeze(-3)?;
            let mut shape = x.dims().to_vec();
            let dim = shape.len() - 3;
            shape[dim] = groups;
            x.expand(shape)
        };
        let split = |x: &Tensor| x.unflatten(-3, [-1, groups as i32]);
        let mask = match options.mask {
            Some(mask) if mask.ndim() < 3 => Some(mask.clone()),
            Some(mask) if mask.dims()[mask.ndim() - 3] == 1 => Some(mask.unsqueeze(-3)?),
            Some(mask) => Some(split(mask)?),
            None => None,
        };
        let options = AttentionOptions { mask: mask.as_ref(), ..options };
        split(self)?.scaled_dot_product_attention(&share(key)?, &share(value)?, options)?.flatten(-4, -3)
    }
}
