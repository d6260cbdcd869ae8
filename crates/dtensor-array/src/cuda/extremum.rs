//! The largest or smallest element along a dim, with its index.

use super::driver::Address;
use super::fold::{fold, folded_shape, kernels};
use super::kernel::{ALL, file, units};
use super::map::THREADS;
use super::{grid_for, stream_of};
use crate::host::extremum::Extremum;
use crate::{Array, DType, Result};

units! {
    static EXTREMUM: "extremum", [file!("fold.cuh"), file!("extremum.cuh")], ALL;
}

pub(crate) fn extremum(f: Extremum, x: &Array, dim: usize, keepdim: bool) -> Result<(Array, Array)> {
    let stream = stream_of(x)?;
    let shape = folded_shape(x, &[dim], keepdim);
    let (values, indices) = (stream.empty(x.dtype(), &shape)?, stream.empty(DType::I64, &shape)?);
    let kernels = match f {
        Extremum::Max => kernels!("max"),
        Extremum::Min => kernels!("min"),
    };
    fold(stream, &EXTREMUM, &kernels, x, &[dim], &values, Some(&indices), [0.0; 2])?;
    Ok((values, indices))
}

/// Must match `Merge` in `kernels/extremum.cuh`.
#[repr(C)]
struct Merge {
    values: Address,
    indices: Address,
    out: Address,
    out_indices: Address,
    n: u64,
    parts: u64,
}

pub(crate) fn merge(f: Extremum, values: &Array, indices: &Array) -> Result<(Array, Array)> {
    let stream = stream_of(values)?;
    let (dtype, shape) = (values.dtype(), &values.dims()[1..]);
    let (out, out_indices) = (stream.empty(dtype, shape)?, stream.empty(DType::I64, shape)?);
    let n = out.numel();
    if n > 0 {
        let (dense, dense_indices) = (values.contiguous()?, indices.contiguous()?);
        let args = Merge {
            values: stream.read(&dense)?,
            indices: stream.read(&dense_indices)?,
            out: stream.read(&out)?,
            out_indices: stream.read(&out_indices)?,
            n: n as u64,
            parts: values.dims()[0] as u64,
        };
        let name = match f {
            Extremum::Max => "merge_max",
            Extremum::Min => "merge_min",
        };
        let grid = grid_for(stream.gpu, n, THREADS, 1);
        // SAFETY: the inputs hold `parts · n` elements, and the results `n`.
        unsafe { stream.launch(&EXTREMUM, dtype, name, grid, THREADS, 0, &args)? };
    }
    Ok((out, out_indices))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::super::testing::compare;
    use super::*;
    use crate::host::testing::{ids, local};
    use crate::kernels::extremum as kernels;

    /// Creates an array with many ties, in no particular order.
    fn ties(dtype: DType, shape: &[usize]) -> Array {
        let n: usize = shape.iter().product();
        local(dtype, &(0..n).map(|i| (i * 31 % 17) as f64).collect::<Vec<_>>(), shape)
    }

    fn check(x: &Array, view: impl Fn(&Array) -> Result<Array>) {
        for f in [Extremum::Max, Extremum::Min] {
            compare(from_ref(x), 0.0, |x| {
                let x = view(&x[0])?;
                let mut results = vec![];
                for dim in 0..x.dims().len().max(1) {
                    for keepdim in [false, true] {
                        let (value, index) = kernels::extremum(f, &x, dim, keepdim)?;
                        results.extend([value, index]);
                    }
                }
                Ok(results)
            });
        }
    }

    #[test]
    fn the_first_of_equal_elements_is_found() {
        for dtype in DType::ALL {
            for shape in [[1, 1, 1], [2, 3, 5], [4, 70, 2], [1, 2, 64], [3, 1, 200], [130, 2, 3], [2, 0, 3]] {
                let x = ties(dtype, &shape);
                check(&x, |x| Ok(x.clone()));
                check(&x, |x| x.permute(&[2, 0, 1]));
                check(&x, |x| x.narrow(2, shape[2] / 2, 1));
            }
            check(&ties(dtype, &[3, 1]), |x| x.expand(&[3, 40]));
            check(&ties(dtype, &[]), |x| Ok(x.clone()));
        }
        for dtype in [DType::F32, DType::U8] {
            check(&ties(dtype, &[2, 20_000]), |x| Ok(x.clone()));
            check(&ties(dtype, &[5000, 33]), |x| Ok(x.clone()));
        }
    }

    #[test]
    fn nan_wins_and_infinities_are_numbers() {
        for n in [1, 3, 64, 3000] {
            for at in [0, n / 3, n / 2, n - 1] {
                let mut data = vec![1.0f32; 2 * n];
                data[at] = f32::NAN;
                data[n - 1] = f32::NAN;
                let x = Array::from_vec(data, &[2, n]).unwrap();
                check(&x, |x| Ok(x.clone()));
                check(&x, |x| x.reshape(&[n, 2]));
            }
            let zeros = (0..n).map(|i| if i % 3 == 0 { -0.0 } else { 0.0 }).collect();
            for data in [vec![f32::NEG_INFINITY; n], vec![f32::INFINITY; n], zeros] {
                check(&Array::from_vec(data, &[n]).unwrap(), |x| Ok(x.clone()));
            }
            check(&Array::from_vec(vec![i64::MIN; n], &[n]).unwrap(), |x| Ok(x.clone()));
        }
    }

    #[test]
    fn shards_are_merged() {
        for dtype in DType::ALL {
            let (values, mut at) = (ties(dtype, &[4, 3, 30]), vec![]);
            // Some shards are empty, and their indices are in no order.
            at.extend((0..360i64).map(|i| if i % 5 == 2 && i > 90 { -1 } else { i * 7919 % 1009 }));
            for f in [Extremum::Max, Extremum::Min] {
                compare(&[values.clone(), ids(&at, &[4, 3, 30])], 0.0, |x| {
                    let (a, b) = kernels::merge(f, &x[0], &x[1])?;
                    let turned = x.iter().map(|x| x.transpose(1, 2)).collect::<Result<Vec<_>>>()?;
                    let (c, d) = kernels::merge(f, &turned[0], &turned[1])?;
                    let (e, g) = kernels::merge(f, &x[0].narrow(2, 0, 0)?, &x[1].narrow(2, 0, 0)?)?;
                    Ok(vec![a, b, c, d, e, g])
                });
            }
        }
        let nan = Array::from_vec(vec![1.0f32, f32::NAN, f32::NAN, 2.0], &[4, 1]).unwrap();
        compare(&[nan, ids(&[5, 9, 2, 0], &[4, 1])], 0.0, |x| {
            let (a, b) = kernels::merge(Extremum::Max, &x[0], &x[1])?;
            Ok(vec![a, b])
        });
    }
}
