//! The way every operator takes, from call to result.
//!
//! - On tensors of this rank alone: what the operator says of the inputs' shapes, its kernel (none for meta tensors), and a
//!   node in the graph if an input requires a gradient.
//! - On tensors that lie on a mesh ([`distributed`]): in between, how they have to lie is decided, or remembered, and those that
//!   do not are moved.
//!
//! Before either, inputs are cast inside an [`autocast`] scope; after the kernel, listeners are told ([`listen`]).

mod autocast;
mod distributed;
mod listen;
mod mode;

use std::panic::Location;
use std::sync::Arc;

use dtensor_array::origin::asked_by;
use smallvec::SmallVec;

use crate::autograd::{Link, Node, Recorded, grad_enabled};
use crate::layout::Layout;
use crate::ops::{Arrays, Here, Metas, Op};
use crate::tensor::{Part, Value};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::{Device, Meta};
use dtensor_layout::Decision;

pub use autocast::{autocast, autocast_dtype, autocast_off};
pub(crate) use autocast::{cast_metas, prepared};
pub(crate) use distributed::{Described, one_mesh};
pub(crate) use listen::{Heard, OPERATORS};
pub(crate) use mode::allow_merging;
pub use mode::{ImplicitCommunication, explicit_communication, implicit_replication};

/// Applies an operator with one output.
///
/// An operator of one's own is one value: what it makes of shapes, on which parts of its inputs it can be run, a kernel for this
/// rank's parts, and a gradient written with other operators. It then runs on distributed tensors, too, forward and backward;
/// [`testing::validate`](crate::testing::validate) proves its rule.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{
///     Backward, DType, DeviceMesh, Grads, Here, Array, Arrays, Meta, Metas, Op, Result, Rule, Shard, Tensor, apply,
///     distribute_tensor,
/// };
///
/// /// Twice its input.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct Twice;
///
/// impl Op for Twice {
///     fn name(&self) -> &'static str {
///         "twice"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into_iter().collect())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::pointwise(x, out)?.linear(&[0])
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         let doubled = x[0].copy_to_host::<f32>()?.into_iter().map(|v| 2.0 * v).collect();
///         Ok([Array::from_vec(doubled, x[0].dims())?].into_iter().collect())
///     }
///     fn gradient(&self, cx: &Backward) -> Result<Grads> {
///         Ok([cx.when(0, || cx.dy()?.mul(2.0))?].into_iter().collect())
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

/// The way of every operator. Outputs are filled in where they will be: moving tensors about costs more than small kernels do.
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
    error.at(asked_by(at), (!notes.is_empty()).then(|| notes.join("; ")))
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

/// As [`dispatch`], once the inputs have the dtypes that the operator is run in.
fn dispatch_cast<O: Op>(
    op: O,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
    outputs: &mut Outputs,
) -> Result<()> {
    if inputs.iter().any(|x| x.is_distributed()) {
        return distributed::run(op, inputs, at, outputs);
    }
    let mut call = Call::default();
    call.evaluate(&op, inputs, at)?;
    call.finish(op, inputs, at, None, outputs);
    Ok(())
}

fn wants_gradient(inputs: &[&Tensor]) -> bool {
    inputs.iter().any(|x| x.requires_grad()) && grad_enabled()
}

/// A result that something other than an operator's kernel made of `x`, in the graph if `x` requires a gradient.
#[track_caller]
pub(crate) fn record<R: Recorded>(op: R, x: &Tensor, value: Value) -> Tensor {
    let (name, at) = (op.name(), Location::caller());
    let link = if wants_gradient(&[x]) {
        let (inputs, outputs) = (SmallVec::from_elem(x.meta(), 1), SmallVec::from_elem(value.meta(), 1));
        let values = std::slice::from_ref(&value);
        Link::Node(Node::record(op, &[x], inputs, values, outputs, asked_by(at), None), 0)
    } else {
        Link::None
    };
    // What moves values of this rank alone is a collective, and is listened to as such.
    if OPERATORS.any() && (x.is_distributed() || value.layout.is_some()) {
        listen::tell(name, None, &[x], std::slice::from_ref(&value), &[], at);
    }
    Tensor::new(value, link)
}

/// One call of an operator on its way. It is filled in place: moving shapes about costs more than small kernels do.
#[derive(Default)]
struct Call {
    inputs: SmallVec<[Meta; 2]>,
    outputs: Metas,
    values: SmallVec<[Value; 1]>,
}

impl Call {
    /// Shape rule and kernel. Not generic, so that it is compiled once.
    fn evaluate(&mut self, op: &dyn Op, inputs: &[&Tensor], at: &'static Location<'static>) -> Result<()> {
        let mut on_meta = false;
        for x in inputs {
            on_meta |= x.is_meta();
            self.inputs.push(x.meta());
        }
        self.outputs = shapes(op, &self.inputs)?;
        if on_meta {
            self.evaluate_meta(op)?;
            self.tell(op, inputs, &[], at);
            return Ok(());
        }
        let mut locals: SmallVec<[&Array; 4]> = SmallVec::new();
        for x in inputs {
            locals.push(x.part(op.name())?);
        }
        let values = op.kernel(&locals, &Here::alone(&self.inputs, &self.outputs))?;
        kept(op, &self.outputs, &values)?;
        for value in values {
            self.values.push(Value::plain(Part::Array(value)));
        }
        self.tell(op, inputs, &[], at);
        Ok(())
    }

    /// Tells listeners of the operator that has been run.
    #[inline]
    fn tell(
        &self,
        op: &dyn Op,
        inputs: &[&Tensor],
        moved: &[(usize, Layout)],
        at: &'static Location<'static>,
    ) {
        if OPERATORS.any() {
            listen::tell(op.name(), Some(op), inputs, &self.values, moved, at);
        }
    }

    /// Shapes are all there is to a meta tensor.
    #[cold]
    fn evaluate_meta(&mut self, op: &dyn Op) -> Result<()> {
        all_meta(op, &self.inputs)?;
        for meta in &mut self.outputs {
            meta.device = Device::Meta;
            self.values.push(Value::plain(Part::of_meta(meta.shape.clone(), meta.dtype)));
        }
        Ok(())
    }

    /// Makes tensors of the values: with a node in the graph if an input requires a gradient.
    fn finish<O: Op>(
        self,
        op: O,
        inputs: &[&Tensor],
        at: &'static Location<'static>,
        decision: Option<Arc<Decision>>,
        outputs: &mut Outputs,
    ) {
        if !(wants_gradient(inputs) && op.differentiable()) {
            outputs.extend(self.values.into_iter().map(|value| Tensor::new(value, Link::None)));
            return;
        }
        let (metas, out) = match &decision {
            Some(decision) => (decision.inputs.clone(), decision.outputs.clone()),
            None => (self.inputs, self.outputs),
        };
        let floats: SmallVec<[bool; 4]> = out.iter().map(|meta| meta.dtype.is_float()).collect();
        let node = Node::record(op, inputs, metas, &self.values, out, asked_by(at), decision);
        for (i, value) in self.values.into_iter().enumerate() {
            let link = if floats[i] { Link::Node(node.clone(), i) } else { Link::None };
            outputs.push(Tensor::new(value, link));
        }
    }
}

fn all_meta(op: &dyn Op, inputs: &[Meta]) -> Result<()> {
    match inputs.iter().find(|meta| meta.device != Device::Meta) {
        Some(other) => Err(dtensor_array::Error::devices(op.name(), Device::Meta, other.device)),
        None => Ok(()),
    }
}

/// What an operator says of its outputs, checked.
#[inline]
pub(crate) fn shapes(op: &dyn Op, inputs: &[Meta]) -> Result<Metas> {
    let outputs = op.shape(inputs)?;
    if outputs.is_empty() {
        return Err(Error::argument(op.name(), "the shape rule promises no output"));
    }
    for meta in &outputs {
        meta.shape.checked_numel(op.name())?;
    }
    Ok(outputs)
}

/// That a kernel has made what was promised.
fn kept(op: &dyn Op, promised: &[Meta], made: &Arrays) -> Result<()> {
    let alike = |(v, m): (&Array, &Meta)| v.dims() == &m.shape[..] && v.dtype() == m.dtype;
    if made.len() == promised.len() && made.iter().zip(promised).all(alike) {
        return Ok(());
    }
    Err(broken_promise(op, promised, made))
}

#[cold]
fn broken_promise(op: &dyn Op, promised: &[Meta], made: &Arrays) -> Error {
    let list = |metas: &mut dyn Iterator<Item = Meta>| {
        metas.map(|meta| format!("{} {}", meta.dtype, meta.shape)).collect::<Vec<_>>().join(", ")
    };
    let message = format!(
        "the shape rule promised {} outputs ({}), but the kernel made {} ({})",
        promised.len(),
        list(&mut promised.iter().cloned()),
        made.len(),
        list(&mut made.iter().map(Array::meta)),
    );
    Error::argument(op.name(), message)
}
