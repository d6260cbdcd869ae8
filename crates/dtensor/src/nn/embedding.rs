//! The embedding table.

use super::{Base, Module, Parameter, forward};
use crate::ops::padding_row;
use crate::{DType, Error, Replicate, Result, Tensor, on_device, sharded};

/// An embedding table: returns one row of `weight` per index, so that the output has one more dim than the indices.
///
/// ```
/// use dtensor::nn::Embedding;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Embedding::new(10, 4)?;
/// let ids = Tensor::from_slice(&[1i64, 9, 1, 0, 0, 2], [2, 3])?;
/// assert_eq!(layer.forward(&ids)?.dims(), [2, 3, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Module)]
pub struct Embedding {
    /// Embedding table of shape `[rows, row size]`.
    pub weight: Parameter,
    padding: Option<i64>,
    base: Base,
}

#[forward]
impl Embedding {
    /// Creates a table of `rows` rows of `size` elements, drawn from the standard normal distribution with this
    /// thread's generator.
    pub fn new(rows: usize, size: usize) -> Result<Self> {
        let weight = Parameter::with_init([rows, size], Tensor::randn_like)?;
        Ok(Embedding { weight, padding: None, base: Base::new() })
    }

    /// Creates a table with a padding row: it starts as zeros, and its gradient is always zero. A negative `padding`
    /// counts from the back.
    ///
    /// ```
    /// use dtensor::nn::Embedding;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let layer = Embedding::padded(10, 2, -1)?;
    /// let last = Tensor::from_slice(&[9i64], [1])?;
    /// assert_eq!(layer.forward(&last)?.to_vec::<f32>()?, [0., 0.]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn padded(rows: usize, size: usize, padding: i64) -> Result<Self> {
        let padding = padding_row("Embedding", rows, padding)?;
        let weight = Parameter::with_init([rows, size], move |like| {
            let is_padding = positions(like.size(0)?, like)?.eq(padding)?.unsqueeze(1)?;
            like.randn_like()?.masked_fill(&is_padding, 0.0)
        })?;
        Ok(Embedding { weight, padding: Some(padding), base: Base::new() })
    }

    /// Creates a table from an existing parameter, optionally with a padding row, whose gradient is always zero.
    pub fn from_parameter(weight: Parameter, padding: Option<i64>) -> Result<Self> {
        let table = weight.get();
        let &[rows, _] = table.dims() else {
            let message = format!("the weight must have 2 dims, but its shape is {}", table.shape());
            return Err(Error::argument("Embedding", message));
        };
        let padding = padding.map(|padding| padding_row("Embedding", rows, padding)).transpose()?;
        Ok(Embedding { weight, padding, base: Base::new() })
    }

    /// Returns the index of the padding row, if any.
    pub fn padding(&self) -> Option<i64> {
        self.padding
    }

    /// Looks up the rows.
    #[track_caller]
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        ids.embedding(&self.weight.get(), self.padding)
    }
}

/// Returns the integers 0 to `n` - 1, on the device of `beside`, and replicated on its mesh if it is distributed.
#[track_caller]
pub(crate) fn positions(n: usize, beside: &Tensor) -> Result<Tensor> {
    on_device(beside.device(), || match beside.mesh() {
        None => Tensor::arange(0, n as i64, 1, DType::I64),
        Some(mesh) => sharded::arange(0, n as i64, 1, DType::I64, mesh, vec![Replicate; mesh.ndim()]),
    })
}
