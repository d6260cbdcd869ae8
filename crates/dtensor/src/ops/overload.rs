//! `+ − × ÷` on references to tensors and on numbers. As every operator can fail, they give a [`Result`]:
//! `(&a + &b)?`.

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::{Result, Tensor};

/// Two operands, by the method that does it and how it is called.
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

macro_rules! overload_numbers {
    ($($number:ty),*) => {$(
        overload!(Add add, &Tensor, $number, |a, b| Tensor::add(a, b));
        overload!(Sub sub, &Tensor, $number, |a, b| Tensor::sub(a, b));
        overload!(Mul mul, &Tensor, $number, |a, b| Tensor::mul(a, b));
        overload!(Div div, &Tensor, $number, |a, b| Tensor::div(a, b));
        overload!(Add add, $number, &Tensor, |a, b| Tensor::add(b, a));
        overload!(Sub sub, $number, &Tensor, |a, b| b.rsub(a));
        overload!(Mul mul, $number, &Tensor, |a, b| Tensor::mul(b, a));
        overload!(Div div, $number, &Tensor, |a, b| b.rdiv(a));
    )*};
}

overload!(Add add, &Tensor, &Tensor, |a, b| Tensor::add(a, b));
overload!(Sub sub, &Tensor, &Tensor, |a, b| Tensor::sub(a, b));
overload!(Mul mul, &Tensor, &Tensor, |a, b| Tensor::mul(a, b));
overload!(Div div, &Tensor, &Tensor, |a, b| Tensor::div(a, b));
overload_numbers!(f64, i32, i64);

impl Neg for &Tensor {
    type Output = Result<Tensor>;
    #[track_caller]
    fn neg(self) -> Result<Tensor> {
        Tensor::neg(self)
    }
}
