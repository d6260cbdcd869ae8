//! Element-wise kernels: builds their arguments. The loops are in `kernels/map.cuh`.

use std::array::from_fn;

use super::driver::{Address, failed};
use super::{Stream, Unit, fuse, grid_for};
use crate::host::layout::{Axes, Axis as HostAxis, push_axis};
use crate::{Array, DType, Result, Shape};

/// The number of threads of a block.
pub(super) const THREADS: u32 = 256;
pub(super) const MOST_AXES: usize = 16;

/// Must match `Axis` in `map.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Axis<const N: usize> {
    size: u32,
    magic: u32,
    shift: u32,
    reserved: u32,
    strides: [i64; N],
}

impl<const N: usize> Axis<N> {
    /// An axis of one element.
    pub(super) const ONE: Self = Axis { size: 1, magic: 0, shift: 0, reserved: 0, strides: [0; N] };

    pub(super) fn new(from: &HostAxis<N>) -> Self {
        let (magic, shift) = divider(from.size as u32);
        let strides = from.strides.map(|stride| stride as i64);
        Axis { size: from.size as u32, magic, shift, reserved: 0, strides }
    }

    /// Returns the axis of the first `operands`, as words of an argument.
    pub(super) fn words(&self, operands: usize) -> impl Iterator<Item = u64> {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let strides = self.strides.map(|stride| stride as u64).into_iter().take(operands);
        [pair(self.size, self.magic), pair(self.shift, self.reserved)].into_iter().chain(strides)
    }
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

/// An element-wise function: a kernel that takes a `Pointwise` argument (`kernels/pointwise.cuh`), so that it can be fused.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) unit: &'static Unit,
    /// The dtype that the unit is compiled for.
    pub(super) dtype: DType,
    pub(super) name: &'static str,
}

impl Function {
    /// Returns true if it also takes a random word for each element.
    pub(super) fn is_random(&self) -> bool {
        self.name == DROPOUT
    }
}

/// The name of the only function that takes random words.
pub(super) const DROPOUT: &str = "dropout";

/// The numbers that an element-wise function takes besides elements.
pub(super) type Numbers = [u64; NUMBERS];
pub(super) const NUMBERS: usize = 5;
/// The numbers of a function that takes none.
pub(super) const NONE: Numbers = [0; NUMBERS];

/// Returns the numbers that replace a division by `size`.
pub(super) fn divider(size: u32) -> (u32, u32) {
    let shift = size.max(1).next_power_of_two().trailing_zeros();
    let magic = ((1u64 << 32) * ((1u64 << shift) - u64::from(size)) / u64::from(size.max(1))) + 1;
    (magic as u32, shift)
}

/// Splits axes with more elements than 32 bits count: the result is contiguous, so any axis can be split into two. Returns an error
/// if there are too many axes.
pub(super) fn split_axes<const N: usize>(merged: &mut Axes<N>, shape: &[usize]) -> Result<()> {
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
    Ok(())
}

/// Returns true if rows, along the last axis, consist of whole vectors.
pub(super) fn last_is_multiple_of<const N: usize>(axes: &[HostAxis<N>], vector: usize) -> bool {
    axes[axes.len() - 1].size.is_multiple_of(vector)
}

/// Returns true if operand `k`, with elements of `size` bytes, is the same along the last axis, or can be loaded in aligned vectors.
pub(super) fn loads_vectors<const N: usize>(
    axes: &[HostAxis<N>],
    k: usize,
    address: Address,
    size: usize,
    vector: usize,
) -> bool {
    let is_aligned = |bytes: usize| bytes.is_multiple_of(vector * size);
    let (last, outer) = axes.split_last().expect("there is at least one axis");
    match last.strides[k] {
        0 => true,
        1 => is_aligned(address as usize) && outer.iter().all(|axis| is_aligned(axis.strides[k] * size)),
        _ => false,
    }
}

impl<const N: usize> Map<N> {
    /// Describes the loop over operands that broadcast to `shape`. All of them must be on this stream's GPU.
    pub(super) fn new(
        stream: &Stream,
        shape: &[usize],
        operands: [&Array; N],
        (out, out_dtype): (Address, DType),
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
        split_axes(&mut merged, shape)?;
        let mut inputs = [0; N];
        for (address, x) in inputs.iter_mut().zip(operands) {
            *address = stream.read(x)?;
        }
        let widest = operands.iter().map(|x| x.dtype().size()).max().unwrap_or(1).max(out_dtype.size());
        let vector = 16 / widest;
        let is_wide = last_is_multiple_of(&merged, vector)
            && (out as usize).is_multiple_of(vector * out_dtype.size())
            && (0..N).all(|k| loads_vectors(&merged, k, inputs[k], operands[k].dtype().size(), vector));
        let mut axes = [Axis::ONE; MOST_AXES];
        for (axis, from) in axes.iter_mut().zip(&merged) {
            *axis = Axis::new(from);
        }
        Ok(Map {
            numel: shape.iter().product::<usize>() as u64,
            out,
            inputs,
            ndim: merged.len() as u32,
            vector: if is_wide { vector as u32 } else { 1 },
            axes,
        })
    }
}

/// Copies the operands that are transposed: reading them element by element takes longer.
fn copy_transposed<const N: usize>(shape: &[usize], operands: [&Array; N]) -> Result<[Option<Array>; N]> {
    let numel = shape.iter().product::<usize>();
    let mut copies = [const { None }; N];
    for (copy, x) in copies.iter_mut().zip(operands) {
        if x.numel() == numel && super::copy::is_transposed(x) {
            *copy = Some(super::copy::copy(x)?);
        }
    }
    Ok(copies)
}

impl Stream {
    /// Computes an element-wise function of operands that broadcast to `shape`. The result has dtype `out`.
    ///
    /// The kernel may run later, together with others: see [`fuse`].
    #[inline]
    pub(super) fn pointwise<const N: usize>(
        &'static self,
        function: Function,
        (out, shape): (DType, Shape),
        operands: [&Array; N],
        numbers: Numbers,
    ) -> Result<Array> {
        if fuse::is_on() && shape.numel() > 0 {
            return fuse::defer(self, function, (out, shape), &operands, numbers);
        }
        let Function { unit, dtype, name } = function;
        self.map(unit, dtype, name, (out, &shape), operands, numbers)
    }

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
        let copies = copy_transposed(shape, operands)?;
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
            let target = (self.read(&result)?, out);
            // SAFETY: the result has this dtype and shape.
            unsafe { self.launch_map(unit, dtype, name, (target, shape), operands, more)? };
        }
        Ok(result)
    }

    /// Runs an element-wise function, whose result is written to memory of a dtype.
    ///
    /// # Safety
    /// The memory must have room for as many elements as `shape` has, of which there must be some.
    pub(super) unsafe fn pointwise_into<const N: usize>(
        &self,
        Function { unit, dtype, name }: Function,
        (out, shape): ((Address, DType), &[usize]),
        operands: [&Array; N],
        numbers: Numbers,
    ) -> Result<()> {
        let copies = copy_transposed(shape, operands)?;
        let operands: [&Array; N] = from_fn(|k| copies[k].as_ref().unwrap_or(operands[k]));
        // SAFETY: the caller guarantees the memory.
        unsafe { self.launch_map(unit, dtype, name, (out, shape), operands, numbers) }
    }

    /// Queues an element-wise kernel, whose result is written to memory of a dtype.
    ///
    /// # Safety
    /// As for [`pointwise_into`](Stream::pointwise_into).
    unsafe fn launch_map<const N: usize, P: Copy>(
        &self,
        unit: &Unit,
        dtype: DType,
        name: &str,
        (out, shape): ((Address, DType), &[usize]),
        operands: [&Array; N],
        more: P,
    ) -> Result<()> {
        let map = Map::new(self, shape, operands, out)?;
        let grid = grid_for(self.gpu, map.numel as usize, THREADS, map.vector as usize);
        // SAFETY: the kernel takes a `Map<N>` and what follows it, and the result has `numel` elements.
        unsafe { self.launch(unit, dtype, name, grid, THREADS, 0, &With { map, more }) }
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
