//! The sizes and options of a transformer.

use crate::ops::probability;
use crate::{Error, Result};

/// The sizes and options of a [`Transformer`](super::Transformer). They are checked when a model is created.
///
/// ```
/// use dtensor::models::{ModelArgs, Transformer};
/// # fn main() -> dtensor::Result<()> {
/// let args = ModelArgs { dim: 32, dropout_p: 0.0, ..ModelArgs::default() };
/// assert_eq!(Transformer::new(&args)?.args().head_dim(), 8);
/// let error = Transformer::new(&ModelArgs { n_heads: 5, ..args }).unwrap_err().to_string();
/// assert!(error.contains("dim must be divisible by n_heads"), "{error}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelArgs {
    /// The number of blocks.
    pub n_layers: usize,
    /// The size of the vocabulary.
    pub vocab_size: usize,
    /// The maximum sequence length.
    pub max_seq_len: usize,
    /// The size of an embedding.
    pub dim: usize,
    /// The number of attention heads.
    pub n_heads: usize,
    /// The dropout probability while the model trains.
    pub dropout_p: f64,
    /// Whether attention is causal.
    pub use_attn_mask: bool,
    /// Whether the token embedding and the output layer share one weight.
    pub weight_tying: bool,
    /// Whether each block is recomputed in backward instead of saving its activations.
    pub checkpoint_activations: bool,
}

impl Default for ModelArgs {
    fn default() -> Self {
        ModelArgs {
            n_layers: 2,
            vocab_size: 8,
            max_seq_len: 16,
            dim: 16,
            n_heads: 4,
            dropout_p: 0.1,
            use_attn_mask: true,
            weight_tying: true,
            checkpoint_activations: false,
        }
    }
}

impl ModelArgs {
    /// Returns the size of one head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.n_heads.max(1)
    }

    /// Returns an error if no model can have these sizes.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |message| Err(Error::argument("ModelArgs", message));
        let sizes = [("vocab_size", self.vocab_size), ("max_seq_len", self.max_seq_len), ("dim", self.dim)];
        for (name, size) in sizes {
            if size == 0 {
                return refuse(format!("{name} must be positive, but got 0"));
            }
        }
        if self.n_heads == 0 || !self.dim.is_multiple_of(self.n_heads) {
            return refuse(format!(
                "dim must be divisible by n_heads, but got {} and {}",
                self.dim, self.n_heads
            ));
        }
        probability("ModelArgs", self.dropout_p)?;
        Ok(())
    }
}
