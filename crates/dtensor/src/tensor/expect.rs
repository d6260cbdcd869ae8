//! What is asked of a tensor before it is used.

use super::{DType, Part, Tensor};
use crate::layout::Layout;
use crate::{Error, Result};
use dtensor_array::Array;

impl Tensor {
    /// The value, of a tensor that is on this rank alone and not a meta tensor.
    pub(crate) fn local(&self, op: &'static str) -> Result<&Array> {
        self.not_distributed(op)?;
        self.part(op)
    }

    /// What this rank has of the value; an error for a meta tensor.
    pub(crate) fn part(&self, op: &'static str) -> Result<&Array> {
        match &self.value.part {
            Part::Array(local) => Ok(local),
            Part::Meta(_) => Err(Error::NoValue { op }),
        }
    }

    /// An error for a distributed tensor.
    pub(crate) fn not_distributed(&self, op: &'static str) -> Result<()> {
        match &self.value.layout {
            None => Ok(()),
            Some(layout) => Err(Error::argument(
                op,
                format!(
                    "the tensor is distributed ({layout}): take this rank's part with `to_local` or the whole with \
                     `full_tensor` first"
                ),
            )),
        }
    }

    /// That `other` could stand in this tensor's place: its shape, dtype, device and layout are the same.
    pub(crate) fn expect_like(&self, op: &'static str, why: &'static str, other: &Tensor) -> Result<()> {
        self.expect_meta(op, why, other)?;
        if other.layout() != self.layout() {
            return Err(Layout::mismatch(op, self.layout(), other.layout()));
        }
        Ok(())
    }

    /// That shape, dtype and device are those of `other`.
    pub(crate) fn expect_meta(&self, op: &'static str, why: &'static str, other: &Tensor) -> Result<()> {
        if other.dims() != self.dims() {
            return Err(Error::ShapeMismatch { op, why, left: self.shape(), right: other.shape() });
        }
        self.expect_dtype(op, other.dtype())?;
        if other.device() != self.device() {
            return Err(dtensor_array::Error::devices(op, self.device(), other.device()));
        }
        Ok(())
    }

    pub(crate) fn expect_dtype(&self, op: &'static str, dtype: DType) -> Result<()> {
        if self.dtype() == dtype {
            Ok(())
        } else {
            Err(Error::DTypeMismatch { op, left: self.dtype(), right: dtype })
        }
    }
}
