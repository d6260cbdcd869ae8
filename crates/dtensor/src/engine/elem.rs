//! What the kernels need to know of an element type: the type they accumulate in, and its arithmetic.
//!
//! Half-precision types compute in `f32`, integers in `i64` with wrapping, so a kernel is written once over
//! [`Elem::Acc`] and serves every dtype.

// Public only in name: they bound the public `Element`, which nobody outside can implement.
#![allow(unreachable_pub)]

use std::num::Wrapping;
use std::ops::{Add, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use super::kernels::{halves, math};

/// An element type of the engine.
pub trait Elem: candle_core::WithDType + Default + Vectors {
    /// The type in which arithmetic on this element is done.
    type Acc: Num;
    /// Widens.
    fn acc(self) -> Self::Acc;
    /// Rounds back to the nearest.
    fn from_acc(acc: Self::Acc) -> Self;
}

/// For which vector units loops over a type are compiled. Every one is another copy of every loop.
pub trait Vectors {
    /// Whether for those beyond what every machine has.
    const ANY: bool;
    /// Whether for the widest too.
    const WIDEST: bool;
}

macro_rules! vectors {
    ($($t:ty: $any:expr, $widest:expr;)*) => {$(
        impl Vectors for $t {
            const ANY: bool = $any;
            const WIDEST: bool = $widest;
        }
    )*};
}
vectors! {
    u8: false, false;
    i64: false, false;
    Wrapping<i64>: false, false;
    f16: true, false;
    bf16: true, false;
    f32: true, true;
    f64: true, false;
}

/// An element type whose values are real numbers.
pub trait Float: Elem<Acc: Real> {}

/// A type that kernels accumulate in.
pub trait Num:
    Vectors
    + Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + std::fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Below or equal to every value: −∞ for real numbers.
    const LOWEST: Self;
    /// Above or equal to every value: +∞ for real numbers.
    const HIGHEST: Self;
    /// Whether this is not a number.
    fn is_nan(self) -> bool;
    /// The nearest value to a number.
    fn from_f64(x: f64) -> Self;
    /// As a double.
    fn to_f64(self) -> f64;
    /// The larger; NaN if either is NaN.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // Comparisons with NaN are false: the second test keeps a NaN on the left, the first one on the right.
        if self > other || self.is_nan() { self } else { other }
    }
    /// The smaller; NaN if either is NaN.
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        if self < other || self.is_nan() { self } else { other }
    }
}

macro_rules! real_functions {
    ($($(#[$doc:meta])* $name:ident => $f32:path, $f64:path;)*) => {
        /// Real arithmetic. The `f32` functions are branch-free, so loops over them vectorise.
        pub trait Real: Num + Neg<Output = Self> {
            /// `self × b + c`, in one rounding where the machine has it.
            fn mul_add(self, b: Self, c: Self) -> Self;
            $($(#[$doc])* fn $name(self) -> Self;)*
        }
        impl Real for f32 {
            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self { f32::mul_add(self, b, c) }
            $(#[inline(always)] fn $name(self) -> Self { $f32(self) })*
        }
        impl Real for f64 {
            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self { f64::mul_add(self, b, c) }
            $(#[inline(always)] fn $name(self) -> Self { $f64(self) })*
        }
    };
}

real_functions! {
    /// e to the power of this.
    exp => math::exp, f64::exp;
    /// The natural logarithm.
    ln => math::ln, f64::ln;
    /// The hyperbolic tangent.
    tanh => math::tanh, f64::tanh;
    /// The error function.
    erf => math::erf, libm::erf;
    /// The sine.
    sin => math::sin, f64::sin;
    /// The cosine.
    cos => math::cos, f64::cos;
    /// The square root.
    sqrt => f32::sqrt, f64::sqrt;
    /// The absolute value.
    abs => f32::abs, f64::abs;
}

macro_rules! num {
    ($t:ty, $zero:expr, $one:expr, $lowest:expr, $highest:expr, $is_nan:expr, $from:expr, $to:expr) => {
        impl Num for $t {
            const ZERO: Self = $zero;
            const ONE: Self = $one;
            const LOWEST: Self = $lowest;
            const HIGHEST: Self = $highest;
            #[inline(always)]
            fn is_nan(self) -> bool {
                $is_nan(self)
            }
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                $from(x)
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                $to(self)
            }
        }
    };
}
num!(f32, 0.0, 1.0, f32::NEG_INFINITY, f32::INFINITY, f32::is_nan, |x| x as f32, |x| x as f64);
num!(f64, 0.0, 1.0, f64::NEG_INFINITY, f64::INFINITY, f64::is_nan, |x| x, |x| x);
num!(
    Wrapping<i64>,
    Wrapping(0),
    Wrapping(1),
    Wrapping(i64::MIN),
    Wrapping(i64::MAX),
    |_| false,
    |x| Wrapping(x as i64),
    |x: Wrapping<i64>| x.0 as f64
);

macro_rules! elem {
    ($($t:ty, $acc:ty, $to:expr, $from:expr;)*) => {$(
        impl Elem for $t {
            type Acc = $acc;
            #[inline(always)]
            fn acc(self) -> $acc {
                $to(self)
            }
            #[inline(always)]
            fn from_acc(acc: $acc) -> Self {
                $from(acc)
            }
        }
    )*};
}
elem! {
    u8, Wrapping<i64>, |x| Wrapping(x as i64), |x: Wrapping<i64>| x.0 as u8;
    i64, Wrapping<i64>, Wrapping, |x: Wrapping<i64>| x.0;
    f16, f32, halves::f16_to_f32, halves::f32_to_f16;
    bf16, f32, halves::bf16_to_f32, halves::f32_to_bf16;
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
}

impl Float for f16 {}
impl Float for bf16 {}
impl Float for f32 {}
impl Float for f64 {}
