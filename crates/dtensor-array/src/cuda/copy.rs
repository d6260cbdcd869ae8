//! Copies between layouts and devices, and arrays created from numbers.

use super::driver::Address;
use super::kernel::{ALL, file, units};
use super::map::THREADS;
use super::window::WindowArgs;
use super::{Stream, grid_for, stream_of, stream_on};
use crate::host::copy as host;
use crate::host::layout::{Axes, Axis, push_axis};
use crate::{Array, DType, Device, Error, HostBuffer, Meta, Result, Window};

units! {
    static COPY: "copy", [file!("map.cuh"), file!("window.cuh"), file!("copy.cuh")], ALL;
}

/// Copies `x` to a new contiguous array on its GPU.
pub(crate) fn copy(x: &Array) -> Result<Array> {
    let stream = stream_of(x)?;
    if x.is_contiguous() {
        let out = stream.empty(x.dtype(), x.dims())?;
        let bytes = x.numel() * x.dtype().size();
        if bytes > 0 {
            // SAFETY: both are contiguous arrays of as many bytes.
            unsafe { stream.gpu.driver.copy(stream.read(&out)?, stream.read(x)?, bytes, stream.handle)? };
        }
        return Ok(out);
    }
    match Transposed::new(x) {
        Some(transposed) => transpose(stream, x, transposed),
        None => stream.map_views(&COPY, x.dtype(), "copy", (x.dtype(), x.dims()), [x], ()),
    }
}

/// The number of elements along each side of a tile.
const TILE: usize = 64;
const TILE_DIMS: usize = 6;
/// Arrays with fewer elements are read one by one.
const FEWEST: usize = 1 << 12;
/// Dims of fewer elements do not fill a tile.
const NARROWEST: usize = 16;

/// Must match `Transposed` in `kernels/copy.cuh`.
#[repr(C)]
struct Transposed {
    out: Address,
    source: Address,
    tiles: u64,
    across: u64,
    down: u64,
    columns: u64,
    rows: u64,
    column_stride: u64,
    row_stride: u64,
    out_stride: u64,
    ndim: u32,
    reserved: u32,
    dims: [[u64; 3]; TILE_DIMS],
}

impl Transposed {
    /// Describes a copy in tiles, or returns `None` if that would not be faster: if the last dim has the smallest stride.
    fn new(x: &Array) -> Option<Transposed> {
        if x.numel() < FEWEST || x.is_contiguous() {
            return None;
        }
        let mut axes: Axes<1> = Axes::new();
        for (&size, &stride) in x.dims().iter().zip(x.strides()) {
            push_axis(&mut axes, Axis { size, strides: [stride] });
        }
        let last = axes.pop()?;
        let moved = axes.iter().filter(|axis| axis.strides[0] > 0).map(|axis| axis.strides[0]).min();
        let at = axes.iter().position(|axis| Some(axis.strides[0]) == moved)?;
        let row = axes[at];
        let is_narrow = row.size < NARROWEST || last.size < NARROWEST;
        if is_narrow || row.strides[0] >= last.strides[0] || axes.len() > TILE_DIMS + 1 {
            return None;
        }
        let mut transposed = Transposed {
            out: 0,
            source: 0,
            tiles: 1,
            across: last.size.div_ceil(TILE) as u64,
            down: row.size.div_ceil(TILE) as u64,
            columns: last.size as u64,
            rows: row.size as u64,
            column_stride: last.strides[0] as u64,
            row_stride: row.strides[0] as u64,
            out_stride: 0,
            ndim: axes.len() as u32 - 1,
            reserved: 0,
            dims: [[1, 0, 0]; TILE_DIMS],
        };
        let mut out_stride = last.size as u64;
        let mut next = axes.len() - 1;
        for (i, axis) in axes.iter().enumerate().rev() {
            if i == at {
                transposed.out_stride = out_stride;
            } else {
                next -= 1;
                transposed.dims[next] = [axis.size as u64, axis.strides[0] as u64, out_stride];
                transposed.tiles *= axis.size as u64;
            }
            out_stride *= axis.size as u64;
        }
        transposed.tiles *= transposed.across * transposed.down;
        Some(transposed)
    }
}

/// Returns true if [`copy`] is faster than reading the elements of an array one by one in row-major order.
pub(super) fn is_transposed(x: &Array) -> bool {
    Transposed::new(x).is_some()
}

fn transpose(stream: &'static Stream, x: &Array, mut transposed: Transposed) -> Result<Array> {
    let out = stream.empty(x.dtype(), x.dims())?;
    (transposed.out, transposed.source) = (stream.read(&out)?, stream.read(x)?);
    let grid = [transposed.tiles.min(i32::MAX as u64) as u32, 1, 1];
    // SAFETY: the tiles cover both arrays.
    unsafe { stream.launch(&COPY, x.dtype(), "transpose", grid, THREADS, 0, &transposed)? };
    Ok(out)
}

pub(crate) fn contiguous(x: &Array) -> Result<Array> {
    copy(x)
}

/// Copies an array to another device. One of the two is a GPU.
pub(crate) fn to_device(x: &Array, device: Device) -> Result<Array> {
    let dense = x.contiguous()?;
    let bytes = x.numel() * x.dtype().size();
    match (x.device(), device) {
        (Device::Cuda(_), Device::Cpu) => {
            let stream = stream_of(x)?;
            let meta = Meta { shape: x.shape().clone(), dtype: x.dtype(), device };
            let mut buffer = HostBuffer::new(&meta)?;
            // SAFETY: the buffer has room for as many bytes, and all of them are written before it is read.
            unsafe {
                stream.download(buffer.as_mut_ptr(), stream.read(&dense)?, bytes)?;
                buffer.arrived()
            }
        }
        (Device::Cpu, Device::Cuda(_)) => {
            let stream = stream_on(device)?;
            stream.expect_running("copying values to the GPU")?;
            let out = stream.empty(x.dtype(), x.dims())?;
            stream.upload(stream.read(&out)?, dense.copy_to_host_memory()?.bytes())?;
            Ok(out)
        }
        (Device::Cuda(_), Device::Cuda(_)) => {
            let stream = stream_on(device)?;
            let out = stream.empty(x.dtype(), x.dims())?;
            if bytes > 0 {
                // The copy runs on the target's stream, after what the source waits for.
                // SAFETY: both are contiguous arrays of as many bytes.
                unsafe {
                    stream.gpu.driver.copy(stream.read(&out)?, stream.read(&dense)?, bytes, stream.handle)?
                };
            }
            Ok(out)
        }
        (from, to) => Err(Error::argument("to_device", format!("cannot copy from {from} to {to}"))),
    }
}

pub(crate) fn full(device: Device, dtype: DType, shape: &[usize], value: f64) -> Result<Array> {
    let one = host::full(dtype, &[], value)?;
    fill(device, &one, shape)
}

pub(crate) fn full_i64(device: Device, dtype: DType, shape: &[usize], value: i64) -> Result<Array> {
    let one = host::full_i64(dtype, &[], value)?;
    fill(device, &one, shape)
}

/// Creates an array on a GPU filled with the element of an array in main memory.
fn fill(device: Device, one: &Array, shape: &[usize]) -> Result<Array> {
    let stream = stream_on(device)?;
    let out = stream.empty(one.dtype(), shape)?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let bits = bits(one)?;
    if bits == 0 {
        let bytes = out.numel() * one.dtype().size();
        // SAFETY: the array has as many bytes.
        unsafe { stream.gpu.driver.set_zero(stream.read(&out)?, bytes, stream.handle)? };
        return Ok(out);
    }
    tabulate("fill", out, &Window::whole(shape), [0.0; 4], [bits as i64, 0, 0, 0])
}

/// Returns the bits of the only element of an array in main memory.
fn bits(one: &Array) -> Result<u64> {
    let memory = one.copy_to_host_memory()?;
    let mut bits = [0; 8];
    bits[..memory.bytes().len()].copy_from_slice(memory.bytes());
    Ok(u64::from_le_bytes(bits))
}

/// Returns the bits of a number as an element.
pub(super) fn element(dtype: DType, value: f64) -> Result<u64> {
    bits(&host::full(dtype, &[], value)?)
}

/// Must match `Tabulate` in `kernels/copy.cuh`.
#[repr(C)]
struct Tabulate {
    out: Address,
    numel: u64,
    numbers: [f64; 4],
    integers: [i64; 4],
    window: WindowArgs,
}

/// Runs a kernel that computes each element of `out` from its index in the full array.
fn tabulate(name: &str, out: Array, window: &Window, numbers: [f64; 4], integers: [i64; 4]) -> Result<Array> {
    if out.numel() == 0 {
        return Ok(out);
    }
    let stream = stream_of(&out)?;
    let (window, _table) = WindowArgs::new(stream, window)?;
    let argument = Tabulate { out: stream.read(&out)?, numel: out.numel() as u64, numbers, integers, window };
    let grid = grid_for(stream.gpu, out.numel(), THREADS, 4);
    // SAFETY: the result has `numel` elements, and the window describes as many.
    unsafe { stream.launch(&COPY, out.dtype(), name, grid, THREADS, 0, &argument)? };
    Ok(out)
}

pub(crate) fn arange(device: Device, dtype: DType, start: f64, step: f64, window: &Window) -> Result<Array> {
    let out = stream_on(device)?.empty(dtype, window.shape())?;
    match dtype.is_int() && start.trunc() == start && step.trunc() == step {
        true => tabulate("arange_int", out, window, [0.0; 4], [start as i64, step as i64, 0, 0]),
        false => tabulate("arange", out, window, [start, step, 0.0, 0.0], [0; 4]),
    }
}

pub(crate) fn arange_i64(device: Device, start: i64, step: i64, window: &Window) -> Result<Array> {
    let out = stream_on(device)?.empty(DType::I64, window.shape())?;
    tabulate("arange_int", out, window, [0.0; 4], [start, step, 0, 0])
}

pub(crate) fn linspace(
    device: Device,
    start: f64,
    end: f64,
    base: Option<f64>,
    window: &Window,
) -> Result<Array> {
    let steps = window.whole_shape().numel();
    let step = if steps > 1 { (end - start) / (steps - 1) as f64 } else { 0.0 };
    let out = stream_on(device)?.empty(DType::F64, window.shape())?;
    let numbers = [start, end, step, base.unwrap_or(0.0)];
    tabulate("linspace", out, window, numbers, [steps as i64, i64::from(base.is_some()), 0, 0])
}

pub(crate) fn eye(device: Device, dtype: DType, window: &Window) -> Result<Array> {
    let &[_, columns] = &window.whole_shape()[..] else {
        let message = format!("expected the shape of a matrix, but got {}", window.whole_shape());
        return Err(Error::argument("eye", message));
    };
    let out = stream_on(device)?.empty(dtype, window.shape())?;
    tabulate("eye", out, window, [0.0; 4], [columns as i64, 0, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers};
    use super::*;
    use crate::host::testing::windows;
    use crate::kernels::copy as kernels;

    #[test]
    fn views_become_contiguous() {
        for dtype in DType::ALL {
            let x = numbers(3 * 70 * 2 * 65, dtype, 1);
            compare(&[x], 0.0, |x| {
                let x = x[0].reshape(&[3, 70, 2, 65])?;
                let mut views =
                    vec![x.clone(), x.narrow(1, 3, 60)?, x.narrow(3, 1, 64)?, x.narrow(3, 16, 48)?];
                for dims in
                    [[0, 3, 2, 1], [3, 0, 2, 1], [0, 2, 3, 1], [1, 0, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]]
                {
                    views.push(x.permute(&dims)?);
                    views.push(x.narrow(1, 5, 64)?.narrow(3, 1, 64)?.permute(&dims)?);
                }
                views.push(x.narrow(0, 0, 1)?.expand(&[5, 70, 2, 65])?.transpose(1, 3)?);
                views.push(x.narrow(3, 7, 1)?.expand(&[3, 70, 2, 40])?.transpose(1, 3)?);
                views.push(x.as_strided(&[70, 65], &[2, 200], 1)?);
                views.push(x.as_strided(&[20, 20, 20], &[1, 2, 3], 1)?);
                views.iter().map(kernels::contiguous).collect()
            });
        }
        let moved = |dims: &[usize]| {
            let x = numbers(70 * 65 * 3, DType::F32, 1).reshape(&[3, 70, 65]).unwrap();
            is_transposed(&x.permute(dims).unwrap())
        };
        assert!(moved(&[0, 2, 1]) && moved(&[2, 0, 1]) && !moved(&[1, 0, 2]) && !moved(&[0, 1, 2]));
    }

    #[test]
    fn operands_of_a_map_may_be_transposed() {
        use crate::kernels::binary::{Binary, binary};
        compare(&[numbers(70 * 65, DType::F32, 1), numbers(70 * 65, DType::F32, 2)], 0.0, |x| {
            let (a, b) = (x[0].reshape(&[70, 65])?, x[1].reshape(&[65, 70])?.transpose(0, 1)?);
            Ok(vec![binary(Binary::Add, &a, &b)?, binary(Binary::Sub, &b, &b)?])
        });
    }

    #[test]
    fn arrays_from_numbers() {
        let on = |device: Device| -> Result<Vec<Array>> {
            let mut all = vec![];
            for (window, _) in windows().iter().take(120) {
                for dtype in DType::ALL {
                    all.push(kernels::arange(device, dtype, 1.5, 2.0, window)?);
                    all.push(kernels::arange(device, dtype, 3.0, -2.0, window)?);
                    all.push(kernels::full(device, dtype, window.shape(), 1.5)?);
                    all.push(kernels::full(device, dtype, window.shape(), 0.0)?);
                    if window.whole_shape().len() == 2 {
                        all.push(kernels::eye(device, dtype, window)?);
                    }
                }
                all.push(kernels::full_i64(device, DType::I64, window.shape(), i64::MAX)?);
                all.push(kernels::arange_i64(device, i64::MAX, 3, window)?);
                all.push(kernels::linspace(device, -1.0, 7.5, None, window)?);
            }
            Ok(all)
        };
        compare(&[numbers(1, DType::F32, 0)], 0.0, |x| on(x[0].device()));
    }
}
