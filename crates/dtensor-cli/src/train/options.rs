//! The flags of `dtensor train`.

use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use dtensor::models::ModelArgs;
use dtensor::optim::Schedule;

use super::mesh::MeshShape;
use crate::device::DeviceChoice;

/// The flags: mesh, model, training, text, output. If a flag is given twice, the last one counts.
#[derive(Args, Clone, Debug)]
#[command(args_override_self = true)]
pub(crate) struct Options {
    /// Mesh of ranks: `dp` replicas of the model, which split every batch, and `tp` ranks that shard each replica. Either dim may be
    /// left out. Ranks are threads of this program or, under `mpirun`, processes
    #[arg(long, default_value = "dp=2,tp=2", value_name = "DIMS")]
    pub(crate) mesh: MeshShape,
    /// Shard parameters, gradients and optimizer state over `dp`, instead of a copy on each replica
    #[arg(long)]
    pub(crate) fsdp: bool,
    /// Shard the sequence over `tp` between the tensor-parallel layers: in norms, dropout and residuals
    #[arg(long)]
    pub(crate) sequence_parallel: bool,
    /// Keep the logits sharded along the vocabulary, and compute the loss on the shards
    #[arg(long)]
    pub(crate) loss_parallel: bool,

    /// Where the tensors are: `cpu`, `cuda` (ranks take the GPUs in turn, and share them if there are fewer) or `cuda:N`
    #[arg(long, default_value_t = DeviceChoice::Cpu, value_name = "DEVICE")]
    pub(crate) device: DeviceChoice,

    /// Training steps
    #[arg(long, default_value_t = 700)]
    pub(crate) steps: u64,
    /// Sequences per step, over all replicas
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// Gradient accumulation: forward and backward passes per step, each on a slice of the replica's batch
    #[arg(long, default_value_t = 1, value_name = "PASSES")]
    pub(crate) accumulate: usize,
    /// Sequence length in bytes
    #[arg(long, default_value_t = 64)]
    pub(crate) seq: usize,

    /// Number of transformer blocks
    #[arg(long, default_value_t = 3)]
    pub(crate) layers: usize,
    /// Hidden size
    #[arg(long, default_value_t = 128)]
    pub(crate) dim: usize,
    /// Attention heads
    #[arg(long, default_value_t = 4)]
    pub(crate) heads: usize,
    /// Dropout probability
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) dropout: f64,
    /// Dtype of matrix products. Parameters and gradients are f32
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(crate) dtype: Precision,
    /// Recompute the activations of each block in backward, instead of saving them
    #[arg(long)]
    pub(crate) checkpoint_activations: bool,

    /// Learning rate
    #[arg(long, default_value_t = 6e-3, allow_negative_numbers = true)]
    pub(crate) lr: f64,
    /// Learning rate schedule after the warm-up. `linear` and `cosine` decay to a tenth at the last step
    #[arg(long, value_enum, default_value_t = Decay::Cosine)]
    pub(crate) schedule: Decay,
    /// Warm-up steps; default: a tenth of all steps
    #[arg(long, value_name = "STEPS")]
    pub(crate) warmup: Option<u64>,
    /// Weight decay of matrices; norms and biases have none
    #[arg(long, default_value_t = 0.01, allow_negative_numbers = true)]
    pub(crate) weight_decay: f64,
    /// Clip gradients to this norm; 0 for no clipping
    #[arg(long, default_value_t = 1.0, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip: f64,
    /// Seed of parameters, batches, dropout and the sample
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Text to train on, instead of Jane Austen's "Persuasion". The last tenth is held out for validation
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Bytes to generate after training; 0 for no sample
    #[arg(long, default_value_t = 300, value_name = "LENGTH")]
    pub(crate) sample: usize,
    /// Text that the sample starts with
    #[arg(long, default_value = "Anne ", value_name = "TEXT")]
    pub(crate) prompt: String,
    /// Sampling temperature
    #[arg(long, default_value_t = 0.7, allow_negative_numbers = true)]
    pub(crate) temperature: f64,

    /// Draw the loss curve into this file; '' for none
    // The default parser of paths rejects an empty value.
    #[arg(
        long,
        default_value = "loss.svg",
        value_name = "FILE",
        value_parser = OsStringValueParser::new().map(PathBuf::from)
    )]
    pub(crate) svg: PathBuf,
    /// Write the results as JSON into this file: the loss of each step, validation loss, throughput, collectives, sample
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Save checkpoints into this folder, one folder for each saved step: model, optimizer, generators
    #[arg(long, value_name = "DIR")]
    pub(crate) save: Option<PathBuf>,
    /// Steps between two checkpoints. The last step is always saved
    #[arg(long, default_value_t = 100, value_name = "STEPS", requires = "save")]
    pub(crate) every: u64,
    /// Number of newest checkpoints that stay
    #[arg(long, default_value_t = 3, value_name = "COUNT", requires = "save")]
    pub(crate) keep: usize,
    /// Continue from a checkpoint: the newest one in this folder, or the folder of a step. The mesh may be another one
    #[arg(long, value_name = "DIR")]
    pub(crate) resume: Option<PathBuf>,
    /// Repeat the first 50 steps on one rank, on the CPU, and fail if a loss differs by more than 1e-4 (with a GPU: 1e-3; with
    /// bf16: 0.01)
    #[arg(long)]
    pub(crate) verify: bool,
}

/// The dtype of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    F32,
    Bf16,
}

impl Precision {
    /// Returns how much a loss may differ from that on one rank and the CPU.
    pub(crate) fn tolerance(self, device: DeviceChoice) -> f32 {
        match self {
            Precision::F32 if device.is_gpu() => 1e-3,
            Precision::F32 => 1e-4,
            Precision::Bf16 => 0.01,
        }
    }
}

/// The learning rate schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Decay {
    Constant,
    Linear,
    Cosine,
}

/// The largest number of parameters, bytes per step and bytes of a sample. More is a typing error.
const MOST: f64 = 1e10;

impl Options {
    /// Returns an error that describes the first invalid value.
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
            ("every", self.every as usize),
            ("keep", self.keep),
        ];
        for (name, count) in counts {
            fail_if(count == 0, || format!("--{name} must be at least 1"))?;
        }
        // Larger models exceed any memory. The limit also keeps the arithmetic below from overflowing.
        let (weights, tokens) = (self.weights(), *batch as f64 * self.seq as f64);
        fail_if(weights > MOST, || {
            format!("--layers and --dim give {weights:.0e} parameters; at most {MOST:.0e} are possible")
        })?;
        fail_if(tokens > MOST, || {
            format!("--batch and --seq give {tokens:.0e} bytes per step; at most {MOST:.0e} are possible")
        })?;
        fail_if(self.sample as f64 > MOST, || {
            format!("--sample {} is too long; at most {MOST:.0e} is possible", self.sample)
        })?;
        let amounts = [
            ("lr", self.lr, f64::MAX),
            ("weight-decay", self.weight_decay, f64::MAX),
            ("clip", self.clip, f64::MAX),
            ("dropout", self.dropout, 1.0 - f64::EPSILON),
        ];
        for (name, amount, most) in amounts {
            let bound = if most < 1.0 { "at least 0 and less than 1" } else { "finite and at least 0" };
            fail_if(!(0.0..=most).contains(&amount), || {
                format!("--{name} must be {bound}, but is {amount}")
            })?;
        }
        let temperature = self.temperature;
        fail_if(!(temperature > 0.0 && temperature.is_finite()), || {
            format!("--temperature must be finite and greater than 0, but is {temperature}")
        })?;
        fail_if(!dim.is_multiple_of(*heads), || {
            format!("--dim must be divisible by --heads: {dim} is not divisible by {heads}")
        })?;
        fail_if(!heads.is_multiple_of(tp), || {
            format!(
                "--heads must be divisible by the size of `tp` in --mesh: {heads} is not divisible by {tp}"
            )
        })?;
        fail_if(*batch / dp < *accumulate, || {
            format!(
                "--batch {batch} is too small: {dp} replicas with {accumulate} passes each need at least {}",
                dp.saturating_mul(*accumulate)
            )
        })?;
        if let Some(warmup) = self.warmup {
            let steps = self.steps;
            fail_if(warmup >= steps, || format!("--warmup {warmup} must be less than --steps {steps}"))?;
        }
        for (flag, on) in [("sequence", self.sequence_parallel), ("loss", self.loss_parallel)] {
            fail_if(on && mesh.get("tp").is_none(), || {
                format!("--{flag}-parallel needs a dim `tp` in --mesh, which is {mesh}")
            })?;
        }
        fail_if(self.fsdp && mesh.get("dp").is_none(), || {
            format!("--fsdp needs a dim `dp` in --mesh, which is {mesh}")
        })?;
        fail_if(self.verify && self.dropout > 0.0 && dp > 1, || {
            format!(
                "--verify cannot be used with --dropout {} and several replicas: each replica drops other elements",
                self.dropout
            )
        })
    }

    /// Returns the file for the loss curve, if there is one.
    pub(crate) fn svg_path(&self) -> Option<&Path> {
        Some(&*self.svg).filter(|path| !path.as_os_str().is_empty())
    }

    /// Returns the approximate number of parameters.
    fn weights(&self) -> f64 {
        let (layers, dim) = (self.layers as f64, self.dim as f64);
        12.0 * layers * dim * dim + (512.0 + self.seq as f64) * dim
    }

    /// Returns the arguments of the model. Its tokens are bytes.
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

    /// Returns the learning rate schedule over all steps.
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

fn fail_if(is_wrong: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if is_wrong { Err(message()) } else { Ok(()) }
}
