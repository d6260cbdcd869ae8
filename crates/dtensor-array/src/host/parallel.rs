//! Kernels whose work several threads share: it is split into parts, and each thread runs some of them.
//!
//! Every element of an output belongs to one part, so it is written once.

use std::mem::MaybeUninit;
use std::ops::Range;

use smallvec::SmallVec;

use super::combine::combine;
use super::copy::{PastCache, assign, axes_to};
use super::shared::SharedBuffer;
use crate::{Array, Element, Error, ReduceOp, Result, Shape, with_elem};

/// The number of bytes written in one part: many compared to the overhead of a part, but few enough to balance the threads.
const PART_BYTES: usize = 256 << 10;

/// Outputs of at least this many bytes are written past the cache, because they do not fit into it.
const LARGE: usize = 16 << 20;
/// The number of elements that a reduction computes in the L1 cache before it writes them past the cache.
const STAGED: usize = 2048;

/// Work that is split into parts. Several threads may run different parts at the same time.
pub trait Work: Send + Sync {
    /// Returns the number of parts.
    fn parts(&self) -> usize;
    /// Runs one part. Each part must be run exactly once.
    fn run(&self, part: usize);
    /// Returns the outputs. Must be called once, after all parts have run.
    fn close(&self) -> Result<Vec<Array>>;
}

/// The index of an output, and a range of it.
type Part = (usize, Range<usize>);

/// Splits an output of `len` units of `bytes` each into parts.
fn push_parts(parts: &mut Vec<Part>, output: usize, len: usize, bytes: usize) {
    let step = (PART_BYTES / bytes.max(1)).max(1);
    let mut at = 0;
    while at < len {
        // A remainder that is too small for its own part is added to the last one.
        let end = if len - at < step + step / 2 { len } else { at + step };
        parts.push((output, at..end));
        at = end;
    }
}

fn allocate<T: Element>(len: usize) -> Result<SharedBuffer<T>> {
    SharedBuffer::new(len).ok_or(Error::OutOfMemory { elements: len })
}

/// Returns an output as an array, after all its parts have run.
fn finish<T: Element>(buffer: &SharedBuffer<T>, shape: &[usize]) -> Result<Array> {
    // SAFETY: the parts cover the output and all have run. The caller of `close` guarantees that their writes happen before
    // this call.
    let data = unsafe { buffer.take() }.expect("`close` is called once");
    Array::from_vec(data, shape)
}

/// The location of a reduction's output in the inputs: rows of `run` elements, the first at `start`, `stride` apart.
struct InputRows {
    shape: Shape,
    run: usize,
    start: usize,
    stride: usize,
}

struct Reduction<T> {
    op: ReduceOp,
    /// Contiguous arrays of one shape.
    inputs: Vec<Array>,
    outputs: Vec<(InputRows, SharedBuffer<T>)>,
    parts: Vec<Part>,
    large: bool,
}

/// Reduces arrays of one shape and dtype element by element, in list order. If `split` gives a dim and sizes, the result is
/// split along that dim into one output for each size.
pub(crate) fn reduce(
    op: ReduceOp,
    inputs: &[&Array],
    split: Option<(usize, &[usize])>,
) -> Result<Box<dyn Work>> {
    let inputs: Vec<Array> = inputs.iter().map(|x| x.contiguous()).collect::<Result<_>>()?;
    let shape = inputs[0].shape().clone();
    let rows: Vec<InputRows> = match split {
        None => vec![InputRows { run: shape.numel(), start: 0, stride: shape.numel(), shape }],
        Some((dim, sizes)) => {
            let inner: usize = shape[dim + 1..].iter().product();
            let mut end = 0;
            let output = |&size: &usize| {
                end += size;
                let (start, stride) = ((end - size) * inner, shape[dim] * inner);
                InputRows { shape: shape.with_dim(dim, size), run: size * inner, start, stride }
            };
            sizes.iter().map(output).collect()
        }
    };
    with_elem!(inputs[0].dtype(), T => {
        let mut parts = Vec::new();
        let mut outputs = Vec::with_capacity(rows.len());
        for (i, rows) in rows.into_iter().enumerate() {
            let len = rows.shape.numel();
            push_parts(&mut parts, i, len, size_of::<T>());
            outputs.push((rows, allocate::<T>(len)?));
        }
        let large = outputs.iter().map(|(rows, _)| rows.shape.numel()).sum::<usize>() * size_of::<T>() >= LARGE;
        Ok(Box::new(Reduction::<T> { op, inputs, outputs, parts, large }))
    })
}

impl<T: Element> Work for Reduction<T> {
    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn run(&self, part: usize) {
        let (output, range) = self.parts[part].clone();
        let (rows, buffer) = &self.outputs[output];
        // SAFETY: the parts of an output do not overlap, each is run once, and the output is taken after all have run.
        let mut out = unsafe { buffer.range(range.clone()) };
        let read = |x| Array::read::<T>(x).expect("all inputs have the dtype of the first").data();
        let data: SmallVec<[&[T]; 8]> = self.inputs.iter().map(read).collect();
        let mut block = [const { MaybeUninit::<T>::uninit() }; STAGED];
        let past_cache = PastCache::new();
        let most = if self.large { STAGED } else { usize::MAX };
        let mut at = range.start;
        while at < range.end {
            let (row, column) = (at / rows.run, at % rows.run);
            let len = (rows.run - column).min(range.end - at).min(most);
            let from = row * rows.stride + rows.start + column;
            let xs: SmallVec<[&[T]; 8]> = data.iter().map(|x| &x[from..from + len]).collect();
            let (now, rest) = out.split_at_mut(len);
            if self.large {
                combine(self.op.into(), &xs, &mut block[..len]);
                // SAFETY: `combine` has written these elements.
                let sums = unsafe { std::slice::from_raw_parts(block.as_ptr().cast::<T>(), len) };
                past_cache.write_run(sums, now);
            } else {
                combine(self.op.into(), &xs, now);
            }
            out = rest;
            at += len;
        }
    }

    fn close(&self) -> Result<Vec<Array>> {
        self.outputs.iter().map(|(rows, buffer)| finish(buffer, &rows.shape)).collect()
    }
}

/// One output of a concatenation.
struct ConcatOutput<T> {
    shape: Shape,
    dim: usize,
    /// The arrays, each with its first index along the dim.
    pieces: Vec<(usize, Array)>,
    buffer: SharedBuffer<T>,
}

struct Concatenation<T> {
    outputs: Vec<ConcatOutput<T>>,
    /// Ranges along the first dim of the outputs.
    parts: Vec<Part>,
    large: bool,
}

/// Concatenates arrays. Each output is given by a dim and the arrays to concatenate along it. All arrays must have one dtype
/// and at least one dim.
pub(crate) fn concatenate(outputs: Vec<(usize, Vec<Array>)>) -> Result<Box<dyn Work>> {
    with_elem!(outputs[0].1[0].dtype(), T => {
        let (mut parts, mut concatenated) = (Vec::new(), Vec::with_capacity(outputs.len()));
        for (i, (dim, arrays)) in outputs.into_iter().enumerate() {
            let mut size = 0;
            let mut pieces = Vec::with_capacity(arrays.len());
            let first = arrays[0].shape().clone();
            for array in arrays {
                let len = array.dims()[dim];
                if array.numel() > 0 {
                    pieces.push((size, array));
                }
                size += len;
            }
            let shape = first.with_dim(dim, size);
            let row: usize = shape[1..].iter().product();
            if row > 0 {
                push_parts(&mut parts, i, shape[0], row * size_of::<T>());
            }
            let buffer = allocate::<T>(shape.numel())?;
            concatenated.push(ConcatOutput { shape, dim, pieces, buffer });
        }
        let elements: usize = concatenated.iter().map(|output| output.shape.numel()).sum();
        let large = elements * size_of::<T>() >= LARGE;
        Ok(Box::new(Concatenation::<T> { outputs: concatenated, parts, large }))
    })
}

impl<T: Element> Work for Concatenation<T> {
    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn run(&self, part: usize) {
        let (output, rows) = self.parts[part].clone();
        let ConcatOutput { shape, dim, pieces, buffer } = &self.outputs[output];
        let strides = shape.strides();
        // SAFETY: as in a reduction. The parts are ranges of the first dim, which do not overlap.
        let out = unsafe { buffer.range(rows.start * strides[0]..rows.end * strides[0]) };
        let past_cache = PastCache::new();
        for (start, piece) in pieces {
            // The rows of the output that contain elements of the piece, and the index of the piece's first row.
            let (first, last, shift) = if *dim == 0 {
                (rows.start.max(*start), rows.end.min(start + piece.dims()[0]), *start)
            } else {
                (rows.start, rows.end, 0)
            };
            if first >= last {
                continue;
            }
            let dims = piece.shape().with_dim(0, last - first);
            let axes = axes_to(&dims, piece.strides(), &strides);
            let from = (first - shift) * piece.strides()[0];
            let to = (first - rows.start) * strides[0] + if *dim == 0 { 0 } else { start * strides[*dim] };
            let read = piece.read::<T>().expect("all pieces have the dtype of the first");
            let (from, to) = (&read.data()[from..], &mut out[to..]);
            if self.large {
                past_cache.assign(&axes, from, to);
            } else {
                assign(&axes, from, to);
            }
        }
    }

    fn close(&self) -> Result<Vec<Array>> {
        self.outputs.iter().map(|output| finish(&output.buffer, &output.shape)).collect()
    }
}
