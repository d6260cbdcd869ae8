//! `dtensor bench mlp` and `dtensor bench transformer`: a step of training on several ranks, the same models, plans and optimizers as
//! in `train_peer.py`.
//!
//! Parameters and inputs are given by a formula, the same on both sides, so that both must come to the same loss. That is compared in
//! every run: a benchmark that computes something else is an error.

use std::collections::BTreeMap;
use std::error::Error;

use clap::Args;

use super::contest::{Answers, Contest, Sides, World};
use super::models::{Case, wanted};
use super::peer::Answer;
use super::ranks::{Question, Seat, WARM_UP, peak_memory, serve, time_all};
use super::row::{Row, Sink};
use super::timing::faster;

/// The peer's side, after `ranks_peer.py`.
pub(crate) const SCRIPT: &str = include_str!("train_peer.py");

/// How far apart losses may be, in parts of them: single precision adds up differently in another order.
const TOLERANCE: f64 = 1e-3;

/// Which cases, among whom, how often, and beside whom.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) sides: Sides,
    /// Be the ranks of such a run, and time what the input says
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

pub(crate) fn run(workload: &'static str, options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let sides = &options.sides;
    if options.serve {
        return serve(sides.ranks[0].into(), answer);
    }
    let cases = wanted(Case::of(workload), &sides.only, &sides.ranks)?;
    if cases.is_empty() {
        return Ok(());
    }
    let mut speedups: BTreeMap<(World, usize), Vec<f64>> = BTreeMap::new();
    for &ranks in &sides.ranks {
        let ranks = ranks.into();
        let mut contest = Contest::start(sides, workload, SCRIPT, ranks)?;
        for &case in &cases {
            let answers = contest.rounds(sides.rounds, &case.to_string(), case.samples(), || ())?;
            compare(case, &answers)?;
            for row in answers.timed(workload, &case.to_string(), ranks) {
                let rate =
                    |seconds| case.tokens().zip(seconds).map(|(tokens, s): (_, f64)| tokens as f64 / s);
                if let Some((ratio, world)) = row.ratio.zip(row.world) {
                    speedups.entry((world, ranks)).or_default().push(1.0 / ratio);
                }
                sink(Row {
                    tokens_per_second: rate(row.seconds),
                    peer_tokens_per_second: rate(row.peer_seconds),
                    loss: answers.ours.iter().find_map(|(_, said)| said.first()?.loss),
                    ..row
                })?;
            }
        }
    }
    for ((world, ranks), speedups) in speedups {
        eprintln!("{}, {ranks} ranks: {}", world.name(), faster(&speedups));
    }
    Ok(())
}

/// One turn of these ranks: a new model, and the steps asked for.
fn answer(seat: &Seat, question: &Question) -> dtensor::Result<Answer> {
    let case = Case::named(&question.case).ok_or_else(|| question.refuse())?;
    let step = case.step(&seat.mesh)?;
    let mut loss = None;
    for _ in 0..WARM_UP {
        loss = Some(step()?.item::<f32>()?.into());
    }
    let seconds = time_all(seat, question, step)?;
    Ok(Answer { seconds, loss, peak_bytes: peak_memory(&seat.world)? })
}

/// That all came to the same loss after the same steps.
fn compare(case: Case, answers: &Answers) -> Result<(), String> {
    let ours = answers.ours.iter().flat_map(|(world, said)| said.iter().map(|answer| (world.name(), answer)));
    let theirs = answers.theirs.iter().map(|answer| ("peer", answer));
    let losses = ours.chain(theirs).map(|(who, answer)| {
        let loss = answer.loss.ok_or_else(|| format!("{case}: {who} does not say its loss"))?;
        Ok((who, loss))
    });
    let losses: Vec<(&str, f64)> = losses.collect::<Result<_, String>>()?;
    let Some(&(first, expected)) = losses.first() else { return Ok(()) };
    for &(who, loss) in &losses {
        // A loss that is not a number is near nothing.
        let near = (loss - expected).abs() <= TOLERANCE * expected.abs();
        if !near {
            return Err(format!("{case}: the loss of {who} is {loss}, that of {first} is {expected}"));
        }
    }
    Ok(())
}
