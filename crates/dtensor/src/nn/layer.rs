//! The trait of modules that map one tensor to one tensor.

use super::Module;
use crate::{Result, Tensor};

/// A module whose `forward` maps one tensor to one tensor. [`#[forward]`](super::forward) implements it.
///
/// ```
/// use dtensor::nn::{Layer, Linear, Relu};
/// use dtensor::prelude::*;
///
/// fn twice(layer: &dyn Layer, x: &Tensor) -> Result<Tensor> {
///     layer.forward(&layer.forward(x)?)
/// }
///
/// # fn main() -> Result<()> {
/// let x = Tensor::ones([1, 4], DType::F32)?;
/// assert_eq!(twice(&Linear::new(4, 4, true)?, &x)?.dims(), [1, 4]);
/// assert_eq!(twice(&Relu::new(), &x)?.to_vec::<f32>()?, [1.; 4]);
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a layer",
    note = "a module whose `forward` takes one `&Tensor` and returns a `Result<Tensor>` becomes one by `#[forward]`"
)]
pub trait Layer: Module {
    /// Applies the module, including its hooks.
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}
