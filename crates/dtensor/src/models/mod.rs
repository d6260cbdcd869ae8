//! The models that PyTorch's own tests of distributed tensors use: small enough to train in a test, with the parts of a large
//! one.
//!
//! ```
//! use dtensor::models::{ModelArgs, Transformer};
//! use dtensor::nn::Module;
//! use dtensor::prelude::*;
//! # fn main() -> Result<()> {
//! let model = Transformer::new(&ModelArgs { n_layers: 1, ..ModelArgs::default() })?;
//! let tokens = Tensor::randint(0, 8, [2, 5])?;
//! assert_eq!(model.forward(&tokens)?.dims(), [2, 5, 8]);
//! // The embedding table and the output layer share one weight.
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
