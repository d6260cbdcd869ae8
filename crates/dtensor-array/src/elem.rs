//! The traits that kernels are generic over: element types, the types they accumulate in, and arithmetic on these.
//!
//! Half-precision types compute in `f32` and integers in wrapping `i64`. A kernel is written once over [`Elem::Acc`] and works
//! for every dtype.

// `pub` here only satisfies the bounds of the public `Element`. No other crate can name these items.
#![allow(unreachable_pub)]

use std::mem::MaybeUninit;
use std::num::Wrapping;
use std::ops::{Add, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use crate::host::{halves, math, wide};
use crate::storage::StorageElem;

/// An element type.
pub trait Elem:
    Copy + Default + PartialOrd + std::fmt::Debug + Send + Sync + SimdTargets + StorageElem + 'static
{
    /// The type that kernels compute and accumulate in.
    type Acc: Num;
    /// Widens this element to [`Elem::Acc`].
    fn acc(self) -> Self::Acc;
    /// Narrows a result to this type: floating-point numbers round to the nearest, integers wrap.
    fn from_acc(acc: Self::Acc) -> Self;
    /// Returns the same elements as [`Elem::Acc`], or `None` if that is another type.
    #[inline(always)]
    fn same_as_acc(_data: &[Self]) -> Option<&[Self::Acc]> {
        None
    }
    /// As [`same_as_acc`](Elem::same_as_acc), for elements that are not written yet.
    #[inline(always)]
    fn same_as_acc_mut(_data: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<Self::Acc>]> {
        None
    }
}

/// The instruction sets that loops over a type are compiled for, besides the baseline. Each one adds a copy of every loop.
pub trait SimdTargets {
    /// Whether loops are compiled for AVX2.
    const AVX2: bool;
    /// Whether loops are compiled for AVX-512.
    const AVX512: bool;
}

macro_rules! simd_targets {
    ($($t:ty: $avx2:expr, $avx512:expr;)*) => {$(
        impl SimdTargets for $t {
            const AVX2: bool = $avx2;
            const AVX512: bool = $avx512;
        }
    )*};
}
simd_targets! {
    u8: false, false;
    i64: false, false;
    Wrapping<i64>: false, false;
    f16: true, false;
    bf16: true, false;
    f32: true, true;
    f64: true, false;
}

/// A floating-point element type.
pub trait Float: Elem<Acc: Real> {}

/// A type that kernels compute and accumulate in.
pub trait Num:
    SimdTargets
    + Copy
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + std::fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The smallest value: −∞ for floating-point types.
    const LOWEST: Self;
    /// The largest value: +∞ for floating-point types.
    const HIGHEST: Self;
    /// Returns true if this is NaN. Integers never are.
    fn is_nan(self) -> bool;
    /// Converts from `f64`: rounded to the nearest, or truncated for integers.
    fn from_f64(x: f64) -> Self;
    /// Converts to `f64`.
    fn to_f64(self) -> f64;
    /// The value with all bits set: the identity of [`bit_and`](Self::bit_and).
    const ALL_BITS: Self;
    /// The bits that reverse the order of values under [`bit_xor`](Self::bit_xor): the sign bit, or all bits of an integer.
    const ORDER: Self;
    /// Computes the bitwise and.
    fn bit_and(self, other: Self) -> Self;
    /// Computes the bitwise or.
    fn bit_or(self, other: Self) -> Self;
    /// Computes the bitwise exclusive or.
    fn bit_xor(self, other: Self) -> Self;
    /// Returns the larger value; NaN if either is NaN. +0 counts as larger than −0, so that the maximum of many values does
    /// not depend on their order.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // Equal numbers have equal bits, except that zeros differ in the sign. Comparisons with NaN are false, so a NaN in
        // `self` stays.
        let most = if other > self { other } else { self };
        let most = if other == self { self.bit_and(other) } else { most };
        if other.is_nan() { other } else { most }
    }
    /// Returns the smaller value; NaN if either is NaN. −0 counts as smaller than +0.
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        let least = if other < self { other } else { self };
        let least = if other == self { self.bit_or(other) } else { least };
        if other.is_nan() { other } else { least }
    }
}

macro_rules! real_functions {
    ($($(#[$doc:meta])* $name:ident => $f32:path, $f64:path;)*) => {
        /// A floating-point type that kernels compute in. The `f32` functions are branch-free, so loops over them vectorise.
        pub trait Real: Num {
            /// The value with all bits set except the sign bit: [`Num::bit_and`] with it gives the absolute value.
            const MAGNITUDE: Self;
            /// Computes `self × b + c` with one rounding.
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
    /// Computes e to the power `self`.
    exp => math::exp, f64::exp;
    /// Computes the natural logarithm.
    ln => math::ln, f64::ln;
    /// Computes the hyperbolic tangent.
    tanh => math::tanh, f64::tanh;
    /// Computes the error function.
    erf => math::erf, libm::erf;
    /// Computes the cumulative distribution function of the standard normal distribution.
    normal_cdf => math::normal_cdf, math::normal_cdf_f64;
    /// Computes the sine.
    sin => math::sin, f64::sin;
    /// Computes the cosine.
    cos => math::cos, f64::cos;
    /// Computes the square root.
    sqrt => f32::sqrt, f64::sqrt;
    /// Computes the absolute value.
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
