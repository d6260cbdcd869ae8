//! A model on the mesh, and how it is trained.

use std::time::Instant;

use dtensor::models::{Transformer, TransformerParallel};
use dtensor::optim::{AdamW, AdamWOptions, ClipOptions, Schedule, clip_grad_norm};
use dtensor::parallel::{DataParallel, DataParallelOptions};
use dtensor::prelude::*;
use dtensor::{Generator, set_rng_state, with_generator};

use super::options::{Options, Precision};
use super::progress::Progress;
use super::text::{Batch, Text};
use super::traffic::Traffic;

/// What random numbers are drawn for, each from a generator of its own.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Parameters,
    Batches,
    Dropout,
    Sample,
}

/// The generator for a purpose, the same on all ranks.
pub(crate) fn generator(options: &Options, purpose: Purpose) -> Generator {
    Generator::new(options.seed).fork(purpose as u64)
}

/// The model as this rank has it.
pub(crate) struct Replica<'a> {
    pub(crate) model: Transformer,
    options: &'a Options,
    optimizer: AdamW,
    schedule: Schedule,
    /// The other replicas, if there are some.
    others: Option<(DataParallel, Group)>,
    weights: usize,
}

impl<'a> Replica<'a> {
    /// The model on a mesh with the dims that the options name, or on this rank alone.
    pub(crate) fn new(options: &'a Options, mesh: Option<&DeviceMesh>) -> Result<Self> {
        let draw = || Transformer::new(&options.model());
        let mut model = with_generator(&mut generator(options, Purpose::Parameters), draw)?;
        let weights = model.parameters().iter().map(|p| p.get().numel()).sum();
        let dim =
            |name: &str| mesh.filter(|_| options.mesh.get(name).is_some()).map(|mesh| mesh[name].clone());
        if let Some(tp) = dim("tp") {
            let Options { sequence_parallel, loss_parallel, .. } = *options;
            let ways = TransformerParallel { sequence_parallel, loss_parallel };
            model = Transformer::parallelize(model, &tp, ways)?;
        }
        let others = match dim("dp").filter(|dp| dp.size() > 1) {
            Some(dp) => {
                let replicas = DataParallel::new(&model, &dp, DataParallelOptions::default())?;
                Some((replicas, dp.group(())?.clone()))
            }
            None => None,
        };
        let number = others.as_ref().map_or(0, |(replicas, _)| replicas.rank());
        set_rng_state(generator(options, Purpose::Dropout).fork(number as u64).state());

        // Norms and biases do not decay.
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
        Ok(Replica { model, options, optimizer, schedule: options.schedule(), others, weights })
    }

    /// The number of weights of the whole model.
    pub(crate) fn weights(&self) -> usize {
        self.weights
    }

    /// Which replica this is, of how many.
    fn place(&self) -> (usize, usize) {
        self.others.as_ref().map_or((0, 1), |(replicas, _)| (replicas.rank(), replicas.size()))
    }

    /// The average of a number over the replicas.
    fn average(&self, x: f32) -> Result<f32> {
        match &self.others {
            Some((_, group)) => group.all_reduce(&Tensor::scalar(x)?, ReduceOp::Avg)?.item::<f32>(),
            None => Ok(x),
        }
    }

    /// The scores of what may follow each of the bytes `[rows, length]`.
    pub(crate) fn scores(&self, bytes: &Tensor) -> Result<Tensor> {
        let forward = || self.model.forward(bytes);
        match self.options.dtype {
            Precision::F32 => forward(),
            Precision::Bf16 => autocast(DType::BF16, forward),
        }
    }

    /// The sum of the losses of some sequences.
    fn loss(&self, part: &Batch) -> Result<Tensor> {
        let (bytes, next) = part.tensors()?;
        let options = CrossEntropy { reduction: Reduction::Sum, ..CrossEntropy::default() };
        let loss = || self.scores(&bytes)?.flatten(0, 1)?.cross_entropy(&next.flatten_all()?, options);
        if self.options.loss_parallel && self.model.output.weight.get().is_distributed() {
            loss_parallel(loss)
        } else {
            loss()
        }
    }

    /// Takes a step, and gives the mean loss of the batch before it.
    fn step(&self, number: u64, batch: &Batch) -> Result<f32> {
        self.optimizer.zero_grad();
        let (replica, replicas) = self.place();
        let part = batch.part(replica, replicas);
        // Averaged over the replicas, the losses are those of the whole batch, however large each part is.
        let weight = replicas as f64 / batch.guesses() as f64;
        let mut total = 0.0;
        for pass in 0..self.options.accumulate {
            let loss = self.loss(&part.part(pass, self.options.accumulate))?.mul(weight)?;
            loss.backward()?;
            total += loss.item::<f32>()?;
        }
        if let Some((replicas, _)) = &self.others {
            replicas.average_gradients()?;
        }
        if self.options.clip > 0.0 {
            clip_grad_norm(&self.optimizer.parameters(), self.options.clip, ClipOptions::default())?;
        }
        self.schedule.apply(&self.optimizer, number)?;
        self.optimizer.step()?;
        self.average(total)
    }

    /// The mean loss of what was held out.
    pub(crate) fn validate(&self, text: &Text) -> Result<f32> {
        self.model.eval();
        let (all, (replica, replicas)) = (text.validation(), self.place());
        let part = all.part(replica, replicas);
        let passes = part.rows().div_ceil((self.options.batch / replicas).max(1));
        let mut total = 0.0;
        for pass in 0..passes {
            total += no_grad(|| self.loss(&part.part(pass, passes)))?.item::<f32>()?;
        }
        self.model.train();
        self.average(total * replicas as f32 / all.guesses() as f32)
    }
}

/// How a training ended.
pub(crate) enum End {
    Finished,
    /// A loss was no number: that of a step, or that of what was held out.
    Diverged {
        loss: f32,
        step: Option<u64>,
    },
}

/// What came of a training.
pub(crate) struct Training {
    /// The loss of each step.
    pub(crate) losses: Vec<f32>,
    pub(crate) end: End,
    pub(crate) seconds: f64,
    /// What this rank communicated in one step.
    pub(crate) traffic: Traffic,
}

impl Training {
    /// Takes so many steps. With a title, shows how it goes.
    pub(crate) fn run(
        replica: &Replica<'_>,
        options: &Options,
        text: &Text,
        steps: u64,
        title: Option<&str>,
    ) -> Result<Training> {
        let mut batches = generator(options, Purpose::Batches);
        let (mut losses, mut traffic) = (Vec::new(), Traffic::default());
        let mut progress = Progress::new(title, steps, options.batch * options.seq);
        let began = Instant::now();
        let mut end = End::Finished;
        for step in 0..steps {
            let batch = text.draw(options.batch, &mut batches)?;
            let loss = if step == 0 {
                let mode = CommDebugMode::new();
                let loss = mode.run(|| replica.step(step, &batch))?;
                traffic = Traffic::of(&mode.collectives());
                loss
            } else {
                replica.step(step, &batch)?
            };
            losses.push(loss);
            if !loss.is_finite() {
                end = End::Diverged { loss, step: Some(step + 1) };
                break;
            }
            progress.step(loss, traffic.bytes());
        }
        progress.finish();
        Ok(Training { losses, end, seconds: began.elapsed().as_secs_f64(), traffic })
    }
}
