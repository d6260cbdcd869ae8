//! Copies of an array with some elements replaced.

use super::assign::Assign;
use super::driver::Address;
use super::index::{Site, rows_in_words};
use super::kernel::{ONE, file, units};
use super::map::THREADS;
use super::{grid_for, stream_of};
use crate::host::index::DimShard;
use crate::host::rows::split;
use crate::{Array, DType, Result, Shape};

units! {
    static WRITE: "write", [file!("write.cuh")], ONE;
}

pub(crate) fn slice_write(x: &Array, source: &Array, dim: usize, start: usize, step: usize) -> Result<Array> {
    replace_slice(Some(x), x.dims(), source, dim, start, step)
}

/// Returns `x`, or zeros of its shape, with the entries `start`, `start + step`, … along `dim` replaced by those of `source`.
pub(super) fn replace_slice(
    x: Option<&Array>,
    shape: &[usize],
    source: &Array,
    dim: usize,
    start: usize,
    step: usize,
) -> Result<Array> {
    let stream = stream_of(source)?;
    let out = stream.empty(source.dtype(), shape)?;
    let strides = out.shape().strides();
    let mut pieces = Assign::new(stream, source.dtype(), 0);
    let len = source.dims()[dim];
    // Copies entries of `x` from index `first`: of a shape, with the strides that a function makes of those of an array.
    let mut keep = |shape: &[usize], first: usize, of: &dyn Fn(&[usize]) -> Vec<usize>| match x {
        Some(x) => {
            let offset = x.offset() + first * x.strides()[dim];
            let kept = x.as_strided(shape, &of(x.strides()), offset)?;
            pieces.copy(&kept, &out, first * strides[dim], &of(&strides))
        }
        None => pieces.fill(shape, &out, first * strides[dim], &of(&strides)),
    };
    let range = |len: usize| -> Shape { Shape::from(shape).with_dim(dim, len) };
    if len == 0 {
        keep(shape, 0, &<[usize]>::to_vec)?;
    } else {
        let end = start + (len - 1) * step + 1;
        keep(&range(start), 0, &<[usize]>::to_vec)?;
        keep(&range(shape[dim] - end), end, &<[usize]>::to_vec)?;
        // What is between the entries: a new dim counts it.
        let split = |list: &[usize], sizes: [usize; 2]| {
            let mut list = list.to_vec();
            list.splice(dim..=dim, sizes);
            list
        };
        let between = split(shape, [len - 1, step - 1]);
        keep(&between, start + 1, &|strides| split(strides, [strides[dim] * step, strides[dim]]))?;
        let mut steps = strides.clone();
        steps[dim] *= step;
        pieces.copy(source, &out, start * strides[dim], &steps)?;
    }
    pieces.run()?;
    Ok(out)
}

/// Must match `Mark` in `kernels/write.cuh`.
#[repr(C)]
struct Mark {
    ids: Address,
    table: Address,
    n: u64,
    whole: u64,
    site: Site,
    dim: u64,
}

/// Must match `IndexWrite` in `kernels/write.cuh`.
#[repr(C)]
struct IndexWrite {
    x: Address,
    source: Address,
    out: Address,
    table: Address,
    /// The number of words.
    count: u64,
    inner: u64,
    size: u64,
    n: u64,
    start: u64,
    word: u64,
}

pub(crate) fn index_write(
    x: &Array,
    ids: &Array,
    source: &Array,
    dim: usize,
    part: DimShard,
) -> Result<Array> {
    let stream = stream_of(x)?;
    let (ids, x, source) = (ids.contiguous()?, x.contiguous()?, source.contiguous()?);
    let (_, size, inner) = split(x.dims(), dim);
    // For each index of the full dim, 1 + the position that it is given at, or 0.
    let table = super::copy::full(x.device(), DType::I64, &[part.whole.max(1)], 0.0)?;
    let table = stream.read(&table)?;
    let n = ids.numel();
    if n > 0 {
        let site = stream.fault_site("index_copy").into();
        let whole = part.whole as u64;
        let mark = Mark { ids: stream.read(&ids)?, table, n: n as u64, whole, site, dim: dim as u64 };
        let grid = grid_for(stream.gpu, n, THREADS, 1);
        // SAFETY: there are `n` indices, and the table has an entry for each index below `whole`.
        unsafe { stream.launch(&WRITE, ONE[0], "mark", grid, THREADS, 0, &mark)? };
    }
    let out = stream.empty(x.dtype(), x.dims())?;
    if out.numel() > 0 {
        let [from, new, to] = [stream.read(&x)?, stream.read(&source)?, stream.read(&out)?];
        let (word, inner) = rows_in_words(inner * x.dtype().size(), from | new | to);
        let count = (out.numel() * x.dtype().size() / word) as u64;
        let (size, n, start) = (size as u64, n as u64, part.start as u64);
        let argument = IndexWrite {
            x: from,
            source: new,
            out: to,
            table,
            count,
            inner,
            size,
            n,
            start,
            word: word as u64,
        };
        let grid = grid_for(stream.gpu, count as usize, THREADS, 1);
        // SAFETY: the table has an entry for each of the `size` indices from `start`: 0, or at most `n`.
        unsafe { stream.launch(&WRITE, ONE[0], "index_write", grid, THREADS, 0, &argument)? };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, same_error};
    use super::*;
    use crate::host::testing::{ids, strided};
    use crate::kernels::write as kernels;

    #[test]
    fn slice_write_replaces_only_the_slice() {
        for dtype in DType::ALL {
            for inner in [5, 16] {
                let inputs = [numbers(8 * 5 * inner, dtype, 1), numbers(8 * 16 * 16, dtype, 2)];
                for dim in 0..3 {
                    compare(&inputs, 0.0, |x| {
                        let shape = [8, 5, inner];
                        let (x, from) = (x[0].reshape(&shape)?, &x[1]);
                        let mut all = vec![];
                        for (start, len, step) in
                            [(0, 5, 1), (1, 2, 2), (4, 1, 3), (2, 0, 1), (0, 2, 4), (1, 2, 1)]
                        {
                            let mut dims = shape;
                            dims[dim] = len;
                            let source = from.narrow(0, 0, dims.iter().product())?.reshape(&dims)?;
                            all.push(kernels::slice_write(&x, &source, dim, start, step)?);
                            all.push(kernels::slice_write(
                                &strided(&x),
                                &strided(&source),
                                dim,
                                start,
                                step,
                            )?);
                        }
                        Ok(all)
                    });
                }
            }
        }
        compare(&[numbers(0, DType::F32, 0)], 0.0, |x| {
            let none = x[0].reshape(&[0, 3])?;
            Ok(vec![kernels::slice_write(&none, &none, 0, 0, 1)?])
        });
    }

    #[test]
    fn index_write_replaces_entries() {
        for dtype in DType::ALL {
            for (shape, dim) in
                [([2, 6, 5], 1), ([6, 4, 16], 0), ([3, 2, 6], 2), ([6, 0, 2], 0), ([300, 6, 16], 1)]
            {
                for (list, start, whole) in
                    [(vec![3i64, 0], 0, 6), (vec![8, 3, 2, 7], 2, 9), (vec![], 0, 6), (vec![0, 20], 10, 21)]
                {
                    let mut dims = shape;
                    dims[dim] = list.len();
                    let source = numbers(dims.iter().product(), dtype, 2);
                    let x = numbers(shape.iter().product(), dtype, 1);
                    compare(&[x, source, ids(&list, &[list.len()])], 0.0, |x| {
                        let (x, source, ids) = (x[0].reshape(&shape)?, x[1].reshape(&dims)?, &x[2]);
                        let part = DimShard { start, whole };
                        Ok(vec![
                            kernels::index_write(&x, ids, &source, dim, part)?,
                            kernels::index_write(&strided(&x), ids, &strided(&source), dim, part)?,
                        ])
                    });
                }
            }
        }
    }

    #[test]
    fn invalid_indices_are_errors() {
        for list in [[1, 1], [0, 4], [-1, 2], [i64::MAX, 0]] {
            let inputs = [numbers(8, DType::F32, 1), numbers(4, DType::F32, 2), ids(&list, &[2])];
            same_error(&inputs, |x| {
                let (values, source) = (x[0].reshape(&[2, 4])?, x[1].reshape(&[2, 2])?);
                kernels::index_write(&values, &x[2], &source, 1, DimShard::whole(4))
            });
        }
    }
}
