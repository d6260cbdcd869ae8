//! `dtensor bench startup`: the time until ranks are ready.
//!
//! Each measurement starts new processes. The time is from the moment when the last process starts to create its world until all ranks
//! have a mesh and have passed a barrier. For threads, this includes starting the threads. For processes, it excludes starting the
//! program, loading its libraries, and waiting for a process that was started later.

use std::error::Error;

use clap::Args;

use super::comparison::{CommonOptions, Measurements, peer};
use super::peer::Measurement;
use super::ranks::{Request, ServingRank, serve};
use super::row::Sink;

const CASE: &str = "process_group_and_mesh";

/// The flags of `dtensor bench startup`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    /// Run as the ranks of a benchmark, and answer requests from the input
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let common = &options.common;
    if options.serve {
        return serve(common.ranks[0].into(), measure);
    }
    if !CASE.contains(&common.only) {
        return Ok(());
    }
    for &ranks in &common.ranks {
        let ranks = ranks.into();
        let mut all = Measurements::empty(common.world.iter().copied());
        for _ in 0..common.rounds {
            for (world, measured) in &mut all.ours {
                measured.push(world.serve("startup", ranks, common.device)?.measure(CASE, 1, 1)?);
            }
            if let Some(path) = &common.peer {
                let mut peer = peer(path, include_str!("startup_peer.py"), ranks, common.device)?;
                all.theirs.push(peer.measure(CASE, 1, 1)?);
            }
        }
        all.rows("startup", CASE, ranks).into_iter().try_for_each(&mut *sink)?;
    }
    Ok(())
}

fn measure(rank: &ServingRank, request: &Request) -> dtensor::Result<Measurement> {
    if request.case != CASE {
        return Err(request.unknown_case());
    }
    let times = rank.world.group().all_gather_object(&(rank.start, rank.ready))?;
    let start = times.iter().map(|(start, _)| *start).max().unwrap_or_default();
    let ready = times.iter().map(|(_, ready)| *ready).max().unwrap_or_default();
    Ok(Measurement { seconds: ready.saturating_sub(start) as f64 / 1e9, ..Measurement::default() })
}
