//! Operators whose output shape depends on element values: `nonzero`, `masked_select`, `unique`.

use crate::{Error, Result, Tensor};
use dtensor_array::{DType, Shape};

impl Tensor {
    /// Returns an error for distributed tensors: without communication, ranks do not know how many results the
    /// others have.
    fn require_local(&self, op: &'static str) -> Result<()> {
        match self.layout() {
            None => Ok(()),
            Some(layout) => Err(Error::argument(
                op,
                format!(
                    "the shape of the result depends on the data, which is not supported for distributed tensors ({layout}): \
                     call `full_tensor`, or `to_local` for this rank's shard, first"
                ),
            )),
        }
    }

    /// Returns the indices of all non-zero elements in row-major order, as `i64` of shape `[count, dims]`. NaN
    /// counts as non-zero. Returns an error for distributed tensors.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[0f32, 5., 6., 0.], [2, 2])?;
    /// assert_eq!(x.nonzero()?.to_vec2::<i64>()?, [[0, 1], [1, 0]]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn nonzero(&self) -> Result<Tensor> {
        self.require_local("nonzero")?;
        let rank = self.ndim();
        let strides = self.shape().strides();
        let mut indices: Vec<i64> = Vec::new();
        let mut count = 0;
        for at in nonzero_offsets(self)? {
            count += 1;
            indices.extend((0..rank).map(|d| (at / strides[d] % self.dims()[d]) as i64));
        }
        Tensor::from_vec(indices, [count, rank])?.to_device(self.device())
    }

    /// Returns the elements where the mask (`u8`, broadcast) is not 0, in row-major order. Returns an error for
    /// distributed tensors.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[-1f32, 5., 6., -2.], [2, 2])?;
    /// assert_eq!(x.masked_select(&x.gt(0.0)?)?.to_vec::<f32>()?, [5., 6.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn masked_select(&self, mask: &Tensor) -> Result<Tensor> {
        const OP: &str = "masked_select";
        self.require_local(OP)?;
        mask.require_local(OP)?;
        super::need_dtype(OP, "the mask", &mask.meta(), DType::U8)?;
        let shape: Shape = self.shape().broadcast(OP, &mask.shape())?;
        let indices: Vec<i64> =
            nonzero_offsets(&mask.expand(&shape)?)?.into_iter().map(|at| at as i64).collect();
        let n = indices.len();
        self.expand(&shape)?
            .flatten_all()?
            .index_select(0, &Tensor::from_vec(indices, [n])?.to_device(self.device())?)
    }

    /// Returns the distinct elements in ascending order, with NaN last and only once. Returns an error for
    /// distributed tensors.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[3i64, 1, 3], [3])?.unique()?.to_vec::<i64>()?, [1, 3]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn unique(&self) -> Result<Tensor> {
        self.require_local("unique")?;
        let sorted = self.detach().flatten_all()?.sort(0, false)?.0;
        let values = sorted.to_f64_vec()?;
        let wide = if sorted.dtype() == DType::I64 { sorted.to_vec::<i64>()? } else { Vec::new() };
        let new = |i: usize| match wide.get(i) {
            // Different large integers may be the same `f64`.
            Some(value) => i == 0 || wide[i - 1] != *value,
            None => i == 0 || (values[i - 1] != values[i] && !(values[i - 1].is_nan() && values[i].is_nan())),
        };
        let first: Vec<i64> = (0..values.len()).filter(|&i| new(i)).map(|i| i as i64).collect();
        let n = first.len();
        sorted.index_select(0, &Tensor::from_vec(first, [n])?.to_device(self.device())?)
    }
}

/// Returns the row-major offsets of the non-zero elements.
#[track_caller]
fn nonzero_offsets(x: &Tensor) -> Result<Vec<usize>> {
    let values = x.detach().ne(0)?.to_vec::<u8>()?;
    Ok(values.iter().enumerate().filter(|(_, hit)| **hit != 0).map(|(at, _)| at).collect())
}
