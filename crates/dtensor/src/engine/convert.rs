//! Values to and from Candle, without copying.

use candle_core as candle;

use super::Local;
use crate::{Error, Result, Tensor};

/// Shares the storage. The tensor has no gradient history here, whatever it has in Candle. What Candle then writes into
/// it in place is seen here, too: Candle's tensors are not immutable, so do not.
impl TryFrom<candle::Tensor> for Tensor {
    type Error = Error;
    fn try_from(tensor: candle::Tensor) -> Result<Self> {
        if !tensor.device().is_cpu() {
            return Err(Error::argument("from_candle", "only CPU tensors are supported"));
        }
        Ok(Tensor::of(Local::foreign(tensor.detach())?))
    }
}

/// Shares the storage; fails for a meta tensor, which has none. Do not let Candle write into it in place.
impl TryFrom<&Tensor> for candle::Tensor {
    type Error = Error;
    fn try_from(tensor: &Tensor) -> Result<Self> {
        Ok(tensor.local("to_candle")?.export())
    }
}
