//! `dtensor bench mlp`, `dtensor bench transformer` and `dtensor bench fsdp`: training steps on several ranks, with the same models, plans and optimizers as
//! `train_peer.py`.
//!
//! A formula gives parameters and inputs, the same for both programs, so that both must have the same loss. Every run compares the
//! losses, and a difference is an error.

use std::collections::BTreeMap;
use std::error::Error;

use clap::Args;

use super::comparison::{CommonOptions, Comparison, Measurements, World};
use super::models::{TrainingCase, select};
use super::peer::Measurement;
use super::ranks::{Request, ServingRank, WARM_UP, peak_memory, serve, time_all};
use super::row::{Row, Sink};
use super::timing::describe_speedups;

/// The script for PyTorch, appended to `ranks_peer.py`.
pub(crate) const SCRIPT: &str = include_str!("train_peer.py");

/// The relative tolerance of losses. Single-precision sums depend on the order of the additions.
const TOLERANCE: f64 = 1e-3;

/// The flags of `dtensor bench mlp`, `dtensor bench transformer` and `dtensor bench fsdp`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    /// Run as the ranks of a benchmark, and answer requests from the input
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

pub(crate) fn run(workload: &'static str, options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let common = &options.common;
    if options.serve {
        return serve(common.ranks[0].into(), measure);
    }
    let cases = select(TrainingCase::of(workload), &common.only, &common.ranks)?;
    if cases.is_empty() {
        return Ok(());
    }
    let mut speedups: BTreeMap<(World, usize), Vec<f64>> = BTreeMap::new();
    for &ranks in &common.ranks {
        let ranks = ranks.into();
        let mut comparison = Comparison::start(common, workload, SCRIPT, ranks)?;
        for &case in &cases {
            let measured = comparison.rounds(common.rounds, &case.to_string(), case.samples(), || ())?;
            check_losses(case, &measured)?;
            for row in measured.rows(workload, &case.to_string(), ranks) {
                let rate =
                    |seconds| case.tokens().zip(seconds).map(|(tokens, s): (_, f64)| tokens as f64 / s);
                if let Some((ratio, world)) = row.ratio.zip(row.world) {
                    speedups.entry((world, ranks)).or_default().push(1.0 / ratio);
                }
                sink(Row {
                    tokens_per_second: rate(row.seconds),
                    peer_tokens_per_second: rate(row.peer_seconds),
                    loss: measured.ours.iter().find_map(|(_, ours)| ours.first()?.loss),
                    ..row
                })?;
            }
        }
    }
    for ((world, ranks), speedups) in speedups {
        eprintln!("{}, {ranks} ranks: {}", world.name(), describe_speedups(&speedups));
    }
    Ok(())
}

/// Answers a request: creates a new model and times training steps.
fn measure(rank: &ServingRank, request: &Request) -> dtensor::Result<Measurement> {
    let case = TrainingCase::named(&request.case).ok_or_else(|| request.unknown_case())?;
    let step = case.step(&rank.mesh)?;
    let mut loss = None;
    for _ in 0..WARM_UP {
        loss = Some(step()?.item::<f32>()?.into());
    }
    let seconds = time_all(rank, request, step)?;
    Ok(Measurement { seconds, loss, peak_bytes: peak_memory(&rank.world)? })
}

/// Returns an error if the losses after the same steps differ between programs.
fn check_losses(case: TrainingCase, measured: &Measurements) -> Result<(), String> {
    let ours = measured.ours.iter().flat_map(|(world, ours)| ours.iter().map(|one| (world.name(), one)));
    let theirs = measured.theirs.iter().map(|one| ("peer", one));
    let losses = ours.chain(theirs).map(|(name, one)| {
        let loss = one.loss.ok_or_else(|| format!("{case}: {name} reported no loss"))?;
        Ok((name, loss))
    });
    let losses: Vec<(&str, f64)> = losses.collect::<Result<_, String>>()?;
    let Some(&(first, expected)) = losses.first() else { return Ok(()) };
    for &(name, loss) in &losses {
        // Written so that NaN is an error too.
        let is_near = (loss - expected).abs() <= TOLERANCE * expected.abs();
        if !is_near {
            return Err(format!("{case}: the loss of {name} is {loss}, but that of {first} is {expected}"));
        }
    }
    Ok(())
}
