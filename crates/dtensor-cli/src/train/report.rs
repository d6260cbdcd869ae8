//! What is said before and after training.

use dtensor::comm::WorldKind;

use super::options::{Options, Precision};
use super::plot;
use super::replica::Training;
use super::sample::readable;
use super::text::Text;
use crate::say::say;

/// What one rank has found.
pub(crate) struct Summary {
    /// The number of weights of the whole model.
    pub(crate) weights: usize,
    pub(crate) training: Training,
    /// The loss of what was held out.
    pub(crate) validation: f32,
    /// The prompt and what the model wrote.
    pub(crate) sample: Vec<u8>,
}

impl Summary {
    /// The mean of the last losses: a single batch says little.
    pub(crate) fn last_loss(&self) -> f32 {
        let losses = &self.training.losses;
        let last = &losses[losses.len() - (losses.len() / 20).max(1)..];
        last.iter().sum::<f32>() / last.len() as f32
    }

    pub(crate) fn tokens_per_second(&self, options: &Options) -> f64 {
        let tokens = self.training.losses.len() * options.batch * options.seq;
        tokens as f64 / self.training.seconds
    }
}

/// What is about to happen.
pub(crate) fn introduce(options: &Options, text: &Text, world: WorldKind) {
    let ranks = match (options.mesh.ranks(), world) {
        (1, _) => "1 rank".to_owned(),
        (n, WorldKind::Threads) => format!("{n} threads"),
        (n, _) => format!("{n} processes"),
    };
    let ways = [
        (options.sequence_parallel, ", sequence parallel"),
        (options.loss_parallel, ", loss parallel"),
        (options.dtype == Precision::Bf16, ", bf16"),
        (options.checkpoint_activations, ", activations computed again"),
    ];
    let ways: String = ways.iter().filter(|(on, _)| *on).map(|(_, way)| *way).collect();
    say!(
        "A transformer of {} layers of size {} learns {} ({}) byte by byte on {ranks}, {}{ways}.",
        options.layers,
        options.dim,
        text.name,
        bytes(text.len()),
        options.mesh,
    );
}

/// What has come of it.
pub(crate) fn print(options: &Options, summary: &Summary) {
    let Summary { weights, training, validation, sample } = summary;
    say!("\nLoss, by step:");
    plot::lines(&training.losses, 64, 12).iter().for_each(|line| say!("{line}"));
    let table = training.traffic.table();
    if table.is_empty() {
        say!("\nNothing is communicated.");
    } else {
        say!("\nWhat a rank communicates in one step:");
        table.iter().for_each(|line| say!("  {line}"));
    }
    if options.sample > 0 {
        say!("\nA sample:");
        readable(sample).lines().for_each(|line| say!("  {line}"));
    }
    let steps = training.losses.len();
    say!(
        "\n{} weights, {steps} steps in {:.1} s, {} tokens/s. Loss {:.3} -> {:.3}, {validation:.3} on what was held out.",
        count(*weights as f64),
        training.seconds,
        count(summary.tokens_per_second(options)),
        training.losses[0],
        summary.last_loss(),
    );
}

/// A number of things for people.
pub(crate) fn count(n: f64) -> String {
    match n {
        _ if n < 1e4 => format!("{n:.0}"),
        _ if n < 1e6 => format!("{:.1} k", n / 1e3),
        _ => format!("{:.1} M", n / 1e6),
    }
}

/// A number of bytes for people.
pub(crate) fn bytes(n: usize) -> String {
    indicatif::HumanBytes(n as u64).to_string()
}
