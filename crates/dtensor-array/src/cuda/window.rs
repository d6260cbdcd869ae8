//! [`WindowArgs`]: a [`Window`] as an argument of a kernel.

use super::Stream;
use super::driver::Address;
use crate::{Array, DType, Result, Window};

const DIMS: usize = 8;
const RANGES: usize = 48;

/// Must match `Window` in `kernels/window.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowArgs {
    table: Address,
    ndim: u32,
    reserved: u32,
    size: [u32; DIMS],
    stride: [u64; DIMS],
    ranges: [u32; DIMS + 1],
    at: [u32; RANGES],
    shift: [u64; RANGES],
}

impl WindowArgs {
    /// Describes a window. The array that is returned, if any, must live until the kernel is queued.
    pub(super) fn new(stream: &'static Stream, window: &Window) -> Result<(WindowArgs, Option<Array>)> {
        let mut args = WindowArgs {
            table: 0,
            ndim: 0,
            reserved: 0,
            size: [1; DIMS],
            stride: [0; DIMS],
            ranges: [0; DIMS + 1],
            at: [0; RANGES],
            shift: [0; RANGES],
        };
        if window.shape() == window.whole_shape() || window.shape().numel() == 0 {
            return Ok((args, None));
        }
        // A dim that the shard holds in full is merged with the one before it, if that is full too.
        let mut count = 0;
        let mut fits = true;
        let strides = window.whole_shape().strides();
        let mut dim = 0;
        while dim < window.shape().len() {
            let is_full = |dim: usize| window.shape()[dim] == window.whole_shape()[dim];
            let mut last = dim;
            while is_full(dim) && last + 1 < window.shape().len() && is_full(last + 1) {
                last += 1;
            }
            let size: usize = window.shape()[dim..=last].iter().product();
            let ranges = window.ranges_of(dim);
            let ndim = args.ndim as usize;
            fits = ndim < DIMS && count + ranges.len().max(1) <= RANGES && size <= u32::MAX as usize;
            if !fits {
                break;
            }
            (args.size[ndim], args.stride[ndim]) = (size as u32, strides[last] as u64);
            args.ranges[ndim] = count as u32;
            if is_full(dim) {
                (args.at[count], args.shift[count]) = (0, 0);
                count += 1;
            } else {
                let mut at = 0;
                for range in ranges {
                    (args.at[count], args.shift[count]) = (at as u32, (range.start - at) as u64);
                    (at, count) = (at + range.len(), count + 1);
                }
            }
            args.ndim += 1;
            args.ranges[args.ndim as usize] = count as u32;
            dim = last + 1;
        }
        if fits {
            return Ok((args, None));
        }
        let mut indices: Vec<i64> = Vec::with_capacity(window.shape().numel());
        window.each_run(|_, first, n| indices.extend((first..first + n).map(|i| i as i64)));
        let table = stream.empty(DType::I64, &[indices.len()])?;
        args.table = stream.read(&table)?;
        let bytes: Vec<u8> = indices.iter().flat_map(|index| index.to_ne_bytes()).collect();
        stream.upload(args.table, &bytes)?;
        Ok((args, Some(table)))
    }
}
