//! Scaled dot-product attention. The matrix of attention weights is never stored.

pub(super) mod plain;

use super::driver::Address;
use super::kernel::{FLOATS, file, units};
use super::random::DrawArgs;
use super::window::WindowArgs;
use super::{Stream, Unit, stream_of};
use crate::host::attention::AttentionOptions;
use crate::host::layout::{Axes, Axis, push_axis};
use crate::host::random::{keep_scale, threshold};
use crate::{Array, DType, Error, Result, Window};

/// The dtypes that have kernels with 128 columns, which need more shared memory. Some GPUs have less.
const WIDE: &[DType] = &[DType::F16, DType::BF16, DType::F32];

units! {
    static FORWARD: "attention_forward", [
        || sizes(64, 2),
        file!("window.cuh"),
        file!("philox.cuh"),
        file!("attention_operands.cuh"),
        file!("tensor_cores.cuh"),
        file!("attention.cuh"),
        file!("attention_forward.cuh")
    ], FLOATS;
    static FORWARD_WIDE: "attention_forward_wide", [
        || sizes(128, 1),
        file!("window.cuh"),
        file!("philox.cuh"),
        file!("attention_operands.cuh"),
        file!("tensor_cores.cuh"),
        file!("attention.cuh"),
        file!("attention_forward.cuh")
    ], WIDE;
    static BACKWARD: "attention_backward", [
        || sizes(64, 1),
        file!("window.cuh"),
        file!("philox.cuh"),
        file!("attention_operands.cuh"),
        file!("tensor_cores.cuh"),
        file!("attention.cuh"),
        file!("attention_backward.cuh")
    ], FLOATS;
    static BACKWARD_WIDE: "attention_backward_wide", [
        || sizes(128, 1),
        file!("window.cuh"),
        file!("philox.cuh"),
        file!("attention_operands.cuh"),
        file!("tensor_cores.cuh"),
        file!("attention.cuh"),
        file!("attention_backward.cuh")
    ], WIDE;
}

/// Defines the number of columns of operands that are in shared memory at a time, and how many times 16 rows a warp computes in
/// half precision.
fn sizes(columns: usize, half_rows: usize) -> String {
    format!("#define W {columns}\n#define M (DTYPE == 2 || DTYPE == 3 ? {half_rows} : 1)\n")
}

/// The threads of a block, and the columns of a tile of logits. As in `kernels/attention.cuh`.
const THREADS: u32 = 128;
const TILE: usize = 64;
/// The number of leading dims that a kernel can step through.
const DIMS: usize = 4;

/// Must match `Matrices` in `kernels/attention_operands.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Matrices {
    at: Address,
    sizes: [u64; DIMS],
    strides: [u64; DIMS],
    row: u64,
    column: u64,
}

/// Must match `Attention` in `kernels/attention_operands.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Args {
    q: Matrices,
    k: Matrices,
    v: Matrices,
    grad: Matrices,
    mask: Matrices,
    out: Address,
    lse: Address,
    dots: Address,
    dq: Address,
    dk: Address,
    dv: Address,
    heads: u64,
    queries: u64,
    keys: u64,
    width: u64,
    value_width: u64,
    tiles: u64,
    slices: u64,
    together: u64,
    first_query: u64,
    all_queries: u64,
    draw: DrawArgs,
    threshold: [u32; 2],
    scale: f64,
    keep_scale: f64,
    mask_kind: u32,
    causal: u32,
    dropout: u32,
    reserved: u32,
    window: WindowArgs,
}

/// A call of a kernel: its argument, and the arrays that must live until it is queued.
struct Call {
    stream: &'static Stream,
    dtype: DType,
    argument: Args,
    kept: Vec<Array>,
}

impl Call {
    fn new(
        q: &Array,
        k: &Array,
        v: &Array,
        mask: Option<&Array>,
        options: &AttentionOptions<'_>,
    ) -> Result<Call> {
        const OP: &str = "attention";
        let dtype = q.dtype();
        if let Some(mask) = mask
            && mask.dtype() != DType::U8
            && mask.dtype() != dtype
        {
            return Err(Error::DTypeMismatch { op: OP, left: dtype, right: mask.dtype() });
        }
        if dtype.is_int() {
            return Err(Error::DType { op: OP, dtype, why: "it needs a floating-point dtype" });
        }
        for other in [k, v] {
            if other.dtype() != dtype {
                return Err(Error::DTypeMismatch { op: OP, left: dtype, right: other.dtype() });
            }
        }
        let stream = stream_of(q)?;
        let (batch, &[queries, width]) = q.dims().split_last_chunk().expect("queries have two dims");
        let (_, &[keys, value_width]) = v.dims().split_last_chunk().expect("values have two dims");
        let heads: usize = batch.iter().product();
        let mut kept = Vec::new();
        let has_dropout = options.dropout > 0.0;
        let all = Window::whole(&[heads]);
        let window = options.heads.filter(|_| has_dropout).unwrap_or(&all);
        let (window, table) = WindowArgs::new(stream, window)?;
        kept.extend(table);
        let mut argument = Args {
            q: Matrices::default(),
            k: Matrices::default(),
            v: Matrices::default(),
            grad: Matrices::default(),
            mask: Matrices::default(),
            out: 0,
            lse: 0,
            dots: 0,
            dq: 0,
            dk: 0,
            dv: 0,
            heads: heads as u64,
            queries: queries as u64,
            keys: keys as u64,
            width: width as u64,
            value_width: value_width as u64,
            tiles: 0,
            slices: 0,
            together: 0,
            first_query: options.first_query as u64,
            all_queries: options.all_queries as u64,
            draw: DrawArgs::new(options.draw),
            threshold: threshold(options.dropout).words(),
            scale: options.scale,
            keep_scale: keep_scale(options.dropout),
            mask_kind: 0,
            causal: options.causal.into(),
            dropout: has_dropout.into(),
            reserved: 0,
            window,
        };
        if heads > 0 {
            argument.q = matrices(stream, q, &mut kept)?;
            argument.k = matrices(stream, k, &mut kept)?;
            argument.v = matrices(stream, v, &mut kept)?;
            if let Some(mask) = mask {
                let shape: Vec<usize> = batch.iter().copied().chain([queries, keys]).collect();
                argument.mask = strided(stream, &mask.expand(&shape)?, &mut kept)?;
                argument.mask_kind = if mask.dtype() == DType::U8 { 1 } else { 2 };
            }
        }
        Ok(Call { stream, dtype, argument, kept })
    }

    /// Returns true if a kernel for 128 columns shall run: some operand has more than 64, and the GPU has the memory.
    fn is_wide(&self, kernel: &Kernel) -> bool {
        self.argument.width.max(self.argument.value_width) > TILE as u64
            && WIDE.contains(&self.dtype)
            && kernel.shared_bytes(self.dtype, true) <= self.stream.gpu.info.shared_bytes
    }

    /// Queues a kernel for `rows` rows and `columns` columns of results.
    fn launch(&mut self, kernel: &Kernel, rows: u64, columns: u64) -> Result<()> {
        let is_wide = self.is_wide(kernel);
        self.argument.tiles = rows.div_ceil(kernel.block_rows(self.dtype, is_wide) as u64);
        self.argument.slices = columns.div_ceil(if is_wide { 128 } else { 64 }).max(1);
        let blocks = self.argument.tiles * self.argument.slices * self.argument.heads;
        let unit = kernel.units[usize::from(is_wide)];
        self.queue(unit, kernel.name, blocks, THREADS, kernel.shared_bytes(self.dtype, is_wide))
    }

    fn queue(&self, unit: &Unit, name: &str, blocks: u64, threads: u32, shared_bytes: usize) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let Ok(blocks @ 1..=0x7fff_ffff) = u32::try_from(blocks) else {
            return Err(super::driver::failed("launch", format!("attention needs {blocks} blocks")));
        };
        let (grid, shared) = ([blocks, 1, 1], shared_bytes as u32);
        // SAFETY: the argument has the addresses, sizes and strides of arrays that live until the kernel is queued.
        unsafe { self.stream.launch(unit, self.dtype, name, grid, threads, shared, &self.argument) }
    }
}

/// A kernel with a block for some rows of the result, which loops over tiles of two other operands.
struct Kernel {
    name: &'static str,
    /// For 64 and for 128 columns.
    units: [&'static Unit; 2],
    /// The number of operands of which a block holds its rows.
    operands: usize,
    /// Whether half precision has two tiles of the other operands.
    is_staged: bool,
    /// How many times [`TILE`] rows a block computes in half precision with 64 columns.
    half_rows: usize,
}

impl Kernel {
    /// Returns the number of rows of a block.
    fn block_rows(&self, dtype: DType, is_wide: bool) -> usize {
        TILE * if dtype.size() == 2 && !is_wide { self.half_rows } else { 1 }
    }

    /// Returns the shared memory of a block.
    fn shared_bytes(&self, dtype: DType, is_wide: bool) -> usize {
        let (size, is_half) = (dtype.size(), dtype.size() == 2);
        // Rows are padded.
        let row = |columns: usize| columns * size + 16;
        let stages = if is_half && self.is_staged { 2 } else { 1 };
        let rows = self.operands * self.block_rows(dtype, is_wide) + 2 * stages * TILE;
        let operands = rows * row(if is_wide { 2 * TILE } else { TILE });
        // The backward pass has two numbers for each query of a tile.
        let numbers = 2 * stages * TILE * size.max(4);
        // Half precision keeps the factors of a product in registers.
        operands + numbers + if is_half { 0 } else { TILE * row(TILE) }
    }
}

const FORWARD_PASS: Kernel =
    Kernel { name: "forward", units: [&FORWARD, &FORWARD_WIDE], operands: 1, is_staged: false, half_rows: 2 };
const QUERY_GRADIENTS: Kernel = Kernel {
    name: "query_gradients",
    units: [&BACKWARD, &BACKWARD_WIDE],
    operands: 2,
    is_staged: true,
    half_rows: 1,
};
const KEY_GRADIENTS: Kernel = Kernel { name: "key_gradients", ..QUERY_GRADIENTS };

/// Describes matrices whose rows are contiguous, after copying them if they are not.
fn matrices(stream: &'static Stream, x: &Array, kept: &mut Vec<Array>) -> Result<Matrices> {
    let last = x.dims().len() - 1;
    match x.dims()[last] > 1 && x.strides()[last] != 1 {
        true => strided(stream, &x.contiguous()?, kept),
        false => strided(stream, x, kept),
    }
}

/// Describes matrices with any strides. Copies them if their leading dims cannot be merged into a few.
fn strided(stream: &'static Stream, x: &Array, kept: &mut Vec<Array>) -> Result<Matrices> {
    let (dims, strides) = (x.dims(), x.strides());
    let last = dims.len() - 2;
    let mut axes: Axes<1> = Axes::new();
    for dim in 0..last {
        push_axis(&mut axes, Axis { size: dims[dim], strides: [strides[dim]] });
    }
    if axes.len() > DIMS {
        return strided(stream, &super::copy::copy(x)?, kept);
    }
    let (row, column) = (strides[last] as u64, strides[last + 1] as u64);
    let mut matrices = Matrices { at: stream.read(x)?, sizes: [1; DIMS], strides: [0; DIMS], row, column };
    for (at, axis) in axes.iter().enumerate() {
        let place = DIMS - axes.len() + at;
        matrices.sizes[place] = axis.size as u64;
        matrices.strides[place] = axis.strides[0] as u64;
    }
    kept.push(x.clone());
    Ok(matrices)
}

/// Returns the dtype that a dtype is computed in.
fn accumulation(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

pub(crate) fn attention_forward(
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array)> {
    let mut call = Call::new(q, k, v, mask, options)?;
    let stream = call.stream;
    let (rows, value_width) = (&q.dims()[..q.dims().len() - 1], v.dims()[v.dims().len() - 1]);
    let shape: Vec<usize> = rows.iter().copied().chain([value_width]).collect();
    let out = stream.empty(call.dtype, &shape)?;
    let lse = stream.empty(accumulation(call.dtype), rows)?;
    (call.argument.out, call.argument.lse) = (stream.read(&out)?, stream.read(&lse)?);
    let Args { queries, keys, value_width, .. } = call.argument;
    match call.plain(&plain::FORWARD_PASS) {
        Some(which) => call.launch_plain(&plain::FORWARD_PASS, which, queries, keys)?,
        None => call.launch(&FORWARD_PASS, queries, value_width)?,
    }
    Ok((out, lse))
}

#[allow(clippy::too_many_arguments)] // the inputs and results of the forward pass
pub(crate) fn attention_backward(
    grad: &Array,
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    out: &Array,
    lse: &Array,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array, Array)> {
    let mut call = Call::new(q, k, v, mask, options)?;
    let (stream, dtype) = (call.stream, call.dtype);
    for (x, expected) in [(grad, dtype), (out, dtype), (lse, accumulation(dtype))] {
        if x.dtype() != expected {
            return Err(Error::DTypeMismatch { op: "attention", left: expected, right: x.dtype() });
        }
    }
    let [dq, dk, dv] = [q, k, v].map(|x| stream.empty(dtype, x.dims()));
    let (dq, dk, dv) = (dq?, dk?, dv?);
    let (out, lse) = (out.contiguous()?, lse.contiguous()?);
    if call.argument.heads == 0 {
        return Ok((dq, dk, dv));
    }
    let argument = &mut call.argument;
    argument.grad = matrices(stream, grad, &mut call.kept)?;
    (argument.out, argument.lse) = (stream.read(&out)?, stream.read(&lse)?);
    (argument.dq, argument.dk, argument.dv) = (stream.read(&dq)?, stream.read(&dk)?, stream.read(&dv)?);
    let Args { heads, queries, keys, width, value_width, .. } = *argument;
    if let (Some(for_queries), Some(for_keys)) =
        (call.plain(&plain::QUERY_GRADIENTS), call.plain(&plain::KEY_GRADIENTS))
    {
        let [planes, plane] = plain::dots_of_head(queries as usize);
        let dots = stream.empty(lse.dtype(), &[heads as usize, planes, plane])?;
        call.argument.dots = stream.read(&dots)?;
        call.launch_plain(&plain::QUERY_GRADIENTS, for_queries, queries, keys)?;
        call.launch_plain(&plain::KEY_GRADIENTS, for_keys, keys, queries)?;
        return Ok((dq, dk, dv));
    }
    let dots = stream.empty(lse.dtype(), lse.dims())?;
    call.argument.dots = stream.read(&dots)?;
    if dots.numel() > 0 {
        // A warp for each query.
        let unit = KEY_GRADIENTS.units[usize::from(call.is_wide(&KEY_GRADIENTS))];
        let grid = super::grid_for(stream.gpu, dots.numel() * 32, THREADS, 1);
        // SAFETY: the argument has the addresses, sizes and strides of arrays that live until the kernel is queued.
        unsafe { stream.launch(unit, dtype, "dots", grid, THREADS, 0, &call.argument)? };
    }
    call.launch(&QUERY_GRADIENTS, queries, width)?;
    call.launch(&KEY_GRADIENTS, keys, width.max(value_width))?;
    Ok((dq, dk, dv))
}

#[cfg(test)]
mod tests;
