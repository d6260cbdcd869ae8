//! [`Operand`]: the right-hand side of an operator, a tensor or a number.

use dtensor_array::Scalar;

use super::Tensor;

/// A tensor or a number. Operators take `impl Into<Operand>`, so `x.add(&y)` and `x.add(2.0)` both work.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A tensor.
    Tensor(&'a Tensor),
    /// A number.
    Scalar(Scalar),
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Operand::Tensor(tensor)
    }
}

impl From<Scalar> for Operand<'_> {
    fn from(scalar: Scalar) -> Self {
        Operand::Scalar(scalar)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl From<$number> for Operand<'_> {
            fn from(x: $number) -> Self {
                Operand::Scalar(x.into())
            }
        }
    )*};
}
numbers!(f64, f32, i64, i32, u8, usize);
