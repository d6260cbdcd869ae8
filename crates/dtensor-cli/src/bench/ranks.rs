//! Ranks that measure when told to: threads of this process, or processes that `mpirun` started.
//!
//! Rank 0 reads the lines that [`Peer`](super::peer::Peer) writes, tells the others, and answers.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dtensor::comm::{Group, World, WorldKind, run};
use dtensor::{DeviceMesh, Result, Tensor, set_num_threads};

use super::peer::Answer;
use super::timing::median;

/// Calls before the ones that count: they bring memory and threads to where they stay.
pub(crate) const WARM_UP: usize = 3;

/// A rank that has started.
pub(crate) struct Seat {
    pub(crate) world: World,
    /// All ranks, in one dim.
    pub(crate) mesh: DeviceMesh,
    /// When its process began to make a world.
    pub(crate) began: u64,
    /// When it had a mesh and had met all others.
    pub(crate) ready: u64,
}

/// What a rank is asked.
pub(crate) struct Question {
    pub(crate) case: String,
    pub(crate) samples: usize,
    pub(crate) inner: usize,
}

impl Question {
    fn read(line: &str) -> Result<Question> {
        let mut words = line.split_whitespace();
        let case = words.next().map(str::to_owned);
        let mut count = || words.next().and_then(|word| word.parse().ok()).filter(|&n| n > 0);
        match (case, count(), count()) {
            (Some(case), Some(samples), Some(inner)) => Ok(Question { case, samples, inner }),
            _ => Err(dtensor::Error::argument("bench", format!("{line:?} is not `case samples inner`"))),
        }
    }

    /// That there is no such case.
    pub(crate) fn refuse(&self) -> dtensor::Error {
        dtensor::Error::argument("bench", format!("there is no case {:?}", self.case))
    }
}

/// The time of this machine, in nanoseconds: the same for all processes.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Answers until the input ends.
pub(crate) fn serve(
    ranks: usize,
    answer: impl Fn(&Seat, &Question) -> Result<Answer> + Sync,
) -> std::result::Result<(), Box<dyn Error>> {
    let began = now();
    run(World::from_env(ranks)?, |world| {
        set_num_threads(1);
        let mesh = DeviceMesh::new(&world, [world.size()], "ranks")?;
        world.group().barrier()?;
        let seat = Seat { world, mesh, began, ready: now() };
        while let Some(line) = next_line(seat.world.group())? {
            let answer = answer(&seat, &Question::read(&line)?)?;
            if seat.world.rank() == 0 {
                println!("{}", serde_json::to_string(&answer).expect("numbers are JSON"));
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// The next line of the input, which only rank 0 has, on every rank.
///
/// While rank 0 reads, others have their turn on this machine. So the rest of the ranks look now and then whether it
/// has come back: waiting in a collective could keep their cores busy, and would run into its timeout.
fn next_line(group: &Group) -> Result<Option<String>> {
    let mut line = None;
    if group.rank() == 0 {
        // An input that cannot be read is at its end.
        line = Some(std::io::stdin().lines().next().and_then(|line| line.ok()));
    }
    let mut back = group.barrier_async()?;
    while !back.is_ready() {
        std::thread::sleep(Duration::from_millis(5));
    }
    back.wait()?;
    group.broadcast_object(line.as_ref(), 0)
}

/// The median time of a call from the first rank that starts to the last that is done, all ranks starting together.
///
/// Where there are fewer cores than ranks, a rank may be done before others have had their turn.
pub(crate) fn time_all(seat: &Seat, question: &Question, call: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let group = seat.world.group();
    let mut spans = Vec::with_capacity(question.samples);
    for _ in 0..question.samples {
        group.barrier()?;
        let began = now();
        for _ in 0..question.inner {
            drop(black_box(call()?));
        }
        spans.push((began, now()));
    }
    let everybody = group.all_gather_object(&spans)?;
    let span = |sample: usize| {
        let first = everybody.iter().map(|spans| spans[sample].0).min().unwrap_or_default();
        let last = everybody.iter().map(|spans| spans[sample].1).max().unwrap_or_default();
        last.saturating_sub(first) as f64 / 1e9 / question.inner as f64
    };
    Ok(median((0..question.samples).map(span).collect()))
}

/// The most memory that all ranks together have had until now: one process's, or the sum over processes. Nothing where the system does
/// not say.
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
