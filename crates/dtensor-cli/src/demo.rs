//! `dtensor demo`: the two-layer network that PyTorch tests its distributed tensors with, on a toy problem.

use std::error::Error;
use std::time::{Duration, Instant};

use clap::Args;
use dtensor::models::MLPModule;
use dtensor::optim::Sgd;
use dtensor::prelude::*;
use indicatif::{ProgressBar, ProgressStyle};

/// How long and how fast to learn.
#[derive(Args)]
pub(crate) struct Options {
    /// Training steps
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Examples per step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Units of the hidden layer
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    hidden: u64,
    /// Learning rate
    #[arg(long, default_value_t = 0.5)]
    rate: f64,
    /// Seed of weights and examples
    #[arg(long, default_value_t = 5)]
    seed: u64,
}

const FEATURES: usize = 10;

/// What is to be learned: each feature's absolute difference from its neighbour.
fn target(x: &Tensor) -> Result<Tensor> {
    let (head, tail) = (x.narrow(1, 0, 1)?, x.narrow(1, 1, FEATURES - 1)?);
    x.sub(&Tensor::cat(&[&tail, &head], 1)?)?.abs()
}

pub(crate) fn run(options: &Options) -> std::result::Result<(), Box<dyn Error>> {
    manual_seed(options.seed);
    let model = MLPModule::with_sizes(FEATURES, options.hidden as usize, FEATURES, true)?;
    let optimizer = Sgd::new(model.parameters(), options.rate)?;
    let weights: usize = model.parameters().iter().map(|p| p.get().numel()).sum();
    println!(
        "An MLP of {FEATURES}-{}-{FEATURES} ({weights} weights) learns |x[i] - x[i+1]|.",
        options.hidden
    );

    let bar = ProgressBar::new(options.steps)
        .with_style(ProgressStyle::with_template("{bar:40.cyan/blue} {pos}/{len} steps  {msg}  {per_sec}")?);
    let began = Instant::now();
    let report_every = options.steps.div_ceil(10);
    let mut curve = Vec::new();
    for step in 1..=options.steps {
        let x = Tensor::rand([options.batch as usize, FEATURES], DType::F32)?;
        let loss = model.forward(&x)?.mse_loss(&target(&x)?, Reduction::Mean)?;
        optimizer.zero_grad();
        loss.backward()?;
        optimizer.step()?;
        let loss = loss.item::<f32>()?;
        if !loss.is_finite() {
            bar.abandon();
            return Err(format!("the loss is {loss} at step {step}: try a smaller --rate").into());
        }
        if step == 1 || step % report_every == 0 || step == options.steps {
            curve.push((step, loss));
            let line = format!("step {step:>6}  loss {loss:.5}");
            if bar.is_hidden() { println!("{line}") } else { bar.println(&line) }
        }
        bar.set_message(format!("loss {loss:.5}"));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let elapsed = began.elapsed();
    let ((_, first), (_, last)) = (curve[0], curve[curve.len() - 1]);
    println!(
        "Loss {first:.5} -> {last:.5} in {:.2} s ({:.1} µs per step).",
        elapsed.as_secs_f64(),
        (elapsed / options.steps.min(u32::MAX as u64) as u32).max(Duration::from_nanos(1)).as_secs_f64()
            * 1e6,
    );
    Ok(())
}
