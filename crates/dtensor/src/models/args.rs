//! What a transformer is to be like.

use crate::ops::probability;
use crate::{Error, Result};

/// The sizes of a [`Transformer`](super::Transformer), and what it does. Checked when a model is made.
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
    /// How many blocks there are.
    pub n_layers: usize,
    /// How many tokens there are.
    pub vocab_size: usize,
    /// The length of the longest sequence.
    pub max_seq_len: usize,
    /// The size of the vectors that stand for tokens.
    pub dim: usize,
    /// How many heads attend.
    pub n_heads: usize,
    /// The probability of dropping an element while the model trains.
    pub dropout_p: f64,
    /// Whether a position sees only itself and those before it.
    pub use_attn_mask: bool,
    /// Whether the rows that look tokens up are those that score them.
    pub weight_tying: bool,
    /// Whether what is inside a block is computed again for the gradients, instead of being kept.
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
    /// The size of one head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.n_heads.max(1)
    }

    /// That a model can be made of it.
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
