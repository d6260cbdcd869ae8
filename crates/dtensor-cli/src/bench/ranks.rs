//! The serving side of [`Peer`](super::peer::Peer): ranks that measure one case per request. They are threads of this process, or
//! processes that `mpirun` started.
//!
//! Rank 0 reads requests, broadcasts them, and answers.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dtensor::comm::{Group, World, WorldKind, run};
use dtensor::{Device, DeviceMesh, Result, Tensor, set_num_threads};

use super::peer::Measurement;
use super::timing::median;
use crate::device::{flush, synchronize};

/// Calls before those that count, so that memory and threads reach a steady state.
pub(crate) const WARM_UP: usize = 3;

/// A serving rank.
pub(crate) struct ServingRank {
    pub(crate) world: World,
    /// A 1-d mesh of all ranks.
    pub(crate) mesh: DeviceMesh,
    /// The time at which its process started to create the world.
    pub(crate) start: u64,
    /// The time at which it had a mesh and had passed a barrier.
    pub(crate) ready: u64,
}

/// A request to measure one case.
pub(crate) struct Request {
    pub(crate) case: String,
    pub(crate) samples: usize,
    pub(crate) inner: usize,
}

impl Request {
    fn parse(line: &str) -> Result<Request> {
        let mut words = line.split_whitespace();
        let case = words.next().map(str::to_owned);
        let mut count = || words.next().and_then(|word| word.parse().ok()).filter(|&n| n > 0);
        match (case, count(), count()) {
            (Some(case), Some(samples), Some(inner)) => Ok(Request { case, samples, inner }),
            _ => Err(dtensor::Error::argument("bench", format!("{line:?} is not `case samples inner`"))),
        }
    }

    /// The error for a case that does not exist.
    pub(crate) fn unknown_case(&self) -> dtensor::Error {
        dtensor::Error::argument("bench", format!("there is no case {:?}", self.case))
    }
}

/// Returns the system time in nanoseconds. All processes of the machine share this clock.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Answers requests until the input ends.
pub(crate) fn serve(
    ranks: usize,
    measure: impl Fn(&ServingRank, &Request) -> Result<Measurement> + Sync,
) -> std::result::Result<(), Box<dyn Error>> {
    let start = now();
    run(World::from_env(ranks)?, |world| {
        set_num_threads(1);
        let mesh = DeviceMesh::new(&world, [world.size()], "ranks")?;
        world.group().barrier()?;
        let rank = ServingRank { world, mesh, start, ready: now() };
        // While the other programs are measured, which may compile first, the ranks wait.
        let patient = rank.world.with_timeout(Duration::from_secs(24 * 3600));
        while let Some(line) = next_line(patient.group())? {
            let measurement = measure(&rank, &Request::parse(&line)?)?;
            if rank.world.rank() == 0 {
                println!("{}", serde_json::to_string(&measurement).expect("a measurement converts to JSON"));
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// Reads the next line of the input on rank 0, and returns it on every rank.
///
/// While rank 0 waits for input, other processes are being measured. So the other ranks sleep and poll: waiting in a collective could
/// spin on a core, and would run into its timeout.
fn next_line(group: &Group) -> Result<Option<String>> {
    let mut line = None;
    if group.rank() == 0 {
        // A read error counts as the end of the input.
        line = Some(std::io::stdin().lines().next().and_then(|line| line.ok()));
    }
    let mut barrier = group.barrier_async()?;
    while !barrier.is_ready() {
        std::thread::sleep(Duration::from_millis(5));
    }
    barrier.wait()?;
    group.broadcast_object(line.as_ref(), 0)
}

/// Returns the median time of a call, from the first rank that starts to the last rank that finishes. A barrier lets ranks start
/// together.
///
/// With fewer cores than ranks, a rank may finish before another one has run.
pub(crate) fn time_all(
    rank: &ServingRank,
    request: &Request,
    call: impl Fn() -> Result<Tensor>,
) -> Result<f64> {
    let group = rank.world.group();
    let mut spans = Vec::with_capacity(request.samples);
    let mut device = Device::Cpu;
    for _ in 0..request.samples {
        group.barrier()?;
        let start = now();
        for _ in 0..request.inner {
            let result = black_box(call()?);
            device = result.device();
            flush(device)?;
        }
        synchronize(device)?;
        spans.push((start, now()));
    }
    let of_ranks = group.all_gather_object(&spans)?;
    let span = |sample: usize| {
        let first = of_ranks.iter().map(|spans| spans[sample].0).min().unwrap_or_default();
        let last = of_ranks.iter().map(|spans| spans[sample].1).max().unwrap_or_default();
        last.saturating_sub(first) as f64 / 1e9 / request.inner as f64
    };
    Ok(median((0..request.samples).map(span).collect()))
}

/// Returns the peak memory of all ranks: of this process for threads, summed over processes otherwise. `None` if the system does not
/// report it.
pub(crate) fn peak_memory(world: &World) -> Result<Option<u64>> {
    let own = peak_of_this_process();
    if world.kind() != WorldKind::Mpi {
        return Ok(own);
    }
    Ok(world.group().all_gather_object(&own)?.into_iter().sum())
}

fn peak_of_this_process() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok().map(|kilobytes: u64| kilobytes * 1024)
}
