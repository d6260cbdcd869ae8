//! One matrix product, computed in the fastest way for its size and strides.

use gemm_common::Parallelism;

use super::super::simd;
use crate::{Num, Real};

/// Up to this many multiplications, a simple loop is faster than the call of gemm.
const TINY: usize = 2048;
/// As [`TINY`], beside our own products with AVX-512.
#[cfg(target_arch = "x86_64")]
const TINY_512: usize = 1024;
/// The number of elements of a scratch array.
pub(super) const SCRATCH: usize = 1 << 20;

/// A matrix in memory: a pointer and strides in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mat<T> {
    /// The first element.
    pub(crate) ptr: *const T,
    /// The row stride.
    pub(crate) rs: usize,
    /// The column stride.
    pub(crate) cs: usize,
}

impl<T: Copy> Mat<T> {
    /// Creates a matrix with contiguous rows.
    #[inline(always)]
    pub(crate) fn of_rows(ptr: *const T, rs: usize) -> Self {
        Mat { ptr, rs, cs: 1 }
    }

    /// Returns the matrix that starts `elements` elements later.
    #[inline(always)]
    pub(crate) fn at(self, elements: usize) -> Self {
        Mat { ptr: self.ptr.wrapping_add(elements), ..self }
    }

    /// Returns the matrix without the rows before `row`.
    #[inline(always)]
    pub(crate) fn row(self, row: usize) -> Self {
        self.at(row * self.rs)
    }

    /// Returns the matrix as one of elements of another type.
    #[inline(always)]
    pub(super) fn cast<U>(self) -> Mat<U> {
        Mat { ptr: self.ptr.cast(), rs: self.rs, cs: self.cs }
    }

    /// Returns the transpose.
    #[inline(always)]
    pub(crate) fn t(self) -> Self {
        Mat { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }
}

/// Computes `dst = scale × a × b`, or `dst = added + scale × a × b`. `dst` is `m` by `n`, with row stride `dst_rs` and column
/// stride 1. `added` may be `dst`, or a matrix with a column stride of 0 or 1 that does not overlap it.
///
/// # Safety
/// `T` must be `f32` or `f64`. The elements of `a` (`m` by `k`), `b` (`k` by `n`) and `added` (`m` by `n`) must be readable, those
/// of `dst` writable. `dst` must not overlap the operands.
#[allow(clippy::too_many_arguments)] // the BLAS signature
pub(crate) unsafe fn product<T: Real + Default>(
    [m, n, k]: [usize; 3],
    dst: *mut T,
    dst_rs: usize,
    added: Option<Mat<T>>,
    scale: T,
    a: Mat<T>,
    b: Mat<T>,
    parallelism: Parallelism,
) {
    #[cfg(target_arch = "x86_64")]
    if m * n * k > TINY_512 && prefers_avx512([m, n, k], a, b) && pulp::x86::V4::try_new().is_some() {
        macro_rules! call {
            ($V:ident, $T:ty) => {
                super::avx512::product::<std::arch::x86_64::$V>(
                    [m, n, k],
                    dst.cast::<$T>(),
                    dst_rs,
                    added.map(Mat::cast),
                    scale.to_f64() as $T,
                    a.cast(),
                    b.cast(),
                    parallelism,
                )
            };
        }
        // SAFETY: the machine has AVX-512. The caller guarantees the rest, and `T` is one of these two types.
        return unsafe {
            if size_of::<T>() == size_of::<f32>() { call!(__m512, f32) } else { call!(__m512d, f64) }
        };
    }
    // SAFETY: the caller guarantees the same.
    unsafe { product_by_gemm([m, n, k], dst, dst_rs, added, scale, a, b, parallelism) }
}

/// Returns true if our own product with AVX-512 is faster than gemm.
#[cfg(target_arch = "x86_64")]
fn prefers_avx512<T>([m, n, k]: [usize; 3], a: Mat<T>, b: Mat<T>) -> bool {
    // gemm has its own loops for products with a vector, and for a few long sums.
    let (vector, few_sums) = (m == 1 || n == 1, a.cs == 1 && b.rs == 1 && b.cs != 1 && m * n <= 256);
    // It packs the left operand, which repays if each column is read many times and is on pages of its own.
    let far = |stride: usize| stride * size_of::<T>() > 2048;
    let far_columns = a.cs != 1 && far(a.cs) && k > 256 && n > 96;
    // It reads whole rows of the right operand at a time, which is better if they are far apart and read only once.
    let far_rows = b.cs == 1 && far(b.rs) && m < 8;
    !vector && !few_sums && !far_columns && !far_rows
}

/// Computes [`product`] without AVX-512 code of our own.
///
/// # Safety
/// As for [`product`].
#[allow(clippy::too_many_arguments)] // the BLAS signature
pub(super) unsafe fn product_by_gemm<T: Real + Default>(
    [m, n, k]: [usize; 3],
    dst: *mut T,
    dst_rs: usize,
    added: Option<Mat<T>>,
    scale: T,
    a: Mat<T>,
    b: Mat<T>,
    parallelism: Parallelism,
) {
    // SAFETY: the caller's guarantees hold for the blocks passed to the calls below, and the scratch arrays have the right sizes.
    unsafe {
        let accumulate = added.is_some();
        if let Some(added) = added.filter(|added| !std::ptr::eq(added.ptr, dst)) {
            for row in 0..m {
                let (from, to) = (added.row(row), dst.add(row * dst_rs));
                for col in 0..n {
                    to.add(col).write(*from.at(col * added.cs).ptr);
                }
            }
        }
        if m * n * k <= TINY && b.cs == 1 {
            return tiny([m, n, k], dst, dst_rs, accumulate, scale, a, b);
        }
        // gemm is fast only if the rows of the right operand are contiguous, so larger operands are transposed for it.
        if b.cs == 1 || n * k < 16384 || m == 1 || n == 1 {
            return call_gemm([m, n, k], (dst, dst_rs, 1), accumulate, scale, a, b, parallelism);
        }
        if m * (n + k) < n * k {
            // Cheapest is the transposed product, whose right operand is `a`, and then the transpose of the result. `a` is
            // padded with zeros to complete vectors, and the padding is not copied to the result.
            let rows = m.next_multiple_of(16);
            let mut scratch = Vec::new();
            let a = if a.rs == 1 && rows == m { a } else { transpose(a, [m, k], rows, &mut scratch).t() };
            let cols = (SCRATCH / rows).next_multiple_of(64).min(n);
            let mut result = Vec::<T>::with_capacity(rows * cols);
            for col in (0..n).step_by(cols) {
                let (cols, result, b) = (cols.min(n - col), result.as_mut_ptr(), b.at(col * b.cs));
                call_gemm([rows, cols, k], (result, 1, rows), false, scale, a, b, parallelism);
                let (result, dst) = (Mat { ptr: result, rs: rows, cs: 1 }, dst.add(col));
                if accumulate {
                    transpose_with(result, [cols, m], dst, dst_rs, |dst, x| dst.write(*dst + x));
                } else {
                    transpose_with(result, [cols, m], dst, dst_rs, |dst, x| dst.write(x));
                }
            }
        } else {
            let cols = (SCRATCH / k).next_multiple_of(64).min(n);
            let mut scratch = Vec::new();
            for col in (0..n).step_by(cols) {
                let cols = cols.min(n - col);
                let b = transpose(b.at(col * b.cs).t(), [cols, k], cols, &mut scratch);
                call_gemm([m, cols, k], (dst.add(col), dst_rs, 1), accumulate, scale, a, b, parallelism);
            }
        }
    }
}

/// Computes [`product`] by gemm, with any row and column strides of the destination.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn call_gemm<T: Num>(
    [m, n, k]: [usize; 3],
    (dst, dst_rs, dst_cs): (*mut T, usize, usize),
    accumulate: bool,
    scale: T,
    a: Mat<T>,
    b: Mat<T>,
    parallelism: Parallelism,
) {
    // gemm writes columns. To write rows, compute the transposed product.
    if dst_cs < dst_rs {
        // SAFETY: the caller guarantees the same.
        return unsafe {
            call_gemm([n, m, k], (dst, dst_cs, dst_rs), accumulate, scale, b.t(), a.t(), parallelism)
        };
    }
    let stride = |stride: usize| stride as isize;
    macro_rules! call {
        ($gemm:expr, $T:ty) => {
            $gemm(
                m,
                n,
                k,
                dst.cast::<$T>(),
                stride(dst_cs),
                stride(dst_rs),
                accumulate,
                a.ptr.cast(),
                stride(a.cs),
                stride(a.rs),
                b.ptr.cast(),
                stride(b.cs),
                stride(b.rs),
                1.0,
                scale.to_f64() as $T,
                false,
                false,
                false,
                parallelism,
            )
        };
    }
    // SAFETY: the caller guarantees the same, and `T` is one of these two types.
    unsafe {
        if size_of::<T>() == size_of::<f32>() {
            call!(gemm_f32::gemm::f32::get_gemm_fn(), f32);
        } else {
            call!(gemm_f64::gemm::f64::get_gemm_fn(), f64);
        }
    }
}

/// Computes a small [`product`] without gemm. The column stride of `b` must be 1.
///
/// # Safety
/// As for [`product`].
unsafe fn tiny<T: Real + Default>(
    [m, n, k]: [usize; 3],
    dst: *mut T,
    dst_rs: usize,
    accumulate: bool,
    scale: T,
    a: Mat<T>,
    b: Mat<T>,
) {
    #[inline(always)]
    unsafe fn columns<T: Real + Default, const N: usize>(
        k: usize,
        dst: *mut T,
        accumulate: bool,
        scale: T,
        a: Mat<T>,
        b: Mat<T>,
    ) {
        let mut sums = [T::default(); N];
        // SAFETY: the caller of `product` guarantees that `N` columns are in bounds here.
        unsafe {
            for inner in 0..k {
                let x = *a.ptr.add(inner * a.cs);
                let row = b.row(inner).ptr.cast::<[T; N]>().read();
                for i in 0..N {
                    sums[i] = x.mul_add(row[i], sums[i]);
                }
            }
            let dst = dst.cast::<[T; N]>();
            let mut out = if accumulate { dst.read() } else { [T::default(); N] };
            for i in 0..N {
                out[i] = if accumulate { sums[i].mul_add(scale, out[i]) } else { sums[i] * scale };
            }
            dst.write(out);
        }
    }
    simd::<T, _>(
        #[inline(always)]
        || {
            for row in 0..m {
                let (dst, a) = (dst.wrapping_add(row * dst_rs), a.row(row));
                let mut col = 0;
                while col < n {
                    let (dst, b) = (dst.wrapping_add(col), b.at(col));
                    // SAFETY: the columns are inside the matrices.
                    col += unsafe {
                        match n - col {
                            16.. => (columns::<T, 16>(k, dst, accumulate, scale, a, b), 16).1,
                            8.. => (columns::<T, 8>(k, dst, accumulate, scale, a, b), 8).1,
                            4.. => (columns::<T, 4>(k, dst, accumulate, scale, a, b), 4).1,
                            _ => (columns::<T, 1>(k, dst, accumulate, scale, a, b), 1).1,
                        }
                    };
                }
            }
        },
    )
}

/// Writes the transpose of a matrix to `scratch` and returns it. Its rows are contiguous and padded with zeros to `width`.
///
/// # Safety
/// The elements of `x` must be readable.
pub(crate) unsafe fn transpose<T: Real + Default>(
    x: Mat<T>,
    size: [usize; 2],
    width: usize,
    scratch: &mut Vec<T>,
) -> Mat<T> {
    scratch.clear();
    scratch.reserve(width * size[1]);
    if width > size[0] {
        scratch.resize(width * size[1], T::default());
    }
    let dst = scratch.as_mut_ptr();
    // SAFETY: the scratch array is large enough, and the caller guarantees the rest.
    unsafe { transpose_with(x, size, dst, width, |dst, x| dst.write(x)) };
    Mat { ptr: dst, rs: width, cs: 1 }
}

/// Calls `set` with a pointer to each element of the `cols` by `rows` matrix `dst`, and the element of `x` that belongs there.
///
/// # Safety
/// The elements of `x` (`rows` by `cols`) must be readable, and those of `dst` valid for what `set` does with them.
unsafe fn transpose_with<T: Real + Default>(
    x: Mat<T>,
    [rows, cols]: [usize; 2],
    dst: *mut T,
    dst_rs: usize,
    set: impl Fn(*mut T, T),
) {
    const TILE: usize = 16;
    simd::<T, _>(
        #[inline(always)]
        || {
            for row in (0..rows).step_by(TILE) {
                for col in (0..cols).step_by(TILE) {
                    let x = x.at(row * x.rs + col * x.cs);
                    let dst = dst.wrapping_add(col * dst_rs + row);
                    // SAFETY: the tile is inside both matrices.
                    unsafe {
                        if x.cs == 1 && rows - row >= TILE && cols - col >= TILE {
                            // Goes through a contiguous tile, so that memory is accessed only in complete cache lines. Row
                            // strides are often powers of two, and such lines evict each other.
                            let mut tile = [[T::default(); TILE]; TILE];
                            for (i, row) in tile.iter_mut().enumerate() {
                                *row = x.row(i).ptr.cast::<[T; TILE]>().read();
                            }
                            for j in 0..TILE {
                                let dst = dst.add(j * dst_rs);
                                for (i, row) in tile.iter().enumerate() {
                                    set(dst.add(i), row[j]);
                                }
                            }
                        } else {
                            for j in 0..TILE.min(cols - col) {
                                for i in 0..TILE.min(rows - row) {
                                    set(dst.add(j * dst_rs + i), *x.ptr.add(i * x.rs + j * x.cs));
                                }
                            }
                        }
                    }
                }
            }
        },
    )
}
