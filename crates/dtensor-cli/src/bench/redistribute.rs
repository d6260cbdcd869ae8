//! `dtensor bench redistribute`: redistributions over several ranks, in the same cases as `redistribute_peer.py`.
//!
//! Ranks on threads read each other's memory, so memory bandwidth is their bound. In the same run, as many threads as ranks, limited
//! to the number of cores, each copy a buffer of the size of the case. The bound is the time that the bytes of
//! [`RedistributionCase::traffic`] take at that rate; `bound_fraction` is the bound divided by the measured time.

use std::collections::BTreeMap;
use std::error::Error;

use clap::Args;

use super::collective::{Redistribution, RedistributionCase};
use super::comparison::{CommonOptions, Comparison, World};
use super::copy_rate::bytes_per_second;
use super::peer::Measurement;
use super::ranks::{WARM_UP, serve, time_all};
use super::row::{Row, Sink};
use super::timing::{describe_speedups, median};

/// The flags of `dtensor bench redistribute`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    /// Sizes of the full tensor in bytes
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096,262144,4194304,67108864",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    sizes: Vec<u32>,
    /// Run as the ranks of a benchmark, and answer requests from the input
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let common = &options.common;
    if options.serve {
        return serve(common.ranks[0].into(), |rank, request| {
            let case = RedistributionCase::named(&request.case, rank.world.size());
            let case = case.ok_or_else(|| request.unknown_case())?;
            let source = case.source(&rank.mesh)?;
            for _ in 0..WARM_UP {
                case.run(&source)?;
            }
            let seconds = time_all(rank, request, || case.run(&source))?;
            Ok(Measurement { seconds, ..Measurement::default() })
        });
    }
    let mut speedups: BTreeMap<(World, usize), Vec<f64>> = BTreeMap::new();
    for &ranks in &common.ranks {
        let ranks = ranks.into();
        let sizes = options.sizes.iter().map(|&size| size as usize);
        let cases =
            sizes.flat_map(|size| Redistribution::ALL.map(|kind| RedistributionCase::new(kind, ranks, size)));
        let cases: Vec<RedistributionCase> =
            cases.filter(|case| case.to_string().contains(&common.only)).collect();
        if cases.is_empty() {
            continue;
        }
        let script = include_str!("redistribute_peer.py");
        let mut comparison = Comparison::start(common, "redistribute", script, ranks)?;
        for case in cases {
            for row in rows(&mut comparison, common.rounds, ranks, case)? {
                if let Some((ratio, world)) = row.ratio.zip(row.world) {
                    speedups.entry((world, case.bytes())).or_default().push(1.0 / ratio);
                }
                sink(row)?;
            }
        }
    }
    for ((world, bytes), speedups) in speedups {
        eprintln!("{}, {bytes} bytes: {}", world.name(), describe_speedups(&speedups));
    }
    Ok(())
}

/// Measures a case, and returns one row per world.
fn rows(
    comparison: &mut Comparison,
    rounds: u16,
    ranks: usize,
    case: RedistributionCase,
) -> Result<Vec<Row>, String> {
    let mut bounds = Vec::new();
    let measured = comparison.rounds(rounds, &case.to_string(), case.samples(), || {
        bounds.push(case.traffic() as f64 / bytes_per_second(ranks, case.bytes()));
    })?;
    let bound = median(bounds);
    let rows = measured.rows("redistribute", &case.to_string(), ranks).into_iter().map(|row| Row {
        bytes: Some(case.bytes() as u64),
        bound_fraction: row.seconds.filter(|_| row.world == Some(World::Threads)).map(|s| bound / s),
        ..row
    });
    Ok(rows.collect())
}
