//! The `#[forward]` attribute.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{Error, FnArg, ImplItem, ImplItemFn, Item, Pat, Result, ReturnType, Type};

pub(crate) fn rewrite(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let may_be_layer = match arguments.to_string().as_str() {
        "" => true,
        "layer = false" => false,
        _ => {
            let message =
                "`#[forward]` takes no arguments except `layer = false`, for a `Result` of another library";
            return Err(Error::new_spanned(arguments, message));
        }
    };
    let mut block = match syn::parse2(item)? {
        Item::Impl(block) => block,
        other => {
            let message = "`#[forward]` goes on the `impl` block that contains the module's `forward`";
            return Err(Error::new_spanned(other, message));
        }
    };
    if let Some((_, path, _)) = &block.trait_ {
        return Err(Error::new_spanned(
            path,
            "`#[forward]` belongs on the module's own `impl` block, not on a trait's",
        ));
    }
    // There may be several, each under its own `#[cfg]`.
    let (forwards, others): (Vec<_>, Vec<_>) = std::mem::take(&mut block.items)
        .into_iter()
        .partition(|item| matches!(item, ImplItem::Fn(f) if f.sig.ident == "forward"));
    if forwards.is_empty() {
        return Err(Error::new_spanned(&block.self_ty, "there is no `forward` in this block"));
    }
    block.items = others;
    let (generics, _, bounds) = block.generics.split_for_impl();
    let ty = &block.self_ty;
    // A supertrait of `Forwards` already makes a missing `#[derive(Module)]` an error. `Layer` would repeat it, but for a
    // bound: the lifetime keeps the compiler from checking it here.
    let layer_bounds = match bounds {
        Some(bounds) => {
            let predicates = &bounds.predicates;
            quote! { where for<'module> Self: ::dtensor::nn::Module, #predicates }
        }
        None => quote! { where for<'module> Self: ::dtensor::nn::Module },
    };
    let mut traits = quote! { impl #generics ::dtensor::nn::derive::Forwards for #ty #bounds {} };
    for item in forwards {
        let ImplItem::Fn(inner) = item else { continue };
        let output = result_type(&inner)?;
        if may_be_layer && is_layer(&inner, output) {
            let configured = inner.attrs.iter().filter(|attribute| is_configuration(attribute));
            traits.extend(quote! {
                #(#configured)*
                impl #generics ::dtensor::nn::Layer for #ty #layer_bounds {
                    #[track_caller]
                    fn forward(&self, x: &::dtensor::Tensor) -> ::dtensor::Result<::dtensor::Tensor> {
                        <#ty>::forward(self, x)
                    }
                }
            });
        }
        let (wrapper, body) = split(inner, may_be_layer)?;
        block.items.push(ImplItem::Verbatim(wrapper));
        block.items.push(ImplItem::Fn(body));
    }
    Ok(quote! { #block #traits })
}

/// Returns the return type of a function, or an error if it is not a `Result`.
fn result_type(function: &ImplItemFn) -> Result<&Type> {
    if let Some(asyncness) = &function.sig.asyncness {
        return Err(Error::new_spanned(
            asyncness,
            "`forward` must not be `async`, because hooks run before and after it",
        ));
    }
    match &function.sig.output {
        ReturnType::Type(_, ty) if last_segment(ty).is_some_and(|name| name == "Result") => Ok(ty),
        ReturnType::Type(_, ty) => Err(Error::new_spanned(ty, "`forward` must return a `Result`")),
        ReturnType::Default => Err(Error::new_spanned(&function.sig, "`forward` must return a `Result`")),
    }
}

/// Splits a `forward` into the wrapper that runs hooks, and the function as written, under another name. If
/// `may_convert`, the wrapper takes an `impl IntoTensor` for each `&Tensor`.
fn split(inner: ImplItemFn, may_convert: bool) -> Result<(TokenStream, ImplItemFn)> {
    let (inputs, names) = named_inputs(&inner)?;
    let mut outer = inner.sig.clone();
    outer.inputs = inputs;
    let mut hooked = outer.clone();
    let converted = if may_convert { accept_into_tensor(&mut outer) } else { Vec::new() };
    let mut body = inner.clone();
    body.sig.ident = format_ident!("__forward");
    body.vis = syn::Visibility::Inherited;
    body.attrs.retain(|attribute| {
        attribute.path().is_ident("track_caller") || is_lint(attribute) || is_configuration(attribute)
    });
    let attributes: Vec<_> = inner
        .attrs
        .iter()
        .filter(|attribute| !attribute.path().is_ident("track_caller"))
        .map(expect_to_allow)
        .collect();
    let mut visibility = inner.vis.clone();
    let mut conversion = TokenStream::new();
    if !converted.is_empty() {
        hooked.ident = format_ident!("__hooked");
        let arguments = names.iter().map(|name| match converted.contains(name) {
            true => quote! { ::core::borrow::Borrow::borrow(&#name) },
            false => quote! { #name },
        });
        conversion = quote! {
            #(#attributes)*
            #[track_caller]
            #[inline]
            #visibility #outer {
                #(let #converted = ::dtensor::nn::IntoTensor::into_tensor(#converted)?;)*
                self.__hooked(#(#arguments),*)
            }
        };
        visibility = syn::Visibility::Inherited;
    }
    let hook_arguments: Vec<_> = (0..names.len()).map(|i| format_ident!("__argument{i}")).collect();
    let labels = names.iter().map(|name| name.to_string().trim_start_matches("r#").to_string());
    let wrapper = quote! {
        #conversion
        #(#attributes)*
        #[track_caller]
        #visibility #hooked {
            #[allow(unused_imports)]
            use ::dtensor::nn::derive::{
                HiddenArgument as _, HiddenError as _, HiddenResult as _, VisibleArgument as _, VisibleError as _,
                VisibleResult as _,
            };
            let __inputs;
            let Some(__call) = ::dtensor::nn::derive::begin_call(self) else {
                return match self.__forward(#(#names),*) {
                    ::core::result::Result::Err(__error) => ::core::result::Result::Err(
                        (&mut ::dtensor::nn::derive::ForwardError(::core::option::Option::Some(__error))).name_module(self)
                    ),
                    __done => __done,
                };
            };
            let mut __given = ::dtensor::nn::Inputs::new();
            #(
                let mut #hook_arguments = ::dtensor::nn::derive::HookArgument::new(#labels, #names);
                (&mut #hook_arguments).give(&mut __given);
            )*
            __inputs = __call.before(__given)?;
            let __output = match self.__forward(#((&mut #hook_arguments).take(&__inputs)?),*) {
                ::core::result::Result::Ok(__output) => __output,
                ::core::result::Result::Err(__error) => return ::core::result::Result::Err(
                    (&mut ::dtensor::nn::derive::ForwardError(::core::option::Option::Some(__error))).name_module(self)
                ),
            };
            let mut __result = ::dtensor::nn::derive::HookResult(::core::option::Option::Some(__output));
            #[allow(clippy::needless_question_mark)]
            {
                ::core::result::Result::Ok((&mut __result).after(&__call, &__inputs)?)
            }
        }
    };
    Ok((wrapper, body))
}

type FnArgs = syn::punctuated::Punctuated<FnArg, syn::Token![,]>;

/// Returns the arguments with their patterns reduced to names, and the names of all but `&self`.
fn named_inputs(function: &ImplItemFn) -> Result<(FnArgs, Vec<syn::Ident>)> {
    let mut inputs = function.sig.inputs.clone();
    let mut names = Vec::new();
    for input in &mut inputs {
        match input {
            FnArg::Receiver(receiver) if receiver.reference.is_some() && receiver.mutability.is_none() => {}
            FnArg::Receiver(receiver) => {
                return Err(Error::new_spanned(receiver, "`forward` must take `&self`"));
            }
            FnArg::Typed(argument) => match &mut *argument.pat {
                Pat::Ident(ident) if ident.by_ref.is_none() && ident.subpat.is_none() => {
                    ident.mutability = None;
                    names.push(ident.ident.clone());
                }
                other => {
                    let message =
                        "an argument of `forward` must be a name, because hooks see it under that name";
                    return Err(Error::new_spanned(other, message));
                }
            },
        }
    }
    if inputs.len() == names.len() {
        return Err(Error::new_spanned(&function.sig, "`forward` must take `&self`"));
    }
    Ok((inputs, names))
}

/// Turns `#[expect]` into `#[allow]` on the wrapper, because the expected lint fires only in the function as written.
fn expect_to_allow(attribute: &syn::Attribute) -> syn::Attribute {
    let mut attribute = attribute.clone();
    if let syn::Meta::List(list) = &mut attribute.meta
        && list.path.is_ident("expect")
    {
        list.path = syn::parse_quote!(allow);
    }
    attribute
}

fn is_lint(attribute: &syn::Attribute) -> bool {
    ["allow", "expect", "warn", "deny"].iter().any(|lint| attribute.path().is_ident(lint))
}

fn is_configuration(attribute: &syn::Attribute) -> bool {
    attribute.path().is_ident("cfg") || attribute.path().is_ident("cfg_attr")
}

fn last_segment(ty: &Type) -> Option<String> {
    match ty {
        Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        _ => None,
    }
}

fn is_tensor(ty: &Type) -> bool {
    last_segment(ty).is_some_and(|name| name == "Tensor")
}

/// Returns the type behind a shared reference, with the reference's lifetime.
fn shared_reference(ty: &Type) -> Option<(&Type, &Option<syn::Lifetime>)> {
    match ty {
        Type::Reference(reference) if reference.mutability.is_none() => {
            Some((&reference.elem, &reference.lifetime))
        }
        _ => None,
    }
}

/// Makes a signature take an `impl IntoTensor` for each `&Tensor`, and returns the names of these arguments. A reference
/// with a named lifetime is unchanged.
fn accept_into_tensor(signature: &mut syn::Signature) -> Vec<syn::Ident> {
    let mut converted = Vec::new();
    for input in &mut signature.inputs {
        if let FnArg::Typed(argument) = input
            && shared_reference(&argument.ty)
                .is_some_and(|(ty, lifetime)| lifetime.is_none() && is_tensor(ty))
            && let Pat::Ident(name) = &*argument.pat
        {
            converted.push(name.ident.clone());
            argument.ty = syn::parse_quote! { impl ::dtensor::nn::IntoTensor };
        }
    }
    converted
}

/// Returns true if the function takes one tensor and returns one.
fn is_layer(function: &ImplItemFn, output: &Type) -> bool {
    let takes_tensor = match function.sig.inputs.iter().nth(1) {
        Some(FnArg::Typed(argument)) if function.sig.inputs.len() == 2 => {
            shared_reference(&argument.ty).is_some_and(|(ty, _)| is_tensor(ty))
        }
        _ => false,
    };
    let returns_tensor = match output {
        Type::Path(path) => match &path.path.segments.last().map(|segment| &segment.arguments) {
            Some(syn::PathArguments::AngleBracketed(types)) => {
                matches!(types.args.iter().collect::<Vec<_>>()[..], [syn::GenericArgument::Type(ty)] if is_tensor(ty))
            }
            _ => false,
        },
        _ => false,
    };
    takes_tensor && returns_tensor && function.sig.generics.params.is_empty()
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::*;

    fn error_of(item: TokenStream) -> String {
        rewrite(TokenStream::new(), item).expect_err("it returns an error").to_string()
    }

    #[test]
    fn invalid_forward_is_an_error() {
        let cases = [
            (
                quote! { fn forward(&self, x: &Tensor) -> Result<Tensor> { todo!() } },
                "goes on the `impl` block",
            ),
            (quote! { struct M { base: Base } }, "goes on the `impl` block"),
            (
                quote! { impl Layer for M { fn forward(&self) -> Result<()> {} } },
                "the module's own `impl` block",
            ),
            (
                quote! { impl M { fn backward(&self) -> Result<()> {} } },
                "there is no `forward` in this block",
            ),
            (quote! { impl M { fn forward(x: &Tensor) -> Result<Tensor> {} } }, "must take `&self`"),
            (quote! { impl M { fn forward(self, x: &Tensor) -> Result<Tensor> {} } }, "must take `&self`"),
            (
                quote! { impl M { fn forward(&mut self, x: &Tensor) -> Result<Tensor> {} } },
                "must take `&self`",
            ),
            (
                quote! { impl M { fn forward(&self, _: &Tensor) -> Result<Tensor> {} } },
                "hooks see it under that name",
            ),
            (quote! { impl M { fn forward(&self, (a, b): Pair) -> Result<Tensor> {} } }, "must be a name"),
            (quote! { impl M { fn forward(&self, x: &Tensor) -> Tensor {} } }, "must return a `Result`"),
            (quote! { impl M { fn forward(&self, x: &Tensor) {} } }, "must return a `Result`"),
            (
                quote! { impl M { async fn forward(&self, x: &Tensor) -> Result<Tensor> {} } },
                "must not be `async`",
            ),
        ];
        for (item, expected) in cases {
            let error = error_of(item.clone());
            assert!(error.contains(expected), "`{expected}` is not in `{error}` of {item}");
        }
        let block = quote! { impl M { fn forward(&self) -> Result<()> {} } };
        let error = rewrite(quote! { hooks = false }, block).expect_err("it returns an error").to_string();
        assert!(error.contains("takes no arguments"));
    }

    #[test]
    fn forward_from_tensor_to_tensor_implements_layer() {
        let is_layer = |signature: TokenStream| {
            let block = quote! { impl M { #signature { todo!() } } };
            let written = rewrite(TokenStream::new(), block).expect("it is a module").to_string();
            written.contains("nn :: Layer for M")
        };
        assert!(is_layer(quote! { fn forward(&self, x: &Tensor) -> Result<Tensor> }));
        assert!(is_layer(
            quote! { pub fn forward(&self, x: &dtensor::Tensor) -> dtensor::Result<dtensor::Tensor> }
        ));
        assert!(!is_layer(quote! { fn forward(&self, x: Tensor) -> Result<Tensor> }));
        assert!(!is_layer(quote! { fn forward(&self, x: &mut Tensor) -> Result<Tensor> }));
        assert!(!is_layer(quote! { fn forward(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> }));
        assert!(!is_layer(quote! { fn forward(&self, x: Option<&Tensor>) -> Result<Tensor> }));
        assert!(!is_layer(quote! { fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> }));
        assert!(!is_layer(quote! { fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> }));
        assert!(!is_layer(quote! { fn forward(&self) -> Result<Tensor> }));
    }
}
