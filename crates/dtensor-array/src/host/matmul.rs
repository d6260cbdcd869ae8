//! Matrix products.
//!
//! Operands are read in place with any strides, so transposes and permuted batches cost no copy. The bias is added while the
//! result is in registers, or the result is initialised with it.
//!
//! [`product`] computes one product: with AVX-512 by our own code, which is faster than gemm if operands are not in the cache or
//! products are small, and otherwise by gemm.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod folded;
mod product;

use std::mem::MaybeUninit;
use std::num::Wrapping;

#[cfg(feature = "cuda")]
pub(crate) use folded::flatten_rows;
pub(crate) use folded::folded;
use gemm_common::Parallelism;
pub(crate) use product::{Mat, product, transpose};
use smallvec::SmallVec;

use super::{fill_array, simd};
use crate::{Array, Elem, Num, Read, Real, num_threads};
use crate::{DType, Element, Error, Result};

/// Products with fewer multiplications than this use one thread.
const THREADED: usize = 1 << 20;
/// The number of rows of a half-precision operand that are widened at a time.
const WIDENED_ROWS: usize = 1024;

/// The sizes and strides of a batch of matrix products.
pub(crate) struct Plan {
    /// The rows, columns and inner size of one product.
    pub(crate) mnk: [usize; 3],
    /// The row and column strides of `a`.
    pub(crate) a: (usize, usize),
    /// The row and column strides of `b`.
    pub(crate) b: (usize, usize),
    /// The size of each batch dim and the strides of `a` and `b` along it, outermost first.
    pub(crate) batch: SmallVec<[(usize, usize, usize); 4]>,
    /// The shape of the result.
    pub(crate) shape: SmallVec<[usize; 6]>,
}

impl Plan {
    pub(crate) fn new(a: &Array, b: &Array) -> Self {
        let (a_dims, a_strides, b_dims, b_strides) = (a.dims(), a.strides(), b.dims(), b.strides());
        let (a_rank, b_rank) = (a_dims.len() - 2, b_dims.len() - 2);
        let (mut m, k, n) = (a_dims[a_rank], a_dims[a_rank + 1], b_dims[b_rank + 1]);
        let (mut a_rs, a_cs) = (a_strides[a_rank], a_strides[a_rank + 1]);
        let rank = a_rank.max(b_rank);
        let mut shape = SmallVec::with_capacity(rank + 2);
        let mut batch: SmallVec<[(usize, usize, usize); 4]> = SmallVec::new();
        // A batch dim that an operand does not have, or that is broadcast, gets stride 0.
        let side = |dims: &[usize], strides: &[usize], rank: usize, from_end: usize| match rank
            .checked_sub(from_end)
        {
            Some(dim) if dims[dim] != 1 => (dims[dim], strides[dim]),
            _ => (1, 0),
        };
        for from_end in (1..=rank).rev() {
            let (a_size, a_stride) = side(a_dims, a_strides, a_rank, from_end);
            let (b_size, b_stride) = side(b_dims, b_strides, b_rank, from_end);
            let size = if a_size == 1 { b_size } else { a_size };
            shape.push(size);
            match batch.last_mut() {
                _ if size == 1 => {}
                Some(outer) if outer.1 == a_stride * size && outer.2 == b_stride * size => {
                    *outer = (outer.0 * size, a_stride, b_stride);
                }
                _ => batch.push((size, a_stride, b_stride)),
            }
        }
        shape.extend([m, n]);
        // Products with the same right operand are merged into one product with all their rows.
        while let Some(&(size, a_stride, 0)) = batch.last() {
            if m == 1 {
                a_rs = a_stride;
            } else if a_stride != a_rs * m {
                break;
            }
            m *= size;
            batch.pop();
        }
        let b = (b_strides[b_rank], b_strides[b_rank + 1]);
        Plan { mnk: [m, n, k], a: (a_rs, a_cs), b, batch, shape }
    }

    /// Calls `f` with the offsets of `a`, `b` and the result for each product, in row-major order of the batch.
    #[inline(always)]
    fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        let count: usize = self.batch.iter().map(|dim| dim.0).product();
        let step = self.mnk[0] * self.mnk[1];
        if count == 1 {
            return f(0, 0, 0);
        }
        let mut index: SmallVec<[usize; 4]> = SmallVec::from_elem(0, self.batch.len());
        let (mut a, mut b) = (0, 0);
        for i in 0..count {
            f(a, b, i * step);
            for (place, &(size, a_stride, b_stride)) in index.iter_mut().zip(&self.batch).rev() {
                *place += 1;
                a += a_stride;
                b += b_stride;
                if *place < size {
                    break;
                }
                *place = 0;
                a -= a_stride * size;
                b -= b_stride * size;
            }
        }
    }

    fn parallelism(&self) -> Parallelism {
        let [m, n, k] = self.mnk;
        if m * n * k < THREADED {
            return Parallelism::None;
        }
        match num_threads() {
            1 => Parallelism::None,
            threads => Parallelism::Rayon(threads),
        }
    }
}

/// Computes the matrix product of `a` `[..., m, k]` and `b` `[..., k, n]`, plus `bias` if given. Batch dims broadcast
/// against each other, and `bias` broadcasts to the result.
pub(crate) fn matmul(a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array> {
    match a.dtype() {
        DType::F32 => real::<f32>(a, b, bias),
        DType::F64 => real::<f64>(a, b, bias),
        DType::BF16 => half::<half::bf16>(a, b, bias),
        DType::F16 => half::<half::f16>(a, b, bias),
        DType::I64 => integer(a, b, bias),
        dtype => Err(Error::DType { op: "matmul", dtype, why: "it needs a floating-point dtype or i64" }),
    }
}

/// Multiplies `f32` or `f64` matrices.
fn real<T: Element<Acc = T> + Real>(a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array> {
    let plan = Plan::new(a, b);
    let (a, b) = (a.read::<T>()?, b.read::<T>()?);
    let bias = bias.map(|bias| Bias::<T>::new(bias, &plan.shape)).transpose()?;
    let [m, n, k] = plan.mnk;
    let parallelism = plan.parallelism();
    let repeated = bias.as_ref().and_then(Bias::repeated);
    // SAFETY: `product` writes every element of the result, also for an inner size of 0. If it adds to the result, the bias is
    // written before.
    unsafe {
        fill_array(&plan.shape, |out: &mut [MaybeUninit<T>]| {
            if let (Some(bias), None) = (&bias, repeated) {
                bias.write(0, out, |out, x| _ = out.write(x));
            }
            let (a, b, out) = (a.data().as_ptr(), b.data().as_ptr(), out.as_mut_ptr().cast::<T>());
            plan.each(|a_at, b_at, at| {
                let a = Mat { ptr: a, rs: plan.a.0, cs: plan.a.1 }.at(a_at);
                let b = Mat { ptr: b, rs: plan.b.0, cs: plan.b.1 }.at(b_at);
                let out = out.wrapping_add(at);
                let added = repeated.or(bias.is_some().then(|| Mat::of_rows(out, n)));
                product([m, n, k], out, n, added, <T as Num>::ONE, a, b, parallelism)
            });
        })
    }
}

/// Multiplies half-precision matrices: computes in single precision and rounds once.
fn half<T: Element<Acc = f32>>(a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array> {
    let plan = Plan::new(a, b);
    let (a, b) = (a.read::<T>()?, b.read::<T>()?);
    let bias = bias.map(|bias| Bias::<T>::new(bias, &plan.shape)).transpose()?;
    let [m, n, k] = plan.mnk;
    let parallelism = plan.parallelism();
    let (mut wide_a, mut wide_b) = (Vec::new(), Vec::new());
    let mut wide_b_at = None;
    let rows = WIDENED_ROWS.min(m);
    let mut wide_out = vec![MaybeUninit::<f32>::uninit(); rows * n];
    let fill = |out: &mut [MaybeUninit<T>]| {
        plan.each(|a_at, b_at, at| {
            // A broadcast operand is widened only once.
            if wide_b_at.replace(b_at) != Some(b_at) {
                widen(b.data(), b_at, [k, n], plan.b, &mut wide_b);
            }
            let wide_b = dense(&wide_b, [k, n], plan.b);
            for row in (0..m).step_by(WIDENED_ROWS) {
                let rows = rows.min(m - row);
                widen(a.data(), a_at + row * plan.a.0, [rows, k], plan.a, &mut wide_a);
                let wide_out = &mut wide_out[..rows * n];
                let at = at + row * n;
                if let Some(bias) = &bias {
                    bias.write(at, wide_out, |out, x| _ = out.write(x.acc()));
                }
                // SAFETY: the scratch arrays hold matrices of these sizes. The bias or gemm initialises every element of the
                // result.
                let wide_out = unsafe {
                    let dst = wide_out.as_mut_ptr().cast::<f32>();
                    let wide_a = dense(&wide_a, [rows, k], plan.a);
                    let added = bias.is_some().then(|| Mat::of_rows(dst, n));
                    product([rows, n, k], dst, n, added, 1.0, wide_a, wide_b, parallelism);
                    std::slice::from_raw_parts(dst, rows * n)
                };
                simd::<T, _>(
                    #[inline(always)]
                    || {
                        for (out, &x) in out[at..at + rows * n].iter_mut().zip(wide_out) {
                            out.write(T::from_acc(x));
                        }
                    },
                );
            }
        });
    };
    // SAFETY: the blocks of rows of all products cover the result.
    unsafe { fill_array(&plan.shape, fill) }
}

/// Returns true if the columns of a matrix with these strides are contiguous.
fn is_column_major((rs, cs): (usize, usize)) -> bool {
    rs == 1 && cs != 1
}

/// Copies a matrix to `out` and widens it. The copy is row-major, or column-major if the matrix is.
pub(crate) fn widen<T: Elem>(
    data: &[T],
    at: usize,
    size: [usize; 2],
    strides: (usize, usize),
    out: &mut Vec<T::Acc>,
) {
    let ([rows, cols], (rs, cs)) =
        if is_column_major(strides) { ([size[1], size[0]], (strides.1, strides.0)) } else { (size, strides) };
    out.clear();
    out.reserve(rows * cols);
    if rows * cols == 0 {
        return;
    }
    simd::<T, _>(
        #[inline(always)]
        || {
            for row in 0..rows {
                let data = &data[at + row * rs..];
                if cs == 1 {
                    out.extend(data[..cols].iter().map(|x| x.acc()));
                } else {
                    out.extend((0..cols).map(|col| data[col * cs].acc()));
                }
            }
        },
    );
}

/// Returns the matrix that [`widen`] has written.
pub(crate) fn dense<A: Copy>(data: &[A], [rows, cols]: [usize; 2], strides: (usize, usize)) -> Mat<A> {
    let ptr = data.as_ptr();
    if is_column_major(strides) { Mat { ptr, rs: 1, cs: rows } } else { Mat { ptr, rs: cols, cs: 1 } }
}

/// Multiplies integer matrices with wrapping arithmetic.
fn integer(a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array> {
    // The inner loop runs along the rows of `b`, so they are made contiguous.
    let b = if b.strides()[b.dims().len() - 1] == 1 { b } else { &b.contiguous()? };
    let plan = Plan::new(a, b);
    let (a, b) = (a.read::<i64>()?, b.read::<i64>()?);
    let bias = bias.map(|bias| Bias::<i64>::new(bias, &plan.shape)).transpose()?;
    let [m, n, k] = plan.mnk;
    let (a, b) = (a.data(), b.data());
    let mut out = vec![Wrapping(0); plan.shape.iter().product()];
    if let Some(bias) = &bias {
        bias.write(0, &mut out, |out, x| *out = Wrapping(x));
    }
    // The number of columns per block: one block of a result row and of the rows of `b` stays in the cache.
    const COLS: usize = 512;
    simd::<i64, _>(
        #[inline(always)]
        || {
            plan.each(|a_at, b_at, at| {
                for col in (0..n).step_by(COLS) {
                    let cols = COLS.min(n - col);
                    for row in 0..m {
                        let out = &mut out[at + row * n + col..][..cols];
                        for inner in 0..k {
                            let x = Wrapping(a[a_at + row * plan.a.0 + inner * plan.a.1]);
                            let b = &b[b_at + inner * plan.b.0 + col..][..cols];
                            for (out, &b) in out.iter_mut().zip(b) {
                                *out += x * Wrapping(b);
                            }
                        }
                    }
                }
            })
        },
    );
    Array::from_vec(out.into_iter().map(|x| x.0).collect(), &plan.shape)
}

/// A bias that is broadcast to the result.
struct Bias<'a, T> {
    read: Read<'a, T>,
    /// The sizes of all dims of the result except the last, and the strides of the bias along them.
    rows: SmallVec<[(usize, usize); 6]>,
    cols: usize,
    /// The stride of the bias along the last dim.
    stride: usize,
}

impl<'a, T: Elem> Bias<'a, T> {
    fn new(bias: &'a Array, shape: &[usize]) -> Result<Self> {
        let read = bias.read::<T>()?;
        let missing = shape.len() - read.dims.len();
        let stride = |dim: usize| match dim.checked_sub(missing) {
            Some(dim) if read.dims[dim] != 1 => read.strides[dim],
            _ => 0,
        };
        let last = shape.len() - 1;
        let rows = (0..last).map(|dim| (shape[dim], stride(dim))).collect();
        let stride = stride(last);
        Ok(Bias { read, rows, cols: shape[last], stride })
    }

    /// Returns the bias as a matrix with equal rows, if all rows of the result have the same bias.
    fn repeated(&self) -> Option<Mat<T>> {
        let equal = self.rows.iter().all(|&(size, stride)| size == 1 || stride == 0);
        let (ptr, cs) = (self.read.data().as_ptr(), self.stride);
        (equal && cs <= 1).then_some(Mat { ptr, rs: 0, cs })
    }

    /// Writes the bias to `out`, which holds complete rows of the result, starting at element `at`.
    fn write<O>(&self, at: usize, out: &mut [O], set: impl Fn(&mut O, T)) {
        if out.is_empty() {
            return;
        }
        let data = self.read.data();
        let same = self.rows.iter().all(|&(size, stride)| size == 1 || stride == 0);
        for (row, out) in out.chunks_exact_mut(self.cols).enumerate() {
            let mut start = 0;
            if !same {
                let mut row = at / self.cols + row;
                for &(size, stride) in self.rows.iter().rev() {
                    start += row % size * stride;
                    row /= size;
                }
            }
            let data = &data[start..];
            match self.stride {
                0 => out.iter_mut().for_each(|out| set(out, data[0])),
                1 => out.iter_mut().zip(&data[..self.cols]).for_each(|(out, &x)| set(out, x)),
                stride => out.iter_mut().zip(data.iter().step_by(stride)).for_each(|(out, &x)| set(out, x)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
