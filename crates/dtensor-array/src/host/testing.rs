//! Helpers for the tests of several kernels.

use half::{bf16, f16};

use crate::Array;
use crate::window::Window;
use crate::{DType, Result};

pub(crate) const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Creates an array of `dtype` from values rounded to it.
pub(crate) fn local(dtype: DType, values: &[f64], shape: &[usize]) -> Array {
    assert_eq!(values.len(), shape.iter().product::<usize>());
    let values = values.iter().copied();
    match dtype {
        DType::U8 => Array::from_vec(values.map(|x| x as u8).collect(), shape),
        DType::I64 => Array::from_vec(values.map(|x| x as i64).collect(), shape),
        DType::F16 => Array::from_vec(values.map(f16::from_f64).collect(), shape),
        DType::BF16 => Array::from_vec(values.map(bf16::from_f64).collect(), shape),
        DType::F32 => Array::from_vec(values.map(|x| x as f32).collect(), shape),
        DType::F64 => Array::from_vec(values.collect(), shape),
    }
    .unwrap()
}

/// Creates an array of indices.
pub(crate) fn ids(values: &[i64], shape: &[usize]) -> Array {
    assert_eq!(values.len(), shape.iter().product::<usize>());
    Array::from_vec(values.to_vec(), shape).unwrap()
}

/// Returns the elements as `f64`, in row-major order.
pub(crate) fn values(x: &Array) -> Vec<f64> {
    fn get(x: &Array) -> Result<Vec<f64>> {
        Ok(match x.dtype() {
            DType::U8 => x.copy_to_host::<u8>()?.into_iter().map(f64::from).collect(),
            DType::I64 => x.copy_to_host::<i64>()?.into_iter().map(|x| x as f64).collect(),
            DType::F16 => x.copy_to_host::<f16>()?.into_iter().map(f64::from).collect(),
            DType::BF16 => x.copy_to_host::<bf16>()?.into_iter().map(f64::from).collect(),
            DType::F32 => x.copy_to_host::<f32>()?.into_iter().map(f64::from).collect(),
            DType::F64 => x.copy_to_host::<f64>()?,
        })
    }
    get(x).unwrap()
}

/// Returns the bits of the elements, in row-major order, to compare arrays of one dtype exactly.
pub(crate) fn bits(x: &Array) -> Vec<u64> {
    match x.dtype() {
        DType::I64 => x.copy_to_host::<i64>().unwrap().into_iter().map(|x| x as u64).collect(),
        _ => values(x).into_iter().map(f64::to_bits).collect(),
    }
}

/// Returns the values at the given indices.
pub(crate) fn pick<T: Copy>(values: &[T], indices: &[usize]) -> Vec<T> {
    indices.iter().map(|&i| values[i]).collect()
}

/// Returns `n` pseudo-random numbers between −2 and 2. Equal seeds give equal numbers.
pub(crate) fn noise(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0
    };
    (0..n).map(|_| next()).collect()
}

/// Returns an equal array whose memory is transposed: not contiguous if the first and last dim are larger than 1.
pub(crate) fn strided(x: &Array) -> Array {
    if x.dims().len() < 2 {
        return x.clone();
    }
    let last = x.dims().len() - 1;
    let transposed = x.transpose(0, last).unwrap().contiguous().unwrap();
    transposed.transpose(0, last).unwrap()
}

/// Returns the relative error that tests of `dtype` allow: a few units in the last place.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 1.2e-2,
    }
}

/// Asserts that two arrays are equal up to rounding. NaN equals NaN, and an infinity equals itself.
#[track_caller]
pub(crate) fn assert_close(got: &Array, want: &[f64], tolerance: f64) {
    let got = values(got);
    assert_eq!(got.len(), want.len());
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * w.abs().max(1.0);
        assert!(same, "element {i}: got {g}, want {w}");
    }
}

/// Creates an array of integers so small that sums and products of a few of them are exact in every dtype.
pub(crate) fn small(dtype: DType, shape: &[usize]) -> Array {
    let n = shape.iter().product::<usize>();
    local(dtype, &(0..n).map(|i| (i * 7 % 5) as f64).collect::<Vec<_>>(), shape)
}

/// Returns windows of arrays with up to four dims of sizes 0 to 9, complete or sharded along each dim. Beside each window are
/// the row-major indices of its elements in the full array.
pub(crate) fn windows() -> Vec<(Window, Vec<usize>)> {
    let mut noise = noise(20_000, 1).into_iter();
    let mut below = |n: usize| ((noise.next().unwrap() + 2.0) / 4.0 * n as f64) as usize;
    let mut windows = Vec::new();
    for case in 0..400 {
        let full: Vec<usize> = (0..case % 5).map(|_| below(10)).collect();
        let picked: Vec<Vec<usize>> = full
            .iter()
            .map(|&size| match below(3) {
                0 => (0..size).collect(),
                1 => (below(size + 1)..size).collect(),
                _ => (0..size).filter(|_| below(3) > 0).collect(),
            })
            .collect();
        let ranges = picked.iter().map(|picked| {
            let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
            for &i in picked {
                match ranges.last_mut() {
                    Some(last) if last.end == i => last.end += 1,
                    _ => ranges.push(i..i + 1),
                }
            }
            ranges
        });
        let window = Window::new(&full, ranges).unwrap();
        let indices = picked.iter().zip(&full).fold(vec![0], |outer, (picked, &size)| {
            outer.iter().flat_map(|above| picked.iter().map(move |i| above * size + i)).collect()
        });
        windows.push((window, indices));
    }
    windows
}
