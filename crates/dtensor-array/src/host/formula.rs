//! The formulas of element-wise functions, and of their derivatives.
//!
//! [`formulas!`] makes a Rust function of each, which is always inlined into its loop, and the same function in CUDA C++. So they are
//! written in what both languages have: operators, and calls of the functions at the end of this file. A number is the second
//! operand, because Rust infers its type from the first.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

use crate::{Num, Real};

/// Declares formulas of type `A`, for all numbers (`Num`) or for floating-point numbers only (`Real`).
macro_rules! formulas {
    ($($(#[$doc:meta])* fn $name:ident<A: $bound:ident>($($arg:ident),*) { $body:expr })*) => {
        $(
            $(#[$doc])*
            #[allow(unused_variables)]
            #[inline(always)]
            pub(crate) fn $name<A: $bound>($($arg: A),*) -> A {
                $body
            }
        )*

        /// Returns the formulas in CUDA C++, for the types `T` and `A` of a unit.
        #[cfg(feature = "cuda")]
        pub(crate) fn cuda_source() -> String {
            let mut source = format!(
                "namespace formula {{\n\
                 constexpr double FRAC_1_SQRT_2 = {FRAC_1_SQRT_2:e}, FRAC_2_SQRT_PI = {FRAC_2_SQRT_PI:e};\n\
                 constexpr double TANH_SCALE = {TANH_SCALE:e}, TANH_CUBE = {TANH_CUBE:e};\n\
                 DEVICE A zero() {{ return A(0); }}\nDEVICE A one() {{ return A(1); }}\nDEVICE A minus_one() {{ return A(-1); }}\nDEVICE A c(double x) {{ return A(x); }}\n"
            );
            $(
                let is_real = stringify!($bound) == "Real";
                let arguments: &[&str] = &[$(concat!("A ", stringify!($arg))),*];
                source += if is_real { "#if DTYPE >= 2\n" } else { "" };
                source += &format!(
                    "DEVICE A {}({}) {{ return {}; }}\n",
                    stringify!($name), arguments.join(", "), stringify!($body)
                );
                source += if is_real { "#endif\n" } else { "" };
            )*
            source + "}\n"
        }
    };
}

/// √(2/π), the scale in the tanh approximation of GELU.
pub const TANH_SCALE: f64 = FRAC_2_SQRT_PI / SQRT_2;
/// The weight of x³ in the tanh approximation of GELU.
pub const TANH_CUBE: f64 = 0.044715;

formulas! {
    /// −x.
    fn negative<A: Num>(x) { -x }

    /// |x|.
    fn magnitude<A: Real>(x) { abs(x) }

    /// |x| for integers.
    fn magnitude_int<A: Num>(x) { select(x < zero(), -x, x) }

    /// The sign: −1, 0 or 1. ±0 and NaN are returned unchanged.
    fn sign<A: Num>(x) { select(x > zero(), one(), select(x < zero(), minus_one(), x)) }

    /// √x.
    fn root<A: Real>(x) { sqrt(x) }

    /// 1 / √x.
    fn inverse_root<A: Real>(x) { recip(sqrt(x)) }

    /// 1 / x.
    fn inverse<A: Real>(x) { recip(x) }

    /// eˣ.
    fn exponential<A: Real>(x) { exp(x) }

    /// The natural logarithm.
    fn logarithm<A: Real>(x) { ln(x) }

    /// The sine.
    fn sine<A: Real>(x) { sin(x) }

    /// The cosine.
    fn cosine<A: Real>(x) { cos(x) }

    /// The hyperbolic tangent.
    fn hyperbolic_tangent<A: Real>(x) { tanh(x) }

    /// The error function.
    fn error_function<A: Real>(x) { erf(x) }

    /// x if positive, else 0.
    fn relu<A: Num>(x) { select(x <= zero(), zero(), x) }

    /// x².
    fn square<A: Num>(x) { x * x }

    /// x³.
    fn cube<A: Num>(x) { x * x * x }

    /// 1.
    fn unit<A: Num>(x) { one() }

    /// 1 / x².
    fn inverse_square<A: Real>(x) { recip(x * x) }

    /// 1 / (1 + e⁻ˣ).
    fn sigmoid<A: Real>(x) { recip(exp(-x) + one()) }

    /// x · sigmoid(x).
    fn silu<A: Real>(x) { x / (exp(-x) + one()) }

    /// x times the standard normal cumulative distribution function of x.
    fn gelu<A: Real>(x) { x * normal_cdf(x) }

    /// The hyperbolic tangent in the tanh approximation of GELU.
    fn tanh_of<A: Real>(x) { tanh((x + x * c(TANH_CUBE) * x * x) * c(TANH_SCALE)) }

    /// The tanh approximation of [`gelu`].
    fn gelu_tanh<A: Real>(x) { x * c(0.5) * (tanh_of(x) + one()) }

    /// `a + w · (b − a)`, counted from the nearer end, so that it is exact at both.
    fn lerp<A: Real>(a, b, w) { select(abs(w) < c(0.5), a + w * (b - a), b - (-w + one()) * (b - a)) }

    // Derivatives times `dy`. `x` is the argument of the function, `y` its result.

    /// The gradient of −x.
    fn negative_grad<A: Real>(x, dy) { -dy }

    /// The gradient of |x|.
    fn magnitude_grad<A: Real>(x, dy) { sign(x) * dy }

    /// The gradient of a function that is constant almost everywhere.
    fn no_grad<A: Real>(x, dy) { zero() }

    /// The gradient of √x.
    fn root_grad<A: Real>(y, dy) { dy / (y + y) }

    /// The gradient of 1 / √x.
    fn inverse_root_grad<A: Real>(y, dy) { dy * c(-0.5) * (y * y * y) }

    /// The gradient of 1 / x.
    fn inverse_grad<A: Real>(y, dy) { -dy * (y * y) }

    /// The gradient of eˣ.
    fn exponential_grad<A: Real>(y, dy) { dy * y }

    /// The gradient of the logarithm.
    fn logarithm_grad<A: Real>(x, dy) { dy / x }

    /// The gradient of the sine.
    fn sine_grad<A: Real>(x, dy) { dy * cos(x) }

    /// The gradient of the cosine.
    fn cosine_grad<A: Real>(x, dy) { -dy * sin(x) }

    /// The gradient of the hyperbolic tangent.
    fn hyperbolic_tangent_grad<A: Real>(y, dy) { dy * (-(y * y) + one()) }

    /// The gradient of the sigmoid.
    fn sigmoid_grad<A: Real>(y, dy) { dy * (-y + one()) * y }

    /// The gradient of ReLU.
    fn relu_grad<A: Real>(y, dy) { select(y <= zero(), zero(), dy) }

    /// The gradient of [`gelu`].
    fn gelu_grad<A: Real>(x, dy) {
        dy * (normal_cdf(x) + x * (exp(x * c(-0.5) * x) * c(FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 0.5)))
    }

    /// The derivative of the argument of the hyperbolic tangent in [`gelu_tanh`].
    fn tanh_slope<A: Real>(x) { (x * c(3.0 * TANH_CUBE) * x + one()) * c(TANH_SCALE) }

    /// The gradient of [`gelu_tanh`], from x and its [`tanh_of`].
    fn gelu_tanh_grad_with<A: Real>(x, t, dy) {
        dy * c(0.5) * ((t + one()) + x * (-(t * t) + one()) * tanh_slope(x))
    }

    /// The gradient of [`gelu_tanh`].
    fn gelu_tanh_grad<A: Real>(x, dy) { gelu_tanh_grad_with(x, tanh_of(x), dy) }

    /// The gradient of [`silu`], from x and its [`sigmoid`].
    fn silu_grad_with<A: Real>(x, s, dy) { dy * s * (x * (-s + one()) + one()) }

    /// The gradient of [`silu`].
    fn silu_grad<A: Real>(x, dy) { silu_grad_with(x, sigmoid(x), dy) }

    /// The gradient of the error function.
    fn error_function_grad<A: Real>(x, dy) { dy * c(FRAC_2_SQRT_PI) * exp(-(x * x)) }
}

#[inline(always)]
fn zero<A: Num>() -> A {
    A::ZERO
}

#[inline(always)]
fn one<A: Num>() -> A {
    A::ONE
}

#[inline(always)]
fn minus_one<A: Num>() -> A {
    -A::ONE
}

#[inline(always)]
fn c<A: Num>(x: f64) -> A {
    A::from_f64(x)
}

#[inline(always)]
fn select<A>(condition: bool, x: A, y: A) -> A {
    if condition { x } else { y }
}

/// Returns 1 / x.
#[inline(always)]
fn recip<A: Real>(x: A) -> A {
    A::ONE / x
}

/// Declares methods of [`Real`] as functions, as they are in C++.
macro_rules! functions {
    ($($name:ident)*) => {$(
        #[inline(always)]
        fn $name<A: Real>(x: A) -> A {
            x.$name()
        }
    )*};
}
functions!(abs sqrt exp ln sin cos tanh erf normal_cdf);
