//! Copies of an array with some elements replaced.

use std::collections::HashSet;
use std::mem::MaybeUninit;

use super::copy::{self, assign, axes_to};
use super::fill_array;
use super::index::{DimShard, checked};
use super::rows::split;
use crate::Shape;
use crate::{Array, with_elem};
use crate::{Error, Result};

/// Returns `x` with the entries `start`, `start + step`, … along `dim` replaced by those of `source`.
pub(crate) fn slice_write(x: &Array, source: &Array, dim: usize, start: usize, step: usize) -> Result<Array> {
    let strides = Shape::from(x.dims()).strides();
    let mut steps = strides.clone();
    steps[dim] *= step;
    with_elem!(x.dtype(), T => {
        let (read, new) = (x.read::<T>()?, source.read::<T>()?);
        let old = axes_to(read.dims, read.strides, &strides);
        let written = axes_to(new.dims, new.strides, &steps);
        // SAFETY: the first copy writes every element.
        unsafe {
            fill_array::<T>(x.dims(), |out| {
                assign(&old, read.data(), out);
                let from = (start * strides[dim]).min(out.len());
                assign(&written, new.data(), &mut out[from..]);
            })
        }
    })
}

/// Returns `x` with the entries at the indices `ids` along `dim` replaced by those of `source`, in order. Skips indices
/// that belong to another shard. Returns an error if an index appears twice.
pub(crate) fn index_write(
    x: &Array,
    ids: &Array,
    source: &Array,
    dim: usize,
    part: DimShard,
) -> Result<Array> {
    const OP: &str = "index_copy";
    let ids = checked(OP, ids, dim, part.whole, None)?;
    let read = ids.read::<i64>()?;
    let ids = &read.data()[..ids.numel()];
    let mut seen = HashSet::with_capacity(ids.len());
    if let Some(twice) = ids.iter().find(|&&id| !seen.insert(id)) {
        let message = format!("index {twice} appears more than once; every index must be unique");
        return Err(Error::argument(OP, message));
    }
    let (outer, size, inner) = split(x.dims(), dim);
    let (x, source) = (x.contiguous()?, source.contiguous()?);
    with_elem!(x.dtype(), T => {
        let (old, new) = (x.read::<T>()?, source.read::<T>()?);
        let (old, new) = (&old.data()[..x.numel()], &new.data()[..source.numel()]);
        let fill = |out: &mut [MaybeUninit<T>]| {
            copy::write_run(old, out);
            for o in 0..outer {
                for (i, &id) in ids.iter().enumerate() {
                    if let Some(at) = part.local_index::<true>(id, size) {
                        let block = &new[(o * ids.len() + i) * inner..][..inner];
                        copy::write_run(block, &mut out[(o * size + at) * inner..][..inner]);
                    }
                }
            }
        };
        // SAFETY: the first copy writes every element.
        unsafe { fill_array::<T>(x.dims(), fill) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::host::testing::{ids, small, strided, values};

    #[test]
    fn slice_write_replaces_only_the_slice() {
        for dtype in DType::ALL {
            for dim in 0..3 {
                for (start, len, step) in [(0, 5, 1), (1, 2, 2), (4, 1, 3), (2, 0, 1)] {
                    let x = small(dtype, &[5, 5, 5]);
                    let mut shape = [5, 5, 5];
                    shape[dim] = len;
                    let source = small(dtype, &shape);
                    let inner = [25, 5, 1][dim];
                    let (old, new) = (values(&x), values(&source));
                    let want: Vec<f64> = (0..125)
                        .map(|i| {
                            let at = i / inner % 5;
                            let hit = at >= start && (at - start) % step == 0 && (at - start) / step < len;
                            let outer = i / (inner * 5);
                            if hit {
                                new[(outer * len + (at - start) / step) * inner + i % inner]
                            } else {
                                old[i]
                            }
                        })
                        .collect();
                    for (x, source) in [(&x, &source), (&strided(&x), &strided(&source))] {
                        assert_eq!(values(&slice_write(x, source, dim, start, step).unwrap()), want);
                    }
                }
            }
        }
        let none = small(DType::F32, &[0, 3]);
        assert_eq!(slice_write(&none, &none, 0, 0, 1).unwrap().dims(), [0, 3]);
    }

    #[test]
    fn index_write_replaces_entries_in_order() {
        let x = small(DType::F32, &[2, 4]);
        let source = Array::from_vec(vec![10f32, 11., 20., 21.], &[2, 2]).unwrap();
        let old = values(&x);
        let got = values(&index_write(&x, &ids(&[3, 0], &[2]), &source, 1, DimShard::whole(4)).unwrap());
        assert_eq!(got, [11.0, old[1], old[2], 10.0, 21.0, old[5], old[6], 20.0]);
        // In a shard that holds indices 2..6 of 9.
        let part = DimShard { start: 2, whole: 9 };
        let got = values(&index_write(&x, &ids(&[8, 3], &[2]), &source, 1, part).unwrap());
        assert_eq!(got, [old[0], 11.0, old[2], old[3], old[4], 21.0, old[6], old[7]]);
        let error = |list: &[i64]| {
            let result = index_write(&x, &ids(list, &[2]), &source, 1, DimShard::whole(4));
            result.unwrap_err().to_string()
        };
        assert!(error(&[1, 1]).contains("more than once") && error(&[0, 4]).contains('4'));
    }
}
