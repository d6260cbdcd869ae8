//! Dispatch: runs every operator, from call to result.
//!
//! - Local tensors: shape rule, kernel (none for meta tensors), and a node in the graph if an input requires a gradient.
//! - Distributed tensors ([`distributed`]): decide on layouts (cached), redistribute the inputs that need it, then the kernel on
//!   shards and the node.
//!
//! Before either, inputs are cast inside an [`autocast`] scope. After the kernel, listeners are called ([`listen`]).

mod autocast;
mod distributed;
mod listen;
mod mode;

use std::panic::Location;
use std::sync::Arc;

use dtensor_array::origin::caller_line;
use smallvec::SmallVec;

use crate::autograd::{Link, Node, Recorded, grad_enabled};
use crate::layout::Layout;
use crate::ops::{Arrays, Here, Metas, Op};
use crate::tensor::{LocalTensor, Value};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::{Device, Meta};
use dtensor_layout::Decision;

pub use autocast::{autocast, autocast_dtype, autocast_off};
pub(crate) use autocast::{cast_input, cast_metas};
pub(crate) use distributed::{AsOperator, check_same_mesh};
pub(crate) use listen::{OPERATORS, OperatorEvent};
pub(crate) use mode::allow_merging;
pub use mode::{ImplicitCommunication, explicit_communication, implicit_replication};

/// Applies an operator and returns its first output.
///
/// To write an operator, implement [`Op`]: a shape rule, a sharding rule, a kernel for local arrays, and a gradient written with
/// other operators. It then runs on distributed tensors too, forward and backward.
/// [`testing::validate`](crate::testing::validate) checks its sharding rule.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, Array, Result, Shard, Tensor, distribute_tensor};
/// use dtensor::op::{Backward, Grads, Here, Arrays, Meta, Metas, Op, Rule, apply, grads};
///
/// /// Multiplies its input by two.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct Twice;
///
/// impl Op for Twice {
///     fn name(&self) -> &'static str {
///         "twice"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::pointwise(x, out)?.linear(&[0])
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         let doubled = x[0].with_host_slice(|x: &[f32]| x.iter().map(|v| 2.0 * v).collect())?;
///         Ok([Array::from_vec(doubled, x[0].dims())?].into())
///     }
///     fn gradient(&self, cx: &Backward) -> Result<Grads> {
///         Ok(grads![cx.when(0, || cx.dy()?.mul(2.0))?])
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[1f32, 2.], [2])?.requires_grad_(true)?;
/// apply(Twice, &[&x])?.sum_all()?.backward()?;
/// assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [2., 2.]);
///
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], ())?;
///     let x = distribute_tensor(&Tensor::ones([4], DType::F32)?, &mesh, [Shard(0)])?;
///     let y = apply(Twice, &[&x])?;
///     assert_eq!(y.placements(), [Shard(0)]);
///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.; 4]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn apply<O: Op>(op: O, inputs: &[&Tensor]) -> Result<Tensor> {
    let mut outputs = Outputs::new();
    dispatch(op, inputs, Location::caller(), &mut outputs)?;
    Ok(outputs.swap_remove(0))
}

/// Applies an operator and returns all of its outputs.
#[track_caller]
pub fn apply_all<O: Op>(op: O, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 1]>> {
    let mut outputs = Outputs::new();
    dispatch(op, inputs, Location::caller(), &mut outputs)?;
    Ok(outputs)
}

/// The outputs of an operator.
pub(crate) type Outputs = SmallVec<[Tensor; 1]>;

/// Runs an operator. Pushes the outputs into the caller's list, because moving tensors by value costs more than a small kernel.
fn dispatch<O: Op>(
    op: O,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    outputs: &mut Outputs,
) -> Result<()> {
    let done = match autocast_dtype() {
        Some(_) => autocast::cast(&op, inputs, at).and_then(|cast| match cast {
            Some(cast) => dispatch_cast(op, &cast.iter().collect::<SmallVec<[&Tensor; 4]>>(), at, outputs),
            None => dispatch_cast(op, inputs, at, outputs),
        }),
        None => dispatch_cast(op, inputs, at, outputs),
    };
    done.map_err(|error| locate(error, inputs, at))
}

/// Adds to an error of an operator the line that called it, and which operands are shards of distributed tensors.
#[cold]
pub(crate) fn locate(error: Error, inputs: &[&Tensor], at: &'static Location<'static>) -> Error {
    let notes: Vec<String> = inputs.iter().enumerate().filter_map(|(i, x)| local_shard(i, x)).collect();
    error.at(caller_line(at), (!notes.is_empty()).then(|| notes.join("; ")))
}

/// Describes a local operand that was computed from the shard of a distributed tensor, if the graph knows of one close by.
fn local_shard(index: usize, x: &Tensor) -> Option<String> {
    const STEPS: usize = 8;
    let Link::Node(node, _) = x.link() else { return None };
    let mut node = node;
    for _ in 0..if x.is_distributed() { 0 } else { STEPS } {
        if node.op.name() == "to_local" {
            let (full, line) = (&node.inputs[0].shape, node.at);
            return Some(format!(
                "operand {index}, {}, comes from this rank's shard of a distributed {full} tensor (`to_local` at {}:{}; a parallel \
                 style hands out local tensors unless `use_local_output(false)`)",
                x.shape(),
                line.file(),
                line.line()
            ));
        }
        node = node.edges.iter().find_map(|edge| match edge {
            Link::Node(node, _) => Some(node),
            _ => None,
        })?;
    }
    None
}

/// Runs an operator whose inputs have been cast.
fn dispatch_cast<O: Op>(
    op: O,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    outputs: &mut Outputs,
) -> Result<()> {
    if inputs.iter().any(|x| x.is_distributed()) {
        return distributed::run(op, inputs, at, outputs);
    }
    #[cfg(feature = "cuda")]
    if let Some((first, rest)) = inputs.split_first()
        && rest.iter().any(|x| x.device() != first.device())
    {
        let moved = on_one_device(inputs)?;
        let inputs: SmallVec<[&Tensor; 4]> = moved.iter().collect();
        let mut evaluation = Evaluation::default();
        evaluation.run(&op, &inputs, at)?;
        evaluation.finish(op, &inputs, at, None, outputs);
        return Ok(());
    }
    let mut evaluation = Evaluation::default();
    evaluation.run(&op, inputs, at)?;
    evaluation.finish(op, inputs, at, None, outputs);
    Ok(())
}

/// Copies scalars (0-d) in main memory to the GPU that another input is on.
#[cfg(feature = "cuda")]
#[cold]
fn on_one_device(inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 4]>> {
    let gpu = inputs.iter().map(|x| x.device()).find(|device| matches!(device, Device::Cuda(_)));
    let fit = |x: &&Tensor| match gpu {
        Some(gpu) if x.ndim() == 0 && x.device() == Device::Cpu => x.to_device(gpu),
        _ => Ok((*x).clone()),
    };
    inputs.iter().map(fit).collect()
}

fn needs_gradient(inputs: &[&Tensor]) -> bool {
    inputs.iter().any(|x| x.requires_grad()) && grad_enabled()
}

/// Makes a tensor of a value that was computed from `x` by a collective or a conversion. Records a node if `x` requires a gradient.
#[track_caller]
pub(crate) fn record<R: Recorded>(op: R, x: &Tensor, value: Value) -> Tensor {
    let (name, at) = (op.name(), Location::caller());
    let link = if needs_gradient(&[x]) {
        let (inputs, outputs) = (SmallVec::from_elem(x.meta(), 1), SmallVec::from_elem(value.meta(), 1));
        let values = std::slice::from_ref(&value);
        Link::Node(Node::record(op, &[x], inputs, values, outputs, caller_line(at), None), 0)
    } else {
        Link::None
    };
    // A collective on local tensors has its own listeners.
    if OPERATORS.any() && (x.is_distributed() || value.layout.is_some()) {
        listen::notify(name, None, &[x], std::slice::from_ref(&value), &[], at);
    }
    Tensor::new(value, link)
}

/// Makes tensors of values, each of which was computed from one of `inputs`, all together. If some inputs require a gradient, `op`
/// makes of their indices the operator of one node, whose inputs and outputs are theirs.
#[track_caller]
pub(crate) fn record_all<R: Recorded>(
    op: impl FnOnce(Vec<usize>) -> R,
    inputs: &[&Tensor],
    values: Vec<Value>,
) -> Vec<Tensor> {
    let (mut tensors, mut outputs) = (Vec::with_capacity(values.len()), Vec::new());
    let mut with_grad = Vec::new();
    for (i, (x, value)) in inputs.iter().zip(values).enumerate() {
        if needs_gradient(&[x]) {
            with_grad.push(i);
            outputs.push(value.clone());
        }
        tensors.push(Tensor::new(value, Link::None));
    }
    if with_grad.is_empty() {
        return tensors;
    }
    let inputs: Vec<&Tensor> = with_grad.iter().map(|&i| inputs[i]).collect();
    let metas = inputs.iter().map(|x| x.meta()).collect();
    let output_metas = outputs.iter().map(Value::meta).collect();
    let at = caller_line(Location::caller());
    let node = Node::record(op(with_grad.clone()), &inputs, metas, &outputs, output_metas, at, None);
    for (n, (i, value)) in with_grad.into_iter().zip(outputs).enumerate() {
        tensors[i] = Tensor::new(value, Link::Node(node.clone(), n));
    }
    tensors
}

/// One evaluation of an operator. Filled in place, because moving shapes by value costs more than a small kernel.
#[derive(Default)]
struct Evaluation {
    inputs: SmallVec<[Meta; 2]>,
    outputs: Metas,
    values: SmallVec<[Value; 1]>,
}

impl Evaluation {
    /// Runs the shape rule and the kernel on local tensors. Not generic, so that it is compiled once.
    fn run(&mut self, op: &dyn Op, inputs: &[&Tensor], at: &'static Location<'static>) -> Result<()> {
        let mut on_meta = false;
        for x in inputs {
            on_meta |= x.is_meta();
            self.inputs.push(x.meta());
        }
        self.outputs = shapes(op, &self.inputs)?;
        if on_meta {
            self.run_meta(op)?;
            self.notify(op, inputs, &[], at);
            return Ok(());
        }
        let mut locals: SmallVec<[&Array; 4]> = SmallVec::new();
        for x in inputs {
            locals.push(x.local_array(op.name())?);
        }
        let values =
            on_line(at, &self.inputs, || op.kernel(&locals, &Here::alone(&self.inputs, &self.outputs)))?;
        check_outputs(op, &self.outputs, &values)?;
        for value in values {
            self.values.push(Value::plain(LocalTensor::Array(value)));
        }
        self.notify(op, inputs, &[], at);
        Ok(())
    }

    /// Calls the listeners, if there are any.
    #[inline]
    fn notify(
        &self,
        op: &dyn Op,
        inputs: &[&Tensor],
        moved: &[(usize, Layout)],
        at: &'static Location<'static>,
    ) {
        if OPERATORS.any() {
            listen::notify(op.name(), Some(op), inputs, &self.values, moved, at);
        }
    }

    /// Makes meta outputs from the shape rule; no kernel runs.
    #[cold]
    fn run_meta(&mut self, op: &dyn Op) -> Result<()> {
        check_all_meta(op, &self.inputs)?;
        for meta in &mut self.outputs {
            meta.device = Device::Meta;
            self.values.push(Value::plain(LocalTensor::of_meta(meta.shape.clone(), meta.dtype)));
        }
        Ok(())
    }

    /// Makes tensors of the values. Records a node if an input requires a gradient.
    fn finish<O: Op>(
        self,
        op: O,
        inputs: &[&Tensor],
        at: &'static Location<'static>,
        decision: Option<Arc<Decision>>,
        outputs: &mut Outputs,
    ) {
        if !(needs_gradient(inputs) && op.differentiable()) {
            outputs.extend(self.values.into_iter().map(|value| Tensor::new(value, Link::None)));
            return;
        }
        let (metas, out) = match &decision {
            Some(decision) => (decision.inputs.clone(), decision.outputs.clone()),
            None => (self.inputs, self.outputs),
        };
        let floats: SmallVec<[bool; 4]> = out.iter().map(|meta| meta.dtype.is_float()).collect();
        let node = Node::record(op, inputs, metas, &self.values, out, caller_line(at), decision);
        for (i, value) in self.values.into_iter().enumerate() {
            let link = if floats[i] { Link::Node(node.clone(), i) } else { Link::None };
            outputs.push(Tensor::new(value, link));
        }
    }
}

/// Runs a kernel. One for a GPU finds invalid values later, and must know the line that called it.
#[inline(always)]
pub(crate) fn on_line<R>(at: &'static Location<'static>, inputs: &[Meta], kernel: impl FnOnce() -> R) -> R {
    #[cfg(feature = "cuda")]
    if let Some(Meta { device: Device::Cuda(_), .. }) = inputs.first() {
        return dtensor_array::origin::with_caller_line(caller_line(at), kernel);
    }
    let _ = (at, inputs);
    kernel()
}

/// Returns an error if meta tensors are mixed with tensors that have values.
fn check_all_meta(op: &dyn Op, inputs: &[Meta]) -> Result<()> {
    match inputs.iter().find(|meta| meta.device != Device::Meta) {
        Some(other) => Err(dtensor_array::Error::devices(op.name(), Device::Meta, other.device)),
        None => Ok(()),
    }
}

/// Runs the shape rule, and checks that there is an output and that no shape overflows.
#[inline]
pub(crate) fn shapes(op: &dyn Op, inputs: &[Meta]) -> Result<Metas> {
    let outputs = op.shape(inputs)?;
    if outputs.is_empty() {
        return Err(Error::argument(op.name(), "the shape rule returned no outputs"));
    }
    for meta in &outputs {
        meta.shape.checked_numel(op.name())?;
    }
    Ok(outputs)
}

/// Returns an error if the kernel's outputs differ from those of the shape rule.
fn check_outputs(op: &dyn Op, expected: &[Meta], outputs: &Arrays) -> Result<()> {
    let is_there = |v: &Array, m: &Meta| cfg!(not(feature = "cuda")) || v.device() == m.device;
    let matches =
        |(v, m): (&Array, &Meta)| v.dims() == &m.shape[..] && v.dtype() == m.dtype && is_there(v, m);
    if outputs.len() == expected.len() && outputs.iter().zip(expected).all(matches) {
        return Ok(());
    }
    Err(unexpected_outputs(op, expected, outputs))
}

/// Describes an output: dtype, shape, and the device if it is not main memory.
fn describe_output(Meta { shape, dtype, device }: &Meta) -> String {
    match device {
        Device::Cpu => format!("{dtype} {shape}"),
        device => format!("{dtype} {shape} on {device}"),
    }
}

#[cold]
fn unexpected_outputs(op: &dyn Op, expected: &[Meta], outputs: &Arrays) -> Error {
    let list = |metas: &mut dyn Iterator<Item = Meta>| {
        metas.map(|meta| describe_output(&meta)).collect::<Vec<_>>().join(", ")
    };
    let message = format!(
        "the shape rule returned {} outputs ({}), but the kernel returned {} ({})",
        expected.len(),
        list(&mut expected.iter().cloned()),
        outputs.len(),
        list(&mut outputs.iter().map(Array::meta)),
    );
    Error::argument(op.name(), message)
}
