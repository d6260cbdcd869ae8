//! Conversions from and to Candle's tensors. They copy the values.

use candle_core as candle;
use half::{bf16, f16};

use crate::{DType, Element, Error, Result, Tensor};

fn failed(error: candle::Error) -> Error {
    Error::argument("candle", error.to_string())
}

/// Copies a CPU tensor of Candle. The result is not connected to Candle's graph. Returns an error for other devices and for dtypes
/// that `dtensor` does not have.
///
/// ```
/// use dtensor::Tensor;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let theirs = candle_core::Tensor::arange(0f32, 6.0, &candle_core::Device::Cpu)?.reshape((2, 3))?;
/// let ours = Tensor::try_from(&theirs.t()?)?;
/// assert_eq!(ours.to_vec2::<f32>()?, [[0., 3.], [1., 4.], [2., 5.]]);
/// let back = candle_core::Tensor::try_from(&ours)?;
/// assert_eq!(back.to_vec2::<f32>()?, ours.to_vec2::<f32>()?);
/// # Ok(())
/// # }
/// ```
impl TryFrom<&candle::Tensor> for Tensor {
    type Error = Error;
    fn try_from(tensor: &candle::Tensor) -> Result<Self> {
        if !tensor.device().is_cpu() {
            return Err(Error::argument(
                "from_candle",
                "only CPU tensors can be converted: move the tensor with `to_device` first",
            ));
        }
        fn copy<T: Element + candle::WithDType>(tensor: &candle::Tensor) -> Result<Tensor> {
            let flat = tensor.flatten_all().and_then(|flat| flat.to_vec1::<T>()).map_err(failed)?;
            Tensor::from_vec(flat, tensor.dims())
        }
        match tensor.dtype() {
            candle::DType::U8 => copy::<u8>(tensor),
            candle::DType::I64 => copy::<i64>(tensor),
            candle::DType::F16 => copy::<f16>(tensor),
            candle::DType::BF16 => copy::<bf16>(tensor),
            candle::DType::F32 => copy::<f32>(tensor),
            candle::DType::F64 => copy::<f64>(tensor),
            other => Err(Error::argument("from_candle", format!("dtype {other:?} is not supported"))),
        }
    }
}

impl TryFrom<candle::Tensor> for Tensor {
    type Error = Error;
    fn try_from(tensor: candle::Tensor) -> Result<Self> {
        Tensor::try_from(&tensor)
    }
}

/// Copies a tensor to a CPU tensor of Candle. Returns an error for a meta tensor and for a distributed one.
impl TryFrom<&Tensor> for candle::Tensor {
    type Error = Error;
    fn try_from(tensor: &Tensor) -> Result<Self> {
        fn copy<T: Element + candle::WithDType>(tensor: &Tensor) -> Result<candle::Tensor> {
            candle::Tensor::from_vec(tensor.to_vec::<T>()?, tensor.dims(), &candle::Device::Cpu)
                .map_err(failed)
        }
        match tensor.dtype() {
            DType::U8 => copy::<u8>(tensor),
            DType::I64 => copy::<i64>(tensor),
            DType::F16 => copy::<f16>(tensor),
            DType::BF16 => copy::<bf16>(tensor),
            DType::F32 => copy::<f32>(tensor),
            DType::F64 => copy::<f64>(tensor),
            other => Err(Error::argument("to_candle", format!("dtype {other} is not supported"))),
        }
    }
}
