//! Values as flat blocks, one for each rank: what transports that move contiguous memory send and receive.

use dtensor_array::kernels::cat::cat;
use dtensor_array::{Array, Shape};

use crate::Result;

/// Splits a value along a dim into slices of these sizes. Returns the slices, flattened and concatenated, and the number of
/// elements of each.
pub(crate) fn pack(x: &Array, dim: usize, sizes: &[usize]) -> Result<(Array, Vec<usize>)> {
    let row: usize = x.numel() / x.dims()[dim].max(1);
    let counts = sizes.iter().map(|&size| size * row).collect();
    if x.dims()[..dim].iter().all(|&size| size == 1) {
        return Ok((x.flatten()?, counts));
    }
    let mut start = 0;
    let slices: Vec<Array> = sizes
        .iter()
        .map(|&size| {
            start += size;
            x.narrow(dim, start - size, size)?.flatten()
        })
        .collect::<Result<_>>()?;
    Ok((cat(&slices.iter().collect::<Vec<_>>(), 0)?, counts))
}

/// Concatenates, along a dim, slices of these shapes that are stored flat one after the other.
pub(crate) fn unpack(all: &Array, shapes: &[Shape], dim: usize) -> Result<Array> {
    let size = shapes.iter().map(|shape| shape[dim]).sum();
    if shapes[0][..dim].iter().all(|&size| size == 1) {
        return all.reshape(&shapes[0].with_dim(dim, size));
    }
    let mut start = 0;
    let slices: Vec<Array> = shapes
        .iter()
        .map(|shape| {
            start += shape.numel();
            all.narrow(0, start - shape.numel(), shape.numel())?.reshape(shape)
        })
        .collect::<Result<_>>()?;
    cat(&slices.iter().collect::<Vec<_>>(), dim)
}

/// Returns where consecutive blocks of these sizes begin.
pub(crate) fn starts(sizes: &[usize]) -> Vec<usize> {
    let mut start = 0;
    let next = |size: &usize| {
        start += size;
        start - size
    };
    sizes.iter().map(next).collect()
}
