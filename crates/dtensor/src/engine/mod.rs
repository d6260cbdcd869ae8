//! The local engine: values on this rank, and the arithmetic on them. The only room that names Candle.
//!
//! A [`Local`] is a strided array, shared and immutable. Views share its storage. Operators that Candle does as
//! fast as anybody are Candle's; the rest are in [`kernels`]. Nothing here knows of gradients or of other ranks.

#![allow(unsafe_code)] // narrowed again in every module but `kernels`

mod elem;
pub(crate) mod kernels;
mod local;
mod threads;

pub use elem::{Elem, Float, Num, Real};
pub use local::Local;
pub(crate) use local::Read;
pub use threads::{num_threads, set_num_threads, with_num_threads};

/// Runs `body` with `T` standing for the Rust type of a floating-point dtype.
macro_rules! with_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $T = half::f16;
                $body
            }
            dtype => {
                Err($crate::Error::DType { op: $op, dtype, why: "it needs a floating-point dtype" })
            }
        }
    };
}

/// Runs `body` with `T` standing for the Rust type of any dtype.
macro_rules! with_elem {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::DType::U8 => {
                type $T = u8;
                $body
            }
        }
    };
}
pub(crate) use {with_elem, with_float};
