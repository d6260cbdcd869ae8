//! The local engine: values on this rank, and the arithmetic on them. The only room that names Candle.
//!
//! A [`Local`] is a strided array, shared and immutable: a Candle tensor, whose storage and views are Candle's. The
//! loops over it are in [`kernels`]. Nothing here knows of gradients or of other ranks.

mod convert;
mod elem;
#[allow(unsafe_code)]
pub(crate) mod kernels;
mod local;
mod threads;

pub(crate) use elem::{Elem, Float, Num, Real, Vectors};
pub use local::Local;
pub(crate) use local::{Read, Write};
pub use threads::{num_threads, set_num_threads, with_num_threads};

/// Runs `body` with `T` standing for the Rust type of a dtype, of those listed.
macro_rules! with_types {
    ($dtype:expr, $T:ident => $body:expr, [$($name:ident: $rust:ty),*] $($rest:tt)*) => {
        match $dtype {
            $($crate::DType::$name => {
                type $T = $rust;
                $body
            })*
            $($rest)*
        }
    };
}

/// Runs `body`, which gives a result, with `T` standing for the Rust type of a floating-point dtype.
macro_rules! with_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::engine::with_types!($dtype, $T => $body, [F32: f32, F64: f64, BF16: half::bf16, F16: half::f16]
            dtype => Err($crate::Error::DType { op: $op, dtype, why: "it needs a floating-point dtype" }))
    };
}

/// Runs `body` with `T` standing for the Rust type of any dtype.
macro_rules! with_elem {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::engine::with_types!($dtype, $T => $body,
            [F32: f32, F64: f64, BF16: half::bf16, F16: half::f16, I64: i64, U8: u8])
    };
}
pub(crate) use {with_elem, with_float, with_types};
