//! Matrix products with AVX-512.
//!
//! Vectors run along the rows of the right operand. Its rows are packed panel by panel into the L2 cache, unless they are close
//! together in memory. The left operand is read in place, one element at a time, with any strides: the rows of a tile stay in the
//! L1 cache for all panels.
//!
//! Each element is a sum over blocks of the inner dim, and each block is a chain of fused multiplications and additions. Blocks
//! depend on the inner size only, so the bits of an element do not depend on the number of rows and columns.

mod lanes;
mod pack;
mod tile;

use gemm_common::Parallelism;
pub(super) use lanes::Lanes;
use pack::{pack, transpose};
use tile::{COLS, ROWS, TileArgs, Tiles};

use super::product::{Mat, SCRATCH};

/// The number of bytes of a row in a block of the inner dim: 512 elements of `f32`, 256 of `f64`.
const BLOCK: usize = 2 << 10;
/// The number of bytes of packed panels, which stay in the L2 cache.
const PACKED: usize = 768 << 10;
/// A block of the right operand within this many bytes is not packed.
const SMALL: usize = 48 << 10;
/// The right operand is not packed if its rows are this many bytes apart, or less.
const CLOSE: usize = 1 << 10;
/// From this number of rows of the result on, packing the right operand repays.
const MANY_ROWS: usize = 64;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

/// Computes `dst = scale × a × b`, or `dst = added + scale × a × b`. `dst` is `m` by `n`, with row stride `dst_rs` and column
/// stride 1. `added` may be `dst`, or a matrix with a column stride of 0 or 1 that does not overlap it.
///
/// # Safety
/// The machine must have AVX-512. The elements of `a` (`m` by `k`), `b` (`k` by `n`) and `added` (`m` by `n`) must be readable,
/// those of `dst` writable. `dst` must not overlap the operands.
#[allow(clippy::too_many_arguments)] // the BLAS signature
pub(super) unsafe fn product<V: Tiles>(
    [m, n, k]: [usize; 3],
    dst: *mut V::T,
    dst_rs: usize,
    added: Option<Mat<V::T>>,
    scale: V::T,
    a: Mat<V::T>,
    b: Mat<V::T>,
    parallelism: Parallelism,
) {
    // SAFETY: the caller guarantees the same, and the scratch matrix has a row for each column of the block.
    unsafe {
        if b.cs == 1 || b.rs != 1 || m * (n + k) >= n * k {
            return in_parts::<V>([m, n, k], dst, dst_rs, added, scale, a, b, parallelism);
        }
        // Cheaper than to transpose `b` is the transposed product, whose right operand is `a`, and then the transpose of the
        // result.
        let cols = (SCRATCH / m).next_multiple_of(64).min(n);
        let mut scratch = Vec::<V::T>::with_capacity(cols * m);
        let result = scratch.as_mut_ptr();
        for col in (0..n).step_by(cols) {
            let (cols, b, dst) = (cols.min(n - col), b.at(col * b.cs), dst.add(col));
            let added = added.map(|added| added.at(col * added.cs).t()).map(|added| {
                if added.cs <= 1 {
                    return added;
                }
                transpose::<V>(added.ptr, added.cs, [cols, m], result, m, m);
                Mat { ptr: result, rs: m, cs: 1 }
            });
            in_parts::<V>([cols, m, k], result, m, added, scale, b.t(), a.t(), parallelism);
            transpose::<V>(result, m, [m, cols], dst, dst_rs, cols);
        }
    }
}

/// Pointers that several threads may use.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T, Option<Mat<T>>, Mat<T>, Mat<T>);

// SAFETY: the threads read the operands, and each writes its own part of the result.
unsafe impl<T> Sync for Shared<T> {}

/// Computes [`product`] on several threads: each computes some columns, or some rows.
///
/// # Safety
/// As for [`product`].
#[allow(clippy::too_many_arguments)] // the BLAS signature
unsafe fn in_parts<V: Tiles>(
    [m, n, k]: [usize; 3],
    dst: *mut V::T,
    dst_rs: usize,
    added: Option<Mat<V::T>>,
    scale: V::T,
    a: Mat<V::T>,
    b: Mat<V::T>,
    parallelism: Parallelism,
) {
    let threads = match parallelism {
        // SAFETY: the caller guarantees the same.
        Parallelism::None => return unsafe { blocks::<V>([m, n, k], dst, dst_rs, added, scale, a, b) },
        Parallelism::Rayon(threads) => threads,
    };
    let [rows, cols] = match n >= m {
        true => [m, n.div_ceil(threads).next_multiple_of(COLS * V::N)],
        false => [m.div_ceil(threads).next_multiple_of(ROWS), n],
    };
    let shared = Shared(dst, added, a, b);
    gemm_common::gemm::par_for_each(threads, |part| {
        let shared = &shared;
        let &Shared(dst, added, a, b) = shared;
        let [row, col] = if n >= m { [0, part * cols] } else { [part * rows, 0] };
        if row >= m || col >= n {
            return;
        }
        let size = [rows.min(m - row), cols.min(n - col), k];
        let dst = dst.wrapping_add(row * dst_rs + col);
        let added = added.map(|added| added.at(row * added.rs + col * added.cs));
        // SAFETY: the part is inside the matrices, and no other thread writes to it.
        unsafe { blocks::<V>(size, dst, dst_rs, added, scale, a.row(row), b.at(col * b.cs)) }
    });
}

/// Returns the number of vectors and of columns of the next panel, if `left` columns are left.
#[inline(always)]
fn panel<V: Lanes>(left: usize) -> (usize, usize) {
    let vectors = left.div_ceil(V::N);
    // Two panels of nearly the same width are faster than a full and a very narrow one.
    let vectors = if vectors < 2 * COLS { vectors.div_ceil(vectors.div_ceil(COLS)) } else { COLS };
    (vectors, (vectors * V::N).min(left))
}

/// Computes [`product`] block by block on one thread.
///
/// # Safety
/// As for [`product`].
unsafe fn blocks<V: Tiles>(
    [m, n, k]: [usize; 3],
    dst: *mut V::T,
    dst_rs: usize,
    added: Option<Mat<V::T>>,
    scale: V::T,
    a: Mat<V::T>,
    b: Mat<V::T>,
) {
    if m == 0 || n == 0 {
        return;
    }
    let depth = k.div_ceil(k.div_ceil(BLOCK / size_of::<V::T>()).max(1)).max(1);
    let row_bytes = b.rs * size_of::<V::T>();
    let packs = b.cs != 1 || (m >= MANY_ROWS && row_bytes > CLOSE && depth * row_bytes > SMALL);
    // Packed panels are distributed evenly among blocks of columns.
    let panels = n.div_ceil(COLS * V::N);
    let most = (PACKED / (depth * COLS * size_of::<Line>())).max(1);
    let width = if packs { panels.div_ceil(panels.div_ceil(most)) * COLS * V::N } else { n };
    // Complete vectors are read, so the last panel is packed unless it consists of such.
    let in_place = |cols: usize| !packs && cols.is_multiple_of(V::N);
    let packed_lines = match packs {
        true => depth * width.min(n).div_ceil(V::N),
        false if n.is_multiple_of(V::N) => 0,
        false => depth * COLS,
    };
    let mut scratch = Vec::<Line>::with_capacity(packed_lines);
    let packed = scratch.as_mut_ptr().cast::<V::T>();
    let mut inner = 0;
    loop {
        let depth = depth.min(k - inner);
        let added = if inner == 0 { added } else { Some(Mat { ptr: dst.cast_const(), rs: dst_rs, cs: 1 }) };
        for start in (0..n).step_by(width) {
            let width = width.min(n - start);
            let b = b.at(inner * b.rs + start * b.cs);
            let (mut col, mut to) = (0, packed);
            while col < width {
                let (vectors, cols) = panel::<V>(width - col);
                if !in_place(cols) {
                    // SAFETY: the panel is inside the matrix, and the scratch array has space for all panels that are packed.
                    unsafe { pack::<V>(b.at(col * b.cs), [depth, cols], to) };
                    to = to.wrapping_add(depth * vectors * V::N);
                }
                col += cols;
            }
            let (mut row, mut tiles) = (0, m.div_ceil(ROWS));
            while row < m {
                // Tiles of nearly the same height.
                let rows = (m - row).div_ceil(tiles);
                tiles -= 1;
                let a = a.at(row * a.rs + inner * a.cs);
                let (mut col, mut from) = (0, packed.cast_const());
                while col < width {
                    let (vectors, cols) = panel::<V>(width - col);
                    let in_place = in_place(cols);
                    let args = TileArgs {
                        depth,
                        a,
                        b: if in_place { b.at(col).ptr } else { from },
                        b_rs: if in_place { b.rs } else { vectors * V::N },
                        dst: dst.wrapping_add(row * dst_rs + start + col),
                        dst_rs,
                        added: added.map(|x| x.at(row * x.rs + (start + col) * x.cs)),
                        scale,
                        last: cols - (vectors - 1) * V::N,
                    };
                    // SAFETY: the tile has `rows` rows and `cols` columns, which are inside the matrices.
                    unsafe { V::TILES[rows - 1][vectors - 1](&args) };
                    if !in_place {
                        from = from.wrapping_add(depth * vectors * V::N);
                    }
                    col += cols;
                }
                row += rows;
            }
        }
        inner += depth;
        if inner >= k {
            return;
        }
    }
}
