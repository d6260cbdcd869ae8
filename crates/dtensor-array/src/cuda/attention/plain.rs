//! Attention in half precision without a mask or dropout: the kernels that have to be fast.

use super::{Call, Matrices};
use crate::cuda::Unit;
use crate::cuda::kernel::units;
use crate::{DType, Result};

const HALVES: &[DType] = &[DType::F16, DType::BF16];

units! {
    static FORWARD: "attention_plain_forward", [|| FORWARD_PASS.source(0)], HALVES;
    static FORWARD_WIDE: "attention_plain_forward_wide", [|| FORWARD_PASS.source(1)], HALVES;
    static QUERIES: "attention_plain_queries", [|| QUERY_GRADIENTS.source(0)], HALVES;
    static QUERIES_WIDE: "attention_plain_queries_wide", [|| QUERY_GRADIENTS.source(1)], HALVES;
    static KEYS: "attention_plain_keys", [|| KEY_GRADIENTS.source(0)], HALVES;
    static KEYS_WIDE: "attention_plain_keys_wide", [|| KEY_GRADIENTS.source(1)], HALVES;
}

/// A kernel with a block for some rows of the result, which loops over tiles of two other operands.
pub(super) struct Kernel {
    name: &'static str,
    /// The last part of the source.
    text: &'static str,
    /// For up to 64 and up to 128 columns.
    units: [&'static Unit; 2],
    shapes: [Shape; 2],
    /// The number of operands of which a block holds its rows.
    operands: usize,
}

/// The sizes that a kernel is compiled for. They were measured to be the fastest on an H200.
struct Shape {
    /// The rows of a tile of the loop.
    tile: usize,
    /// The groups of 4 warps of a block. Each computes 64 rows.
    groups: usize,
    /// The blocks that a multiprocessor runs at a time. This limits the registers of a thread.
    blocks: usize,
    /// The tiles of each operand of the loop. With three, the products of a step run beside those of the next one.
    stages: usize,
    /// Whether the left operands of dot products stay in registers.
    keeps_left: bool,
}

pub(super) const FORWARD_PASS: Kernel = Kernel {
    name: "forward",
    text: include_str!("../kernels/attention_plain_forward.cuh"),
    units: [&FORWARD, &FORWARD_WIDE],
    shapes: [
        Shape { tile: 128, groups: 1, blocks: 3, stages: 2, keeps_left: false },
        Shape { tile: 128, groups: 2, blocks: 1, stages: 3, keeps_left: false },
    ],
    operands: 1,
};
pub(super) const QUERY_GRADIENTS: Kernel = Kernel {
    name: "query_gradients",
    text: include_str!("../kernels/attention_plain_queries.cuh"),
    units: [&QUERIES, &QUERIES_WIDE],
    shapes: [
        Shape { tile: 64, groups: 1, blocks: 4, stages: 2, keeps_left: false },
        Shape { tile: 64, groups: 1, blocks: 2, stages: 2, keeps_left: true },
    ],
    operands: 2,
};
pub(super) const KEY_GRADIENTS: Kernel = Kernel {
    name: "key_gradients",
    text: include_str!("../kernels/attention_plain_keys.cuh"),
    units: [&KEYS, &KEYS_WIDE],
    shapes: [
        Shape { tile: 64, groups: 1, blocks: 2, stages: 3, keeps_left: true },
        Shape { tile: 64, groups: 1, blocks: 2, stages: 2, keeps_left: false },
    ],
    operands: 2,
};

/// The rows of a group of warps.
const GROUP_ROWS: usize = 64;
const GROUP_THREADS: usize = 128;
/// The bytes of the operands of the heads that run together, a part of the cache of today's GPUs.
const CACHED: usize = 24 << 20;
/// The queries of a plane of `dots` are a multiple of this. As in `kernels/attention_plain.cuh`.
const PLANE: usize = 128;

// The blocks of query gradients write the numbers of all queries that the tiles of key gradients have.
const _: () =
    assert!(KEY_GRADIENTS.shapes[0].tile <= GROUP_ROWS && KEY_GRADIENTS.shapes[1].tile <= GROUP_ROWS);

impl Kernel {
    fn source(&self, which: usize) -> String {
        let Shape { tile, groups, blocks, stages, keeps_left } = self.shapes[which];
        let (columns, keeps) = (columns(which), u8::from(keeps_left));
        let defines = format!(
            "#define W {columns}\n#define TILE {tile}\n#define GROUPS {groups}\n#define BLOCKS {blocks}\n#define STAGES {stages}\n\
             #define KEEPS {keeps}\n"
        );
        [
            &defines,
            include_str!("../kernels/window.cuh"),
            include_str!("../kernels/philox.cuh"),
            include_str!("../kernels/attention_operands.cuh"),
            include_str!("../kernels/tensor_cores.cuh"),
            include_str!("../kernels/warpgroup.cuh"),
            include_str!("../kernels/split_barrier.cuh"),
            include_str!("../kernels/attention_plain.cuh"),
            self.text,
        ]
        .concat()
    }

    /// Returns the shared memory of a block.
    fn shared_bytes(&self, which: usize) -> usize {
        let Shape { tile, groups, stages, .. } = self.shapes[which];
        let in_stages = 2 * stages * tile;
        let rows = self.operands * groups * GROUP_ROWS + in_stages;
        // The forward pass has two barriers, and the backward pass two numbers for each query of its tiles.
        let others = if self.operands == 1 { 2 * size_of::<u64>() } else { in_stages * size_of::<f32>() };
        rows * columns(which) * size_of::<u16>() + others
    }
}

/// The columns of the operands in shared memory.
fn columns(which: usize) -> usize {
    [64, 128][which]
}

/// Returns the size of `dots` for one head.
pub(super) fn dots_of_head(queries: usize) -> [usize; 2] {
    [2, queries.next_multiple_of(PLANE)]
}

impl Matrices {
    /// Returns true if rows can be loaded 16 bytes at a time.
    fn is_aligned(&self, columns: u64) -> bool {
        let strides = || self.strides.iter().chain([&self.row]);
        self.at.is_multiple_of(16)
            && columns.is_multiple_of(8)
            && strides().all(|stride| stride.is_multiple_of(8))
    }
}

impl Call {
    /// Returns which of the kernels computes this, if there is one.
    pub(super) fn plain(&self, kernel: &Kernel) -> Option<usize> {
        let a = &self.argument;
        let which = usize::from(a.width.max(a.value_width) > 64);
        let is_aligned = a.q.is_aligned(a.width)
            && a.k.is_aligned(a.width)
            && [&a.v, &a.grad].iter().all(|x| x.is_aligned(a.value_width))
            && a.out.is_multiple_of(16);
        let fits = a.width.max(a.value_width) <= columns(which) as u64
            && [a.heads, a.queries, a.keys, a.first_query].iter().all(|&n| n < 1 << 30)
            && kernel.shared_bytes(which) <= self.stream.gpu.info.shared_bytes;
        let is_plain = a.mask_kind == 0 && a.dropout == 0 && a.scale > 0.0 && a.scale.is_finite();
        (HALVES.contains(&self.dtype) && is_plain && is_aligned && fits).then_some(which)
    }

    /// Queues a kernel for `rows` rows of results. `others` are the rows of the other operands.
    pub(super) fn launch_plain(
        &mut self,
        kernel: &Kernel,
        which: usize,
        rows: u64,
        others: u64,
    ) -> Result<()> {
        let groups = kernel.shapes[which].groups;
        let argument = &mut self.argument;
        argument.tiles = rows.div_ceil((groups * GROUP_ROWS) as u64);
        let bytes = others * (argument.width + argument.value_width) * 2;
        argument.together = (CACHED as u64 / bytes.max(1)).clamp(1, argument.heads.max(1));
        let threads = (groups * GROUP_THREADS) as u32;
        let blocks = argument.tiles * argument.heads;
        self.queue(kernel.units[which], kernel.name, blocks, threads, kernel.shared_bytes(which))
    }
}
