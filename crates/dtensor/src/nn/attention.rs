//! Multi-head attention.

use super::{Base, Dropout, Linear, Module, forward};
use crate::ops::probability;
use crate::{AttentionOptions, Error, Result, Tensor};

/// Multi-head self-attention: three linear layers project the input to queries, keys and values, every head attends
/// with its slice of them, and a fourth layer projects the concatenated heads to the output. No layer has a bias.
///
/// The heads can be sharded over ranks, as distributed tensors or as local shards. Each rank then computes its own
/// heads, and no communication is needed. A head cannot be [split](Linear::with_heads) between ranks.
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
    /// Dropout on the output.
    pub resid_dropout: Dropout,
    /// Query projection.
    pub wq: Linear,
    /// Key projection.
    pub wk: Linear,
    /// Value projection.
    pub wv: Linear,
    /// Output projection.
    pub wo: Linear,
    n_heads: usize,
    head_dim: usize,
    dropout_p: f64,
    causal: bool,
    base: Base,
}

#[forward]
impl MultiHeadAttention {
    /// Creates a layer for vectors of size `dim` with `n_heads` heads of equal size, without dropout and causal mask.
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

    /// Sets the probability `p` with which attention weights and elements of the output are dropped in training.
    pub fn with_dropout(self, p: f64) -> Result<Self> {
        let dropout_p = probability("MultiHeadAttention", p)?;
        Ok(MultiHeadAttention { dropout_p, resid_dropout: Dropout::new(p)?, ..self })
    }

    /// With `true`, position i attends only to positions 0 to i.
    pub fn with_causal(self, causal: bool) -> Self {
        MultiHeadAttention { causal, ..self }
    }

    /// Returns the global number of heads.
    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// Returns the size of one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Applies the layer to an input of shape `[batch, length, dim]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let queries = self.heads("queries", &self.wq.forward(x)?)?;
        let keys = self.heads("keys", &self.wk.forward(x)?)?;
        let values = self.heads("values", &self.wv.forward(x)?)?;
        let dropout = if self.base.is_training() { self.dropout_p } else { 0.0 };
        let options = AttentionOptions { causal: self.causal, dropout, ..AttentionOptions::default() };
        let attended = queries.scaled_dot_product_attention(&keys, &values, options)?.transpose(1, 2)?;
        self.resid_dropout.forward(self.wo.forward(attended.flatten(2, 3)))
    }

    /// Reshapes `[batch, length, heads · size]` to `[batch, heads, length, size]`, with all heads or those of this
    /// rank.
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
