//! Operators on distributed tensors: decide on layouts, redistribute inputs, run the kernel on shards.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use dtensor_array::origin::{caller_line, with_caller_line};
use smallvec::SmallVec;

use super::listen::OPERATORS;
use super::mode::{
    ImplicitCommunication, implicit_communication, is_first_warning, is_merging_allowed, is_replicating,
};
use super::{Evaluation, Outputs, check_all_meta, check_outputs, on_line, shapes};
use crate::autograd::grad_enabled;
use crate::comm::{Collective, Site};
use crate::distributed::Taker;
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::ops::{Arrays, Here, Op, ROUNDS, Together};
use crate::tensor::{LocalTensor, Value};
use crate::{Error, FromLocalOptions, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::{Device, Meta};
use dtensor_layout::{Decision, InputKey, Operator, Question, Rule};

/// Runs an operator on inputs of which at least one is distributed.
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
    let inputs = with_caller_line(caller_line(at), || on_one_mesh(mesh, op.name(), inputs))?;
    run_on(mesh, op, &inputs.iter().collect::<SmallVec<[&Tensor; 4]>>(), at, outputs)
}

/// Returns an error if tensors are on different meshes, or if distributed and local tensors are mixed.
#[cold]
pub(crate) fn check_same_mesh(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    let Some(mesh) = inputs.iter().find_map(|x| x.mesh()) else { return Ok(()) };
    for (i, x) in inputs.iter().enumerate() {
        match x.mesh() {
            Some(other) if other != mesh => {
                let message = format!(
                    "cross-mesh operation is not supported: expected tensors on the same mesh, but found {}",
                    mesh.show_difference(other)
                );
                return Err(Error::argument(op, message));
            }
            None if x.ndim() > 0 && !is_replicating() => {
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

/// Puts local inputs on the mesh as replicated tensors. Only scalars (0-d) may be local, or any tensor inside
/// [`implicit_replication`](super::implicit_replication).
#[cold]
fn on_one_mesh(mesh: &DeviceMesh, op: &'static str, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 4]>> {
    check_same_mesh(op, inputs)?;
    #[cfg(feature = "cuda")]
    let moved = super::on_one_device(inputs)?;
    #[cfg(feature = "cuda")]
    let inputs = &moved.iter().collect::<SmallVec<[&Tensor; 4]>>()[..];
    let on_mesh = |(i, x): (usize, &&Tensor)| {
        let taker = Taker { by: op, argument: &format_args!("operand {i}") };
        match x.layout() {
            Some(layout) => {
                let layout = Some(layout.on(mesh));
                Ok(x.with_value(Value { layout, ..x.value().clone() }))
            }
            None if x.requires_grad() || mesh.coordinate().is_none() => {
                Tensor::from_local_as(x, mesh.clone(), ().into(), FromLocalOptions::default(), taker)
            }
            None => {
                let layout = Layout::replicated_on(mesh, &x.shape());
                taker.note(x, mesh, layout.placements())?;
                Ok(Tensor::from_shard(x.value().part.clone(), layout))
            }
        }
    };
    inputs.iter().enumerate().map(on_mesh).collect()
}

/// Runs an operator on inputs that are all on this mesh. Checks them before any communication.
fn run_on<O: Op>(
    mesh: &DeviceMesh,
    op: O,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    outputs: &mut Outputs,
) -> Result<()> {
    let decision = decide(mesh, &op, inputs)?;
    if implicit_communication() != ImplicitCommunication::Allow {
        check_communication(mesh, &op, &decision, inputs, &implicit_site(&op, at))?;
    }
    if decision.moved.is_empty() {
        return compute(mesh, op, decision, inputs, inputs, at, outputs);
    }
    let moved = redistribute_inputs(mesh, &op, &decision, inputs, at)?;
    compute(mesh, op, decision, inputs, &moved.iter().collect::<SmallVec<[&Tensor; 4]>>(), at, outputs)
}

/// Runs the kernel on inputs in the layouts that were decided on, and records the operator. `given` are the inputs before they
/// were redistributed.
fn compute<O: Op>(
    mesh: &DeviceMesh,
    op: O,
    decision: Arc<Decision>,
    given: &[&Tensor],
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    outputs: &mut Outputs,
) -> Result<()> {
    let mut evaluation = Evaluation::default();
    run_kernel(mesh, &op, &decision, inputs, at, &mut evaluation)?;
    if OPERATORS.any() {
        let layout = |(i, _): &(usize, _)| (*i, Layout::with(mesh, &decision.specs[*i]));
        evaluation.notify(&op, given, &decision.moved.iter().map(layout).collect::<Vec<_>>(), at);
    }
    evaluation.finish(op, inputs, at, Some(decision), outputs);
    Ok(())
}

/// Adapts an [`Op`] to [`Operator`], the trait that sharding rules and the planner see.
pub(crate) struct AsOperator<'a>(pub(crate) &'a dyn Op);

impl Operator for AsOperator<'_> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn rule(&self, inputs: &[Meta], outputs: &[Meta]) -> Result<Rule> {
        self.0.rule(inputs, outputs)
    }
}

impl fmt::Debug for AsOperator<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Decides in which layouts the operator runs on these inputs. Cached by operator, attributes and layouts.
fn decide(mesh: &DeviceMesh, op: &dyn Op, inputs: &[&Tensor]) -> Result<Arc<Decision>> {
    let key = |x: &&Tensor| InputKey {
        spec: x.layout().map_or(u64::MAX, |layout| layout.spec().id),
        dtype: x.dtype(),
        device: x.device(),
    };
    let keys: SmallVec<[InputKey; 4]> = inputs.iter().map(key).collect();
    mesh.planner().decide(op, &keys, || {
        let metas: SmallVec<[Meta; 2]> = inputs.iter().map(|x| x.meta()).collect();
        let mut outputs = shapes(op, &metas)?;
        if metas.iter().any(|meta| meta.device == Device::Meta) {
            check_all_meta(op, &metas)?;
            outputs.iter_mut().for_each(|meta| meta.device = Device::Meta);
        }
        let rule = mesh.rule_of(&AsOperator(op), &metas, &outputs, true)?;
        let specs = inputs.iter().filter_map(|x| x.layout()).map(|layout| layout.spec().clone()).collect();
        Ok(Question { op: op.name(), rule, inputs: metas, outputs, specs })
    })
}

/// Redistributes inputs to the layouts that were decided on, without recording it. No node is needed: a gradient is that of the
/// full tensor, in any layout, so it goes directly to the original input.
#[cold]
fn redistribute_inputs(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 4]>> {
    let site = implicit_site(op, at);
    let mut redistributed: SmallVec<[Tensor; 4]> = inputs.iter().map(|&x| x.clone()).collect();
    for (i, plan) in &decision.moved {
        let (x, to) = (inputs[*i], Layout::with(mesh, &decision.specs[*i]));
        let grad = x.requires_grad() && grad_enabled();
        let part = x.value().part.redistribute(plan, &to, grad, &site)?;
        redistributed[*i] = x.with_value(Value { part, layout: Some(to) });
    }
    Ok(redistributed)
}

/// The call site of implicit communication: the user's line, and the operator that communicates.
fn implicit_site(op: &dyn Op, at: &'static Location<'static>) -> Site {
    Site { operator: Some(op.name().into()), ..Site::of(caller_line(at)) }
}

/// Prints a warning about implicit communication, or returns an error, as [`ImplicitCommunication`] says.
fn check_communication(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    inputs: &[&Tensor],
    at: &Site,
) -> Result<()> {
    let mut implicit = Vec::new();
    for (i, plan) in &decision.moved {
        let Some(from) = inputs[*i].layout() else { continue };
        let to = &decision.specs[*i];
        if !plan.collectives().is_empty() {
            let steps = plan.collectives().join(", ");
            implicit.push(format!("redistributes input {i} from {from} to {to} by {steps}"));
        }
    }
    if !decision.merged.is_empty() && !is_merging_allowed() {
        implicit.push("merges the results of ranks".into());
    }
    if implicit.is_empty() {
        return Ok(());
    }
    let message = format!(
        "implicit communication at {}:{}: it {}; redistribute the inputs first",
        at.file,
        at.line,
        implicit.join(" and ")
    );
    let is_first_rank = || mesh.coordinate().is_some_and(|at| at.iter().all(|&at| at == 0));
    match implicit_communication() {
        ImplicitCommunication::Error => Err(Error::argument(op.name(), message)),
        // One rank prints the warning, because it is the same on all.
        _ if is_first_rank() && is_first_warning(op.name(), at) => {
            eprintln!("warning: {}: {message}", op.name());
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Runs the kernel on this rank's shards. Not generic, so that it is compiled once.
fn run_kernel(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    evaluation: &mut Evaluation,
) -> Result<()> {
    if inputs.iter().any(|x| x.is_meta()) || mesh.coordinate().is_none() {
        return fill_placeholders(mesh, decision, evaluation);
    }
    let mut locals: SmallVec<[&Array; 4]> = SmallVec::new();
    for x in inputs {
        locals.push(x.local_array(op.name())?);
    }
    let here = Here::on_mesh(mesh, &decision.inputs, &decision.shards, &decision.specs, &decision.out_specs);
    let values = if decision.merged.is_empty() {
        on_line(at, &decision.inputs, || op.kernel(&locals, &here))?
    } else {
        run_together(mesh, op, decision, &locals, &here, inputs, at)?
    };
    check_outputs(op, &decision.shards, &values)?;
    for (value, spec) in values.into_iter().zip(&decision.out_specs) {
        evaluation
            .values
            .push(Value { part: LocalTensor::Array(value), layout: Some(Layout::with(mesh, spec)) });
    }
    Ok(())
}

/// Makes outputs without running the kernel: meta tensors have no values, and a rank outside the mesh has no shards.
#[cold]
fn fill_placeholders(mesh: &DeviceMesh, decision: &Decision, evaluation: &mut Evaluation) -> Result<()> {
    for (shard, spec) in decision.shards.iter().zip(&decision.out_specs) {
        let part = Tensor::full_of(shard, 0)?.value().part.clone();
        evaluation.values.push(Value { part, layout: Some(Layout::with(mesh, spec)) });
    }
    Ok(())
}

/// Runs [`Op::together`] in rounds until it returns the outputs. Used if a merging factor is sharded: the ranks along the mesh
/// dims that shard it exchange partial results.
#[cold]
fn run_together(
    mesh: &DeviceMesh,
    op: &dyn Op,
    decision: &Decision,
    locals: &[&Array],
    here: &Here<'_>,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<Arrays> {
    let site = implicit_site(op, at);
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
    let message = format!("`together` returned no outputs after {ROUNDS} rounds");
    Err(Error::argument(op.name(), message))
}
