//! `dtensor bench`: benchmarks, optionally side by side with PyTorch in the same run.

mod all;
mod checkpoint;
mod collective;
mod comparison;
mod copy_rate;
mod dispatch;
mod gpt;
mod kernels;
mod large;
mod machine;
mod memory;
mod models;
mod peer;
mod plan;
mod ranks;
mod redistribute;
mod row;
mod scaling;
mod shards;
mod startup;
mod timing;
mod train;

use std::error::Error;

use clap::{Args, Subcommand};

/// One workload, or all workloads that PyTorch can run too.
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

/// The workload to measure.
#[derive(Subcommand)]
pub(crate) enum Workload {
    /// Local operators on one thread.
    Kernels(kernels::Options),
    /// Redistributions of a tensor over several ranks: all-gather, all-reduce, reduce-scatter, all-to-all.
    ///
    /// A row is the median time from the first rank that starts to the last rank that finishes.
    ///
    /// Rows of threads have a `bound_fraction`: the time to copy the bytes of the case, at the memory copy rate measured in the
    /// same run, divided by the measured time. The bytes are those that all ranks read and write if each rank makes its own
    /// result: with S bytes and n ranks 2nS for all_gather and all_reduce, (n + 1)S for reduce_scatter and 2S for all_to_all.
    /// 1 is as fast as a copy. More than 1 is possible, because threads can share a result.
    Redistribute(redistribute::Options),
    /// The fixed cost of an operator: tiny tensors, no communication.
    ///
    /// A row is the mean time of one of 1,000 operators, including dropping the result. `local_add` adds local tensors; the
    /// difference of the other adds from it is the cost of dispatch. In the world `simulated` one rank runs while the other
    /// ranks are idle, also in PyTorch. In the world `threads` all ranks run at once, and the time is from the first rank that
    /// starts to the last rank that finishes.
    Dispatch(dispatch::Options),
    /// A training step of a tensor-parallel MLP: column-wise linear, relu, row-wise linear.
    ///
    /// SGD; the loss is the sum of the outputs. A row is the median time of a step, from the first rank that starts to the last
    /// rank that finishes. `loss` is that of the third step; PyTorch must have the same.
    Mlp(train::Options),
    /// A training step of a sequence- and tensor-parallel transformer.
    ///
    /// Cross-entropy and AdamW. Rows are like those of `mlp`.
    Transformer(train::Options),
    /// A training step of a transformer whose parameters are sharded: `fully_shard` for each block and for the model.
    ///
    /// Each rank has its slice of the batch. Rows are like those of `transformer`.
    Fsdp(train::Options),
    /// A training step of a GPT on one device, and of the same GPT on ranks that share the device; f32, and autocast to bf16.
    ///
    /// Cross-entropy and AdamW. PyTorch runs one process without a mesh, and compiles the largest case, too. Several steps are queued
    /// before the wait. `--ranks` names the numbers of ranks beside one: with `_tp` the model is sequence- and tensor-parallel, with
    /// `_fsdp` its parameters are sharded. Peak memory is that of the GPU, of all ranks together, while steps run.
    Gpt(gpt::Options),
    /// Saving and loading of a model that is sharded over the ranks.
    ///
    /// A row is the median time from the first rank that starts to the last rank that finishes. What is saved is on the disk when the
    /// time ends. `load` reads files that are not in the system's cache, `load_cached` files that are. Files are in the folder for
    /// temporary files, TMPDIR. `bound_fraction` is the time that `dd` takes for as many bytes there, divided by the measured time.
    Checkpoint(checkpoint::Options),
    /// The time until ranks are ready: from the start of the last one until all have a mesh and have passed a barrier.
    ///
    /// Each measurement starts new processes.
    Startup(startup::Options),
    /// Peak memory of all ranks during training, in the cases of `mlp`, `transformer` and `fsdp`.
    ///
    /// Each measurement starts new processes. Peak memory is the resident set: of the one process for threads, summed over
    /// processes otherwise.
    Memory(memory::Options),
    /// Strong scaling of training over threads; dispatch and planning on simulated meshes of up to thousands of ranks.
    Scaling(scaling::Options),
    /// The memory of a rank when a transformer is fully sharded: peak bytes by purpose, counted by the library.
    ///
    /// A row is the largest of the ranks, but for what is gathered: that is their mean, because ranks are threads and share a copy.
    Shards(shards::Options),
    /// Planning of redistributions, on one rank of a simulated mesh.
    Plan(plan::Options),
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let result = match &options.workload {
        Some(workload) => {
            measure(workload, &mut |row| row::print(row)).and_then(|rows| match workload.only() {
                Some(only) => check_not_empty(rows, only),
                None => Ok(()),
            })
        }
        None if options.all.all => all::run(&options.all),
        None => Err("name a workload, or measure all of them with --all".into()),
    };
    match result {
        Err(error) if row::is_broken_pipe(&*error) => Ok(()),
        result => result,
    }
}

/// Returns an error if `--only` matched no case.
fn check_not_empty(rows: usize, only: &str) -> Result<(), Box<dyn Error>> {
    if rows == 0 { Err(format!("no case contains {only:?}").into()) } else { Ok(()) }
}

impl Workload {
    /// Returns the value of `--only`; `None` if no rows are counted.
    fn only(&self) -> Option<&str> {
        match self {
            Workload::Kernels(options) => Some(&options.only),
            Workload::Redistribute(options) => (!options.serve).then_some(&options.common.only),
            Workload::Dispatch(options) => Some(&options.only),
            Workload::Mlp(options) | Workload::Transformer(options) | Workload::Fsdp(options) => {
                (!options.serve).then_some(&options.common.only)
            }
            Workload::Gpt(options) => (!options.serve).then_some(&options.common.only),
            Workload::Checkpoint(options) => (!options.serve).then_some(&options.common.only),
            Workload::Startup(options) => (!options.serve).then_some(&options.common.only),
            Workload::Memory(options) => Some(&options.common.only),
            Workload::Scaling(options) => Some(&options.only),
            Workload::Plan(_) | Workload::Shards(_) => None,
        }
        .map(String::as_str)
    }
}

/// Measures a workload, passes its rows to `sink`, and returns their number. `plan` and `shards` print their own kinds of rows instead.
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
        Workload::Fsdp(options) => train::run("fsdp", options, sink),
        Workload::Gpt(options) => gpt::run(options, sink),
        Workload::Checkpoint(options) => checkpoint::run(options, sink),
        Workload::Startup(options) => startup::run(options, sink),
        Workload::Memory(options) => memory::run(options, sink),
        Workload::Scaling(options) => scaling::run(options, sink),
        Workload::Shards(options) => shards::run(options),
        Workload::Plan(options) => plan::run(options),
    }?;
    Ok(rows)
}
