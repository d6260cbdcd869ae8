//! Compares kernels on a GPU (or the emulator) with those of the host.

use crate::host::testing::values;
use crate::{Array, DType, Device, Result};

/// Returns `n` numbers between -4 and 4 of a dtype, some of them equal. Integers are small; those of `u8` are not negative.
pub(crate) fn numbers(n: usize, dtype: DType, seed: usize) -> Array {
    let data: Vec<f64> = (0..n)
        .map(|i| {
            let x = ((i * 7919 + seed * 104_729 + 13) % 1009) as f64 / 126.0 - 4.0;
            match dtype {
                DType::U8 => x.abs().trunc(),
                DType::I64 => x.trunc(),
                _ => x,
            }
        })
        .collect();
    let x = Array::from_vec(data, &[n]).unwrap();
    crate::host::cast::cast(&x, dtype).unwrap()
}

/// Runs `f` on the host and on the GPU, and compares the results: dtypes, shapes, and values within `tolerance`, relative to the
/// larger of 1 and the value. With a tolerance of 0, the bits must be equal, except those of NaN.
///
/// `f` gets the inputs on the device that it shall run on, and may make views of them.
#[track_caller]
pub(crate) fn compare(inputs: &[Array], tolerance: f64, f: impl Fn(&[Array]) -> Result<Vec<Array>>) {
    let want = f(inputs).unwrap();
    let moved: Vec<Array> = inputs.iter().map(|x| x.to_device(Device::Cuda(0)).unwrap()).collect();
    let got = f(&moved).unwrap();
    assert_eq!(want.len(), got.len());
    for (i, (want, got)) in want.iter().zip(&got).enumerate() {
        assert_eq!((want.dtype(), want.dims()), (got.dtype(), got.dims()), "result {i}");
        assert_eq!(got.device(), Device::Cuda(0), "result {i}");
        let got = got.to_device(Device::Cpu).unwrap();
        for (at, (want, got)) in values(want).into_iter().zip(values(&got)).enumerate() {
            let is_equal = match tolerance {
                0.0 => want.to_bits() == got.to_bits() || (want.is_nan() && got.is_nan()),
                _ => {
                    want == got
                        || (want.is_nan() && got.is_nan())
                        || (want - got).abs() <= tolerance * want.abs().max(1.0)
                }
            };
            assert!(is_equal, "element {at} of result {i}: host {want}, GPU {got}");
        }
    }
}

/// Returns a tolerance for results of a few rounded operations.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        DType::F32 => 1e-6,
        DType::F64 => 1e-13,
        _ => 0.0,
    }
}

/// Asserts that `f` returns the same error on both devices. An error that the kernel finds appears when the result is read.
#[track_caller]
pub(crate) fn same_error(inputs: &[Array], f: impl Fn(&[Array]) -> Result<Array>) {
    let want = f(inputs).unwrap_err();
    let moved: Vec<Array> = inputs.iter().map(|x| x.to_device(Device::Cuda(0)).unwrap()).collect();
    let got = f(&moved).and_then(|x| x.to_device(Device::Cpu)).unwrap_err();
    assert_eq!(got.root(), &want);
}
