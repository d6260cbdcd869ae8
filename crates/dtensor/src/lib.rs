//! Tensors.
mod engine;
mod error;
mod tensor;

pub use engine::{num_threads, set_num_threads, with_num_threads};
pub use error::{Error, Result};
pub use tensor::{DType, Device, Dim, Dims, Element, INFER, Meta, NewShape, Shape};
