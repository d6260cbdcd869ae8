//! The program `dtensor`: training of a small language model, and the benchmarks.

mod allocator;
mod bench;
mod complaint;
mod say;
mod train;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "dtensor",
    version,
    about = "Distributed tensors with automatic gradients: training on a mesh of ranks, and benchmarks",
    arg_required_else_help = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small language model on a mesh of ranks and watch the loss fall.
    Train(Box<train::Options>),
    /// Measure, alone or beside PyTorch.
    Bench(Box<bench::Options>),
}

/// Without arguments, there is help.
const HELP: ErrorKind = ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;

fn main() -> ExitCode {
    allocator::keep_pages();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if !error.use_stderr() || error.kind() == HELP => error.exit(),
        Err(error) => return complaint::of_arguments(&error),
    };
    let result = match arguments.command {
        Command::Train(options) => train::run(&options),
        Command::Bench(options) => bench::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complaint::complain(&*error),
    }
}
