//! `dtensor bench dispatch`: the cost of an operator besides its kernel, in the same cases as `dispatch_peer.py`.
//!
//! The tensors are so small that the kernel takes almost no time, and their layouts need no communication. One timing runs 1,000
//! operators and drops each result before the next. The median of nine timings counts.
//!
//! There are two kinds of ranks, because neither alone shows everything:
//! - `simulated`: one rank runs and has a core to itself. In PyTorch, one process runs while the others sleep. This is the cost of
//!   dispatch.
//! - `threads`: all ranks run at once, in PyTorch too. This shows whether ranks slow each other down. The time is from the first
//!   rank that starts to the last rank that finishes. Otherwise, with fewer cores than ranks, a rank that finishes within its time
//!   slice would be timed as if it were alone, and a slower rank would not.
//!
//! On a GPU, `bare_launch` is a kernel that does nothing, launched by as many threads as ranks: what any operator costs there at least.
//!
//! On a busy machine the comparison is unfair: our timings are so short that they are seldom interrupted, PyTorch's are longer.

use std::collections::BTreeMap;
use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use clap::{Args, ValueEnum};
use dtensor::comm::{World, run as run_ranks};
use dtensor::prelude::*;
use dtensor::{on_device, set_num_threads};

use super::comparison;
use super::peer::Peer;
use super::row::{Row, Sink};
use super::timing::{describe_speedups, median};
use crate::device::{DeviceChoice, flush, synchronize};

/// Operators per timing.
const CALLS: usize = 1000;
/// Timings per round.
const TIMINGS: usize = 9;
/// Timings before those that count.
const WARM_UP: usize = 3;

/// The flags of `dtensor bench dispatch`.
#[derive(Args)]
pub(crate) struct Options {
    /// Number of ranks
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    /// Kinds of ranks
    #[arg(long, value_delimiter = ',', default_value = "simulated,threads")]
    world: Vec<RankKind>,
    /// Python interpreter with torch; each case is timed there too, in turns with ours
    #[arg(long, value_name = "PYTHON")]
    peer: Option<String>,
    /// Where the tensors are: `cpu`, or GPUs: `cuda`
    #[arg(long, default_value_t = DeviceChoice::Cpu, value_name = "DEVICE")]
    device: DeviceChoice,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
    /// Number of measurements of each case, in turns; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

/// The kind of the ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum RankKind {
    /// One rank of a simulated world, alone
    Simulated,
    /// Threads of one process, all at once
    Threads,
}

impl RankKind {
    /// Returns the world that rows name.
    fn world(self) -> comparison::World {
        match self {
            RankKind::Simulated => comparison::World::Simulated,
            RankKind::Threads => comparison::World::Threads,
        }
    }

    /// Creates the ranks that run.
    fn worlds(self, ranks: usize) -> Result<Vec<World>> {
        match self {
            RankKind::Simulated => Ok(vec![World::simulated(ranks, 0)?]),
            RankKind::Threads => World::threads(ranks),
        }
    }
}

/// The operator of a case, and the placements of its inputs.
#[derive(Clone, Copy)]
enum Operator {
    /// Local inputs.
    LocalAdd,
    AddReplicate,
    AddShard,
    /// `Shard(0)` on the left, `Replicate` on the right.
    MatmulShard,
    /// Launches of a kernel that does nothing: what every operator on a GPU costs at least.
    Launch,
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    operator: Operator,
    /// True if the operator records a node.
    grad: bool,
}

/// The case without an operator, for GPUs.
const LAUNCH: &str = "bare_launch";

const CASES: [Case; 8] = [
    Case { name: LAUNCH, operator: Operator::Launch, grad: false },
    Case { name: "local_add", operator: Operator::LocalAdd, grad: false },
    Case { name: "add_replicate", operator: Operator::AddReplicate, grad: false },
    Case { name: "add_shard", operator: Operator::AddShard, grad: false },
    Case { name: "local_add_grad", operator: Operator::LocalAdd, grad: true },
    Case { name: "add_replicate_grad", operator: Operator::AddReplicate, grad: true },
    Case { name: "add_shard_grad", operator: Operator::AddShard, grad: true },
    Case { name: "matmul_shard", operator: Operator::MatmulShard, grad: false },
];

impl Case {
    /// Returns the median time of an operator, from the first rank that starts to the last rank that finishes.
    fn seconds(self, ranks: RankKind, size: usize, device: DeviceChoice) -> Result<f64> {
        let run = |world: World| {
            set_num_threads(1);
            let mesh = DeviceMesh::new(&world, [size], "ranks")?;
            let ones = |rows, columns| Tensor::ones([rows, columns], DType::F32)?.requires_grad_(self.grad);
            let add = |x: Tensor| spans(&world, || x.add(&x));
            match self.operator {
                Operator::LocalAdd => add(ones(4, 4)?),
                Operator::AddReplicate => add(distribute_tensor(&ones(4, 4)?, &mesh, Replicate)?),
                Operator::AddShard => add(distribute_tensor(&ones(4 * size, 4)?, &mesh, Shard(0))?),
                Operator::MatmulShard => {
                    let a = distribute_tensor(&ones(4 * size, 8)?, &mesh, Shard(0))?;
                    let b = distribute_tensor(&ones(8, 8)?, &mesh, Replicate)?;
                    spans(&world, || a.matmul(&b))
                }
                Operator::Launch => launches(&world, device.of_rank(world.rank())),
            }
        };
        let spans =
            run_ranks(ranks.worlds(size)?, |world| on_device(device.of_rank(world.rank()), || run(world)))?;
        let time = |timing: usize| {
            let first = spans.iter().map(|rank| rank[timing].0).min();
            let last = spans.iter().map(|rank| rank[timing].1).max();
            let span = first.zip(last).map(|(first, last)| last - first).unwrap_or_default();
            span.as_secs_f64() / CALLS as f64
        };
        Ok(median((WARM_UP..WARM_UP + TIMINGS).map(time).collect()))
    }
}

/// Returns the median time of the case `add_shard` on one rank of a simulated mesh.
pub(crate) fn add_shard(ranks: usize) -> Result<f64> {
    Case { name: "add_shard", operator: Operator::AddShard, grad: false }.seconds(
        RankKind::Simulated,
        ranks,
        DeviceChoice::Cpu,
    )
}

/// The start and the end of each timing.
type Spans = Vec<(Instant, Instant)>;

/// Times an operator.
fn spans(world: &World, body: impl Fn() -> Result<Tensor>) -> Result<Spans> {
    time(world, body()?.device(), body)
}

/// Times launches of a kernel that does nothing.
fn launches(world: &World, device: Device) -> Result<Spans> {
    #[cfg(feature = "cuda")]
    return time(world, device, || dtensor::cuda::launch_empty(device));
    #[cfg(not(feature = "cuda"))]
    time(world, device, || Ok(()))
}

/// Runs all timings, and returns the start and the end of each on this rank. A barrier lets ranks start together.
fn time<T>(world: &World, device: Device, body: impl Fn() -> Result<T>) -> Result<Spans> {
    let mut spans = Vec::with_capacity(WARM_UP + TIMINGS);
    for _ in 0..WARM_UP + TIMINGS {
        world.group().barrier()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            let result = body()?;
            flush(device)?;
            drop(black_box(result));
        }
        synchronize(device)?;
        spans.push((start, Instant::now()));
    }
    Ok(spans)
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> std::result::Result<(), Box<dyn Error>> {
    let is_measured = |case: &Case| options.device.is_gpu() || case.name != LAUNCH;
    let cases: Vec<Case> =
        CASES.into_iter().filter(|case| case.name.contains(&options.only) && is_measured(case)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    options.device.check()?;
    let start =
        |path| comparison::peer(path, include_str!("dispatch_peer.py"), options.ranks.into(), options.device);
    let mut peer = options.peer.as_deref().map(start).transpose()?;
    let mut speedups: BTreeMap<RankKind, Vec<f64>> = BTreeMap::new();
    for &world in &options.world {
        for &case in &cases {
            let row = match case.name {
                LAUNCH => row(options, world, case, &mut None)?,
                _ => row(options, world, case, &mut peer)?,
            };
            if let Some(ratio) = row.ratio {
                speedups.entry(world).or_default().push(1.0 / ratio);
            }
            sink(row)?;
        }
    }
    for (world, speedups) in speedups {
        eprintln!("{}: {}", world.world().name(), describe_speedups(&speedups));
    }
    Ok(())
}

/// Measures one case, ours and PyTorch's in turns.
fn row(
    options: &Options,
    world: RankKind,
    case: Case,
    peer: &mut Option<Peer>,
) -> std::result::Result<Row, Box<dyn Error>> {
    let (ranks, request) = (options.ranks.into(), format!("{}:{}", world.world().name(), case.name));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    if let Some(peer) = peer {
        // Wait until the peer has started.
        peer.seconds(&request, 1, 1)?;
    }
    for _ in 0..options.rounds {
        ours.push(case.seconds(world, ranks, options.device)?);
        if let Some(peer) = peer {
            theirs.push(peer.seconds(&request, TIMINGS, CALLS)?);
        }
    }
    let seconds = median(ours);
    let peer_seconds = (!theirs.is_empty()).then(|| median(theirs));
    let ratio = peer_seconds.map(|theirs| seconds / theirs);
    Ok(Row {
        workload: "dispatch",
        case: case.name.to_owned(),
        ranks: Some(ranks),
        world: Some(world.world()),
        seconds: Some(seconds),
        peer_seconds,
        ratio,
        ..Row::default()
    })
}
