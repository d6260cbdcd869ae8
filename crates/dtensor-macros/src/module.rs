//! `#[derive(Module)]`.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Fields, Result};

pub(crate) fn derive(input: DeriveInput) -> Result<TokenStream> {
    let Data::Struct(data) = &input.data else {
        let message = "a module is a struct: its fields are its children, parameters and data";
        return Err(Error::new_spanned(&input.ident, message));
    };
    let no_fields = Default::default();
    let fields = match &data.fields {
        Fields::Named(fields) => &fields.named,
        Fields::Unit => &no_fields,
        Fields::Unnamed(_) => {
            let message = "a module has named fields: their names are the names of its children";
            return Err(Error::new_spanned(&input.ident, message));
        }
    };
    let mut visited = Vec::new();
    let mut skipped = Vec::new();
    for field in fields {
        if is_skipped(field)? { skipped.push(field) } else { visited.push(field) }
    }
    let deep_copy = derive_deep_copy(&input, &visited, &skipped);
    let name = &input.ident;
    let kind = name.to_string();
    // A field whose type mentions a type parameter must be a module.
    let mut input_generics = input.generics.clone();
    for parameter in input.generics.type_params().map(|parameter| &parameter.ident) {
        if visited
            .iter()
            .any(|field| !is_phantom(&field.ty) && mentions(field.ty.to_token_stream(), parameter))
        {
            let bound = syn::parse_quote! { #parameter: ::dtensor::nn::Module };
            input_generics.make_where_clause().predicates.push(bound);
        }
    }
    let (generics, types, bounds) = input_generics.split_for_impl();
    let idents = visited.iter().map(|field| field.ident.as_ref().expect("a named field has a name"));
    let children = visited.iter().map(|field| {
        let ident = field.ident.as_ref().expect("a named field has a name");
        let label = ident.to_string();
        let label = label.trim_start_matches("r#");
        // The span is that of the type: an error about a type that is no module points there.
        quote_spanned! { field.ty.span() => ::dtensor::nn::ModuleField::visit_field(&self.#ident, #label, walk); }
    });
    // `Any` needs a type without borrowed data, and whether the `forward` of a generic type runs hooks is not known here.
    let concrete = input.generics.params.is_empty().then(|| {
        quote! {
            fn as_any(&self) -> ::core::option::Option<&dyn ::core::any::Any> {
                ::core::option::Option::Some(self)
            }

            fn runs_hooks(&self) -> bool {
                #[allow(unused_imports)]
                use ::dtensor::nn::derive::{Field, PlainForward as _, WithForward as _};
                (&Field(self)).runs_hooks()
            }
        }
    });
    Ok(quote! {
        impl #generics ::dtensor::nn::Module for #name #types #bounds {
            fn visit<'walk>(&'walk self, walk: &mut ::dtensor::nn::Walk<'walk>) {
                walk.module(#kind, self, |#[allow(unused_variables)] walk| {
                    #(#children)*
                });
            }

            fn base(&self) -> ::core::option::Option<&::dtensor::nn::Base> {
                #[allow(unused_imports)]
                use ::dtensor::nn::derive::{BaseField as _, Field, OtherField as _};
                ::core::option::Option::None
                    #(.or_else(|| (&Field(&self.#idents)).base_field()))*
            }

            #concrete
        }

        #deep_copy
    })
}

/// Implements `DeepCopy`, on condition that every field can be copied. Without the lifetime in the bounds, a field that
/// cannot be would be a compile error even where nothing is copied.
fn derive_deep_copy(input: &DeriveInput, visited: &[&syn::Field], skipped: &[&syn::Field]) -> TokenStream {
    let name = &input.ident;
    let mut generics = input.generics.clone();
    let mut copies = Vec::new();
    for (fields, path, method, is_skipped) in [
        (visited, quote! { ::dtensor::nn::DeepCopy }, quote! { duplicate }, false),
        (skipped, quote! { ::core::clone::Clone }, quote! { clone }, true),
    ] {
        for field in fields {
            let (ident, ty) = (&field.ident, &field.ty);
            copies.push(quote! { #ident: #path::#method(&self.#ident) });
            // A bound on a child of the module's own type would depend on itself.
            if is_skipped || !mentions(ty.to_token_stream(), name) {
                // The span is that of the type: an error about a field points there.
                let bound = syn::parse_quote_spanned! { ty.span() => for<'copied> #ty: #path };
                generics.make_where_clause().predicates.push(bound);
            }
        }
    }
    let (generics, types, bounds) = generics.split_for_impl();
    quote! {
        #[automatically_derived]
        impl #generics ::dtensor::nn::DeepCopy for #name #types #bounds {
            fn duplicate(&self) -> Self {
                #name { #(#copies),* }
            }
        }
    }
}

/// Returns true if the field is marked `#[module(skip)]`.
fn is_skipped(field: &syn::Field) -> Result<bool> {
    let mut skipped = false;
    for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("module")) {
        attribute.parse_nested_meta(|meta| {
            skipped = true;
            if meta.path.is_ident("skip") { Ok(()) } else { Err(meta.error("expected `#[module(skip)]`")) }
        })?;
    }
    Ok(skipped)
}

fn is_phantom(ty: &syn::Type) -> bool {
    matches!(ty, syn::Type::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "PhantomData"))
}

fn mentions(tokens: TokenStream, name: &syn::Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Group(group) => mentions(group.stream(), name),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    use super::*;

    #[test]
    fn other_types_than_structs_with_named_fields_are_errors() {
        let cases: [(DeriveInput, &str); 4] = [
            (parse_quote! { struct M { #[module(plain)] a: u8 } }, "expected `#[module(skip)]`"),
            (parse_quote! { enum M { A(Linear), B } }, "a module is a struct"),
            (parse_quote! { union M { a: u8, b: i8 } }, "a module is a struct"),
            (parse_quote! { struct M(Linear, Linear); }, "a module has named fields"),
        ];
        for (input, expected) in cases {
            let error = derive(input).expect_err("it is refused").to_string();
            assert!(error.contains(expected), "`{expected}` is not in `{error}`");
        }
        assert!(derive(parse_quote! { struct Unit; }).is_ok());
        assert!(
            derive(parse_quote! { struct M<'a, T: Module, const N: usize> { a: &'a T, b: [T; N], c: T } })
                .is_ok()
        );
    }
}
