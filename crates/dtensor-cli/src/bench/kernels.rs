//! `dtensor bench kernels`: local operators on one thread, in the same cases as `kernels_peer.py`.

use std::error::Error;

use clap::Args;
use dtensor::prelude::*;
use dtensor::{BackwardOptions, grad, on_device, set_num_threads};

use super::large;
use super::peer::{Peer, python};
use super::row::{Row, Sink};
use super::timing::{median, seconds};
use crate::device::{DeviceChoice, flush, synchronize};

/// The flags of `dtensor bench kernels`.
#[derive(Args)]
pub(crate) struct Options {
    /// Python interpreter with torch; each case is timed there too, in turns with ours
    #[arg(long, value_name = "PYTHON")]
    peer: Option<String>,
    /// Where the tensors are: `cpu`, or a GPU: `cuda`
    #[arg(long, default_value_t = DeviceChoice::Cpu, value_name = "DEVICE")]
    device: DeviceChoice,
    /// Arrays of hundreds of MiB instead, which do not fit into a cache; on a GPU also products and attention in bf16
    #[arg(long)]
    large: bool,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
    /// Number of measurements of each case, in turns; the median counts
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Calls per timing: many if one call is too short to time.
    pub(crate) inner: usize,
    pub(crate) samples: usize,
    pub(crate) body: Box<dyn Fn() -> Result<Tensor>>,
}

fn case(name: &'static str, body: impl Fn() -> Result<Tensor> + 'static) -> Case {
    Case { name, inner: 1, samples: 15, body: Box::new(body) }
}

fn tiny(name: &'static str, body: impl Fn() -> Result<Tensor> + 'static) -> Case {
    Case { name, inner: 2000, samples: 15, body: Box::new(body) }
}

pub(crate) fn normal<const N: usize>(shape: [usize; N]) -> Result<Tensor> {
    Tensor::randn(shape, DType::F32)
}

fn cases() -> Result<Vec<Case>> {
    let (x, y) = (normal([1024, 2048])?, normal([1024, 2048])?);
    let (row, column, bias) = (normal([2048])?, normal([1024, 1])?, normal([2048])?);
    let table = normal([1024, 2048])?;
    let ids = Tensor::randint(0, 1024, [1024])?;
    // Makes the closure of a case, with its own handles of two tensors.
    let on = |f: fn(&Tensor, &Tensor) -> Result<Tensor>, a: &Tensor, b: &Tensor| {
        let (a, b) = (a.clone(), b.clone());
        move || f(&a, &b)
    };
    let mut cases = vec![
        case("add", on(|a, b| a.add(b), &x, &y)),
        case("mul", on(|a, b| a.mul(b), &x, &y)),
        case("relu", on(|a, _| a.relu(), &x, &y)),
        case("exp", on(|a, _| a.exp(), &x, &y)),
        case("gelu", on(|a, _| a.gelu(Gelu::Exact), &x, &y)),
        case("softmax", on(|a, _| a.softmax(-1), &x, &y)),
        case("layernorm", {
            let (x, row) = (x.clone(), row.clone());
            move || x.layer_norm(1, Some(&row), Some(&bias), 1e-5)
        }),
        case("sum0", on(|a, _| a.sum(0), &x, &y)),
        case("sum1", on(|a, _| a.sum(1), &x, &y)),
        case("sum_all", on(|a, _| a.sum_all(), &x, &y)),
        case("bcast_row", on(|a, b| a.add(b), &x, &row)),
        case("bcast_col", on(|a, b| a.add(b), &x, &column)),
        case("transpose_contiguous", on(|a, _| a.t()?.contiguous(), &x, &y)),
        case("cat0", on(|a, b| Tensor::cat(&[a, b], 0), &x, &y)),
        case("cat1", on(|a, b| Tensor::cat(&[a, b], 1), &x, &y)),
        case("embedding", on(|ids, table| ids.embedding(table, None), &ids, &table)),
        case("embedding_backward", {
            let table = table.requires_grad_(true)?;
            let embedded = ids.embedding(&table, None)?;
            let dy = x.clone();
            move || {
                let options =
                    BackwardOptions { gradient: Some(dy.clone()), retain_graph: true, create_graph: false };
                Ok(grad(&embedded, &[&table], options)?.remove(0).expect("the output depends on the table"))
            }
        }),
    ];
    for (name, n) in [("mm256", 256), ("mm512", 512), ("mm1024", 1024)] {
        cases.push(case(name, on(|a, b| a.mm(b), &normal([n, n])?, &normal([n, n])?)));
    }
    let (lx, lw, lb) = (normal([256, 1024])?, normal([1024, 1024])?, normal([1024])?);
    cases.push(case("linear_bias", move || lx.linear(&lw, Some(&lb))));
    cases.push(case("bmm_32x128x64", on(|a, b| a.bmm(b), &normal([32, 128, 64])?, &normal([32, 64, 128])?)));
    const WIDE: [usize; 2] = [1024, 2048];
    cases.push(case("rand", || Tensor::rand(WIDE, DType::F32)));
    cases.push(case("randn", || Tensor::randn(WIDE, DType::F32)));
    cases.push(case("uniform", || Tensor::uniform(-1.0, 1.0, WIDE, DType::F32)));
    cases.push(case("normal", || Tensor::normal(1.0, 0.5, WIDE, DType::F32)));
    cases.push(case("trunc_normal", || Tensor::trunc_normal(0.0, 1.0, -2.0, 2.0, WIDE, DType::F32)));
    cases.push(case("randint", || Tensor::randint(0, 1024, WIDE)));
    cases.push(case("bernoulli", || Tensor::bernoulli(0.3, WIDE, DType::F32)));
    let probabilities = Tensor::rand(WIDE, DType::F32)?;
    cases.push(case("bernoulli_each", move || probabilities.bernoulli_each()));
    cases.push(case("dropout", on(|a, _| a.dropout(0.1), &x, &y)));
    let (a, b) = (Tensor::ones([4, 8], DType::F32)?, Tensor::ones([8, 8], DType::F32)?);
    let small = Tensor::ones([4, 4], DType::F32)?;
    cases.push(tiny("tiny_add", on(|a, b| a.add(b), &small, &small)));
    cases.push(tiny("tiny_mm", on(|a, b| a.mm(b), &a, &b)));
    Ok(cases)
}

/// Calls per timing on a GPU, where one call does not wait for its end.
const QUEUED: usize = 50;

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> std::result::Result<(), Box<dyn Error>> {
    options.device.check()?;
    on_device(options.device.of_rank(0), || measure(options, sink))
}

fn measure(options: &Options, sink: Sink<'_>) -> std::result::Result<(), Box<dyn Error>> {
    set_num_threads(1);
    manual_seed(0);
    let device = options.device.of_rank(0);
    let mut peer = match &options.peer {
        Some(path) => {
            let mut command = python(path, include_str!("kernels_peer.py"));
            command.env("DTENSOR_DEVICE", device.to_string());
            command.env("DTENSOR_LARGE", if options.large { "1" } else { "" });
            Some(Peer::start("the peer", command)?)
        }
        None => None,
    };
    let mut logs = Vec::new();
    let cases = if options.large { large::cases(options.device.is_gpu())? } else { cases()? };
    for case in cases.into_iter().filter(|case| case.name.contains(&options.only)) {
        let inner = match options.large {
            false if options.device.is_gpu() => case.inner.max(QUEUED),
            _ => case.inner,
        };
        let ours = |samples| {
            let call = || {
                let result = (case.body)()?;
                flush(device)?;
                std::hint::black_box(result);
                Ok::<(), dtensor::Error>(())
            };
            seconds(samples, inner, call, || synchronize(device))
        };
        ours(3)?;
        if let Some(peer) = &mut peer {
            peer.seconds(case.name, 3, inner)?;
        }
        let (mut mine, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            mine.push(ours(case.samples)?);
            if let Some(peer) = &mut peer {
                theirs.push(peer.seconds(case.name, case.samples, inner)?);
            }
        }
        let mine = median(mine);
        let theirs = (!theirs.is_empty()).then(|| median(theirs));
        let ratio = theirs.map(|theirs| mine / theirs);
        logs.extend(ratio.map(f64::ln));
        sink(Row {
            workload: "kernels",
            case: case.name.to_owned(),
            seconds: Some(mine),
            peer_seconds: theirs,
            ratio,
            ..Row::default()
        })?;
    }
    if !logs.is_empty() {
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        eprintln!("geometric mean of the ratios over {} cases: {mean:.3}", logs.len());
    }
    Ok(())
}
