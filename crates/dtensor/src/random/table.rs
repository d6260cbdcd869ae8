//! The distributions that tensors are drawn from, and the names of the functions that draw from them.

/// Passes the table to a macro that declares functions. An entry is: what is drawn; the functions that draw
/// it from this thread's generator, from a given one, and like another tensor; the arguments beside shape and
/// dtype, with an example of them and of a dtype; and the distribution that they mean.
macro_rules! distributions {
    ($declare:ident) => {
        $declare! {
            /// Uniform on [0, 1)
            rand, rand_with, rand_like() "" F32 => Distribution::Uniform { low: 0.0, high: 1.0 };
            /// Normal with mean 0 and variance 1
            randn, randn_with, randn_like() "" F32 => Distribution::Normal { mean: 0.0, std: 1.0 };
            /// Uniform on [`low`, `high`)
            uniform, uniform_with, uniform_like(low: f64, high: f64) "-1.0, 2.0, " F64
                => Distribution::Uniform { low, high };
            /// Normal with this mean and standard deviation
            normal, normal_with, normal_like(mean: f64, std: f64) "3.0, 0.5, " F32
                => Distribution::Normal { mean, std };
            /// Normal with this mean and standard deviation, but between `a` and `b`, both included
            trunc_normal, trunc_normal_with, trunc_normal_like(mean: f64, std: f64, a: f64, b: f64)
                "0.0, 1.0, -2.0, 2.0, " F32 => Distribution::Truncated { mean, std, low: a, high: b };
            /// Whole numbers uniform on `low..high` (as even as [`Tensor::randint`]'s), in any dtype that holds them all,
            randint_as, randint_as_with, randint_like(low: i64, high: i64) "0, 10, " U8
                => Distribution::Integers { low, high };
            /// 1 with probability `p`, to the nearest multiple of 2⁻³², else 0,
            bernoulli, bernoulli_with, bernoulli_like(p: f64) "0.3, " U8 => Distribution::Bernoulli { p };
        }
    };
}
pub(crate) use distributions;
