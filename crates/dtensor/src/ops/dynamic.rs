//! What is somewhere, by its value: the shape of the result is known only once the values are.

use crate::{Error, Result, Tensor};
use dtensor_array::{DType, Shape};

impl Tensor {
    /// A distributed tensor has no result whose shape depends on values: ranks could not tell what the others have.
    fn known_here(&self, op: &'static str) -> Result<()> {
        match self.layout() {
            None => Ok(()),
            Some(layout) => Err(Error::argument(
                op,
                format!(
                    "the shape of the result depends on the data, which is not supported for distributed tensors ({layout}): \
                     use `full_tensor`, or `to_local` for this rank's part, first"
                ),
            )),
        }
    }

    /// The indices of all elements that are not 0, in row-by-row order: `[how many, number of dims]`, `i64`. NaN is not 0.
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
        self.known_here("nonzero")?;
        let rank = self.rank();
        let strides = self.shape().strides();
        let mut indices: Vec<i64> = Vec::new();
        let mut count = 0;
        for at in places(self)? {
            count += 1;
            indices.extend((0..rank).map(|d| (at / strides[d] % self.dims()[d]) as i64));
        }
        Tensor::from_vec(indices, [count, rank])
    }

    /// The elements at which the mask (`u8`, broadcast) is not 0, in row-by-row order.
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
        self.known_here(OP)?;
        mask.known_here(OP)?;
        super::need_dtype(OP, "the mask", &mask.meta(), DType::U8)?;
        let shape: Shape = self.shape().broadcast(OP, &mask.shape())?;
        let indices: Vec<i64> = places(&mask.expand(&shape)?)?.into_iter().map(|at| at as i64).collect();
        let n = indices.len();
        self.expand(&shape)?.flatten_all()?.index_select(0, &Tensor::from_vec(indices, [n])?)
    }

    /// The different elements, in ascending order; NaN comes last, once.
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
        self.known_here("unique")?;
        let sorted = self.detach().flatten_all()?.sort(0, false)?.0;
        let values = sorted.to_f64_vec()?;
        let wide = if sorted.dtype() == DType::I64 { sorted.to_vec::<i64>()? } else { Vec::new() };
        let new = |i: usize| match wide.get(i) {
            // Large integers may be one double.
            Some(value) => i == 0 || wide[i - 1] != *value,
            None => i == 0 || (values[i - 1] != values[i] && !(values[i - 1].is_nan() && values[i].is_nan())),
        };
        let first: Vec<i64> = (0..values.len()).filter(|&i| new(i)).map(|i| i as i64).collect();
        let n = first.len();
        sorted.index_select(0, &Tensor::from_vec(first, [n])?)
    }
}

/// Where the elements are that are not 0, in row-by-row order.
#[track_caller]
fn places(x: &Tensor) -> Result<Vec<usize>> {
    let values = x.detach().ne(0)?.to_vec::<u8>()?;
    Ok(values.iter().enumerate().filter(|(_, hit)| **hit != 0).map(|(at, _)| at).collect())
}
