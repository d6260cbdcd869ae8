//! Selecting and scattering by index, and the adjoint of each.
//!
//! Indices are `i64`, and all are checked before any element is moved. Terms of one sum are added in the order of the indices, so
//! results are the same on every run.
//!
//! The indexed dim may be sharded over ranks. Each rank has a [`DimShard`] of the dim and all indices, and ignores indices that
//! belong to other ranks. The results of the ranks add up to, or are the shards of, the full result.

use std::mem::MaybeUninit;
use std::ops::AddAssign;

use super::copy;
use super::rows::split;
use super::{fill_array, simd};
use crate::{Array, Elem, Num, Read, with_elem};
use crate::{Error, Result, Shape};

/// The number of terms in one partial sum.
const BLOCK_TERMS: usize = 64;
/// Blocks shorter than this are copied element by element, because a call of `memcpy` costs more.
const SHORT: usize = 8;

/// The range of a sharded dim's indices that a shard holds. It begins at `start`, and its length is the size of the shard's dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DimShard {
    /// The first index.
    pub start: usize,
    /// The size of the dim in the full array.
    pub whole: usize,
}

impl DimShard {
    /// Creates the range of a dim that is not sharded.
    pub fn whole(size: usize) -> Self {
        DimShard { start: 0, whole: size }
    }

    /// Returns true if a shard with `size` indices does not hold all of them.
    fn is_sharded(self, size: usize) -> bool {
        self != DimShard::whole(size)
    }

    /// Returns the index in a shard of `size` of a checked index of the full dim, or `None` if another shard holds it. If
    /// `SHARDED` is false this is the index itself, and nothing is compared.
    #[inline(always)]
    pub(super) fn local_index<const SHARDED: bool>(self, id: i64, size: usize) -> Option<usize> {
        let at = (id as usize).wrapping_sub(if SHARDED { self.start } else { 0 });
        (!SHARDED || at < size).then_some(at)
    }
}

/// Returns the indices as a contiguous array. Returns an error if an index is outside `0..size`, unless it equals `skip`.
pub(super) fn checked(
    op: &'static str,
    ids: &Array,
    dim: usize,
    size: usize,
    skip: Option<i64>,
) -> Result<Array> {
    let ids = ids.contiguous()?;
    let read = ids.read::<i64>()?;
    let all = &read.data()[..ids.numel()];
    // As `u64`, a negative index is very large. The first loop is branch-free, because usually all indices are in bounds.
    let outside = |id: i64| id as u64 >= size as u64;
    let any_outside = simd::<i64, _>(
        #[inline(always)]
        || all.iter().fold(false, |any, &id| any | outside(id)),
    );
    let bad = |id: &&i64| outside(**id) && Some(**id) != skip;
    if any_outside && let Some(&index) = all.iter().find(bad) {
        return Err(Error::IndexOutOfBounds { op, index, dim, size });
    }
    Ok(ids)
}

/// Copies a block. Short blocks are copied without a call.
#[inline(always)]
fn copy_block<T: Copy>(out: &mut [MaybeUninit<T>], from: &[T]) {
    if from.len() < SHORT {
        for (out, &x) in out.iter_mut().zip(from) {
            out.write(x);
        }
    } else {
        copy::write_run(from, out);
    }
}

/// Selects the entries of `x` at the indices `ids` along `dim`. In the result, the dims of `ids` replace `dim`. Along dim 0
/// of a matrix this is an embedding lookup.
pub(crate) fn index_select(
    op: &'static str,
    x: &Array,
    dim: usize,
    ids: &Array,
    part: DimShard,
) -> Result<Array> {
    let (outer, size, inner) = split(x.dims(), dim);
    let ids_dims = ids.dims();
    let ids = checked(op, ids, dim, part.whole, None)?;
    let ids_read = ids.read::<i64>()?;
    let ids = &ids_read.data()[..ids.numel()];
    let (before, after) = if x.dims().is_empty() { (0, 0) } else { (dim, dim + 1) };
    let shape: Shape = [&x.dims()[..before], ids_dims, &x.dims()[after..]].concat().into();
    // Contiguous rows with a larger stride are read in place, because only few of them may be selected.
    let in_place = outer == 1
        && !x.dims().is_empty()
        && x.strides()[after..] == Shape::from(&x.dims()[after..]).strides()[..]
        && x.dims()[..dim].iter().all(|&size| size == 1);
    let x = if in_place { x.clone() } else { x.contiguous()? };
    let stride = if in_place { x.strides()[dim] } else { inner };
    with_elem!(x.dtype(), T => {
        let read = x.read::<T>()?;
        let sizes = [outer, size, inner];
        let fill = |out: &mut [MaybeUninit<T>]| match part.is_sharded(size) {
            false => select_blocks::<T, false>(read.data(), sizes, stride, ids, part, out),
            true => select_blocks::<T, true>(read.data(), sizes, stride, ids, part, out),
        };
        // SAFETY: every block is written.
        unsafe { fill_array::<T>(&shape, fill) }
    })
}

/// Writes all of `out`: a block of `inner` elements for each outer index and each of `ids`. Blocks in `data` are `stride` apart.
#[inline(always)]
fn select_blocks<T: Elem, const SHARDED: bool>(
    data: &[T],
    [outer, size, inner]: [usize; 3],
    stride: usize,
    ids: &[i64],
    part: DimShard,
    out: &mut [MaybeUninit<T>],
) {
    if inner == 1 {
        for (o, out) in out.chunks_exact_mut(ids.len().max(1)).enumerate() {
            let data = &data[o * size * stride..];
            for (out, &id) in out.iter_mut().zip(ids) {
                let at = part.local_index::<SHARDED>(id, size);
                out.write(at.map_or(T::default(), |at| data[at * stride]));
            }
        }
        return;
    }
    let places = (0..outer).flat_map(|o| {
        ids.iter().map(move |&id| part.local_index::<SHARDED>(id, size).map(|at| o * size + at))
    });
    for (out, from) in out.chunks_exact_mut(inner.max(1)).zip(places) {
        match from {
            Some(from) => copy_block(out, &data[from * stride..][..inner]),
            None => copy::fill(out, T::default()),
        }
    }
}

/// Computes the adjoint of [`index_select`]: an array with `size` entries along `dim`, where entry `j` is the sum of the
/// entries `i` of `dy` with `ids[i] = j`. Skips entries of `dy` whose index is `padding` or belongs to another shard.
pub(crate) fn index_add(
    ids: &Array,
    dy: &Array,
    dim: usize,
    size: usize,
    padding: Option<i64>,
    part: DimShard,
) -> Result<Array> {
    let after = dim + ids.dims().len();
    let (outer, inner) = (dy.dims()[..dim].iter().product::<usize>(), dy.dims()[after..].iter().product());
    let shape = [&dy.dims()[..dim], &[size], &dy.dims()[after..]].concat();
    let ids = checked("index_add", ids, dim, part.whole, padding)?;
    let read = ids.read::<i64>()?;
    let all = &read.data()[..ids.numel()];
    let occurrences = match part.is_sharded(size) {
        false => Occurrences::new::<false>(all, size, padding, part),
        true => Occurrences::new::<true>(all, size, padding, part),
    };
    let dy = dy.contiguous()?;
    with_elem!(dy.dtype(), T => {
        let read = dy.read::<T>()?;
        let data = &read.data()[..dy.numel()];
        let fill = |out: &mut [_]| {
            simd::<T, _>(
                #[inline(always)]
                || add_blocks::<T>(&occurrences, data, outer, inner, ids.numel(), out),
            )
        };
        // SAFETY: every block of every entry is written, with zeros if no index selects it.
        unsafe { fill_array::<T>(&shape, fill) }
    })
}

/// The positions in `ids` of each index of a shard, ascending: `at[starts[i]..starts[i + 1]]` for local index `i`.
struct Occurrences {
    starts: Vec<usize>,
    at: Vec<usize>,
}

impl Occurrences {
    fn new<const SHARDED: bool>(ids: &[i64], size: usize, skip: Option<i64>, part: DimShard) -> Self {
        let local = || {
            let of_all = ids.iter().enumerate().filter(|&(_, &id)| Some(id) != skip);
            of_all.filter_map(|(i, &id)| Some((i, part.local_index::<SHARDED>(id, size)?)))
        };
        // A counting sort. While positions are written, `starts[i + 1]` is the next free slot of index `i`.
        let mut starts = vec![0; size + 2];
        for (_, at) in local() {
            starts[at + 2] += 1;
        }
        for i in 2..starts.len() {
            starts[i] += starts[i - 1];
        }
        let mut at = vec![0; starts[size + 1]];
        for (i, to) in local() {
            let next = &mut starts[to + 1];
            at[*next] = i;
            *next += 1;
        }
        Occurrences { starts, at }
    }

    fn of(&self, id: usize) -> &[usize] {
        &self.at[self.starts[id]..self.starts[id + 1]]
    }

    fn size(&self) -> usize {
        self.starts.len() - 2
    }
}

#[inline(always)]
fn add_blocks<T: Elem>(
    occurrences: &Occurrences,
    data: &[T],
    outer: usize,
    inner: usize,
    count: usize,
    out: &mut [MaybeUninit<T>],
) {
    let (mut part, mut total) = (vec![T::Acc::ZERO; inner], vec![T::Acc::ZERO; inner]);
    let mut blocks = out.chunks_exact_mut(inner.max(1));
    for o in 0..outer {
        let data = &data[o * count * inner..][..count * inner];
        let block = |i: usize| &data[i * inner..][..inner];
        for id in 0..occurrences.size() {
            let Some(out) = blocks.next() else { return };
            match *occurrences.of(id) {
                [] => copy::fill(out, T::default()),
                [one] => copy_block(out, block(one)),
                [one, two] => {
                    for ((out, x), y) in out.iter_mut().zip(block(one)).zip(block(two)) {
                        out.write(T::from_acc(x.acc() + y.acc()));
                    }
                }
                ref many => {
                    total.fill(T::Acc::ZERO);
                    for terms in many.chunks(BLOCK_TERMS) {
                        part.fill(T::Acc::ZERO);
                        for &i in terms {
                            for (sum, x) in part.iter_mut().zip(block(i)) {
                                *sum = *sum + x.acc();
                            }
                        }
                        for (total, &part) in total.iter_mut().zip(&part) {
                            *total = *total + part;
                        }
                    }
                    for (out, &total) in out.iter_mut().zip(&total) {
                        out.write(T::from_acc(total));
                    }
                }
            }
        }
    }
}

/// Calls `row` for each row (along the last dim) of an array of `dims`, with the row's offset in each of several arrays.
fn each_row<const N: usize>(dims: &[usize], strides: [&[usize]; N], mut row: impl FnMut([usize; N])) {
    let Some((_, lead)) = dims.split_last() else { return row([0; N]) };
    if dims.contains(&0) {
        return;
    }
    let mut at = vec![0; lead.len()];
    loop {
        row(strides.map(|strides| at.iter().zip(strides).map(|(i, stride)| i * stride).sum()));
        // Advance to the next row in row-major order.
        let Some(d) = (0..lead.len()).rev().find(|&d| at[d] + 1 < lead[d]) else { return };
        at[d] += 1;
        at[d + 1..].fill(0);
    }
}

/// Returns the strides with that of `dim` set to 0, the stride of `dim`, and the resulting stride of the last dim.
fn strides_without(strides: &[usize], dim: usize) -> (Vec<usize>, usize, usize) {
    let mut rest = strides.to_vec();
    let stride = rest.get_mut(dim).map_or(0, std::mem::take);
    let last = rest.last().copied().unwrap_or(0);
    (rest, stride, last)
}

/// Gathers one element of `x` along `dim` for every index: `out[i][j] = x[ids[i][j]][j]` for `dim` 0. Elements of other
/// shards are zero.
pub(crate) fn gather(x: &Array, dim: usize, ids: &Array, part: DimShard) -> Result<Array> {
    let (_, size, _) = split(x.dims(), dim);
    let shape = ids.dims();
    let ids = checked("gather", ids, dim, part.whole, None)?;
    if x.numel() == 0 {
        return copy::full(x.dtype(), shape, 0.0);
    }
    let ids_read = ids.read::<i64>()?;
    let ids = &ids_read.data()[..ids.numel()];
    with_elem!(x.dtype(), T => {
        let read = x.read::<T>()?;
        let (data, strides) = (read.data(), read.strides);
        let fill = |out: &mut [MaybeUninit<T>]| match part.is_sharded(size) {
            false => gather_rows::<T, false>(data, strides, dim, size, shape, ids, part, out),
            true => gather_rows::<T, true>(data, strides, dim, size, shape, ids, part, out),
        };
        // SAFETY: the rows cover the result, and each is written completely.
        unsafe { fill_array::<T>(shape, fill) }
    })
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn gather_rows<T: Elem, const SHARDED: bool>(
    data: &[T],
    strides: &[usize],
    dim: usize,
    size: usize,
    shape: &[usize],
    ids: &[i64],
    part: DimShard,
    out: &mut [MaybeUninit<T>],
) {
    let (strides, stride, last) = strides_without(strides, dim);
    let row_len = shape.last().copied().unwrap_or(1).max(1);
    let mut rows = out.chunks_exact_mut(row_len).zip(ids.chunks_exact(row_len));
    each_row(shape, [&strides], |[offset]| {
        let (out, ids) = rows.next().expect("there is a row of indices for each row of the shape");
        let data = &data[offset..];
        if last == 0 && stride == 1 {
            let data = &data[..size];
            for (out, &id) in out.iter_mut().zip(ids) {
                out.write(part.local_index::<SHARDED>(id, size).map_or(T::default(), |at| data[at]));
            }
        } else {
            for (i, (out, &id)) in out.iter_mut().zip(ids).enumerate() {
                let at = part.local_index::<SHARDED>(id, size);
                out.write(at.map_or(T::default(), |at| data[i * last + at * stride]));
            }
        }
    });
}

/// Returns `x` with the elements of `src` added at the indices `ids` along `dim`: `out[ids[i][j]][j] += src[i][j]` for
/// `dim` 0. Skips indices that belong to another shard.
pub(crate) fn scatter_add(x: &Array, dim: usize, ids: &Array, src: &Array, part: DimShard) -> Result<Array> {
    let (_, size, _) = split(x.dims(), dim);
    let shape = ids.dims();
    let ids = checked("scatter_add", ids, dim, part.whole, None)?;
    if x.numel() == 0 {
        return Ok(x.clone());
    }
    let ids_read = ids.read::<i64>()?;
    let ids = &ids_read.data()[..ids.numel()];
    let x = x.contiguous()?;
    let strides = Shape::from(x.dims()).strides();
    with_elem!(x.dtype(), T => {
        let mut sums: Vec<_> = x.read::<T>()?.data()[..x.numel()].iter().map(|x| x.acc()).collect();
        let src = src.read::<T>()?;
        match part.is_sharded(size) {
            false => scatter_rows::<T, false>(&src, dim, size, shape, ids, part, &strides, &mut sums),
            true => scatter_rows::<T, true>(&src, dim, size, shape, ids, part, &strides, &mut sums),
        }
        Array::from_vec::<T>(sums.into_iter().map(T::from_acc).collect(), x.dims())
    })
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn scatter_rows<T: Elem<Acc: AddAssign>, const SHARDED: bool>(
    src: &Read<'_, T>,
    dim: usize,
    size: usize,
    shape: &[usize],
    ids: &[i64],
    part: DimShard,
    strides: &[usize],
    sums: &mut [T::Acc],
) {
    let (strides, stride, last) = strides_without(strides, dim);
    let (data, src_last) = (src.data(), src.strides.last().copied().unwrap_or(0));
    let mut rows = ids.chunks_exact(shape.last().copied().unwrap_or(1).max(1));
    each_row(shape, [&strides, src.strides], |[to, from]| {
        let ids = rows.next().expect("there is a row of indices for each row of the shape");
        let (sums, data) = (&mut sums[to..], &data[from..]);
        if last == 0 && stride == 1 && src_last == 1 {
            for (&id, x) in ids.iter().zip(data) {
                if let Some(at) = part.local_index::<SHARDED>(id, size) {
                    sums[at] += x.acc();
                }
            }
        } else {
            for (i, &id) in ids.iter().enumerate() {
                if let Some(at) = part.local_index::<SHARDED>(id, size) {
                    sums[i * last + at * stride] += data[i * src_last].acc();
                }
            }
        }
    });
}

/// Copies every `step`-th element. Small steps are constants for the compiler, which then uses shuffles.
#[inline(always)]
fn copy_every<T: Copy>(out: &mut [MaybeUninit<T>], from: &[T], step: usize) {
    #[inline(always)]
    fn fixed<T: Copy, const STEP: usize>(out: &mut [MaybeUninit<T>], from: &[T]) {
        let (chunks, rest) = from.as_chunks::<STEP>();
        for (out, chunk) in out.iter_mut().zip(chunks.iter()) {
            out.write(chunk[0]);
        }
        // The last element may be in an incomplete chunk.
        if let (Some(out), Some(&last)) = (out.get_mut(chunks.len()), rest.first()) {
            out.write(last);
        }
    }
    match step {
        2 => fixed::<T, 2>(out, from),
        3 => fixed::<T, 3>(out, from),
        4 => fixed::<T, 4>(out, from),
        _ => {
            for (out, chunk) in out.iter_mut().zip(from.chunks(step)) {
                out.write(chunk[0]);
            }
        }
    }
}

/// Copies `len` entries along `dim`: the one at `start` and every `step`-th after it.
pub(crate) fn slice_step(x: &Array, dim: usize, start: usize, len: usize, step: usize) -> Result<Array> {
    let mut shape = x.dims().to_vec();
    shape[dim] = len;
    let (x, start) = if x.is_contiguous() || len == 0 {
        (x.clone(), start)
    } else {
        // Only the range from the first to the last entry must be made contiguous.
        (x.narrow(dim, start, (len - 1) * step + 1)?.contiguous()?, 0)
    };
    let (_, size, inner) = split(x.dims(), dim);
    with_elem!(x.dtype(), T => {
        let read = x.read::<T>()?;
        let data = read.data();
        let fill = |out: &mut [MaybeUninit<T>]| {
            for (o, out) in out.chunks_exact_mut((len * inner).max(1)).enumerate() {
                let data = &data[(o * size + start) * inner..];
                if step == 1 {
                    copy::write_run(&data[..len * inner], out);
                } else if inner == 1 {
                    simd::<T, _>(
                        #[inline(always)]
                        || copy_every(out, data, step),
                    );
                } else {
                    for (out, x) in out.chunks_exact_mut(inner).zip(data.chunks(step * inner)) {
                        copy_block(out, &x[..inner]);
                    }
                }
            }
        };
        // SAFETY: every block of `len` entries is written, because all of them are inside the dim.
        unsafe { fill_array::<T>(&shape, fill) }
    })
}

/// Computes the adjoint of [`slice_step`]: an array with `size` entries along `dim`, with the entries of `dy` at `start`
/// and every `step`-th after it, and zeros elsewhere.
pub(crate) fn slice_step_backward(
    dy: &Array,
    dim: usize,
    start: usize,
    step: usize,
    size: usize,
) -> Result<Array> {
    let (_, len, inner) = split(dy.dims(), dim);
    let mut shape = dy.dims().to_vec();
    shape[dim] = size;
    let dy = dy.contiguous()?;
    with_elem!(dy.dtype(), T => {
        let read = dy.read::<T>()?;
        let data = read.data();
        let fill = |out: &mut [MaybeUninit<T>]| {
            for (o, out) in out.chunks_exact_mut((size * inner).max(1)).enumerate() {
                let data = &data[o * len * inner..][..len * inner];
                let (before, rest) = out.split_at_mut(if len == 0 { 0 } else { start * inner });
                copy::fill(before, T::default());
                if step == 1 {
                    copy::write_run(data, &mut rest[..data.len()]);
                    copy::fill(&mut rest[data.len()..], T::default());
                    continue;
                }
                copy::fill(rest, T::default());
                if inner == 1 {
                    for (out, &x) in rest.iter_mut().step_by(step).zip(data) {
                        out.write(x);
                    }
                } else {
                    for (out, x) in rest.chunks_mut(step * inner).zip(data.chunks_exact(inner)) {
                        copy_block(&mut out[..inner], x);
                    }
                }
            }
        };
        // SAFETY: all elements before the first entry are written, and all from there to the end.
        unsafe { fill_array::<T>(&shape, fill) }
    })
}

#[cfg(test)]
mod tests;
