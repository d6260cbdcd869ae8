//! `dtensor bench memory`: peak memory during training, in the cases of `mlp`, `transformer` and `fsdp`.
//!
//! Each measurement starts new processes, which run nothing else. Peak memory is the largest resident set: of the one process for
//! threads, summed over processes otherwise. Pages that processes share, such as those of libraries, count in each process.

use std::error::Error;

use clap::Args;

use super::comparison::{CommonOptions, Measurements, peer};
use super::models::{TrainingCase, select};
use super::peer::Measurement;
use super::row::{Row, Sink};
use super::timing::median;
use super::train;

/// The number of steps after the warm-up. More steps would not raise the peak.
const STEPS: usize = 5;

/// The flags of `dtensor bench memory`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let common = &options.common;
    let cases = select(TrainingCase::all(), &common.only, &common.ranks)?;
    for &ranks in &common.ranks {
        let ranks = ranks.into();
        for case in &cases {
            let name = case.to_string();
            let mut all = Measurements::empty(common.world.iter().copied());
            for _ in 0..common.rounds {
                for (world, measured) in &mut all.ours {
                    measured
                        .push(world.serve(case.workload(), ranks, common.device)?.measure(&name, STEPS, 1)?);
                }
                if let Some(path) = &common.peer {
                    all.theirs
                        .push(peer(path, train::SCRIPT, ranks, common.device)?.measure(&name, STEPS, 1)?);
                }
            }
            let theirs = match all.theirs.is_empty() {
                true => None,
                false => Some(median_bytes(&all.theirs)?),
            };
            for (world, measured) in &all.ours {
                let ours = median_bytes(measured)?;
                sink(Row {
                    workload: "memory",
                    case: name.clone(),
                    ranks: Some(ranks),
                    world: Some(*world),
                    peak_bytes: Some(ours),
                    peer_peak_bytes: theirs,
                    ratio: theirs.map(|theirs| ours as f64 / theirs as f64),
                    ..Row::default()
                })?;
            }
        }
    }
    Ok(())
}

/// Returns the median of the peak memory.
fn median_bytes(measured: &[Measurement]) -> Result<u64, Box<dyn Error>> {
    let bytes: Option<Vec<f64>> =
        measured.iter().map(|one| one.peak_bytes.map(|bytes| bytes as f64)).collect();
    Ok(median(bytes.ok_or("this system does not report the peak memory of a process")?) as u64)
}
