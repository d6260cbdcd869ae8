//! Copies between layouts.

use crate::Result;
use crate::engine::Local;

/// A copy with the elements row by row.
pub(crate) fn contiguous(x: &Local) -> Result<Local> {
    Local::owned(x.candle().force_contiguous()?)
}
