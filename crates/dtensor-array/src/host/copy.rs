//! Copies between layouts, and arrays created from numbers.

use std::mem::MaybeUninit;

use half::vec::HalfBitsVecExt;
use smallvec::SmallVec;

use super::layout::{Axes, Axis, Walk, push_axis};
use super::{fill_array, simd};
use crate::window::Window;
use crate::{Array, Elem, Num, with_elem};
use crate::{DType, Shape};
use crate::{Element, Error, Result};

/// Copies `x` to a contiguous array.
pub(crate) fn contiguous(x: &Array) -> Result<Array> {
    with_elem!(x.dtype(), T => {
        let read = x.read::<T>()?;
        let axes = axes_to(read.dims, read.strides, &Shape::from(read.dims).strides());
        // SAFETY: the target strides are those of a contiguous array, so every element is written.
        unsafe { fill_array::<T>(read.dims, |out| assign(&axes, read.data(), out)) }
    })
}

/// Returns the axes of a copy between two layouts of `sizes`, with strides `from` and `to`.
pub(crate) fn axes_to(sizes: &[usize], from: &[usize], to: &[usize]) -> Axes<2> {
    let mut axes = Axes::new();
    for d in 0..sizes.len() {
        push_axis(&mut axes, Axis { size: sizes[d], strides: [from[d], to[d]] });
    }
    axes
}

/// Copies every element from `src`, with the first strides of `axes`, to `dst`, with the second strides. Fastest if the innermost
/// axis of `dst` is contiguous.
pub(crate) fn assign<T: Elem>(axes: &[Axis<2>], src: &[T], dst: &mut [MaybeUninit<T>]) {
    if axes.iter().any(|axis| axis.size == 0) {
        return;
    }
    let Some((&last, outer)) = axes.split_last() else {
        dst[0].write(src[0]);
        return;
    };
    let n = last.size;
    match last.strides {
        [1, 1] => {
            for [from, to] in Walk::new(outer) {
                write_run(&src[from..from + n], &mut dst[to..to + n]);
            }
        }
        [0, 1] => {
            for [from, to] in Walk::new(outer) {
                fill(&mut dst[to..to + n], src[from]);
            }
        }
        [_, 1] => match outer.iter().position(|axis| axis.strides[0] == 1) {
            Some(d) => {
                let mut others: SmallVec<[Axis<2>; 4]> = outer.into();
                let unit = others.remove(d);
                simd::<T, _>(
                    #[inline(always)]
                    || {
                        for [from, to] in Walk::new(&others) {
                            transpose(
                                &src[from..],
                                last.strides[0],
                                &mut dst[to..],
                                unit.strides[1],
                                unit.size,
                                n,
                            );
                        }
                    },
                );
            }
            None => simd::<T, _>(
                #[inline(always)]
                || gather(outer, last, src, dst),
            ),
        },
        _ => simd::<T, _>(
            #[inline(always)]
            || gather(outer, last, src, dst),
        ),
    }
}

/// Copies a run of elements to memory that may be uninitialised.
pub(crate) fn write_run<T: Copy>(src: &[T], dst: &mut [MaybeUninit<T>]) {
    assert_eq!(src.len(), dst.len());
    // SAFETY: both slices have this length, and `dst` is borrowed mutably, so they do not overlap.
    unsafe { src.as_ptr().copy_to_nonoverlapping(dst.as_mut_ptr().cast(), src.len()) };
}

/// A writer that bypasses the cache, for large targets: they would evict useful data, and each cache line would be read before it
/// is written. Its writes become visible to another thread that synchronises after the writer is dropped.
#[derive(Debug)]
pub(crate) struct PastCache(());

impl PastCache {
    pub(crate) fn new() -> Self {
        PastCache(())
    }

    /// Copies a run of elements.
    pub(crate) fn write_run<T: Copy>(&self, src: &[T], dst: &mut [MaybeUninit<T>]) {
        assert_eq!(src.len(), dst.len());
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            const LINE: usize = 64;
            let bytes = size_of_val(src);
            let (from, to) = (src.as_ptr().cast::<u8>(), dst.as_mut_ptr().cast::<u8>());
            let head = to.align_offset(LINE).min(bytes);
            let lines = (bytes - head) / LINE;
            let tail = head + lines * LINE;
            // SAFETY: all accesses are inside `src` and `dst`, which do not overlap: `head` bytes, then complete lines, then
            // the rest. The target lines are aligned, as streaming stores require, and every x86-64 has the instructions.
            // `drop` orders the streamed lines before anything that this thread writes later.
            unsafe {
                from.copy_to_nonoverlapping(to, head);
                for line in 0..lines {
                    let at = head + line * LINE;
                    let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
                    let x = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
                    (0..4).for_each(|i| _mm_stream_si128(to.add(i), x[i]));
                }
                from.add(tail).copy_to_nonoverlapping(to.add(tail), bytes - tail);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        write_run(src, dst);
    }

    /// As [`assign`], but bypasses the cache if contiguous rows are copied.
    pub(crate) fn assign<T: Elem>(&self, axes: &[Axis<2>], src: &[T], dst: &mut [MaybeUninit<T>]) {
        match axes.split_last() {
            Some((&Axis { size, strides: [1, 1] }, outer)) => {
                let mut rows = Walk::new(outer).peekable();
                while let Some([from, to]) = rows.next() {
                    // The hardware prefetcher cannot predict where the next row starts.
                    if let Some([next, _]) = rows.peek() {
                        prefetch(&src[*next..*next + size]);
                    }
                    self.write_run(&src[from..from + size], &mut dst[to..to + size]);
                }
            }
            _ => assign(axes, src, dst),
        }
    }
}

/// Prefetches the beginning of a run.
fn prefetch<T>(run: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..size_of_val(run).min(1024)).step_by(64) {
        // SAFETY: the address is inside the run, and prefetching affects only the timing.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(run.as_ptr().cast::<i8>().add(at));
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = run;
}

impl Drop for PastCache {
    fn drop(&mut self) {
        // SAFETY: every x86-64 has this instruction, and it has no preconditions.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// Fills `dst` with one value.
pub(crate) fn fill<T: Elem>(dst: &mut [MaybeUninit<T>], value: T) {
    simd::<T, _>(
        #[inline(always)]
        || dst.fill(MaybeUninit::new(value)),
    );
}

#[inline(always)]
fn gather<T: Elem>(outer: &[Axis<2>], last: Axis<2>, src: &[T], dst: &mut [MaybeUninit<T>]) {
    let [s, t] = last.strides;
    for [from, to] in Walk::new(outer) {
        for i in 0..last.size {
            dst[to + i * t].write(src[from + i * s]);
        }
    }
}

/// The number of elements of a target row that a transpose writes at once: a cache line of `f32`.
const TILE: usize = 16;
/// The number of target rows in one tile of a transpose.
const STRIP: usize = 64;
/// The number of source rows that are interleaved at once.
const WAYS: usize = 4;

/// Transposes: `dst[i][j] = src[j][i]` for `i < rows`, `j < cols`. The row stride of `src` is `from`, that of `dst` is `to`.
///
/// Each tile goes through a buffer, so that every cache line of both arrays is accessed only once. Otherwise rows whose stride is
/// a power of two would evict each other.
#[inline(always)]
fn transpose<T: Elem>(
    src: &[T],
    from: usize,
    dst: &mut [MaybeUninit<T>],
    to: usize,
    rows: usize,
    cols: usize,
) {
    let tiled = cols - cols % TILE;
    let mut tile = [[[T::default(); WAYS]; STRIP]; TILE / WAYS];
    for i in (0..rows).step_by(STRIP) {
        let w = (rows - i).min(STRIP);
        for j in (0..tiled).step_by(TILE) {
            for (k, part) in tile.iter_mut().enumerate() {
                let row = |way: usize| &src[(j + k * WAYS + way) * from + i..][..w];
                interleave([row(0), row(1), row(2), row(3)], &mut part[..w]);
            }
            for a in 0..w {
                let out = &mut dst[(i + a) * to + j..][..TILE];
                for (out, part) in out.as_chunks_mut::<WAYS>().0.iter_mut().zip(&tile) {
                    *out = part[a].map(MaybeUninit::new);
                }
            }
        }
        for a in i..i + w {
            for j in tiled..cols {
                dst[a * to + j].write(src[j * from + a]);
            }
        }
    }
}

#[inline(always)]
fn interleave<T: Copy>([a, b, c, d]: [&[T]; WAYS], out: &mut [[T; WAYS]]) {
    let n = out.len();
    let (a, b, c, d) = (&a[..n], &b[..n], &c[..n], &d[..n]);
    for i in 0..n {
        out[i] = [a[i], b[i], c[i], d[i]];
    }
}

/// The neutral element of addition, −0. Adding +0 instead would turn a sum of −0 into +0.
pub const NOTHING: f64 = -0.0;

/// Creates an array filled with one value.
pub(crate) fn full(dtype: DType, shape: &[usize], value: f64) -> Result<Array> {
    // The bits of −0 are not all zero, so the comparison is of bits.
    if value.to_bits() == 0 {
        return zeros(dtype, shape);
    }
    with_elem!(dtype, T => {
        let value = T::from_acc(Num::from_f64(value));
        // SAFETY: `fill` writes every element.
        unsafe { fill_array::<T>(shape, |out| fill(out, value)) }
    })
}

/// As [`full`], for an integer value, which integer dtypes hold exactly.
pub(crate) fn full_i64(dtype: DType, shape: &[usize], value: i64) -> Result<Array> {
    let n = shape.iter().product();
    match dtype {
        _ if value == 0 => zeros(dtype, shape),
        DType::I64 => Array::from_vec(vec![value; n], shape),
        DType::U8 => Array::from_vec(vec![value as u8; n], shape),
        _ => full(dtype, shape, value as f64),
    }
}

/// Creates an array of zeros. If it is large, it uses fresh pages of the operating system, which cost nothing until accessed.
fn zeros(dtype: DType, shape: &[usize]) -> Result<Array> {
    let n = shape.iter().product();
    match dtype {
        DType::U8 => Array::from_vec(vec![0u8; n], shape),
        DType::I64 => Array::from_vec(vec![0i64; n], shape),
        DType::F16 => Array::from_vec(vec![0u16; n].reinterpret_into::<half::f16>(), shape),
        DType::BF16 => Array::from_vec(vec![0u16; n].reinterpret_into::<half::bf16>(), shape),
        DType::F32 => Array::from_vec(vec![0f32; n], shape),
        DType::F64 => Array::from_vec(vec![0f64; n], shape),
    }
}

/// Creates the window's elements of an array whose elements are `at(i)`, where `i` is the row-major index in the full array. `at`
/// should own its captures, because captured references would be read again for every element.
pub(crate) fn tabulate<T: Element>(window: &Window, at: impl Fn(usize) -> T + Copy) -> Result<Array> {
    let mut data = Vec::with_capacity(window.shape().numel());
    window.each_run(|_, first, n| data.extend((first..first + n).map(at)));
    Array::from_vec(data, window.shape())
}

/// Creates the window's elements of the array `start + i × step`, where `i` is the index in the full array. Integers are
/// exact in the integer dtypes.
pub(crate) fn arange(dtype: DType, start: f64, step: f64, window: &Window) -> Result<Array> {
    let is_integer = start.trunc() == start && step.trunc() == step;
    let integer = move |i: usize| (start as i64).wrapping_add((step as i64).wrapping_mul(i as i64));
    match dtype {
        DType::I64 if is_integer => tabulate(window, integer),
        DType::U8 if is_integer => tabulate(window, move |i| integer(i) as u8),
        _ => with_elem!(dtype, T => {
            tabulate::<T>(window, move |i| T::from_acc(Num::from_f64(start + i as f64 * step)))
        }),
    }
}

/// As [`arange`] for dtype `i64`, with integer bounds, because `f64` cannot hold all `i64` values.
pub(crate) fn arange_i64(start: i64, step: i64, window: &Window) -> Result<Array> {
    // The product may overflow, but every element fits into `i64`, so wrapping arithmetic gives the right result.
    tabulate(window, move |i| start.wrapping_add(step.wrapping_mul(i as i64)))
}

/// Creates the window's elements of an array of numbers evenly spaced from `start` to `end`, both included. With a `base`,
/// the elements are its powers with these exponents.
pub(crate) fn linspace(start: f64, end: f64, base: Option<f64>, window: &Window) -> Result<Array> {
    let steps = window.whole_shape().numel();
    let step = if steps > 1 { (end - start) / (steps - 1) as f64 } else { 0.0 };
    // Computed from the nearer end, so that both ends are exact.
    let at = move |i: usize| match i < steps.div_ceil(2) {
        true => start + step * i as f64,
        false => end - step * (steps - 1 - i) as f64,
    };
    match base {
        Some(base) => tabulate(window, move |i| base.powf(at(i))),
        None => tabulate(window, at),
    }
}

/// Creates the window's elements of a matrix with ones on the diagonal and zeros elsewhere.
pub(crate) fn eye(dtype: DType, window: &Window) -> Result<Array> {
    let &[rows, columns] = &window.whole_shape()[..] else {
        return Err(Error::argument(
            "eye",
            format!("expected the shape of a matrix, but got {}", window.whole_shape()),
        ));
    };
    with_elem!(dtype, T => {
        let mut data = vec![T::default(); window.shape().numel()];
        window.each_run(|at, first, n| {
            // The distance between two ones in row-major order.
            let stride = columns + 1;
            let ones = (first.div_ceil(stride)..rows.min(columns)).map(|i| i * stride);
            for one in ones.take_while(|&one| one < first + n) {
                data[at + one - first] = T::from_acc(Num::ONE);
            }
        });
        Array::from_vec(data, window.shape())
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, pick, windows};
    use super::*;

    fn iota<T: Element>(shape: &[usize]) -> Array {
        let n = shape.iter().product::<usize>();
        let data = (0..n).map(|i| T::from_acc(Num::from_f64((i % 251) as f64))).collect();
        Array::from_vec::<T>(data, shape).unwrap()
    }

    /// Returns the elements in row-major order, read one at a time.
    fn naive<T: Element>(x: &Array) -> Vec<T> {
        let read = x.read::<T>().unwrap();
        let mut index = vec![0; read.dims.len()];
        (0..x.numel())
            .map(|flat| {
                let mut rest = flat;
                for d in (0..index.len()).rev() {
                    index[d] = rest % read.dims[d];
                    rest /= read.dims[d];
                }
                read.data()[index.iter().zip(read.strides).map(|(i, s)| i * s).sum::<usize>()]
            })
            .collect()
    }

    fn check(x: &Array) {
        with_elem!(x.dtype(), T => {
            let copy = contiguous(x).unwrap();
            assert!(copy.is_contiguous());
            assert_eq!(copy.dims(), x.dims());
            assert!(copy.copy_to_host::<T>().unwrap() == naive::<T>(x), "{x:?} {:?}", x.strides());
        });
    }

    #[test]
    fn streamed_writes_arrive() {
        let src: Vec<u8> = (0..1000).map(|i| (i * 7 % 251) as u8).collect();
        for len in [0usize, 1, 15, 63, 64, 65, 127, 128, 500, 900] {
            for (a, b) in [(0usize, 0usize), (1, 0), (3, 17), (64, 63)] {
                let mut out = vec![MaybeUninit::new(255u8); 1000];
                PastCache::new().write_run(&src[a..a + len], &mut out[b..b + len]);
                // SAFETY: every element was initialised when the vector was created.
                let out: Vec<u8> = out.iter().map(|x| unsafe { x.assume_init() }).collect();
                assert_eq!(&out[b..b + len], &src[a..a + len]);
                assert!(out[..b].iter().chain(&out[b + len..]).all(|&x| x == 255));
            }
        }
    }

    #[test]
    fn every_layout_of_every_dtype_is_copied_in_order() {
        for dtype in DType::ALL {
            for (m, n) in
                [(1, 1), (3, 5), (16, 64), (17, 65), (100, 33), (128, 64), (3, 200), (0, 4), (40, 0)]
            {
                let x = with_elem!(dtype, T => iota::<T>(&[m, n]));
                check(&x);
                check(&x.transpose(0, 1).unwrap());
                let wide = with_elem!(dtype, T => iota::<T>(&[2, m + 3, n + 2]));
                let view = wide.narrow(1, 2, m).and_then(|t| t.narrow(2, 1, n)).unwrap();
                check(&view);
                check(&view.transpose(1, 2).unwrap());
                check(&view.transpose(0, 1).unwrap());
                check(&view.permute(&[2, 0, 1]).unwrap());
                check(&view.permute(&[2, 1, 0]).unwrap());
            }
            let x = with_elem!(dtype, T => iota::<T>(&[2, 3, 4, 5]));
            for order in [[0, 2, 1, 3], [3, 1, 2, 0], [1, 3, 0, 2], [0, 1, 3, 2]] {
                check(&x.permute(&order).unwrap());
            }
            let column = x.narrow(3, 2, 1).and_then(|t| t.transpose(0, 1)).unwrap();
            check(&column);
        }
    }

    #[test]
    fn broadcast_arrays_are_copied_in_full() {
        let x = iota::<f32>(&[3, 1, 5]);
        check(&x.expand(&[3, 4, 5]).unwrap());
        check(&x.expand(&[2, 3, 4, 5]).unwrap());
        check(&x.expand(&[3, 4, 5]).and_then(|t| t.transpose(1, 2)).unwrap());
        check(&iota::<f32>(&[3, 1]).expand(&[3, 70]).unwrap());
        check(&iota::<f32>(&[]).expand(&[3, 70]).unwrap());
        check(&iota::<f32>(&[]));
    }

    #[test]
    fn constants_are_exact() {
        for dtype in DType::ALL {
            for value in [0.0, -0.0, 1.0, 7.0] {
                with_elem!(dtype, T => {
                    let data = full(dtype, &[3, 5], value).unwrap().copy_to_host::<T>().unwrap();
                    assert!(data.len() == 15 && data.iter().all(|x| x.acc().to_f64() == value));
                });
            }
            assert_eq!(full(dtype, &[0, 5], 2.0).unwrap().numel(), 0);
            with_elem!(dtype, T => {
                let data = full_i64(dtype, &[2], 5).unwrap().copy_to_host::<T>().unwrap();
                assert!(data.iter().all(|x| x.acc().to_f64() == 5.0));
                let data = eye(dtype, &Window::whole(&[3, 4])).unwrap().copy_to_host::<T>().unwrap();
                let expected = |i: usize| if i / 4 == i % 4 { 1.0 } else { 0.0 };
                assert!((0..12).all(|i| data[i].acc().to_f64() == expected(i)));
            });
        }
        assert!(full(DType::F32, &[1], -0.0).unwrap().copy_to_host::<f32>().unwrap()[0].is_sign_negative());
        assert!(full(DType::F16, &[1], f64::NAN).unwrap().copy_to_host::<half::f16>().unwrap()[0].is_nan());
        let big = full_i64(DType::I64, &[2], i64::MAX - 1).unwrap();
        assert_eq!(big.copy_to_host::<i64>().unwrap(), [i64::MAX - 1; 2]);
    }

    #[test]
    fn long_ranges_are_exact() {
        let arange = |dtype, start, step, n| arange(dtype, start, step, &Window::whole(&[n]));
        let x = arange(DType::F32, 0.0, 0.1, 100_001).unwrap().copy_to_host::<f32>().unwrap();
        assert_eq!(x[100_000], 10_000.0);
        let x = arange(DType::I64, -3.0, 2.0, 4).unwrap().copy_to_host::<i64>().unwrap();
        assert_eq!(x, [-3, -1, 1, 3]);
        let x = arange(DType::I64, 9007199254740992.0, 1.0, 2).unwrap().copy_to_host::<i64>().unwrap();
        assert_eq!(x, [9007199254740992, 9007199254740993]);
        assert_eq!(arange(DType::U8, 5.0, -1.0, 3).unwrap().copy_to_host::<u8>().unwrap(), [5, 4, 3]);
        assert_eq!(arange(DType::I64, 0.0, 0.5, 4).unwrap().copy_to_host::<i64>().unwrap(), [0, 0, 1, 1]);
        assert_eq!(arange(DType::BF16, 0.0, 1.0, 0).unwrap().numel(), 0);
    }

    #[test]
    fn windows_have_the_bits_of_the_full_array() {
        for (window, indices) in windows() {
            for (dtype, start, step) in
                DType::ALL.into_iter().flat_map(|dtype| [(dtype, 3.0, 2.0), (dtype, 0.1, 0.3)])
            {
                let full = arange(dtype, start, step, &Window::whole(window.whole_shape())).unwrap();
                let shard = arange(dtype, start, step, &window).unwrap();
                assert_eq!(shard.dims(), &window.shape()[..]);
                assert_eq!(bits(&shard), pick(&bits(&full), &indices), "{dtype} {window:?}");
            }
            if window.whole_shape().ndim() == 2 {
                let full = eye(DType::F32, &Window::whole(window.whole_shape())).unwrap();
                let shard = eye(DType::F32, &window).unwrap();
                assert_eq!(shard.dims(), &window.shape()[..]);
                assert_eq!(bits(&shard), pick(&bits(&full), &indices), "eye {window:?}");
            }
        }
    }
}
