//! Strided arrays on one device, and the kernels that compute on them.
//!
//! This crate contains dtypes, shapes, devices, arrays, kernels and counter-based random numbers. It must not depend on ranks,
//! gradients or layouts: those belong to the crates above it.
//!
//! - [`Array`]: a strided view of shared, immutable memory.
//! - [`kernels`]: the computations on arrays, by family. Each kernel selects its implementation by the arrays' device.
//! - [`Shape`], [`DType`], [`Device`], [`Meta`], [`Scalar`]: the description of an array without its value.
//! - [`Window`]: the elements of a full array that one shard holds. A shard made from it has the same random bits as the full array.
//! - `cuda`: NVIDIA GPUs (feature `cuda`).
//! - [`mod@mode`]: scoped modes of the calling thread, and listeners, for all crates above.
//!
//! ```
//! use dtensor_array::kernels::binary::{Binary, binary};
//! use dtensor_array::kernels::reduce::{Reduce, reduce};
//! use dtensor_array::Array;
//!
//! # fn main() -> dtensor_array::Result<()> {
//! let x = Array::from_vec(vec![1f32, 2., 3., 4.], &[2, 2])?;
//! let y = Array::from_vec(vec![10f32, 20.], &[2])?;
//! let sum = binary(Binary::Add, &x, &y)?;
//! assert_eq!(sum.copy_to_host::<f32>()?, [11., 22., 13., 24.]);
//! assert_eq!(reduce(Reduce::Sum, &sum, &[0], false)?.copy_to_host::<f32>()?, [24., 46.]);
//! # Ok(())
//! # }
//! ```
#![warn(missing_docs)]

mod array;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod cuda;
mod device;
mod dtype;
mod elem;
mod error;
#[allow(unsafe_code)]
mod host;
pub mod kernels;
pub mod memory;
mod meta;
pub mod mode;
pub mod origin;
mod reduce_op;
mod scalar;
pub mod shape;
mod storage;
mod threads;
mod transfer;
mod window;

pub use array::Array;
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Located, Other, Result};
pub use meta::Meta;
pub use reduce_op::ReduceOp;
pub use scalar::Scalar;
pub use shape::Shape;
pub use threads::{num_threads, set_num_threads, with_num_threads};
pub use transfer::{HostBuffer, HostCopy};
pub use window::Window;

pub(crate) use array::Read;
pub(crate) use elem::{Elem, Float, Num, Real, SimdTargets};

/// Runs `body` with `$T` defined as the Rust type of `$dtype`, for the listed dtypes.
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

/// Runs `body` with `$T` defined as the Rust type of a floating-point dtype; returns an error for other dtypes.
macro_rules! with_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        $crate::with_types!($dtype, $T => $body, [F32: f32, F64: f64, BF16: half::bf16, F16: half::f16]
            dtype => Err($crate::Error::DType { op: $op, dtype, why: "it needs a floating-point dtype" }))
    };
}

/// Runs `body` with `$T` defined as the Rust type of any dtype.
macro_rules! with_elem {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_types!($dtype, $T => $body,
            [F32: f32, F64: f64, BF16: half::bf16, F16: half::f16, I64: i64, U8: u8])
    };
}
pub(crate) use {with_elem, with_float, with_types};
