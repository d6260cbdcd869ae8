//! `module!`: defines a struct and its constructor together.

use crate::Result;

/// Defines a module and its constructor: each field is written once, with its type and its initial value.
///
/// ```
/// use dtensor::nn::{Linear, Relu};
/// use dtensor::prelude::*;
///
/// module! {
///     struct Mlp(width: usize, hidden: usize) {
///         up: Linear = Linear::new(width, hidden, true),
///         relu: Relu = Relu::new(),
///         down: Linear = Linear::new(hidden, width, true),
///     }
/// }
///
/// #[forward]
/// impl Mlp {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         self.down.forward(self.relu.forward(self.up.forward(x)))
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let model = Mlp::new(6, 10)?;
/// assert_eq!(model.forward(&Tensor::ones([2, 6], DType::F32)?)?.dims(), [2, 6]);
/// # Ok(())
/// # }
/// ```
///
/// It expands to the struct with `#[derive(Module)]`, and to this constructor:
///
/// ```
/// # use dtensor::nn::{Linear, Relu};
/// # use dtensor::prelude::*;
/// # #[derive(Module)]
/// # struct Mlp { up: Linear, relu: Relu, down: Linear }
/// impl Mlp {
///     fn new(width: usize, hidden: usize) -> Result<Self> {
///         let up: Linear = Linear::new(width, hidden, true)?;
///         let relu: Relu = Relu::new();
///         let down: Linear = Linear::new(hidden, width, true)?;
///         Ok(Mlp { up, relu, down })
///     }
/// }
/// ```
///
/// Initial values are computed in order. Each may use the arguments and the fields above it; a `Result` needs no `?`. The struct
/// and its fields can have attributes, documentation and a visibility; `new` has the visibility of the struct. If a module is
/// generic, or its constructor does more, use `#[derive(Module)]` and write the constructor.
///
/// ```
/// # use dtensor::nn::{Embedding, Linear};
/// # use dtensor::prelude::*;
/// module! {
///     /// Its two tables share one weight.
///     #[derive(Clone, Debug)]
///     pub struct Tied(rows: usize, width: usize) {
///         /// From tokens to vectors.
///         pub table: Embedding = Embedding::new(rows, width),
///         /// Back from vectors to tokens.
///         pub head: Linear = Linear::from_parameters(table.weight.clone(), None),
///     }
/// }
/// # fn main() -> Result<()> {
/// let tied = Tied::new(8, 4)?;
/// assert!(tied.head.weight.is(&tied.table.weight));
/// # Ok(())
/// # }
/// ```
#[macro_export]
macro_rules! module {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident($($argument:ident: $argument_type:ty),* $(,)?) {
            $($(#[$field_attribute:meta])* $field_visibility:vis $field:ident: $field_type:ty = $value:expr),* $(,)?
        }
    ) => {
        $(#[$attribute])*
        #[derive($crate::nn::Module)]
        $visibility struct $name {
            $($(#[$field_attribute])* $field_visibility $field: $field_type,)*
        }

        impl $name {
            /// Creates the module: computes the initial values of its fields, in order, and returns the first error.
            #[allow(clippy::too_many_arguments)]
            $visibility fn new($($argument: $argument_type),*) -> $crate::Result<Self> {
                $(let $field: $field_type = <_ as $crate::nn::derive::InitialValue<$field_type>>::or_error($value)?;)*
                Ok($name { $($field),* })
            }
        }
    };
}

/// An initial value of a field in [`module!`](crate::module): a value, or a `Result` of one.
#[diagnostic::on_unimplemented(
    message = "the initial value of a field of type `{T}` must be a `{T}` or a `Result<{T}>`",
    label = "this is a `{Self}`"
)]
pub trait InitialValue<T> {
    /// Returns the value or the error.
    fn or_error(self) -> Result<T>;
}

impl<T> InitialValue<T> for T {
    fn or_error(self) -> Result<T> {
        Ok(self)
    }
}

impl<T> InitialValue<T> for Result<T> {
    fn or_error(self) -> Result<T> {
        self
    }
}
