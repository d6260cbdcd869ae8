//! The inner loop of [`product`](super::product()): a tile of the result, whose sums are in registers.

use std::arch::asm;
use std::arch::x86_64::{__m512, __m512d, _MM_HINT_T0, _mm_prefetch};

use super::Lanes;
use super::lanes::first;
use crate::Num;
use crate::host::matmul::Mat;

/// The number of rows of a full tile. With [`COLS`], 24 of the 32 registers hold sums.
pub(super) const ROWS: usize = 8;
/// The number of vectors in a row of a full tile.
pub(super) const COLS: usize = 3;

/// The arguments of a [`tile`].
pub(crate) struct TileArgs<T> {
    /// The inner size.
    pub(super) depth: usize,
    pub(super) a: Mat<T>,
    /// The right operand, with column stride 1. All vectors are readable, also the lanes that the result does not have: masked
    /// reads would take time from the multiplications.
    pub(super) b: *const T,
    pub(super) b_rs: usize,
    /// The result, with column stride 1.
    pub(super) dst: *mut T,
    pub(super) dst_rs: usize,
    /// Added to the result. The column stride is 0 or 1.
    pub(super) added: Option<Mat<T>>,
    pub(super) scale: T,
    /// The number of columns in the last vector of a row.
    pub(super) last: usize,
}

/// A [`tile`] of some size.
pub(crate) type TileFn<T> = unsafe fn(&TileArgs<T>);

/// Computes a tile of `R` rows, each of `C` vectors.
///
/// # Safety
/// The machine must have AVX-512. The rows and columns of the tile must be inside the matrices.
#[target_feature(enable = "avx512f")]
#[allow(clippy::pointers_in_nomem_asm_block)] // the blocks are empty
unsafe fn tile<V: Lanes, const R: usize, const C: usize>(args: &TileArgs<V::T>) {
    let &TileArgs { depth, a, b, b_rs, dst, dst_rs, added, scale, last } = args;
    let mask = |j: usize| first(if j + 1 == C { last } else { V::N });
    // SAFETY: the machine has AVX-512, and a prefetch may have any address.
    let zero = unsafe {
        // Partial sums of large results are not in the cache.
        if let Some(added) = added.filter(|added| added.cs == 1) {
            for i in 0..R {
                for j in 0..C {
                    _mm_prefetch::<_MM_HINT_T0>(added.row(i).at(j * V::N).ptr.cast());
                }
            }
        }
        V::splat(<V::T as Num>::ZERO)
    };
    let mut sums = [[zero; C]; R];
    // The rows of `a` are at four offsets from two pointers.
    let (mut near, mut far, mut three, mut b) = (a.ptr, a.row(4).ptr, 3 * a.rs, b);
    // SAFETY: no instruction. The compiler no longer knows that these depend on each other: it would compute each address from
    // the one before, or keep all of them in memory.
    unsafe {
        asm!("/* {} {} */", inout(reg) far, inout(reg) three, options(pure, nomem, nostack, preserves_flags))
    };
    let offsets = [0, a.rs, 2 * a.rs, three];
    macro_rules! step {
        () => {
            // SAFETY: as above, for the steps of the unrolled loop. The elements are inside the matrices.
            unsafe {
                asm!("/* {} {} {} */", inout(reg) near, inout(reg) far, inout(reg) b,
                    options(pure, nomem, nostack, preserves_flags));
                let row: [V; C] = std::array::from_fn(
                    #[inline(always)]
                    |j| V::load(b.wrapping_add(j * V::N), first(V::N)),
                );
                for i in 0..R {
                    let x = V::splat(*(if i < 4 { near } else { far }).wrapping_add(offsets[i % 4]));
                    for j in 0..C {
                        sums[i][j] = x.mul_add(row[j], sums[i][j]);
                    }
                }
            }
            near = near.wrapping_add(a.cs);
            far = far.wrapping_add(a.cs);
            b = b.wrapping_add(b_rs);
        };
    }
    for _ in 0..depth / 4 {
        step!();
        step!();
        step!();
        step!();
    }
    for _ in 0..depth % 4 {
        step!();
    }
    // SAFETY: the machine has AVX-512, and the elements are inside the matrices.
    unsafe {
        let scale = V::splat(scale);
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                let result = match added {
                    None => sum.mul(scale),
                    Some(added) if added.cs == 0 => sum.mul_add(scale, V::splat(*added.row(i).ptr)),
                    Some(added) => sum.mul_add(scale, V::load(added.row(i).at(j * V::N).ptr, mask(j))),
                };
                result.store(dst.wrapping_add(i * dst_rs + j * V::N), mask(j));
            }
        }
    }
}

/// Vectors with a [`tile`] of each size.
pub(crate) trait Tiles: Lanes {
    /// The function for tiles of `i + 1` rows, each of `j + 1` vectors, is `TILES[i][j]`.
    const TILES: [[TileFn<Self::T>; COLS]; ROWS];
}

macro_rules! tiles {
    ($($V:ty),*; $rows:tt) => { $(tiles!(@ $V, $rows);)* };
    (@ $V:ty, [$($rows:literal)*]) => {
        impl Tiles for $V {
            const TILES: [[TileFn<Self::T>; COLS]; ROWS] =
                [$([tile::<$V, $rows, 1>, tile::<$V, $rows, 2>, tile::<$V, $rows, 3>]),*];
        }
    };
}
tiles!(__m512, __m512d; [1 2 3 4 5 6 7 8]);
