//! `dtensor bench scaling`: speed and overhead as the number of ranks grows.
//!
//! Measures training steps on more and more threads with the same total work, and, on simulated meshes of up to thousands of ranks, the
//! time of one rank to dispatch an operator and to plan a redistribution.

use std::error::Error;

use clap::Args;
use dtensor::prelude::{DeviceMesh, World as Ranks};
use dtensor::redistribute::CostModel;

use super::comparison::World;
use super::dispatch::add_shard;
use super::models::{TrainingCase, select};
use super::plan;
use super::row::{Row, Sink};
use super::timing::median;
use crate::device::DeviceChoice;

/// The models that are trained: the MLP of medium size, and the larger transformer.
const TRAINED: [&str; 2] = ["b64_d512_h2048", "l4_v1024_s128_d256_h8_b8"];
/// The shape of the tensor for which redistributions are planned.
const SHAPE: [usize; 2] = [8192, 8192];

/// The flags of `dtensor bench scaling`.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of threads for training
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4,8",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    ranks: Vec<u16>,
    /// Sizes of simulated meshes
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2,4,8,16,32,64,128,256,512,1024,2048,4096",
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    meshes: Vec<u32>,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
    /// Number of measurements of each case, in turns; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let trained = TRAINED.iter().filter_map(|name| TrainingCase::named(name));
    for case in select(trained, &options.only, &options.ranks)? {
        train(options, case, sink)?;
    }
    if "add_shard".contains(&options.only) {
        for &ranks in &options.meshes {
            let ranks = ranks as usize;
            let times = (0..options.rounds).map(|_| add_shard(ranks)).collect::<dtensor::Result<_>>()?;
            sink(Row { seconds: Some(median(times)), ..row("add_shard", ranks, World::Simulated) })?;
        }
    }
    for &ranks in &options.meshes {
        let ranks = ranks as usize;
        let mesh = DeviceMesh::new(&Ranks::simulated(ranks, 0)?, [ranks], ())?;
        for (from, to) in plan::common_cases(1) {
            let timed = plan::time(&mesh, &CostModel::default(), &SHAPE, &from, &to)?;
            let case = format!("plan {}", timed.case);
            if case.contains(&options.only) {
                sink(Row {
                    uncached_seconds: Some(timed.uncached_seconds),
                    cached_seconds: Some(timed.cached_seconds),
                    ..row(&case, ranks, World::Simulated)
                })?;
            }
        }
    }
    Ok(())
}

/// Measures a case on all numbers of threads in turns, each in its own process.
fn train(options: &Options, case: TrainingCase, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let name = case.to_string();
    let mut worlds = Vec::new();
    for &ranks in &options.ranks {
        let mut world = World::Threads.serve(case.workload(), ranks.into(), DeviceChoice::Cpu)?;
        world.measure(&name, 1, 1)?;
        worlds.push((ranks, world, Vec::new(), None));
    }
    for _ in 0..options.rounds {
        for (_, world, times, peak_bytes) in &mut worlds {
            let measured = world.measure(&name, case.samples(), 1)?;
            times.push(measured.seconds);
            *peak_bytes = measured.peak_bytes;
        }
    }
    for (ranks, _, times, peak_bytes) in worlds {
        let seconds = median(times);
        sink(Row {
            seconds: Some(seconds),
            peak_bytes,
            tokens_per_second: case.tokens().map(|tokens| tokens as f64 / seconds),
            ..row(&name, ranks.into(), World::Threads)
        })?;
    }
    Ok(())
}

fn row(case: &str, ranks: usize, world: World) -> Row {
    Row {
        workload: "scaling",
        case: case.to_owned(),
        ranks: Some(ranks),
        world: Some(world),
        ..Row::default()
    }
}
