//! Variance and standard deviation over any set of dims, of an array or merged from shards.

use super::driver::Address;
use super::fold::{Kernels, count, fold, folded_shape, kernels};
use super::kernel::{FLOATS, file, units};
use super::map::THREADS;
use super::reduce::check_float;
use super::{grid_for, stream_of};
use crate::{Array, DType, Result};

units! {
    static MOMENTS: "moments", [file!("fold.cuh"), file!("moments.cuh")], FLOATS;
}

pub(crate) fn variance(x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array> {
    variance_with(&kernels!("variance"), x, dims, keepdim, correction)
}

pub(crate) fn deviation(x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array> {
    variance_with(&kernels!("deviation"), x, dims, keepdim, correction)
}

fn variance_with(
    kernels: &Kernels,
    x: &Array,
    dims: &[usize],
    keepdim: bool,
    correction: f64,
) -> Result<Array> {
    check_float("var", x.dtype())?;
    let stream = stream_of(x)?;
    let divisor = (count(x, dims) as f64 - correction).max(0.0);
    let out = stream.empty(x.dtype(), &folded_shape(x, dims, keepdim))?;
    fold(stream, &MOMENTS, kernels, x, dims, &out, None, [divisor, 0.0])?;
    Ok(out)
}

pub(crate) fn moments_part(x: &Array, dims: &[usize], keepdim: bool) -> Result<Array> {
    check_float("var", x.dtype())?;
    let stream = stream_of(x)?;
    let output = folded_shape(x, dims, keepdim);
    let out = stream.empty(DType::F64, &output.with_inserted(0, 3))?;
    // The kernel writes to all three entries of the first dim.
    let first = out.narrow(0, 0, 1)?;
    fold(stream, &MOMENTS, &kernels!("moments"), x, dims, &first, None, [output.numel() as f64, 0.0])?;
    Ok(out)
}

/// Must match `Merge` in `kernels/moments.cuh`.
#[repr(C)]
struct Merge {
    parts: Address,
    out: Address,
    n: u64,
    count: u64,
    correction: f64,
    is_root: u64,
}

pub(crate) fn merge_moments(parts: &Array, correction: f64, root: bool, dtype: DType) -> Result<Array> {
    check_float("var", dtype)?;
    let parts = match parts.dtype() {
        DType::F64 => parts.contiguous()?,
        _ => super::cast::cast(parts, DType::F64)?.contiguous()?,
    };
    let stream = stream_of(&parts)?;
    let out = stream.empty(dtype, &parts.dims()[2..])?;
    let n = out.numel();
    if n > 0 {
        let args = Merge {
            parts: stream.read(&parts)?,
            out: stream.read(&out)?,
            n: n as u64,
            count: parts.dims()[0] as u64,
            correction,
            is_root: root.into(),
        };
        let grid = grid_for(stream.gpu, n, THREADS, 1);
        // SAFETY: the parts hold `count · 3 · n` numbers, and the result `n`.
        unsafe { stream.launch(&MOMENTS, dtype, "merge", grid, THREADS, 0, &args)? };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::super::testing::{compare, numbers, rounding, same_error};
    use super::*;
    use crate::host::testing::{local, values};
    use crate::kernels::moments as kernels;

    fn check(x: &Array, dims: &[usize], tolerance: f64, view: impl Fn(&Array) -> Result<Array>) {
        compare(from_ref(x), tolerance, |x| {
            let x = view(&x[0])?;
            let mut results = vec![];
            for (correction, keepdim) in [(0.0, false), (1.0, true), (1e9, false)] {
                results.push(kernels::variance(&x, dims, keepdim, correction)?);
                results.push(kernels::deviation(&x, dims, keepdim, correction)?);
            }
            results.push(kernels::moments_part(&x, dims, true)?);
            results.push(kernels::moments_part(&x, dims, false)?);
            Ok(results)
        });
    }

    #[test]
    fn any_dims_of_any_layout() {
        for &dtype in FLOATS {
            // The host takes differences from the mean in the accumulation dtype.
            let tolerance = 4.0 * rounding(dtype).max(1e-12);
            for shape in [[1, 1, 1], [2, 3, 8], [7, 1, 13], [130, 2, 64], [1, 3, 2000], [0, 2, 3], [2, 0, 3]]
            {
                let x = numbers(shape.iter().product(), dtype, 1).reshape(&shape).unwrap();
                for dims in [&[0][..], &[1], &[2], &[0, 2], &[0, 1, 2], &[]] {
                    check(&x, dims, tolerance, |x| Ok(x.clone()));
                    check(&x, dims, tolerance, |x| x.permute(&[2, 0, 1]));
                }
            }
        }
        let x = numbers(40_000, DType::F32, 1);
        check(&x, &[0], 4e-6, |x| Ok(x.clone()));
        check(&x, &[0], 4e-6, |x| x.reshape(&[10_000, 4]));
        check(&x, &[1], 4e-6, |x| x.reshape(&[4, 10_000]));
    }

    #[test]
    fn a_large_mean_costs_no_accuracy() {
        for base in [1e4, -1e6] {
            let data: Vec<f64> = values(&numbers(400 * 64, DType::F32, 1)).iter().map(|x| x + base).collect();
            for dims in [&[0][..], &[1], &[0, 1]] {
                check(&local(DType::F32, &data, &[400, 64]), dims, 1e-5, |x| Ok(x.clone()));
            }
        }
        let same = Array::from_vec(vec![0.1f32; 1000], &[1000]).unwrap().to_device(crate::Device::Cuda(0));
        assert!(values(&variance(&same.unwrap(), &[0], false, 1.0).unwrap())[0] < 1e-15);
    }

    #[test]
    fn shards_are_merged() {
        for &dtype in FLOATS {
            let x = numbers(20 * 15, dtype, 3);
            for (correction, root) in [(0.0, false), (1.0, true), (19.5, false), (-1.0, true), (100.0, false)]
            {
                compare(from_ref(&x), 4.0 * rounding(dtype).max(1e-12), |x| {
                    let x = x[0].reshape(&[20, 3, 5])?;
                    let parts = [(0, 7), (7, 0), (7, 13)]
                        .map(|(start, len)| kernels::moments_part(&x.narrow(0, start, len)?, &[0], false));
                    let mut merged = vec![];
                    for part in parts {
                        let part = part?;
                        let one = part.unsqueeze(0)?;
                        merged.push(kernels::merge_moments(&one, correction, root, dtype)?);
                        merged.push(part);
                    }
                    Ok(merged)
                });
            }
        }
        // Three shards of two outputs.
        let parts =
            [3.0, 2.0, 1.5, -1.0, 2.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 9.0, 7.0, 0.5, 0.0];
        for root in [false, true] {
            compare(&[local(DType::F64, &parts, &[3, 3, 2])], 1e-13, |x| {
                Ok(vec![
                    kernels::merge_moments(&x[0], 1.0, root, DType::F64)?,
                    kernels::merge_moments(&x[0].narrow(2, 0, 0)?, 1.0, root, DType::F32)?,
                ])
            });
        }
    }

    #[test]
    fn nan_stays_and_integers_are_errors() {
        for odd in [f32::NAN, f32::INFINITY] {
            let x = Array::from_vec(vec![1.0, odd, 2.0, 4.0, 5.0], &[5]).unwrap();
            compare(&[x], 1e-6, |x| {
                Ok(vec![
                    kernels::variance(&x[0], &[0], false, 1.0)?,
                    kernels::variance(&x[0].narrow(0, 1, 1)?, &[0], false, 0.0)?,
                ])
            });
        }
        same_error(&[numbers(3, DType::I64, 1)], |x| kernels::variance(&x[0], &[0], false, 1.0));
        same_error(&[numbers(3, DType::I64, 1)], |x| kernels::moments_part(&x[0], &[0], false));
    }
}
