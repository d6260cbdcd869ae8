//! The program `dtensor`: trains a small language model, shows checkpoints, and runs the benchmarks.

mod allocator;
mod bench;
mod checkpoint;
mod device;
mod failure;
mod say;
mod train;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "dtensor",
    version,
    about = "Distributed tensors with automatic gradients: train a model on a mesh of ranks, look at checkpoints, run benchmarks",
    arg_required_else_help = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small language model on a mesh of ranks.
    Train(Box<train::Options>),
    /// Show, verify or merge checkpoints and other safetensors files.
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Run benchmarks, alone or side by side with PyTorch.
    Bench(Box<bench::Options>),
}

/// clap reports this if there are no arguments; the program then prints its help.
const HELP: ErrorKind = ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;

fn main() -> ExitCode {
    allocator::keep_pages();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if !error.use_stderr() || error.kind() == HELP => error.exit(),
        Err(error) => return failure::report_arguments(&error),
    };
    let result = match arguments.command {
        Command::Train(options) => train::run(&options),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Bench(options) => bench::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&*error),
    }
}
