//! `dtensor bench checkpoint`: saves and loads a sharded model, in the same cases as `checkpoint_peer.py`.
//!
//! The bound is the time that `dd` takes to write or read as many bytes on the same disk, measured in the same run.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use clap::Args;
use dtensor::nn::{Linear, Module};
use dtensor::prelude::*;
use dtensor::{checkpoint, on_device};

use super::comparison::{CommonOptions, Comparison};
use super::peer::Measurement;
use super::ranks::{Request, ServingRank, serve, time_all};
use super::row::{Row, Sink};
use super::timing::median;

/// Rows and columns of each weight: 16 MiB.
const SIZE: usize = 2048;
const WEIGHT_BYTES: u64 = (SIZE * SIZE * size_of::<f32>()) as u64;

/// The flags of `dtensor bench checkpoint`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    /// Number of weights of 16 MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    weights: u16,
    /// Run as the ranks of a benchmark, and answer requests from the input
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Save,
    /// From the disk: the files are dropped from the system's cache before.
    Load,
    /// From the system's cache.
    LoadCached,
}

const KINDS: [(&str, Kind); 3] =
    [("save", Kind::Save), ("load", Kind::Load), ("load_cached", Kind::LoadCached)];

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> std::result::Result<(), Box<dyn Error>> {
    let common = &options.common;
    if options.serve {
        return serve(common.ranks[0].into(), measure);
    }
    let bytes = u64::from(options.weights) * WEIGHT_BYTES;
    for &ranks in &common.ranks {
        let ranks = ranks.into();
        let cases = KINDS.map(|(name, kind)| (format!("{name}_{}x16MiB", options.weights), kind));
        let cases: Vec<_> = cases.into_iter().filter(|(case, _)| case.contains(&common.only)).collect();
        if cases.is_empty() {
            continue;
        }
        let script = include_str!("checkpoint_peer.py");
        let mut comparison = Comparison::start(common, "checkpoint", script, ranks)?;
        for (case, kind) in cases {
            let mut bounds = Vec::new();
            let measured =
                comparison.rounds(common.rounds, &case, 1, || bounds.extend(dd_seconds(kind, bytes)))?;
            let bound = (!bounds.is_empty()).then(|| median(bounds));
            for row in measured.rows("checkpoint", &case, ranks) {
                let bound_fraction = bound.zip(row.seconds).map(|(bound, seconds)| bound / seconds);
                sink(Row { bytes: Some(bytes), bound_fraction, ..row })?;
            }
        }
    }
    Ok(())
}

/// A folder for the files of a case, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        Scratch(std::env::temp_dir().join(format!("dtensor-bench-{}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Saves or loads `samples` times.
fn measure(rank: &ServingRank, request: &Request) -> Result<Measurement> {
    let (kind, weights) = parse(&request.case).ok_or_else(|| request.unknown_case())?;
    let group = rank.world.group();
    let scratch = (group.rank() == 0).then(Scratch::new);
    let folder = group.broadcast_object(scratch.as_ref().map(|scratch| &scratch.0), 0)?;
    let model = on_device(Device::Meta, || {
        (0..weights).map(|_| Linear::new(SIZE, SIZE, false)).collect::<Result<Vec<_>>>()
    })?;
    let model = parallelize_module(model, &rank.mesh, plan! { "*" => ColwiseParallel::new() })?;
    model.to_empty(Device::Cpu)?;
    model.reset_parameters()?;
    if kind != Kind::Save {
        checkpoint::save(&model, &folder)?;
    }
    let once = Request { case: request.case.clone(), samples: 1, inner: 1 };
    let mut times = Vec::new();
    for _ in 0..request.samples {
        match kind {
            Kind::Save if group.rank() == 0 => _ = fs::remove_dir_all(&folder),
            Kind::Load if group.rank() == 0 => drop_from_cache(&folder),
            _ => {}
        }
        times.push(time_all(rank, &once, || {
            match kind {
                Kind::Save => checkpoint::save(&model, &folder)?,
                Kind::Load | Kind::LoadCached => checkpoint::load(&model, &folder)?,
            }
            Tensor::scalar(0f32)
        })?);
    }
    group.barrier()?;
    Ok(Measurement { seconds: median(times), ..Measurement::default() })
}

fn parse(case: &str) -> Option<(Kind, usize)> {
    let (name, size) = case.rsplit_once('_')?;
    let (_, kind) = KINDS.into_iter().find(|(known, _)| *known == name)?;
    Some((kind, size.strip_suffix("x16MiB")?.parse().ok()?))
}

/// Runs `dd` with these arguments. Returns the time it took, or `None` if it failed.
fn dd(arguments: &[&str]) -> Option<f64> {
    let start = Instant::now();
    let status = Command::new("dd").args(arguments).stderr(Stdio::null()).status().ok()?;
    status.success().then(|| start.elapsed().as_secs_f64())
}

/// Drops the files of a folder from the system's cache.
fn drop_from_cache(folder: &Path) {
    for file in fs::read_dir(folder).into_iter().flatten().flatten() {
        let of = format!("of={}", file.path().display());
        dd(&[&of, "oflag=nocache", "conv=notrunc,fdatasync", "count=0"]);
    }
}

/// Returns the time that `dd` takes to do what a case does, or `None` if there is no `dd`.
fn dd_seconds(kind: Kind, bytes: u64) -> Option<f64> {
    let scratch = Scratch::new();
    fs::create_dir_all(&scratch.0).ok()?;
    let file = scratch.0.join("dd").display().to_string();
    let (read, write) = (format!("if={file}"), format!("of={file}"));
    let count = format!("count={}", bytes / WEIGHT_BYTES);
    let written = dd(&["if=/dev/zero", &write, "bs=16M", &count, "conv=fdatasync"])?;
    if kind == Kind::Load {
        drop_from_cache(&scratch.0);
    }
    if kind == Kind::Save { Some(written) } else { dd(&[&read, "of=/dev/null", "bs=16M"]) }
}
