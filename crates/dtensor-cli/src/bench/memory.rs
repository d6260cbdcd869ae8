//! `dtensor bench memory`: the most memory that a world has had while it trained, in the cases of `mlp` and `transformer`.
//!
//! Each number is that of new processes that run nothing else. It is what the system calls their resident set: one process's for
//! threads, for ranks that are processes the sum over them. Pages that processes share, such as those of libraries, are counted in each.

use std::error::Error;

use clap::Args;

use super::contest::{Answers, Sides, peer};
use super::models::{Case, wanted};
use super::peer::Answer;
use super::row::{Row, Sink};
use super::timing::median;
use super::train;

/// Steps after the first few: memory does not grow any more.
const STEPS: usize = 5;

/// Which cases, among whom, how often, and beside whom.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) sides: Sides,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let sides = &options.sides;
    let cases = wanted(Case::all(), &sides.only, &sides.ranks)?;
    for &ranks in &sides.ranks {
        let ranks = ranks.into();
        for case in &cases {
            let name = case.to_string();
            let mut answers = Answers::of(sides.world.iter().copied());
            for _ in 0..sides.rounds {
                for (world, said) in &mut answers.ours {
                    said.push(world.serve(case.workload(), ranks)?.ask(&name, STEPS, 1)?);
                }
                if let Some(path) = &sides.peer {
                    answers.theirs.push(peer(path, train::SCRIPT, ranks)?.ask(&name, STEPS, 1)?);
                }
            }
            let theirs = match answers.theirs.is_empty() {
                true => None,
                false => Some(middle(&answers.theirs)?),
            };
            for (world, said) in &answers.ours {
                let ours = middle(said)?;
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

/// The median number of bytes.
fn middle(said: &[Answer]) -> Result<u64, Box<dyn Error>> {
    let bytes: Option<Vec<f64>> =
        said.iter().map(|answer| answer.peak_bytes.map(|bytes| bytes as f64)).collect();
    Ok(median(bytes.ok_or("this system does not say how much memory a process has had")?) as u64)
}
