//! `dtensor train`: trains a small language model on the bytes of a book, on a mesh of ranks.

pub(crate) mod checkpoints;
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
use dtensor::{Device, DeviceMesh, on_device, set_num_threads};

pub(crate) use options::Options;

use crate::failure::{is_first_process, usage_error};
use crate::say::say;
use checkpoints::{Resume, Saver};
use output::Outputs;
use replica::{End, Replica, Training};
use report::Summary;
use text::Text;

/// The number of steps that `--verify` repeats on one rank.
const VERIFIED: u64 = 50;

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    options.check().map_err(usage_error)?;
    options.device.check().map_err(|error| usage_error(format!("--device {}: {error}", options.device)))?;
    let text = Text::read(options.text.as_deref(), options.seq).map_err(usage_error)?;
    let resume = Resume::find(options).map_err(usage_error)?;
    checkpoints::check_folder(options, resume.as_ref()).map_err(usage_error)?;
    // Open the files before the ranks start, because an error on one rank would interrupt the others.
    let outputs =
        if is_first_process() { Outputs::create(options).map_err(usage_error)? } else { Outputs::default() };
    let worlds = World::from_env(options.mesh.ranks()).map_err(|error| usage_error(error.to_string()))?;
    let (rank, size) = (worlds[0].rank(), worlds[0].size());
    let is_first = rank == 0;
    if size != options.mesh.ranks() {
        // All ranks find this error. After MPI has started, they can all end by themselves, and only the first prints it.
        if !is_first {
            return Ok(());
        }
        let (mesh, needed) = (&options.mesh, options.mesh.ranks());
        let message = format!("--mesh {mesh} needs {needed} ranks, but mpirun started {size}");
        return Err(usage_error(message).into());
    }
    if is_first {
        report::introduce(options, &text, worlds[0].kind());
        if let Some(Resume { path, step }) = &resume {
            say!("Continuing from step {step}, {}.", path.display());
        }
    }
    let results = run_ranks(worlds, |world| {
        on_device(options.device.of_rank(world.rank()), || train(&world, options, &text, resume.as_ref()))
    })?;
    let Some(summary) = results.into_iter().next().filter(|_| is_first) else { return Ok(()) };
    if let End::Diverged { loss, step } = summary.training.end {
        let place = step.map_or("on the held-out text".to_owned(), |step| format!("at step {step}"));
        return Err(format!("the loss is {loss} {place}: try a smaller --lr or --weight-decay").into());
    }
    let written = outputs.write(options, &summary)?;
    report::print(options, &summary);
    written.iter().for_each(|line| say!("{line}"));
    if options.verify { verify(options, &text, &summary.training.losses) } else { Ok(()) }
}

/// Trains on one rank.
fn train(world: &World, options: &Options, text: &Text, resume: Option<&Resume>) -> dtensor::Result<Summary> {
    if world.kind() != WorldKind::Threads && world.size() > 1 {
        set_num_threads(1);
    }
    let mesh = DeviceMesh::new(world, options.mesh.sizes(), &options.mesh.names()[..])?;
    let replica = Replica::new(options, Some((&mesh, world.group())))?;
    let progress = resume.map(|resume| replica.resume(resume)).transpose()?;
    let title = (world.rank() == 0).then_some("training");
    let saver = Saver::new(options);
    let mut training = Training::run(&replica, text, options.steps, title, progress, saver)?;
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

/// Trains the same model on one rank, and returns an error if a loss differs too much.
fn verify(options: &Options, text: &Text, losses: &[f32]) -> Result<(), Box<dyn Error>> {
    let steps = options.steps.min(VERIFIED);
    let expected = on_device(Device::Cpu, || {
        let single = Replica::new(options, None)?;
        Training::run(&single, text, steps, Some("on one rank"), None, None)
    })?;
    let expected = expected.losses;
    let differences = losses.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let (mut largest, mut at) = (0f32, 0);
    for (step, difference) in differences.enumerate() {
        // NaN counts as the largest difference.
        if difference.is_nan() || difference > largest {
            (largest, at) = (difference, step + 1);
        }
    }
    let allowed = options.dtype.tolerance(options.device);
    let found = format!("the losses of {steps} steps differ from those on one rank by at most {largest:.2e}");
    if largest <= allowed {
        say!("Verified: {found} (allowed: {allowed:e}).");
        return Ok(());
    }
    Err(format!("{found}, at step {at}; {allowed:e} is allowed").into())
}
