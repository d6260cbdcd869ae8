//! Copies of matrices for [`product`](super::product()): packed panels, and transposes.

use super::Lanes;
use super::lanes::first;
use crate::Num;
use crate::host::matmul::Mat;

/// Copies `depth` by `cols` elements of `b` to rows of complete vectors, padded with zeros.
///
/// # Safety
/// The machine must have AVX-512. The elements of `b` must be readable, and `out` must have space for the rows.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pack<V: Lanes>(b: Mat<V::T>, [depth, cols]: [usize; 2], out: *mut V::T) {
    let width = cols.next_multiple_of(V::N);
    // SAFETY: the caller guarantees that these elements are readable, and that the padded rows are writable.
    unsafe {
        if b.cs == 1 {
            for i in 0..depth {
                for j in (0..cols).step_by(V::N) {
                    let x = V::load(b.row(i).at(j).ptr, first(V::N.min(cols - j)));
                    x.store(out.add(i * width + j), first(V::N));
                }
            }
        } else if b.rs == 1 {
            transpose::<V>(b.ptr, b.cs, [depth, cols], out, width, width);
        } else {
            for i in 0..depth {
                for j in 0..width {
                    let x = if j < cols { *b.row(i).at(j * b.cs).ptr } else { <V::T as Num>::ZERO };
                    out.add(i * width + j).write(x);
                }
            }
        }
    }
}

/// Writes the transpose of `x`, which has column stride 1 and row stride `x_rs`, to `out`, which has row stride `out_rs`. `out` is
/// `rows` by `cols`, and padded with zeros to `width` columns.
///
/// # Safety
/// The machine must have AVX-512. The elements of `x` (`cols` by `rows`) must be readable, those of `out` (`rows` by `width`)
/// writable. `width` is less than a vector longer than `cols`.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose<V: Lanes>(
    x: *const V::T,
    x_rs: usize,
    [rows, cols]: [usize; 2],
    out: *mut V::T,
    out_rs: usize,
    width: usize,
) {
    for col in (0..cols).step_by(V::N) {
        let (lanes, width) = (V::N.min(cols - col), first(V::N.min(width - col)));
        for row in (0..rows).step_by(V::N) {
            let depth = V::N.min(rows - row);
            // SAFETY: the machine has AVX-512, and the lanes that are read and written are inside the matrices.
            unsafe {
                let mut tile = [V::splat(<V::T as Num>::ZERO); 16];
                for (i, vector) in tile.iter_mut().enumerate().take(lanes) {
                    *vector = V::load(x.add((col + i) * x_rs + row), first(depth));
                }
                for step in 0..V::N.trailing_zeros() as usize {
                    for i in (0..V::N).filter(|i| i >> step & 1 == 0) {
                        [tile[i], tile[i + (1 << step)]] = tile[i].exchange(tile[i + (1 << step)], step);
                    }
                }
                for (i, vector) in tile.iter().enumerate().take(depth) {
                    vector.store(out.add((row + i) * out_rs + col), width);
                }
            }
        }
    }
}
