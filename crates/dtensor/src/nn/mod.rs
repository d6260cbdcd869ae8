//! Neural-network modules: parameters, the module tree, hooks, layers and initialisers.
//!
//! A module is a struct whose fields are its children, parameters and data, and a function `forward`:
//!
//! ```
//! use dtensor::nn::{Linear, Module, Relu, forward};
//! use dtensor::prelude::*;
//!
//! #[derive(Clone, Debug, Module)]
//! struct Mlp {
//!     net1: Linear,
//!     relu: Relu,
//!     net2: Linear,
//! }
//!
//! #[forward]
//! impl Mlp {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.net2.forward(self.relu.forward(self.net1.forward(x)))
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let model = Mlp { net1: Linear::new(10, 16, true)?, relu: Relu::new(), net2: Linear::new(16, 10, true)? };
//! let names: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
//! assert_eq!(names, ["net1.weight", "net1.bias", "net2.weight", "net2.bias"]);
//! assert_eq!(model.forward(&Tensor::zeros([4, 10], DType::F32)?)?.dims(), [4, 10]);
//! # Ok(())
//! # }
//! ```
//!
//! `forward` is called with a `&Tensor`, a `Tensor` or a `Result<Tensor>` ([`IntoTensor`]), so that layers are chained without a `?` for
//! each. [`module!`](crate::module) writes a struct and its constructor in one.
//!
//! `#[forward]` makes a call of `forward` run the module's [hooks](Base) and notify a
//! [`CommDebugMode`](crate::debug::CommDebugMode) of the module that runs. Without hooks and listeners it costs the
//! check of two flags.

mod activations;
mod argument;
mod attention;
mod base;
mod buffer;
mod call;
mod containers;
mod conv;
mod copy;
mod define;
mod dropout;
mod embedding;
mod field;
pub mod init;
mod into_tensor;
mod layer;
mod linear;
mod module;
mod norm;
mod parameter;
mod sequential;
mod stand_in;
mod state;
mod track;
mod undo;
mod walk;

pub use activations::{Gelu, Identity, Relu, Silu};
pub use argument::{Argument, Inputs, Outputs, Passed, Returned, Which};
pub use attention::MultiHeadAttention;
pub(crate) use base::BaseState;
pub use base::{Base, Hook, HookHandle, PreHook};
pub use buffer::Buffer;
pub(crate) use containers::LIST;
pub use containers::ModuleList;
pub use conv::{Conv1d, Conv2d};
pub use copy::{DeepCopy, deep_copy};
pub use dropout::Dropout;
/// ```
/// use dtensor::nn::{Base, Buffer, Linear, Module, Parameter};
/// use dtensor::prelude::*;
///
/// #[derive(Clone, Debug, Module)]
/// struct Block {
///     layers: Vec<Linear>,
///     scale: Parameter,
///     seen: Buffer,
///     width: usize, // plain data
///     base: Base,   // hooks, and whether it trains
/// }
///
/// # fn main() -> Result<()> {
/// let block = Block {
///     layers: vec![Linear::new(2, 2, false)?],
///     scale: Parameter::with_init([1], Tensor::ones_like)?,
///     seen: Buffer::new(&Tensor::zeros([1], DType::I64)?),
///     width: 2,
///     base: Base::new(),
/// };
/// assert_eq!(block.state_dict().into_keys().collect::<Vec<_>>(), ["layers.0.weight", "scale", "seen"]);
/// # Ok(())
/// # }
/// ```
///
/// Only structs with named fields can be modules, because the field names become the names of the children.
///
/// ```compile_fail
/// #[derive(dtensor::nn::Module)]
/// struct Pair(dtensor::nn::Linear, dtensor::nn::Linear);
/// ```
pub use dtensor_macros::Module;
/// ```
/// use dtensor::nn::{Base, Linear, Module, forward};
/// use dtensor::prelude::*;
///
/// #[derive(Module)]
/// struct Bilinear {
///     left: Linear,
///     right: Linear,
///     base: Base,
/// }
///
/// #[forward]
/// impl Bilinear {
///     fn forward(&self, x: &Tensor, y: Option<&Tensor>) -> Result<Tensor> {
///         self.left.forward(x)?.mul(&self.right.forward(y.unwrap_or(x))?)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let model = Bilinear { left: Linear::new(2, 3, true)?, right: Linear::new(2, 3, true)?, base: Base::new() };
/// let x = Tensor::ones([4, 2], DType::F32)?;
/// // A hook that gives both layers the same input, whatever the caller passes.
/// model.base.register_forward_pre_hook(|_, mut inputs| {
///     inputs["y"] = inputs["x"].clone();
///     Ok(inputs)
/// });
/// let y = model.forward(&x, Some(&x.neg()?))?;
/// assert_eq!(y.to_vec::<f32>()?, model.forward(&x, None)?.to_vec::<f32>()?);
/// # Ok(())
/// # }
/// ```
///
/// The attribute belongs on the `impl` block, because it adds a second function beside `forward`.
///
/// ```compile_fail
/// # use dtensor::nn::{Module, forward};
/// # use dtensor::prelude::*;
/// #[derive(Module)]
/// struct Twice;
///
/// impl Twice {
///     #[forward]
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         x.mul(2.0)
///     }
/// }
/// ```
pub use dtensor_macros::forward;
pub use embedding::Embedding;
pub(crate) use embedding::positions;
pub use field::ModuleField;
pub use into_tensor::IntoTensor;
pub use layer::Layer;
pub use linear::Linear;
pub(crate) use module::all_children;
pub use module::{Module, downcast};
pub use norm::{LayerNorm, RmsNorm};
pub use parameter::Parameter;
pub use sequential::Sequential;
pub(crate) use stand_in::{StandInGuard, StandIns, enter_stand_ins};
pub use state::{IncompatibleKeys, StateDict};
pub(crate) use state::{StateEntry, fit_to, mismatch, state_entries};
pub(crate) use track::{ModuleEntered, with_module_listener};
pub(crate) use undo::all_or_nothing;
pub(crate) use walk::Node;
pub use walk::Walk;

/// Items that the derive macros generate calls to.
#[doc(hidden)]
pub mod derive {
    pub use super::call::{
        ForwardError, HiddenArgument, HiddenError, HiddenResult, HookArgument, HookResult, HookedCall,
        VisibleArgument, VisibleError, VisibleResult, begin_call,
    };
    pub use super::define::InitialValue;
    pub use super::walk::derive::{BaseField, Field, Forwards, OtherField, PlainForward, WithForward};
}
