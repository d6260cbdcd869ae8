//! The types that a field of a module can have.

use std::marker::PhantomData;

use super::{Module, Walk};
use crate::{DType, Device, Dim, Shape};

/// A type that a field of a `#[derive(Module)]` struct can have without a mark: a module, or plain data such as a number.
///
/// Modules implement it by themselves. A field of any other type is a compile error, so that a struct that lacks
/// `#[derive(Module)]` cannot hide its parameters: derive `Module` for it, or mark the field `#[module(skip)]`.
///
/// ```
/// use dtensor::nn::{Linear, Module};
///
/// struct Vocabulary(Vec<String>);
///
/// #[derive(Module)]
/// struct Head {
///     out: Linear,
///     classes: usize,
///     #[module(skip)]
///     words: Vocabulary,
/// }
/// ```
///
/// ```compile_fail
/// use dtensor::nn::{Linear, Module};
///
/// struct Block { inner: Linear } // `#[derive(Module)]` is missing
///
/// #[derive(Module)]
/// struct Model {
///     block: Block,
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a module nor plain data",
    label = "parameters in this field would not be found",
    note = "if `{Self}` holds parameters, add `#[derive(Module)]` to it; if not, mark the field `#[module(skip)]`"
)]
pub trait ModuleField {
    /// Shows the walk the modules in the field called `name`.
    #[doc(hidden)]
    fn visit_field<'a>(&'a self, name: &str, walk: &mut Walk<'a>);
}

impl<M: Module> ModuleField for M {
    fn visit_field<'a>(&'a self, name: &str, walk: &mut Walk<'a>) {
        walk.child(name, self);
    }
}

impl<T: ?Sized> ModuleField for PhantomData<T> {
    fn visit_field<'a>(&'a self, _: &str, _: &mut Walk<'a>) {}
}

/// Declares types of plain data, and options, lists and arrays of them.
macro_rules! plain {
    ($($plain:ty),* $(,)?) => {$(
        impl ModuleField for $plain {
            fn visit_field<'a>(&'a self, _: &str, _: &mut Walk<'a>) {}
        }
        impl ModuleField for Option<$plain> {
            fn visit_field<'a>(&'a self, _: &str, _: &mut Walk<'a>) {}
        }
        impl ModuleField for Vec<$plain> {
            fn visit_field<'a>(&'a self, _: &str, _: &mut Walk<'a>) {}
        }
        impl<const N: usize> ModuleField for [$plain; N] {
            fn visit_field<'a>(&'a self, _: &str, _: &mut Walk<'a>) {}
        }
    )*};
}

plain!(
    bool, char, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f32, f64, String, &str, DType, Device,
    Dim, Shape,
);
