//! Copies between layouts and devices, and arrays created from numbers.

use super::driver::Address;
use super::kernel::{ALL, file, units};
use super::map::THREADS;
use super::window::WindowArgs;
use super::{grid_for, stream_of, stream_on};
use crate::host::copy as host;
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
    stream.map(&COPY, x.dtype(), "copy", (x.dtype(), x.dims()), [x], ())
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
    let memory = one.copy_to_host_memory()?;
    let bytes = memory.bytes();
    if out.numel() == 0 {
        return Ok(out);
    }
    if bytes.iter().all(|&byte| byte == 0) {
        // SAFETY: the array has as many bytes.
        unsafe { stream.gpu.driver.set_zero(stream.read(&out)?, out.numel() * bytes.len(), stream.handle)? };
        return Ok(out);
    }
    let mut bits = [0; 8];
    bits[..bytes.len()].copy_from_slice(bytes);
    tabulate("fill", out, &Window::whole(shape), [0.0; 4], [i64::from_le_bytes(bits), 0, 0, 0])
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
