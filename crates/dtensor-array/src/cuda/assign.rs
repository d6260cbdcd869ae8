//! [`Assign`]: copies into regions of new arrays. Reads and writes every byte once, in as few launches as possible.

use super::driver::{Address, failed};
use super::kernel::{ONE, file, units};
use super::map::THREADS;
use super::{Stream, grid_for};
use crate::host::layout::{Axes, Axis, push_axis};
use crate::{Array, DType, Error, Result};

units! {
    static ASSIGN: "assign", [file!("assign.cuh")], ONE;
}

/// The most pieces that one launch copies.
const PIECES: usize = 24;
const DIMS: usize = 5;
/// The bytes of the widest word.
const WIDEST: usize = 16;

/// Must match `Piece` in `kernels/assign.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Piece {
    source: Address,
    target: Address,
    count: u64,
    word: u32,
    ndim: u32,
    dims: [[u64; 3]; DIMS],
}

/// Must match `Assign` in `kernels/assign.cuh`.
#[repr(C, align(16))]
struct Argument {
    pattern: [u64; 2],
    pieces: [Piece; PIECES],
}

/// Writes to regions of arrays on one GPU: copies of arrays of one dtype, or one number everywhere. Regions must not overlap.
pub(super) struct Assign {
    stream: &'static Stream,
    dtype: DType,
    pattern: u64,
    pieces: Vec<Piece>,
    /// Copies of sources, which must live until the work is queued.
    copies: Vec<Array>,
}

/// Returns the size in bytes of the widest words that can copy a piece: at most `WIDEST`, and a divisor of both addresses, all
/// strides, and the size of the last dim.
fn widest_word(axes: &Axes<2>, addresses: [Address; 2], element: usize, is_fill: bool) -> usize {
    let (last, outer) = axes.split_last().expect("there is at least one axis");
    if last.strides[1] != 1 || !(is_fill || last.strides[0] == 1) {
        return element;
    }
    let strides = outer.iter().flat_map(|axis| axis.strides).fold(last.size, |bits, stride| bits | stride);
    let bits = (strides * element) as u64 | addresses[0] | addresses[1] | WIDEST as u64;
    1 << bits.trailing_zeros()
}

impl Assign {
    /// Creates an empty list. `value` is the number for [`fill`](Assign::fill): the bits of an element.
    pub(super) fn new(stream: &'static Stream, dtype: DType, value: u64) -> Assign {
        let mut pattern = value;
        let mut bits = dtype.size() * 8;
        while bits < 64 {
            pattern = pattern & ((1 << bits) - 1) | pattern << bits;
            bits *= 2;
        }
        Assign { stream, dtype, pattern, pieces: Vec::new(), copies: Vec::new() }
    }

    /// Adds a copy of `source` to the elements of `out` from `offset`, with these strides.
    pub(super) fn copy(
        &mut self,
        source: &Array,
        out: &Array,
        offset: usize,
        strides: &[usize],
    ) -> Result<()> {
        if source.device() != out.device() {
            return Err(Error::argument("copy", "expected all arrays to be on the same device"));
        }
        if source.numel() == 0 {
            return Ok(());
        }
        let axes = axes(source.dims(), source.strides(), strides);
        if axes.len() > DIMS || super::copy::is_transposed(source) {
            let dense = source.contiguous()?;
            let axes = self::axes(dense.dims(), dense.strides(), strides);
            self.push(Some(&dense), axes, out, offset)?;
            self.copies.push(dense);
            return Ok(());
        }
        self.push(Some(source), axes, out, offset)
    }

    /// Sets the elements of `out` from `offset`, with this shape and these strides, to the number.
    pub(super) fn fill(
        &mut self,
        shape: &[usize],
        out: &Array,
        offset: usize,
        strides: &[usize],
    ) -> Result<()> {
        if shape.contains(&0) {
            return Ok(());
        }
        self.push(None, axes(shape, &vec![0; shape.len()], strides), out, offset)
    }

    fn push(&mut self, source: Option<&Array>, axes: Axes<2>, out: &Array, offset: usize) -> Result<()> {
        if axes.len() > DIMS {
            return Err(failed("launch", format!("a copy with {} dims that cannot be merged", axes.len())));
        }
        let element = self.dtype.size();
        let target = self.stream.read(out)? + (offset * element) as u64;
        let source = source.map_or(Ok(0), |source| self.stream.read(source))?;
        let word = widest_word(&axes, [source, target], element, source == 0);
        let in_words = |elements: usize| (elements * element / word) as u64;
        let mut piece =
            Piece { source, target, word: word as u32, ndim: axes.len() as u32, ..Piece::default() };
        for (dim, axis) in piece.dims.iter_mut().zip(&axes) {
            *dim = [axis.size as u64, in_words(axis.strides[0]), in_words(axis.strides[1])];
        }
        let last = axes.len() - 1;
        if word > element {
            piece.dims[last] = [in_words(axes[last].size), 1, 1];
        }
        piece.count = piece.dims[..axes.len()].iter().map(|dim| dim[0]).product();
        self.pieces.push(piece);
        Ok(())
    }

    /// Queues the copies.
    pub(super) fn run(self) -> Result<()> {
        for chunk in self.pieces.chunks(PIECES) {
            let mut argument = Argument { pattern: [self.pattern; 2], pieces: [Piece::default(); PIECES] };
            argument.pieces[..chunk.len()].copy_from_slice(chunk);
            let most = chunk.iter().map(|piece| piece.count as usize).max().unwrap_or(0);
            let [blocks, ..] = grid_for(self.stream.gpu, most, THREADS, 1);
            let grid = [blocks, chunk.len() as u32, 1];
            // SAFETY: the pieces are inside their arrays, which live until the work is queued.
            unsafe { self.stream.launch(&ASSIGN, ONE[0], "assign", grid, THREADS, 0, &argument)? };
        }
        Ok(())
    }
}

/// Returns the loop over an array with two strides for each dim.
fn axes(dims: &[usize], source: &[usize], target: &[usize]) -> Axes<2> {
    let mut axes = Axes::new();
    for ((&size, &source), &target) in dims.iter().zip(source).zip(target) {
        push_axis(&mut axes, Axis { size, strides: [source, target] });
    }
    if axes.is_empty() {
        axes.push(Axis { size: 1, strides: [1, 1] });
    }
    axes
}
