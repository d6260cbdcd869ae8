//! [`Replica`]: the model on a mesh, its optimizer, and the training loop.

use std::time::Instant;

use dtensor::checkpoint::Checkpoint;
use dtensor::models::{Transformer, TransformerParallel};
use dtensor::optim::{AdamW, AdamWOptions, ClipOptions, Schedule, clip_grad_norm};
use dtensor::parallel::{DataParallel, DataParallelOptions, FullyShardOptions, fully_shard, no_sync};
use dtensor::prelude::*;
use dtensor::{Generator, default_device, on_device, set_rng_state, with_generator};

use super::checkpoints::{Progress, Resume, Saver};
use super::options::{Options, Precision};
use super::progress::ProgressBar;
use super::text::{Batch, Text};
use super::traffic::Traffic;

/// The uses of random numbers. Each has its own generator.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Parameters,
    Batches,
    Dropout,
    Sample,
}

/// Returns the generator for a purpose, the same on all ranks.
pub(crate) fn generator(options: &Options, purpose: Purpose) -> Generator {
    Generator::new(options.seed).fork(purpose as u64)
}

/// How the replicas of a model share its parameters.
enum Replication {
    /// Each has all of them.
    Copies(DataParallel),
    /// Each has a shard of them.
    Shards,
}

/// A replica of the model: this rank's shards of it, and the optimizer.
pub(crate) struct Replica<'a> {
    pub(crate) model: Transformer,
    options: &'a Options,
    optimizer: AdamW,
    schedule: Schedule,
    /// Data parallelism and its group, if there are several replicas.
    data_parallel: Option<(Replication, Group)>,
    /// All ranks, if the model is on a mesh.
    ranks: Option<Group>,
    weights: usize,
}

impl<'a> Replica<'a> {
    /// Creates the model on a mesh with the dims of `--mesh`, of these ranks, or on this rank only if `on` is `None`.
    pub(crate) fn new(options: &'a Options, on: Option<(&DeviceMesh, &Group)>) -> Result<Self> {
        let (mesh, ranks) = on.unzip();
        // Without memory at first, so that no rank ever has more than its shards.
        let mut model = on_device(Device::Meta, || Transformer::new(&options.model()))?;
        let weights = model.parameters().iter().map(|p| p.get().numel()).sum();
        let dim =
            |name: &str| mesh.filter(|_| options.mesh.get(name).is_some()).map(|mesh| mesh[name].clone());
        if let Some(tp) = dim("tp") {
            let Options { sequence_parallel, loss_parallel, .. } = *options;
            let parallel = TransformerParallel { sequence_parallel, loss_parallel };
            model = Transformer::parallelize(model, &tp, parallel)?;
        }
        let dp = dim("dp").filter(|dp| dp.size() > 1);
        if let Some(dp) = dp.as_ref().filter(|_| options.fsdp) {
            for block in &model.layers {
                fully_shard(block, dp, FullyShardOptions::default())?;
            }
            fully_shard(&model, dp, FullyShardOptions::default())?;
        }
        model.to_empty(default_device()?)?;
        with_generator(&mut generator(options, Purpose::Parameters), || model.reset_parameters())?;
        let data_parallel = match dp {
            Some(dp) => {
                let replication = match options.fsdp {
                    true => Replication::Shards,
                    false => {
                        let same = DataParallelOptions { broadcast: false, ..DataParallelOptions::default() };
                        Replication::Copies(DataParallel::new(&model, &dp, same)?)
                    }
                };
                Some((replication, dp.group(())?.clone()))
            }
            None => None,
        };
        // Norms and biases have no weight decay.
        let (matrices, rest): (Vec<_>, Vec<_>) =
            model.parameters().into_iter().partition(|parameter| parameter.get().ndim() > 1);
        let adam = AdamWOptions {
            lr: options.lr,
            betas: (0.9, 0.98),
            weight_decay: options.weight_decay,
            ..AdamWOptions::default()
        };
        let optimizer = AdamW::new(matrices, adam)?;
        optimizer.add_group(rest, AdamWOptions { weight_decay: 0.0, ..adam })?;
        let (schedule, ranks) = (options.schedule(), ranks.cloned());
        let replica = Replica { model, options, optimizer, schedule, data_parallel, ranks, weights };
        set_rng_state(replica.dropout_generator().state());
        Ok(replica)
    }

    /// Returns the generator for dropout. Each replica drops other elements.
    fn dropout_generator(&self) -> Generator {
        generator(self.options, Purpose::Dropout).fork(self.index().0 as u64)
    }

    /// Lists what a checkpoint of the training has besides its progress.
    fn contents(&self) -> Checkpoint<'_> {
        let contents = Checkpoint::new().model(&self.model).optimizer(&self.optimizer).generator();
        match &self.ranks {
            Some(ranks) => contents.group(ranks),
            None => contents,
        }
    }

    /// Loads a checkpoint. Returns the progress of the training that was saved.
    pub(crate) fn resume(&self, resume: &Resume) -> Result<Progress> {
        let loaded = self.contents().load(&resume.path)?;
        if !loaded.generator {
            // The mesh is another one. Dropout must not repeat the numbers of the steps so far.
            set_rng_state(self.dropout_generator().fork(resume.step).state());
        }
        Progress::of(&loaded)
    }

    /// Returns the number of parameters of the full model.
    pub(crate) fn weights(&self) -> usize {
        self.weights
    }

    /// Returns the index of this replica and the number of replicas.
    fn index(&self) -> (usize, usize) {
        self.data_parallel.as_ref().map_or((0, 1), |(_, group)| (group.rank(), group.size()))
    }

    /// Averages a number over the replicas.
    fn average(&self, x: f32) -> Result<f32> {
        match &self.data_parallel {
            Some((_, group)) => group.all_reduce(&Tensor::scalar(x)?, ReduceOp::Avg)?.item::<f32>(),
            None => Ok(x),
        }
    }

    /// Computes the logits of the byte that follows each of `bytes`, which has shape `[rows, length]`.
    pub(crate) fn logits(&self, bytes: &Tensor) -> Result<Tensor> {
        let forward = || self.model.forward(bytes);
        match self.options.dtype {
            Precision::F32 => forward(),
            Precision::Bf16 => autocast(DType::BF16, forward),
        }
    }

    /// Computes the sum of the losses of a batch.
    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let (bytes, next) = batch.tensors()?;
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..CrossEntropyOptions::default() };
        let loss = || self.logits(&bytes)?.flatten(0, 1)?.cross_entropy(&next.flatten_all()?, options);
        if self.options.loss_parallel && self.model.output.weight.get().is_distributed() {
            loss_parallel(loss)
        } else {
            loss()
        }
    }

    /// Takes a training step, and returns the mean loss of the batch before the step.
    fn step(&self, number: u64, batch: &Batch) -> Result<f32> {
        self.optimizer.zero_grad();
        let (index, replicas) = self.index();
        let own = batch.slice(index, replicas);
        // With this factor, the average over replicas is the mean over the full batch, even if the slices have different sizes.
        let weight = replicas as f64 / batch.targets() as f64;
        let mut total = 0.0;
        for pass in 0..self.options.accumulate {
            let loss = self.loss(&own.slice(pass, self.options.accumulate))?.mul(weight)?;
            // Sharded gradients are reduced in backward: in that of the last pass, for all passes.
            if pass + 1 < self.options.accumulate {
                no_sync(|| loss.backward())?
            } else {
                loss.backward()?
            }
            total += loss.item::<f32>()?;
        }
        if let Some((Replication::Copies(replicas), _)) = &self.data_parallel {
            replicas.average_gradients()?;
        }
        if self.options.clip > 0.0 {
            clip_grad_norm(&self.optimizer.parameters(), self.options.clip, ClipOptions::default())?;
        }
        self.schedule.apply(&self.optimizer, number)?;
        self.optimizer.step()?;
        self.average(total)
    }

    /// Computes the mean loss on the held-out text.
    pub(crate) fn validate(&self, text: &Text) -> Result<f32> {
        self.model.eval();
        let (all, (index, replicas)) = (text.validation(), self.index());
        let own = all.slice(index, replicas);
        // All replicas take as many passes as the one with the most rows, because a pass may gather parameters from all of them.
        let passes = all.rows().div_ceil(replicas).div_ceil((self.options.batch / replicas).max(1));
        let mut total = 0.0;
        for pass in 0..passes {
            total += no_grad(|| self.loss(&own.slice(pass, passes)))?.item::<f32>()?;
        }
        self.model.train();
        self.average(total * replicas as f32 / all.targets() as f32)
    }
}

/// How a training ended.
pub(crate) enum End {
    Finished,
    /// The loss of a step, or the validation loss (`step` is `None`), was NaN or infinite.
    Diverged {
        loss: f32,
        step: Option<u64>,
    },
}

/// The result of a training.
pub(crate) struct Training {
    /// The loss of each step, those before `--resume` too.
    pub(crate) losses: Vec<f32>,
    /// The number of steps taken before `--resume`.
    resumed: usize,
    pub(crate) end: End,
    pub(crate) seconds: f64,
    /// The collectives of this rank in the first step.
    pub(crate) traffic: Traffic,
}

impl Training {
    /// Trains up to step `steps`, from the start or from saved progress. With a title, shows progress.
    pub(crate) fn run(
        replica: &Replica<'_>,
        text: &Text,
        steps: u64,
        title: Option<&str>,
        progress: Option<Progress>,
        mut saver: Option<Saver<'_>>,
    ) -> Result<Training> {
        let options = replica.options;
        let new = || Progress { losses: Vec::new(), batches: generator(options, Purpose::Batches) };
        let mut progress = progress.unwrap_or_else(new);
        let resumed = progress.losses.len();
        let mut traffic = Traffic::default();
        let mut bar = ProgressBar::new(title, resumed as u64, steps, options.batch * options.seq);
        let start = Instant::now();
        let mut end = End::Finished;
        for step in resumed as u64..steps {
            let batch = text.draw(options.batch, &mut progress.batches)?;
            let loss = if step == resumed as u64 {
                let mode = CommDebugMode::new();
                let loss = mode.run(|| replica.step(step, &batch))?;
                traffic = Traffic::of(&mode.collectives());
                loss
            } else {
                replica.step(step, &batch)?
            };
            progress.losses.push(loss);
            if !loss.is_finite() {
                end = End::Diverged { loss, step: Some(step + 1) };
                break;
            }
            bar.step(loss, traffic.bytes());
            if let Some(saver) = &mut saver {
                saver.after_step(replica.contents(), &progress)?;
            }
        }
        if let Some(saver) = &mut saver {
            saver.finish()?;
        }
        bar.finish();
        let seconds = start.elapsed().as_secs_f64();
        Ok(Training { losses: progress.losses, resumed, end, seconds, traffic })
    }

    /// Returns the number of steps taken since `--resume`.
    pub(crate) fn steps(&self) -> usize {
        self.losses.len() - self.resumed
    }
}
