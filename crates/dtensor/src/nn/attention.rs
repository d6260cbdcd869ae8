//! Attention with several heads.

use super::{Base, Dropout, Linear, Module, forward};
use crate::ops::probability;
use crate::{Attention, Error, Result, Tensor};

/// Attention of a sequence to itself, with several heads: three layers make queries, keys and values of the
/// input, each head attends with its part of them, and a fourth layer puts together what the heads found.
/// None has a bias.
///
/// The heads may lie on different ranks, as distributed tensors or as parts that each rank has for itself: a
/// rank attends with the heads that it has, and nothing moves. No head can be [cut](Linear::with_heads).
///
/// ```
/// use dtensor::nn::MultiHeadAttention;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = MultiHeadAttention::new(16, 4)?.with_dropout(0.1)?.with_causal(true);
/// let x = Tensor::randn([2, 5, 16], DType::F32)?;
/// assert_eq!(layer.forward(&x)?.dims(), [2, 5, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct MultiHeadAttention {
    /// Drops from what comes out.
    pub resid_dropout: Dropout,
    /// Makes queries.
    pub wq: Linear,
    /// Makes keys.
    pub wk: Linear,
    /// Makes values.
    pub wv: Linear,
    /// Puts together what the heads found.
    pub wo: Linear,
    n_heads: usize,
    head_dim: usize,
    dropout_p: f64,
    causal: bool,
    base: Base,
}

#[forward]
impl MultiHeadAttention {
    /// For vectors of size `dim`, cut into `n_heads` heads of equal size; nothing is dropped, and everything is seen.
    pub fn new(dim: usize, n_heads: usize) -> Result<Self> {
        if n_heads == 0 || dim == 0 || !dim.is_multiple_of(n_heads) {
            let message = format!("dim must be divisible by n_heads, but got {dim} and {n_heads}");
            return Err(Error::argument("MultiHeadAttention", message));
        }
        let heads = || Linear::new(dim, dim, false)?.with_heads(n_heads);
        Ok(MultiHeadAttention {
            resid_dropout: Dropout::new(0.0)?,
            wq: heads()?,
            wk: heads()?,
            wv: heads()?,
            wo: Linear::new(dim, dim, false)?,
            n_heads,
            head_dim: dim / n_heads,
            dropout_p: 0.0,
            causal: false,
            base: Base::new(),
        })
    }

    /// That drops attention weights, and elements of what comes out, with probability `p` while it trains.
    pub fn with_dropout(self, p: f64) -> Result<Self> {
        let dropout_p = probability("MultiHeadAttention", p)?;
        Ok(MultiHeadAttention { dropout_p, resid_dropout: Dropout::new(p)?, ..self })
    }

    /// In which position i sees positions 0 to i only, or everything.
    pub fn with_causal(self, causal: bool) -> Self {
        MultiHeadAttention { causal, ..self }
    }

    /// The number of heads of the whole.
    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// The size of one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Applies the layer to `[batch, length, dim]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let queries = self.heads("queries", &self.wq.forward(x)?)?;
        let keys = self.heads("keys", &self.wk.forward(x)?)?;
        let values = self.heads("values", &self.wv.forward(x)?)?;
        let dropout = if self.base.is_training() { self.dropout_p } else { 0.0 };
        let options = Attention { causal: self.causal, dropout, ..Attention::default() };
        let found = queries.scaled_dot_product_attention(&keys, &values, options)?.transpose(1, 2)?;
        let &[batch, length, heads, size] = found.dims() else {
            unreachable!("it has the dims of the queries")
        };
        self.resid_dropout.forward(&self.wo.forward(&found.view([batch, length, heads * size])?)?)
    }

    /// `[batch, length, heads · size]` as `[batch, heads, length, size]`: all heads, or those that this rank has.
    #[track_caller]
    fn heads(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        match *x.dims() {
            [batch, length, width] if width.is_multiple_of(self.head_dim) => {
                x.view([batch, length, width / self.head_dim, self.head_dim])?.transpose(1, 2)
            }
            _ => {
                let message = format!(
                    "{what} must be [batch, length, heads of size {}], but their shape is {}",
                    self.head_dim,
                    x.shape()
                );
                Err(Error::argument("MultiHeadAttention", message))
            }
        }
    }
}
