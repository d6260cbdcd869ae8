//! The formulas of functions of one number and of their derivatives, over types that arithmetic is done in.
//!
//! They are functions and not closures so that they are always inlined into the loop.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

use crate::{Num, Real};

#[inline(always)]
fn c<A: Num>(x: f64) -> A {
    A::from_f64(x)
}

/// −x.
#[inline(always)]
pub(crate) fn neg<A: Real>(x: A) -> A {
    -x
}

/// −x of a whole number.
#[inline(always)]
pub(crate) fn neg_int<A: Num>(x: A) -> A {
    A::ZERO - x
}

/// |x| of a whole number.
#[inline(always)]
pub(crate) fn abs_int<A: Num>(x: A) -> A {
    if x < A::ZERO { A::ZERO - x } else { x }
}

/// −1, 0 or 1.
#[inline(always)]
pub(crate) fn sign<A: Num>(x: A) -> A {
    // Zeros keep their sign, and NaN stays.
    let below = if x < A::ZERO { A::ZERO - A::ONE } else { x };
    if x > A::ZERO { A::ONE } else { below }
}

/// x where positive, else 0.
#[inline(always)]
pub(crate) fn relu<A: Num>(x: A) -> A {
    if x <= A::ZERO { A::ZERO } else { x }
}

/// x².
#[inline(always)]
pub(crate) fn square<A: Num>(x: A) -> A {
    x * x
}

/// x³.
#[inline(always)]
pub(crate) fn cube<A: Num>(x: A) -> A {
    x * x * x
}

/// 1.
#[inline(always)]
pub(crate) fn one<A: Num>(_: A) -> A {
    A::ONE
}

/// 1 / x.
#[inline(always)]
pub(crate) fn recip<A: Real>(x: A) -> A {
    A::ONE / x
}

/// 1 / x².
#[inline(always)]
pub(crate) fn recip_square<A: Real>(x: A) -> A {
    A::ONE / (x * x)
}

/// 1 / √x.
#[inline(always)]
pub(crate) fn rsqrt<A: Real>(x: A) -> A {
    A::ONE / x.sqrt()
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub(crate) fn sigmoid<A: Real>(x: A) -> A {
    A::ONE / (A::ONE + (-x).exp())
}

/// x · sigmoid(x).
#[inline(always)]
pub(crate) fn silu<A: Real>(x: A) -> A {
    x / (A::ONE + (-x).exp())
}

/// x times the share of a normal distribution below it.
#[inline(always)]
pub(crate) fn gelu<A: Real>(x: A) -> A {
    x * x.normal_cdf()
}

/// √(2/π), of the approximation of the normal distribution by tanh.
pub const TANH_SCALE: f64 = FRAC_2_SQRT_PI / SQRT_2;
/// The weight of the cube in the approximation of the normal distribution by tanh.
pub const TANH_CUBE: f64 = 0.044715;

#[inline(always)]
fn tanh_of<A: Real>(x: A) -> A {
    (c::<A>(TANH_SCALE) * (x + c::<A>(TANH_CUBE) * x * x * x)).tanh()
}

/// The same by a formula with tanh.
#[inline(always)]
pub(crate) fn gelu_tanh<A: Real>(x: A) -> A {
    c::<A>(0.5) * x * (A::ONE + tanh_of(x))
}

// Derivatives times `dy`. `x` is the argument, `y` the result.
/// Of [`Unary::Abs`](super::unary::Unary).
#[inline(always)]
pub(crate) fn abs_grad<A: Real>(x: A, dy: A) -> A {
    sign(x) * dy
}

/// Of [`Unary::Sqrt`](super::unary::Unary).
#[inline(always)]
pub(crate) fn sqrt_grad<A: Real>(y: A, dy: A) -> A {
    dy / (y + y)
}

/// Of [`Unary::Rsqrt`](super::unary::Unary).
#[inline(always)]
pub(crate) fn rsqrt_grad<A: Real>(y: A, dy: A) -> A {
    c::<A>(-0.5) * dy * (y * y * y)
}

/// Of [`Unary::Recip`](super::unary::Unary).
#[inline(always)]
pub(crate) fn recip_grad<A: Real>(y: A, dy: A) -> A {
    -dy * (y * y)
}

/// Of [`Unary::Exp`](super::unary::Unary).
#[inline(always)]
pub(crate) fn exp_grad<A: Real>(y: A, dy: A) -> A {
    dy * y
}

/// Of [`Unary::Ln`](super::unary::Unary).
#[inline(always)]
pub(crate) fn ln_grad<A: Real>(x: A, dy: A) -> A {
    dy / x
}

/// Of [`Unary::Sin`](super::unary::Unary).
#[inline(always)]
pub(crate) fn sin_grad<A: Real>(x: A, dy: A) -> A {
    dy * x.cos()
}

/// Of [`Unary::Cos`](super::unary::Unary).
#[inline(always)]
pub(crate) fn cos_grad<A: Real>(x: A, dy: A) -> A {
    -dy * x.sin()
}

/// Of [`Unary::Tanh`](super::unary::Unary).
#[inline(always)]
pub(crate) fn tanh_grad<A: Real>(y: A, dy: A) -> A {
    dy * (A::ONE - y * y)
}

/// Of [`Unary::Sigmoid`](super::unary::Unary).
#[inline(always)]
pub(crate) fn sigmoid_grad<A: Real>(y: A, dy: A) -> A {
    dy * (A::ONE - y) * y
}

/// Of [`Unary::Relu`](super::unary::Unary).
#[inline(always)]
pub(crate) fn relu_grad<A: Real>(y: A, dy: A) -> A {
    if y <= A::ZERO { A::ZERO } else { dy }
}

/// Of [`Unary::Gelu`](super::unary::Unary).
#[inline(always)]
pub(crate) fn gelu_grad<A: Real>(x: A, dy: A) -> A {
    let density = (c::<A>(-0.5) * x * x).exp() * c(FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 0.5);
    dy * (x.normal_cdf() + x * density)
}

/// Of [`Unary::GeluTanh`](super::unary::Unary).
#[inline(always)]
pub(crate) fn gelu_tanh_grad<A: Real>(x: A, dy: A) -> A {
    let t = tanh_of(x);
    let inner = c::<A>(TANH_SCALE) * (A::ONE + c::<A>(3.0 * TANH_CUBE) * x * x);
    dy * c(0.5) * ((A::ONE + t) + x * (A::ONE - t * t) * inner)
}

/// Of [`Unary::Silu`](super::unary::Unary).
#[inline(always)]
pub(crate) fn silu_grad<A: Real>(x: A, dy: A) -> A {
    let s = sigmoid(x);
    dy * s * (A::ONE + x * (A::ONE - s))
}

/// Of [`Unary::Erf`](super::unary::Unary).
#[inline(always)]
pub(crate) fn erf_grad<A: Real>(x: A, dy: A) -> A {
    dy * c(FRAC_2_SQRT_PI) * (-(x * x)).exp()
}
