//! [`Deferred`]: a local tensor that is computed at its first use.

use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use dtensor_array::{Array, Meta};

use super::LocalTensor;
use crate::Result;

type Compute = Box<dyn FnOnce() -> Result<Array> + Send>;

/// A local tensor whose shape and dtype are known, and whose elements are computed at the first use: for example the result
/// of a collective that has begun.
pub(crate) struct Deferred {
    meta: Meta,
    compute: Mutex<Option<Compute>>,
    result: OnceLock<Result<Array>>,
}

impl LocalTensor {
    /// Creates a local tensor of this shape and dtype. `compute` runs at most once, on the thread that first uses the tensor.
    pub(crate) fn deferred(
        meta: Meta,
        compute: impl FnOnce() -> Result<Array> + Send + 'static,
    ) -> LocalTensor {
        LocalTensor::Deferred(Arc::new(Deferred {
            meta,
            compute: Mutex::new(Some(Box::new(compute))),
            result: OnceLock::new(),
        }))
    }
}

impl Deferred {
    pub(crate) fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Returns the elements, which the first call computes. If that fails, every call returns the error.
    pub(crate) fn array(&self) -> Result<&Array> {
        let compute = || {
            // `get_or_init` runs this at most once.
            let compute = self.compute.lock().take().expect("a deferred value is computed once");
            compute()
        };
        self.result.get_or_init(compute).as_ref().map_err(Clone::clone)
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.result.get().is_some() { "computed" } else { "not computed yet" };
        write!(f, "Deferred({} {}, {state})", self.meta.dtype, self.meta.shape)
    }
}
