//! Folds of any dims of an array: builds the arguments of their kernels. The loops are in `kernels/fold.cuh`.

use super::driver::{Address, failed};
use super::map::divider;
use super::{Stream, Unit};
use crate::host::layout::{Axes, Axis, push_axis};
use crate::{Array, DType, Result, Shape};

const MOST_AXES: usize = 16;
const THREADS: usize = 256;
/// The number of loads of a thread that do not wait for each other.
const LOADS: usize = 4;
/// The size of the largest state, in bytes.
const STATE: usize = 24;

/// Must match `FoldAxis` in `fold.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FoldAxis {
    size: u32,
    magic: u32,
    shift: u32,
    reserved: u32,
    stride: i64,
    out: i64,
}

/// Must match `Fold` in `fold.cuh`.
#[repr(C)]
struct Fold {
    x: Address,
    out: Address,
    second: Address,
    parts: Address,
    outputs: u64,
    count: u64,
    splits: u64,
    chunk: u64,
    kept_ndim: u32,
    folded_ndim: u32,
    group: u32,
    vector: u32,
    kept: [FoldAxis; MOST_AXES],
    folded: [FoldAxis; MOST_AXES],
    numbers: [f64; 2],
}

/// The names of the three kernels of a fold.
pub(super) struct Kernels {
    pub(super) rows: &'static str,
    pub(super) columns: &'static str,
    pub(super) parts: &'static str,
}

/// Returns the kernels that `FOLD(name, ...)` declares.
macro_rules! kernels {
    ($name:literal) => {
        $crate::cuda::fold::Kernels {
            rows: concat!($name, "_rows"),
            columns: concat!($name, "_columns"),
            parts: concat!($name, "_parts"),
        }
    };
}
pub(super) use kernels;

/// Returns the shape of `x` with `dims` folded. A scalar accepts the dims of a 1-d array.
pub(super) fn folded_shape(x: &Array, dims: &[usize], keepdim: bool) -> Shape {
    let all = x.dims().iter().enumerate().map(|(d, &size)| (dims.contains(&d), size));
    all.filter(|&(folded, _)| keepdim || !folded)
        .map(|(folded, size)| if folded { 1 } else { size })
        .collect()
}

/// Returns the number of elements that are folded into each output.
pub(super) fn count(x: &Array, dims: &[usize]) -> usize {
    dims.iter().filter_map(|&d| x.dims().get(d)).product()
}

/// Folds `dims` of `x` into `out`, and into `second` if the fold has two results. Both are contiguous arrays of
/// [`folded_shape`]. `numbers` are further arguments.
#[allow(clippy::too_many_arguments)]
pub(super) fn fold(
    stream: &'static Stream,
    unit: &Unit,
    kernels: &Kernels,
    x: &Array,
    dims: &[usize],
    out: &Array,
    second: Option<&Array>,
    numbers: [f64; 2],
) -> Result<()> {
    let outputs = out.numel();
    if outputs == 0 {
        return Ok(());
    }
    let count = count(x, dims);
    let (kept, folded) = axes(x, dims)?;
    let size = x.dtype().size();
    let address = stream.read(x)?;
    // Packs of 16 bytes are loaded along a contiguous axis if they are aligned everywhere.
    let vector_along = |axes: &Axes<2>, others: &Axes<2>| {
        let n = 16 / size;
        let Some((last, outer)) = axes.split_last() else { return 1 };
        let is_aligned = outer.iter().chain(others).all(|axis| axis.strides[0].is_multiple_of(n));
        let fits =
            last.strides[0] == 1 && last.size.is_multiple_of(n) && (address as usize).is_multiple_of(16);
        if fits && is_aligned { n } else { 1 }
    };
    let closeness = |axes: &Axes<2>| axes.last().map_or(usize::MAX, |axis| axis.strides[0].wrapping_sub(1));
    let full = stream.gpu.info.multiprocessors * (2048 / THREADS);
    let columns = (closeness(&kept) < closeness(&folded)).then(|| {
        let vector = vector_along(&kept, &folded);
        Columns::new(&kept, outputs, count, vector, full)
    });
    let launch = match columns {
        Some(columns) if columns.threads() >= 64 => columns.launch(),
        // There are few neighbours and few elements for each, so each thread folds one output.
        Some(_) => rows(outputs, count, 1, full, true),
        None => rows(outputs, count, vector_along(&folded, &kept), full, false),
    };
    let parts = match launch.splits {
        1 => None,
        splits => Some(stream.empty(DType::U8, &[outputs * splits * STATE])?),
    };
    let mut argument = Fold {
        x: address,
        out: stream.read(out)?,
        second: second.map_or(Ok(0), |second| stream.read(second))?,
        parts: parts.as_ref().map_or(Ok(0), |parts| stream.read(parts))?,
        outputs: outputs as u64,
        count: count as u64,
        splits: launch.splits as u64,
        chunk: launch.chunk as u64,
        kept_ndim: kept.len().max(1) as u32,
        folded_ndim: folded.len().max(1) as u32,
        group: launch.group as u32,
        vector: launch.vector as u32,
        kept: table(&kept)?,
        folded: table(&folded)?,
        numbers,
    };
    let name = if launch.by_columns { kernels.columns } else { kernels.rows };
    let grid = [launch.blocks as u32, 1, 1];
    // SAFETY: the axes describe `x`, whose every element is folded into one of the `outputs` elements of the results; `parts` has
    // room for all states.
    unsafe { stream.launch(unit, x.dtype(), name, grid, launch.threads as u32, 0, &argument)? };
    if launch.splits > 1 {
        // A block for an output with many parts, so that few loads wait for each other.
        let group = if launch.splits > 128 { THREADS } else { launch.splits.next_power_of_two().min(32) };
        argument.group = group as u32;
        let blocks = (outputs * group).div_ceil(THREADS).min(full * 32);
        let grid = [blocks as u32, 1, 1];
        // SAFETY: as above.
        unsafe { stream.launch(unit, x.dtype(), kernels.parts, grid, THREADS as u32, 0, &argument)? };
    }
    Ok(())
}

/// Returns the kept and the folded axes of `x` in the order of its memory, with the strides in `x` and in the result.
fn axes(x: &Array, dims: &[usize]) -> Result<(Axes<2>, Axes<2>)> {
    let (sizes, strides) = (x.dims(), x.strides());
    let mut out = vec![0; sizes.len()];
    let mut dense = 1;
    for d in (0..sizes.len()).rev().filter(|d| !dims.contains(d)) {
        out[d] = dense;
        dense *= sizes[d];
    }
    let mut order: Vec<usize> = (0..sizes.len()).filter(|&d| sizes[d] != 1).collect();
    // Broadcast dims (stride 0) count as outermost. The sort is stable.
    order.sort_by_key(|&d| usize::MAX - strides[d].wrapping_sub(1));
    let (mut kept, mut folded) = (Axes::new(), Axes::new());
    for d in order {
        let axes = if dims.contains(&d) { &mut folded } else { &mut kept };
        push_axis(axes, Axis { size: sizes[d], strides: [strides[d], out[d]] });
    }
    // The kernels divide by the sizes of all axes but the first, and need that of the last kept one.
    let first = usize::from(kept.len() > 1);
    split_large(&mut kept, first)?;
    split_large(&mut folded, 1)?;
    Ok((kept, folded))
}

/// Splits axes, from the one at index `start`, that have more elements than 32 bits count.
fn split_large(axes: &mut Axes<2>, start: usize) -> Result<()> {
    let is_large = |axis: &Axis<2>| axis.size > u32::MAX as usize;
    while let Some(at) = axes.iter().skip(start).position(is_large).map(|at| at + start) {
        let Axis { size, strides } = axes[at];
        let Some(inner) = (2..=1 << 20).rev().find(|n| size.is_multiple_of(*n)) else {
            return Err(failed("launch", format!("a dim of size {size} is too large")));
        };
        axes[at] = Axis { size: size / inner, strides: strides.map(|stride| stride * inner) };
        axes.insert(at + 1, Axis { size: inner, strides });
        if at == 0 {
            break;
        }
    }
    Ok(())
}

fn table(axes: &Axes<2>) -> Result<[FoldAxis; MOST_AXES]> {
    let mut table = [FoldAxis { size: 1, magic: 1, shift: 0, reserved: 0, stride: 0, out: 0 }; MOST_AXES];
    if axes.len() > MOST_AXES {
        let message = format!(
            "{} dims that cannot be merged are reduced or kept; at most {MOST_AXES} work",
            axes.len()
        );
        return Err(failed("launch", message));
    }
    for (to, axis) in table.iter_mut().zip(axes) {
        let (magic, shift) = divider(axis.size as u32);
        let [stride, out] = axis.strides.map(|stride| stride as i64);
        *to = FoldAxis { size: axis.size as u32, magic, shift, reserved: 0, stride, out };
    }
    Ok(table)
}

/// How the work is split into blocks and threads.
struct Launch {
    by_columns: bool,
    blocks: usize,
    threads: usize,
    group: usize,
    vector: usize,
    splits: usize,
    chunk: usize,
}

/// Splits the elements of an output into about `splits` parts of whole packs. Returns how many there are, and their size.
fn split(count: usize, splits: usize, vector: usize) -> (usize, usize) {
    let chunk = count.div_ceil(splits.max(1)).next_multiple_of(vector).max(1);
    (count.div_ceil(chunk).max(1), chunk)
}

/// Plans a fold in which neighbouring threads fold neighbouring elements of one output: several outputs in a warp, or a block for
/// each, or several blocks.
fn rows(outputs: usize, count: usize, vector: usize, full: usize, alone: bool) -> Launch {
    let packs = count.div_ceil(vector);
    let is_long = packs > 1024 || (outputs < full * 4 && packs > 128);
    let (group, splits) = match is_long && !alone {
        true => (THREADS, (full / outputs).min(packs / (THREADS * LOADS))),
        false if alone => (1, 1),
        false => (packs.div_ceil(LOADS).next_power_of_two().min(32), 1),
    };
    let (splits, chunk) = split(count, splits, vector);
    let blocks = (outputs * splits).div_ceil(THREADS / group).min(full * 32);
    Launch { by_columns: false, blocks, threads: THREADS, group, vector, splits, chunk }
}

/// A fold in which neighbouring threads fold elements of neighbouring outputs.
struct Columns {
    across: usize,
    down: usize,
    tiles: usize,
    count: usize,
    vector: usize,
    full: usize,
}

impl Columns {
    fn new(kept: &Axes<2>, outputs: usize, count: usize, vector: usize, full: usize) -> Columns {
        let width = kept.last().map_or(1, |axis| axis.size);
        let lanes = width.div_ceil(vector).next_power_of_two();
        let needed = count.div_ceil(LOADS).next_power_of_two();
        let across = lanes.min(32.max(THREADS / needed.min(THREADS)));
        let down = needed.min(THREADS / across);
        let tiles = outputs / width * width.div_ceil(across * vector);
        Columns { across, down, tiles, count, vector, full }
    }

    fn threads(&self) -> usize {
        self.across * self.down
    }

    fn launch(self) -> Launch {
        // As many blocks as run at once: each block begins with loads that wait, and ends with sums.
        let splits = (self.full * 3 / 8 / self.tiles).min(self.count / (self.down * LOADS * 2));
        let (splits, chunk) = split(self.count, splits, 1);
        let (threads, blocks) = (self.threads(), self.tiles * splits);
        Launch { by_columns: true, blocks, threads, group: self.across, vector: self.vector, splits, chunk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_axes_are_split() {
        let large = Axis { size: 3 << 32, strides: [6, 2] };
        let small = Axis { size: 5, strides: [1, 1] };
        for (axes, start, parts) in [
            (&[large][..], 0, 2),
            (&[large], 1, 1),
            (&[large, small], 1, 2),
            (&[small, large], 1, 3),
            (&[small, Axis { size: 1 << 53, strides: [5, 5] }], 1, 4),
        ] {
            let mut split = Axes::from_slice(axes);
            split_large(&mut split, start).unwrap();
            assert_eq!(split.len(), parts);
            assert!(split[1..].iter().all(|axis| axis.size <= u32::MAX as usize));
            let last = |axes: &[Axis<2>]| {
                axes.iter().fold([0, 0], |at, axis| [0, 1].map(|k| at[k] + (axis.size - 1) * axis.strides[k]))
            };
            assert_eq!(last(&split), last(axes));
        }
        let prime = Axis { size: (1 << 61) - 1, strides: [1, 1] };
        assert!(split_large(&mut Axes::from_slice(&[small, prime]), 1).is_err());
    }
}
