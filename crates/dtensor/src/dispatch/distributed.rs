//! The way of an operator on tensors that lie on a mesh.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use dtensor_array::origin::{asked_by, on_behalf_of};
use smallvec::SmallVec;

use super::listen::OPERATORS;
use super::mode::{ImplicitCommunication, merging_allowed, mode, replicating, unheard};
use super::{Call, Outputs, all_meta, kept, shapes};
use crate::autograd::grad_enabled;
use crate::comm::{Collective, Site};
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::ops::{Arrays, Here, Op, ROUNDS, Together};
use crate::tensor::{Part, Value};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::{Device, Meta};
use dtensor_layout::{Decision, InputKey, Operator, Question, Rule};

/// Runs an operator on inputs of which at least one lies on a mesh.
pub(super) fn run<O: Op>(
    op: O,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    outputs: &mut Outputs,
) -> Result<()> {
    let mesh = inputs.iter().find_map(|x| x.mesh());
    let mesh = mesh.ok_or_else(|| Error::argument(op.name(), "no input is distributed"))?;
    if inputs.iter().all(|x| x.mesh().is_some_and(|other| other.is_handle_of(mesh))) {
        return run_on(mesh, op, inputs, at, outputs);
    }
    let inputs = on_behalf_of(asked_by(at), || on_one_mesh(mesh, op.name(), inputs))?;
    run_on(mesh, op, &inputs.iter().collect::<SmallVec<[&Tensor; 4]>>(), at, outputs)
}

/// Whether tensors can be inputs of one operator, as far as meshes go.
#[cold]
pub(crate) fn one_mesh(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    let Some(mesh) = inputs.iter().find_map(|x| x.mesh()) else { return Ok(()) };
    for (i, x) in inputs.iter().enumerate() {
        match x.mesh() {
            Some(other) if other != mesh => {
                let message = format!(
                    "cross-mesh operation is not supported: expected tensors on the same mesh, but found {}",
                    mesh.and_other(other)
                );
                return Err(Error::argument(op, message));
            }
            None if x.rank() > 0 && !replicating() => {
                let (j, other) =
                    inputs.iter().enumerate().find(|(_, x)| x.is_distributed()).expect("one is on the mesh");
                let message = format!(
                    "got mixed local and distributed tensors: operand {i} is a local tensor of shape {}, operand {j} is \
                     distributed ({}): distribute operand {i} first, with `distribute_tensor` or `Tensor::from_local`, or use \
                     `implicit_replication` if it is the same on all ranks",
                    x.shape(),
                    other.layout().expect("it is distributed"),
                );
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
fn on_one_mesh(mesh: &DeviceMesh, op: &'static str, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 4]>> {
    one_mesh(op, inputs)?;
    let on_mesh = |x: &&Tensor| match x.layout() {
        Some(layout) => {
            let layout = Some(layout.on(mesh));
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
    outputs: &mut Outputs,
) -> Result<()> {
    let decision = decide(mesh, &op, inputs)?;
    if mode() != ImplicitCommunication::Allow {
        announce(mesh, &op, &decision, inputs, &implicit(&op, at))?;
    }
    if decision.moved.is_empty() {
        return compute(mesh, op, decision, inputs, inputs, at, outputs);
    }
    let moved = redistribute_inputs(mesh, &op, &decision, inputs, at)?;
    compute(mesh, op, decision, inputs, &moved.iter().collect::<SmallVec<[&Tensor; 4]>>(), at, outputs)
}

/// Runs the kernel on inputs in the layouts that were decided on, and records it. `given` are the inputs before they were moved.
fn compute<O: Op>(
    mesh: &DeviceMesh,
    op: O,
    decision: Arc<Decision>,
    given: &[&Tensor],
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    outputs: &mut Outputs,
) -> Result<()> {
    let mut call = Call::default();
    run_kernel(mesh, &op, &decision, inputs, at, &mut call)?;
    if OPERATORS.any() {
        let layout = |(i, _): &(usize, _)| (*i, Layout::with(mesh, &decision.specs[*i]));
        call.tell(&op, given, &decision.moved.iter().map(layout).collect::<Vec<_>>(), at);
    }
    call.finish(op, inputs, at, Some(decision), outputs);
    Ok(())
}

/// An operator as rules see it.
pub(crate) struct Described<'a>(pub(crate) &'a dyn Op);

impl Operator for Described<'_> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn rule(&self, inputs: &[Meta], outputs: &[Meta]) -> Result<Rule> {
        self.0.rule(inputs, outputs)
    }
}

impl fmt::Debug for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How the operator is run on inputs that lie as these do.
fn decide(mesh: &DeviceMesh, op: &dyn Op, inputs: &[&Tensor]) -> Result<Arc<Decision>> {
    let key = |x: &&Tensor| InputKey {
        spec: x.layout().map_or(u64::MAX, |layout| layout.spec().id),
        dtype: x.dtype(),
        meta: x.is_meta(),
    };
    let keys: SmallVec<[InputKey; 4]> = inputs.iter().map(key).collect();
    mesh.planner().decide(op, &keys, || {
        let metas: SmallVec<[Meta; 2]> = inputs.iter().map(|x| x.meta()).collect();
        let mut outputs = shapes(op, &metas)?;
        if metas.iter().any(|meta| meta.device == Device::Meta) {
            all_meta(op, &metas)?;
            outputs.iter_mut().for_each(|meta| meta.device = Device::Meta);
        }
        let rule = mesh.rule_of(&Described(op), &metas, &outputs, true)?;
        let specs = inputs.iter().filter_map(|x| x.layout()).map(|layout| layout.spec().clone()).collect();
        Ok(Question { op: op.name(), rule, inputs: metas, outputs, specs })
    })
}

/// The inputs where they have to be. Gradients are those of the whole, in whatever layout: they can go to where the input
/// came from.
#[cold]
fn redistribute_inputs(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 4]>> {
    let site = implicit(op, at);
    let mut placed: SmallVec<[Tensor; 4]> = inputs.iter().map(|&x| x.clone()).collect();
    for (i, plan) in &decision.moved {
        let (x, to) = (inputs[*i], Layout::with(mesh, &decision.specs[*i]));
        let grad = x.requires_grad() && grad_enabled();
        let part = x.value().part.redistribute(plan, &to, grad, &site)?;
        placed[*i] = x.with_value(Value { part, layout: Some(to) });
    }
    Ok(placed)
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
    for (i, plan) in &decision.moved {
        let Some(from) = inputs[*i].layout() else { continue };
        let to = &decision.specs[*i];
        if !plan.collectives().is_empty() {
            let steps = plan.collectives().join(", ");
            moves.push(format!("input {i} from {from} to {to} by {steps}"));
        }
    }
    if !decision.merged.is_empty() && !merging_allowed() {
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
fn run_kernel(
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
    let mut locals: SmallVec<[&Array; 4]> = SmallVec::new();
    for x in inputs {
        locals.push(x.part(op.name())?);
    }
    let here = Here::on_mesh(mesh, &decision.inputs, &decision.shards, &decision.specs, &decision.out_specs);
    let values = if decision.merged.is_empty() {
        op.kernel(&locals, &here)?
    } else {
        find_out(mesh, op, decision, &locals, &here, inputs, at)?
    };
    kept(op, &decision.shards, &values)?;
    for (value, spec) in values.into_iter().zip(&decision.out_specs) {
        call.values.push(Value { part: Part::Array(value), layout: Some(Layout::with(mesh, spec)) });
    }
    Ok(())
}

/// Meta tensors have shapes only, and a rank that is not in the mesh has nothing to compute with.
#[cold]
fn compute_nothing(mesh: &DeviceMesh, decision: &Decision, call: &mut Call) -> Result<()> {
    for (part, spec) in decision.shards.iter().zip(&decision.out_specs) {
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
    locals: &[&Array],
    here: &Here<'_>,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<Arrays> {
    let site = implicit(op, at);
    let grad = grad_enabled() && inputs.iter().any(|x| x.requires_grad());
    let group = mesh.group_over(&decision.merged, site.clone())?;
    let mut known: SmallVec<[Array; 4]> = SmallVec::new();
    for _ in 0..ROUNDS {
        match op.together(locals, &known, here)? {
            Together::Stack(parts) => {
                for part in parts {
                    let part = part.contiguous()?.unsqueeze(0)?;
                    let gather =
                        Collective::AllGather { dim: 0, sizes: SmallVec::from_elem(1, group.size()) };
                    known.push(group.communicate(gather, part, grad, site.clone())?);
                }
            }
            Together::Reduce(part, op) => {
                let reduce = Collective::AllReduce { op };
                known.push(group.communicate(reduce, part.contiguous()?, grad, site.clone())?);
            }
            Together::Done(values) => return Ok(values),
        }
    }
    let message = format!("after {ROUNDS} rounds ranks have not found out the outputs together");
    Err(Error::argument(op.name(), message))
}
