//! Element-wise kernels: builds their arguments. The loops are in `kernels/map.cuh`.

use std::array::from_fn;

use super::driver::{Address, failed};
use super::{Stream, Unit, grid_for};
use crate::host::layout::{Axes, Axis as HostAxis, push_axis};
use crate::{Array, DType, Result};

/// The number of threads of a block.
pub(super) const THREADS: u32 = 256;
const MOST_AXES: usize = 16;

/// Must match `Axis` in `map.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Axis<const N: usize> {
    size: u32,
    magic: u32,
    shift: u32,
    reserved: u32,
    strides: [i64; N],
}

/// Must match `Map` in `map.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Map<const N: usize> {
    numel: u64,
    out: Address,
    inputs: [Address; N],
    ndim: u32,
    vector: u32,
    axes: [Axis<N>; MOST_AXES],
}

/// A [`Map`] and further arguments: in C++, a struct that inherits from `Map`.
#[repr(C)]
struct With<const N: usize, P> {
    map: Map<N>,
    more: P,
}

/// Returns the numbers that replace a division by `size`.
pub(super) fn divider(size: u32) -> (u32, u32) {
    let shift = size.max(1).next_power_of_two().trailing_zeros();
    let magic = ((1u64 << 32) * ((1u64 << shift) - u64::from(size)) / u64::from(size.max(1))) + 1;
    (magic as u32, shift)
}

impl<const N: usize> Map<N> {
    /// Describes the loop over operands that broadcast to `shape`. All of them must be on this stream's GPU.
    pub(super) fn new(
        stream: &Stream,
        shape: &[usize],
        operands: [&Array; N],
        out: &Array,
    ) -> Result<Map<N>> {
        let mut merged: Axes<N> = Axes::new();
        for (dim, &size) in shape.iter().enumerate() {
            let stride = |x: &Array| match (dim + x.dims().len()).checked_sub(shape.len()) {
                Some(own) if x.dims()[own] != 1 => x.strides()[own],
                _ => 0,
            };
            push_axis(&mut merged, HostAxis { size, strides: operands.map(stride) });
        }
        if merged.is_empty() {
            merged.push(HostAxis { size: 1, strides: [0; N] });
        }
        // The result is contiguous, so an axis with more elements than 32 bits count can be split into two.
        while let Some(at) = merged.iter().position(|axis| axis.size > u32::MAX as usize) {
            let HostAxis { size, strides } = merged[at];
            let Some(inner) = (2..=1 << 20).rev().find(|n| size % n == 0) else {
                return Err(failed("launch", format!("a dim of size {size} is too large")));
            };
            merged[at] = HostAxis { size: size / inner, strides: strides.map(|stride| stride * inner) };
            merged.insert(at + 1, HostAxis { size: inner, strides });
        }
        if merged.len() > MOST_AXES {
            let message = format!(
                "shape {shape:?} has {} dims that cannot be merged; at most {MOST_AXES} work",
                merged.len()
            );
            return Err(failed("launch", message));
        }
        let mut inputs = [0; N];
        for (address, x) in inputs.iter_mut().zip(operands) {
            *address = stream.read(x)?;
        }
        let out_address = stream.read(out)?;
        let widest = operands.iter().map(|x| x.dtype().size()).max().unwrap_or(1).max(out.dtype().size());
        let vector = 16 / widest;
        let last = merged[merged.len() - 1];
        let loads_vectors = |k: usize| {
            let size = operands[k].dtype().size();
            let is_aligned = |bytes: usize| bytes.is_multiple_of(vector * size);
            let outer = &merged[..merged.len() - 1];
            match last.strides[k] {
                0 => true,
                1 => {
                    is_aligned(inputs[k] as usize)
                        && outer.iter().all(|axis| is_aligned(axis.strides[k] * size))
                }
                _ => false,
            }
        };
        let is_wide = last.size.is_multiple_of(vector)
            && (out_address as usize).is_multiple_of(vector * out.dtype().size())
            && (0..N).all(loads_vectors);
        let mut axes = [Axis { size: 1, magic: 0, shift: 0, reserved: 0, strides: [0; N] }; MOST_AXES];
        for (axis, from) in axes.iter_mut().zip(&merged) {
            let (magic, shift) = divider(from.size as u32);
            let strides = from.strides.map(|stride| stride as i64);
            *axis = Axis { size: from.size as u32, magic, shift, reserved: 0, strides };
        }
        Ok(Map {
            numel: out.numel() as u64,
            out: out_address,
            inputs,
            ndim: merged.len() as u32,
            vector: if is_wide { vector as u32 } else { 1 },
            axes,
        })
    }
}

impl Stream {
    /// Runs an element-wise kernel over operands that broadcast to `shape`, and returns its result, of dtype `out`. `more` are the
    /// kernel's further arguments.
    pub(super) fn map<const N: usize, P: Copy>(
        &'static self,
        unit: &Unit,
        dtype: DType,
        name: &str,
        (out, shape): (DType, &[usize]),
        operands: [&Array; N],
        more: P,
    ) -> Result<Array> {
        // Reading a transposed operand element by element takes longer than copying it first.
        let numel = shape.iter().product::<usize>();
        let mut copies = [const { None }; N];
        for (copy, x) in copies.iter_mut().zip(operands) {
            if x.numel() == numel && super::copy::is_transposed(x) {
                *copy = Some(super::copy::copy(x)?);
            }
        }
        let operands: [&Array; N] = from_fn(|k| copies[k].as_ref().unwrap_or(operands[k]));
        self.map_views(unit, dtype, name, (out, shape), operands, more)
    }

    /// As [`map`](Stream::map), for kernels that need the operands as they are.
    pub(super) fn map_views<const N: usize, P: Copy>(
        &'static self,
        unit: &Unit,
        dtype: DType,
        name: &str,
        (out, shape): (DType, &[usize]),
        operands: [&Array; N],
        more: P,
    ) -> Result<Array> {
        let result = self.empty(out, shape)?;
        if result.numel() > 0 {
            let map = Map::new(self, shape, operands, &result)?;
            let grid = grid_for(self.gpu, result.numel(), THREADS, map.vector as usize);
            let argument = With { map, more };
            // SAFETY: the kernel takes a `Map<N>` and what follows it, and the result has `numel` elements.
            unsafe { self.launch(unit, dtype, name, grid, THREADS, 0, &argument)? };
        }
        Ok(result)
    }
}

/// Returns the shape that operands broadcast to. They must be broadcastable.
pub(super) fn broadcast(operands: &[&Array]) -> crate::Shape {
    let first = operands[0].shape().clone();
    operands[1..].iter().fold(first, |shape, x| crate::host::nest::broadcast(&shape, x.dims()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dividers_divide() {
        for size in [1u32, 2, 3, 5, 7, 10, 64, 100, 641, 1 << 20, (1 << 31) - 1] {
            let (magic, shift) = divider(size);
            for n in [0u32, 1, 2, 3, 6, 99, 640, 641, 642, 1 << 20, 123_456_789, (1 << 31) - 1] {
                let high = ((u64::from(n) * u64::from(magic)) >> 32) as u32;
                assert_eq!((high + n) >> shift, n / size, "{n} / {size}");
            }
        }
    }
}
