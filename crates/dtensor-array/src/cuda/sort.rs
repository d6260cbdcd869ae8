//! Sorting and top-k along any dim. Rows of up to [`TILE`] words are sorted in shared memory. Longer rows are sorted in tiles,
//! which are then merged. A top-k of a long row first selects the `k` words, and sorts only these.

use super::driver::Address;
use super::kernel::{ALL, file, units};
use super::{Stream, grid_for, stream_of};
use crate::{Array, DType, Error, Result};

units! {
    static SORT: "sort", [file!("sort.cuh")], ALL;
}

/// The number of words that a block sorts. Must match `TILE` in `kernels/sort.cuh`.
const TILE: usize = 2048;
/// The number of threads that sort or merge a tile.
const SORT_THREADS: u32 = 512;
const THREADS: usize = 256;

/// Must match `Sort` in `kernels/sort.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sort {
    x: Address,
    words: Address,
    sorted: Address,
    values: Address,
    indices: Address,
    rows: u64,
    n: u64,
    m: u64,
    count: u64,
    tiles: u64,
    segment: u64,
    run: u64,
    is_descending: u64,
}

/// Must match `Merge` in `kernels/sort.cuh`.
#[repr(C)]
struct Merge {
    values: Address,
    indices: Address,
    out: Address,
    out_indices: Address,
    rows: u64,
    m: u64,
    count: u64,
    tiles: u64,
    is_descending: u64,
}

pub(crate) fn sort(x: &Array, dim: usize, descending: bool) -> Result<(Array, Array)> {
    let size = x.dims().get(dim).copied().unwrap_or(1);
    first_of(x, dim, size, descending)
}

pub(crate) fn topk(x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)> {
    first_of(x, dim, k, largest)
}

pub(crate) fn topk_part(x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)> {
    first_of(x, dim, k, largest)
}

/// Arrays for the first `count` elements along `dim` and their indices, with `dim` as the last dim.
struct Selection {
    dims: Vec<usize>,
    dim: usize,
    values: Array,
    indices: Array,
}

impl Selection {
    fn new(stream: &'static Stream, dtype: DType, dims: &[usize], dim: usize, count: usize) -> Result<Self> {
        let mut dims = dims.to_vec();
        if !dims.is_empty() {
            let last = dims.len() - 1;
            dims.swap(dim, last);
            dims[last] = count;
        }
        let (values, indices) = (stream.empty(dtype, &dims)?, stream.empty(DType::I64, &dims)?);
        Ok(Selection { dims, dim, values, indices })
    }

    /// Returns the arrays with `dim` in its place.
    fn arrays(self) -> Result<(Array, Array)> {
        if self.dims.is_empty() {
            return Ok((self.values, self.indices));
        }
        let turn = |x: &Array| x.transpose(self.dim, self.dims.len() - 1)?.contiguous();
        Ok((turn(&self.values)?, turn(&self.indices)?))
    }
}

/// Finds the first `count` elements along `dim` in ascending or descending order, and their indices. Missing ones have index −1.
fn first_of(x: &Array, dim: usize, count: usize, descending: bool) -> Result<(Array, Array)> {
    let stream = stream_of(x)?;
    let (dims, dtype) = (x.dims(), x.dtype());
    let n = dims.get(dim).copied().unwrap_or(1);
    if n > u32::MAX as usize {
        // The index must fit into its half of the word.
        let message = format!("a dim of {n} elements is too long: at most {} are supported", u32::MAX);
        return Err(Error::argument("sort", message));
    }
    // A scalar has no dim to shorten, so its one element is always selected.
    let count = if dims.is_empty() { 1 } else { count };
    let top = Selection::new(stream, dtype, dims, dim, count)?;
    if top.values.numel() == 0 {
        return top.arrays();
    }
    let x = if dims.is_empty() { x.clone() } else { x.transpose(dim, dims.len() - 1)?.contiguous()? };
    let rows = top.values.numel() / count;
    let is_selected = n > TILE && count < n;
    let m = if is_selected { count } else { n };
    let mut args = Sort {
        x: stream.read(&x)?,
        words: 0,
        sorted: 0,
        values: stream.read(&top.values)?,
        indices: stream.read(&top.indices)?,
        rows: rows as u64,
        n: n as u64,
        m: m as u64,
        count: count as u64,
        tiles: m.div_ceil(TILE).max(1) as u64,
        segment: m.next_power_of_two().min(TILE) as u64,
        run: TILE as u64,
        is_descending: descending.into(),
    };
    let launch = |name: &str, blocks: usize, threads: u32, args: &Sort| {
        // SAFETY: the arrays have `rows` rows of `n` elements, `m` words and `count` results; words hold indices below `n`.
        unsafe { stream.launch(&SORT, dtype, name, [blocks as u32, 1, 1], threads, 0, args) }
    };
    let word = if dtype.size() == 8 { 16 } else { 8 };
    let buffer = || stream.empty(DType::U8, &[rows * m * word]);
    let mut words = None;
    if is_selected {
        let selected = buffer()?;
        args.sorted = stream.read(&selected)?;
        let threads = (n / 8).next_power_of_two().min(1024) as u32;
        launch("select", rows.min(1 << 20), threads, &args)?;
        (args.words, args.sorted) = (args.sorted, 0);
        words = Some(selected);
    }
    if args.tiles == 1 {
        launch("sort_tiles", rows.div_ceil(TILE / args.segment as usize), SORT_THREADS, &args)?;
        return top.arrays();
    }
    let blocks = rows * args.tiles as usize;
    let mut sorted = buffer()?;
    args.sorted = stream.read(&sorted)?;
    launch("sort_tiles", blocks, SORT_THREADS, &args)?;
    let mut other = match words {
        Some(words) => words,
        None => buffer()?,
    };
    let mut run = TILE;
    while run < m {
        (args.words, args.sorted, args.run) = (stream.read(&sorted)?, stream.read(&other)?, run as u64);
        launch("sort_merge", blocks, SORT_THREADS, &args)?;
        std::mem::swap(&mut sorted, &mut other);
        run *= 2;
    }
    args.words = stream.read(&sorted)?;
    let grid = grid_for(stream.gpu, rows * count, THREADS as u32, 1);
    launch("sort_finish", grid[0] as usize, THREADS as u32, &args)?;
    top.arrays()
}

pub(crate) fn merge_top(
    values: &Array,
    indices: &Array,
    k: usize,
    dim: usize,
    largest: bool,
) -> Result<(Array, Array)> {
    let stream = stream_of(values)?;
    let (dtype, shape) = (values.dtype(), &values.dims()[1..]);
    let count = if shape.is_empty() { 1 } else { k };
    let top = Selection::new(stream, dtype, shape, dim, count)?;
    if top.values.numel() == 0 {
        return top.arrays();
    }
    // The candidates of all shards come last, so that they are a row.
    let mut order: Vec<usize> = (1..=shape.len()).collect();
    if !shape.is_empty() {
        order.swap(dim, shape.len() - 1);
    }
    order.insert(shape.len().saturating_sub(1), 0);
    let (values, indices) = (values.permute(&order)?.contiguous()?, indices.permute(&order)?.contiguous()?);
    let rows = top.values.numel() / count;
    let m = values.numel() / rows;
    let tiles = m.max(count).div_ceil(THREADS);
    let args = Merge {
        values: stream.read(&values)?,
        indices: stream.read(&indices)?,
        out: stream.read(&top.values)?,
        out_indices: stream.read(&top.indices)?,
        rows: rows as u64,
        m: m as u64,
        count: count as u64,
        tiles: tiles as u64,
        is_descending: largest.into(),
    };
    let grid = [(rows * tiles) as u32, 1, 1];
    // SAFETY: there are `rows` rows of `m` candidates, and of `count` results.
    unsafe { stream.launch(&SORT, dtype, "merge_top", grid, THREADS as u32, 0, &args)? };
    top.arrays()
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::super::testing::compare;
    use super::*;
    use crate::host::testing::{ids, local, noise, values};
    use crate::kernels::sort as kernels;

    /// Returns numbers with ties and, for floating-point dtypes, zeros of both signs, infinities and NaN.
    fn numbers(dtype: DType, shape: &[usize]) -> Array {
        let n = shape.iter().product();
        let mut x: Vec<f64> = noise(n, 7).iter().map(|x| (x * 50.0).round() / 4.0).collect();
        if dtype.is_float() {
            let special = [f64::NAN, -0.0, f64::INFINITY, 0.0, f64::NEG_INFINITY, -f64::NAN, 0.0, -0.0];
            for (x, s) in x.iter_mut().skip(1).step_by(3).zip(special.into_iter().cycle().take(n / 20 + 8)) {
                *x = s;
            }
        }
        local(dtype, &x, shape)
    }

    /// Compares sort and top-k along a dim of a view.
    fn check(x: &Array, dim: usize, ks: &[usize], view: impl Fn(&Array) -> Result<Array>) {
        compare(from_ref(x), 0.0, |x| {
            let x = view(&x[0])?;
            let mut results = vec![];
            for descending in [false, true] {
                let (sorted, at) = kernels::sort(&x, dim, descending)?;
                results.extend([sorted, at]);
                for &k in ks {
                    let (top, at) = kernels::topk(&x, k, dim, descending)?;
                    results.extend([top, at]);
                }
            }
            Ok(results)
        });
    }

    #[test]
    fn short_lines() {
        for dtype in DType::ALL {
            for (shape, dim) in [
                (&[][..], 0),
                (&[1], 0),
                (&[0], 0),
                (&[300], 0),
                (&[4, 33], 1),
                (&[33, 4], 0),
                (&[2, 40, 3], 1),
                (&[3, 0], 0),
                (&[3, 0], 1),
                (&[2100, 1], 1),
                (&[3, 2048], 1),
            ] {
                let x = numbers(dtype, shape);
                let size = shape.get(dim).copied().unwrap_or(1);
                let ks: Vec<usize> = [0, 1, 3, size / 2, size].into_iter().filter(|&k| k <= size).collect();
                check(&x, dim, &ks, |x| Ok(x.clone()));
                if shape.len() > 1 {
                    check(&x, shape.len() - 1 - dim, &[0], |x| x.transpose(0, shape.len() - 1));
                }
            }
        }
    }

    #[test]
    fn long_lines() {
        for dtype in DType::ALL {
            for n in [2049, 6000] {
                check(&numbers(dtype, &[2, n]), 1, &[1, 7, 2048, n - 1], |x| Ok(x.clone()));
            }
        }
        check(&numbers(DType::F32, &[20_000]), 0, &[50, 5000], |x| Ok(x.clone()));
        check(&numbers(DType::F32, &[4100, 2]), 0, &[50], |x| Ok(x.clone()));
        let same = Array::from_vec(vec![3u8; 5000], &[5000]).unwrap();
        check(&same, 0, &[1, 100, 4999], |x| Ok(x.clone()));
    }

    #[test]
    fn integers_that_f64_cannot_hold_are_distinguished() {
        let x = ids(&[i64::MAX, i64::MAX - 1, i64::MIN, i64::MIN + 1, -1, 0], &[6])
            .to_device(crate::Device::Cuda(0));
        let (sorted, at) = sort(&x.unwrap(), 0, false).unwrap();
        assert_eq!(at.copy_to_host::<i64>().unwrap(), [2, 3, 4, 5, 1, 0]);
        let want = [i64::MIN, i64::MIN + 1, -1, 0, i64::MAX - 1, i64::MAX];
        assert_eq!(sorted.copy_to_host::<i64>().unwrap(), want);
    }

    #[test]
    fn topk_of_shards_merges_into_that_of_the_full_array() {
        for dtype in DType::ALL {
            for (shape, dim) in
                [(&[300][..], 0), (&[4, 30], 1), (&[30, 3], 0), (&[2, 30, 3], 1), (&[0, 30], 1)]
            {
                let n = shape[dim];
                let x = numbers(dtype, shape).to_device(crate::Device::Cuda(0)).unwrap();
                for parts in
                    [&[(0, n)][..], &[(0, 0), (0, 11), (11, 11), (22, n - 22)], &[(20, n - 20), (0, 20)]]
                {
                    for (k, largest) in [(0, true), (1, false), (5, true), (n - 1, false), (n, true)] {
                        let tops: Vec<(Array, Array)> = parts
                            .iter()
                            .map(|&(start, len)| {
                                topk_part(&x.narrow(dim, start, len).unwrap(), k, dim, largest).unwrap()
                            })
                            .collect();
                        let stacked = [&[parts.len()], tops[0].0.dims()].concat();
                        let all: Vec<f64> = tops
                            .iter()
                            .flat_map(|(x, _)| values(&x.to_device(crate::Device::Cpu).unwrap()))
                            .collect();
                        let at: Vec<i64> = tops
                            .iter()
                            .zip(parts)
                            .flat_map(|((_, at), &(start, len))| {
                                let at = at.copy_to_host::<i64>().unwrap();
                                let missing = at.iter().filter(|&&i| i < 0).count();
                                assert_eq!(missing, at.len() / k.max(1) * k.saturating_sub(len));
                                at.into_iter().map(move |i| if i < 0 { i } else { i + start as i64 })
                            })
                            .collect();
                        let candidates = [local(dtype, &all, &stacked), ids(&at, &stacked)];
                        let want = kernels::topk(&x.to_device(crate::Device::Cpu).unwrap(), k, dim, largest)
                            .unwrap();
                        compare(&candidates, 0.0, |x| {
                            let (top, at) = kernels::merge_top(&x[0], &x[1], k, dim, largest)?;
                            let indices = at.copy_to_host::<i64>()?;
                            assert_eq!(
                                indices,
                                want.1.copy_to_host::<i64>()?,
                                "{dtype} {shape:?} {k} {parts:?}"
                            );
                            Ok(vec![top, at])
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn merged_indices_may_exceed_half_a_word() {
        let far = 1 << 40;
        let x = local(DType::F32, &[1.0, 2.0, 2.0, 0.0], &[2, 2]);
        compare(&[x, ids(&[far, far + 1, 3, -1], &[2, 2])], 0.0, |x| {
            let (top, at) = kernels::merge_top(&x[0], &x[1], 2, 0, true)?;
            let (all, all_at) = kernels::merge_top(&x[0], &x[1], 2, 0, false)?;
            Ok(vec![top, at, all, all_at])
        });
    }
}
