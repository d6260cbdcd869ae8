//! `dtensor bench gpt`: training steps of a GPT on one device, and of the same GPT on ranks that share it, beside PyTorch on that
//! device (`gpt_peer.py`).
//!
//! A formula gives parameters and tokens, the same for all programs, so that all must have the same loss.

use std::error::Error;
use std::fmt;
use std::str::FromStr;

use clap::Args;
use dtensor::autocast;
use dtensor::nn::{Base, Embedding, LayerNorm, Linear};
use dtensor::optim::AdamW;
use dtensor::prelude::*;

use super::comparison::{CommonOptions, World};
use super::models::{NOISE, integer_noise, noise};
use super::peer::{Measurement, Peer, python};
use super::ranks::{Request, ServingRank, WARM_UP, serve, time_all};
use super::row::{Row, Sink};
use super::timing::{describe_speedups, median};
use crate::device::{peak_memory, recorded, reset_peak_memory};

/// The flags of `dtensor bench gpt`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    /// Run as the ranks of a benchmark, and answer requests from the input
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

/// A model and its training data.
#[derive(Clone, Copy, PartialEq)]
struct Sizes {
    layers: usize,
    vocab: usize,
    length: usize,
    width: usize,
    heads: usize,
    batch: usize,
}

/// The sizes that are measured; the last is GPT-2 with 124 million parameters, and is measured on GPUs only.
const SIZES: [Sizes; 3] = [
    Sizes { layers: 2, vocab: 256, length: 32, width: 64, heads: 4, batch: 4 },
    Sizes { layers: 4, vocab: 1024, length: 128, width: 256, heads: 8, batch: 8 },
    Sizes { layers: 12, vocab: 50304, length: 1024, width: 768, heads: 12, batch: 8 },
];

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { layers, vocab, length, width, heads, batch } = self;
        write!(f, "l{layers}_v{vocab}_s{length}_d{width}_h{heads}_b{batch}")
    }
}

impl Sizes {
    fn is_large(self) -> bool {
        self.layers * self.width > 4096
    }

    /// Returns the number of timings, and of the steps in each, which are queued before the wait.
    fn timings(self, is_gpu: bool) -> (usize, usize) {
        match (is_gpu, self.is_large()) {
            (true, false) => (5, 20),
            (true, true) => (3, 5),
            (false, _) => (3, 2),
        }
    }
}

/// How the model is sharded over the ranks.
#[derive(Clone, Copy, PartialEq)]
enum Sharding {
    /// Not at all: one rank, no mesh.
    None,
    /// Not at all, and the step is recorded as a CUDA graph.
    Graph,
    /// Sequence- and tensor-parallel.
    Tensor,
    /// Each block and the model by `fully_shard`. Each rank has its slice of the batch.
    Fully,
}

/// What a rank measures.
#[derive(Clone, Copy)]
struct Case {
    sizes: Sizes,
    dtype: DType,
    sharding: Sharding,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.sizes, self.dtype)?;
        f.write_str(match self.sharding {
            Sharding::None => "",
            Sharding::Graph => "_graph",
            Sharding::Tensor => "_tp",
            Sharding::Fully => "_fsdp",
        })
    }
}

impl FromStr for Case {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Case, ()> {
        cases(true, "")
            .flat_map(|case| SHARDINGS.map(|sharding| Case { sharding, ..case }))
            .find(|case| case.to_string() == text)
            .ok_or(())
    }
}

const SHARDINGS: [Sharding; 4] = [Sharding::None, Sharding::Graph, Sharding::Tensor, Sharding::Fully];

/// Iterates over the cases of one rank whose name contains `only`.
fn cases(is_gpu: bool, only: &str) -> impl Iterator<Item = Case> {
    let sizes = SIZES.into_iter().filter(move |sizes| is_gpu || !sizes.is_large());
    let cases = sizes.flat_map(|sizes| {
        [DType::F32, DType::BF16].map(|dtype| Case { sizes, dtype, sharding: Sharding::None })
    });
    cases.filter(move |case| case.to_string().contains(only))
}

module! {
    struct Attention(width: usize, heads: usize) {
        qkv: Linear = Linear::new(width, 3 * width, true),
        out: Linear = Linear::new(width, width, true),
        head_size: usize = width / heads,
    }
}

#[forward]
impl Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // The outputs are ordered by head, so that a shard of them has the query, key and value of its heads.
        let qkv = self.qkv.forward(x)?.unflatten(-1, [INFER, 3, self.head_size])?.unbind(3)?;
        let [q, k, v] = [0, 1, 2].map(|i| qkv[i].transpose(1, 2));
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let y = q?.scaled_dot_product_attention(&k?, &v?, causal)?;
        self.out.forward(y.transpose(1, 2)?.flatten(2, 3))
    }
}

module! {
    struct Block(width: usize, heads: usize) {
        attention_norm: LayerNorm = LayerNorm::new(width),
        attention: Attention = Attention::new(width, heads),
        mlp_norm: LayerNorm = LayerNorm::new(width),
        up: Linear = Linear::new(width, 4 * width, true),
        down: Linear = Linear::new(4 * width, width, true),
        base: Base = Base::new(),
    }
}

#[forward]
impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.forward(self.attention_norm.forward(x)))?;
        &x + self.down.forward(self.up.forward(self.mlp_norm.forward(&x))?.gelu(Gelu::Exact))
    }
}

module! {
    struct Gpt(vocab: usize, length: usize, width: usize, heads: usize, layers: usize) {
        tokens: Embedding = Embedding::new(vocab, width),
        positions: Embedding = Embedding::new(length, width),
        blocks: Vec<Block> = (0..layers).map(|_| Block::new(width, heads)).collect::<Result<_>>(),
        norm: LayerNorm = LayerNorm::new(width),
        head: Linear = Linear::new(width, vocab, false),
        base: Base = Base::new(),
    }
}

#[forward]
impl Gpt {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, tokens.dims()[1], 1, DType::I64);
        let x = (self.tokens.forward(tokens) + self.positions.forward(positions)?)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(x));
        self.head.forward(self.norm.forward(x))
    }
}

impl Case {
    /// Creates the model, and returns a function that takes one training step and returns the loss before the step.
    fn step(self, mesh: &DeviceMesh) -> Result<Box<dyn Fn() -> Result<Tensor>>> {
        let Sizes { layers, vocab, length, width, heads, batch } = self.sizes;
        let model = Gpt::new(vocab, length, width, heads, layers)?;
        fill(&model)?;
        let ids = |from: usize| {
            let ids = (from..from + batch * length).map(|i| (integer_noise(i) % vocab) as i64);
            Tensor::from_vec(ids.collect(), [batch, length])
        };
        let (mut tokens, mut targets) = (ids(0)?, ids(1)?);
        let model = match self.sharding {
            Sharding::None | Sharding::Graph => model,
            Sharding::Tensor => parallelize_module(model, mesh, plan())?,
            Sharding::Fully => {
                let (rank, ranks) = (mesh.local_rank(())?, mesh.size());
                let start = rank * batch / ranks;
                let slice = |x: Tensor| x.narrow(0, start, (rank + 1) * batch / ranks - start);
                (tokens, targets) = (slice(tokens)?, slice(targets)?);
                for block in &model.blocks {
                    fully_shard(block, mesh, FullyShardOptions::default())?;
                }
                fully_shard(model, mesh, FullyShardOptions::default())?
            }
        };
        let optimizer = AdamW::new(model.parameters(), 1e-3)?;
        let targets = targets.flatten_all()?;
        let forward = move || {
            let logits = model.forward(&tokens)?.flatten(0, 1)?;
            loss_parallel(|| logits.cross_entropy(&targets, CrossEntropyOptions::default()))
        };
        let step = move || {
            let loss = match self.dtype {
                DType::F32 => forward()?,
                low => autocast(low, &forward)?,
            };
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(loss)
        };
        Ok(if self.sharding == Sharding::Graph { recorded(step) } else { Box::new(step) })
    }
}

/// Returns the sequence- and tensor-parallel plan.
fn plan() -> ParallelPlan {
    let embedding = |output| RowwiseParallel::new().input_layouts(Replicate).output_layouts(output);
    let rowwise = RowwiseParallel::new().output_layouts(Shard(1));
    let gathering = ColwiseParallel::new().input_layouts(Shard(1));
    plan! {
        "tokens" => embedding(Shard(1)),
        "positions" => embedding(Shard(0)),
        "blocks.*.*_norm" => SequenceParallel::new(),
        "blocks.*.attention.qkv" => gathering.clone(),
        "blocks.*.attention.out" => rowwise.clone(),
        "blocks.*.up" => gathering.clone(),
        "blocks.*.down" => rowwise,
        "norm" => SequenceParallel::new(),
        "head" => gathering.use_local_output(false),
    }
}

/// Sets the parameters to the values they have in `gpt_peer.py`.
fn fill(model: &impl Module) -> Result<()> {
    let table: Vec<f32> = (0..NOISE).map(noise).collect();
    for (name, parameter) in model.named_parameters() {
        let value = parameter.get();
        let scale = 1.0 / (value.dims().last().copied().unwrap_or(1) as f32).sqrt();
        let is_gain = name.ends_with("norm.weight");
        let values =
            table.iter().cycle().take(value.numel()).map(|x| scale * x + f32::from(u8::from(is_gain)));
        parameter.set(&Tensor::from_vec(values.collect(), value.dims())?)?;
    }
    Ok(())
}

/// Answers a request: creates a new model and times training steps.
fn measure(rank: &ServingRank, request: &Request) -> Result<Measurement> {
    let case: Case = request.case.parse().map_err(|()| request.unknown_case())?;
    let step = case.step(&rank.mesh)?;
    let mut loss = 0.0;
    for _ in 0..WARM_UP {
        let value = step()?;
        let value = if value.layout().is_some() { value.full_tensor()? } else { value };
        loss = value.item::<f32>()?.into();
    }
    let group = rank.world.group();
    let losses = group.all_gather_object(&loss)?;
    let device = dtensor::default_device()?;
    group.barrier()?;
    reset_peak_memory(device)?;
    let seconds = time_all(rank, request, step)?;
    let loss = losses.iter().sum::<f64>() / losses.len() as f64;
    Ok(Measurement { seconds, loss: Some(loss), peak_bytes: peak_memory(device)? })
}

/// A process that is measured, and its measurements of the current case.
struct Side {
    ranks: usize,
    world: World,
    sharding: Sharding,
    process: usize,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> std::result::Result<(), Box<dyn Error>> {
    let common = &options.common;
    if options.serve {
        return serve(common.ranks[0].into(), measure);
    }
    let is_gpu = common.device.is_gpu();
    let cases: Vec<Case> = cases(is_gpu, &common.only).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let mut processes = Vec::new();
    let mut sides = Vec::new();
    let mut start = |world: World, ranks: usize, shardings: &[Sharding]| {
        processes.push(world.serve("gpt", ranks, common.device)?);
        let process = processes.len() - 1;
        sides.extend(shardings.iter().map(|&sharding| Side { ranks, world, sharding, process }));
        Ok::<_, Box<dyn Error>>(())
    };
    start(World::Threads, 1, if is_gpu { &[Sharding::None, Sharding::Graph] } else { &[Sharding::None] })?;
    for &world in &common.world {
        for &ranks in common.ranks.iter().filter(|&&ranks| ranks > 1) {
            start(world, ranks.into(), &[Sharding::Tensor, Sharding::Fully])?;
        }
    }
    let start_peer = |path: &String| {
        let mut command = python(path, include_str!("gpt_peer.py"));
        command.env("DTENSOR_DEVICE", common.device.to_string());
        Peer::start("the peer", command)
    };
    // One process for its eager mode, and one that compiles: a compiled model is kept from request to request.
    let mut eager = common.peer.as_ref().map(start_peer).transpose()?;
    let mut compiling = if is_gpu { common.peer.as_ref().map(start_peer).transpose()? } else { None };
    let mut speedups = Vec::new();
    for case in cases {
        let name = case.to_string();
        let (samples, inner) = case.sizes.timings(is_gpu);
        let is_compiled = case.sizes.is_large() && case.dtype == DType::BF16;
        let mut ours: Vec<Vec<Measurement>> = sides.iter().map(|_| Vec::new()).collect();
        let (mut theirs, mut compiled) = (Vec::new(), Vec::new());
        for _ in 0..common.rounds {
            for (side, measured) in sides.iter().zip(&mut ours) {
                let name = Case { sharding: side.sharding, ..case }.to_string();
                measured.push(processes[side.process].measure(&name, samples, inner)?);
            }
            if let Some(peer) = &mut eager {
                theirs.push(peer.measure(&name, samples, inner)?);
            }
            if let Some(peer) = &mut compiling
                && is_compiled
            {
                match peer.measure(&format!("{name}_compiled"), samples, inner) {
                    Ok(measured) => compiled.push(measured),
                    // Its compiler may be missing; its eager mode counts all the same.
                    Err(why) => {
                        eprintln!("not compiled: {why}");
                        compiling = None;
                    }
                }
            }
        }
        check_losses(case, ours.iter().flatten().chain(&theirs).chain(&compiled))?;
        for (side, measured) in sides.iter().zip(&ours) {
            let name = Case { sharding: side.sharding, ..case }.to_string();
            let base = || Row {
                workload: "gpt",
                ranks: Some(side.ranks),
                world: Some(side.world),
                ..Row::default()
            };
            for (suffix, theirs) in [("", &theirs), (" compiled", &compiled)] {
                if theirs.is_empty() && !(suffix.is_empty()) {
                    continue;
                }
                let row = Row { case: format!("{name}{suffix}"), ..base() };
                let row = times(row, measured, theirs, case.sizes.length * case.sizes.batch);
                if suffix.is_empty() && side.sharding == Sharding::None {
                    speedups.extend(row.ratio.map(|ratio| 1.0 / ratio));
                }
                sink(Row { loss: measured.first().and_then(|one| one.loss), ..row })?;
            }
            let peak = |measured: &[Measurement]| measured.iter().filter_map(|one| one.peak_bytes).max();
            if let Some(bytes) = peak(measured) {
                let theirs = peak(&theirs);
                sink(Row {
                    case: format!("{name} peak memory"),
                    peak_bytes: Some(bytes),
                    peer_peak_bytes: theirs,
                    ratio: theirs.map(|theirs| bytes as f64 / theirs as f64),
                    ..base()
                })?;
            }
        }
    }
    if !speedups.is_empty() {
        eprintln!("one rank: {}", describe_speedups(&speedups));
    }
    Ok(())
}

/// Adds the median times to a row.
fn times(row: Row, ours: &[Measurement], theirs: &[Measurement], tokens: usize) -> Row {
    let seconds = |measured: &[Measurement]| {
        (!measured.is_empty()).then(|| median(measured.iter().map(|one| one.seconds).collect()))
    };
    let (seconds, peer_seconds) = (seconds(ours), seconds(theirs));
    Row {
        seconds,
        peer_seconds,
        ratio: seconds.zip(peer_seconds).map(|(ours, theirs)| ours / theirs),
        tokens_per_second: seconds.map(|s| tokens as f64 / s),
        peer_tokens_per_second: peer_seconds.map(|s| tokens as f64 / s),
        ..row
    }
}

/// Returns an error if the losses after the same steps differ.
fn check_losses<'a>(
    case: Case,
    measured: impl Iterator<Item = &'a Measurement>,
) -> std::result::Result<(), String> {
    let tolerance = if case.dtype == DType::F32 { 1e-3 } else { 2e-2 };
    let losses: Option<Vec<f64>> = measured.map(|one| one.loss).collect();
    let losses = losses.ok_or_else(|| format!("{case}: a program reported no loss"))?;
    // Written so that NaN is an error too.
    let is_near = |loss: &f64| (loss - losses[0]).abs() <= tolerance * losses[0].abs();
    if losses.iter().all(is_near) { Ok(()) } else { Err(format!("{case}: the losses differ: {losses:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        let names: Vec<String> = cases(false, "").map(|case| case.to_string()).collect();
        assert_eq!(names.len(), 4);
        assert_eq!(names[1], "l2_v256_s32_d64_h4_b4_bf16");
        assert!(cases(true, "d768_h12_b8_bf16").all(|case| case.sizes.is_large()));
        for name in names
            .iter()
            .flat_map(|name| ["", "_graph", "_tp", "_fsdp"].map(|sharding| format!("{name}{sharding}")))
        {
            assert_eq!(name.parse::<Case>().map(|case| case.to_string()), Ok(name));
        }
        assert!("l2".parse::<Case>().is_err());
    }
}
