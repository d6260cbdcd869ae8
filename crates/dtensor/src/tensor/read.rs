//! Values back out.

use dtensor_array::Element;

use super::Tensor;
use crate::{Error, Result};

impl Tensor {
    /// The elements row by row. `T` must be the tensor's dtype.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2])?.t()?;
    /// assert_eq!(x.to_vec::<f32>()?, [1., 3., 2., 4.]);
    /// assert!(x.to_vec::<i64>().is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype("to_vec", <T as Element>::DTYPE)?;
        self.local("to_vec")?.copy_to_host()
    }

    /// The elements of a matrix, row by row.
    pub fn to_vec2<T: Element>(&self) -> Result<Vec<Vec<T>>> {
        let &[rows, columns] = self.dims() else {
            return Err(Error::argument("to_vec2", format!("expected 2 dims, got shape {}", self.shape())));
        };
        let flat = self.to_vec::<T>()?;
        Ok((0..rows).map(|i| flat[i * columns..(i + 1) * columns].to_vec()).collect())
    }

    /// The elements row by row, as doubles, whatever the dtype.
    pub fn to_f64_vec(&self) -> Result<Vec<f64>> {
        self.local("to_f64_vec")?.copy_to_host_f64()
    }

    /// The one element. `T` must be the tensor's dtype. A distributed tensor is gathered or reduced first.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::scalar(2.5f32)?.item::<f32>()?, 2.5);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T> {
        Ok(self.only("item")?.to_vec::<T>()?[0])
    }

    /// The one element as a double, whatever the dtype.
    #[track_caller]
    pub fn item_f64(&self) -> Result<f64> {
        Ok(self.only("item_f64")?.to_f64_vec()?[0])
    }

    /// A tensor of one element, on this rank.
    #[track_caller]
    fn only(&self, op: &'static str) -> Result<Tensor> {
        if self.numel() != 1 {
            let message = format!("a tensor with {} elements cannot be converted to scalar", self.numel());
            return Err(Error::argument(op, message));
        }
        match self.mesh() {
            None => Ok(self.clone()),
            Some(mesh) if mesh.coordinate().is_some() => self.detach().full_tensor(),
            Some(mesh) => Err(mesh.outside(op)),
        }
    }
}
