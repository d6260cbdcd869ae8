//! The tensor.

mod dtype;
mod shape;

pub use dtype::{DType, Device, Element};
pub use shape::{Dim, Dims, INFER, NewShape, Shape};

/// What is known of a tensor without its value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Meta {
    /// The size of each dim.
    pub shape: Shape,
    /// The element type.
    pub dtype: DType,
    /// Where the value lives.
    pub device: Device,
}
