//! The block of a transformer: attention and a feed-forward network.

use super::ModelArgs;
use crate::nn::{Base, Dropout, Gelu, LayerNorm, Linear, Module, MultiHeadAttention, forward};
use crate::{Result, Tensor, module};

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
    /// Creates the attention of one block.
    pub fn attention(&self) -> Result<Attention> {
        self.check()?;
        let attention = Attention::new(self.dim, self.n_heads)?;
        Ok(attention.with_dropout(self.dropout_p)?.with_causal(self.use_attn_mask))
    }
}

/// The feed-forward network of a block: two linear layers with a [`Gelu`] between them, applied to each position.
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
    /// The layer to the hidden size.
    pub w1: Linear,
    /// The activation.
    pub gelu: Gelu,
    /// The layer back from the hidden size.
    pub w2: Linear,
    /// Dropout on the output.
    pub resid_dropout: Dropout,
    base: Base,
}

#[forward]
impl FeedForward {
    /// Creates the network for vectors of size `dim`.
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

    /// Applies the network.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.gelu.forward(self.w1.forward(x));
        self.resid_dropout.forward(self.w2.forward(hidden))
    }
}

module! {
    /// A pre-norm transformer block: attention and [`FeedForward`], each with a norm before it and a residual around it. The
    /// hidden size of the feed-forward network is four times `args.dim`.
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
    #[derive(Clone, Debug)]
    pub struct TransformerBlock(args: &ModelArgs) {
        /// Norm before the attention.
        pub attention_norm: LayerNorm = LayerNorm::new(args.dim),
        /// Self-attention.
        pub attention: Attention = args.attention(),
        /// Norm before the feed-forward network.
        pub ffn_norm: LayerNorm = LayerNorm::new(args.dim),
        /// The feed-forward network.
        pub feed_forward: FeedForward = FeedForward::new(args.dim, 4 * args.dim, args.dropout_p),
        base: Base = Base::new(),
    }
}

#[forward]
impl TransformerBlock {
    /// Applies the block to `[batch, length, dim]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let h = (x + self.attention.forward(self.attention_norm.forward(x)))?;
        &h + self.feed_forward.forward(self.ffn_norm.forward(&h))
    }
}
