//! Copying elements of a tensor into Rust values.

use std::panic::Location;

use dtensor_array::Element;
use dtensor_array::origin::{caller_line, with_caller_line};

use super::Tensor;
use crate::{Error, Result};

impl Tensor {
    /// Copies the elements into a vector, in row-major order. `T` must be the Rust type of the tensor's dtype.
    /// Returns an error for distributed and meta tensors.
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
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype("to_vec", <T as Element>::DTYPE)?;
        let local = self.local("to_vec")?;
        with_caller_line(caller_line(Location::caller()), || local.copy_to_host())
    }

    /// Copies a matrix into one vector per row. Returns an error if the tensor does not have 2 dims.
    #[track_caller]
    pub fn to_vec2<T: Element>(&self) -> Result<Vec<Vec<T>>> {
        let &[rows, columns] = self.dims() else {
            return Err(Error::argument("to_vec2", format!("expected 2 dims, got shape {}", self.shape())));
        };
        let flat = self.to_vec::<T>()?;
        Ok((0..rows).map(|i| flat[i * columns..(i + 1) * columns].to_vec()).collect())
    }

    /// Copies the elements into a vector of `f64`, in row-major order, whatever the dtype.
    #[track_caller]
    pub fn to_f64_vec(&self) -> Result<Vec<f64>> {
        let local = self.local("to_f64_vec")?;
        with_caller_line(caller_line(Location::caller()), || local.copy_to_host_f64())
    }

    /// Returns the only element. `T` must be the Rust type of the tensor's dtype. A distributed tensor is gathered
    /// or reduced first. Returns an error if the tensor does not have exactly one element.
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
        Ok(self.to_local_scalar("item")?.to_vec::<T>()?[0])
    }

    /// Returns the only element as `f64`, whatever the dtype. Otherwise like [`item`](Tensor::item).
    #[track_caller]
    pub fn item_f64(&self) -> Result<f64> {
        Ok(self.to_local_scalar("item_f64")?.to_f64_vec()?[0])
    }

    /// Returns this one-element tensor as a tensor that is not distributed.
    #[track_caller]
    fn to_local_scalar(&self, op: &'static str) -> Result<Tensor> {
        if self.numel() != 1 {
            let message = format!("a tensor with {} elements cannot be converted to scalar", self.numel());
            return Err(Error::argument(op, message));
        }
        match self.mesh() {
            None => Ok(self.clone()),
            Some(mesh) if mesh.coordinate().is_some() => self.detach().full_tensor(),
            Some(mesh) => Err(mesh.not_in_mesh_error(op)),
        }
    }
}
