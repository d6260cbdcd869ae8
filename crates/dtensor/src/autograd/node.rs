//! One recorded operator.

use std::cell::Cell;
use std::fmt::Debug;
use std::panic::Location;
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::comm::Site;
use crate::mesh::DeviceMesh;
use crate::ops::Op;
use crate::placement::Layout;
use crate::sharding::Decision;
use crate::tensor::{Meta, Value};
use crate::{Error, Result, Tensor};

/// Where a tensor's gradient goes.
#[derive(Clone, Default)]
pub(crate) enum Link {
    /// Nowhere.
    #[default]
    None,
    /// Into a leaf's own store.
    Leaf(Arc<Leaf>),
    /// Back through the operator whose n-th output the tensor is.
    Node(Arc<Node>, usize),
}

impl Link {
    fn moment(&self) -> Moment {
        match self {
            Link::Node(node, _) => node.moment,
            _ => Moment(0),
        }
    }
}

/// A point in the time of the thread that records: later for what it records later, and for each node later than for those
/// it depends on, whoever recorded these.
///
/// A backward pass goes from the latest to the earliest: it never meets a node before all of its users, and on ranks that
/// called the same collectives in the same order it calls their gradients in the same order too, whatever else
/// each of them did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

thread_local! {
    static NEXT: Cell<u64> = const { Cell::new(1) };
    /// The moment that a node is to have that is recorded later.
    static EARLIER: Cell<Option<Moment>> = const { Cell::new(None) };
}

impl Moment {
    /// Now, on this thread.
    pub(crate) fn now() -> Self {
        Moment(NEXT.replace(NEXT.get() + 1))
    }

    /// Of a node that is being recorded and depends on others.
    fn after(others: Option<Moment>) -> Self {
        let moment = EARLIER.get().unwrap_or_else(Moment::now);
        let moment = others.map_or(moment, |Moment(other)| moment.max(Moment(other + 1)));
        NEXT.set(NEXT.get().max(moment.0 + 1));
        moment
    }

    /// Runs `body`, which applies one operator, as if it had been run at this moment.
    pub(crate) fn record<R>(self, body: impl FnOnce() -> R) -> R {
        struct Restore(Option<Moment>);
        impl Drop for Restore {
            fn drop(&mut self) {
                EARLIER.set(self.0);
            }
        }
        let _restore = Restore(EARLIER.replace(Some(self)));
        body()
    }
}

/// The gradient collected by a leaf.
#[derive(Default)]
pub(crate) struct Leaf {
    pub(crate) grad: Mutex<Option<Tensor>>,
    /// How the leaf lies on a mesh, and so its gradient.
    pub(crate) layout: Option<Layout>,
}

impl Leaf {
    /// A gradient where the leaf lies, whatever way it came: nobody has to communicate to use it.
    pub(super) fn settled(&self, grad: &Tensor, at: &Site) -> Result<Tensor> {
        match &self.layout {
            Some(layout) if grad.layout() != Some(layout) => grad.relaid_at(layout, at),
            _ => Ok(grad.clone()),
        }
    }
}

/// What a node knows of what it records: all operators, and what moves tensors on and off meshes.
pub(crate) trait Recorded: Debug + Send + Sync + 'static {
    /// The name in messages.
    fn name(&self) -> &'static str;

    /// What [`gradient`](Recorded::gradient) reads.
    fn saves(&self) -> Saves {
        Saves::NOTHING
    }

    /// The gradients of the inputs from those of the outputs.
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads>;
}

impl<O: Op> Recorded for O {
    fn name(&self) -> &'static str {
        Op::name(self)
    }

    fn saves(&self) -> Saves {
        Op::saves(self)
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Op::gradient(self, cx)
    }
}

/// A recorded operator. One allocation: the operator lies at its end.
pub(crate) struct Node<O: Recorded + ?Sized = dyn Recorded> {
    /// When it was recorded.
    pub(crate) moment: Moment,
    /// The line that asked for it.
    pub(crate) at: &'static Location<'static>,
    pub(crate) edges: SmallVec<[Link; 2]>,
    pub(crate) inputs: SmallVec<[Meta; 2]>,
    pub(crate) outputs: SmallVec<[Meta; 1]>,
    /// How the operator was run, if its inputs lie on a mesh.
    pub(crate) decision: Option<Arc<Decision>>,
    /// The mesh that the inputs lie on, if they do, and that of the outputs.
    pub(crate) from: Option<DeviceMesh>,
    pub(crate) onto: Option<DeviceMesh>,
    pub(crate) saved: Mutex<Option<SavedValues>>,
    pub(crate) op: O,
}

/// The values a gradient rule needs. They carry no links: those are the node's edges, and a value that linked back
/// to its own node would keep it alive for ever.
#[derive(Clone)]
pub(crate) struct SavedValues {
    inputs: SmallVec<[Option<Value>; 2]>,
    outputs: SmallVec<[Option<Value>; 1]>,
}

impl<O: Recorded> Node<O> {
    pub(crate) fn record(
        op: O,
        inputs: &[&Tensor],
        input_metas: SmallVec<[Meta; 2]>,
        outputs: &[Value],
        output_metas: SmallVec<[Meta; 1]>,
        at: &'static Location<'static>,
        decision: Option<Arc<Decision>>,
    ) -> Arc<Node> {
        let saves = op.saves();
        let saved = SavedValues {
            inputs: inputs
                .iter()
                .enumerate()
                .map(|(i, x)| saves.input(i).then(|| x.value().clone()))
                .collect(),
            outputs: outputs.iter().enumerate().map(|(i, y)| saves.output(i).then(|| y.clone())).collect(),
        };
        let edges: SmallVec<[Link; 2]> = inputs.iter().map(|x| x.link().clone()).collect();
        let mesh = |value: &Value| value.layout.as_ref().map(|layout| layout.mesh().clone());
        Arc::new(Node {
            moment: Moment::after(edges.iter().map(Link::moment).max()),
            at,
            decision,
            edges,
            inputs: input_metas,
            outputs: output_metas,
            from: inputs.first().and_then(|x| mesh(x.value())),
            onto: outputs.first().and_then(mesh),
            saved: Mutex::new(Some(saved)),
            op,
        })
    }
}

impl<O: Recorded + ?Sized> Drop for Node<O> {
    /// A long chain of nodes is taken apart by a loop: dropping it recursively would overflow the stack.
    fn drop(&mut self) {
        let mut pending: Vec<Link> = std::mem::take(&mut self.edges).into_vec();
        while let Some(link) = pending.pop() {
            if let Link::Node(mut node, _) = link
                && let Some(node) = Arc::get_mut(&mut node)
            {
                pending.extend(std::mem::take(&mut node.edges));
            }
        }
    }
}

/// Which inputs and outputs an operator's gradient rule reads. What is not named is not kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saves {
    inputs: u32,
    outputs: u32,
}

impl Saves {
    /// Nothing: shapes suffice.
    pub const NOTHING: Saves = Saves { inputs: 0, outputs: 0 };
    /// Every input.
    pub const INPUTS: Saves = Saves { inputs: u32::MAX, outputs: 0 };
    /// Every output.
    pub const OUTPUTS: Saves = Saves { inputs: 0, outputs: u32::MAX };
    /// Everything.
    pub const ALL: Saves = Saves { inputs: u32::MAX, outputs: u32::MAX };

    /// The inputs and outputs at these positions, of the first 31 each. Positions that are not there are passed over.
    pub const fn only(inputs: &[u32], outputs: &[u32]) -> Saves {
        const fn bits(positions: &[u32]) -> u32 {
            let (mut bits, mut i) = (0, 0);
            while i < positions.len() {
                assert!(positions[i] < 31, "only the first 31 inputs or outputs can be told apart");
                bits |= 1 << positions[i];
                i += 1;
            }
            bits
        }
        Saves { inputs: bits(inputs), outputs: bits(outputs) }
    }

    /// The inputs at these positions.
    pub const fn only_inputs(positions: &[u32]) -> Saves {
        Saves::only(positions, &[])
    }

    fn input(self, i: usize) -> bool {
        self.inputs == u32::MAX || self.inputs.checked_shr(i as u32).unwrap_or(0) & 1 == 1
    }

    fn output(self, i: usize) -> bool {
        self.outputs == u32::MAX || self.outputs.checked_shr(i as u32).unwrap_or(0) & 1 == 1
    }
}

/// The gradients of an operator's inputs, in their order; `None` for an input that needs none.
pub type Grads = SmallVec<[Option<Tensor>; 3]>;

/// What a gradient rule is given: the saved values, the gradients of the outputs, and who asks.
#[derive(Debug)]
pub struct Backward<'a> {
    node: &'a Arc<Node>,
    saved: SavedValues,
    grads: &'a [Option<Tensor>],
}

impl<'a> Backward<'a> {
    /// Takes what the node saved; `retain` leaves a copy for another pass.
    pub(crate) fn begin(node: &'a Arc<Node>, grads: &'a [Option<Tensor>], retain: bool) -> Result<Self> {
        let mut saved = node.saved.lock();
        let values = if retain { saved.clone() } else { saved.take() };
        let saved = values.ok_or_else(|| Error::Autograd {
            op: node.op.name(),
            message: "trying to backward through the graph a second time: the saved values have been freed; \
                      ask the first pass to retain the graph"
                .into(),
        })?;
        Ok(Backward { node, saved, grads })
    }

    fn missing(&self, what: &str, i: usize) -> Error {
        Error::Autograd {
            op: self.node.op.name(),
            message: format!("{what} {i} was not saved for the gradient"),
        }
    }

    /// The i-th input.
    pub fn input(&self, i: usize) -> Result<Tensor> {
        let value = self.saved.inputs.get(i).cloned().flatten().ok_or_else(|| self.missing("input", i))?;
        Ok(Tensor::new(value, self.node.edges[i].clone()))
    }

    /// The i-th output.
    pub fn output(&self, i: usize) -> Result<Tensor> {
        let value = self.saved.outputs.get(i).cloned().flatten().ok_or_else(|| self.missing("output", i))?;
        Ok(Tensor::new(value, Link::Node(self.node.clone(), i)))
    }

    /// Shape and dtype of the i-th input.
    pub fn input_meta(&self, i: usize) -> &Meta {
        &self.node.inputs[i]
    }

    /// Zeros in the place of the i-th input: of its shape and dtype, and where it lay when it was used.
    pub fn zeros(&self, i: usize) -> Result<Tensor> {
        match self.layout(i) {
            Some(layout) => Tensor::full_laid(&layout.without_partials(), self.input_meta(i), 0),
            None => Tensor::zeros_for(self.input_meta(i), self.node.from.as_ref()),
        }
    }

    /// How the i-th input lay when it was used.
    pub(crate) fn layout(&self, i: usize) -> Option<Layout> {
        let (mesh, decision) = self.node.from.as_ref().zip(self.node.decision.as_ref())?;
        Some(Layout::with(mesh, &decision.specs[i]))
    }

    /// The number of inputs.
    pub fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    /// Whether the i-th input wants a gradient. An input that is not there wants none.
    pub fn needs(&self, i: usize) -> bool {
        self.node.edges.get(i).is_some_and(|edge| !matches!(edge, Link::None))
    }

    /// The gradient of the first output: zeros if nothing used it.
    pub fn dy(&self) -> Result<Tensor> {
        self.dy_of(0)
    }

    /// The gradient of the i-th output: zeros if nothing used it.
    pub fn dy_of(&self, i: usize) -> Result<Tensor> {
        match (self.grads.get(i), self.node.outputs.get(i)) {
            (Some(Some(grad)), _) => Ok(grad.clone()),
            (_, Some(meta)) => Tensor::zeros_for(meta, self.node.onto.as_ref()),
            _ => {
                let message = format!("there is no output {i}");
                Err(Error::Autograd { op: self.node.op.name(), message })
            }
        }
    }

    /// The gradient of the i-th input as `rule` computes it, if one is wanted.
    pub fn when(&self, i: usize, rule: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        if self.needs(i) { rule().map(Some) } else { Ok(None) }
    }

    /// As [`when`](Backward::when), summed over the dims along which the i-th input was broadcast.
    pub fn when_broadcast(&self, i: usize, rule: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        self.when(i, || rule()?.sum_to(&self.input_meta(i).shape))
    }
}

impl std::fmt::Debug for SavedValues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SavedValues({} inputs, {} outputs)", self.inputs.len(), self.outputs.len())
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({:?}, {:?})", &self.op, self.moment)
    }
}
