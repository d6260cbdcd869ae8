//! From distributed arguments to this rank's parts. Everything is checked before anything is moved.

use super::{Leaf, Leaves, OP, PerTensor, Settings, listed};
use crate::{DeviceMesh, Error, Layout, Placements, Result, Tensor};

/// What becomes of the distributed tensors among the arguments.
pub(super) struct Prepared {
    /// The mesh they all lie on.
    pub(super) mesh: DeviceMesh,
    moves: Vec<Move>,
}

/// What becomes of one of them.
struct Move {
    /// Which of the tensors.
    at: usize,
    /// Where it is wanted, if it is not there.
    to: Option<Layout>,
    /// How its gradient will lie, if that was said.
    grad: Option<Placements>,
}

/// What is to be done with these arguments; nothing, if none of them is distributed.
pub(super) fn prepare(how: &Settings, leaves: &Leaves) -> Result<Option<Prepared>> {
    for (list, said) in
        [("in_placements", &how.in_placements), ("in_grad_placements", &how.in_grad_placements)]
    {
        check_entries(list, said, leaves)?;
    }
    let mut prepared: Option<Prepared> = None;
    let mut at = 0;
    for (i, (_, tensor)) in leaves.iter().enumerate() {
        let Some(x) = tensor else { continue };
        if let Some(layout) = x.layout() {
            let prepared = prepared.get_or_insert_with(|| Prepared {
                mesh: how.device_mesh.as_ref().unwrap_or(layout.mesh()).clone(),
                moves: Vec::new(),
            });
            let to = check_input(how, &prepared.mesh, i, layout)?;
            prepared.moves.push(Move { at, to, grad: how.in_grad_placements.get(i).cloned() });
        }
        at += 1;
    }
    if let Some(Prepared { mesh, .. }) = &prepared
        && mesh.coordinate().is_none()
    {
        let message = format!(
            "rank {} is not in the mesh {mesh}: it has no part to run the function on, and is not told what comes out on the \
             others; call it `if mesh.coordinate().is_some()`",
            mesh.rank()
        );
        return Err(Error::argument(OP, message));
    }
    Ok(prepared)
}

/// That a list has one entry for each leaf, and none for what is no tensor.
fn check_entries(list: &str, said: &PerTensor<Placements>, leaves: &Leaves) -> Result<()> {
    let inputs = leaves.kinds().len();
    if said.len().is_some_and(|len| len != inputs) {
        let message = format!(
            "{list} length {} does not match the number of input args {inputs}: {list}={said}, and the inputs are {}",
            said.len().unwrap_or(0),
            listed(leaves.kinds())
        );
        return Err(Error::argument(OP, message));
    }
    for (i, leaf) in leaves.kinds().iter().enumerate() {
        if let (Leaf::Plain(kind), Some(placements)) = (leaf, said.get(i)) {
            let message = format!(
                "non-tensor input {i} ({kind}) expects None placements but received {placements} in {list}={said}"
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(())
}

/// Where a distributed input is wanted, if it is not there.
fn check_input(how: &Settings, mesh: &DeviceMesh, i: usize, layout: &Layout) -> Result<Option<Layout>> {
    if layout.mesh() != mesh {
        let whose = if how.device_mesh.is_some() { "device_mesh is" } else { "an input before it lies on" };
        let message = format!(
            "input {i} lies on {}, but {whose} {mesh}: all distributed inputs must be on the same mesh",
            layout.mesh()
        );
        return Err(Error::argument(OP, message));
    }
    let missing = |what: &str| {
        let message = format!("distributed input {i}, {layout}, expects {what} but received None");
        Error::argument(OP, message)
    };
    let of_input = |list: &'static str| move |error: Error| error.about(OP, format!("{list} of input {i}"));
    let mut wanted = layout.clone();
    if !how.in_placements.is_empty() {
        let placements = how.in_placements.get(i).ok_or_else(|| missing("placements"))?;
        wanted = Layout::checked(OP, mesh, placements.clone(), layout.shape().clone())
            .map_err(of_input("in_placements"))?;
    }
    if wanted != *layout && !how.redistribute_inputs {
        let message = format!(
            "input {i} in local_map has a mismatched placements: it lies as {}, but the input placements is {}; if it is \
             to be redistributed, set redistribute_inputs=true to local_map",
            Placements::from(layout.placements()),
            Placements::from(wanted.placements())
        );
        return Err(Error::argument(OP, message));
    }
    if !how.in_grad_placements.is_empty() {
        let placements = how.in_grad_placements.get(i).ok_or_else(|| missing("in grad placements"))?;
        wanted.of_gradient(OP, placements.clone()).map_err(of_input("in_grad_placements"))?;
    }
    Ok((wanted != *layout).then_some(wanted))
}

impl Prepared {
    /// This rank's parts in place of the distributed tensors.
    #[track_caller]
    pub(super) fn localize(&self, tensors: &mut [Tensor]) -> Result<()> {
        for Move { at, to, grad } in &self.moves {
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
