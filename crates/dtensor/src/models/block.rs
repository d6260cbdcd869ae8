//! What a transformer is a stack of.

use super::ModelArgs;
use crate::nn::{Base, Dropout, Gelu, LayerNorm, Linear, Module, MultiHeadAttention, forward};
use crate::{Result, Tensor};

/// The attention of a [`Transformer`](super::Transformer).
///
/// ```
/// use dtensor::models::{Attention, ModelArgs};
/// # fn main() -> dtensor::Result<()> {
/// let attention: Attention = ModelArgs::default().attention()?;
/// assert_eq!((attention.n_heads(), attention.head_dim()), (4, 4));
/// # Ok(())
/// # }
/// ```
pub type Attention = MultiHeadAttention;

impl ModelArgs {
    /// The attention of a model of these sizes.
    pub fn attention(&self) -> Result<Attention> {
        self.check()?;
        let attention = Attention::new(self.dim, self.n_heads)?;
        Ok(attention.with_dropout(self.dropout_p)?.with_causal(self.use_attn_mask))
    }
}

/// Two layers with a [`Gelu`] between them, each position by itself.
///
/// ```
/// use dtensor::models::FeedForward;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = FeedForward::new(4, 16, 0.1)?;
/// assert_eq!(layer.forward(&Tensor::ones([2, 3, 4], DType::F32)?)?.dims(), [2, 3, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct FeedForward {
    /// Up to the hidden size.
    pub w1: Linear,
    /// The bend.
    pub gelu: Gelu,
    /// Back again.
    pub w2: Linear,
    /// Drops from what comes out.
    pub resid_dropout: Dropout,
    base: Base,
}

#[forward]
impl FeedForward {
    /// For vectors of size `dim`.
    pub fn new(dim: usize, hidden_dim: usize, dropout_p: f64) -> Result<Self> {
        let resid_dropout = Dropout::new(dropout_p)?;
        Ok(FeedForward {
            w1: Linear::new(dim, hidden_dim, true)?,
            gelu: Gelu::default(),
            w2: Linear::new(hidden_dim, dim, true)?,
            resid_dropout,
            base: Base::new(),
        })
    }

    /// Applies the layers.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.gelu.forward(&self.w1.forward(x)?)?;
        self.resid_dropout.forward(&self.w2.forward(&hidden)?)
    }
}

/// Attention and [`FeedForward`], each after a norm and added to what it was given.
///
/// ```
/// use dtensor::models::{ModelArgs, TransformerBlock};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let block = TransformerBlock::new(&ModelArgs::default())?;
/// assert_eq!(block.forward(&Tensor::ones([2, 5, 16], DType::F32)?)?.dims(), [2, 5, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct TransformerBlock {
    /// Before the attention.
    pub attention_norm: LayerNorm,
    /// Looks at other positions.
    pub attention: Attention,
    /// Before the layers.
    pub ffn_norm: LayerNorm,
    /// Looks at each position.
    pub feed_forward: FeedForward,
    base: Base,
}

#[forward]
impl TransformerBlock {
    /// As a model of these sizes has it: the hidden size is four times the size of a vector.
    pub fn new(args: &ModelArgs) -> Result<Self> {
        Ok(TransformerBlock {
            attention_norm: LayerNorm::new(args.dim)?,
            attention: args.attention()?,
            ffn_norm: LayerNorm::new(args.dim)?,
            feed_forward: FeedForward::new(args.dim, 4 * args.dim, args.dropout_p)?,
            base: Base::new(),
        })
    }

    /// Applies the block to `[batch, length, dim]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let h = x.add(&self.attention.forward(&self.attention_norm.forward(x)?)?)?;
        h.add(&self.feed_forward.forward(&self.ffn_norm.forward(&h)?)?)
    }
}
