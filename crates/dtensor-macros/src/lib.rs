//! The macros of `dtensor` that write Rust: `#[derive(Module)]` and `#[forward]`. Use them through that
//! crate, which explains them.

mod forward;
mod module;

use proc_macro::TokenStream;

/// Implements `dtensor::nn::Module`: every field that is itself a module (a layer, a parameter, a list of either) is a
/// child under its own name. Numbers, strings and the like are plain data. Any other field is a compile error unless it is marked
/// `#[module(skip)]`: see `dtensor::nn::ModuleField`.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: TokenStream) -> TokenStream {
    module::derive(syn::parse_macro_input!(input)).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// On the `impl` block with a module's `forward`: makes it run the module's hooks, and tells those who watch which module runs.
///
/// `forward` takes `&self` and arguments, and returns a `Result`. Hooks see its arguments under their names:
/// tensors, optional tensors, lists of tensors, whole and floating-point numbers, flags; others go through
/// untouched. They see what it returns, if that is a tensor, an optional tensor, a list of tensors or a tuple
/// of these.
///
/// A module whose `forward` takes one `&Tensor` and returns one is a `dtensor::nn::Layer`, too. What `Tensor`
/// and `Result` are is told by their names alone: where they are another library's, say `#[forward(layer =
/// false)]`.
#[proc_macro_attribute]
pub fn forward(arguments: TokenStream, item: TokenStream) -> TokenStream {
    forward::rewrite(arguments.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
