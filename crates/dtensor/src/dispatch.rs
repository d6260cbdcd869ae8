//! The way every operator takes, from call to result.
//!
//! - Inputs that lie on a mesh are brought to every rank of it.
//! - What the operator says of the inputs' shapes.
//! - Its kernel on this rank's values; none for meta tensors.
//! - A node in the graph if an input requires a gradient.

use smallvec::SmallVec;

use crate::autograd::{Link, Node, Recorded, grad_enabled};
use crate::comm::Site;
use crate::engine::Local;
use crate::mesh::DeviceMesh;
use crate::ops::{Locals, Metas, Op};
use crate::placement::Layout;
use crate::tensor::{Device, Meta, Part, Value, checked_numel};
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
#[track_caller]
pub fn apply<O: Op>(op: O, inputs: &[&Tensor]) -> Result<Tensor> {
    let mut call = Call::default();
    if inputs.iter().any(|x| x.is_distributed()) {
        return Ok(call.distributed(op, inputs, Site::caller())?.swap_remove(0));
    }
    call.evaluate(&op, inputs)?;
    if records(&op, inputs) {
        return Ok(call.record(op, inputs).swap_remove(0));
    }
    Ok(Tensor::new(call.values.swap_remove(0), Link::None))
}

/// Applies an operator and returns all of its outputs.
#[track_caller]
pub fn apply_all<O: Op>(op: O, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 1]>> {
    let mut call = Call::default();
    if inputs.iter().any(|x| x.is_distributed()) {
        return call.distributed(op, inputs, Site::caller());
    }
    call.evaluate(&op, inputs)?;
    call.finish(op, inputs)
}

/// Whether a call leaves a node in the graph.
fn records(op: &dyn Op, inputs: &[&Tensor]) -> bool {
    wants_gradient(inputs) && op.differentiable()
}

fn wants_gradient(inputs: &[&Tensor]) -> bool {
    inputs.iter().any(|x| x.requires_grad()) && grad_enabled()
}

/// A result that something other than an operator's kernel made of `x`, in the graph if `x` requires a gradient.
pub(crate) fn record<R: Recorded>(op: R, x: &Tensor, value: Value) -> Tensor {
    if !wants_gradient(&[x]) {
        return Tensor::new(value, Link::None);
    }
    let (inputs, outputs) = (SmallVec::from_elem(x.meta(), 1), SmallVec::from_elem(value.meta(), 1));
    let node = Node::record(op, &[x], inputs, std::slice::from_ref(&value), outputs);
    Tensor::new(value, Link::Node(node, 0))
}

/// The mesh that the inputs of an operator share. Numbers without dims need not be on it.
fn shared_mesh(op: &'static str, inputs: &[&Tensor]) -> Result<DeviceMesh> {
    let mesh = inputs.iter().find_map(|x| x.mesh());
    let mesh = mesh.ok_or_else(|| Error::argument(op, "no input is distributed"))?;
    for x in inputs {
        match x.mesh() {
            Some(other) if other == mesh => {}
            Some(other) => {
                let message = format!(
                    "cross-mesh operation is not supported: expected tensors on the same mesh, but found {mesh} and {other}"
                );
                return Err(Error::argument(op, message));
            }
            None if x.rank() == 0 => {}
            None => {
                let message = "got mixed local and distributed tensors: distribute the local ones first, with \
                               `distribute_tensor` or `Tensor::from_local`";
                return Err(Error::argument(op, message));
            }
        }
    }
    Ok(mesh.clone())
}

/// The inputs of an operator, each with its whole value on every rank of the mesh that they share.
fn gathered(mesh: &DeviceMesh, inputs: &[&Tensor], at: &Site) -> Result<SmallVec<[Tensor; 2]>> {
    let whole = |x: &&Tensor| match x.layout() {
        // Gradients are those of the whole, in whatever layout: they can go to where the input came from.
        Some(layout) => Ok(x.with_value(x.value_in(&layout.replicated(), at)?)),
        None => Tensor::from_local(x, mesh, ()),
    };
    inputs.iter().map(whole).collect()
}

/// One call of an operator on its way. It is filled in place: moving shapes about costs more than small kernels do.
#[derive(Default)]
struct Call {
    inputs: SmallVec<[Meta; 2]>,
    outputs: Metas,
    values: SmallVec<[Value; 1]>,
}

impl Call {
    /// The way of an operator on tensors that lie on a mesh. What is wrong with them is found before anything is moved.
    fn distributed<O: Op>(mut self, op: O, inputs: &[&Tensor], at: Site) -> Result<SmallVec<[Tensor; 1]>> {
        let mesh = shared_mesh(op.name(), inputs)?;
        let on_meta = self.shapes(&op, inputs)?;
        let inputs = gathered(&mesh, inputs, &at)?;
        let inputs: SmallVec<[&Tensor; 4]> = inputs.iter().collect();
        if mesh.coordinate().is_some() {
            self.compute(&op, &inputs, on_meta)?;
        } else {
            // A rank that is not in the mesh has nothing to compute with.
            for meta in &self.outputs {
                let nothing = Tensor::full_of(&Meta { shape: 0.into(), ..meta.clone() }, 0)?;
                self.values.push(nothing.value().clone());
            }
        }
        for (value, meta) in self.values.iter_mut().zip(&self.outputs) {
            value.layout = Some(Layout::everywhere(&mesh, &meta.shape));
        }
        self.finish(op, &inputs)
    }

    /// The outputs, linked to a node if there is to be one.
    fn finish<O: Op>(self, op: O, inputs: &[&Tensor]) -> Result<SmallVec<[Tensor; 1]>> {
        if records(&op, inputs) {
            return Ok(self.record(op, inputs));
        }
        Ok(self.values.into_iter().map(|value| Tensor::new(value, Link::None)).collect())
    }

    /// Shape rule. Says whether the inputs are meta tensors.
    fn shapes(&mut self, op: &dyn Op, inputs: &[&Tensor]) -> Result<bool> {
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
        Ok(on_meta)
    }

    /// Shape rule and kernel. Not generic, so that it is compiled once.
    fn evaluate(&mut self, op: &dyn Op, inputs: &[&Tensor]) -> Result<()> {
        let on_meta = self.shapes(op, inputs)?;
        self.compute(op, inputs, on_meta)
    }

    /// The kernel, once the shapes are known.
    fn compute(&mut self, op: &dyn Op, inputs: &[&Tensor], on_meta: bool) -> Result<()> {
        if on_meta {
            return self.evaluate_meta(op);
        }
        let mut locals: SmallVec<[&Local; 4]> = SmallVec::new();
        for x in inputs {
            locals.push(x.part(op.name())?);
        }
        let values = op.kernel(&locals, &self.outputs)?;
        let kept = |(v, m): (&Local, &Meta)| v.dims() == &m.shape[..] && v.dtype() == m.dtype;
        if values.len() != self.outputs.len() || !values.iter().zip(&self.outputs).all(kept) {
            return Err(broken_promise(op, &self.outputs, &values));
        }
        for value in values {
            self.values.push(Value::plain(Part::Local(value)));
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
            self.values.push(Value::plain(Part::of_meta(meta.shape.clone(), meta.dtype)));
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
