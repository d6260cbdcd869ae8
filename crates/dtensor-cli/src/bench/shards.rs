//! `dtensor bench shards`: the memory of a rank when a model is fully sharded, counted by the library.

use std::error::Error;

use clap::Args;
use dtensor::comm::run as run_ranks;
use dtensor::debug::{MemoryPeaks, record_memory};
use dtensor::models::{ModelArgs, Transformer};
use dtensor::on_device;
use dtensor::optim::AdamW;
use dtensor::prelude::*;
use serde::Serialize;

use super::row::print;

/// The number of training steps. More steps would not raise the peaks.
const STEPS: usize = 3;
/// The number of tokens of each rank in a step.
const LENGTH: usize = 32;

/// The flags of `dtensor bench shards`.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of ranks
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4,8",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    ranks: Vec<u16>,
    /// Number of transformer blocks
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    layers: u16,
    /// Hidden size
    #[arg(long, default_value_t = 256)]
    dim: usize,
}

#[derive(Serialize)]
struct Row {
    workload: &'static str,
    ranks: u16,
    /// The parameters of the full model, and of one block.
    model_bytes: usize,
    block_bytes: usize,
    /// The peak while the model is made: on the meta device, and then shard by shard.
    creation_bytes: usize,
    parameter_bytes: usize,
    gradient_bytes: usize,
    optimizer_bytes: usize,
    /// What a rank has gathered at the same time: the mean, because threads share a copy, which counts for one of them.
    gathered_bytes: usize,
}

pub(crate) fn run(options: &Options) -> std::result::Result<(), Box<dyn Error>> {
    for &ranks in &options.ranks {
        let rows = run_ranks(World::threads(ranks.into())?, |world| measure(options, &world))?;
        print(&rows[0])?;
    }
    Ok(())
}

fn measure(options: &Options, world: &World) -> Result<Row> {
    let mesh = DeviceMesh::new(world, [world.size()], "dp")?;
    let args = ModelArgs {
        n_layers: options.layers.into(),
        dim: options.dim,
        max_seq_len: LENGTH,
        dropout_p: 0.0,
        weight_tying: false,
        ..ModelArgs::default()
    };
    let (model, creation) = record_memory(|| -> Result<Transformer> {
        let model = on_device(Device::Meta, || Transformer::new(&args))?;
        for block in &model.layers {
            fully_shard(block, &mesh, FullyShardOptions::default())?;
        }
        let model = fully_shard(model, &mesh, FullyShardOptions::default())?;
        model.to_empty(Device::Cpu)?;
        model.reset_parameters()?;
        Ok(model)
    });
    let model = model?;
    let bytes = |module: &dyn Module| module.parameters().iter().map(|p| p.get().numel() * 4).sum();
    let (done, training) = record_memory(|| -> Result<()> {
        let optimizer = AdamW::new(model.parameters(), 0.01)?;
        for _ in 0..STEPS {
            optimizer.zero_grad();
            let tokens = Tensor::randint(0, args.vocab_size as i64, [1, LENGTH])?;
            model.forward(&tokens)?.pow(2)?.mean_all()?.backward()?;
            optimizer.step()?;
        }
        Ok(())
    });
    done?;
    let all = world.group().all_gather_object(&[creation, training].map(Peaks::from))?;
    let largest = |of: fn(&[Peaks; 2]) -> usize| all.iter().map(of).max().unwrap_or(0);
    Ok(Row {
        workload: "shards",
        ranks: world.size() as u16,
        model_bytes: bytes(&model),
        block_bytes: bytes(&model.layers[0]),
        creation_bytes: largest(|[creation, _]| creation.total),
        parameter_bytes: largest(|[creation, _]| creation.parameters),
        gradient_bytes: largest(|[_, training]| training.gradients),
        optimizer_bytes: largest(|[_, training]| training.optimizer),
        gathered_bytes: all.iter().map(|[_, training]| training.gathered).sum::<usize>() / world.size(),
    })
}

/// The peaks that ranks exchange.
#[derive(Clone, Serialize, serde::Deserialize)]
struct Peaks {
    total: usize,
    parameters: usize,
    gradients: usize,
    optimizer: usize,
    gathered: usize,
}

impl From<MemoryPeaks> for Peaks {
    fn from(peaks: MemoryPeaks) -> Self {
        let MemoryPeaks { total, parameters, gradients, optimizer, gathered, .. } = peaks;
        Peaks { total, parameters, gradients, optimizer, gathered }
    }
}
