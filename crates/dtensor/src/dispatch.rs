//! The way every operator takes, from call to result.
//!
//! 1. what the operator says of the inputs' shapes; 2. its kernel on this rank's values (none for meta tensors);
//! 3. a node in the graph if an input requires a gradient.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::autograd::{Link, Node, grad_enabled};
use crate::engine::Local;
use crate::ops::{Locals, Metas, Op};
use crate::tensor::{Device, Meta, Value, checked_numel};
use crate::{Error, Result, Tensor};

/// Applies an operator with one output.
///
/// ```
/// use dtensor::{Backward, Grads, Local, Locals, Meta, Metas, Op, Result, Saves, Tensor, apply};
///
/// /// Twice its input.
/// #[derive(Debug)]
/// struct Twice;
///
/// impl Op for Twice {
///     fn name(&self) -> &'static str {
///         "twice"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into_iter().collect())
///     }
///     fn kernel(&self, x: &[&Local], _: &[Meta]) -> Result<Locals> {
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
/// # Ok(())
/// # }
/// ```
pub fn apply<O: Op>(op: O, inputs: &[&Tensor]) -> Result<Tensor> {
    let mut call = Call::default();
    call.evaluate(&op, inputs)?;
    if records(&op, inputs) {
        return Ok(call.record(op, inputs).swap_remove(0));
    }
    Ok(Tensor::new(call.values.swap_remove(0), Link::None))
}

/// Applies an operator and returns all of its outputs.
pub fn apply_all<O: Op>(op: O, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 1]>> {
    let mut call = Call::default();
    call.evaluate(&op, inputs)?;
    if records(&op, inputs) {
        return Ok(call.record(op, inputs));
    }
    Ok(call.values.into_iter().map(|value| Tensor::new(value, Link::None)).collect())
}

/// Whether a call leaves a node in the graph.
fn records(op: &dyn Op, inputs: &[&Tensor]) -> bool {
    inputs.iter().any(|x| x.requires_grad()) && grad_enabled() && op.differentiable()
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
    fn evaluate(&mut self, op: &dyn Op, inputs: &[&Tensor]) -> Result<()> {
        let mut on_meta = false;
        for x in inputs {
            on_meta |= x.is_meta();
            self.inputs.push(x.meta());
        }
        self.outputs = op.shape(&self.inputs)?;
        if self.outputs.is_empty() {
            return Err(Error::argument(op.name(), "the shape rule promises no output"));
        }
        for meta in &self.outputs {
            checked_numel(op.name(), &meta.shape)?;
        }
        if on_meta {
            return self.evaluate_meta(op);
        }
        let mut locals: SmallVec<[&Local; 4]> = SmallVec::new();
        for x in inputs {
            locals.push(x.local(op.name())?);
        }
        let values = op.kernel(&locals, &self.outputs)?;
        let kept = |(v, m): (&Local, &Meta)| v.dims() == &m.shape[..] && v.dtype() == m.dtype;
        if values.len() != self.outputs.len() || !values.iter().zip(&self.outputs).all(kept) {
            return Err(broken_promise(op, &self.outputs, &values));
        }
        for value in values {
            self.values.push(Value::Local(value));
        }
        Ok(())
    }

    /// Shapes are all there is to a meta tensor.
    #[cold]
    fn evaluate_meta(&mut self, op: &dyn Op) -> Result<()> {
        if let Some(other) = self.inputs.iter().find(|meta| meta.device != Device::Meta) {
            return Err(Error::devices(op.name(), Device::Meta, other.device));
        }
        for meta in &mut self.outputs {
            meta.device = Device::Meta;
            self.values.push(Value::Meta(Arc::new(meta.clone())));
        }
        Ok(())
    }

    /// Leaves a node in the graph and links the outputs to it.
    fn record<O: Op>(self, op: O, inputs: &[&Tensor]) -> SmallVec<[Tensor; 1]> {
        let floats: SmallVec<[bool; 4]> = self.outputs.iter().map(|meta| meta.dtype.is_float()).collect();
        let node = Node::record(op, inputs, self.inputs, &self.values, self.outputs);
        let link = |(i, value): (usize, Value)| {
            Tensor::new(value, if floats[i] { Link::Node(node.clone(), i) } else { Link::None })
        };
        self.values.into_iter().enumerate().map(link).collect()
    }
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
