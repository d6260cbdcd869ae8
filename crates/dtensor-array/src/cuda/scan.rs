//! Cumulative sums along a dim. If there are few lines, several blocks share each line: they compute the sum of each chunk, then
//! the running sums over chunks, then the running sums of the elements.

use super::driver::Address;
use super::kernel::{ALL, file, units};
use super::{grid_for, stream_of};
use crate::host::rows::split;
use crate::{Array, DType, Result};

units! {
    static SCAN: "scan", [file!("scan.cuh")], ALL;
}

const THREADS: usize = 256;
const WARP: usize = 32;

/// Must match `Scan` in `kernels/scan.cuh`.
#[repr(C)]
struct Scan {
    x: Address,
    out: Address,
    sums: Address,
    lines: u64,
    n: u64,
    inner: u64,
    splits: u64,
    chunk: u64,
    team: u32,
    vector: u32,
    is_reverse: u64,
}

pub(crate) fn cumsum(x: &Array, dim: usize, reverse: bool) -> Result<Array> {
    let stream = stream_of(x)?;
    let dtype = x.dtype();
    let out = stream.empty(if dtype == DType::U8 { DType::I64 } else { dtype }, x.dims())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let x = x.contiguous()?;
    let (outer, n, inner) = split(x.dims(), dim);
    let lines = outer * inner;
    let (from, to) = (stream.read(&x)?, stream.read(&out)?);
    let vector = 16 / dtype.size();
    let is_wide = inner == 1 && n.is_multiple_of(vector) && from % 16 == 0 && to % 16 == 0;
    let vector = if is_wide { vector } else { 1 };
    let gpu = stream.gpu;
    // Enough blocks or threads for all multiprocessors, and chunks that are worth a pass of their own.
    let wanted = match inner {
        1 => (gpu.info.multiprocessors * 8 / lines).min(n / (THREADS * 16)),
        _ => (gpu.info.multiprocessors * 1024 / lines).min(n / 64),
    };
    let chunk = n.div_ceil(wanted.max(1)).next_multiple_of(vector);
    let splits = n.div_ceil(chunk);
    let team = if splits == 1 && n <= WARP * vector * 8 { WARP } else { THREADS };
    let sums_dtype = if dtype.is_int() { DType::I64 } else { DType::F64 };
    let sums = stream.empty(sums_dtype, &[if splits > 1 { lines } else { 0 }, splits])?;
    let mut args = Scan {
        x: from,
        out: to,
        sums: stream.read(&sums)?,
        lines: lines as u64,
        n: n as u64,
        inner: inner as u64,
        splits: splits as u64,
        chunk: chunk as u64,
        team: team as u32,
        vector: vector as u32,
        is_reverse: reverse.into(),
    };
    let [sum, scan] = if inner == 1 { ["sum_rows", "scan_rows"] } else { ["sum_columns", "scan_columns"] };
    let jobs = lines * splits * if inner == 1 { team } else { 1 };
    let grid = grid_for(gpu, jobs, THREADS as u32, 1);
    let launch = |name: &str, args: &Scan| {
        // SAFETY: both arrays are contiguous with `lines · n` elements, and there is a sum for each chunk if there are several.
        unsafe { stream.launch(&SCAN, dtype, name, grid, THREADS as u32, 0, args) }
    };
    if splits > 1 {
        launch(sum, &args)?;
        let running = cumsum(&sums, 1, false)?;
        args.sums = stream.read(&running)?;
        launch(scan, &args)?;
    } else {
        launch(scan, &args)?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::super::testing::{compare, numbers, rounding};
    use super::*;
    use crate::kernels::scan::cumsum;

    fn check(x: &Array, view: impl Fn(&Array) -> Result<Array>) {
        // Long sums lose a few bits of `f64`, and are rounded once.
        let tolerance = 2.0 * rounding(x.dtype()).max(if x.dtype().is_int() { 0.0 } else { 1e-11 });
        compare(from_ref(x), tolerance, |x| {
            let x = view(&x[0])?;
            let mut results = vec![];
            for dim in 0..x.dims().len().max(1) {
                results.extend([cumsum(&x, dim, false)?, cumsum(&x, dim, true)?]);
            }
            Ok(results)
        });
    }

    #[test]
    fn any_dim_of_any_layout() {
        for dtype in DType::ALL {
            for shape in
                [&[][..], &[1], &[0], &[300], &[5, 7], &[3, 256], &[2, 3, 40], &[2, 0, 3], &[4, 1040]]
            {
                let x = numbers(shape.iter().product(), dtype, 1);
                check(&x, |x| x.reshape(shape));
                if shape.len() > 1 {
                    check(&x, |x| x.reshape(shape)?.transpose(0, shape.len() - 1));
                    check(&x, |x| x.reshape(shape)?.narrow(0, 1, 1));
                }
            }
        }
    }

    #[test]
    fn long_lines_and_many_lines() {
        for (dtype, shape) in [
            (DType::F32, [1, 40_000]),
            (DType::F64, [2, 20_001]),
            (DType::U8, [1, 70_016]),
            (DType::BF16, [3, 9000]),
            (DType::F32, [20_000, 3]),
            (DType::I64, [70_000, 1]),
        ] {
            check(&numbers(shape[0] * shape[1], dtype, 2), |x| x.reshape(&shape));
        }
    }

    #[test]
    fn integers_wrap_and_nan_stays() {
        check(&Array::from_vec(vec![i64::MAX, 1, 5, i64::MIN, -1], &[5]).unwrap(), |x| Ok(x.clone()));
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut data = vec![1.0; 200];
            data[70] = odd;
            check(&Array::from_vec(data, &[200]).unwrap(), |x| Ok(x.clone()));
        }
    }
}
