//! The formulas of the element-wise functions of one array, and of their derivatives.
//!
//! They are functions instead of closures, so that they are always inlined into the loop.

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

/// −x for integers.
#[inline(always)]
pub(crate) fn neg_int<A: Num>(x: A) -> A {
    A::ZERO - x
}

/// |x| for integers.
#[inline(always)]
pub(crate) fn abs_int<A: Num>(x: A) -> A {
    if x < A::ZERO { A::ZERO - x } else { x }
}

/// The sign: −1, 0 or 1.
#[inline(always)]
pub(crate) fn sign<A: Num>(x: A) -> A {
    // ±0 and NaN are returned unchanged.
    let below = if x < A::ZERO { A::ZERO - A::ONE } else { x };
    if x > A::ZERO { A::ONE } else { below }
}

/// x if positive, else 0.
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

/// x times the standard normal cumulative distribution function of x.
#[inline(always)]
pub(crate) fn gelu<A: Real>(x: A) -> A {
    x * x.normal_cdf()
}

/// √(2/π), the scale in the tanh approximation of GELU.
pub const TANH_SCALE: f64 = FRAC_2_SQRT_PI / SQRT_2;
/// The weight of x³ in the tanh approximation of GELU.
pub const TANH_CUBE: f64 = 0.044715;

#[inline(always)]
fn tanh_of<A: Real>(x: A) -> A {
    (c::<A>(TANH_SCALE) * (x + c::<A>(TANH_CUBE) * x * x * x)).tanh()
}

/// The tanh approximation of [`gelu`].
#[inline(always)]
pub(crate) fn gelu_tanh<A: Real>(x: A) -> A {
    c::<A>(0.5) * x * (A::ONE + tanh_of(x))
}

// Derivatives times `dy`. `x` is the argument of the function, `y` its result.
/// The gradient of [`Unary::Abs`](super::unary::Unary).
#[inline(always)]
pub(crate) fn abs_grad<A: Real>(x: A, dy: A) -> A {
    sign(x) * dy
}

/// The gradient of [`Unary::Sqrt`](super::unary::Unary).
#[inline(always)]
pub(crate) fn sqrt_grad<A: Real>(y: A, dy: A) -> A {
    dy / (y + y)
}

/// The gradient of [`Unary::Rsqrt`](super::unary::Unary).
#[inline(always)]
pub(crate) fn rsqrt_grad<A: Real>(y: A, dy: A) -> A {
    c::<A>(-0.5) * dy * (y * y * y)
}

/// The gradient of [`Unary::Recip`](super::unary::Unary).
#[inline(always)]
pub(crate) fn recip_grad<A: Real>(y: A, dy: A) -> A {
    -dy * (y * y)
}

/// The gradient of [`Unary::Exp`](super::unary::Unary).
#[inline(always)]
pub(crate) fn exp_grad<A: Real>(y: A, dy: A) -> A {
    dy * y
}

/// The gradient of [`Unary::Ln`](super::unary::Unary).
#[inline(always)]
pub(crate) fn ln_grad<A: Real>(x: A, dy: A) -> A {
    dy / x
}

/// The gradient of [`Unary::Sin`](super::unary::Unary).
#[inline(always)]
pub(crate) fn sin_grad<A: Real>(x: A, dy: A) -> A {
    dy * x.cos()
}

/// The gradient of [`Unary::Cos`](super::unary::Unary).
#[inline(always)]
pub(crate) fn cos_grad<A: Real>(x: A, dy: A) -> A {
    -dy * x.sin()
}

/// The gradient of [`Unary::Tanh`](super::unary::Unary).
#[inline(always)]
pub(crate) fn tanh_grad<A: Real>(y: A, dy: A) -> A {
    dy * (A::ONE - y * y)
}

/// The gradient of [`Unary::Sigmoid`](super::unary::Unary).
#[inline(always)]
pub(crate) fn sigmoid_grad<A: Real>(y: A, dy: A) -> A {
    dy * (A::ONE - y) * y
}

/// The gradient of [`Unary::Relu`](super::unary::Unary).
#[inline(always)]
pub(crate) fn relu_grad<A: Real>(y: A, dy: A) -> A {
    if y <= A::ZERO { A::ZERO } else { dy }
}

/// The gradient of [`Unary::Gelu`](super::unary::Unary).
#[inline(always)]
pub(crate) fn gelu_grad<A: Real>(x: A, dy: A) -> A {
    let density = (c::<A>(-0.5) * x * x).exp() * c(FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 0.5);
    dy * (x.normal_cdf() + x * density)
}

/// The gradient of [`Unary::GeluTanh`](super::unary::Unary).
#[inline(always)]
pub(crate) fn gelu_tanh_grad<A: Real>(x: A, dy: A) -> A {
    let t = tanh_of(x);
    let inner = c::<A>(TANH_SCALE) * (A::ONE + c::<A>(3.0 * TANH_CUBE) * x * x);
    dy * c(0.5) * ((A::ONE + t) + x * (A::ONE - t * t) * inner)
}

/// The gradient of [`Unary::Silu`](super::unary::Unary).
#[inline(always)]
pub(crate) fn silu_grad<A: Real>(x: A, dy: A) -> A {
    let s = sigmoid(x);
    dy * s * (A::ONE + x * (A::ONE - s))
}

/// The gradient of [`Unary::Erf`](super::unary::Unary).
#[inline(always)]
pub(crate) fn erf_grad<A: Real>(x: A, dy: A) -> A {
    dy * c(FRAC_2_SQRT_PI) * (-(x * x)).exp()
}
