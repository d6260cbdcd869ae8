//! [`Comparison`]: measures our worlds and PyTorch in turns. Each is a separate process.

use std::error::Error;
use std::process::Command;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::peer::{Measurement, Peer, python};
use super::row::Row;
use super::timing::median;
use crate::device::DeviceChoice;

/// The worlds that this build supports.
const WORLDS: &str = if cfg!(feature = "mpi") { "threads,mpi" } else { "threads" };

/// The flags that several workloads share.
#[derive(Args)]
pub(crate) struct CommonOptions {
    /// Numbers of ranks
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2,4",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub(crate) ranks: Vec<u16>,
    /// Kinds of ranks
    #[arg(long, value_delimiter = ',', default_value = WORLDS)]
    pub(crate) world: Vec<World>,
    /// Where the tensors are: `cpu`, or a GPU that all ranks share: `cuda`. PyTorch then needs a GPU for each rank
    #[arg(long, default_value_t = DeviceChoice::Cpu, value_name = "DEVICE")]
    pub(crate) device: DeviceChoice,
    /// Python interpreter with torch; each case is measured there too, in turns with ours
    #[arg(long, value_name = "PYTHON")]
    pub(crate) peer: Option<String>,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
    /// Number of measurements of each case, in turns; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) rounds: u16,
}

/// The kind of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum World {
    /// Threads of one process
    Threads,
    /// Processes over MPI
    Mpi,
    /// One rank of a simulated world
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

    /// Returns an error if this build does not support the world.
    pub(crate) fn check(self) -> Result<(), &'static str> {
        if self == World::Mpi && !cfg!(feature = "mpi") {
            return Err("--world mpi needs a program that was built with the feature `mpi`");
        }
        Ok(())
    }

    /// Starts this program with `--serve` on a number of ranks.
    pub(crate) fn serve(
        self,
        workload: &str,
        ranks: usize,
        device: DeviceChoice,
    ) -> Result<Peer, Box<dyn Error>> {
        self.check()?;
        let program = std::env::current_exe()?;
        let mut command = Command::new(&program);
        #[cfg(feature = "mpi")]
        if self == World::Mpi {
            command = dtensor::comm::mpirun(ranks);
            command.arg(program);
        }
        command.args(["bench", workload, "--serve", "--ranks", &ranks.to_string()]);
        command.env("DTENSOR_DEVICE", device.to_string());
        Ok(Peer::start(format!("the {} world", self.name()), command)?)
    }
}

/// Starts PyTorch on a number of ranks, with `script` appended to `ranks_peer.py`.
pub(crate) fn peer(path: &str, script: &str, ranks: usize, device: DeviceChoice) -> Result<Peer, String> {
    let mut command = python(path, &[include_str!("ranks_peer.py"), script].concat());
    command.env("WORLD_SIZE", ranks.to_string()).env("DTENSOR_DEVICE", device.to_string());
    Peer::start("the peer", command)
}

/// The processes that are measured in turns, all with the same number of ranks.
pub(crate) struct Comparison {
    pub(crate) worlds: Vec<(World, Peer)>,
    pub(crate) peer: Option<Peer>,
}

/// The measurements of one case, round by round.
pub(crate) struct Measurements {
    pub(crate) ours: Vec<(World, Vec<Measurement>)>,
    /// Empty without a peer.
    pub(crate) theirs: Vec<Measurement>,
}

impl Comparison {
    /// Starts all processes for a workload.
    pub(crate) fn start(
        common: &CommonOptions,
        workload: &str,
        script: &str,
        ranks: usize,
    ) -> Result<Self, Box<dyn Error>> {
        let worlds =
            common.world.iter().map(|&world| Ok((world, world.serve(workload, ranks, common.device)?)));
        let worlds = worlds.collect::<Result<_, Box<dyn Error>>>()?;
        let peer = common.peer.as_deref().map(|path| peer(path, script, ranks, common.device)).transpose()?;
        Ok(Comparison { worlds, peer })
    }

    /// Measures a case in all processes in turns; `between` is called once per round.
    pub(crate) fn rounds(
        &mut self,
        rounds: u16,
        case: &str,
        samples: usize,
        mut between: impl FnMut(),
    ) -> Result<Measurements, String> {
        // One measurement that does not count, so that all processes have started before the first that counts.
        for process in self.worlds.iter_mut().map(|(_, world)| world).chain(&mut self.peer) {
            process.measure(case, 1, 1)?;
        }
        let mut all = Measurements::empty(self.worlds.iter().map(|(world, _)| *world));
        for _ in 0..rounds {
            for ((_, world), (_, measured)) in self.worlds.iter_mut().zip(&mut all.ours) {
                measured.push(world.measure(case, samples, 1)?);
            }
            between();
            if let Some(peer) = &mut self.peer {
                all.theirs.push(peer.measure(case, samples, 1)?);
            }
        }
        Ok(all)
    }
}

impl Measurements {
    /// Creates an empty list per world.
    pub(crate) fn empty(worlds: impl IntoIterator<Item = World>) -> Measurements {
        let ours = worlds.into_iter().map(|world| (world, Vec::new())).collect();
        Measurements { ours, theirs: Vec::new() }
    }

    /// Returns one row per world, with the median times.
    pub(crate) fn rows(&self, workload: &'static str, case: &str, ranks: usize) -> Vec<Row> {
        let median_seconds = |measured: &[Measurement]| {
            (!measured.is_empty()).then(|| median(measured.iter().map(|one| one.seconds).collect()))
        };
        let peer_seconds = median_seconds(&self.theirs);
        let row = |(world, measured): &(World, Vec<Measurement>)| {
            let seconds = median_seconds(measured);
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
