//! Softmax and log-softmax along any dim, and their gradients.

use super::driver::Address;
use super::kernel::{FLOATS, Unit, file, units};
use super::reduce::{accumulation, check_float};
use super::rows::{Lines, lines};
use super::stream_of;
use crate::host::rows::split;
use crate::{Array, Result};

units! {
    static SOFTMAX: "softmax", [file!("rows.cuh"), file!("softmax.cuh")], FLOATS;
    static PARTS: "softmax_parts",
        [file!("map.cuh"), file!("rows.cuh"), file!("softmax.cuh"), file!("softmax_parts.cuh")], FLOATS;
}

/// Must match `Args` in `kernels/softmax.cuh`.
#[repr(C)]
struct Args {
    lines: Lines,
    x: Address,
    dy: Address,
    out: Address,
    numbers: Address,
}

/// Runs a kernel on the lines along `dim` of `x`, and of `dy` if given. `out` is contiguous.
fn along(
    unit: &Unit,
    name: &str,
    x: &Array,
    dy: Option<&Array>,
    numbers: Option<&Array>,
    dim: usize,
    out: &Array,
) -> Result<()> {
    if out.numel() == 0 {
        return Ok(());
    }
    let stream = stream_of(x)?;
    let x = x.contiguous()?;
    let dy = dy.map(Array::contiguous).transpose()?;
    let numbers = numbers.map(Array::contiguous).transpose()?;
    let address = |x: &Option<Array>| x.as_ref().map_or(Ok(0), |x| stream.read(x));
    let addresses = [stream.read(&x)?, address(&dy)?, stream.read(out)?];
    let sizes = split(x.dims(), dim);
    // Kernels that write one number for each line read the line once.
    let kept = if out.numel() < x.numel() || numbers.is_some() { 0 } else { 1 + usize::from(dy.is_some()) };
    let launch = lines(stream.gpu, sizes, x.dtype().size(), &addresses, kept, false);
    let [x_address, dy, out] = addresses;
    let args = Args { lines: launch.lines, x: x_address, dy, out, numbers: address(&numbers)? };
    // SAFETY: the arrays are contiguous and have the sizes of the lines; `out` has an element for each element or line.
    unsafe { stream.launch(unit, x.dtype(), name, launch.grid, launch.threads, launch.shared_bytes, &args) }
}

pub(crate) fn softmax(x: &Array, dim: usize) -> Result<Array> {
    check_float("softmax", x.dtype())?;
    let out = stream_of(x)?.empty(x.dtype(), x.dims())?;
    along(&SOFTMAX, "softmax", x, None, None, dim, &out)?;
    Ok(out)
}

pub(crate) fn log_softmax(x: &Array, dim: usize) -> Result<Array> {
    check_float("log_softmax", x.dtype())?;
    let out = stream_of(x)?.empty(x.dtype(), x.dims())?;
    along(&SOFTMAX, "log_softmax", x, None, None, dim, &out)?;
    Ok(out)
}

pub(crate) fn softmax_backward(y: &Array, dy: &Array, dim: usize) -> Result<Array> {
    check_float("softmax", y.dtype())?;
    let out = stream_of(y)?.empty(y.dtype(), y.dims())?;
    along(&SOFTMAX, "softmax_backward", y, Some(dy), None, dim, &out)?;
    Ok(out)
}

pub(crate) fn log_softmax_backward(y: &Array, dy: &Array, dim: usize) -> Result<Array> {
    check_float("softmax", y.dtype())?;
    let out = stream_of(y)?.empty(y.dtype(), y.dims())?;
    along(&SOFTMAX, "log_softmax_backward", y, Some(dy), None, dim, &out)?;
    Ok(out)
}

/// Creates an array for one number of each line along `dim`, in the accumulation dtype.
fn one_per_line(x: &Array, dim: usize) -> Result<Array> {
    check_float("softmax", x.dtype())?;
    let mut dims = x.dims().to_vec();
    if let Some(size) = dims.get_mut(dim) {
        *size = 1;
    }
    stream_of(x)?.empty(accumulation(x.dtype()), &dims)
}

pub(crate) fn maxima(x: &Array, dim: usize) -> Result<Array> {
    let out = one_per_line(x, dim)?;
    along(&PARTS, "maxima", x, None, None, dim, &out)?;
    Ok(out)
}

pub(crate) fn exp_sums(x: &Array, maxima: &Array, dim: usize) -> Result<Array> {
    let out = one_per_line(x, dim)?;
    along(&PARTS, "exp_sums", x, None, Some(maxima), dim, &out)?;
    Ok(out)
}

pub(crate) fn normalised(x: &Array, maxima: &Array, sums: &Array, dim: usize, log: bool) -> Result<Array> {
    check_float("softmax", x.dtype())?;
    let _ = dim; // its size is 1 in `maxima` and `sums`
    let name = if log { "log_normalised" } else { "normalised" };
    stream_of(x)?.map(&PARTS, x.dtype(), name, (x.dtype(), x.dims()), [x, maxima, sums], ())
}

pub(crate) fn backward_sums(y: &Array, dy: &Array, dim: usize, log: bool) -> Result<Array> {
    let out = one_per_line(y, dim)?;
    let name = if log { "log_backward_sums" } else { "backward_sums" };
    along(&PARTS, name, y, Some(dy), None, dim, &out)?;
    Ok(out)
}

pub(crate) fn backward_with(y: &Array, dy: &Array, sums: &Array, dim: usize, log: bool) -> Result<Array> {
    check_float("softmax", y.dtype())?;
    let _ = dim; // its size is 1 in `sums`
    let name = if log { "log_backward_with" } else { "backward_with" };
    stream_of(y)?.map(&PARTS, y.dtype(), name, (y.dtype(), y.dims()), [y, dy, sums], ())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, rounding, same_error};
    use super::*;
    use crate::DType;
    use crate::host::testing::local;
    use crate::kernels::softmax as kernels;

    /// Compares all functions on an array of a shape along a dim, and on the transposed array.
    fn check(x: &Array, shape: &[usize], dim: usize, tolerance: f64) {
        let tolerance = tolerance * rounding(x.dtype());
        let dy = numbers(x.numel(), x.dtype(), 5);
        compare(&[x.clone(), dy], tolerance, |all| {
            let (x, dy) = (all[0].reshape(shape)?, all[1].reshape(shape)?);
            let last = shape.len().saturating_sub(1);
            let turn = |x: &Array| if last > 0 { x.transpose(0, last) } else { Ok(x.clone()) };
            let turned = if dim == 0 {
                last
            } else if dim == last {
                0
            } else {
                dim
            };
            let mut results = vec![];
            for (x, dy, dim) in [(x.clone(), dy.clone(), dim), (turn(&x)?, turn(&dy)?, turned)] {
                let (y, log_y) = (kernels::softmax(&x, dim)?, kernels::log_softmax(&x, dim)?);
                results.push(kernels::softmax_backward(&y, &dy, dim)?);
                results.push(kernels::log_softmax_backward(&log_y, &dy, dim)?);
                let largest = kernels::maxima(&x, dim)?;
                let sums = kernels::exp_sums(&x, &largest, dim)?;
                results.push(kernels::normalised(&x, &largest, &sums, dim, false)?);
                results.push(kernels::normalised(&x, &largest, &sums, dim, true)?);
                for (y, log) in [(&y, false), (&log_y, true)] {
                    let sums = kernels::backward_sums(y, &dy, dim, log)?;
                    results.push(kernels::backward_with(y, &dy, &sums, dim, log)?);
                }
                results.extend([y, log_y, largest, sums]);
            }
            Ok(results)
        });
    }

    #[test]
    fn every_function_along_every_dim() {
        for &dtype in FLOATS {
            for shape in
                [&[][..], &[1], &[0], &[3, 0], &[5, 7], &[3, 136], &[300, 3], &[4, 7, 65], &[2, 3, 4, 8]]
            {
                for dim in 0..shape.len().max(1) {
                    check(&numbers(shape.iter().product(), dtype, 1), shape, dim, 4.0);
                }
            }
        }
    }

    #[test]
    fn long_lines() {
        // The last lines are longer than shared memory.
        for (dtype, n) in [
            (DType::F32, 1031),
            (DType::BF16, 4096),
            (DType::F16, 1003),
            (DType::BF16, 301),
            (DType::F64, 3000),
            (DType::F32, 40_000),
        ] {
            check(&numbers(3 * n, dtype, 2), &[3, n], 1, 4.0);
        }
        check(&numbers(70_000, DType::F32, 2), &[35_000, 2], 1, 4.0);
    }

    #[test]
    fn infinities_and_nan() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let x =
            [-inf, -inf, -inf, inf, 0.0, 1.0, nan, 0.0, 0.0, -inf, 0.0, 0.0, nan, -inf, -inf, 1e4, 1e4, -1e4];
        for &dtype in FLOATS {
            check(&local(dtype, &x, &[18]), &[6, 3], 1, 4.0);
        }
        // Values far apart in one thread, and in different threads.
        let mut long = vec![-inf; 2000];
        (long[77], long[1900]) = (3.0, 1e4);
        // One element has all of the sum of the gradients.
        check(&local(DType::F32, &long, &[2000]), &[1, 2000], 1, 100.0);
    }

    #[test]
    fn gradients_may_be_broadcast_and_integers_are_errors() {
        compare(&[numbers(6, DType::F32, 1), numbers(1, DType::F32, 2)], 1e-6, |x| {
            let dy = x[1].reshape(&[1, 1])?.expand(&[2, 3])?;
            Ok(vec![kernels::softmax_backward(&x[0].reshape(&[2, 3])?, &dy, 1)?])
        });
        for f in [kernels::softmax, kernels::log_softmax, kernels::maxima] {
            same_error(&[numbers(3, DType::I64, 1)], |x| f(&x[0], 0));
        }
    }
}
