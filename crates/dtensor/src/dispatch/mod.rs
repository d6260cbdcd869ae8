//! The way every operator takes, from call to result.
//!
//! - On tensors of this rank alone: what the operator says of the inputs' shapes, its kernel (none for meta tensors), and a
//!   node in the graph if an input requires a gradient.
//! - On tensors that lie on a mesh ([`distributed`]): in between, how they have to lie is decided, or remembered, and those that
//!   do not are moved.
//!
//! Before either, where somebody has asked for it, inputs are cast and listeners are told ([`around`]).

mod around;
mod autocast;
mod distributed;
mod mode;

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::autograd::{Link, Node, Recorded, grad_enabled};
use crate::comm::asked_by;
use crate::engine::Local;
use crate::ops::{Here, Locals, Metas, Op};
use crate::scope::within;
use crate::sharding::Decision;
use crate::tensor::{Device, Meta, Part, Value, checked_numel};
use crate::{Error, Result, Tensor};

pub(crate) use around::{Heard, overheard};
pub use autocast::{autocast, autocast_dtype, autocast_off};
pub(crate) use autocast::{cast_metas, prepared, within_autocast};
pub(crate) use distributed::one_mesh;
pub use mode::{ImplicitCommunication, explicit_communication, implicit_replication};
pub(crate) use mode::{Modes, in_loss_parallel, within_loss_parallel};

/// Turns the inputs of an operator into those that it is run on. The names are the function's own: nothing is made, and nothing
/// dropped, where nobody has asked for anything.
macro_rules! as_cast {
    ($op:ident, $inputs:ident, $at:ident) => {
        let (cast, refs): (_, SmallVec<[&Tensor; 4]>);
        let mut $inputs = $inputs;
        if around::active() {
            cast = autocast::cast(&$op, $inputs, $at)?;
            if let Some(cast) = &cast {
                refs = cast.iter().collect();
                $inputs = &refs;
            }
        }
    };
}

/// Applies an operator with one output.
///
/// An operator of one's own is one value: what it makes of shapes, on which parts of its inputs it can be run, a kernel for this
/// rank's parts, and a gradient written with other operators. It then runs on distributed tensors, too, forward and backward;
/// [`testing::validate`](crate::testing::validate) proves its rule.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{
///     Backward, DType, DeviceMesh, Grads, Here, Local, Locals, Meta, Metas, Op, Result, Rule, Shard, Tensor, apply,
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
///     fn kernel(&self, x: &[&Local], _: &Here) -> Result<Locals> {
///         let doubled = x[0].to_vec::<f32>()?.into_iter().map(|v| 2.0 * v).collect();
///         Ok([Local::from_vec(doubled, x[0].dims())?].into_iter().collect())
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
    let at = Location::caller();
    as_cast!(op, inputs, at);
    if inputs.iter().any(|x| x.is_distributed()) {
        return Ok(distributed::run(op, inputs, at)?.swap_remove(0));
    }
    let name = op.name();
    let mut call = Call::default();
    call.evaluate(&op, inputs)?;
    let output = if records(&op, inputs) {
        call.record(op, inputs, at, None).swap_remove(0)
    } else {
        Tensor::new(call.values.swap_remove(0), Link::None)
    };
    if around::active() {
        around::told(&Heard { name, inputs, outputs: std::slice::from_ref(&output), moved: &[], at });
    }
    Ok(output)
}

/// Applies an operator and returns all of its outputs.
#[track_caller]
pub fn apply_all<O: Op>(op: O, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 1]>> {
    let at = Location::caller();
    as_cast!(op, inputs, at);
    if inputs.iter().any(|x| x.is_distributed()) {
        return distributed::run(op, inputs, at);
    }
    let name = op.name();
    let mut call = Call::default();
    call.evaluate(&op, inputs)?;
    let outputs = if records(&op, inputs) { call.record(op, inputs, at, None) } else { call.unrecorded() };
    if around::active() {
        around::told(&Heard { name, inputs, outputs: &outputs, moved: &[], at });
    }
    Ok(outputs)
}

/// Whether a call leaves a node in the graph.
fn records(op: &dyn Op, inputs: &[&Tensor]) -> bool {
    wants_gradient(inputs) && op.differentiable()
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
    let output = Tensor::new(value, link);
    // What moves values of this rank alone is a collective, and is listened to as such.
    if around::active() && (x.is_distributed() || output.is_distributed()) {
        let outputs = std::slice::from_ref(&output);
        around::told(&Heard { name, inputs: &[x], outputs, moved: &[], at });
    }
    output
}

/// An operator that has been run on tensors of this rank alone.
pub(crate) struct Applied<'a> {
    pub(crate) op: &'a dyn Op,
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) metas: &'a [Meta],
    pub(crate) outputs: &'a [Meta],
    pub(crate) values: &'a Locals,
}

/// Somebody who looks at every operator that has been run.
pub(crate) type Observer = fn(&Applied<'_>) -> Result<()>;

thread_local! {
    static OBSERVER: Cell<Option<Observer>> = const { Cell::new(None) };
}

/// Runs `body` with an observer, or without one.
pub(crate) fn observed<R>(by: Option<Observer>, body: impl FnOnce() -> R) -> R {
    within(&OBSERVER, by, body)
}

/// One call of an operator on its way. It is filled in place: moving shapes about costs more than small kernels do.
#[derive(Default)]
struct Call {
    inputs: SmallVec<[Meta; 2]>,
    outputs: Metas,
    values: SmallVec<[Value; 1]>,
}

impl Call {
    /// The outputs, without a node.
    fn unrecorded(self) -> SmallVec<[Tensor; 1]> {
        self.values.into_iter().map(|value| Tensor::new(value, Link::None)).collect()
    }

    /// Shape rule and kernel. Not generic, so that it is compiled once.
    fn evaluate(&mut self, op: &dyn Op, inputs: &[&Tensor]) -> Result<()> {
        let mut on_meta = false;
        for x in inputs {
            on_meta |= x.is_meta();
            self.inputs.push(x.meta());
        }
        self.outputs = shapes(op, &self.inputs)?;
        if on_meta {
            return self.evaluate_meta(op);
        }
        let mut locals: SmallVec<[&Local; 4]> = SmallVec::new();
        for x in inputs {
            locals.push(x.part(op.name())?);
        }
        let values = op.kernel(&locals, &Here::alone(&self.inputs, &self.outputs))?;
        kept(op, &self.outputs, &values)?;
        if let Some(observe) = OBSERVER.get() {
            observe(&Applied { op, inputs, metas: &self.inputs, outputs: &self.outputs, values: &values })?;
        }
        for value in values {
            self.values.push(Value::plain(Part::Local(value)));
        }
        Ok(())
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

    /// Leaves a node in the graph and links the outputs to it.
    fn record<O: Op>(
        self,
        op: O,
        inputs: &[&Tensor],
        at: &'static Location<'static>,
        decision: Option<Arc<Decision>>,
    ) -> SmallVec<[Tensor; 1]> {
        let floats: SmallVec<[bool; 4]> = self.outputs.iter().map(|meta| meta.dtype.is_float()).collect();
        let node = Node::record(op, inputs, self.inputs, &self.values, self.outputs, asked_by(at), decision);
        let link = |(i, value): (usize, Value)| {
            Tensor::new(value, if floats[i] { Link::Node(node.clone(), i) } else { Link::None })
        };
        self.values.into_iter().enumerate().map(link).collect()
    }
}

fn all_meta(op: &dyn Op, inputs: &[Meta]) -> Result<()> {
    match inputs.iter().find(|meta| meta.device != Device::Meta) {
        Some(other) => Err(Error::devices(op.name(), Device::Meta, other.device)),
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
        checked_numel(op.name(), &meta.shape)?;
    }
    Ok(outputs)
}

/// That a kernel has made what was promised.
fn kept(op: &dyn Op, promised: &[Meta], made: &Locals) -> Result<()> {
    let alike = |(v, m): (&Local, &Meta)| v.dims() == &m.shape[..] && v.dtype() == m.dtype;
    if made.len() == promised.len() && made.iter().zip(promised).all(alike) {
        return Ok(());
    }
    Err(broken_promise(op, promised, made))
}

#[cold]
fn broken_promise(op: &dyn Op, promised: &[Meta], made: &Locals) -> Error {
    let list = |metas: &mut dyn Iterator<Item = Meta>| {
        metas.map(|meta| format!("{} {}", meta.dtype, meta.shape)).collect::<Vec<_>>().join(", ")
    };
    let message = format!(
        "the shape rule promised {} outputs ({}), but the kernel made {} ({})",
        promised.len(),
        list(&mut promised.iter().cloned()),
        made.len(),
        list(&mut made.iter().map(Local::meta)),
    );
    Error::argument(op.name(), message)
}
