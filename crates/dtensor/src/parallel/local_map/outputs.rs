//! From what the function returned on this rank to distributed tensors.

use std::fmt;

use super::{Leaf, Leaves, OP, PerTensor, Settings, about, have_same_parts, listed};
use crate::{DeviceMesh, Error, FromLocal, Layout, Result, Tensor};

/// That something fitting is said of every output. This needs no values, so that it can be found out before the function runs.
pub(super) fn check(how: &Settings, mesh: &DeviceMesh, leaves: &[Leaf]) -> Result<()> {
    let (placements, grads, shapes) = (&how.out_placements, &how.out_grad_placements, &how.out_shapes);
    counted("out_placements", "PlacementType", placements, leaves)?;
    counted("out_grad_placements", "PlacementType", grads, leaves)?;
    counted("out_shapes", "shape", shapes, leaves)?;
    for (i, leaf) in leaves.iter().enumerate() {
        let fits = |list: &str, result: Result<()>| {
            result.map_err(|error| about(format!("{list} of output {i}"), error))
        };
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
                    Some(shape) => Layout::checked(OP, mesh, placements.clone(), shape.clone()).map(drop),
                    None => placements.counted(OP, mesh.ndim()),
                };
                fits("out_placements", laid)?;
                if let Some(grad) = grads.get(i) {
                    fits("out_grad_placements", grad.counted(OP, mesh.ndim()))?;
                }
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
    let mut wrapped = Vec::with_capacity(leaves.tensors.len());
    for (i, (_, tensor)) in leaves.iter().enumerate() {
        let Some(part) = tensor else { continue };
        wrapped.push(joined(how, mesh, i, part).map_err(|error| about(format!("output {i}"), error))?);
    }
    leaves.tensors = wrapped;
    Ok(())
}

/// An output, taken as this rank's part.
#[track_caller]
fn joined(how: &Settings, mesh: &DeviceMesh, i: usize, part: &Tensor) -> Result<Tensor> {
    // `check` has found placements for every tensor.
    let Some(placements) = how.out_placements.get(i) else { return Ok(part.clone()) };
    let shape = how.out_shapes.get(i).cloned();
    let uneven = shape.is_none() && !how.even_outputs && placements.cut();
    let grad_placements = how.out_grad_placements.get(i).cloned();
    let options = FromLocal { shape, uneven, grad_placements, ..FromLocal::default() };
    let whole = Tensor::from_local_with(part, mesh, placements.clone(), options)?;
    if let (Some(layout), Some(grad)) = (whole.layout(), how.out_grad_placements.get(i)) {
        let grad = Layout::checked(OP, mesh, grad.clone(), layout.shape().clone())?;
        if !have_same_parts(&grad, layout)? {
            let message = format!(
                "the function returned parts of {layout}, and parts of {grad}, as out_grad_placements says, are no gradients of \
                 these"
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(whole)
}
