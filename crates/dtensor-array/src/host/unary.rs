//! Element-wise functions of one array, and their derivatives.

use super::formula;
use super::nest::{map, zip};
use crate::{Array, DType, Element, Error, Float, Result, with_elem, with_float};

pub use super::formula::{TANH_CUBE, TANH_SCALE};

/// Declares the functions: the name in error messages, the formulas of the function and its derivative, and whether the derivative is
/// computed from the result instead of the argument.
macro_rules! functions {
    ($($(#[$doc:meta])* $variant:ident $name:literal = $forward:ident, $backward:ident, $saves_output:literal;)*) => {
        /// An element-wise function.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Unary {
            $($(#[$doc])* $variant,)*
        }

        impl Unary {
            /// All functions.
            #[cfg(any(test, feature = "cuda"))]
            pub(crate) const ALL: &[Unary] = &[$(Unary::$variant),*];

            /// Returns the name used in error messages.
            pub fn name(self) -> &'static str {
                match self {
                    $(Unary::$variant => $name,)*
                }
            }

            /// Returns the names of the formulas of the function and of its derivative.
            #[cfg(feature = "cuda")]
            pub(crate) fn formulas(self) -> [&'static str; 2] {
                match self {
                    $(Unary::$variant => [stringify!($forward), stringify!($backward)],)*
                }
            }

            /// Returns the names of the kernels of the function and of its derivative.
            #[cfg(feature = "cuda")]
            pub(crate) fn kernels(self) -> [&'static str; 2] {
                match self {
                    $(Unary::$variant => [$name, concat!($name, "_grad")],)*
                }
            }

            /// Returns true if the gradient is computed from the function's result instead of its argument.
            pub fn saves_output(self) -> bool {
                match self {
                    $(Unary::$variant => $saves_output,)*
                }
            }
        }

        fn real<T: Float + Element>(f: Unary, x: &Array) -> Result<Array> {
            match f {
                $(Unary::$variant => map::<T>(x, formula::$forward),)*
            }
        }

        fn real_grad<T: Float + Element>(f: Unary, saved: &Array, dy: &Array) -> Result<Array> {
            match f {
                $(Unary::$variant => zip::<T, T, _>(saved, dy, formula::$backward),)*
            }
        }
    };
}

functions! {
    /// −x.
    Neg "neg" = negative, negative_grad, false;
    /// The absolute value.
    Abs "abs" = magnitude, magnitude_grad, false;
    /// The sign: −1, 0 or 1.
    Sign "sign" = sign, no_grad, false;
    /// The square root.
    Sqrt "sqrt" = root, root_grad, true;
    /// One over the square root.
    Rsqrt "rsqrt" = inverse_root, inverse_root_grad, true;
    /// One over x.
    Recip "recip" = inverse, inverse_grad, true;
    /// e to the power x.
    Exp "exp" = exponential, exponential_grad, true;
    /// The natural logarithm.
    Ln "log" = logarithm, logarithm_grad, false;
    /// The sine.
    Sin "sin" = sine, sine_grad, false;
    /// The cosine.
    Cos "cos" = cosine, cosine_grad, false;
    /// The hyperbolic tangent.
    Tanh "tanh" = hyperbolic_tangent, hyperbolic_tangent_grad, true;
    /// 1 / (1 + e⁻ˣ).
    Sigmoid "sigmoid" = sigmoid, sigmoid_grad, true;
    /// x if positive, else 0.
    Relu "relu" = relu, relu_grad, true;
    /// x times the standard normal cumulative distribution function of x.
    Gelu "gelu" = gelu, gelu_grad, false;
    /// The tanh approximation of [`Gelu`](Self::Gelu).
    GeluTanh "gelu_tanh" = gelu_tanh, gelu_tanh_grad, false;
    /// x · sigmoid(x).
    Silu "silu" = silu, silu_grad, false;
    /// The error function.
    Erf "erf" = error_function, error_function_grad, false;
}

/// Computes `f` of each element. Integer dtypes support only `Neg`, `Abs`, `Sign` and `Relu`.
pub(crate) fn unary(f: Unary, x: &Array) -> Result<Array> {
    use Unary::*;
    if let (dtype @ (DType::I64 | DType::U8), Neg | Abs | Sign | Relu) = (x.dtype(), f) {
        return with_elem!(dtype, T => match f {
            Neg => map::<T>(x, formula::negative),
            Abs => map::<T>(x, formula::magnitude_int),
            Sign => map::<T>(x, formula::sign),
            _ => map::<T>(x, formula::relu),
        });
    }
    #[cfg(target_arch = "x86_64")]
    if let (DType::F32, Exp, Some(v4)) = (x.dtype(), f, pulp::x86::V4::try_new()) {
        return super::exp::exp(v4, x);
    }
    with_float!(f.name(), x.dtype(), T => real::<T>(f, x))
}

/// Computes `dy` times the derivative of `f`. `saved` is the result of `f` if [`Unary::saves_output`], else its argument.
pub(crate) fn unary_grad(f: Unary, saved: &Array, dy: &Array) -> Result<Array> {
    let (left, right) = (saved.dtype(), dy.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: f.name(), left, right });
    }
    with_float!(f.name(), left, T => real_grad::<T>(f, saved, dy))
}

#[cfg(test)]
mod tests {
    use super::super::cast::cast;
    use super::*;
    use crate::host::testing::values;

    const ALL: &[Unary] = Unary::ALL;

    fn exact(f: Unary, x: f64) -> f64 {
        match f {
            Unary::Neg => -x,
            Unary::Abs => x.abs(),
            Unary::Sign => {
                if x == 0.0 {
                    0.0
                } else {
                    x.signum()
                }
            }
            Unary::Sqrt => x.sqrt(),
            Unary::Rsqrt => x.sqrt().recip(),
            Unary::Recip => x.recip(),
            Unary::Exp => x.exp(),
            Unary::Ln => x.ln(),
            Unary::Sin => x.sin(),
            Unary::Cos => x.cos(),
            Unary::Tanh => x.tanh(),
            Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Unary::Relu => x.max(0.0),
            Unary::Gelu => x / 2.0 * libm::erfc(-x / 2f64.sqrt()),
            Unary::GeluTanh => {
                x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            Unary::Silu => x / (1.0 + (-x).exp()),
            Unary::Erf => libm::erf(x),
        }
    }

    fn local(x: &[f64], dtype: DType) -> Array {
        cast(&Array::from_vec(x.to_vec(), &[x.len()]).unwrap(), dtype).unwrap()
    }

    /// Returns the relative error allowed for results that are not tiny.
    fn tolerance(dtype: DType) -> f64 {
        match dtype {
            DType::BF16 => 4.1e-3,
            DType::F16 => 6e-4,
            DType::F32 => 6e-7,
            _ => 1e-13,
        }
    }

    fn domain(f: Unary, n: usize) -> Vec<f64> {
        let low = if matches!(f, Unary::Sqrt | Unary::Rsqrt | Unary::Ln) { 0.03125 } else { -6.0 };
        (0..n).map(|i| low + (i * 37 % 101) as f64 * 0.125).collect()
    }

    #[test]
    fn every_function_is_accurate_for_every_dtype() {
        for &f in ALL {
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                for n in [0, 1, 16, 101] {
                    let x = local(&domain(f, n), dtype);
                    let got = values(&unary(f, &x).unwrap());
                    assert_eq!(got.len(), n);
                    for (x, got) in values(&x).into_iter().zip(got) {
                        let want = exact(f, x);
                        let error = (got - want).abs();
                        assert!(
                            got == want || error <= tolerance(dtype) * want.abs().max(1.0),
                            "{f:?} {dtype} of {x}: {want}, not {got}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn derivatives_match_finite_differences() {
        for &f in ALL {
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                // Zero is left out, because some functions have no derivative there.
                let x: Vec<f64> = domain(f, 101).into_iter().filter(|&x| x != 0.0).collect();
                let x = local(&x, dtype);
                let saved = if f.saves_output() { unary(f, &x).unwrap() } else { x.clone() };
                let dy = local(&[2.0], dtype).expand(&[x.numel()]).unwrap();
                let got = unary_grad(f, &saved, &dy).unwrap();
                assert_eq!((got.dims(), got.dtype()), (x.dims(), dtype));
                for (x, got) in values(&x).into_iter().zip(values(&got)) {
                    let h = 1e-5 * x.abs();
                    let want = 2.0 * (exact(f, x + h) - exact(f, x - h)) / (2.0 * h);
                    // A derivative computed from a rounded result has up to three times the rounding error.
                    let limit = (3.0 * tolerance(dtype)).max(1e-8) * want.abs().max(2.0);
                    assert!((got - want).abs() <= limit, "{f:?}' {dtype} at {x}: {want}, not {got}");
                }
            }
        }
    }

    #[test]
    fn special_values() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let of = |f, x: f64| values(&unary(f, &local(&[x], dtype)).unwrap())[0];
            for &f in ALL {
                assert!(of(f, nan).is_nan(), "{f:?} {dtype}");
            }
            assert_eq!([of(Unary::Exp, -inf), of(Unary::Exp, inf), of(Unary::Ln, 0.0)], [0.0, inf, -inf]);
            assert_eq!(
                [of(Unary::Rsqrt, 0.0), of(Unary::Rsqrt, inf), of(Unary::Recip, -inf)],
                [inf, 0.0, 0.0]
            );
            assert_eq!(
                [of(Unary::Relu, -inf), of(Unary::Relu, inf), of(Unary::Sign, -inf)],
                [0.0, inf, -1.0]
            );
            assert_eq!(
                [of(Unary::Sigmoid, -inf), of(Unary::Tanh, -inf), of(Unary::Erf, -inf)],
                [0.0, -1.0, -1.0]
            );
            assert_eq!([of(Unary::Gelu, inf), of(Unary::GeluTanh, inf), of(Unary::Silu, inf)], [inf; 3]);
            assert!(of(Unary::Sqrt, -1.0).is_nan() && of(Unary::Ln, -1.0).is_nan());
            let grad =
                |f, x: f64| values(&unary_grad(f, &local(&[x], dtype), &local(&[3.0], dtype)).unwrap())[0];
            assert_eq!(
                [grad(Unary::Relu, 0.0), grad(Unary::Abs, 0.0), grad(Unary::Relu, 1.0)],
                [0.0, 0.0, 3.0]
            );
        }
    }

    #[test]
    fn integers() {
        let x = Array::from_vec(vec![-3i64, 0, 5, i64::MIN], &[4]).unwrap();
        let of = |f| unary(f, &x).unwrap().copy_to_host::<i64>().unwrap();
        assert_eq!(of(Unary::Neg), [3, 0, -5, i64::MIN]);
        assert_eq!(of(Unary::Abs), [3, 0, 5, i64::MIN]);
        assert_eq!(of(Unary::Sign), [-1, 0, 1, -1]);
        assert_eq!(of(Unary::Relu), [0, 0, 5, 0]);
        let y = Array::from_vec(vec![0u8, 200], &[2]).unwrap();
        let of = |f| unary(f, &y).unwrap().copy_to_host::<u8>().unwrap();
        assert_eq!(
            [of(Unary::Neg), of(Unary::Abs), of(Unary::Sign), of(Unary::Relu)],
            [[0, 56], [0, 200], [0, 1], [0, 200]]
        );
        for &f in ALL {
            if !matches!(f, Unary::Neg | Unary::Abs | Unary::Sign | Unary::Relu) {
                assert!(matches!(unary(f, &x), Err(Error::DType { op, .. }) if op == f.name()));
            }
            assert!(unary_grad(f, &x, &x).is_err());
        }
    }

    #[test]
    fn views() {
        for (n, m) in [(3, 4), (33, 20)] {
            let x = Array::from_vec((0..n * m).map(|i| i as f32 - 6.0).collect(), &[n, m]).unwrap();
            let transposed = x.transpose(0, 1).unwrap();
            let narrow = x.narrow(1, 1, 2).unwrap();
            let expanded = x.narrow(1, 0, 1).and_then(|t| t.expand(&[n, 7])).unwrap();
            let scalar =
                x.narrow(0, 0, 1).and_then(|t| t.narrow(1, 1, 1)).and_then(|t| t.reshape(&[])).unwrap();
            for view in [transposed, narrow, expanded, scalar] {
                let got = unary(Unary::Relu, &view).unwrap();
                let want: Vec<f64> = values(&view).into_iter().map(|x| x.max(0.0)).collect();
                assert_eq!((got.dims(), values(&got)), (view.dims(), want));
                assert!(got.is_contiguous());
                let grad = unary_grad(Unary::Relu, &view, &got).unwrap();
                assert_eq!(values(&grad), values(&got));
            }
        }
    }
}
