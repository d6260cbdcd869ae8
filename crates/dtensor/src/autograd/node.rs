//! [`Node`]: a recorded operator, and [`Backward`], the context of its gradient rule.

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::mem::ManuallyDrop;
use std::panic::Location;
use std::sync::Arc;

use dtensor_array::mode;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::mode::grad_enabled;
use super::region::{Region, add_to_region, in_region};
use super::restore::is_restoring;
use super::saved::{Saved, SavedValues, Saves};
use crate::comm::{RunningModule, Site, running_module};
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::ops::Op;
use crate::owner::Owner;
use crate::tensor::Value;
use crate::{Error, Result, Tensor};
use dtensor_array::Meta;
use dtensor_layout::Decision;
use dtensor_layout::{Partial, Placement};

/// Where the gradient of a tensor goes: its link into the graph.
#[derive(Clone, Default)]
pub(crate) enum Link {
    /// The tensor requires no gradient.
    #[default]
    None,
    /// The tensor is a leaf, which accumulates its gradient.
    Leaf(Arc<Leaf>),
    /// The tensor is the n-th output of this operator, whose gradient rule passes the gradient on.
    Node(Arc<Node>, usize),
}

impl Link {
    fn moment(&self) -> Moment {
        match self {
            Link::Node(node, _) => node.moment,
            _ => Moment(0),
        }
    }

    /// Returns true if the tensor's gradient may have any floating-point dtype.
    pub(super) fn takes_any_float(&self) -> bool {
        matches!(self, Link::Node(node, 0) if node.op.takes_any_float())
    }
}

/// The position of a node in the recording order of its thread. It is also later than the moments of all nodes that the node
/// depends on, on whichever thread they were recorded.
///
/// A backward pass goes from the latest node to the earliest. So it reaches a node after all users of the node, and ranks that
/// called the same collectives in the same order call the gradients of these in the same order too, whatever other operators
/// each rank has recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

thread_local! {
    static NEXT: Cell<u64> = const { Cell::new(1) };
}

mode! {
    /// The moment for the next node, if it was reserved before the node is recorded.
    static RESERVED: Cell<Option<Moment>> = None;
}

impl Moment {
    /// Returns the next moment of this thread.
    pub(crate) fn now() -> Self {
        Moment(NEXT.replace(NEXT.get() + 1))
    }

    /// Returns the moment of a node that is being recorded; `inputs` is the latest moment among the nodes it depends on.
    fn after(inputs: Option<Moment>) -> Self {
        let moment = RESERVED.get().unwrap_or_else(Moment::now);
        let moment = inputs.map_or(moment, |Moment(input)| moment.max(Moment(input + 1)));
        NEXT.set(NEXT.get().max(moment.0 + 1));
        moment
    }

    /// Runs `body`, which records one operator, and gives its node this moment.
    pub(crate) fn record<R>(self, body: impl FnOnce() -> R) -> R {
        RESERVED.within(Some(self), body)
    }
}

/// The accumulated gradient of a leaf.
#[derive(Default)]
pub(crate) struct Leaf {
    pub(crate) grad: Mutex<Option<Tensor>>,
    /// The layout of the leaf, and so of its gradient.
    pub(crate) layout: Option<Layout>,
    pub(crate) owner: Owner,
}

impl Leaf {
    /// Adds gradients in the layout of the leaf, whatever layouts they have, so that using the gradient needs no communication.
    /// The caller at `at` asked for these redistributions, so they do not count as implicit.
    pub(super) fn sum_gradients(&self, grads: &[&Tensor], at: &Site) -> Result<Option<Tensor>> {
        let common = self.common_layout(grads.len());
        let mut sum: Option<Tensor> = None;
        for grad in grads {
            let grad = redistribute_if(grad, common.as_ref(), at)?;
            sum = Some(match sum {
                Some(sum) => sum.add(&grad)?,
                None => grad,
            });
        }
        sum.map(|sum| redistribute_if(&sum, self.layout.as_ref(), at)).transpose()
    }

    /// Returns the layout in which `count` gradients are added. A partial product or extreme cannot be added shard by shard: if the
    /// leaf has such a layout, several gradients are added without partial placements, and their sum is redistributed.
    pub(super) fn common_layout(&self, count: usize) -> Option<Layout> {
        let layout = self.layout.as_ref()?;
        Some(if count > 1 && !is_additive(layout) { layout.without_partials() } else { layout.clone() })
    }
}

/// Redistributes a tensor if a layout is given and differs from the tensor's own.
fn redistribute_if(x: &Tensor, layout: Option<&Layout>, at: &Site) -> Result<Tensor> {
    match layout {
        Some(layout) if x.layout() != Some(layout) => x.redistribute_to(layout, at),
        _ => Ok(x.clone()),
    }
}

/// Returns true if two tensors with this layout can be added shard by shard.
pub(super) fn is_additive(layout: &Layout) -> bool {
    let linear = |p: &Placement| !matches!(p, Partial(op) if !op.is_linear());
    layout.placements().iter().all(linear)
}

/// Something a node can record: every [`Op`], collectives, and the conversions `from_local`, `to_local` and `redistribute`.
pub(crate) trait Recorded: Debug + Send + Sync + 'static {
    /// The name in messages.
    fn name(&self) -> &'static str;

    /// The inputs and outputs that [`gradient`](Recorded::gradient) reads.
    fn saves(&self) -> Saves {
        Saves::NOTHING
    }

    /// See [`Op::takes_any_float`].
    fn takes_any_float(&self) -> bool {
        false
    }

    /// See [`Op::adds_known`].
    fn adds_known(&self) -> bool {
        false
    }

    /// Computes the gradients of the inputs from those of the outputs.
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads>;
}

impl<O: Op> Recorded for O {
    fn name(&self) -> &'static str {
        Op::name(self)
    }

    fn saves(&self) -> Saves {
        Op::saves(self)
    }

    fn takes_any_float(&self) -> bool {
        Op::takes_any_float(self)
    }

    fn adds_known(&self) -> bool {
        Op::adds_known(self)
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Op::gradient(self, cx)
    }
}

/// A recorded operator. The operator is stored inline at the end, so a node is one allocation.
pub(crate) struct Node<O: Recorded + ?Sized = dyn Recorded> {
    /// When the operator was recorded.
    pub(crate) moment: Moment,
    /// The user's line that applied the operator.
    pub(crate) at: &'static Location<'static>,
    /// The module that was running. Known only while a listener tracks modules.
    pub(crate) module: Option<&'static RunningModule>,
    pub(crate) edges: SmallVec<[Link; 2]>,
    pub(crate) inputs: SmallVec<[Meta; 2]>,
    pub(crate) outputs: SmallVec<[Meta; 1]>,
    /// The layouts that the operator ran on, if its inputs are distributed.
    pub(crate) decision: Option<Arc<Decision>>,
    /// The layout of the first input, if it is distributed.
    pub(super) from: Option<Layout>,
    /// The layout of the first output, if it is distributed.
    pub(super) onto: Option<Layout>,
    pub(super) saved: Mutex<Saved>,
    pub(crate) op: O,
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
        let mut saved = SavedValues::of(op.saves(), inputs, outputs);
        if is_restoring() {
            saved.release();
        }
        let edges: SmallVec<[Link; 2]> = inputs.iter().map(|x| x.link().clone()).collect();
        let node: Arc<Node> = Arc::new(Node {
            moment: Moment::after(edges.iter().map(Link::moment).max()),
            at,
            module: running_module(),
            decision,
            edges,
            inputs: input_metas,
            outputs: output_metas,
            from: inputs.first().and_then(|x| x.layout().cloned()),
            onto: outputs.first().and_then(|value| value.layout.clone()),
            saved: Mutex::new(Saved::Values(saved)),
            op,
        });
        if in_region() {
            add_to_region(&node);
        }
        node
    }
}

impl<O: Recorded + ?Sized> Node<O> {
    /// The mesh of the inputs, if they are distributed.
    pub(super) fn mesh(&self) -> Option<&DeviceMesh> {
        self.from.as_ref().map(Layout::mesh)
    }

    /// The mesh of one input. Only leaves can be on other meshes than the first input.
    pub(super) fn mesh_of(&self, input: usize) -> Option<&DeviceMesh> {
        match self.edges.get(input) {
            Some(Link::Leaf(leaf)) => leaf.layout.as_ref().map(Layout::mesh),
            _ => self.mesh(),
        }
    }
}

/// A field of a dropped node that may own the last reference to other nodes.
enum PendingDrop {
    Link(#[expect(dead_code, reason = "stored only to be dropped later")] Link),
    Region(#[expect(dead_code, reason = "stored only to be dropped later")] Arc<Region>),
}

thread_local! {
    /// The queue of the loop in [`Node::drop`]. The loop that fills it also empties it, so the thread-local needs no destructor, and
    /// tensors can be dropped while a thread ends.
    static DROP_QUEUE: ManuallyDrop<RefCell<Vec<PendingDrop>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

mode! {
    static DROPPING: Cell<bool> = false;
}

impl<O: Recorded + ?Sized> Drop for Node<O> {
    /// Drops a long chain of nodes in a loop, because recursion would overflow the stack. One node can own the next through any
    /// value, such as a tensor captured by the body of a checkpoint. So a node that is dropped while the loop runs only adds its
    /// fields to the queue.
    fn drop(&mut self) {
        let may_own_nodes = |edge: &Link| match edge {
            Link::None => false,
            // Most leaves have other handles. The last handle may own a gradient that was itself recorded.
            Link::Leaf(leaf) => Arc::strong_count(leaf) == 1,
            Link::Node(..) => true,
        };
        // The queue is borrowed only to push or pop, never while something is dropped.
        let push = |pending: PendingDrop| DROP_QUEUE.with(|queue| queue.borrow_mut().push(pending));
        for edge in std::mem::take(&mut self.edges) {
            if may_own_nodes(&edge) {
                push(PendingDrop::Link(edge));
            }
        }
        if let Saved::Recompute(region, _) = std::mem::replace(self.saved.get_mut(), Saved::Freed) {
            push(PendingDrop::Region(region));
        }
        if DROPPING.get() {
            return;
        }
        DROPPING.within(true, || {
            while let Some(last) = DROP_QUEUE.with(|queue| queue.borrow_mut().pop()) {
                drop(last);
            }
        });
        // Frees the memory of the queue too, because it has no destructor.
        DROP_QUEUE.with(|queue| queue.take());
    }
}

/// The gradients of an operator's inputs, in their order; `None` for an input that needs none.
pub type Grads = SmallVec<[Option<Tensor>; 3]>;

/// The context of a gradient rule: the saved values, the gradients of the outputs, and which inputs need a gradient.
#[derive(Debug)]
pub struct Backward<'a> {
    node: &'a Arc<Node>,
    saved: SavedValues,
    grads: &'a [Option<Tensor>],
    /// The gradient that the first input has so far, for an operator that adds it.
    known: RefCell<Option<Tensor>>,
}

impl<'a> Backward<'a> {
    pub(super) fn new(
        node: &'a Arc<Node>,
        saved: SavedValues,
        grads: &'a [Option<Tensor>],
        known: Option<Tensor>,
    ) -> Self {
        Backward { node, saved, grads, known: RefCell::new(known) }
    }

    /// Returns the gradient that the first input has so far, if there is one that fits. The rule must add it to its own.
    pub(crate) fn take_known(&self, fits: impl FnOnce(&Tensor) -> bool) -> Option<Tensor> {
        let mut known = self.known.borrow_mut();
        if known.as_ref().is_some_and(fits) { known.take() } else { None }
    }

    /// Returns true if the i-th input's gradient may have another floating-point dtype than the input.
    pub(crate) fn may_have_any_float(&self, i: usize) -> bool {
        !grad_enabled() && self.node.edges.get(i).is_some_and(Link::takes_any_float)
    }

    fn missing(&self, what: &str, i: usize) -> Error {
        Error::Argument {
            op: self.node.op.name(),
            message: format!("{what} {i} was not saved for the gradient"),
        }
    }

    /// Returns the i-th input. Returns an error if [`Saves`] did not name it.
    pub fn input(&self, i: usize) -> Result<Tensor> {
        let value = self.saved.input(i).ok_or_else(|| self.missing("input", i))?;
        Ok(Tensor::new(value, self.node.edges[i].clone()))
    }

    /// Returns the i-th output. Returns an error if [`Saves`] did not name it.
    pub fn output(&self, i: usize) -> Result<Tensor> {
        let value = self.saved.output(i).ok_or_else(|| self.missing("output", i))?;
        Ok(Tensor::new(value, Link::Node(self.node.clone(), i)))
    }

    /// Returns the shape and dtype of the i-th input.
    pub fn input_meta(&self, i: usize) -> &Meta {
        &self.node.inputs[i]
    }

    /// Returns zeros with the shape, dtype and layout of the i-th input. Partial placements become replicated.
    pub fn zeros(&self, i: usize) -> Result<Tensor> {
        match self.layout(i) {
            Some(layout) => Tensor::full_on(&layout.without_partials(), self.input_meta(i), 0),
            None => Tensor::zeros_for(self.input_meta(i), self.node.mesh()),
        }
    }

    /// Returns the layout that the operator ran on for the i-th input, if it is distributed.
    pub(crate) fn layout(&self, i: usize) -> Option<Layout> {
        let (mesh, decision) = self.node.mesh().zip(self.node.decision.as_ref())?;
        Some(Layout::with(mesh, &decision.specs[i]))
    }

    /// Returns the number of inputs.
    pub fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    /// Returns true if the i-th input requires a gradient; false if there is no such input.
    pub fn needs(&self, i: usize) -> bool {
        self.node.edges.get(i).is_some_and(|edge| !matches!(edge, Link::None))
    }

    /// Returns the gradient of the i-th output, or `None` if no operator used it.
    pub(crate) fn grad(&self, i: usize) -> Option<&Tensor> {
        self.grads.get(i)?.as_ref()
    }

    /// Returns the gradient of the first output: zeros if no operator used it.
    pub fn dy(&self) -> Result<Tensor> {
        self.dy_of(0)
    }

    /// Returns the gradient of the i-th output: zeros if no operator used it.
    pub fn dy_of(&self, i: usize) -> Result<Tensor> {
        match (self.grads.get(i), self.node.outputs.get(i)) {
            (Some(Some(grad)), _) => Ok(grad.clone()),
            (_, Some(meta)) => Tensor::zeros_for(meta, self.node.onto.as_ref().map(Layout::mesh)),
            _ => {
                let message = format!("there is no output {i}");
                Err(Error::Argument { op: self.node.op.name(), message })
            }
        }
    }

    /// Returns the gradient that `rule` computes, or `None`, without running it, if the i-th input needs none.
    pub fn when(&self, i: usize, rule: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        if self.needs(i) { rule().map(Some) } else { Ok(None) }
    }

    /// Returns the same as [`when`](Backward::when), summed over the dims along which the i-th input was broadcast.
    pub fn when_broadcast(&self, i: usize, rule: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        self.when(i, || rule()?.sum_to(&self.input_meta(i).shape))
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({:?}, {:?})", &self.op, self.moment)
    }
}
