//! The derive macros of `dtensor`. Use them through that crate, which explains them.

use proc_macro::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Fields, parse_macro_input};

/// Implements `dtensor::nn::Module`: every field that is itself a module (a layer, a parameter, a list of either) is a
/// child under its own name; every other field is plain data.
#[proc_macro_derive(Module)]
pub fn derive_module(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    let Data::Struct(data) = &input.data else {
        return syn::Error::new_spanned(&input.ident, "a module is a struct").to_compile_error().into();
    };
    let Fields::Named(fields) = &data.fields else {
        let message = "a module has named fields: their names are the names of its children";
        return syn::Error::new_spanned(&input.ident, message).to_compile_error().into();
    };
    let name = &input.ident;
    let (generics, types, bounds) = input.generics.split_for_impl();
    let children = fields.named.iter().map(|field| {
        let ident = field.ident.as_ref().expect("a named field has a name");
        let label = ident.to_string();
        let label = label.trim_start_matches("r#");
        // Of a type parameter nothing can be found out: it is a module, or the struct does not compile.
        let parameter = match &field.ty {
            syn::Type::Path(path) => input.generics.type_params().any(|p| path.path.is_ident(&p.ident)),
            _ => false,
        };
        if parameter {
            quote! { walk.child(#label, &self.#ident); }
        } else {
            quote! { (&Field(&self.#ident)).visit_field(#label, walk); }
        }
    });
    quote! {
        impl #generics ::dtensor::nn::Module for #name #types #bounds {
            fn visit(&self, walk: &mut ::dtensor::nn::Walk<'_>) {
                // Which of the two traits applies is decided by whether the field's type is a module.
                #[allow(unused_imports)]
                use ::dtensor::nn::derive::{Field, ModuleField as _, PlainField as _};
                #(#children)*
            }
        }
    }
    .into()
}
