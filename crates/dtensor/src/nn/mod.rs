//! Models: parameters, the tree of modules that holds them, and layers. Knows public tensor operators only.
//!
//! ```
//! use dtensor::nn::{Linear, Module};
//! use dtensor::prelude::*;
//!
//! #[derive(Module)]
//! struct Mlp {
//!     net1: Linear,
//!     net2: Linear,
//! }
//!
//! impl Mlp {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.net2.forward(&self.net1.forward(x)?.relu()?)
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let model = Mlp { net1: Linear::new(10, 16, true)?, net2: Linear::new(16, 10, true)? };
//! let names: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
//! assert_eq!(names, ["net1.weight", "net1.bias", "net2.weight", "net2.bias"]);
//! assert_eq!(model.forward(&Tensor::zeros([4, 10], DType::F32)?)?.dims(), [4, 10]);
//! # Ok(())
//! # }
//! ```

mod linear;
mod module;
mod parameter;

pub use dtensor_macros::Module;
pub use linear::Linear;
#[doc(hidden)]
pub use module::derive;
pub use module::{Module, Walk};
pub use parameter::Parameter;
