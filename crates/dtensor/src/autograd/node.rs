//! One recorded operator.

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::mem::ManuallyDrop;
use std::panic::Location;
use std::sync::Arc;

use dtensor_array::mode;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::region::{Region, enter, in_region};
use super::saved::{Saved, SavedValues, Saves};
use crate::comm::{Running, Site, running_module};
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::ops::Op;
use crate::owner::Owner;
use crate::tensor::Value;
use crate::{Error, Result, Tensor};
use dtensor_array::Meta;
use dtensor_layout::Decision;
use dtensor_layout::{Partial, Placement};

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
}

mode! {
    /// The moment that a node is to have that is recorded later.
    static EARLIER: Cell<Option<Moment>> = None;
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
        EARLIER.within(Some(self), body)
    }
}

/// The gradient collected by a leaf.
#[derive(Default)]
pub(crate) struct Leaf {
    pub(crate) grad: Mutex<Option<Tensor>>,
    /// The layout of the leaf, and so of its gradient.
    pub(crate) layout: Option<Layout>,
    pub(crate) owner: Owner,
}

impl Leaf {
    /// The sum of gradients where the leaf lies, whatever way they came: nobody has to communicate to use it.
    /// That they are brought there is asked for by `at`, and is no operator's secret.
    pub(super) fn settled(&self, grads: &[&Tensor], at: &Site) -> Result<Option<Tensor>> {
        // Extremes and products are not added part by part: such a leaf's are added where they are whole, and brought back.
        let whole = self.layout.as_ref().filter(|layout| !adds_up(layout)).map(Layout::without_partials);
        let meeting = if grads.len() > 1 { whole.as_ref().or(self.layout.as_ref()) } else { None };
        let mut sum: Option<Tensor> = None;
        for grad in grads {
            let grad = redistribute_if(grad, meeting, at)?;
            sum = Some(match sum {
                Some(sum) => sum.add(&grad)?,
                None => grad,
            });
        }
        sum.map(|sum| redistribute_if(&sum, self.layout.as_ref(), at)).transpose()
    }
}

/// A tensor in a layout, if one is given.
fn redistribute_if(x: &Tensor, layout: Option<&Layout>, at: &Site) -> Result<Tensor> {
    match layout {
        Some(layout) if x.layout() != Some(layout) => x.redistribute_to(layout, at),
        _ => Ok(x.clone()),
    }
}

/// Whether tensors that lie so are added part by part.
pub(super) fn adds_up(layout: &Layout) -> bool {
    let whole = |p: &Placement| !matches!(p, Partial(op) if !op.is_linear());
    layout.placements().iter().all(whole)
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
    /// The module that ran, if somebody watched.
    pub(crate) module: Option<&'static Running>,
    pub(crate) edges: SmallVec<[Link; 2]>,
    pub(crate) inputs: SmallVec<[Meta; 2]>,
    pub(crate) outputs: SmallVec<[Meta; 1]>,
    /// How the operator was run, if its inputs lie on a mesh.
    pub(crate) decision: Option<Arc<Decision>>,
    /// How the first input lies on a mesh, if the inputs do, and the first output.
    pub(super) from: Option<Layout>,
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
        let saved = SavedValues::of(op.saves(), inputs, outputs);
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
            enter(&node);
        }
        node
    }
}

impl<O: Recorded + ?Sized> Node<O> {
    /// The mesh that the inputs lie on, if they do.
    pub(super) fn mesh(&self) -> Option<&DeviceMesh> {
        self.from.as_ref().map(Layout::mesh)
    }
}

/// Something that a node held and that may be the last to hold other nodes.
enum Dropped {
    Link(#[expect(dead_code, reason = "it is there to be dropped")] Link),
    Region(#[expect(dead_code, reason = "it is there to be dropped")] Arc<Region>),
}

thread_local! {
    /// What nodes that have been dropped held, while something on this thread lets go of it. Emptied by whoever fills it, and so
    /// never torn down: tensors may be dropped by a thread that ends.
    static HELD: ManuallyDrop<RefCell<Vec<Dropped>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

mode! {
    static LETTING_GO: Cell<bool> = false;
}

impl<O: Recorded + ?Sized> Drop for Node<O> {
    /// A long chain of nodes is taken apart by a loop: dropping it recursively would overflow the stack. The
    /// way from one node to the next may lead through anything, such as what the body of a checkpoint has
    /// captured, so a node that is dropped meanwhile only hands over what it held.
    fn drop(&mut self) {
        let holds = |edge: &Link| match edge {
            Link::None => false,
            // Of most leaves somebody else has a handle. One that goes may hold a gradient that has been recorded.
            Link::Leaf(leaf) => Arc::strong_count(leaf) == 1,
            Link::Node(..) => true,
        };
        // Nothing is dropped while the list is borrowed.
        let hold = |dropped: Dropped| HELD.with(|held| held.borrow_mut().push(dropped));
        for edge in std::mem::take(&mut self.edges) {
            if holds(&edge) {
                hold(Dropped::Link(edge));
            }
        }
        if let Saved::Again(region, _) = std::mem::replace(self.saved.get_mut(), Saved::Freed) {
            hold(Dropped::Region(region));
        }
        if LETTING_GO.get() {
            return;
        }
        LETTING_GO.within(true, || {
            while let Some(last) = HELD.with(|held| held.borrow_mut().pop()) {
                drop(last);
            }
        });
        // The memory too.
        HELD.with(|held| held.take());
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
    pub(super) fn new(node: &'a Arc<Node>, saved: SavedValues, grads: &'a [Option<Tensor>]) -> Self {
        Backward { node, saved, grads }
    }

    fn missing(&self, what: &str, i: usize) -> Error {
        Error::Argument {
            op: self.node.op.name(),
            message: format!("{what} {i} was not saved for the gradient"),
        }
    }

    /// The i-th input.
    pub fn input(&self, i: usize) -> Result<Tensor> {
        let value = self.saved.input(i).ok_or_else(|| self.missing("input", i))?;
        Ok(Tensor::new(value, self.node.edges[i].clone()))
    }

    /// The i-th output.
    pub fn output(&self, i: usize) -> Result<Tensor> {
        let value = self.saved.output(i).ok_or_else(|| self.missing("output", i))?;
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
            None => Tensor::zeros_for(self.input_meta(i), self.node.mesh()),
        }
    }

    /// How the i-th input lay when it was used.
    pub(crate) fn layout(&self, i: usize) -> Option<Layout> {
        let (mesh, decision) = self.node.mesh().zip(self.node.decision.as_ref())?;
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
            (_, Some(meta)) => Tensor::zeros_for(meta, self.node.onto.as_ref().map(Layout::mesh)),
            _ => {
                let message = format!("there is no output {i}");
                Err(Error::Argument { op: self.node.op.name(), message })
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

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({:?}, {:?})", &self.op, self.moment)
    }
}
