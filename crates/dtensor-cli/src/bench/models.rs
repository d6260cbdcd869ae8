//! The cases of `dtensor bench mlp` and `dtensor bench transformer`: models, how they lie on ranks, and a step of training.

use std::fmt;

use dtensor::models::{MLPModule, ModelArgs, Transformer};
use dtensor::optim::{AdamW, Sgd};
use dtensor::parallel::{
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
};
use dtensor::prelude::*;

/// A model and what it is trained on.
#[derive(Clone, Copy)]
pub(crate) enum Case {
    /// Columns, relu, rows; SGD.
    Mlp { batch: usize, dim: usize, hidden: usize, samples: usize },
    /// Sequence- and tensor-parallel; cross-entropy and AdamW.
    Transformer {
        layers: usize,
        vocab: usize,
        seq: usize,
        dim: usize,
        heads: usize,
        batch: usize,
        samples: usize,
    },
}

const CASES: [Case; 5] = [
    Case::Mlp { batch: 8, dim: 64, hidden: 256, samples: 200 },
    Case::Mlp { batch: 64, dim: 512, hidden: 2048, samples: 30 },
    Case::Mlp { batch: 256, dim: 1024, hidden: 4096, samples: 8 },
    Case::Transformer { layers: 2, vocab: 256, seq: 32, dim: 64, heads: 4, batch: 4, samples: 40 },
    Case::Transformer { layers: 4, vocab: 1024, seq: 128, dim: 256, heads: 8, batch: 8, samples: 5 },
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Mlp { batch, dim, hidden, .. } => write!(f, "b{batch}_d{dim}_h{hidden}"),
            Case::Transformer { layers, vocab, seq, dim, heads, batch, .. } => {
                write!(f, "l{layers}_v{vocab}_s{seq}_d{dim}_h{heads}_b{batch}")
            }
        }
    }
}

impl Case {
    /// All there are.
    pub(crate) fn all() -> impl Iterator<Item = Case> {
        CASES.into_iter()
    }

    /// Those of a workload.
    pub(crate) fn of(workload: &str) -> impl Iterator<Item = Case> {
        Case::all().filter(move |case| case.workload() == workload)
    }

    pub(crate) fn named(name: &str) -> Option<Case> {
        Case::all().find(|case| case.to_string() == name)
    }

    /// The workload that it belongs to.
    pub(crate) fn workload(self) -> &'static str {
        match self {
            Case::Mlp { .. } => "mlp",
            Case::Transformer { .. } => "transformer",
        }
    }

    /// How many steps are timed in one turn.
    pub(crate) fn samples(self) -> usize {
        match self {
            Case::Mlp { samples, .. } | Case::Transformer { samples, .. } => samples,
        }
    }

    /// How many tokens a step learns from.
    pub(crate) fn tokens(self) -> Option<usize> {
        match self {
            Case::Mlp { .. } => None,
            Case::Transformer { seq, batch, .. } => Some(seq * batch),
        }
    }

    /// That so many ranks can train it: each has as many whole heads as the others.
    fn check(self, ranks: u16) -> std::result::Result<(), String> {
        match self {
            Case::Transformer { heads, .. } if heads % usize::from(ranks) != 0 => {
                Err(format!("--ranks {ranks}: the {heads} heads of {self} are not divisible by the ranks"))
            }
            _ => Ok(()),
        }
    }

    /// A new model on a mesh of one dim; each call trains it by a step and gives the loss before.
    pub(crate) fn step(self, mesh: &DeviceMesh) -> Result<Box<dyn Fn() -> Result<Tensor>>> {
        match self {
            Case::Mlp { batch, dim, hidden, .. } => {
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
            Case::Transformer { layers, vocab, seq, dim, heads, batch, .. } => {
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
                let model = parallelize_module(model, mesh, sequence_parallel()?)?;
                let optimizer = AdamW::new(model.parameters(), 1e-3)?;
                let tokens = (0..batch * seq).map(|i| (whole_noise(i) % vocab) as i64).collect();
                let tokens = Tensor::from_vec(tokens, [batch, seq])?;
                let next = tokens.flatten_all()?;
                Ok(Box::new(move || {
                    optimizer.zero_grad();
                    let logits = model.forward(&tokens)?.flatten(0, 1)?;
                    let loss = logits.cross_entropy(&next, CrossEntropy::default())?;
                    loss.backward()?;
                    optimizer.step()?;
                    Ok(loss)
                }))
            }
        }
    }
}

/// Those whose name contains `only`. All of `ranks` can train them.
pub(crate) fn wanted(
    cases: impl Iterator<Item = Case>,
    only: &str,
    ranks: &[u16],
) -> std::result::Result<Vec<Case>, String> {
    let cases: Vec<Case> = cases.filter(|case| case.to_string().contains(only)).collect();
    for &ranks in ranks {
        cases.iter().try_for_each(|case| case.check(ranks))?;
    }
    Ok(cases)
}

/// How the transformer lies: between layers each rank has a part of the sequence.
fn sequence_parallel() -> Result<dtensor::parallel::ParallelPlan> {
    let words = |cut| RowwiseParallel::new().input_layouts(Replicate).output_layouts(cut);
    let back = RowwiseParallel::new().output_layouts(Shard(1));
    let gathered = PrepareModuleInput::new(Shard(1), Replicate)?;
    Ok(plan! {
        "tok_embeddings" => words(Shard(1)),
        "pos_embeddings" => words(Shard(0)),
        "layers.*.*_norm" => SequenceParallel::new(),
        "layers.*.attention" => gathered.clone(),
        "layers.*.attention.w[qkv]" => ColwiseParallel::new(),
        "layers.*.attention.wo" => back.clone(),
        "layers.*.feed_forward" => gathered,
        "layers.*.feed_forward.w1" => ColwiseParallel::new(),
        "layers.*.feed_forward.w2" => back,
        "norm" => SequenceParallel::new(),
        "output" => ColwiseParallel::new().input_layouts(Shard(1)).output_layouts(Replicate),
    })
}

const NOISE: usize = 1009;

/// Numbers in no apparent order, from 0 to 1008.
fn whole_noise(i: usize) -> usize {
    let i = i % NOISE;
    (31 * i * i + 7 * i) % NOISE
}

/// Numbers in no apparent order, from -0.5 to 0.5.
fn noise(i: usize) -> f32 {
    whole_noise(i) as f32 / NOISE as f32 - 0.5
}

/// Gives parameters the values that they have in `train_peer.py`: as large as a layer's first ones are, and about 1 where a norm
/// multiplies by them.
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
