//! Checks that a tensor fits before it is used.

use super::{DType, LocalTensor, Tensor};
use crate::layout::Layout;
use crate::{Error, Result};
use dtensor_array::Array;

impl Tensor {
    /// Returns the array. Returns an error for distributed and meta tensors.
    pub(crate) fn local(&self, op: &'static str) -> Result<&Array> {
        self.require_not_distributed(op)?;
        self.local_array(op)
    }

    /// Returns the local array. Returns an error for meta tensors.
    pub(crate) fn local_array(&self, op: &'static str) -> Result<&Array> {
        match &self.value.part {
            LocalTensor::Array(local) => Ok(local),
            other => other.array()?.ok_or(Error::NoValue { op }),
        }
    }

    /// Returns an error if the tensor is distributed.
    pub(crate) fn require_not_distributed(&self, op: &'static str) -> Result<()> {
        match &self.value.layout {
            None => Ok(()),
            Some(layout) => Err(Error::argument(
                op,
                format!(
                    "the tensor is distributed ({layout}): call `to_local` for this rank's shard or `full_tensor` for the full \
                     tensor first"
                ),
            )),
        }
    }

    /// Returns an error unless `other` has this tensor's shape, dtype, device and layout.
    pub(crate) fn expect_like(&self, op: &'static str, why: &'static str, other: &Tensor) -> Result<()> {
        self.expect_meta(op, why, other)?;
        if other.layout() != self.layout() {
            return Err(Layout::mismatch(op, self.layout(), other.layout()));
        }
        Ok(())
    }

    /// Returns an error unless `other` has this tensor's shape, dtype and device.
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
