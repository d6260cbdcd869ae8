//! Selecting and scattering by index, and the adjoint of each.
//!
//! Kernels check the indices that they read. To add terms by index, the indices are sorted first: no two threads add to the same
//! element, and the terms of a sum are added in their order.

use super::driver::Address;
use super::kernel::{ALL, ONE, file, units};
use super::map::THREADS;
use super::{Stream, copy, grid_for, stream_of};
pub(crate) use crate::host::index::DimShard;
use crate::host::layout::{Axes, Axis, push_axis};
use crate::host::rows::split;
use crate::{Array, DType, Result, Shape};

units! {
    static ROWS: "index_rows", [file!("ids.cuh"), file!("index_rows.cuh")], ONE;
    static RADIX: "radix", [file!("ids.cuh"), file!("radix.cuh")], ONE;
    static INDEX: "index", [file!("map.cuh"), file!("ids.cuh"), file!("index.cuh")], ALL;
    static ADD_ROWS: "add_rows", [file!("add_rows.cuh")], ALL;
}

/// The most indices along a dim that each thread compares with its own.
const FEW: usize = 64;
/// The number of terms in one partial sum.
const TERMS: usize = 64;
/// The numbers of digits, and of keys in a tile, of the sort.
const DIGITS: usize = 256;
const TILE: usize = 8 * DIGITS;

/// Where a kernel reports invalid values. Must match `Site` in `kernels/prelude.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Site {
    slot: Address,
    site: u32,
}

impl From<(Address, u32)> for Site {
    fn from((slot, site): (Address, u32)) -> Self {
        Site { slot, site }
    }
}

/// Must match `Ids` in `kernels/ids.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ids {
    ids: Address,
    n: u64,
    start: u64,
    size: u64,
    whole: u64,
    skip: i64,
    site: Site,
    dim: u32,
    has_skip: u32,
}

impl Ids {
    /// Describes indices along a dim of which `size` are in this shard.
    fn new(
        stream: &Stream,
        op: &'static str,
        ids: &Array,
        dim: usize,
        size: usize,
        part: DimShard,
        skip: Option<i64>,
    ) -> Result<Ids> {
        Ok(Ids {
            ids: stream.read(ids)?,
            n: ids.numel() as u64,
            start: part.start as u64,
            size: size as u64,
            whole: part.whole as u64,
            skip: skip.unwrap_or(0),
            site: stream.fault_site(op).into(),
            dim: dim as u32,
            has_skip: u32::from(skip.is_some()),
        })
    }

    /// Checks the indices, where no other kernel does.
    fn check(self, stream: &Stream) -> Result<()> {
        if self.n == 0 {
            return Ok(());
        }
        let grid = grid_for(stream.gpu, self.n as usize, THREADS, 1);
        // SAFETY: there are `n` indices.
        unsafe { stream.launch(&ROWS, ONE[0], "check", grid, THREADS, 0, &self) }
    }
}

/// Returns the number of bytes of the widest words that rows of `bytes` can be copied in, and how many a row has. `others` are all
/// addresses and strides in bytes, joined with `|`.
pub(super) fn rows_in_words(bytes: usize, others: u64) -> (usize, u64) {
    let word = 1 << (bytes as u64 | others | 16).trailing_zeros();
    (word, (bytes / word) as u64)
}

/// Must match `Select` in `kernels/index_rows.cuh`.
#[repr(C)]
struct Select {
    ids: Ids,
    x: Address,
    out: Address,
    count: u64,
    inner: u64,
    outer_stride: u64,
    stride: u64,
    word: u64,
}

/// Returns the strides of an array viewed as `[outer, size of dim, inner]`, the first two, if there are such strides and `inner` is
/// contiguous.
fn row_strides(x: &Array, dim: usize) -> Option<[usize; 2]> {
    if x.dims().is_empty() {
        return Some([1, 1]);
    }
    let merged = |dims: std::ops::Range<usize>| {
        let mut axes: Axes<1> = Axes::new();
        for at in dims {
            push_axis(&mut axes, Axis { size: x.dims()[at], strides: [x.strides()[at]] });
        }
        axes
    };
    let outer = match merged(0..dim)[..] {
        [] => 0,
        [axis] => axis.strides[0],
        _ => return None,
    };
    match merged(dim + 1..x.dims().len())[..] {
        [] => {}
        [Axis { strides: [1], .. }] => {}
        _ => return None,
    }
    Some([outer, x.strides()[dim]])
}

pub(crate) fn index_select(
    op: &'static str,
    x: &Array,
    dim: usize,
    ids: &Array,
    part: DimShard,
) -> Result<Array> {
    let stream = stream_of(x)?;
    let (_, size, inner) = split(x.dims(), dim);
    let (before, after) = if x.dims().is_empty() { (0, 0) } else { (dim, dim + 1) };
    let shape = [&x.dims()[..before], ids.dims(), &x.dims()[after..]].concat();
    let dense = ids.contiguous()?;
    let ids = Ids::new(stream, op, &dense, dim, size, part, None)?;
    if x.numel() == 0 || shape.contains(&0) {
        ids.check(stream)?;
        return copy::full(x.device(), x.dtype(), &shape, 0.0);
    }
    let (x, [outer_stride, stride]) = match row_strides(x, dim) {
        Some(strides) => (x.clone(), strides),
        None => (x.contiguous()?, [size * inner, inner]),
    };
    let out = stream.empty(x.dtype(), &shape)?;
    let element = x.dtype().size();
    let (from, to) = (stream.read(&x)?, stream.read(&out)?);
    let strides = ((outer_stride | stride) * element) as u64;
    let (word, inner) = rows_in_words(inner * element, from | to | strides);
    let select = Select {
        ids,
        x: from,
        out: to,
        count: (out.numel() * element / word) as u64,
        inner,
        outer_stride: (outer_stride * element / word) as u64,
        stride: (stride * element / word) as u64,
        word: word as u64,
    };
    let grid = grid_for(stream.gpu, select.count as usize, THREADS, 1);
    // SAFETY: the words cover the result, and indices outside `x` are not read.
    unsafe { stream.launch(&ROWS, ONE[0], "index_select", grid, THREADS, 0, &select)? };
    Ok(out)
}

/// Must match `Radix` in `kernels/radix.cuh`.
#[repr(C)]
struct Radix {
    keys: Address,
    values: Address,
    sorted_keys: Address,
    sorted_values: Address,
    counts: Address,
    totals: Address,
    n: u64,
    tiles: u64,
    shift: u64,
}

/// Sorts keys, which are at most `most`, with their values. Equal keys stay in order.
fn sort(stream: &'static Stream, mut keys: Array, mut values: Array, most: usize) -> Result<[Array; 2]> {
    let n = keys.numel();
    let tiles = n.div_ceil(TILE);
    let counts = stream.empty(DType::I64, &[DIGITS * (tiles + 1)])?;
    let counts = stream.read(&counts)?;
    let bits = usize::BITS - most.leading_zeros();
    for shift in (0..bits).step_by(8) {
        let sorted = [stream.empty(DType::I64, &[n])?, stream.empty(DType::I64, &[n])?];
        let radix = Radix {
            keys: stream.read(&keys)?,
            values: stream.read(&values)?,
            sorted_keys: stream.read(&sorted[0])?,
            sorted_values: stream.read(&sorted[1])?,
            counts,
            totals: counts + (DIGITS * tiles * size_of::<u64>()) as u64,
            n: n as u64,
            tiles: tiles as u64,
            shift: u64::from(shift),
        };
        let steps = [("radix_count", tiles), ("radix_scan", DIGITS), ("radix_scatter", tiles)];
        for &(name, blocks) in if tiles > 1 { &steps[..] } else { &steps[2..] } {
            let grid = [blocks as u32, 1, 1];
            // SAFETY: all arrays have `n` keys or values, and the counts are one for each digit and tile, and for each digit.
            unsafe { stream.launch(&RADIX, ONE[0], name, grid, DIGITS as u32, 0, &radix)? };
        }
        [keys, values] = sorted;
    }
    Ok([keys, values])
}

/// Must match `IndexKeys` in `kernels/radix.cuh`.
#[repr(C)]
struct IndexKeys {
    ids: Ids,
    keys: Address,
    values: Address,
}

/// Must match `Bounds` in `kernels/radix.cuh`.
#[repr(C)]
struct Bounds {
    keys: Address,
    begin: Address,
    end: Address,
    n: u64,
    size: u64,
}

/// Must match `AddRows` in `kernels/add_rows.cuh`.
#[repr(C)]
struct AddRows {
    dy: Address,
    out: Address,
    partials: Address,
    at: Address,
    keys: Address,
    begin: Address,
    end: Address,
    outer: u64,
    size: u64,
    inner: u64,
    n: u64,
    vector: u64,
}

/// Returns the dtype that sums are computed in.
fn sum_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => DType::F32,
        DType::F64 => DType::F64,
        DType::U8 | DType::I64 => DType::I64,
    }
}

pub(crate) fn index_add(
    ids: &Array,
    dy: &Array,
    dim: usize,
    size: usize,
    padding: Option<i64>,
    part: DimShard,
) -> Result<Array> {
    let stream = stream_of(dy)?;
    let after = dim + ids.dims().len();
    let (outer, inner): (usize, usize) =
        (dy.dims()[..dim].iter().product(), dy.dims()[after..].iter().product());
    let shape = [&dy.dims()[..dim], &[size], &dy.dims()[after..]].concat();
    let (ids, dy) = (ids.contiguous()?, dy.contiguous()?);
    let (n, dtype) = (ids.numel(), dy.dtype());
    let ids = Ids::new(stream, "index_add", &ids, dim, size, part, padding)?;
    if n == 0 || shape.contains(&0) {
        ids.check(stream)?;
        return copy::full(dy.device(), dtype, &shape, 0.0);
    }
    let keys = stream.empty(DType::I64, &[n])?;
    let values = stream.empty(DType::I64, &[n])?;
    let argument = IndexKeys { ids, keys: stream.read(&keys)?, values: stream.read(&values)? };
    let grid = grid_for(stream.gpu, n, THREADS, 1);
    // SAFETY: there are `n` indices, keys and values.
    unsafe { stream.launch(&RADIX, ONE[0], "index_keys", grid, THREADS, 0, &argument)? };
    let [keys, values] = sort(stream, keys, values, size)?;

    let table = copy::full(dy.device(), DType::I64, &[2, size], 0.0)?;
    let begin = stream.read(&table)?;
    let end = begin + (size * size_of::<u64>()) as u64;
    let bounds = Bounds { keys: stream.read(&keys)?, begin, end, n: n as u64, size: size as u64 };
    // SAFETY: there are `n` keys, and the table has two entries for each key below `size`.
    unsafe { stream.launch(&RADIX, ONE[0], "bounds", grid, THREADS, 0, &bounds)? };

    let out = stream.empty(dtype, &shape)?;
    // A row has a partial sum for each range of places.
    let ranges = if n > TERMS { n.div_ceil(TERMS) } else { 0 };
    let partials = stream.empty(sum_dtype(dtype), &[ranges * outer * inner])?;
    let (from, to) = (stream.read(&dy)?, stream.read(&out)?);
    let (word, _) = rows_in_words(inner * dtype.size(), from | to);
    let vector = if word == 16 { 16 / dtype.size() } else { 1 };
    let add = AddRows {
        dy: from,
        out: to,
        partials: stream.read(&partials)?,
        at: stream.read(&values)?,
        keys: bounds.keys,
        begin,
        end,
        outer: outer as u64,
        size: size as u64,
        inner: inner as u64,
        n: n as u64,
        vector: vector as u64,
    };
    if ranges > 0 {
        let grid = grid_for(stream.gpu, partials.numel(), THREADS, vector);
        // SAFETY: there is a partial sum for each range of places and each row of `inner` elements.
        unsafe { stream.launch(&ADD_ROWS, dtype, "add_partials", grid, THREADS, 0, &add)? };
    }
    let grid = grid_for(stream.gpu, out.numel(), THREADS, vector);
    // SAFETY: the sorted positions are inside `dy`, and the words cover the result.
    unsafe { stream.launch(&ADD_ROWS, dtype, "add_rows", grid, THREADS, 0, &add)? };
    Ok(out)
}

/// Returns the elements of `x` at index 0 of `dim`, broadcast to the shape of indices, and the stride of `dim`.
fn at_index_0(x: &Array, dim: usize, shape: &[usize]) -> Result<(Array, usize)> {
    let mut strides = x.strides().to_vec();
    let stride = strides.get_mut(dim).map_or(0, std::mem::take);
    Ok((x.as_strided(shape, &strides, x.offset())?, stride))
}

/// Must match what `Gather` in `kernels/index.cuh` adds to a `Map`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Gather {
    ids: Ids,
    stride: u64,
}

pub(crate) fn gather(x: &Array, dim: usize, ids: &Array, part: DimShard) -> Result<Array> {
    let stream = stream_of(x)?;
    let (_, size, _) = split(x.dims(), dim);
    let described = |ids: &Array| Ids::new(stream, "gather", ids, dim, size, part, None);
    if x.numel() == 0 {
        described(&ids.contiguous()?)?.check(stream)?;
        return copy::full(x.device(), x.dtype(), ids.dims(), 0.0);
    }
    let (first, stride) = at_index_0(x, dim, ids.dims())?;
    let gather = Gather { ids: described(ids)?, stride: stride as u64 };
    stream.map_views(&INDEX, x.dtype(), "gather", (x.dtype(), ids.dims()), [ids, &first], gather)
}

/// Must match what `ScatterKeys` in `kernels/index.cuh` adds to a `Map`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ScatterKeys {
    ids: Ids,
    stride: u64,
    values: Address,
    none: u64,
}

/// Must match `Scatter` in `kernels/index.cuh`.
#[repr(C)]
struct Scatter {
    out: Address,
    source: Address,
    keys: Address,
    values: Address,
    count: u64,
    n: u64,
    inner: u64,
    none: u64,
}

pub(crate) fn scatter_add(x: &Array, dim: usize, ids: &Array, src: &Array, part: DimShard) -> Result<Array> {
    let stream = stream_of(x)?;
    let (_, size, _) = split(x.dims(), dim);
    let described = |ids: &Array| Ids::new(stream, "scatter_add", ids, dim, size, part, None);
    if x.numel() == 0 {
        described(&ids.contiguous()?)?.check(stream)?;
        return Ok(x.clone());
    }
    let out = copy::copy(x)?;
    if ids.numel() == 0 {
        return Ok(out);
    }
    let dtype = x.dtype();
    let (first, stride) = at_index_0(&out, dim, ids.dims())?;
    let source = src.as_strided(ids.dims(), src.strides(), src.offset())?;
    let values = stream.empty(DType::I64, ids.dims())?;
    let more = ScatterKeys {
        ids: described(ids)?,
        stride: stride as u64,
        values: stream.read(&values)?,
        none: out.numel() as u64,
    };
    let operands = [ids, &first, &source];
    let keys = stream.map_views(&INDEX, dtype, "scatter_keys", (DType::I64, ids.dims()), operands, more)?;
    let (_, n, inner) = split(ids.dims(), dim);
    let (name, [keys, values]) = match n <= FEW {
        true => ("scatter_few", [keys, values]),
        false => ("scatter_sorted", sort(stream, keys, values, out.numel())?),
    };
    let scatter = Scatter {
        out: stream.read(&out)?,
        source: stream.read(&source)?,
        keys: stream.read(&keys)?,
        values: stream.read(&values)?,
        count: keys.numel() as u64,
        n: n as u64,
        inner: inner as u64,
        none: more.none,
    };
    let grid = grid_for(stream.gpu, keys.numel(), THREADS, 1);
    // SAFETY: each key is the offset of an element of the result or `none`, and each value that of an element of the source.
    unsafe { stream.launch(&INDEX, dtype, name, grid, THREADS, 0, &scatter)? };
    Ok(out)
}

pub(crate) fn slice_step(x: &Array, dim: usize, start: usize, len: usize, step: usize) -> Result<Array> {
    let shape: Shape = x.shape().with_dim(dim, len);
    let mut strides = x.strides().to_vec();
    let offset = x.offset() + start * strides[dim];
    strides[dim] *= step;
    copy::copy(&x.as_strided(&shape, &strides, offset)?)
}

pub(crate) fn slice_step_backward(
    dy: &Array,
    dim: usize,
    start: usize,
    step: usize,
    size: usize,
) -> Result<Array> {
    super::write::replace_slice(None, &dy.shape().with_dim(dim, size), dy, dim, start, step)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, same_error};
    use super::*;
    use crate::host::testing::{ids, local, noise, strided};
    use crate::kernels::index as kernels;

    fn some_ids(n: usize, size: usize, seed: u64) -> Vec<i64> {
        noise(n, seed).iter().map(|x| ((x + 2.0) / 4.0 * size as f64) as i64).collect()
    }

    /// The whole dim, and shards of it.
    fn parts(size: usize) -> [(usize, usize); 4] {
        [(0, size), (0, size / 2), (size / 2, size - size / 2), (size, 0)]
    }

    #[test]
    fn select_and_its_adjoint() {
        for dtype in DType::ALL {
            for (shape, dim, rows) in [
                (vec![5, 7], 0, vec![4]),
                (vec![5, 16], 0, vec![3, 100]),
                (vec![5, 7], 1, vec![2, 3]),
                (vec![3, 4, 9], 1, vec![6]),
                (vec![2, 3, 32], 1, vec![200]),
                (vec![6], 0, vec![]),
                (vec![2, 3], 0, vec![0]),
                (vec![4, 0], 0, vec![3]),
                (vec![0, 3], 1, vec![2]),
                (vec![600, 16], 0, vec![5000]),
            ] {
                let (size, n) = (shape[dim], rows.iter().product());
                let out = [&shape[..dim], &rows, &shape[dim + 1..]].concat();
                let inputs = [
                    numbers(shape.iter().product(), dtype, 1),
                    ids(&some_ids(n, size, 2), &[n]),
                    numbers(out.iter().product(), dtype, 2),
                ];
                compare(&inputs, 0.0, |x| {
                    let (x, ids, dy) = (x[0].reshape(&shape)?, x[1].reshape(&rows)?, x[2].reshape(&out)?);
                    let mut all = vec![];
                    for (start, len) in parts(size) {
                        let part = DimShard { start, whole: size };
                        for x in [x.clone(), strided(&x)] {
                            let x = x.narrow(dim, start, len)?;
                            all.push(kernels::index_select("index_select", &x, dim, &strided(&ids), part)?);
                        }
                        for padding in [None, Some(1), Some(-1)] {
                            all.push(kernels::index_add(&ids, &dy, dim, len, padding, part)?);
                        }
                        all.push(kernels::index_add(&ids, &strided(&dy), dim, len, None, part)?);
                    }
                    Ok(all)
                });
            }
        }
    }

    #[test]
    fn many_terms_are_added_in_order() {
        for dtype in DType::ALL {
            // A few indices have hundreds of terms, some others none, one or two.
            for (n, inner) in [(2000, 1), (700, 16), (65, 3), (64, 3)] {
                let mut at = some_ids(n, 3, 1);
                at.iter_mut().step_by(97).enumerate().for_each(|(i, at)| *at = 7 + i as i64 / 2);
                compare(&[ids(&at, &[n]), numbers(2 * n * inner, dtype, 1)], 0.0, |x| {
                    let dy = x[1].reshape(&[2, n, inner])?;
                    Ok(vec![kernels::index_add(&x[0], &dy, 1, 40, Some(2), DimShard::whole(40))?])
                });
            }
        }
        // The sum of two −0 is −0, and so is the only term.
        let dy = Array::from_vec(vec![-0.0f32; 6], &[6]).unwrap();
        compare(&[ids(&[0, 1, 1, 2, 2, 2], &[6]), dy], 0.0, |x| {
            Ok(vec![kernels::index_add(&x[0], &x[1], 0, 4, None, DimShard::whole(4))?])
        });
    }

    #[test]
    fn large_indices_are_sorted() {
        let at = some_ids(9000, 70_000, 3);
        compare(&[ids(&at, &[9000]), numbers(9000 * 2, DType::F32, 1)], 0.0, |x| {
            let dy = x[1].reshape(&[9000, 2])?;
            Ok(vec![kernels::index_add(&x[0], &dy, 0, 70_000, None, DimShard::whole(70_000))?])
        });
    }

    #[test]
    fn gather_and_scatter() {
        for dtype in DType::ALL {
            for (shape, dim, rows) in [
                (vec![5, 7], 0, vec![9, 6]),
                (vec![5, 16], 0, vec![9, 16]),
                (vec![5, 7], 1, vec![5, 1]),
                (vec![3, 4, 9], 1, vec![2, 11, 9]),
                (vec![3, 4, 9], 2, vec![3, 4, 2]),
                (vec![6], 0, vec![10]),
                (vec![6], 0, vec![0]),
                (vec![3, 2], 0, vec![4, 0]),
                (vec![9, 40], 0, vec![130, 40]),
                (vec![3, 50], 1, vec![2, 3000]),
                (vec![20, 16, 20], 1, vec![18, 16, 18]),
            ] {
                let (size, n) = (shape[dim], rows.iter().product());
                // The source may be larger than the indices.
                let larger: Vec<usize> = rows.iter().map(|size| size + 1).collect();
                let inputs = [
                    numbers(shape.iter().product(), dtype, 1),
                    ids(&some_ids(n, size, 2), &[n]),
                    numbers(larger.iter().product(), dtype, 2),
                ];
                compare(&inputs, 0.0, |x| {
                    let (x, ids, src) = (x[0].reshape(&shape)?, x[1].reshape(&rows)?, x[2].reshape(&larger)?);
                    let mut all = vec![];
                    for (start, len) in parts(size) {
                        let part = DimShard { start, whole: size };
                        for (x, src) in [(x.clone(), src.clone()), (strided(&x), strided(&src))] {
                            let x = x.narrow(dim, start, len)?;
                            all.push(kernels::gather(&x, dim, &ids, part)?);
                            all.push(kernels::scatter_add(&x, dim, &strided(&ids), &src, part)?);
                        }
                    }
                    Ok(all)
                });
            }
            compare(&[local(dtype, &[3.0], &[]), ids(&[0], &[])], 0.0, |x| {
                let one = DimShard::whole(1);
                Ok(vec![
                    kernels::gather(&x[0], 0, &x[1], one)?,
                    kernels::scatter_add(&x[0], 0, &x[1], &x[0], one)?,
                    kernels::index_select("index_select", &x[0], 0, &x[1], one)?,
                ])
            });
        }
    }

    #[test]
    fn indices_may_be_transposed() {
        let at = some_ids(80 * 70, 40, 1);
        let inputs = [numbers(40 * 80 * 70, DType::F32, 1), ids(&at, &[80 * 70])];
        compare(&inputs, 0.0, |x| {
            let ids = x[1].reshape(&[80, 1, 70])?.transpose(0, 2)?;
            let x = x[0].reshape(&[80, 40, 70])?.transpose(0, 2)?;
            let all = DimShard::whole(40);
            Ok(vec![kernels::gather(&x, 1, &ids, all)?, kernels::scatter_add(&x, 1, &ids, &x, all)?])
        });
    }

    #[test]
    fn invalid_indices_are_errors() {
        // A shard, even an empty one, checks indices against the full dim.
        for (start, len) in [(0, 3), (1, 2), (3, 0), (0, 0)] {
            let part = DimShard { start, whole: 3 };
            for bad in [-1, 3, i64::MAX, i64::MIN] {
                let inputs = [numbers(6, DType::F32, 1), ids(&[0, bad], &[2])];
                let run = |f: &dyn Fn(&Array, &Array, &Array, &Array) -> Result<Array>| {
                    same_error(&inputs, |x| {
                        let whole = x[0].reshape(&[2, 3])?;
                        f(&whole.narrow(1, start, len)?, &x[1], &x[1].reshape(&[2, 1])?, &whole)
                    });
                };
                run(&|x, ids, _, _| kernels::index_select("embedding", x, 1, ids, part));
                run(&|x, _, ids, _| kernels::gather(x, 1, ids, part));
                run(&|_, ids, _, whole| {
                    kernels::index_add(ids, &whole.narrow(1, 0, 2)?, 1, len, Some(7), part)
                });
                if len > 0 {
                    run(&|x, _, ids, whole| kernels::scatter_add(x, 1, ids, whole, part));
                }
            }
        }
        let none = [numbers(0, DType::F32, 0), ids(&[0], &[1])];
        same_error(&none, |x| kernels::index_select("index_select", &x[0], 0, &x[1], DimShard::whole(0)));
    }

    #[test]
    fn slices_and_their_adjoint() {
        for dtype in DType::ALL {
            for (shape, dim) in
                [(vec![11], 0), (vec![11, 3], 0), (vec![3, 11], 1), (vec![2, 11, 16], 1), (vec![0, 11], 1)]
            {
                compare(&[numbers(shape.iter().product(), dtype, 1)], 0.0, |x| {
                    let x = x[0].reshape(&shape)?;
                    let mut all = vec![];
                    for (start, len, step) in
                        [(0, 11, 1), (2, 3, 1), (0, 6, 2), (1, 4, 3), (10, 1, 5), (11, 0, 2)]
                    {
                        for x in [x.clone(), strided(&x)] {
                            let got = kernels::slice_step(&x, dim, start, len, step)?;
                            all.push(kernels::slice_step_backward(&strided(&got), dim, start, step, 11)?);
                            all.push(got);
                        }
                    }
                    Ok(all)
                });
            }
        }
    }
}
