//! What can be asked for.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use dtensor::models::ModelArgs;
use dtensor::optim::Schedule;

use super::mesh::MeshShape;

/// A model, a mesh, and how to train. Of a flag that comes twice, the last counts.
#[derive(Args, Clone, Debug)]
#[command(args_override_self = true)]
pub(crate) struct Options {
    /// The ranks: `dp` replicas of the model, each with its part of every batch, and each spread over `tp` ranks. Either may be
    /// missing. Ranks are threads of this program or, if `mpirun` starts it, processes
    #[arg(long, default_value = "dp=2,tp=2", value_name = "DIMS")]
    pub(crate) mesh: MeshShape,
    /// Between what is cut into heads and hidden units, each rank of `tp` has a part of the sequence
    #[arg(long)]
    pub(crate) sequence_parallel: bool,
    /// Scores stay cut along the vocabulary, and ranks of `tp` find the loss together
    #[arg(long)]
    pub(crate) loss_parallel: bool,

    /// Training steps
    #[arg(long, default_value_t = 700)]
    pub(crate) steps: u64,
    /// Sequences in a step, over all replicas
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// Passes in which each replica goes through its part of a batch
    #[arg(long, default_value_t = 1, value_name = "PASSES")]
    pub(crate) accumulate: usize,
    /// Bytes in a sequence
    #[arg(long, default_value_t = 64)]
    pub(crate) seq: usize,

    /// Blocks of the model
    #[arg(long, default_value_t = 3)]
    pub(crate) layers: usize,
    /// Size of the vectors that stand for bytes
    #[arg(long, default_value_t = 128)]
    pub(crate) dim: usize,
    /// Heads of the attention
    #[arg(long, default_value_t = 4)]
    pub(crate) heads: usize,
    /// Probability of dropping an activation
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) dropout: f64,
    /// What matrix products are computed in. Parameters and gradients are of f32
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(crate) dtype: Precision,
    /// Computes what is inside of a block again for the gradients, instead of keeping it
    #[arg(long)]
    pub(crate) checkpoint_activations: bool,

    /// Learning rate
    #[arg(long, default_value_t = 6e-3, allow_negative_numbers = true)]
    pub(crate) lr: f64,
    /// How the learning rate goes after the warm-up: to a tenth, at the last step, or not at all
    #[arg(long, value_enum, default_value_t = Decay::Cosine)]
    pub(crate) schedule: Decay,
    /// Steps in which the learning rate rises; a tenth of all unless given
    #[arg(long, value_name = "STEPS")]
    pub(crate) warmup: Option<u64>,
    /// Decay of matrices in each step, times the learning rate
    #[arg(long, default_value_t = 0.01, allow_negative_numbers = true)]
    pub(crate) weight_decay: f64,
    /// The largest norm that gradients may have; 0 for any
    #[arg(long, default_value_t = 1.0, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip: f64,
    /// Seed of parameters, batches, dropout and the sample
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// A text to learn, instead of Jane Austen's "Persuasion". The last tenth is held out
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Bytes to write like the text when training is over
    #[arg(long, default_value_t = 300, value_name = "LENGTH")]
    pub(crate) sample: usize,
    /// What the sample begins with
    #[arg(long, default_value = "Anne ", value_name = "TEXT")]
    pub(crate) prompt: String,
    /// How daring the sample is
    #[arg(long, default_value_t = 0.7, allow_negative_numbers = true)]
    pub(crate) temperature: f64,

    /// Draws the loss into this file; '' for none
    #[arg(long, default_value = "loss.svg", value_name = "FILE")]
    pub(crate) svg: PathBuf,
    /// Writes the losses of all steps and what else was found, with every digit, into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Makes the first 50 steps again on one rank, and fails if any loss differs by more than 1e-4 (with bf16: 0.01)
    #[arg(long)]
    pub(crate) verify: bool,
}

/// What matrix products are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    F32,
    Bf16,
}

impl Precision {
    /// How far a loss may be from that of one rank.
    pub(crate) fn tolerance(self) -> f32 {
        match self {
            Precision::F32 => 1e-4,
            Precision::Bf16 => 0.01,
        }
    }
}

/// How the learning rate goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Decay {
    Constant,
    Linear,
    Cosine,
}

/// More weights, bytes in a step or bytes of a sample than these are a slip of the hand.
const MOST: f64 = 1e10;

impl Options {
    /// The first thing that is wrong, if anything is.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Options { mesh, heads, dim, batch, accumulate, .. } = self;
        let (dp, tp) = (mesh.dp(), mesh.tp());
        let counts = [
            ("steps", self.steps as usize),
            ("batch", *batch),
            ("accumulate", *accumulate),
            ("seq", self.seq),
            ("layers", self.layers),
            ("dim", *dim),
            ("heads", *heads),
        ];
        for (name, count) in counts {
            refuse_if(count == 0, || format!("--{name} must be at least 1"))?;
        }
        // Far more than there is memory for anywhere, and far less than cannot be counted.
        let (weights, tokens) = (self.weights(), *batch as f64 * self.seq as f64);
        refuse_if(weights > MOST, || format!("--layers and --dim make {weights:.0e} weights: too many"))?;
        refuse_if(tokens > MOST, || {
            format!("--batch and --seq make {tokens:.0e} bytes in a step: too many")
        })?;
        refuse_if(self.sample as f64 > MOST, || format!("--sample {} is too long", self.sample))?;
        let amounts = [
            ("lr", self.lr, f64::MAX),
            ("weight-decay", self.weight_decay, f64::MAX),
            ("clip", self.clip, f64::MAX),
            ("dropout", self.dropout, 1.0 - f64::EPSILON),
        ];
        for (name, amount, most) in amounts {
            let bound = if most < 1.0 { ", and less than 1" } else { "" };
            let wrong = !(0.0..=most).contains(&amount);
            refuse_if(wrong, || format!("--{name} must be a number from 0 up{bound}, but is {amount}"))?;
        }
        let temperature = self.temperature;
        refuse_if(!(temperature > 0.0 && temperature.is_finite()), || {
            format!("--temperature must be a number larger than 0, but is {temperature}")
        })?;
        refuse_if(!dim.is_multiple_of(*heads), || {
            format!("--dim must be divisible by --heads, but {dim} is not by {heads}")
        })?;
        refuse_if(!heads.is_multiple_of(tp), || {
            format!("--heads must be divisible by the size of `tp` in --mesh, but {heads} is not by {tp}")
        })?;
        refuse_if(*batch / dp < *accumulate, || {
            format!(
                "--batch {batch} is too small: {dp} replicas with {accumulate} passes each need at least {}",
                dp.saturating_mul(*accumulate)
            )
        })?;
        if let Some(warmup) = self.warmup {
            let steps = self.steps;
            refuse_if(warmup >= steps, || format!("--warmup {warmup} is not less than --steps {steps}"))?;
        }
        for (flag, on) in [("sequence", self.sequence_parallel), ("loss", self.loss_parallel)] {
            refuse_if(on && mesh.get("tp").is_none(), || {
                format!("--{flag}-parallel needs a dim `tp` in --mesh, which is {mesh}")
            })?;
        }
        refuse_if(self.verify && self.dropout > 0.0 && dp > 1, || {
            format!("--verify cannot compare with --dropout {}: replicas drop other elements", self.dropout)
        })
    }

    /// Where the loss is drawn, if it is.
    pub(crate) fn drawing(&self) -> Option<&Path> {
        Some(&*self.svg).filter(|path| !path.as_os_str().is_empty())
    }

    /// About how many weights the model has.
    fn weights(&self) -> f64 {
        let (layers, dim) = (self.layers as f64, self.dim as f64);
        12.0 * layers * dim * dim + (512.0 + self.seq as f64) * dim
    }

    /// The model, with a token for every byte.
    pub(crate) fn model(&self) -> ModelArgs {
        ModelArgs {
            n_layers: self.layers,
            vocab_size: 256,
            max_seq_len: self.seq,
            dim: self.dim,
            n_heads: self.heads,
            dropout_p: self.dropout,
            use_attn_mask: true,
            weight_tying: false,
            checkpoint_activations: self.checkpoint_activations,
        }
    }

    /// How the learning rate goes over all steps.
    pub(crate) fn schedule(&self) -> Schedule {
        const FLOOR: f64 = 0.1;
        let warmup = self.warmup.unwrap_or(self.steps / 10);
        let rest = (self.steps - warmup - 1).max(1);
        let decay = match self.schedule {
            Decay::Constant => Schedule::constant(),
            Decay::Linear => Schedule::linear(rest, FLOOR),
            Decay::Cosine => Schedule::cosine(rest, FLOOR),
        };
        Schedule::linear_warmup(warmup).then(decay)
    }
}

fn refuse_if(wrong: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if wrong { Err(message()) } else { Ok(()) }
}
