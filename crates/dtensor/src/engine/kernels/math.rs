//! Elementary functions in single precision.

macro_rules! from_std {
    ($($name:ident)*) => {$(
        #[inline(always)]
        pub(crate) fn $name(x: f32) -> f32 {
            x.$name()
        }
    )*};
}
from_std!(exp ln tanh sin cos);

/// The error function.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    libm::erff(x)
}
