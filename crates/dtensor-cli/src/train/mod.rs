//! `dtensor train`: a small language model learns a book, byte by byte, on a mesh of ranks.

mod mesh;
mod options;
mod output;
mod plot;
mod progress;
mod replica;
mod report;
mod sample;
mod svg;
mod text;
mod traffic;

use std::error::Error;

use dtensor::comm::{World, WorldKind, run as run_ranks};
use dtensor::{DeviceMesh, set_num_threads};

pub(crate) use options::Options;

use crate::complaint::{refused, speaks_for_all};
use crate::say::say;
use output::Outputs;
use replica::{End, Replica, Training};
use report::Summary;
use text::Text;

/// How many steps are made again on one rank to compare, and how far apart losses may then be.
const VERIFIED: u64 = 50;

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    options.check().map_err(refused)?;
    let text = Text::read(options.text.as_deref(), options.seq).map_err(refused)?;
    // Before there are ranks: what one of them alone could not write would be news to the others.
    let outputs =
        if speaks_for_all() { Outputs::create(options).map_err(refused)? } else { Outputs::default() };
    let worlds = World::from_env(options.mesh.ranks()).map_err(|error| refused(error.to_string()))?;
    let (rank, size) = (worlds[0].rank(), worlds[0].size());
    let leads = rank == 0;
    if size != options.mesh.ranks() {
        // All of them know it, and none is stopped any more when another fails.
        if !leads {
            return Ok(());
        }
        let (mesh, needed) = (&options.mesh, options.mesh.ranks());
        return Err(refused(format!("--mesh {mesh} needs {needed} ranks, but mpirun started {size}")).into());
    }
    if leads {
        report::introduce(options, &text, worlds[0].kind());
    }
    let results = run_ranks(worlds, |world| train(&world, options, &text))?;
    let Some(summary) = results.into_iter().next().filter(|_| leads) else { return Ok(()) };
    if let End::Diverged { loss, step } = summary.training.end {
        let place = step.map_or("on what was held out".to_owned(), |step| format!("at step {step}"));
        return Err(format!("the loss is {loss} {place}: try a smaller --lr or --weight-decay").into());
    }
    let written = outputs.write(options, &summary)?;
    report::print(options, &summary);
    written.iter().for_each(|line| say!("{line}"));
    if options.verify { verify(options, &text, &summary.training.losses) } else { Ok(()) }
}

/// What one rank does.
fn train(world: &World, options: &Options, text: &Text) -> dtensor::Result<Summary> {
    if world.kind() != WorldKind::Threads && world.size() > 1 {
        set_num_threads(1);
    }
    let mesh = DeviceMesh::new(world, options.mesh.sizes(), &options.mesh.names()[..])?;
    let replica = Replica::new(options, Some(&mesh))?;
    let leads = world.rank() == 0;
    let mut training = Training::run(&replica, options, text, options.steps, leads.then_some("training"))?;
    let (mut validation, mut sample) = (f32::NAN, Vec::new());
    if matches!(training.end, End::Finished) {
        validation = replica.validate(text)?;
        if validation.is_finite() {
            sample = sample::sample(&replica, options)?;
        } else {
            training.end = End::Diverged { loss: validation, step: None };
        }
    }
    Ok(Summary { weights: replica.weights(), training, validation, sample })
}

/// Trains the same model on one rank, and compares the losses.
fn verify(options: &Options, text: &Text, losses: &[f32]) -> Result<(), Box<dyn Error>> {
    let alone = Replica::new(options, None)?;
    let steps = options.steps.min(VERIFIED);
    let expected = Training::run(&alone, options, text, steps, Some("on one rank"))?.losses;
    let apart = losses.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let (mut worst, mut at) = (0f32, 0);
    for (step, apart) in apart.enumerate() {
        // What is no number is as far apart as can be.
        if apart.is_nan() || apart > worst {
            (worst, at) = (apart, step + 1);
        }
    }
    let allowed = options.dtype.tolerance();
    let found =
        format!("the largest difference of a loss from that of one rank, in {steps} steps, is {worst:.2e}");
    if worst <= allowed {
        say!("Verified: {found} (allowed: {allowed:e}).");
        return Ok(());
    }
    Err(format!("{found}, at step {at}: more than the {allowed:e} allowed").into())
}
