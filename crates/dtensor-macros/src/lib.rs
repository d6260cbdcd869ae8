//! The procedural macros of `dtensor`: `#[derive(Module)]` and `#[forward]`. Use them through that crate, which
//! re-exports and documents them.

mod forward;
mod module;

use proc_macro::TokenStream;

/// Implements `dtensor::nn::Module`, and `dtensor::nn::DeepCopy` if every field can be copied. Every field that is itself a module (a layer, a parameter, a list of either)
/// becomes a child under its own name. Numbers, strings and the like are plain data. Any other field is a compile error unless it
/// is marked `#[module(skip)]`: see `dtensor::nn::ModuleField`.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: TokenStream) -> TokenStream {
    module::derive(syn::parse_macro_input!(input)).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Makes a module's `forward` run its hooks and notify listeners. Put it on the `impl` block that contains `forward`.
///
/// `forward` takes `&self` and arguments, and returns a `Result`. Hooks see the arguments by name if they are
/// tensors, optional tensors, lists of tensors, integers, floating-point numbers or flags; other arguments are passed
/// through unchanged. Hooks see the result if it is a tensor, an optional tensor, a list of tensors or a tuple of
/// these.
///
/// For every `&Tensor`, callers pass a `&Tensor`, a `Tensor` or a `Result<Tensor>`, whose error is returned before anything
/// runs: see `dtensor::nn::IntoTensor`.
///
/// A module whose `forward` takes one `&Tensor` and returns one also becomes a `dtensor::nn::Layer`. `Tensor` and
/// `Result` are recognized by their names alone; if they belong to another library, write
/// `#[forward(layer = false)]`.
#[proc_macro_attribute]
pub fn forward(arguments: TokenStream, item: TokenStream) -> TokenStream {
    forward::rewrite(arguments.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
