//! The operators `+ - * /` on tensors, numbers and results of tensors.
//!
//! Every operator can fail, so these return a [`Result`], and take one on either side of a tensor: a chain needs one `?`. Rust
//! does not let a crate implement an operator between two types of other crates. So a `Result` cannot be combined with a number
//! or with another `Result`: put a `?` behind one of them.

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::{Result, Tensor};

/// Implements one operator for one pair of types.
macro_rules! overload {
    ($Trait:ident $method:ident, $left:ty, $right:ty, |$a:ident, $b:ident| $call:expr) => {
        impl $Trait<$right> for $left {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self, other: $right) -> Result<Tensor> {
                let ($a, $b) = (self, other);
                $call
            }
        }
    };
}

/// Implements an operator between tensors, owned, borrowed, or one of them in a result.
macro_rules! overload_tensors {
    ($($Trait:ident $method:ident;)*) => {$(
        overload!($Trait $method, &Tensor, &Tensor, |a, b| Tensor::$method(a, b));
        overload!($Trait $method, &Tensor, Tensor, |a, b| Tensor::$method(a, &b));
        overload!($Trait $method, Tensor, &Tensor, |a, b| Tensor::$method(&a, b));
        overload!($Trait $method, Tensor, Tensor, |a, b| Tensor::$method(&a, &b));
        overload!($Trait $method, Result<Tensor>, &Tensor, |a, b| Tensor::$method(&a?, b));
        overload!($Trait $method, Result<Tensor>, Tensor, |a, b| Tensor::$method(&a?, &b));
        overload!($Trait $method, &Tensor, Result<Tensor>, |a, b| Tensor::$method(a, &b?));
        overload!($Trait $method, Tensor, Result<Tensor>, |a, b| Tensor::$method(&a, &b?));
    )*};
}

overload_tensors! {
    Add add;
    Sub sub;
    Mul mul;
    Div div;
}

/// Implements the operators between a tensor, owned or borrowed, and a number on either side.
macro_rules! overload_numbers {
    ($($number:ty),*) => {$(
        overload_numbers!(@ $number, &Tensor, |x| x);
        overload_numbers!(@ $number, Tensor, |x| &x);
    )*};
    (@ $number:ty, $tensor:ty, |$x:ident| $borrow:expr) => {
        overload!(Add add, $tensor, $number, |$x, b| Tensor::add($borrow, b));
        overload!(Sub sub, $tensor, $number, |$x, b| Tensor::sub($borrow, b));
        overload!(Mul mul, $tensor, $number, |$x, b| Tensor::mul($borrow, b));
        overload!(Div div, $tensor, $number, |$x, b| Tensor::div($borrow, b));
        overload!(Add add, $number, $tensor, |a, $x| Tensor::add($borrow, a));
        overload!(Sub sub, $number, $tensor, |a, $x| Tensor::rsub($borrow, a));
        overload!(Mul mul, $number, $tensor, |a, $x| Tensor::mul($borrow, a));
        overload!(Div div, $number, $tensor, |a, $x| Tensor::rdiv($borrow, a));
    };
}

// One floating-point and one integer type: with two of a kind, the compiler could not tell the type of `&x * 2.0`.
overload_numbers!(f64, i64);

impl Neg for &Tensor {
    type Output = Result<Tensor>;
    #[track_caller]
    fn neg(self) -> Result<Tensor> {
        Tensor::neg(self)
    }
}

impl Neg for Tensor {
    type Output = Result<Tensor>;
    #[track_caller]
    fn neg(self) -> Result<Tensor> {
        Tensor::neg(&self)
    }
}
