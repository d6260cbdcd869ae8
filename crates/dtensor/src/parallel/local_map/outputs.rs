//! From what the function returned on this rank to distributed tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Leaf, Leaves, OP, PerTensor, Settings, listed};
use crate::distributed::{Told, tell};
use crate::{DeviceMesh, Error, FromLocal, Layout, Result, Tensor};

/// That something fitting is said of every output. This needs no values, so that it can be found out before the function runs.
pub(super) fn check(how: &Settings, mesh: &DeviceMesh, leaves: &[Leaf]) -> Result<()> {
    let (placements, grads, shapes) = (&how.out_placements, &how.out_grad_placements, &how.out_shapes);
    counted("out_placements", "PlacementType", placements, leaves)?;
    counted("out_grad_placements", "PlacementType", grads, leaves)?;
    counted("out_shapes", "shape", shapes, leaves)?;
    for (i, leaf) in leaves.iter().enumerate() {
        let of_output =
            |list: &'static str| move |error: Error| error.about(OP, format!("{list} of output {i}"));
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
                    "output {i} is a tensor and expects placements but received None: say in out_placements how it lies, \
                     [Replicate] if all ranks return the same; or return it as `Plain(tensor)`, and it is left as it is"
                );
                return Err(Error::argument(OP, message));
            }
            (_, None) => {}
            (_, Some(placements)) => {
                let laid = match shapes.get(i) {
                    Some(shape) => Layout::checked(OP, mesh, placements.clone(), shape.clone()).map(Some),
                    None => placements.counted(OP, mesh.ndim()).map(|()| None),
                };
                let laid = laid.map_err(of_output("out_placements"))?;
                let fits = match (&laid, grads.get(i)) {
                    (_, None) => Ok(()),
                    (Some(laid), Some(grad)) => laid.of_gradient(OP, grad.clone()).map(drop),
                    (None, Some(grad)) => grad.counted(OP, mesh.ndim()),
                };
                fits.map_err(of_output("out_grad_placements"))?;
            }
        }
    }
    Ok(())
}

/// That a list has one entry for each output, if anything is said.
fn counted<T: fmt::Display>(list: &str, of: &str, said: &PerTensor<T>, leaves: &[Leaf]) -> Result<()> {
    if said.len().is_none_or(|len| len == leaves.len()) {
        return Ok(());
    }
    let message = format!(
        "local_map requires one {of} be provided for each output value: {list}={said}, and the outputs are {}; a list is for \
         one output, and a tuple has one for each of several",
        listed(leaves)
    );
    Err(Error::argument(OP, message))
}

/// Distributed tensors in place of this rank's.
#[track_caller]
pub(super) fn wrap(how: &Settings, mesh: &DeviceMesh, leaves: &mut Leaves) -> Result<()> {
    check(how, mesh, leaves.kinds())?;
    for (i, (_, tensor)) in leaves.iter().enumerate() {
        if let Some(layout) = tensor.and_then(Tensor::layout) {
            let message = format!(
                "torch.Tensor output expected but received a distributed tensor: output {i} is {layout} on {}; the function \
                 returns this rank's part, such as that of `to_local`",
                layout.mesh()
            );
            return Err(Error::argument(OP, message));
        }
    }
    let told = exchange(how, mesh, leaves)?;
    let mut wrapped = Vec::with_capacity(leaves.tensors.len());
    for (i, (_, tensor)) in leaves.iter().enumerate() {
        let Some(part) = tensor else { continue };
        let told: Vec<Told> = told.iter().filter_map(|told| told[i].part.clone()).collect();
        wrapped
            .push(joined(how, mesh, i, part, &told).map_err(|error| error.about(OP, format!("output {i}")))?);
    }
    leaves.tensors = wrapped;
    Ok(())
}

/// What a rank says of one output.
#[derive(Serialize, Deserialize)]
struct Said {
    /// Whether there is a tensor.
    there: bool,
    /// Its part of one that is cut, if the shape of the whole is not known.
    part: Option<Told>,
}

/// Whether ranks have to ask each other for the sizes of the parts of an output.
fn uneven(how: &Settings, i: usize) -> bool {
    let cut = how.out_placements.get(i).is_some_and(|placements| placements.cut());
    cut && how.out_shapes.get(i).is_none() && !how.even_outputs
}

/// What every rank says of each output, all in one exchange; nothing, if nothing has to be said. Whether
/// something has is a matter of types and of what the caller has said: all ranks agree on it, whatever the
/// function returned.
#[track_caller]
fn exchange(how: &Settings, mesh: &DeviceMesh, leaves: &Leaves) -> Result<Vec<Vec<Said>>> {
    let optional = leaves.has_optional() && !how.even_outputs;
    if !optional && !(0..leaves.kinds().len()).any(|i| uneven(how, i)) {
        return Ok(Vec::new());
    }
    let mine: Vec<Said> = leaves
        .iter()
        .enumerate()
        .map(|(i, (_, tensor))| {
            let placements = how.out_placements.get(i).filter(|_| uneven(how, i));
            let part = tensor.zip(placements).map(|(part, placements)| Told::of(part, placements, None));
            Said { there: tensor.is_some(), part }
        })
        .collect();
    let all = tell(mesh, &mine)?;
    for (rank, said) in mesh.ranks().iter().zip(&all) {
        let there = |said: &[Said]| said.iter().map(|said| said.there).collect::<Vec<_>>();
        let (first, other) = (there(&all[0]), there(said));
        let shown = |there: Option<&bool>| match there {
            Some(true) => "a tensor",
            Some(false) => "none",
            None => "nothing",
        };
        if let Some(i) = (0..first.len().max(other.len())).find(|&i| first.get(i) != other.get(i)) {
            let message = format!(
                "output {i}: inconsistent results: rank {} returned {}, rank {rank} returned {}; all ranks must return a \
                 tensor, or none of them",
                mesh.ranks()[0],
                shown(first.get(i)),
                shown(other.get(i))
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(all)
}

/// An output, taken as this rank's part.
#[track_caller]
fn joined(how: &Settings, mesh: &DeviceMesh, i: usize, part: &Tensor, told: &[Told]) -> Result<Tensor> {
    // `check` has found placements for every tensor.
    let Some(placements) = how.out_placements.get(i) else { return Ok(part.clone()) };
    let options = FromLocal {
        shape: how.out_shapes.get(i).cloned(),
        uneven: uneven(how, i),
        grad_placements: how.out_grad_placements.get(i).cloned(),
        ..FromLocal::default()
    };
    Tensor::joined(part, mesh.clone(), placements.clone(), options, told)
}
