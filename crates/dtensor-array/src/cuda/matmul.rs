//! Matrix products: by the driver's library if it has one, otherwise by a kernel of this project.
//!
//! Operands whose rows or columns are contiguous are read in place, and so are broadcast batches.

use super::driver::{Address, Product};
use super::kernel::{file, units};
use super::{Stream, stream_of};
use crate::host::matmul::{Plan, flatten_rows};
use crate::{Array, DType, Error, Result};

/// The dtypes of matrix products.
const MULTIPLIED: &[DType] = &[DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

units! {
    static MATMUL: "matmul", [file!("matmul.cuh")], MULTIPLIED;
}

/// The rows and columns of the result that a block computes, and its threads. As in `kernels/matmul.cuh`.
const TILE: usize = 64;
const THREADS: u32 = 256;
/// The most products of one launch.
const MOST_PRODUCTS: usize = 65535;

/// Must match `Matmul` in `kernels/matmul.cuh`.
#[repr(C)]
struct Args {
    a: Address,
    b: Address,
    out: Address,
    bias: Address,
    mnk: [u64; 3],
    a_strides: [u64; 3],
    b_strides: [u64; 3],
    out_stride: u64,
    tiles: u64,
    accumulates: u32,
}

pub(crate) fn matmul(a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array> {
    let dtype = a.dtype();
    if dtype == DType::U8 {
        return Err(Error::DType { op: "matmul", dtype, why: "it needs a floating-point dtype or i64" });
    }
    for other in std::iter::once(b).chain(bias) {
        if other.dtype() != dtype {
            return Err(Error::DTypeMismatch { op: "matmul", left: dtype, right: other.dtype() });
        }
    }
    let stream = stream_of(a)?;
    let plan = Plan::new(a, b);
    let [m, n, k] = plan.mnk;
    // The library adds a row of numbers while it writes the result. Other biases are written first.
    let (row, first) = match bias {
        Some(bias) if is_row(bias, n) && k > 0 && dtype != DType::F64 => (Some(bias), None),
        bias => (None, bias),
    };
    let out = match first {
        Some(bias) => super::copy::copy(&bias.expand(&plan.shape)?)?,
        None => stream.empty(dtype, &plan.shape)?,
    };
    if out.numel() == 0 {
        return Ok(out);
    }
    if k == 0 {
        if first.is_none() {
            let bytes = out.numel() * dtype.size();
            // SAFETY: the array has as many bytes.
            unsafe { stream.gpu.driver.set_zero(stream.read(&out)?, bytes, stream.handle)? };
        }
        return Ok(out);
    }
    // The library reads matrices whose rows or columns are contiguous.
    let (mut a, mut b, mut plan) = (a.clone(), b.clone(), plan);
    if dtype != DType::I64 {
        let copy_a = layout([m, k], plan.a).is_none();
        let copy_b = layout([k, n], plan.b).is_none();
        if copy_a || copy_b {
            a = if copy_a { dense(&a)? } else { a };
            b = if copy_b { dense(&b)? } else { b };
            plan = Plan::new(&a, &b);
        }
    }
    let addresses = [stream.read(&a)?, stream.read(&b)?, stream.read(&out)?];
    let bias = row.map(|bias| stream.read(bias)).transpose()?;
    run(stream, dtype, &plan, addresses, bias, first.is_some())?;
    Ok(out)
}

pub(crate) fn folded(a: &Array, b: &Array, out: DType) -> Result<Array> {
    let (a, b) = (flatten_rows(a)?.transpose(0, 1)?, flatten_rows(b)?);
    if out != a.dtype()
        && let Some(out) = wide(&a, &b)?
    {
        return Ok(out);
    }
    super::cast::cast(&matmul(&a, &b, None)?, out)
}

/// Computes the product of two matrices in half precision in `F32`, if the driver's library can.
fn wide(a: &Array, b: &Array) -> Result<Option<Array>> {
    let (stream, dtype, plan) = (stream_of(a)?, a.dtype(), Plan::new(a, b));
    let [m, n, k] = plan.mnk;
    let sides = layout([m, k], plan.a).zip(layout([k, n], plan.b));
    let Some((a_side, b_side)) = sides.filter(|_| dtype == b.dtype() && dtype.size() == 2 && m * n * k > 0)
    else {
        return Ok(None);
    };
    let out = stream.empty(DType::F32, &[m, n])?;
    let addresses = [stream.read(a)?, stream.read(b)?, stream.read(&out)?];
    let product = Product {
        dtype,
        out: DType::F32,
        mnk: plan.mnk,
        a: a_side,
        b: b_side,
        batch: 1,
        batch_strides: [0; 3],
        has_bias: false,
        accumulates: false,
        alignments: addresses.map(|address| 1 << address.trailing_zeros().min(8)),
    };
    let [a, b, to] = addresses;
    stream.gpu.enter()?;
    // SAFETY: the plan has the sizes and strides of the matrices, and the result has `m · n` elements.
    let is_done = unsafe { stream.gpu.driver.multiply(&product, [a, b, to, 0], stream)? };
    Ok(is_done.then_some(out))
}

/// Returns true if a bias is the same contiguous row of `n` numbers for each row of the result.
fn is_row(bias: &Array, n: usize) -> bool {
    let (Some(&size), Some(&stride)) = (bias.dims().last(), bias.strides().last()) else { return false };
    bias.numel() == n && size == n && (stride == 1 || n == 1)
}

/// Copies an array to contiguous memory, except that leading dims that are broadcast stay so.
fn dense(x: &Array) -> Result<Array> {
    let mut part = x.clone();
    for dim in 0..x.dims().len() - 2 {
        if x.strides()[dim] == 0 && x.dims()[dim] > 1 {
            part = part.narrow(dim, 0, 1)?;
        }
    }
    part.contiguous()?.expand(x.dims())
}

/// Returns whether the rows (else the columns) of a matrix are contiguous, and the stride between them. Returns `None` if neither
/// are.
fn layout([rows, columns]: [usize; 2], (row, column): (usize, usize)) -> Option<(bool, usize)> {
    if (columns == 1 || column == 1) && (rows == 1 || row >= columns) {
        return Some((true, if rows == 1 { columns } else { row }));
    }
    let by_columns = (rows == 1 || row == 1) && (columns == 1 || column >= rows);
    by_columns.then_some((false, if columns == 1 { rows } else { column }))
}

/// Computes the products of a plan, which has at least one element to compute and an inner size above 0.
fn run(
    stream: &Stream,
    dtype: DType,
    plan: &Plan,
    [a, b, out]: [Address; 3],
    bias: Option<Address>,
    accumulates: bool,
) -> Result<()> {
    let [m, n, k] = plan.mnk;
    // The largest dim of the batch is computed at once, and the others one after another.
    let largest = (0..plan.batch.len()).max_by_key(|&dim| plan.batch[dim].0);
    let at_once = largest.map_or((1, 0, 0), |dim| plan.batch[dim]);
    let out_step = |dim: usize| m * n * plan.batch[dim + 1..].iter().map(|dim| dim.0).product::<usize>();
    let at_once_out = largest.map_or(m * n, out_step);
    let others: Vec<usize> = (0..plan.batch.len()).filter(|&dim| Some(dim) != largest).collect();
    let count: usize = others.iter().map(|&dim| plan.batch[dim].0).product();
    let sides = layout([m, k], plan.a).zip(layout([k, n], plan.b));
    for i in 0..count {
        let (mut rest, mut offsets) = (i, [0; 3]);
        for &dim in others.iter().rev() {
            let (size, a_stride, b_stride) = plan.batch[dim];
            let index = rest % size;
            rest /= size;
            for (offset, stride) in offsets.iter_mut().zip([a_stride, b_stride, out_step(dim)]) {
                *offset += index * stride;
            }
        }
        for from in (0..at_once.0).step_by(MOST_PRODUCTS) {
            let strides = [at_once.1, at_once.2, at_once_out];
            let batch = MOST_PRODUCTS.min(at_once.0 - from);
            let mut addresses = [a, b, out];
            for ((address, offset), stride) in addresses.iter_mut().zip(offsets).zip(strides) {
                *address += ((offset + from * stride) * dtype.size()) as Address;
            }
            let is_done = match sides {
                Some((a_side, b_side)) if dtype != DType::I64 => {
                    let product = Product {
                        dtype,
                        out: dtype,
                        mnk: plan.mnk,
                        a: a_side,
                        b: b_side,
                        batch,
                        batch_strides: strides,
                        has_bias: bias.is_some(),
                        accumulates,
                        alignments: addresses.map(|address| 1 << address.trailing_zeros().min(8)),
                    };
                    let [a, b, out] = addresses;
                    stream.gpu.enter()?;
                    // SAFETY: the plan has the sizes and strides of the arrays, and a bias has `n` elements.
                    unsafe { stream.gpu.driver.multiply(&product, [a, b, out, bias.unwrap_or(0)], stream)? }
                }
                _ => false,
            };
            if !is_done {
                own(stream, dtype, plan, addresses, bias, accumulates, (batch, strides))?;
            }
        }
    }
    Ok(())
}

/// Computes some products of a plan with the project's own kernel.
fn own(
    stream: &Stream,
    dtype: DType,
    plan: &Plan,
    [a, b, out]: [Address; 3],
    bias: Option<Address>,
    accumulates: bool,
    (batch, strides): (usize, [usize; 3]),
) -> Result<()> {
    let [m, n, _] = plan.mnk;
    let wide = |strides: [usize; 3]| strides.map(|stride| stride as u64);
    let argument = Args {
        a,
        b,
        out,
        bias: bias.unwrap_or(0),
        mnk: wide(plan.mnk),
        a_strides: wide([plan.a.0, plan.a.1, strides[0]]),
        b_strides: wide([plan.b.0, plan.b.1, strides[1]]),
        out_stride: strides[2] as u64,
        tiles: n.div_ceil(TILE) as u64,
        accumulates: accumulates.into(),
    };
    let grid = [(m.div_ceil(TILE) * n.div_ceil(TILE)) as u32, batch as u32, 1];
    // SAFETY: the plan has the sizes and strides of the arrays, and a bias has `n` elements.
    unsafe { stream.launch(&MATMUL, dtype, "matmul", grid, THREADS, 0, &argument) }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, rounding, same_error};
    use crate::kernels::matmul::{folded, matmul};
    use crate::{Array, DType, Result};

    const DTYPES: [DType; 5] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64];

    fn sample(dtype: DType, shape: &[usize], seed: usize) -> Array {
        numbers(shape.iter().product(), dtype, seed).reshape(shape).unwrap()
    }

    /// Compares the product of views of two arrays, with and without a bias.
    fn check(
        dtype: DType,
        [a, b]: [&[usize]; 2],
        bias: Option<&[usize]>,
        views: impl Fn(&Array, &Array) -> Result<[Array; 2]>,
    ) {
        let mut inputs = vec![sample(dtype, a, 1), sample(dtype, b, 2)];
        inputs.extend(bias.map(|bias| sample(dtype, bias, 3)));
        // Sums of up to a few hundred products, each up to 16.
        compare(&inputs, 30.0 * rounding(dtype), |x| {
            let [a, b] = views(&x[0], &x[1])?;
            Ok(vec![matmul(&a, &b, x.get(2))?])
        });
    }

    fn plain(a: &Array, b: &Array) -> Result<[Array; 2]> {
        Ok([a.clone(), b.clone()])
    }

    #[test]
    fn sizes_and_orientations() {
        for dtype in DTYPES {
            for (m, n, k) in [(1, 1, 1), (3, 5, 2), (1, 17, 9), (17, 1, 9), (33, 65, 17), (70, 130, 66)] {
                for bias in [None, Some(&[n][..])] {
                    check(dtype, [&[m, k], &[k, n]], bias, plain);
                    check(dtype, [&[k, m], &[n, k]], bias, |a, b| {
                        Ok([a.transpose(0, 1)?, b.transpose(0, 1)?])
                    });
                }
            }
        }
    }

    #[test]
    fn strides() {
        for dtype in DTYPES {
            // Attention heads: [B, S, H, D] viewed as [B, H, S, D].
            check(dtype, [&[2, 7, 3, 5], &[2, 9, 3, 5]], None, |q, k| {
                Ok([q.transpose(1, 2)?, k.transpose(1, 2)?.transpose(2, 3)?])
            });
            // Views with an offset, a column stride above 1, broadcast rows and columns.
            check(dtype, [&[8, 9], &[9, 8]], None, |a, b| {
                Ok([a.narrow(0, 2, 5)?.narrow(1, 3, 6)?, b.narrow(0, 1, 6)?.narrow(1, 4, 3)?])
            });
            check(dtype, [&[5, 6, 4], &[6, 4, 3]], None, |a, b| {
                Ok([a.narrow(2, 1, 1)?.squeeze(2)?, b.narrow(2, 2, 1)?.squeeze(2)?])
            });
            check(dtype, [&[1, 6], &[6, 1]], None, |a, b| Ok([a.expand(&[5, 6])?, b.expand(&[6, 4])?]));
            check(dtype, [&[3, 1, 6], &[6, 4]], None, |a, b| {
                Ok([a.expand(&[3, 5, 6])?, b.expand(&[3, 6, 4])?])
            });
            check(dtype, [&[1, 1, 6], &[1, 6, 1]], None, |a, b| {
                Ok([a.expand(&[3, 5, 6])?, b.expand(&[3, 6, 4])?])
            });
        }
    }

    #[test]
    fn batches_and_biases() {
        for dtype in DTYPES {
            let shapes: [[&[usize]; 2]; 8] = [
                [&[4, 3, 5], &[5, 2]],
                [&[3, 5], &[4, 5, 2]],
                [&[4, 3, 5], &[4, 5, 2]],
                [&[4, 1, 3, 5], &[2, 5, 2]],
                [&[2, 1, 3, 5], &[1, 3, 5, 2]],
                [&[3, 4, 3, 5], &[3, 1, 5, 2]],
                [&[2, 3, 1, 3, 5], &[3, 4, 5, 2]],
                [&[1, 1, 3, 5], &[1, 5, 2]],
            ];
            for shapes in shapes {
                check(dtype, shapes, None, plain);
                check(dtype, shapes, Some(&[2]), plain);
            }
            let biases: [&[usize]; 7] = [&[6], &[1], &[], &[4, 6], &[4, 1], &[3, 1, 1], &[2, 3, 1, 6]];
            for bias in biases {
                check(dtype, [&[2, 3, 4, 5], &[5, 6]], Some(bias), plain);
            }
        }
    }

    #[test]
    fn empty_operands() {
        for dtype in DTYPES {
            let shapes: [[&[usize]; 2]; 5] = [
                [&[0, 3], &[3, 2]],
                [&[2, 3], &[3, 0]],
                [&[2, 0], &[0, 3]],
                [&[0, 2, 3], &[0, 3, 2]],
                [&[2, 2, 0], &[2, 0, 4]],
            ];
            for [a, b] in shapes {
                check(dtype, [a, b], None, plain);
                check(dtype, [a, b], Some(&b[b.len() - 1..]), plain);
                check(dtype, [a, b], Some(&[1]), plain);
            }
        }
    }

    #[test]
    fn folded_products() {
        for dtype in DTYPES {
            let leads: [&[usize]; 6] = [&[3, 2], &[2, 3, 40], &[0, 4], &[5], &[], &[1, 30]];
            for lead in leads {
                let of = |width: usize, seed| {
                    sample(dtype, &lead.iter().copied().chain([width]).collect::<Vec<_>>(), seed)
                };
                compare(&[of(9, 1), of(7, 2)], 30.0 * rounding(dtype), |x| {
                    let widest = if dtype.size() == 2 { DType::F32 } else { dtype };
                    Ok(vec![folded(&x[0], &x[1], dtype)?, folded(&x[0], &x[1], widest)?])
                });
            }
            let x = [sample(dtype, &[2, 5, 8], 1), sample(dtype, &[2, 8, 3], 2)];
            compare(&x, 30.0 * rounding(dtype), |x| Ok(vec![folded(&x[0].transpose(1, 2)?, &x[1], dtype)?]));
        }
    }

    #[test]
    fn special_values_and_errors() {
        let nan = Array::from_vec(vec![f32::NAN, 1.0, f32::INFINITY, 0.0], &[2, 2]).unwrap();
        let zeros = Array::from_vec(vec![0f32; 4], &[2, 2]).unwrap();
        compare(&[nan.clone(), zeros.clone()], 0.0, |x| {
            Ok(vec![matmul(&x[0], &x[1], None)?, matmul(&x[1], &x[0], None)?])
        });
        let big = Array::from_vec(vec![i64::MAX, 3], &[1, 2]).unwrap();
        let other = Array::from_vec(vec![2i64, 5], &[2, 1]).unwrap();
        compare(&[big, other], 0.0, |x| Ok(vec![matmul(&x[0], &x[1], None)?]));
        let bytes = sample(DType::U8, &[2, 2], 1);
        same_error(&[bytes], |x| matmul(&x[0], &x[0], None));
    }
}
