//! Table of the distributions, and the names of the functions that draw from them.

/// Passes the table to a macro that declares functions. Each entry lists: the doc sentence; the names of three
/// functions (from the thread's generator, from a given generator, and like another tensor); the arguments besides
/// shape and dtype; an example of these arguments and a dtype for the doc test; and the distribution.
macro_rules! distributions {
    ($declare:ident) => {
        $declare! {
            /// Draws numbers uniform on [0, 1)
            rand, rand_with, rand_like() "" F32 => Distribution::Uniform { low: 0.0, high: 1.0 };
            /// Draws normal numbers with mean 0 and variance 1
            randn, randn_with, randn_like() "" F32 => Distribution::Normal { mean: 0.0, std: 1.0 };
            /// Draws numbers uniform on [`low`, `high`)
            uniform, uniform_with, uniform_like(low: f64, high: f64) "-1.0, 2.0, " F64
                => Distribution::Uniform { low, high };
            /// Draws normal numbers with this mean and standard deviation
            normal, normal_with, normal_like(mean: f64, std: f64) "3.0, 0.5, " F32
                => Distribution::Normal { mean, std };
            /// Draws normal numbers with this mean and standard deviation, truncated to [`a`, `b`]
            trunc_normal, trunc_normal_with, trunc_normal_like(mean: f64, std: f64, a: f64, b: f64)
                "0.0, 1.0, -2.0, 2.0, " F32 => Distribution::Truncated { mean, std, low: a, high: b };
            /// Draws integers uniform on `low..high`, in any dtype that can represent them all (bias as in [`Tensor::randint`])
            randint_as, randint_as_with, randint_like(low: i64, high: i64) "0, 10, " U8
                => Distribution::Integers { low, high };
            /// Draws 1 with probability `p` (rounded to the nearest multiple of 2⁻³²) and 0 otherwise
            bernoulli, bernoulli_with, bernoulli_like(p: f64) "0.3, " U8 => Distribution::Bernoulli { p };
        }
    };
}
pub(crate) use distributions;
