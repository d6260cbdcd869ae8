//! `dtensor bench plan`: the time to plan a redistribution.
//!
//! Runs on one rank of a simulated mesh. The first plan of a pair of layouts is searched for; later ones come from the cache. Both are
//! timed, as calls of `explain_redistribute`, which also check the placements.

use std::error::Error;

use clap::Args;
use dtensor::Generator;
use dtensor::comm::{ReduceOp, World};
use dtensor::prelude::*;
use dtensor::redistribute::CostModel;
use serde::Serialize;

use super::row::print;
use super::timing::{median, seconds};

/// The flags of `dtensor bench plan`.
#[derive(Args)]
pub(crate) struct Options {
    /// Sizes of the mesh dims
    #[arg(long, value_delimiter = ',', default_value = "4,4,4,4", value_parser = clap::value_parser!(u16).range(1..))]
    mesh: Vec<u16>,
    /// Shape of the tensor, of f32
    #[arg(long, value_delimiter = ',', default_value = "256,2048,512,256")]
    shape: Vec<usize>,
    /// Number of random pairs of layouts
    #[arg(long, default_value_t = 500)]
    pairs: usize,
    /// Plan only collectives along one mesh dim at a time
    #[arg(long)]
    along_one: bool,
    /// Print every random pair, not only the common ones and the summary
    #[arg(long)]
    all: bool,
}

#[derive(Serialize)]
pub(crate) struct Row {
    workload: &'static str,
    pub(crate) case: String,
    pub(crate) uncached_seconds: f64,
    pub(crate) cached_seconds: f64,
    collectives: usize,
}

#[derive(Serialize)]
struct Summary {
    workload: &'static str,
    ranks: usize,
    pairs: usize,
    uncached_median_seconds: f64,
    uncached_p99_seconds: f64,
    uncached_max_seconds: f64,
    cached_median_seconds: f64,
    cached_max_seconds: f64,
}

pub(crate) fn run(options: &Options) -> std::result::Result<(), Box<dyn Error>> {
    let shape: Vec<usize> = options.mesh.iter().map(|&size| size.into()).collect();
    let ranks = shape.iter().product();
    let mesh = DeviceMesh::new(&World::simulated(ranks, 0)?, shape.clone(), ())?;
    let cost = CostModel::default().across_dims(!options.along_one);
    let mut draw = Draw { generator: Generator::new(0), kinds: options.shape.len() + 2 };
    for (from, to) in common_cases(shape.len()) {
        print(time(&mesh, &cost, &options.shape, &from, &to)?)?;
    }
    let mut rows = Vec::new();
    for _ in 0..options.pairs {
        let (from, to) = (draw.placements(shape.len())?, draw.placements(shape.len())?);
        let row = time(&mesh, &cost, &options.shape, &from, &to)?;
        if options.all {
            print(&row)?;
        }
        rows.push(row);
    }
    let sorted = |pick: fn(&Row) -> f64| {
        let mut times: Vec<f64> = rows.iter().map(pick).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let (uncached, cached) = (sorted(|row| row.uncached_seconds), sorted(|row| row.cached_seconds));
    let last = |times: &[f64]| times.last().copied().ok_or("--pairs must be at least 1");
    let summary = Summary {
        workload: "plan",
        ranks,
        pairs: rows.len(),
        uncached_max_seconds: last(&uncached)?,
        uncached_p99_seconds: uncached[(uncached.len() - 1) * 99 / 100],
        uncached_median_seconds: median(uncached),
        cached_max_seconds: last(&cached)?,
        cached_median_seconds: median(cached),
    };
    print(summary)
}

/// Returns the most common redistributions: all-gather, all-reduce, reduce-scatter, all-to-all, and slicing a replicated tensor.
pub(crate) fn common_cases(n: usize) -> Vec<(Vec<Placement>, Vec<Placement>)> {
    let all = |placement| vec![placement; n];
    vec![
        (all(Shard(0)), all(Replicate)),
        (all(Placement::PARTIAL), all(Replicate)),
        (all(Placement::PARTIAL), all(Shard(0))),
        (all(Shard(0)), all(Shard(-1))),
        (all(Replicate), all(Shard(0))),
    ]
}

/// Draws random placements.
struct Draw {
    generator: Generator,
    kinds: usize,
}

impl Draw {
    fn placements(&mut self, n: usize) -> Result<Vec<Placement>> {
        let kinds = Tensor::randint_with(0, self.kinds as i64, [n], &mut self.generator)?.to_vec::<i64>()?;
        let placement = |kind: i64| match kind {
            0 => Replicate,
            1 => Partial(ReduceOp::Sum),
            dim => Shard(dim as isize - 2),
        };
        Ok(kinds.into_iter().map(placement).collect())
    }
}

/// Times the search for a plan, and the cache lookup.
pub(crate) fn time(
    mesh: &DeviceMesh,
    cost: &CostModel,
    shape: &[usize],
    from: &[Placement],
    to: &[Placement],
) -> Result<Row> {
    let mut uncached = Vec::new();
    let mut row = None;
    for _ in 0..5 {
        // A new mesh has an empty cache.
        let mesh = mesh.with_cost(cost.clone())?;
        let x = Tensor::meta_of(shape, DType::F32)?;
        let x = distribute_tensor(&x, &mesh, from)?;
        let start = std::time::Instant::now();
        let plan = x.explain_redistribute(to)?;
        uncached.push(start.elapsed().as_secs_f64());
        let cached = seconds(5, 200, || x.explain_redistribute(to).map(drop), || Ok(()))?;
        row = Some((plan.trace(), plan.collectives().len(), cached));
    }
    let (case, collectives, cached_seconds) = row.unwrap_or_default();
    Ok(Row { workload: "plan", case, uncached_seconds: median(uncached), cached_seconds, collectives })
}
