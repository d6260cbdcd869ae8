//! The cases of `dtensor bench mlp`, `dtensor bench transformer` and `dtensor bench fsdp`: models, plans, and a training step.

use std::fmt;

use dtensor::models::{MLPModule, ModelArgs, Transformer};
use dtensor::optim::{AdamW, Sgd};
use dtensor::parallel::{
    ColwiseParallel, FullyShardOptions, PrepareModuleInput, RowwiseParallel, SequenceParallel, fully_shard,
    parallelize_module,
};
use dtensor::prelude::*;

/// A model and its training data.
#[derive(Clone, Copy)]
pub(crate) enum TrainingCase {
    /// Column-wise linear, relu, row-wise linear; SGD.
    Mlp { batch: usize, dim: usize, hidden: usize, samples: usize },
    /// Cross-entropy and AdamW.
    Transformer {
        sharding: Sharding,
        layers: usize,
        vocab: usize,
        seq: usize,
        dim: usize,
        heads: usize,
        batch: usize,
        samples: usize,
    },
}

/// How a transformer is sharded.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Sharding {
    /// Sequence- and tensor-parallel.
    Tensor,
    /// Each block and the model by `fully_shard`. Each rank has its slice of the batch.
    Fully,
}

/// The transformers that are measured.
const fn transformers(sharding: Sharding) -> [TrainingCase; 2] {
    [
        TrainingCase::Transformer {
            sharding,
            layers: 2,
            vocab: 256,
            seq: 32,
            dim: 64,
            heads: 4,
            batch: 4,
            samples: 40,
        },
        TrainingCase::Transformer {
            sharding,
            layers: 4,
            vocab: 1024,
            seq: 128,
            dim: 256,
            heads: 8,
            batch: 8,
            samples: 5,
        },
    ]
}

const CASES: [TrainingCase; 7] = [
    TrainingCase::Mlp { batch: 8, dim: 64, hidden: 256, samples: 200 },
    TrainingCase::Mlp { batch: 64, dim: 512, hidden: 2048, samples: 30 },
    TrainingCase::Mlp { batch: 256, dim: 1024, hidden: 4096, samples: 8 },
    transformers(Sharding::Tensor)[0],
    transformers(Sharding::Tensor)[1],
    transformers(Sharding::Fully)[0],
    transformers(Sharding::Fully)[1],
];

impl fmt::Display for TrainingCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TrainingCase::Mlp { batch, dim, hidden, .. } => write!(f, "b{batch}_d{dim}_h{hidden}"),
            TrainingCase::Transformer { sharding, layers, vocab, seq, dim, heads, batch, .. } => {
                let prefix = if *sharding == Sharding::Fully { "fsdp_" } else { "" };
                write!(f, "{prefix}l{layers}_v{vocab}_s{seq}_d{dim}_h{heads}_b{batch}")
            }
        }
    }
}

impl TrainingCase {
    /// Iterates over all cases.
    pub(crate) fn all() -> impl Iterator<Item = TrainingCase> {
        CASES.into_iter()
    }

    /// Iterates over the cases of a workload.
    pub(crate) fn of(workload: &str) -> impl Iterator<Item = TrainingCase> {
        TrainingCase::all().filter(move |case| case.workload() == workload)
    }

    pub(crate) fn named(name: &str) -> Option<TrainingCase> {
        TrainingCase::all().find(|case| case.to_string() == name)
    }

    /// Returns the workload of the case.
    pub(crate) fn workload(self) -> &'static str {
        match self {
            TrainingCase::Mlp { .. } => "mlp",
            TrainingCase::Transformer { sharding: Sharding::Tensor, .. } => "transformer",
            TrainingCase::Transformer { sharding: Sharding::Fully, .. } => "fsdp",
        }
    }

    /// Returns the number of steps timed per round.
    pub(crate) fn samples(self) -> usize {
        match self {
            TrainingCase::Mlp { samples, .. } | TrainingCase::Transformer { samples, .. } => samples,
        }
    }

    /// Returns the number of tokens per step.
    pub(crate) fn tokens(self) -> Option<usize> {
        match self {
            TrainingCase::Mlp { .. } => None,
            TrainingCase::Transformer { seq, batch, .. } => Some(seq * batch),
        }
    }

    /// Returns an error if the heads are not divisible by the ranks.
    fn check(self, ranks: u16) -> std::result::Result<(), String> {
        match self {
            TrainingCase::Transformer { sharding: Sharding::Tensor, heads, .. }
                if heads % usize::from(ranks) != 0 =>
            {
                Err(format!("--ranks {ranks}: the {heads} heads of {self} are not divisible by the ranks"))
            }
            _ => Ok(()),
        }
    }

    /// Creates a model on a 1-d mesh, and returns a function that takes one training step and returns the loss before the step.
    pub(crate) fn step(self, mesh: &DeviceMesh) -> Result<Box<dyn Fn() -> Result<Tensor>>> {
        match self {
            TrainingCase::Mlp { batch, dim, hidden, .. } => {
                let model = MLPModule::with_sizes(dim, hidden, dim, true)?;
                fill(&model)?;
                let plan = plan! {
                    "net1" => ColwiseParallel::new(),
                    "net2" => RowwiseParallel::new(),
                };
                let model = parallelize_module(model, mesh, plan)?;
                let optimizer = Sgd::new(model.parameters(), 1e-3)?;
                let x = Tensor::from_vec((0..batch * dim).map(|i| 2.0 * noise(i)).collect(), [batch, dim])?;
                Ok(Box::new(move || {
                    optimizer.zero_grad();
                    let loss = model.forward(&x)?.sum_all()?;
                    loss.backward()?;
                    optimizer.step()?;
                    Ok(loss)
                }))
            }
            TrainingCase::Transformer { sharding, layers, vocab, seq, dim, heads, batch, .. } => {
                let model = Transformer::new(&ModelArgs {
                    n_layers: layers,
                    vocab_size: vocab,
                    max_seq_len: seq,
                    dim,
                    n_heads: heads,
                    dropout_p: 0.0,
                    use_attn_mask: true,
                    weight_tying: false,
                    checkpoint_activations: false,
                })?;
                fill(&model)?;
                let tokens = (0..batch * seq).map(|i| (integer_noise(i) % vocab) as i64).collect();
                let mut tokens = Tensor::from_vec(tokens, [batch, seq])?;
                let model = match sharding {
                    Sharding::Tensor => parallelize_module(model, mesh, sequence_parallel()?)?,
                    Sharding::Fully => {
                        let (rank, ranks) = (mesh.local_rank(())?, mesh.size());
                        let start = rank * batch / ranks;
                        tokens = tokens.narrow(0, start, (rank + 1) * batch / ranks - start)?;
                        for block in &model.layers {
                            fully_shard(block, mesh, FullyShardOptions::default())?;
                        }
                        fully_shard(model, mesh, FullyShardOptions::default())?
                    }
                };
                let optimizer = AdamW::new(model.parameters(), 1e-3)?;
                let next = tokens.flatten_all()?;
                Ok(Box::new(move || {
                    optimizer.zero_grad();
                    let logits = model.forward(&tokens)?.flatten(0, 1)?;
                    let loss = logits.cross_entropy(&next, CrossEntropyOptions::default())?;
                    loss.backward()?;
                    optimizer.step()?;
                    Ok(loss)
                }))
            }
        }
    }
}

/// Returns the cases whose name contains `only`. Returns an error if one of them cannot run on one of `ranks`.
pub(crate) fn select(
    cases: impl Iterator<Item = TrainingCase>,
    only: &str,
    ranks: &[u16],
) -> std::result::Result<Vec<TrainingCase>, String> {
    let cases: Vec<TrainingCase> = cases.filter(|case| case.to_string().contains(only)).collect();
    for &ranks in ranks {
        cases.iter().try_for_each(|case| case.check(ranks))?;
    }
    Ok(cases)
}

/// Returns the sequence- and tensor-parallel plan of the transformer.
fn sequence_parallel() -> Result<dtensor::parallel::ParallelPlan> {
    let embedding = |output| RowwiseParallel::new().input_layouts(Replicate).output_layouts(output);
    let rowwise = RowwiseParallel::new().output_layouts(Shard(1));
    let gather_sequence = PrepareModuleInput::new(Shard(1), Replicate)?;
    Ok(plan! {
        "tok_embeddings" => embedding(Shard(1)),
        "pos_embeddings" => embedding(Shard(0)),
        "layers.*.*_norm" => SequenceParallel::new(),
        "layers.*.attention" => gather_sequence.clone(),
        "layers.*.attention.w[qkv]" => ColwiseParallel::new(),
        "layers.*.attention.wo" => rowwise.clone(),
        "layers.*.feed_forward" => gather_sequence,
        "layers.*.feed_forward.w1" => ColwiseParallel::new(),
        "layers.*.feed_forward.w2" => rowwise,
        "norm" => SequenceParallel::new(),
        "output" => ColwiseParallel::new().input_layouts(Shard(1)).output_layouts(Replicate),
    })
}

pub(crate) const NOISE: usize = 1009;

/// Returns a pseudo-random integer from 0 to 1008.
pub(crate) fn integer_noise(i: usize) -> usize {
    let i = i % NOISE;
    (31 * i * i + 7 * i) % NOISE
}

/// Returns a pseudo-random number from -0.5 to 0.5.
pub(crate) fn noise(i: usize) -> f32 {
    integer_noise(i) as f32 / NOISE as f32 - 0.5
}

/// Sets the parameters to the values they have in `train_peer.py`: the scale of usual initial values, and around 1 for the weights of
/// norms.
fn fill(model: &impl Module) -> Result<()> {
    let mut parameters = model.named_parameters();
    parameters.sort_by(|a, b| a.0.cmp(&b.0));
    for (k, (name, parameter)) in parameters.into_iter().enumerate() {
        let value = parameter.get();
        let width = value.dims().last().copied().unwrap_or(1);
        let scale = 2.0 / (width as f32).sqrt();
        let middle = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values = (0..value.numel()).map(|i| middle + scale * noise(i + 101 * k)).collect();
        parameter.set(&Tensor::from_vec(values, value.dims())?)?;
    }
    Ok(())
}
