//! The models that PyTorch tests its distributed tensors with: small enough to train in a test, and made of everything that a
//! large one is made of.
//!
//! ```
//! use dtensor::models::{ModelArgs, Transformer};
//! use dtensor::nn::Module;
//! use dtensor::prelude::*;
//! # fn main() -> Result<()> {
//! let model = Transformer::new(&ModelArgs { n_layers: 1, ..ModelArgs::default() })?;
//! let tokens = Tensor::randint(0, 8, [2, 5])?;
//! assert_eq!(model.forward(&tokens)?.dims(), [2, 5, 8]);
//! // The rows that look tokens up are those that score them.
//! assert!(model.get_parameter("output.weight")?.is(&model.tok_embeddings.weight));
//! # Ok(())
//! # }
//! ```

mod args;
mod block;
mod mlp;
mod rms_norm;
mod transformer;

pub use args::ModelArgs;
pub use block::{Attention, FeedForward, TransformerBlock};
pub use mlp::{MLPModule, MLPStacked};
pub use rms_norm::RMSNormPython;
pub use transformer::{Transformer, TransformerParallel};
