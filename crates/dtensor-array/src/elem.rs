//! What the kernels need to know of an element type: the type they accumulate in, and its arithmetic.
//!
//! Half-precision types compute in `f32`, integers in `i64` with wrapping, so a kernel is written once over
//! [`Elem::Acc`] and serves every dtype.

// Public only in name: they bound the public `Element`, which nobody outside can implement.
#![allow(unreachable_pub)]

use std::mem::MaybeUninit;
use std::num::Wrapping;
use std::ops::{Add, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use crate::host::{halves, math, wide};
use crate::storage::Stored;

/// An element type.
pub trait Elem:
    Copy + Default + PartialOrd + std::fmt::Debug + Send + Sync + Vectors + Stored + 'static
{
    /// The type in which arithmetic on this element is done.
    type Acc: Num;
    /// Widens.
    fn acc(self) -> Self::Acc;
    /// Rounds back to the nearest.
    fn from_acc(acc: Self::Acc) -> Self;
    /// The same elements as [`Elem::Acc`], where that is the same type.
    #[inline(always)]
    fn same_as_acc(_data: &[Self]) -> Option<&[Self::Acc]> {
        None
    }
    /// As [`same_as_acc`](Elem::same_as_acc), for elements to be written.
    #[inline(always)]
    fn same_as_acc_mut(_data: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<Self::Acc>]> {
        None
    }
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
    + Default
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
    /// All bits set: leaves a value as it is under [`bit_and`](Self::bit_and).
    const ALL_BITS: Self;
    /// The bits that flip the order of two values under [`bit_xor`](Self::bit_xor): the sign, or all of an integer.
    const ORDER: Self;
    /// Bitwise and.
    fn bit_and(self, other: Self) -> Self;
    /// Bitwise or.
    fn bit_or(self, other: Self) -> Self;
    /// Bitwise exclusive or.
    fn bit_xor(self, other: Self) -> Self;
    /// The larger; NaN if either is NaN. Of zeros it is the positive one, so that the order in which many are compared does
    /// not matter.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // Equal numbers have equal bits but for the sign of zero. A comparison with NaN is false, which keeps one on the left.
        let most = if other > self { other } else { self };
        let most = if other == self { self.bit_and(other) } else { most };
        if other.is_nan() { other } else { most }
    }
    /// The smaller; NaN if either is NaN. Of zeros it is the negative one.
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        let least = if other < self { other } else { self };
        let least = if other == self { self.bit_or(other) } else { least };
        if other.is_nan() { other } else { least }
    }
}

macro_rules! real_functions {
    ($($(#[$doc:meta])* $name:ident => $f32:path, $f64:path;)*) => {
        /// Real arithmetic. The `f32` functions are branch-free, so loops over them vectorise.
        pub trait Real: Num + Neg<Output = Self> {
            /// The bits that make up the absolute value.
            const MAGNITUDE: Self;
            /// `self × b + c`, in one rounding where the machine has it.
            fn mul_add(self, b: Self, c: Self) -> Self;
            $($(#[$doc])* fn $name(self) -> Self;)*
        }
        impl Real for f32 {
            const MAGNITUDE: Self = f32::from_bits(u32::MAX >> 1);
            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self { f32::mul_add(self, b, c) }
            $(#[inline(always)] fn $name(self) -> Self { $f32(self) })*
        }
        impl Real for f64 {
            const MAGNITUDE: Self = f64::from_bits(u64::MAX >> 1);
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
    /// The share of a normal distribution below this.
    normal_cdf => math::normal_cdf, math::normal_cdf_f64;
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
    ($t:ty, $zero:expr, $one:expr, $lowest:expr, $highest:expr, $is_nan:expr, $from:expr, $to:expr, $bits:expr, $of_bits:expr, $all_bits:expr, $order:expr) => {
        impl Num for $t {
            const ZERO: Self = $zero;
            const ONE: Self = $one;
            const LOWEST: Self = $lowest;
            const HIGHEST: Self = $highest;
            const ALL_BITS: Self = $all_bits;
            const ORDER: Self = $order;
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
            #[inline(always)]
            fn bit_and(self, other: Self) -> Self {
                $of_bits($bits(self) & $bits(other))
            }
            #[inline(always)]
            fn bit_or(self, other: Self) -> Self {
                $of_bits($bits(self) | $bits(other))
            }
            #[inline(always)]
            fn bit_xor(self, other: Self) -> Self {
                $of_bits($bits(self) ^ $bits(other))
            }
        }
    };
}
num!(
    f32,
    0.0,
    1.0,
    f32::NEG_INFINITY,
    f32::INFINITY,
    f32::is_nan,
    |x| x as f32,
    |x| x as f64,
    f32::to_bits,
    f32::from_bits,
    f32::from_bits(u32::MAX),
    -0.0
);
num!(
    f64,
    0.0,
    1.0,
    f64::NEG_INFINITY,
    f64::INFINITY,
    f64::is_nan,
    |x| x,
    |x| x,
    f64::to_bits,
    f64::from_bits,
    f64::from_bits(u64::MAX),
    -0.0
);
num!(
    Wrapping<i64>,
    Wrapping(0),
    Wrapping(1),
    Wrapping(i64::MIN),
    Wrapping(i64::MAX),
    |_| false,
    |x| Wrapping(x as i64),
    |x: Wrapping<i64>| x.0 as f64,
    |x: Wrapping<i64>| x.0,
    Wrapping,
    Wrapping(-1),
    Wrapping(-1)
);

macro_rules! elem {
    ($($t:ty, $acc:ty, $to:expr, $from:expr $(, $same:expr, $same_mut:expr)?;)*) => {$(
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
            $(
                #[inline(always)]
                fn same_as_acc(data: &[Self]) -> Option<&[$acc]> {
                    Some($same(data))
                }
                #[inline(always)]
                fn same_as_acc_mut(data: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<$acc>]> {
                    Some($same_mut(data))
                }
            )?
        }
    )*};
}
elem! {
    u8, Wrapping<i64>, |x| Wrapping(x as i64), |x: Wrapping<i64>| x.0 as u8;
    i64, Wrapping<i64>, Wrapping, |x: Wrapping<i64>| x.0, wide::wrapping, wide::wrapping_mut;
    f16, f32, halves::f16_to_f32, halves::f32_to_f16;
    bf16, f32, halves::bf16_to_f32, halves::f32_to_bf16;
    f32, f32, |x| x, |x| x, |data| data, |data| data;
    f64, f64, |x| x, |x| x, |data| data, |data| data;
}

impl Float for f16 {}
impl Float for bf16 {}
impl Float for f32 {}
impl Float for f64 {}
