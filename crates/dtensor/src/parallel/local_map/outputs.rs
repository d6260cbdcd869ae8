//! Converts the local results of the function to distributed tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Leaf, Leaves, OP, PerTensor, Settings, format_leaves};
use crate::distributed::{ShardInfo, Taker, exchange};
use crate::{DeviceMesh, Error, FromLocalOptions, Layout, Result, Tensor};

/// Checks that the settings fit the outputs. It needs only their types, so that errors are found before the function
/// runs.
pub(super) fn check(settings: &Settings, mesh: &DeviceMesh, leaves: &[Leaf]) -> Result<()> {
    let (placements, grads, shapes) =
        (&settings.out_placements, &settings.out_grad_placements, &settings.out_shapes);
    check_count("out_placements", "PlacementType", placements, leaves)?;
    check_count("out_grad_placements", "PlacementType", grads, leaves)?;
    check_count("out_shapes", "shape", shapes, leaves)?;
    for (i, leaf) in leaves.iter().enumerate() {
        let of_output =
            |list: &'static str| move |error: Error| error.with_context(OP, format!("{list} of output {i}"));
        match (leaf, placements.get(i)) {
            (Leaf::Plain(kind), given) => {
                let given = given.or(grads.get(i)).map(ToString::to_string);
                let Some(given) = given.or(shapes.get(i).map(ToString::to_string)) else { continue };
                let message =
                    format!("non-tensor output {i} ({kind}) expects None placements but received {given}");
                return Err(Error::argument(OP, message));
            }
            (Leaf::Tensor, None) => {
                let message = format!(
                    "output {i} is a tensor and expects placements but received None: give its placements in out_placements, \
                     [Replicate] if all ranks return the same tensor; or return it as `Plain(tensor)` to leave it unchanged"
                );
                return Err(Error::argument(OP, message));
            }
            (_, None) => {}
            (_, Some(placements)) => {
                let layout = match shapes.get(i) {
                    Some(shape) => Layout::checked(OP, mesh, placements.clone(), shape.clone()).map(Some),
                    None => placements.check_len(OP, mesh.ndim()).map(|()| None),
                };
                let layout = layout.map_err(of_output("out_placements"))?;
                let fits = match (&layout, grads.get(i)) {
                    (_, None) => Ok(()),
                    (Some(layout), Some(grad)) => layout.for_gradient(OP, grad.clone()).map(drop),
                    (None, Some(grad)) => grad.check_len(OP, mesh.ndim()),
                };
                fits.map_err(of_output("out_grad_placements"))?;
            }
        }
    }
    Ok(())
}

/// Returns an error unless a setting is absent or has one entry for each output.
fn check_count<T: fmt::Display>(list: &str, of: &str, entries: &PerTensor<T>, leaves: &[Leaf]) -> Result<()> {
    if entries.len().is_none_or(|len| len == leaves.len()) {
        return Ok(());
    }
    let message = format!(
        "local_map requires one {of} be provided for each output value: {list}={entries}, and the outputs are {}; a list is for \
         one output, and a tuple has one for each of several",
        format_leaves(leaves)
    );
    Err(Error::argument(OP, message))
}

/// Replaces local tensors by distributed ones.
#[track_caller]
pub(super) fn wrap(settings: &Settings, mesh: &DeviceMesh, leaves: &mut Leaves) -> Result<()> {
    check(settings, mesh, leaves.kinds())?;
    for (i, (_, tensor)) in leaves.iter().enumerate() {
        if let Some(layout) = tensor.and_then(Tensor::layout) {
            let message = format!(
                "plain tensor output expected but received a distributed tensor: output {i} is {layout} on {}; return \
                 this rank's shard, as `to_local` gives it",
                layout.mesh()
            );
            return Err(Error::argument(OP, message));
        }
    }
    let reports = exchange_reports(settings, mesh, leaves)?;
    let mut wrapped = Vec::with_capacity(leaves.tensors.len());
    for (i, (_, tensor)) in leaves.iter().enumerate() {
        let Some(part) = tensor else { continue };
        let shards: Vec<ShardInfo> = reports.iter().filter_map(|report| report[i].shard.clone()).collect();
        wrapped.push(
            wrap_one(settings, mesh, i, part, &shards)
                .map_err(|error| error.with_context(OP, format!("output {i}")))?,
        );
    }
    leaves.tensors = wrapped;
    Ok(())
}

/// What a rank reports about one output.
#[derive(Serialize, Deserialize)]
struct OutputReport {
    /// True if there is a tensor.
    present: bool,
    /// The shape and dtype of its shard, if the global shape has to be derived from the shards.
    shard: Option<ShardInfo>,
}

/// Returns true if the ranks have to exchange the shapes of an output's shards.
fn needs_shapes(settings: &Settings, i: usize) -> bool {
    let sharded = settings.out_placements.get(i).is_some_and(|placements| placements.cut());
    sharded && settings.out_shapes.get(i).is_none() && !settings.even_outputs
}

/// Gathers the reports of all ranks about all outputs in one exchange, or returns an empty list if none is needed.
/// Whether one is needed depends only on types and settings, so all ranks agree on it, whatever the function
/// returned.
#[track_caller]
fn exchange_reports(
    settings: &Settings,
    mesh: &DeviceMesh,
    leaves: &Leaves,
) -> Result<Vec<Vec<OutputReport>>> {
    let optional = leaves.has_optional() && !settings.even_outputs;
    if !optional && !(0..leaves.kinds().len()).any(|i| needs_shapes(settings, i)) {
        return Ok(Vec::new());
    }
    let mine: Vec<OutputReport> = leaves
        .iter()
        .enumerate()
        .map(|(i, (_, tensor))| {
            let placements = settings.out_placements.get(i).filter(|_| needs_shapes(settings, i));
            let shard =
                tensor.zip(placements).map(|(shard, placements)| ShardInfo::of(shard, placements, None));
            OutputReport { present: tensor.is_some(), shard }
        })
        .collect();
    let all = exchange(mesh, &mine)?;
    for (rank, reports) in mesh.ranks().iter().zip(&all) {
        let present =
            |reports: &[OutputReport]| reports.iter().map(|report| report.present).collect::<Vec<_>>();
        let (first, other) = (present(&all[0]), present(reports));
        let describe = |present: Option<&bool>| match present {
            Some(true) => "a tensor",
            Some(false) => "none",
            None => "nothing",
        };
        if let Some(i) = (0..first.len().max(other.len())).find(|&i| first.get(i) != other.get(i)) {
            let message = format!(
                "output {i}: inconsistent results: rank {} returned {}, rank {rank} returned {}; all ranks must return a \
                 tensor, or none of them",
                mesh.ranks()[0],
                describe(first.get(i)),
                describe(other.get(i))
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(all)
}

/// Wraps one output as this rank's shard of a distributed tensor.
#[track_caller]
fn wrap_one(
    settings: &Settings,
    mesh: &DeviceMesh,
    i: usize,
    part: &Tensor,
    shards: &[ShardInfo],
) -> Result<Tensor> {
    // `check` has found placements for every tensor that needs them.
    let Some(placements) = settings.out_placements.get(i) else { return Ok(part.clone()) };
    let options = FromLocalOptions {
        shape: settings.out_shapes.get(i).cloned(),
        uneven: needs_shapes(settings, i),
        grad_placements: settings.out_grad_placements.get(i).cloned(),
        ..FromLocalOptions::default()
    };
    let taker = Taker { by: OP, argument: &format_args!("output {i}") };
    Tensor::from_shards(part, mesh.clone(), placements.clone(), options, shards, taker)
}
