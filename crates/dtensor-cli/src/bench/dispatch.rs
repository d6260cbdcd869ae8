//! `dtensor bench dispatch`: what an operator costs besides its arithmetic, the same cases as `dispatch_peer.py`.
//!
//! Tensors so small that the kernel takes next to nothing, in layouts that need no communication. One timing is 1,000 operators,
//! each result dropped before the next, and of nine timings the median counts.
//!
//! It is timed among ranks that do it in two ways, because neither says everything:
//! - `simulated`: one rank of the world has a core to itself. Its peer is one process of as many, while the others sleep. This is
//!   the cost of dispatch.
//! - `threads`: all ranks run at once, and so do the peer's. This shows whether ranks get in each other's way. The time is
//!   from the first rank that starts to the last that is done: where there are fewer cores than ranks, a rank that is done
//!   within its time slice would else be timed as if the others were not there, and one that is slower would not.
//!
//! On a machine that does other work at the same time the comparison is not fair: our timings are so short that they are
//! seldom interrupted, the peer's are not.

use std::collections::BTreeMap;
use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use clap::{Args, ValueEnum};
use dtensor::comm::{World, run as run_ranks};
use dtensor::prelude::*;
use dtensor::set_num_threads;

use super::contest;
use super::peer::Peer;
use super::row::{Row, Sink};
use super::timing::{faster, median};

/// Operators in a timing.
const OPERATORS: usize = 1000;
/// Timings in a turn.
const TIMINGS: usize = 9;
/// Timings before the ones that count.
const WARM_UP: usize = 3;

/// Which cases, among whom, how often, and beside whom.
#[derive(Args)]
pub(crate) struct Options {
    /// Number of ranks
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    /// What the ranks are
    #[arg(long, value_delimiter = ',', default_value = "simulated,threads")]
    world: Vec<Ranks>,
    /// A Python that has torch: each case is timed there too, interleaved with ours
    #[arg(long, value_name = "PYTHON")]
    peer: Option<String>,
    /// Only the cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
    /// How often all take turns; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

/// What ranks are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Ranks {
    /// One of them, alone
    Simulated,
    /// Threads of one process, all at once
    Threads,
}

impl Ranks {
    /// As rows have it.
    fn world(self) -> contest::World {
        match self {
            Ranks::Simulated => contest::World::Simulated,
            Ranks::Threads => contest::World::Threads,
        }
    }

    /// The ranks that are there.
    fn worlds(self, ranks: usize) -> Result<Vec<World>> {
        match self {
            Ranks::Simulated => Ok(vec![World::simulated(ranks, 0)?]),
            Ranks::Threads => World::threads(ranks),
        }
    }
}

/// The operator of a case, and how its inputs lie.
#[derive(Clone, Copy)]
enum Kind {
    /// On no mesh at all.
    LocalAdd,
    AddReplicate,
    AddShard,
    /// Rows of the left input on each rank, all of the right one.
    MatmulShard,
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    kind: Kind,
    /// Whether the operator leaves a node in the graph.
    grad: bool,
}

const CASES: [Case; 7] = [
    Case { name: "local_add", kind: Kind::LocalAdd, grad: false },
    Case { name: "add_replicate", kind: Kind::AddReplicate, grad: false },
    Case { name: "add_shard", kind: Kind::AddShard, grad: false },
    Case { name: "local_add_grad", kind: Kind::LocalAdd, grad: true },
    Case { name: "add_replicate_grad", kind: Kind::AddReplicate, grad: true },
    Case { name: "add_shard_grad", kind: Kind::AddShard, grad: true },
    Case { name: "matmul_shard", kind: Kind::MatmulShard, grad: false },
];

impl Case {
    /// The median time of an operator, from the first rank that starts to the last that is done.
    fn seconds(self, ranks: Ranks, size: usize) -> Result<f64> {
        let spans = run_ranks(ranks.worlds(size)?, |world| {
            set_num_threads(1);
            let mesh = DeviceMesh::new(&world, [size], "ranks")?;
            let ones = |rows, columns| Tensor::ones([rows, columns], DType::F32)?.requires_grad_(self.grad);
            let add = |x: Tensor| spans(&world, || x.add(&x));
            match self.kind {
                Kind::LocalAdd => add(ones(4, 4)?),
                Kind::AddReplicate => add(distribute_tensor(&ones(4, 4)?, &mesh, Replicate)?),
                Kind::AddShard => add(distribute_tensor(&ones(4 * size, 4)?, &mesh, Shard(0))?),
                Kind::MatmulShard => {
                    let a = distribute_tensor(&ones(4 * size, 8)?, &mesh, Shard(0))?;
                    let b = distribute_tensor(&ones(8, 8)?, &mesh, Replicate)?;
                    spans(&world, || a.matmul(&b))
                }
            }
        })?;
        let time = |timing: usize| {
            let first = spans.iter().map(|rank| rank[timing].0).min();
            let last = spans.iter().map(|rank| rank[timing].1).max();
            let span = first.zip(last).map(|(first, last)| last - first).unwrap_or_default();
            span.as_secs_f64() / OPERATORS as f64
        };
        Ok(median((WARM_UP..WARM_UP + TIMINGS).map(time).collect()))
    }
}

/// The median time of the case `add_shard` on one rank of a simulated mesh.
pub(crate) fn add_shard(ranks: usize) -> Result<f64> {
    Case { name: "add_shard", kind: Kind::AddShard, grad: false }.seconds(Ranks::Simulated, ranks)
}

/// When each timing of this rank began and ended. Ranks begin together.
fn spans(world: &World, body: impl Fn() -> Result<Tensor>) -> Result<Vec<(Instant, Instant)>> {
    let mut spans = Vec::with_capacity(WARM_UP + TIMINGS);
    for _ in 0..WARM_UP + TIMINGS {
        world.group().barrier()?;
        let began = Instant::now();
        for _ in 0..OPERATORS {
            drop(black_box(body()?));
        }
        spans.push((began, Instant::now()));
    }
    Ok(spans)
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> std::result::Result<(), Box<dyn Error>> {
    let cases: Vec<Case> = CASES.into_iter().filter(|case| case.name.contains(&options.only)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let start = |path| contest::peer(path, include_str!("dispatch_peer.py"), options.ranks.into());
    let mut peer = options.peer.as_deref().map(start).transpose()?;
    let mut speedups: BTreeMap<Ranks, Vec<f64>> = BTreeMap::new();
    for &world in &options.world {
        for &case in &cases {
            let row = row(options, world, case, &mut peer)?;
            if let Some(ratio) = row.ratio {
                speedups.entry(world).or_default().push(1.0 / ratio);
            }
            sink(row)?;
        }
    }
    for (world, speedups) in speedups {
        eprintln!("{}: {}", world.world().name(), faster(&speedups));
    }
    Ok(())
}

/// One case, ours and the peer's in turns.
fn row(
    options: &Options,
    world: Ranks,
    case: Case,
    peer: &mut Option<Peer>,
) -> std::result::Result<Row, Box<dyn Error>> {
    let (ranks, question) = (options.ranks.into(), format!("{}:{}", world.world().name(), case.name));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    if let Some(peer) = peer {
        // Nobody is timed while it is still starting.
        peer.seconds(&question, 1, 1)?;
    }
    for _ in 0..options.rounds {
        ours.push(case.seconds(world, ranks)?);
        if let Some(peer) = peer {
            theirs.push(peer.seconds(&question, TIMINGS, OPERATORS)?);
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
