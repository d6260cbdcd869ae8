//! Converts distributed arguments to local tensors. Everything is checked before anything is redistributed.

use super::{Leaf, Leaves, OP, PerTensor, Settings, format_leaves};
use crate::{DeviceMesh, Error, Layout, Placements, Result, Tensor};

/// How the distributed tensors among the arguments are converted.
pub(super) struct Prepared {
    /// The mesh that all of them are on.
    pub(super) mesh: DeviceMesh,
    conversions: Vec<ArgumentConversion>,
}

/// How one distributed argument is converted.
struct ArgumentConversion {
    /// Its index among the tensors.
    at: usize,
    /// The layout to redistribute to, if it is not the tensor's own.
    to: Option<Layout>,
    /// The placements of its gradient, if they were set.
    grad: Option<Placements>,
}

/// Checks the arguments and plans their conversion. Returns `None` if none of them is distributed.
pub(super) fn prepare(settings: &Settings, leaves: &Leaves) -> Result<Option<Prepared>> {
    for (list, entries) in
        [("in_placements", &settings.in_placements), ("in_grad_placements", &settings.in_grad_placements)]
    {
        check_entries(list, entries, leaves)?;
    }
    let mut cast_input: Option<Prepared> = None;
    let mut at = 0;
    for (i, (_, tensor)) in leaves.iter().enumerate() {
        let Some(x) = tensor else { continue };
        if let Some(layout) = x.layout() {
            let cast_input = cast_input.get_or_insert_with(|| Prepared {
                mesh: settings.device_mesh.as_ref().unwrap_or(layout.mesh()).clone(),
                conversions: Vec::new(),
            });
            let to = check_input(settings, &cast_input.mesh, i, layout)?;
            cast_input.conversions.push(ArgumentConversion {
                at,
                to,
                grad: settings.in_grad_placements.get(i).cloned(),
            });
        }
        at += 1;
    }
    if let Some(Prepared { mesh, .. }) = &cast_input
        && mesh.coordinate().is_none()
    {
        let message = format!(
            "rank {} is not in the mesh {mesh}: it has no shard to run the function on, and cannot know the results of \
             the others; call it only `if mesh.coordinate().is_some()`",
            mesh.rank()
        );
        return Err(Error::argument(OP, message));
    }
    Ok(cast_input)
}

/// Returns an error unless a setting has one entry for each leaf, and `None` for values that are not tensors.
fn check_entries(list: &str, entries: &PerTensor<Placements>, leaves: &Leaves) -> Result<()> {
    let inputs = leaves.kinds().len();
    if entries.len().is_some_and(|len| len != inputs) {
        let message = format!(
            "{list} length {} does not match the number of input args {inputs}: {list}={entries}, and the inputs are {}",
            entries.len().unwrap_or(0),
            format_leaves(leaves.kinds())
        );
        return Err(Error::argument(OP, message));
    }
    for (i, leaf) in leaves.kinds().iter().enumerate() {
        if let (Leaf::Plain(kind), Some(placements)) = (leaf, entries.get(i)) {
            let message = format!(
                "non-tensor input {i} ({kind}) expects None placements but received {placements} in {list}={entries}"
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(())
}

/// Returns the layout that a distributed input must be redistributed to, if it is not its own.
fn check_input(settings: &Settings, mesh: &DeviceMesh, i: usize, layout: &Layout) -> Result<Option<Layout>> {
    if layout.mesh() != mesh {
        let whose = if settings.device_mesh.is_some() { "device_mesh is" } else { "an earlier input is on" };
        let message = format!(
            "input {i} is on {}, but {whose} {mesh}: all distributed inputs must be on the same mesh",
            layout.mesh()
        );
        return Err(Error::argument(OP, message));
    }
    let missing = |what: &str| {
        let message = format!("distributed input {i}, {layout}, expects {what} but received None");
        Error::argument(OP, message)
    };
    let of_input =
        |list: &'static str| move |error: Error| error.with_context(OP, format!("{list} of input {i}"));
    let mut target = layout.clone();
    if !settings.in_placements.is_empty() {
        let placements = settings.in_placements.get(i).ok_or_else(|| missing("placements"))?;
        target = Layout::checked(OP, mesh, placements.clone(), layout.shape().clone())
            .map_err(of_input("in_placements"))?;
    }
    if target != *layout && !settings.redistribute_inputs {
        let message = format!(
            "input {i} in local_map has a mismatched placements: its placements are {}, but the input placements is {}; to \
             redistribute it, set redistribute_inputs=true to local_map",
            Placements::from(layout.placements()),
            Placements::from(target.placements())
        );
        return Err(Error::argument(OP, message));
    }
    if !settings.in_grad_placements.is_empty() {
        let placements = settings.in_grad_placements.get(i).ok_or_else(|| missing("in grad placements"))?;
        target.for_gradient(OP, placements.clone()).map_err(of_input("in_grad_placements"))?;
    }
    Ok((target != *layout).then_some(target))
}

impl Prepared {
    /// Replaces the distributed tensors by their local tensors.
    #[track_caller]
    pub(super) fn localize(&self, tensors: &mut [Tensor]) -> Result<()> {
        for ArgumentConversion { at, to, grad } in &self.conversions {
            let x = &mut tensors[*at];
            if let Some(to) = to {
                *x = x.redistribute(to.placements())?;
            }
            *x = match grad {
                Some(placements) => x.to_local_with(placements.clone())?,
                None => x.to_local()?,
            };
        }
        Ok(())
    }
}
