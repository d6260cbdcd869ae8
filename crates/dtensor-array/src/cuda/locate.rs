//! Converts indices in a shard to indices in the full array.

use super::driver::failed;
use super::kernel::{file, units};
use super::stream_of;
use crate::{Array, DType, Result};

units! {
    static LOCATE: "locate", [file!("map.cuh"), file!("locate.cuh")], &[DType::I64];
}

const DIMS: usize = 16;

/// Must match `Locate` in `kernels/locate.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Locate {
    sizes: [u64; DIMS],
    strides: [u64; DIMS],
    first: u64,
    ndim: u64,
}

pub(crate) fn locate(indices: &Array, sizes: &[usize], strides: &[usize], first: usize) -> Result<Array> {
    // Dims without an extent say nothing about an index.
    let dims: Vec<(u64, u64)> = (sizes.iter().zip(strides))
        .filter(|&(&size, _)| size > 1)
        .map(|(&size, &stride)| (size as u64, stride as u64))
        .collect();
    if dims.len() > DIMS {
        return Err(failed("locate", format!("shape {sizes:?} has more than {DIMS} dims")));
    }
    let mut more =
        Locate { sizes: [1; DIMS], strides: [0; DIMS], first: first as u64, ndim: dims.len() as u64 };
    for (dim, &(size, stride)) in dims.iter().enumerate() {
        (more.sizes[dim], more.strides[dim]) = (size, stride);
    }
    let stream = stream_of(indices)?;
    stream.map(&LOCATE, DType::I64, "locate", (DType::I64, indices.dims()), [indices], more)
}

#[cfg(test)]
mod tests {
    use super::super::testing::compare;
    use crate::Array;
    use crate::kernels::locate::locate;

    #[test]
    fn indices_are_located_as_on_the_host() {
        let indices = Array::from_vec((-1..23).collect::<Vec<i64>>(), &[4, 6]).unwrap();
        for (sizes, strides, first) in
            [(&[24][..], &[1][..], 100), (&[2, 1, 3, 4], &[70, 50, 10, 2], 7), (&[], &[], 3), (&[0], &[1], 0)]
        {
            compare(std::slice::from_ref(&indices), 0.0, |x| {
                Ok(vec![
                    locate(&x[0], sizes, strides, first)?,
                    locate(&x[0].transpose(0, 1)?, sizes, strides, first)?,
                ])
            });
        }
    }
}
