//! The way of an operator on tensors that lie on a mesh.

use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use super::around::{self, Heard};
use super::mode::{ImplicitCommunication, mode, replicating, unheard};
use super::{Call, all_meta, kept, shapes};
use crate::autograd::grad_enabled;
use crate::comm::{Collective, Site, asked_by, on_behalf_of};
use crate::engine::Local;
use crate::mesh::DeviceMesh;
use crate::ops::{Here, Locals, Op, ROUNDS, Together};
use crate::placement::Layout;
use crate::sharding::{Decision, choose};
use crate::tensor::{Device, Meta, Part, Value};
use crate::{Error, Result, Tensor};

/// Runs an operator on inputs of which at least one lies on a mesh.
pub(super) fn run<O: Op>(
    op: O,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 1]>> {
    let mesh = inputs.iter().find_map(|x| x.mesh());
    let mesh = mesh.ok_or_else(|| Error::argument(op.name(), "no input is distributed"))?;
    if inputs.iter().all(|x| x.mesh().is_some_and(|other| other.is_handle_of(mesh))) {
        return run_on(mesh, op, inputs, at);
    }
    let inputs = on_behalf_of(asked_by(at), || brought(mesh, op.name(), inputs))?;
    run_on(mesh, op, &inputs.iter().collect::<SmallVec<[&Tensor; 4]>>(), at)
}

/// Whether tensors can be inputs of one operator, as far as meshes go.
#[cold]
pub(crate) fn one_mesh(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    let Some(mesh) = inputs.iter().find_map(|x| x.mesh()) else { return Ok(()) };
    for x in inputs {
        match x.mesh() {
            Some(other) if other != mesh => {
                let message = format!(
                    "cross-mesh operation is not supported: expected tensors on the same mesh, but found {mesh} and {other}"
                );
                return Err(Error::argument(op, message));
            }
            None if x.rank() > 0 && !replicating() => {
                let message = "got mixed local and distributed tensors: distribute the local ones first, with \
                               `distribute_tensor` or `Tensor::from_local`, or say `implicit_replication` if they are the same \
                               on all ranks";
                return Err(Error::argument(op, message));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The inputs on one mesh. What is on this rank alone may be a number without dims, or anything while it is said to be the same
/// everywhere.
#[cold]
fn brought(mesh: &DeviceMesh, op: &'static str, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 4]>> {
    one_mesh(op, inputs)?;
    let on_mesh = |x: &&Tensor| match x.layout() {
        Some(layout) => {
            let layout = Some(mesh.adopt(layout));
            Ok(x.with_value(Value { layout, ..x.value().clone() }))
        }
        None if x.requires_grad() || mesh.coordinate().is_none() => Tensor::from_local(x, mesh, ()),
        None => Ok(Tensor::laid(x.value().part.clone(), Layout::everywhere(mesh, &x.shape()))),
    };
    inputs.iter().map(on_mesh).collect()
}

/// As [`run`], with all inputs on this mesh. What is wrong with them is found before anything is moved.
fn run_on<O: Op>(
    mesh: &DeviceMesh,
    op: O,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 1]>> {
    let decision = decide(mesh, &op, inputs)?;
    if mode() != ImplicitCommunication::Allow {
        announce(mesh, &op, &decision, inputs, &implicit(&op, at))?;
    }
    let heard = around::active().then(|| (op.name(), decision.clone()));
    let mut call = Call::default();
    let outputs = if decision.moved.is_empty() {
        compute(mesh, &op, &decision, inputs, at, &mut call)?;
        finish(call, op, decision, inputs, at)
    } else {
        let moved = moved(mesh, &op, &decision, inputs, at)?;
        let inputs: SmallVec<[&Tensor; 4]> = moved.iter().collect();
        compute(mesh, &op, &decision, &inputs, at, &mut call)?;
        finish(call, op, decision, &inputs, at)
    };
    if let Some((name, decision)) = heard {
        let layout = |&i: &usize| (i, Layout::with(mesh, &decision.specs[i]));
        let moved: Vec<_> = decision.moved.iter().map(layout).collect();
        around::told(&Heard { name, inputs, outputs: &outputs, moved: &moved, at });
    }
    Ok(outputs)
}

fn finish<O: Op>(
    mut call: Call,
    op: O,
    decision: Arc<Decision>,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> SmallVec<[Tensor; 1]> {
    if super::records(&op, inputs) {
        call.inputs.clone_from(&decision.inputs);
        call.outputs.clone_from(&decision.outputs);
        return call.record(op, inputs, at, Some(decision));
    }
    call.unrecorded()
}

/// How the operator is run on inputs that lie as these do.
fn decide(mesh: &DeviceMesh, op: &dyn Op, inputs: &[&Tensor]) -> Result<Arc<Decision>> {
    mesh.decision(op, inputs, || {
        let metas: SmallVec<[Meta; 2]> = inputs.iter().map(|x| x.meta()).collect();
        let layouts: SmallVec<[_; 4]> = inputs.iter().filter_map(|x| x.layout()).collect();
        let mut outputs = shapes(op, &metas)?;
        if metas.iter().any(|meta| meta.device == Device::Meta) {
            all_meta(op, &metas)?;
            outputs.iter_mut().for_each(|meta| meta.device = Device::Meta);
        }
        choose(op.name(), &mesh.rule_of(op, &metas, &outputs, true)?, mesh, metas, outputs, &layouts)
    })
}

/// The inputs where they have to be. Gradients are those of the whole, in whatever layout: they can go to where the input
/// came from.
#[cold]
fn moved(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 4]>> {
    let site = implicit(op, at);
    let placed = |(i, x): (usize, &&Tensor)| {
        if !decision.moved.contains(&i) {
            return Ok((*x).clone());
        }
        Ok(x.with_value(x.value_in(&Layout::with(mesh, &decision.specs[i]), &site)?))
    };
    inputs.iter().enumerate().map(placed).collect()
}

/// The line that an operator is run for, as that of something nobody asked for.
fn implicit(op: &dyn Op, at: &'static Location<'static>) -> Site {
    Site { operator: Some(op.name().into()), ..Site::of(asked_by(at)) }
}

/// Says what is about to be moved, or refuses to.
fn announce(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    inputs: &[&Tensor],
    at: &Site,
) -> Result<()> {
    let mut moves = Vec::new();
    for &i in &decision.moved {
        let Some(from) = inputs[i].layout() else { continue };
        let to = Layout::with(mesh, &decision.specs[i]);
        let plan = mesh.plan(from.spec(), to.spec(), inputs[i].dtype().size());
        if !plan.collectives().is_empty() {
            let steps = plan.collectives().join(", ");
            moves.push(format!("input {i} from {from} to {to} by {steps}"));
        }
    }
    if !decision.merged.is_empty() && !op.asked_for() {
        moves.push("what ranks have to find out together".into());
    }
    if moves.is_empty() {
        return Ok(());
    }
    let message = format!(
        "implicit communication at {}:{}: it moves {}. Redistribute the inputs first",
        at.file,
        at.line,
        moves.join(" and ")
    );
    match mode() {
        ImplicitCommunication::Error => Err(Error::argument(op.name(), message)),
        // All ranks would say the same.
        _ if mesh.coordinate().is_some_and(|at| at.iter().all(|&at| at == 0)) && unheard(op.name(), at) => {
            eprintln!("warning: {}: {message}", op.name());
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The kernel on this rank's parts. Not generic, so that it is compiled once.
fn compute(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    call: &mut Call,
) -> Result<()> {
    if inputs.iter().any(|x| x.is_meta()) || mesh.coordinate().is_none() {
        return compute_nothing(mesh, decision, call);
    }
    let mut locals: SmallVec<[&Local; 4]> = SmallVec::new();
    for x in inputs {
        locals.push(x.part(op.name())?);
    }
    let here = Here::on_mesh(mesh, &decision.inputs, &decision.parts, &decision.specs, &decision.out_specs);
    let values = if decision.merged.is_empty() {
        op.kernel(&locals, &here)?
    } else {
        find_out(mesh, op, decision, &locals, &here, inputs, at)?
    };
    kept(op, &decision.parts, &values)?;
    for (value, spec) in values.into_iter().zip(&decision.out_specs) {
        call.values.push(Value { part: Part::Local(value), layout: Some(Layout::with(mesh, spec)) });
    }
    Ok(())
}

/// Meta tensors have shapes only, and a rank that is not in the mesh has nothing to compute with.
#[cold]
fn compute_nothing(mesh: &DeviceMesh, decision: &Decision, call: &mut Call) -> Result<()> {
    for (part, spec) in decision.parts.iter().zip(&decision.out_specs) {
        let part = Tensor::full_of(part, 0)?.value().part.clone();
        call.values.push(Value { part, layout: Some(Layout::with(mesh, spec)) });
    }
    Ok(())
}

/// The outputs where a merging factor is cut: ranks along the mesh dims that cut it find them out together.
#[cold]
fn find_out(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    locals: &[&Local],
    here: &Here<'_>,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<Locals> {
    let site = implicit(op, at);
    let grad = grad_enabled() && inputs.iter().any(|x| x.requires_grad());
    let group = mesh.group_over(&decision.merged, site.clone())?;
    let mut known: SmallVec<[Local; 4]> = SmallVec::new();
    for _ in 0..ROUNDS {
        match op.together(locals, &known, here)? {
            Together::Stack(parts) => {
                for part in parts {
                    let part = part.contiguous()?.unsqueeze(0)?;
                    let gather =
                        Collective::AllGather { dim: 0, sizes: SmallVec::from_elem(1, group.size()) };
                    known.push(group.communicate_local(gather, part, grad, site.clone())?);
                }
            }
            Together::Reduce(part, op) => {
                let reduce = Collective::AllReduce { op };
                known.push(group.communicate_local(reduce, part.contiguous()?, grad, site.clone())?);
            }
            Together::Done(values) => return Ok(values),
        }
    }
    let message = format!("after {ROUNDS} rounds ranks have not found out the outputs together");
    Err(Error::argument(op.name(), message))
}
