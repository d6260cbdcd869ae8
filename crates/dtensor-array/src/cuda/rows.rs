//! Kernels on lines of contiguous arrays: splits their work into blocks and threads. The loops are in `kernels/rows.cuh`.

use super::device::Gpu;
use super::driver::Address;

const THREADS: usize = 256;
/// The most shared memory of a block that keeps lines.
const MOST_SHARED: usize = 96 << 10;

/// Must match `Lines` in `rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines {
    lines: u64,
    n: u64,
    inner: u64,
    team: u32,
    across: u32,
    vector: u32,
    room: u32,
}

impl Lines {
    /// Returns the number of elements that are loaded at once.
    pub(super) fn vector(&self) -> usize {
        self.vector as usize
    }
}

/// How a kernel on lines is launched.
pub(super) struct Launch {
    pub(super) lines: Lines,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

/// Plans work on `rows` contiguous rows of `n` elements, of which each thread of a team holds at most `most` packs. Shared memory has
/// `kept` bytes for each element of a block's rows. Returns `None` if a row needs more threads than a block has.
pub(super) fn held_rows(
    gpu: &Gpu,
    (rows, n): (usize, usize),
    vector: usize,
    most: usize,
    kept: usize,
) -> Option<Launch> {
    let packs = n.div_ceil(vector);
    let team = packs.div_ceil(most).max(packs.min(32)).next_power_of_two();
    if team > 2 * THREADS {
        return None;
    }
    // A team of several warps is a block.
    let across = if team > 32 { 1 } else { THREADS / team };
    let threads = team * across;
    // As many as fit on the GPU if a thread has 128 registers.
    let blocks = rows.div_ceil(across).clamp(1, gpu.info.multiprocessors * (512 / threads));
    let [rows, n] = [rows, n].map(|size| size as u64);
    let [team, across, vector] = [team, across, vector].map(|size| size as u32);
    Some(Launch {
        lines: Lines { lines: rows, n, inner: 1, team, across, vector, room: 0 },
        grid: [blocks as u32, 1, 1],
        threads: threads as u32,
        shared_bytes: across * n as u32 * kept as u32,
    })
}

/// Plans work on the lines of contiguous arrays `[outer, n, inner]` at `addresses`, with elements of `size` bytes. Shared memory
/// keeps lines of `kept` arrays, if they fit. If `whole` is true, packs are used only if each line consists of whole ones.
pub(super) fn lines(
    gpu: &Gpu,
    (outer, n, inner): (usize, usize, usize),
    size: usize,
    addresses: &[Address],
    kept: usize,
    whole: bool,
) -> Launch {
    let vector = 16 / size;
    let has_packs = n % vector == 0 || (!whole && n >= 32 * vector);
    let is_wide = inner == 1 && has_packs && addresses.iter().all(|address| address % 16 == 0);
    let vector = if is_wide { vector } else { 1 };
    let lines = outer * inner;
    let packs = n.div_ceil(vector);
    let full = gpu.info.multiprocessors * 2048;
    let (team, across) = if inner > 1 {
        // A team of several threads only if there would be too few threads otherwise, and side by side still 64 bytes.
        let useful = n.div_ceil(4).next_power_of_two().min(THREADS * size / 64);
        let team = (full / lines.max(1)).max(1).next_power_of_two().min(useful);
        (team, THREADS / team)
    } else if packs <= 256 {
        let team = packs.div_ceil(2).next_power_of_two().min(32);
        (team, THREADS / team)
    } else {
        // With more threads, each would have fewer registers than some kernels need.
        ((packs / 4).next_power_of_two().clamp(128, 512), 1)
    };
    let room = (n + vector).next_multiple_of(vector);
    let bytes = kept * across * room * size;
    let is_kept = kept > 0 && inner == 1 && bytes <= MOST_SHARED;
    let blocks = lines.div_ceil(across).clamp(1, gpu.info.multiprocessors * 512);
    Launch {
        lines: Lines {
            lines: lines as u64,
            n: n as u64,
            inner: inner as u64,
            team: team as u32,
            across: across as u32,
            vector: vector as u32,
            room: if is_kept { room as u32 } else { 0 },
        },
        grid: [blocks as u32, 1, 1],
        threads: (team * across) as u32,
        shared_bytes: if is_kept { bytes as u32 } else { 0 },
    }
}
