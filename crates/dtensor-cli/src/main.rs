//! The program `dtensor`: a demonstration and the benchmarks.

mod bench;
mod demo;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

// Results are large and short-lived. An allocator that keeps their pages saves faulting them in again each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(
    name = "dtensor",
    version,
    about = "Tensors with automatic gradients: a demonstration and benchmarks",
    arg_required_else_help = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small network on a toy problem and watch the loss fall.
    Demo(demo::Options),
    /// Measure, alone or beside PyTorch.
    Bench(Box<bench::Options>),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo(options) => demo::run(&options),
        Command::Bench(options) => bench::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
