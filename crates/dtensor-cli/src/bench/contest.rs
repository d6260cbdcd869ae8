//! Those who take turns: worlds of our own, each a process that serves, and PyTorch.

use std::error::Error;
use std::process::Command;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::peer::{Answer, Peer, python};
use super::row::Row;
use super::timing::median;

/// The worlds that this program can make.
const WORLDS: &str = if cfg!(feature = "mpi") { "threads,mpi" } else { "threads" };

/// Among whom, how often, and beside whom.
#[derive(Args)]
pub(crate) struct Sides {
    /// Numbers of ranks
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2,4",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub(crate) ranks: Vec<u16>,
    /// What the ranks are
    #[arg(long, value_delimiter = ',', default_value = WORLDS)]
    pub(crate) world: Vec<World>,
    /// A Python that has torch: each case is measured there too, in turns with ours
    #[arg(long, value_name = "PYTHON")]
    pub(crate) peer: Option<String>,
    /// Only the cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
    /// How often all take turns; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) rounds: u16,
}

/// What ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum World {
    /// Threads of one process
    Threads,
    /// Processes that MPI connects
    Mpi,
    /// One that is there, and others that are not
    #[value(skip)]
    Simulated,
}

impl World {
    pub(crate) fn name(self) -> &'static str {
        match self {
            World::Threads => "threads",
            World::Mpi => "mpi",
            World::Simulated => "simulated",
        }
    }

    /// That this program can make it.
    pub(crate) fn check(self) -> Result<(), &'static str> {
        if self == World::Mpi && !cfg!(feature = "mpi") {
            return Err("the mpi world needs a program that was built with the feature `mpi`");
        }
        Ok(())
    }

    /// Starts this program as so many ranks that serve a workload.
    pub(crate) fn serve(self, workload: &str, ranks: usize) -> Result<Peer, Box<dyn Error>> {
        self.check()?;
        let program = std::env::current_exe()?;
        let mut command = Command::new(&program);
        #[cfg(feature = "mpi")]
        if self == World::Mpi {
            command = dtensor::comm::mpirun(ranks);
            command.arg(program);
        }
        command.args(["bench", workload, "--serve", "--ranks", &ranks.to_string()]);
        Ok(Peer::start(format!("the {} world", self.name()), command)?)
    }
}

/// Starts PyTorch as so many ranks; `script` comes after `ranks_peer.py`.
pub(crate) fn peer(path: &str, script: &str, ranks: usize) -> Result<Peer, String> {
    let mut command = python(path, &[include_str!("ranks_peer.py"), script].concat());
    command.env("WORLD_SIZE", ranks.to_string());
    Peer::start("the peer", command)
}

/// Everybody who takes turns on one number of ranks.
pub(crate) struct Contest {
    pub(crate) worlds: Vec<(World, Peer)>,
    pub(crate) peer: Option<Peer>,
}

/// What everybody said, round by round.
pub(crate) struct Answers {
    pub(crate) ours: Vec<(World, Vec<Answer>)>,
    /// Nothing, if there is no peer.
    pub(crate) theirs: Vec<Answer>,
}

impl Contest {
    /// Starts everybody who is to take part in a workload.
    pub(crate) fn start(
        sides: &Sides,
        workload: &str,
        script: &str,
        ranks: usize,
    ) -> Result<Self, Box<dyn Error>> {
        let worlds = sides.world.iter().map(|&world| Ok((world, world.serve(workload, ranks)?)));
        let worlds = worlds.collect::<Result<_, Box<dyn Error>>>()?;
        let peer = sides.peer.as_deref().map(|path| peer(path, script, ranks)).transpose()?;
        Ok(Contest { worlds, peer })
    }

    /// Has all take turns in a case; `between` is called once in each round.
    pub(crate) fn rounds(
        &mut self,
        rounds: u16,
        case: &str,
        samples: usize,
        mut between: impl FnMut(),
    ) -> Result<Answers, String> {
        // Nobody is timed while somebody is still starting, so all have been heard once before.
        for one in self.worlds.iter_mut().map(|(_, world)| world).chain(&mut self.peer) {
            one.ask(case, 1, 1)?;
        }
        let mut answers = Answers::of(self.worlds.iter().map(|(world, _)| *world));
        for _ in 0..rounds {
            for ((_, world), (_, said)) in self.worlds.iter_mut().zip(&mut answers.ours) {
                said.push(world.ask(case, samples, 1)?);
            }
            between();
            if let Some(peer) = &mut self.peer {
                answers.theirs.push(peer.ask(case, samples, 1)?);
            }
        }
        Ok(answers)
    }
}

impl Answers {
    /// Nothing said yet.
    pub(crate) fn of(worlds: impl IntoIterator<Item = World>) -> Answers {
        let ours = worlds.into_iter().map(|world| (world, Vec::new())).collect();
        Answers { ours, theirs: Vec::new() }
    }

    /// One row per world, with the median times.
    pub(crate) fn timed(&self, workload: &'static str, case: &str, ranks: usize) -> Vec<Row> {
        let middle = |said: &[Answer]| {
            (!said.is_empty()).then(|| median(said.iter().map(|answer| answer.seconds).collect()))
        };
        let peer_seconds = middle(&self.theirs);
        let row = |(world, said): &(World, Vec<Answer>)| {
            let seconds = middle(said);
            Row {
                workload,
                case: case.to_owned(),
                ranks: Some(ranks),
                world: Some(*world),
                seconds,
                peer_seconds,
                ratio: seconds.zip(peer_seconds).map(|(ours, theirs)| ours / theirs),
                ..Row::default()
            }
        };
        self.ours.iter().map(row).collect()
    }
}
