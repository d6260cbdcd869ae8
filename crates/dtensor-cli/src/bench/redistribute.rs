//! `dtensor bench redistribute`: a tensor on several ranks that comes to lie in another way, the same cases as `redistribute_peer.py`.
//!
//! Threads read each other's memory, so memory is what limits them, and each of their rows says how near they come. In the
//! same run as many threads as ranks, but no more than the machine can run at once, each copy a buffer of the case's
//! size. At that rate the bytes of [`Case::traffic`] take the time that is the bound; `bound_fraction` is the bound over the
//! time measured.

use std::collections::BTreeMap;
use std::error::Error;
use std::process::Command;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::collective::{Case, Kind};
use super::copy::bytes_per_second;
use super::peer::{Peer, python};
use super::ranks::serve;
use super::timing::median;

/// The worlds that this program can make.
const WORLDS: &str = if cfg!(feature = "mpi") { "threads,mpi" } else { "threads" };

/// Which cases, among whom, how often, and beside whom.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of ranks
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2,4",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    ranks: Vec<u16>,
    /// What the ranks are
    #[arg(long, value_delimiter = ',', default_value = WORLDS)]
    world: Vec<World>,
    /// Sizes of the whole tensor in bytes
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096,262144,4194304,67108864",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    sizes: Vec<u32>,
    /// A Python that has torch: each case is timed there too, interleaved with ours
    #[arg(long, value_name = "PYTHON")]
    peer: Option<String>,
    /// Only the cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// How often all take turns; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Be the ranks of such a run, and time what the input says
    #[arg(long, hide = true)]
    serve: bool,
}

/// What ranks are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum World {
    /// Threads of one process
    Threads,
    /// Processes that MPI connects
    Mpi,
}

/// As the command line spells it.
fn name(world: World) -> String {
    world.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[derive(Serialize)]
struct Row {
    workload: &'static str,
    case: String,
    ranks: usize,
    world: World,
    bytes: usize,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_seconds: Option<f64>,
    /// Ours over the peer's: below 1 we are faster.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    /// See the top of this file.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound_fraction: Option<f64>,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    if options.serve {
        return serve(options.ranks[0].into());
    }
    let mut speedups: BTreeMap<(World, usize), Vec<f64>> = BTreeMap::new();
    for &ranks in &options.ranks {
        let ranks = ranks.into();
        let mut contest = Contest::start(options, ranks)?;
        let sizes = options.sizes.iter().map(|&size| size as usize);
        let cases = sizes.flat_map(|size| Kind::ALL.map(|kind| Case::new(kind, ranks, size)));
        for case in cases.filter(|case| case.to_string().contains(&options.only)) {
            for row in contest.rows(case)? {
                println!("{}", serde_json::to_string(&row)?);
                if let Some(ratio) = row.ratio {
                    speedups.entry((row.world, row.bytes)).or_default().push(1.0 / ratio);
                }
            }
        }
    }
    for ((world, bytes), speedups) in speedups {
        let smallest = speedups.iter().copied().fold(f64::INFINITY, f64::min);
        let mean = (speedups.iter().map(|x| x.ln()).sum::<f64>() / speedups.len() as f64).exp();
        let world = name(world);
        eprintln!(
            "{world}, {bytes} bytes: at least {smallest:.1} times as fast as the peer, geometric mean {mean:.1}"
        );
    }
    Ok(())
}

/// Everybody who takes turns on one number of ranks.
struct Contest<'a> {
    options: &'a Options,
    ranks: usize,
    worlds: Vec<(World, Peer)>,
    peer: Option<Peer>,
}

impl<'a> Contest<'a> {
    fn start(options: &'a Options, ranks: usize) -> Result<Self, Box<dyn Error>> {
        let mut worlds = Vec::new();
        for &world in &options.world {
            worlds.push((world, Peer::start(format!("the {} world", name(world)), command(world, ranks)?)?));
        }
        let mut peer = None;
        if let Some(path) = &options.peer {
            let mut command =
                python(path, concat!(include_str!("ranks_peer.py"), include_str!("redistribute_peer.py")));
            command.env("WORLD_SIZE", ranks.to_string());
            peer = Some(Peer::start("the peer", command)?);
        }
        Ok(Contest { options, ranks, worlds, peer })
    }

    /// The rows of a case, one per world.
    fn rows(&mut self, case: Case) -> Result<Vec<Row>, String> {
        let (name, samples) = (case.to_string(), case.samples());
        let mut ours = vec![Vec::new(); self.worlds.len()];
        let (mut theirs, mut bounds) = (Vec::new(), Vec::new());
        // Nobody is timed while somebody is still starting, so all have been heard once before.
        for one in self.worlds.iter_mut().map(|(_, world)| world).chain(&mut self.peer) {
            one.seconds(&name, 1, 1)?;
        }
        for _ in 0..self.options.rounds {
            for ((_, world), times) in self.worlds.iter_mut().zip(&mut ours) {
                times.push(world.seconds(&name, samples, 1)?);
            }
            bounds.push(case.traffic() as f64 / bytes_per_second(self.ranks, case.bytes()));
            if let Some(peer) = &mut self.peer {
                theirs.push(peer.seconds(&name, samples, 1)?);
            }
        }
        let peer_seconds = (!theirs.is_empty()).then(|| median(theirs));
        let bound = median(bounds);
        let rows = self.worlds.iter().zip(ours).map(|((world, _), times)| {
            let seconds = median(times);
            Row {
                workload: "redistribute",
                case: name.clone(),
                ranks: self.ranks,
                world: *world,
                bytes: case.bytes(),
                seconds,
                peer_seconds,
                ratio: peer_seconds.map(|theirs| seconds / theirs),
                bound_fraction: (*world == World::Threads).then(|| bound / seconds),
            }
        });
        Ok(rows.collect())
    }
}

/// The command that starts this program as the ranks of a world.
fn command(world: World, ranks: usize) -> Result<Command, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let mut command = match world {
        World::Threads => Command::new(program),
        #[cfg(feature = "mpi")]
        World::Mpi => {
            let mut command = dtensor::comm::mpirun(ranks);
            command.arg(program);
            command
        }
        #[cfg(not(feature = "mpi"))]
        World::Mpi => {
            return Err("the mpi world needs a program that was built with the feature `mpi`".into());
        }
    };
    command.args(["bench", "redistribute", "--serve", "--ranks", &ranks.to_string()]);
    Ok(command)
}
