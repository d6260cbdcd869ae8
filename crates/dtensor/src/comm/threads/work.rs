//! What the ranks of a meeting do together: sums, and parts put side by side.
//!
//! Inputs are handles to the ranks' own values, read where they lie. Every element of an output is written once, by whoever
//! takes the part it is in. What needs no new memory (a broadcast, a permutation) is a handle passed on.

use std::mem::MaybeUninit;
use std::ops::Range;

use smallvec::SmallVec;

use super::shared::Shared;
use crate::comm::ReduceOp;
use crate::comm::call::{Call, Collective};
use crate::engine::kernels::combine::combine;
use crate::engine::kernels::copy::{PastCache, assign, axes_to};
use crate::engine::{Local, with_elem};
use crate::ops::Locals;
use crate::tensor::Shape;
use crate::{Device, Element, Error, Result};

/// Bytes written per part: large against the cost of taking a part, small enough to be shared out evenly.
const PART: usize = 256 << 10;

/// Outputs of so many bytes are written past the cache: they do not fit into it anyway.
const LARGE: usize = 16 << 20;
/// Elements that a reduction keeps in the nearest cache before it writes them there.
const STAGED: usize = 2048;

/// What each member gets; one entry if all get the same.
pub(crate) type Shares = Vec<Locals>;

/// Work in parts, each of which is done once.
pub(crate) trait Work: Send + Sync {
    /// How many there are.
    fn parts(&self) -> usize;
    /// Does one.
    fn run(&self, part: usize);
    /// What came of it, when all are done.
    fn close(&self) -> Result<Shares>;
}

/// The work that a collective is, for the members' calls and values, which fit together.
pub(crate) fn plan(calls: &[Call], values: Vec<Locals>) -> Result<Box<dyn Work>> {
    let n = calls.len();
    let one = |values: &[Locals], member: usize| values[member].clone();
    if calls[0].meta.device == Device::Meta {
        // There is nothing to move.
        return Ok(Box::new(Handles(vec![Locals::new()])));
    }
    let shares: Shares = match &calls[0].collective {
        Collective::Broadcast { src } => vec![one(&values, *src)],
        Collective::Scatter { src } => values[*src].iter().map(|x| Locals::from_elem(x.clone(), 1)).collect(),
        Collective::Permute { to } => {
            let mut shares = vec![Locals::new(); n];
            for (from, &to) in to.iter().enumerate() {
                shares[to] = one(&values, from);
            }
            shares
        }
        Collective::Exchange => vec![values.into_iter().flatten().collect()],
        Collective::Gather { dst } => {
            let mut shares = vec![Locals::new(); n];
            shares[*dst] = values.into_iter().flatten().collect();
            shares
        }
        Collective::Barrier => vec![Locals::new()],
        _ if n == 1 => values,
        Collective::AllReduce { op } => return reduction(*op, flat(&values), single(calls, &values), None),
        Collective::Reduce { op, dst } => {
            return reduction(*op, flat(&values), single(calls, &values), Some((n, *dst)));
        }
        Collective::ReduceScatter { op, dim, sizes } => {
            let shape = &calls[0].meta.shape;
            let inner: usize = shape[dim + 1..].iter().product();
            let mut start = 0;
            let targets = sizes.iter().map(|&size| {
                start += size;
                let run = size * inner;
                let (stride, start) = (shape[*dim] * inner, (start - size) * inner);
                Rows { shape: shape.with_dim(*dim, size), run, start, stride }
            });
            return reduction(*op, flat(&values), targets.collect(), None);
        }
        Collective::AllGather { dim, .. } => {
            let pieces = values.iter().map(|x| Piece::whole(&x[0])).collect();
            return concatenation(vec![(*dim, pieces)]);
        }
        Collective::AllToAll { split_dim, cat_dim, .. } => {
            let mut outputs: Vec<(usize, Vec<Piece>)> = (0..n).map(|_| (*cat_dim, Vec::new())).collect();
            for (call, value) in calls.iter().zip(&values) {
                let Collective::AllToAll { send, .. } = &call.collective else {
                    return Err(Error::argument("all_to_all", "another rank called another collective"));
                };
                let mut start = 0;
                for (output, &size) in outputs.iter_mut().zip(send) {
                    output.1.push(Piece::narrow(&value[0], *split_dim, start, size));
                    start += size;
                }
            }
            return concatenation(outputs);
        }
        Collective::Join | Collective::Send { .. } | Collective::Recv { .. } => {
            return Err(Error::argument("group", "a message between two ranks is not a meeting of all"));
        }
    };
    Ok(Box::new(Handles(shares)))
}

fn flat(values: &[Locals]) -> Vec<Local> {
    values.iter().map(|x| x[0].clone()).collect()
}

/// One output as large as every input.
fn single(calls: &[Call], values: &[Locals]) -> Vec<Rows> {
    let run = values[0][0].numel();
    vec![Rows { shape: calls[0].meta.shape.clone(), run, start: 0, stride: run }]
}

/// Values that exist already.
struct Handles(Shares);

impl Work for Handles {
    fn parts(&self) -> usize {
        0
    }
    fn run(&self, _: usize) {}
    fn close(&self) -> Result<Shares> {
        Ok(self.0.clone())
    }
}

/// A part of the outputs: which one, and what of it.
type Part = (usize, Range<usize>);

/// Cuts `len` units of `bytes` each into parts.
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

/// Where an output of a reduction lies in the inputs: rows of `run` elements that begin at `start` of every `stride`.
struct Rows {
    shape: Shape,
    run: usize,
    start: usize,
    stride: usize,
}

struct Reduction<T> {
    op: ReduceOp,
    /// Contiguous, and of one shape.
    inputs: Vec<Local>,
    outputs: Vec<(Rows, Shared<T>)>,
    parts: Vec<Part>,
    large: bool,
    /// The number of members and the one who gets the result, if only one does.
    only: Option<(usize, usize)>,
}

fn reduction(
    op: ReduceOp,
    inputs: Vec<Local>,
    rows: Vec<Rows>,
    only: Option<(usize, usize)>,
) -> Result<Box<dyn Work>> {
    with_elem!(inputs[0].dtype(), T => {
        let mut parts = Vec::new();
        let mut outputs = Vec::with_capacity(rows.len());
        for (i, rows) in rows.into_iter().enumerate() {
            let len = rows.shape.numel();
            share_out(&mut parts, i, len, size_of::<T>());
            outputs.push((rows, room::<T>(len)?));
        }
        let large = outputs.iter().map(|(rows, _)| rows.shape.numel()).sum::<usize>() * size_of::<T>() >= LARGE;
        Ok(Box::new(Reduction::<T> { op, inputs, outputs, parts, large, only }))
    })
}

fn room<T: Element>(len: usize) -> Result<Shared<T>> {
    Shared::new(len).ok_or_else(|| Error::Engine(format!("not enough memory for {len} elements")))
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
        let reads: SmallVec<[_; 8]> =
            self.inputs.iter().map(|x| x.read::<T>().expect("members agreed on the dtype")).collect();
        let data: SmallVec<[&[T]; 8]> = reads.iter().map(|read| read.data()).collect();
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

    fn close(&self) -> Result<Shares> {
        let shares = self.outputs.iter().map(|(rows, room)| finished(room, &rows.shape));
        let mut shares: Shares = shares.collect::<Result<_>>()?;
        if let Some((n, dst)) = self.only {
            let result = std::mem::take(&mut shares[0]);
            shares = vec![Locals::new(); n];
            shares[dst] = result;
        }
        Ok(shares)
    }
}

/// Called when every part of an output is done.
fn finished<T: Element>(room: &Shared<T>, shape: &[usize]) -> Result<Locals> {
    // SAFETY: the parts cover the output, all of them are done, and the meeting has seen to it that their writes are seen
    // by whoever closes it.
    let data = unsafe { room.take() }.expect("a meeting is closed once");
    Ok(Locals::from_elem(Local::from_vec(data, shape)?, 1))
}

/// A rectangular part of a value.
struct Piece {
    value: Local,
    offset: usize,
    dims: Shape,
    strides: SmallVec<[usize; 4]>,
}

impl Piece {
    fn whole(x: &Local) -> Self {
        Piece { value: x.clone(), offset: 0, dims: Shape::from(x.dims()), strides: x.strides().into() }
    }

    fn narrow(x: &Local, dim: usize, start: usize, size: usize) -> Self {
        let whole = Piece::whole(x);
        Piece { offset: start * whole.strides[dim], dims: whole.dims.with_dim(dim, size), ..whole }
    }
}

/// One output: pieces one after the other along a dim.
struct Joined<T> {
    shape: Shape,
    dim: usize,
    /// Each with its place along the dim.
    pieces: Vec<(usize, Piece)>,
    room: Shared<T>,
}

struct Concatenation<T> {
    outputs: Vec<Joined<T>>,
    /// Ranges of the outputs' first dim.
    parts: Vec<Part>,
    large: bool,
}

fn concatenation(outputs: Vec<(usize, Vec<Piece>)>) -> Result<Box<dyn Work>> {
    with_elem!(outputs[0].1[0].value.dtype(), T => {
        let (mut parts, mut joined) = (Vec::new(), Vec::with_capacity(outputs.len()));
        for (i, (dim, pieces)) in outputs.into_iter().enumerate() {
            let mut size = 0;
            let mut placed = Vec::with_capacity(pieces.len());
            let dims = pieces[0].dims.clone();
            for piece in pieces {
                let len = piece.dims[dim];
                if piece.dims.numel() > 0 {
                    placed.push((size, piece));
                }
                size += len;
            }
            let shape = dims.with_dim(dim, size);
            let row: usize = shape[1..].iter().product();
            if row > 0 {
                share_out(&mut parts, i, shape[0], row * size_of::<T>());
            }
            let room = room::<T>(shape.numel())?;
            joined.push(Joined { shape, dim, pieces: placed, room });
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
            // The rows of the output that the piece has something of, and where they lie in it.
            let (first, last, shift) = if *dim == 0 {
                (rows.start.max(*start), rows.end.min(start + piece.dims[0]), *start)
            } else {
                (rows.start, rows.end, 0)
            };
            if first >= last {
                continue;
            }
            let dims = piece.dims.with_dim(0, last - first);
            let axes = axes_to(&dims, &piece.strides, &strides);
            let from = piece.offset + (first - shift) * piece.strides[0];
            let to = (first - rows.start) * strides[0] + if *dim == 0 { 0 } else { start * strides[*dim] };
            let read = piece.value.read::<T>().expect("members agreed on the dtype");
            let (from, to) = (&read.data()[from..], &mut out[to..]);
            if self.large {
                past_cache.assign(&axes, from, to);
            } else {
                assign(&axes, from, to);
            }
        }
    }

    fn close(&self) -> Result<Shares> {
        self.outputs.iter().map(|joined| finished(&joined.room, &joined.shape)).collect()
    }
}
