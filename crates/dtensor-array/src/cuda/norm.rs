//! Layer norm and RMS norm of rows, and their gradients.

use super::driver::Address;
use super::kernel::{FLOATS, file, units};
use super::reduce::{accumulation, check_float};
use super::rows::{Launch, Lines, held_rows, lines};
use super::{Stream, stream_of};
use crate::{Array, DType, Result};

units! {
    static NORM: "norm", [file!("rows.cuh"), file!("norm.cuh")], FLOATS;
}

/// Must match `Args` in `kernels/norm.cuh`.
#[repr(C)]
struct Args {
    lines: Lines,
    x: Address,
    dy: Address,
    dy_dtype: u64,
    addend: Address,
    weight: Address,
    bias: Address,
    is_wide: u64,
    eps: f64,
    out: Address,
    mean: Address,
    rstd: Address,
    rest: Address,
    weight_parts: Address,
    bias_parts: Address,
    rows_per_split: u64,
}

/// Must match `SumParts` in `kernels/norm.cuh`.
#[repr(C)]
struct SumParts {
    parts: [Address; 2],
    out: [Address; 2],
    n: u64,
    splits: u64,
}

/// The size of a block in the sums over rows. Must match `ACROSS` and `DOWN` in `kernels/norm.cuh`.
const ACROSS: usize = 32;
const DOWN: usize = 8;

/// The packs of a row that a thread holds. As `HELD` in `kernels/norm.cuh`.
fn held_packs(dtype: DType) -> usize {
    if dtype.size() == 2 { 2 } else { 4 }
}

/// Returns the number of rows and the number of elements in each.
fn row_count(shape: &[usize], dims: usize) -> (usize, usize) {
    let (lead, row) = shape.split_at(shape.len() - dims);
    (lead.iter().product(), row.iter().product())
}

/// Weight and bias as the kernels read them: in the dtype of the rows, or both in the accumulation dtype.
struct Parameters {
    arrays: [Option<Array>; 2],
    is_wide: bool,
}

impl Parameters {
    fn new(dtype: DType, arrays: [Option<&Array>; 2]) -> Result<Parameters> {
        let is_wide = arrays.iter().flatten().any(|x| x.dtype() != dtype);
        let read_as = if is_wide { accumulation(dtype) } else { dtype };
        let convert = |x: &Array| match x.dtype() == read_as {
            true => x.contiguous(),
            false => super::cast::cast(x, read_as)?.contiguous(),
        };
        let [weight, bias] = arrays.map(|x| x.map(convert).transpose());
        Ok(Parameters { arrays: [weight?, bias?], is_wide })
    }

    fn addresses(&self, stream: &Stream) -> Result<[Address; 2]> {
        let [weight, bias] = self.arrays.each_ref().map(|x| x.as_ref().map_or(Ok(0), |x| stream.read(x)));
        Ok([weight?, bias?])
    }

    /// Plans work on rows of `size` bytes per element, where packs of the parameters must be aligned too.
    fn lines(
        &self,
        stream: &Stream,
        (rows, n): (usize, usize),
        dtype: DType,
        of_rows: [Address; 4],
        kept: usize,
    ) -> Result<Launch> {
        // A pack of parameters in the accumulation dtype is larger than 16 bytes, so its alignment counts as less.
        let larger = if self.is_wide { accumulation(dtype).size() / dtype.size() } else { 1 } as Address;
        let [weight, bias] =
            self.addresses(stream)?.map(|x| if x % (16 * larger) == 0 { 0 } else { 1 as Address });
        let [a, b, c, d] = of_rows;
        Ok(lines(stream.gpu, (rows, n, 1), dtype.size(), &[a, b, c, d, weight, bias], kept, true))
    }
}

fn forward(
    name: &str,
    x: &Array,
    dims: usize,
    weight: Option<&Array>,
    bias: Option<&Array>,
    eps: f64,
) -> Result<(Array, Array, Array)> {
    let dtype = x.dtype();
    check_float(name_of(name), dtype)?;
    let (rows, n) = row_count(x.dims(), dims);
    let stream = stream_of(x)?;
    let x = x.contiguous()?;
    let parameters = Parameters::new(dtype, [weight, bias])?;
    let out = stream.empty(dtype, x.dims())?;
    let wide = accumulation(dtype);
    let (mean, rstd) = (stream.empty(wide, &[rows])?, stream.empty(wide, &[rows])?);
    if rows == 0 {
        return Ok((out, mean, rstd));
    }
    let (from, to) = (stream.read(&x)?, stream.read(&out)?);
    let launch = parameters.lines(stream, (rows, n), dtype, [from, to, 0, 0], 1)?;
    let [weight, bias] = parameters.addresses(stream)?;
    let args = Args {
        lines: launch.lines,
        x: from,
        dy: 0,
        dy_dtype: 0,
        addend: 0,
        weight,
        bias,
        is_wide: parameters.is_wide.into(),
        eps,
        out: to,
        mean: stream.read(&mean)?,
        rstd: stream.read(&rstd)?,
        rest: 0,
        weight_parts: 0,
        bias_parts: 0,
        rows_per_split: 0,
    };
    // SAFETY: the arrays are contiguous and hold `rows` rows of `n` elements, a number for each row, or `n` parameters.
    unsafe { stream.launch(&NORM, dtype, name, launch.grid, launch.threads, launch.shared_bytes, &args)? };
    Ok((out, mean, rstd))
}

/// Returns the operator that a kernel belongs to.
fn name_of(kernel: &str) -> &'static str {
    if kernel.starts_with("layer") { "layer_norm" } else { "rms_norm" }
}

pub(crate) fn layer_norm(
    x: &Array,
    dims: usize,
    weight: Option<&Array>,
    bias: Option<&Array>,
    eps: f64,
) -> Result<(Array, Array, Array)> {
    forward("layer_norm", x, dims, weight, bias, eps)
}

pub(crate) fn rms_norm(x: &Array, dims: usize, weight: Option<&Array>, eps: f64) -> Result<(Array, Array)> {
    let (y, _, rstd) = forward("rms_norm", x, dims, weight, None, eps)?;
    Ok((y, rstd))
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn layer_norm_backward(
    dy: &Array,
    addend: Option<&Array>,
    x: &Array,
    mean: &Array,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    need_weight: Option<DType>,
    need_bias: Option<DType>,
) -> Result<(Array, Option<Array>, Option<Array>)> {
    let names = ["layer_norm_backward", "layer_norm_parameters", "layer_norm_gradients"];
    backward(names, dy, addend, x, Some(mean), rstd, weight, dims, [need_weight, need_bias])
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn rms_norm_backward(
    dy: &Array,
    addend: Option<&Array>,
    x: &Array,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    need_weight: Option<DType>,
) -> Result<(Array, Option<Array>)> {
    let names = ["rms_norm_backward", "rms_norm_parameters", "rms_norm_gradients"];
    let (dx, dweight, _) = backward(names, dy, addend, x, None, rstd, weight, dims, [need_weight, None])?;
    Ok((dx, dweight))
}

#[allow(clippy::too_many_arguments)]
fn backward(
    names: [&str; 3],
    dy: &Array,
    addend: Option<&Array>,
    x: &Array,
    mean: Option<&Array>,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    needs: [Option<DType>; 2],
) -> Result<(Array, Option<Array>, Option<Array>)> {
    let dtype = x.dtype();
    check_float(name_of(names[0]), dtype)?;
    let (rows, n) = row_count(x.dims(), dims);
    let stream = stream_of(x)?;
    let (x, rstd) = (x.contiguous()?, rstd.contiguous()?);
    let mean = mean.map(Array::contiguous).transpose()?;
    let addend = addend.map(Array::contiguous).transpose()?;
    let parameters = Parameters::new(dtype, [weight, None])?;
    let out = stream.empty(dtype, x.dims())?;
    let more = addend.as_ref().map_or(Ok(0), |addend| stream.read(addend))?;
    let needs_any = needs.iter().any(Option::is_some);
    // All gradients are computed at once if a block can hold a row, else the sums over rows follow. The first kernel also reads
    // gradients in half precision.
    let plan = |dy: &Array| -> Result<(Launch, Option<Launch>, [Address; 4])> {
        let addresses = [stream.read(&x)?, stream.read(dy)?, stream.read(&out)?, more];
        let launch = parameters.lines(stream, (rows, n), dtype, addresses, 2)?;
        let (vector, wide) = (launch.lines.vector(), accumulation(dtype).size());
        let held = held_rows(stream.gpu, (rows, n), vector, held_packs(dtype), wide);
        Ok((launch, held.filter(|_| needs_any), addresses))
    };
    let mut dy = dy.contiguous()?;
    let (mut launch, mut held, mut addresses) = plan(&dy)?;
    let is_half = dtype == DType::F32 && dy.dtype().size() == 2;
    if dy.dtype() != dtype && !(is_half && launch.lines.vector() > 1 && held.is_some()) {
        dy = super::cast::cast(&dy, dtype)?.contiguous()?;
        (launch, held, addresses) = plan(&dy)?;
    }
    if n == 0 || (rows == 0 && !needs_any) {
        let empty = |need: Option<DType>| need.map(|dtype| stream.empty(dtype, &[n])).transpose();
        return Ok((out, empty(needs[0])?, empty(needs[1])?));
    }
    let (vector, wide) = (launch.lines.vector(), accumulation(dtype));
    let tiles = n.div_ceil(ACROSS * vector);
    let wanted = (stream.gpu.info.multiprocessors * 8).div_ceil(tiles).min(rows.div_ceil(DOWN * 4)).max(1);
    let rows_per_split = rows.div_ceil(wanted).max(1);
    let splits = match &held {
        Some(held) => held.grid[0] as usize,
        None => rows.div_ceil(rows_per_split).max(1),
    };
    let is_held = held.is_some();
    launch = held.unwrap_or(launch);
    let rest = stream.empty(wide, &[if needs_any && !is_held { rows } else { 0 }])?;
    let parts = |need: Option<DType>| need.map(|_| stream.empty(wide, &[splits, n])).transpose();
    let parts = [parts(needs[0])?, parts(needs[1])?];
    let address = |parts: &Option<Array>| parts.as_ref().map_or(Ok(0), |parts| stream.read(parts));
    let [weight, _] = parameters.addresses(stream)?;
    let args = Args {
        lines: launch.lines,
        x: addresses[0],
        dy: addresses[1],
        dy_dtype: if dy.dtype() == dtype { 0 } else { dy.dtype() as u64 },
        addend: addresses[3],
        weight,
        bias: 0,
        is_wide: parameters.is_wide.into(),
        eps: 0.0,
        out: addresses[2],
        mean: mean.map_or(Ok(0), |mean| stream.read(&mean))?,
        rstd: stream.read(&rstd)?,
        rest: stream.read(&rest)?,
        weight_parts: address(&parts[0])?,
        bias_parts: address(&parts[1])?,
        rows_per_split: rows_per_split as u64,
    };
    let name = if is_held { names[2] } else { names[0] };
    if rows > 0 || is_held {
        // SAFETY: as in `forward`; the parts hold `n` numbers for each block, if the kernel writes them.
        unsafe {
            stream.launch(&NORM, dtype, name, launch.grid, launch.threads, launch.shared_bytes, &args)?
        };
    }
    if !needs_any {
        return Ok((out, None, None));
    }
    if !is_held {
        // The rows are summed by several blocks for each tile of columns.
        let grid = [tiles as u32, splits as u32, 1];
        // SAFETY: as above; the parts hold `n` numbers for each split.
        unsafe { stream.launch(&NORM, dtype, names[1], grid, (ACROSS * DOWN) as u32, 0, &args)? };
    }
    let result = |need: Option<DType>| need.map(|dtype| stream.empty(dtype, &[n])).transpose();
    let results = [result(needs[0])?, result(needs[1])?];
    let mut sums = Vec::new();
    for ((parts, result), need) in parts.iter().zip(&results).zip(needs) {
        if let (Some(parts), Some(result), Some(dtype)) = (parts, result, need) {
            sums.push((dtype, stream.read(parts)?, stream.read(result)?));
        }
    }
    // Both sums are one launch, if they have one dtype.
    let (same, other) = sums.split_at(if needs[0] == needs[1] { sums.len() } else { 1 });
    for sums in [same, other].into_iter().filter(|sums| !sums.is_empty()) {
        let at = |i: usize| sums.get(i).map_or((0, 0), |sum| (sum.1, sum.2));
        let (first, second) = (at(0), at(1));
        let args = SumParts {
            parts: [first.0, second.0],
            out: [first.1, second.1],
            n: n as u64,
            splits: splits as u64,
        };
        let grid = [n.div_ceil(ACROSS) as u32, sums.len() as u32, 1];
        // SAFETY: the parts hold `n` numbers for each split, and the results as many.
        unsafe { stream.launch(&NORM, sums[0].0, "sum_parts", grid, (ACROSS * DOWN) as u32, 0, &args)? };
    }
    let [dweight, dbias] = results;
    Ok((out, dweight, dbias))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::super::testing::{compare, numbers, rounding, same_error};
    use super::*;
    use crate::host::testing::{local, values};
    use crate::kernels::norm as kernels;

    const EPS: f64 = 1e-5;

    /// Compares all functions on rows that are the last `dims` dims of a shape, with parameters of dtype `of`.
    fn check(x: &Array, shape: &[usize], dims: usize, of: DType, view: impl Fn(&Array) -> Result<Array>) {
        let dtype = x.dtype();
        let (rows, n) = row_count(shape, dims);
        let row = &shape[shape.len() - dims..];
        let inputs = [x.clone(), numbers(rows * n, dtype, 5), numbers(n, of, 3), numbers(n, of, 4)];
        // Rows of one element have no deviation, and sums over many rows lose a few bits.
        let tolerance = (4.0 + rows as f64 / 2.0) * rounding(dtype) * if n == 1 { 400.0 } else { 1.0 };
        compare(&inputs, tolerance, |all| {
            let (x, dy) = (view(&all[0].reshape(shape)?)?, view(&all[1].reshape(shape)?)?);
            let (weight, bias) = (all[2].reshape(row)?, all[3].reshape(row)?);
            let half = crate::kernels::cast::cast(&dy, if dims == 2 { DType::F16 } else { DType::BF16 })?;
            let mut results = vec![];
            for (weight, bias) in [(Some(&weight), Some(&bias)), (Some(&weight), None), (None, None)] {
                let (y, mean, rstd) = kernels::layer_norm(&x, dims, weight, bias, EPS)?;
                for needs in [(Some(dtype), Some(of)), (None, Some(dtype)), (Some(of), None), (None, None)] {
                    // With a gradient of the same dtype, of another one, and with what is added.
                    for (dy, addend) in [(&dy, None), (&half, Some(&dy)), (&dy, Some(&x))] {
                        let (dx, dw, db) = kernels::layer_norm_backward(
                            dy, addend, &x, &mean, &rstd, weight, dims, needs.0, needs.1,
                        )?;
                        results.push(dx);
                        results.extend(dw);
                        results.extend(db);
                    }
                }
                results.extend([y, mean, rstd]);
                let (y, rstd) = kernels::rms_norm(&x, dims, weight, EPS)?;
                for need in [None, Some(of)] {
                    for (dy, addend) in [(&dy, None), (&half, Some(&x))] {
                        let (dx, dw) = kernels::rms_norm_backward(dy, addend, &x, &rstd, weight, dims, need)?;
                        results.push(dx);
                        results.extend(dw);
                    }
                }
                results.extend([y, rstd]);
            }
            Ok(results)
        });
    }

    #[test]
    fn every_function() {
        for &dtype in FLOATS {
            for (shape, dims) in [
                (&[3, 7][..], 1),
                (&[5, 64], 1),
                (&[4, 3, 6, 8], 2),
                (&[130, 33], 1),
                (&[70, 768], 1),
                (&[21, 1056], 1),
                (&[2, 2056], 1),
                (&[1, 1], 1),
                (&[0, 4], 1),
                (&[16], 1),
            ] {
                let x = numbers(shape.iter().product(), dtype, 1);
                check(&x, shape, dims, dtype, |x| Ok(x.clone()));
                check(&x, shape, dims, accumulation(dtype), |x| Ok(x.clone()));
            }
            let x = numbers(6 * 10, dtype, 2);
            check(&x, &[6, 10], 1, dtype, |x| x.transpose(0, 1)?.contiguous()?.transpose(0, 1));
        }
    }

    #[test]
    fn long_rows_and_many_rows() {
        // The first rows are longer than shared memory.
        check(&numbers(2 * 30_000, DType::F32, 1), &[2, 30_000], 1, DType::F32, |x| Ok(x.clone()));
        check(&numbers(3 * 5001, DType::BF16, 1), &[3, 5001], 1, DType::F32, |x| Ok(x.clone()));
        check(&numbers(600 * 40, DType::F32, 1), &[600, 40], 1, DType::F32, |x| Ok(x.clone()));
    }

    #[test]
    fn a_large_mean_costs_no_accuracy() {
        for offset in [1e4, -1e6] {
            let noise: Vec<f64> = values(&numbers(4 * 96, DType::F32, 1));
            let x = local(DType::F32, &noise.iter().map(|x| x + offset).collect::<Vec<_>>(), &[4, 96]);
            compare(&[x], 2e-6, |x| {
                let (y, mean, rstd) = kernels::layer_norm(&x[0], 1, None, None, EPS)?;
                Ok(vec![y, mean, rstd])
            });
        }
    }

    #[test]
    fn nan_stays_in_its_row_and_integers_are_errors() {
        let mut data = vec![1.0f32; 12];
        (data[1], data[5], data[8]) = (f32::NAN, f32::INFINITY, 3.0);
        compare(&[Array::from_vec(data, &[3, 4]).unwrap()], 1e-6, |x| {
            let (y, mean, rstd) = kernels::layer_norm(&x[0], 1, None, None, EPS)?;
            let (z, scale) = kernels::rms_norm(&x[0], 1, None, EPS)?;
            Ok(vec![y, rstd, mean.narrow(0, 2, 1)?, z, scale])
        });
        let x = numbers(4, DType::I64, 1).reshape(&[2, 2]).unwrap();
        same_error(from_ref(&x), |x| Ok(kernels::layer_norm(&x[0], 1, None, None, EPS)?.0));
        same_error(&[x], |x| Ok(kernels::rms_norm(&x[0], 1, None, EPS)?.0));
    }
}
