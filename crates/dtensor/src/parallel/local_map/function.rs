//! Calling functions of several arguments with a tuple.

use super::MapValue;
use crate::declare::tuples;
use crate::{Result, Tensor};

/// A function that [`local_map`](super::local_map) can run with arguments of these types. It takes up to eight
/// arguments and returns a [`Result`] of a [`MapValue`].
///
/// ```
/// use dtensor::parallel::{LocalMap, MapFunction};
/// use dtensor::prelude::*;
///
/// /// Calls a mapped function with one tensor.
/// fn on_one<'a, F: MapFunction<&'a Tensor>>(map: &LocalMap<F>, x: &'a Tensor) -> Result<F::Output> {
///     map.call(x)
/// }
///
/// # fn main() -> Result<()> {
/// let numel = local_map(|x: &Tensor| Ok(x.numel()));
/// assert_eq!(on_one(&numel, &Tensor::ones([2, 3], DType::F32)?)?, 6);
/// # Ok(())
/// # }
/// ```
pub trait MapFunction<A: MapValue> {
    /// The value that the caller gets.
    type Output;
    /// The value that the function returns.
    type Returned: for<'h> MapValue<As<'h> = Self::Output>;

    /// Calls the function.
    fn run(&self, arguments: A::As<'_>) -> Result<Self::Returned>;
}

/// A single tensor needs no tuple.
impl<Func, Ret, Out> MapFunction<&Tensor> for Func
where
    Func: for<'h> Fn(&'h Tensor) -> Result<Ret>,
    Ret: for<'h> MapValue<As<'h> = Out>,
{
    type Output = Out;
    type Returned = Ret;

    fn run(&self, x: &Tensor) -> Result<Ret> {
        self(x)
    }
}

macro_rules! functions {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<Func, Ret, Out, $($part: MapValue),*> MapFunction<($($part,)*)> for Func
        where
            Func: for<'h> Fn($($part::As<'h>),*) -> Result<Ret>,
            Ret: for<'h> MapValue<As<'h> = Out>,
        {
            type Output = Out;
            type Returned = Ret;

            #[allow(unused_variables)]
            fn run(&self, arguments: <($($part,)*) as MapValue>::As<'_>) -> Result<Ret> {
                self($(arguments.$i),*)
            }
        }
    )*};
}

functions! { (); }
tuples!(functions);
