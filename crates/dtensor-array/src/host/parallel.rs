//! Kernels that several threads run together: the work is in parts, and each thread takes some of them.
//!
//! Every element of an output is written once, by the thread that takes the part it is in.

use std::mem::MaybeUninit;
use std::ops::Range;

use smallvec::SmallVec;

use super::combine::combine;
use super::copy::{PastCache, assign, axes_to};
use super::shared::Shared;
use crate::{Array, Element, Error, ReduceOp, Result, Shape, with_elem};

/// Bytes written per part: large against the cost of taking a part, small enough to be shared out evenly.
const PART: usize = 256 << 10;

/// Outputs of so many bytes are written past the cache: they do not fit into it anyway.
const LARGE: usize = 16 << 20;
/// Elements that a reduction keeps in the nearest cache before it writes them there.
const STAGED: usize = 2048;

/// Work in parts, each of which is done once.
pub trait Work: Send + Sync {
    /// The number of parts.
    fn parts(&self) -> usize;
    /// Does one part.
    fn run(&self, part: usize);
    /// Returns the outputs, once, when all parts are done.
    fn close(&self) -> Result<Vec<Array>>;
}

/// A part of the outputs: which one, and what of it.
type Part = (usize, Range<usize>);

/// Splits `len` units of `bytes` each into parts.
fn share_out(parts: &mut Vec<Part>, output: usize, len: usize, bytes: usize) {
    let step = (PART / bytes.max(1)).max(1);
    let mut at = 0;
    while at < len {
        // A rest that is not worth a part of its own goes with the last.
        let end = if len - at < step + step / 2 { len } else { at + step };
        parts.push((output, at..end));
        at = end;
    }
}

fn room<T: Element>(len: usize) -> Result<Shared<T>> {
    Shared::new(len).ok_or(Error::OutOfMemory { elements: len })
}

/// Called when every part of an output is done.
fn finish<T: Element>(room: &Shared<T>, shape: &[usize]) -> Result<Array> {
    // SAFETY: the parts cover the output, all of them are done, and the caller of `close` has seen to it that their writes
    // are seen by this thread.
    let data = unsafe { room.take() }.expect("work is closed once");
    Array::from_vec(data, shape)
}

/// Where an output of a reduction is in the inputs: rows of `run` elements that begin at `start` of every `stride`.
struct Rows {
    shape: Shape,
    run: usize,
    start: usize,
    stride: usize,
}

struct Reduction<T> {
    op: ReduceOp,
    /// Contiguous, and of one shape.
    inputs: Vec<Array>,
    outputs: Vec<(Rows, Shared<T>)>,
    parts: Vec<Part>,
    large: bool,
}

/// Reduces arrays of one shape and dtype element by element, in their order. With a dim and sizes, the result comes in as many
/// outputs, split along that dim.
pub(crate) fn reduce(
    op: ReduceOp,
    inputs: &[&Array],
    split: Option<(usize, &[usize])>,
) -> Result<Box<dyn Work>> {
    let inputs: Vec<Array> = inputs.iter().map(|x| x.contiguous()).collect::<Result<_>>()?;
    let shape = inputs[0].shape().clone();
    let rows: Vec<Rows> = match split {
        None => vec![Rows { run: shape.numel(), start: 0, stride: shape.numel(), shape }],
        Some((dim, sizes)) => {
            let inner: usize = shape[dim + 1..].iter().product();
            let mut end = 0;
            let output = |&size: &usize| {
                end += size;
                let (start, stride) = ((end - size) * inner, shape[dim] * inner);
                Rows { shape: shape.with_dim(dim, size), run: size * inner, start, stride }
            };
            sizes.iter().map(output).collect()
        }
    };
    with_elem!(inputs[0].dtype(), T => {
        let mut parts = Vec::new();
        let mut outputs = Vec::with_capacity(rows.len());
        for (i, rows) in rows.into_iter().enumerate() {
            let len = rows.shape.numel();
            share_out(&mut parts, i, len, size_of::<T>());
            outputs.push((rows, room::<T>(len)?));
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
        let (rows, room) = &self.outputs[output];
        // SAFETY: the parts of an output do not overlap, each is done once, and the output is taken after all are done.
        let mut out = unsafe { room.range(range.clone()) };
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
                // SAFETY: `combine` has written them.
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
        self.outputs.iter().map(|(rows, room)| finish(room, &rows.shape)).collect()
    }
}

/// One output: arrays one after the other along a dim.
struct Joined<T> {
    shape: Shape,
    dim: usize,
    /// Each with its place along the dim.
    pieces: Vec<(usize, Array)>,
    room: Shared<T>,
}

struct Concatenation<T> {
    outputs: Vec<Joined<T>>,
    /// Ranges of the outputs' first dim.
    parts: Vec<Part>,
    large: bool,
}

/// Concatenates, for each output, arrays of one dtype along a dim. No output is a scalar.
pub(crate) fn concatenate(outputs: Vec<(usize, Vec<Array>)>) -> Result<Box<dyn Work>> {
    with_elem!(outputs[0].1[0].dtype(), T => {
        let (mut parts, mut joined) = (Vec::new(), Vec::with_capacity(outputs.len()));
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
                share_out(&mut parts, i, shape[0], row * size_of::<T>());
            }
            let room = room::<T>(shape.numel())?;
            joined.push(Joined { shape, dim, pieces, room });
        }
        let elements: usize = joined.iter().map(|joined| joined.shape.numel()).sum();
        let large = elements * size_of::<T>() >= LARGE;
        Ok(Box::new(Concatenation::<T> { outputs: joined, parts, large }))
    })
}

impl<T: Element> Work for Concatenation<T> {
    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn run(&self, part: usize) {
        let (output, rows) = self.parts[part].clone();
        let Joined { shape, dim, pieces, room } = &self.outputs[output];
        let strides = shape.strides();
        // SAFETY: as in a reduction: parts are ranges of the first dim, which do not overlap.
        let out = unsafe { room.range(rows.start * strides[0]..rows.end * strides[0]) };
        let past_cache = PastCache::new();
        for (start, piece) in pieces {
            // The rows of the output that the piece has something of, and where they are in it.
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
        self.outputs.iter().map(|joined| finish(&joined.room, &joined.shape)).collect()
    }
}
