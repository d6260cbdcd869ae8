//! `dtensor bench redistribute`: a tensor on several ranks that comes to lie in another way, the same cases as `redistribute_peer.py`.
//!
//! Threads read each other's memory, so memory is what limits them, and each of their rows says how near they come. In the
//! same run as many threads as ranks, but no more than the machine can run at once, each copy a buffer of the case's
//! size. At that rate the bytes of [`Case::traffic`] take the time that is the bound; `bound_fraction` is the bound over the
//! time measured.

use std::collections::BTreeMap;
use std::error::Error;

use clap::Args;

use super::collective::{Case, Kind};
use super::contest::{Contest, Sides, World};
use super::copy::bytes_per_second;
use super::peer::Answer;
use super::ranks::{WARM_UP, serve, time_all};
use super::row::{Row, Sink};
use super::timing::{faster, median};

/// Which cases, among whom, how often, and beside whom.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) sides: Sides,
    /// Sizes of the whole tensor in bytes
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096,262144,4194304,67108864",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    sizes: Vec<u32>,
    /// Be the ranks of such a run, and time what the input says
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let sides = &options.sides;
    if options.serve {
        return serve(sides.ranks[0].into(), |seat, question| {
            let case = Case::named(&question.case, seat.world.size()).ok_or_else(|| question.refuse())?;
            let source = case.source(&seat.mesh)?;
            for _ in 0..WARM_UP {
                case.call(&source)?;
            }
            let seconds = time_all(seat, question, || case.call(&source))?;
            Ok(Answer { seconds, ..Answer::default() })
        });
    }
    let mut speedups: BTreeMap<(World, usize), Vec<f64>> = BTreeMap::new();
    for &ranks in &sides.ranks {
        let ranks = ranks.into();
        let sizes = options.sizes.iter().map(|&size| size as usize);
        let cases = sizes.flat_map(|size| Kind::ALL.map(|kind| Case::new(kind, ranks, size)));
        let cases: Vec<Case> = cases.filter(|case| case.to_string().contains(&sides.only)).collect();
        if cases.is_empty() {
            continue;
        }
        let mut contest = Contest::start(sides, "redistribute", include_str!("redistribute_peer.py"), ranks)?;
        for case in cases {
            for row in rows(&mut contest, sides.rounds, ranks, case)? {
                if let Some((ratio, world)) = row.ratio.zip(row.world) {
                    speedups.entry((world, case.bytes())).or_default().push(1.0 / ratio);
                }
                sink(row)?;
            }
        }
    }
    for ((world, bytes), speedups) in speedups {
        eprintln!("{}, {bytes} bytes: {}", world.name(), faster(&speedups));
    }
    Ok(())
}

/// The rows of a case, one per world.
fn rows(contest: &mut Contest, rounds: u16, ranks: usize, case: Case) -> Result<Vec<Row>, String> {
    let mut bounds = Vec::new();
    let answers = contest.rounds(rounds, &case.to_string(), case.samples(), || {
        bounds.push(case.traffic() as f64 / bytes_per_second(ranks, case.bytes()));
    })?;
    let bound = median(bounds);
    let rows = answers.timed("redistribute", &case.to_string(), ranks).into_iter().map(|row| Row {
        bytes: Some(case.bytes() as u64),
        bound_fraction: row.seconds.filter(|_| row.world == Some(World::Threads)).map(|it| bound / it),
        ..row
    });
    Ok(rows.collect())
}
