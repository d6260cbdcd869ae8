//! `dtensor bench`: workloads timed here and, on request, in PyTorch in the same run.

mod all;
mod collective;
mod contest;
mod copy;
mod dispatch;
mod kernels;
mod machine;
mod memory;
mod models;
mod peer;
mod plan;
mod ranks;
mod redistribute;
mod row;
mod scaling;
mod startup;
mod timing;
mod train;

use std::error::Error;

use clap::{Args, Subcommand};

/// One workload, or all that are compared with PyTorch.
#[derive(Args)]
#[command(
    arg_required_else_help = true,
    args_conflicts_with_subcommands = true,
    after_help = "The ratio is dtensor / PyTorch: below 1 is faster, or smaller."
)]
pub(crate) struct Options {
    #[command(flatten)]
    all: all::All,
    #[command(subcommand)]
    workload: Option<Workload>,
}

/// What to measure.
#[derive(Subcommand)]
pub(crate) enum Workload {
    /// Each local operator on one thread.
    Kernels(kernels::Options),
    /// Each collective that changes how a tensor lies on several ranks.
    ///
    /// A row is the median time from the first rank that starts to the last that is done.
    ///
    /// Rows of threads have a `bound_fraction`: the time that their bytes would take at the rate at which this machine
    /// copies memory, measured in the same run, over the time measured. The bytes are those that all ranks together read
    /// and write if each makes a result of its own: with S bytes and n ranks 2nS for all_gather and all_reduce, (n + 1)S
    /// for reduce_scatter and 2S for all_to_all. 1 is as fast as a copy; more is possible, because threads can share a
    /// result.
    Redistribute(redistribute::Options),
    /// The fixed cost of an operator: tiny tensors, no communication.
    ///
    /// A row is one operator, the mean of 1,000, with its result dropped. `local_add` is on a tensor that lies on no mesh:
    /// what another add takes beyond it is the cost of dispatch. In the world `simulated` one rank runs while the
    /// others do nothing, the peer's too. In the world `threads` all ranks run at once, and the time is from the first that
    /// starts to the last that is done.
    Dispatch(dispatch::Options),
    /// A step of training an MLP that is cut into columns and rows.
    ///
    /// Relu between them, SGD, the sum as the loss. A row is the median step, from the first rank that starts to the last
    /// that is done; `loss` is that of the third step, and the peer must come to the same.
    Mlp(train::Options),
    /// A step of training a transformer, sequence- and tensor-parallel.
    ///
    /// Cross-entropy and AdamW. Rows are as those of `mlp`.
    Transformer(train::Options),
    /// The time until ranks can work together.
    ///
    /// Of new processes: from when the last of them begins to make a world until all have a mesh and have met at a barrier.
    Startup(startup::Options),
    /// The most memory that a world has had while it trained, in the cases of `mlp` and `transformer`.
    ///
    /// Of new processes that run nothing else: the resident set of one process for threads, the sum over processes else.
    Memory(memory::Options),
    /// What more ranks cost and bring.
    ///
    /// Training on more and more threads at the same work in all; the cost of dispatch and of planning on simulated meshes.
    Scaling(scaling::Options),
    /// Finding the way from one layout to another, on one rank of a simulated mesh.
    Plan(plan::Options),
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let result = match &options.workload {
        Some(workload) => {
            measure(workload, &mut |row| row::print(row)).and_then(|rows| match workload.only() {
                Some(only) => some(rows, only),
                None => Ok(()),
            })
        }
        None if options.all.all => all::run(&options.all),
        None => Err("name a workload, or measure all of them with --all".into()),
    };
    match result {
        Err(error) if row::nobody_reads(&*error) => Ok(()),
        result => result,
    }
}

/// That `only` has left some rows.
fn some(rows: usize, only: &str) -> Result<(), Box<dyn Error>> {
    if rows == 0 { Err(format!("no case contains {only:?}").into()) } else { Ok(()) }
}

impl Workload {
    /// What the names of its cases have to contain. Nothing, if it has no rows to be counted.
    fn only(&self) -> Option<&str> {
        match self {
            Workload::Kernels(options) => Some(&options.only),
            Workload::Redistribute(options) => (!options.serve).then_some(&options.sides.only),
            Workload::Dispatch(options) => Some(&options.only),
            Workload::Mlp(options) | Workload::Transformer(options) => {
                (!options.serve).then_some(&options.sides.only)
            }
            Workload::Startup(options) => (!options.serve).then_some(&options.sides.only),
            Workload::Memory(options) => Some(&options.sides.only),
            Workload::Scaling(options) => Some(&options.only),
            Workload::Plan(_) => None,
        }
        .map(String::as_str)
    }
}

/// Measures a workload, and counts its rows. They go to `sink`, but for those of `plan`, which are its own.
fn measure(workload: &Workload, sink: row::Sink<'_>) -> Result<usize, Box<dyn Error>> {
    let mut rows = 0;
    let sink: row::Sink<'_> = &mut |row| {
        rows += 1;
        sink(row)
    };
    match workload {
        Workload::Kernels(options) => kernels::run(options, sink),
        Workload::Redistribute(options) => redistribute::run(options, sink),
        Workload::Dispatch(options) => dispatch::run(options, sink),
        Workload::Mlp(options) => train::run("mlp", options, sink),
        Workload::Transformer(options) => train::run("transformer", options, sink),
        Workload::Startup(options) => startup::run(options, sink),
        Workload::Memory(options) => memory::run(options, sink),
        Workload::Scaling(options) => scaling::run(options, sink),
        Workload::Plan(options) => plan::run(options),
    }?;
    Ok(rows)
}
