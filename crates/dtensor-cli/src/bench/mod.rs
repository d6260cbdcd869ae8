//! `dtensor bench`: workloads timed here and, on request, in PyTorch in the same run.

mod candle;
mod kernels;
mod peer;
mod timing;

use std::error::Error;

use clap::Subcommand;

/// What to measure.
#[derive(Subcommand)]
pub(crate) enum Workload {
    /// Each local operator on one thread.
    Kernels(kernels::Options),
}

pub(crate) fn run(workload: &Workload) -> Result<(), Box<dyn Error>> {
    match workload {
        Workload::Kernels(options) => kernels::run(options),
    }
}
