//! The backward pass: walks the graph from a result back to its leaves.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use super::mode::{Phase, enable_grad, in_phase, no_grad};
use super::node::is_additive;
use super::region::{Recomputed, Region};
use super::saved::{Saved, SavedValues};
use super::{Backward, Leaf, Link, Moment, Node};
use crate::comm::{RunningModule, Site, within_module};
use crate::dispatch::autocast_off;
use crate::distributed::begin_redistributions;
use crate::journal::{self, Access};
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::{Error, Result, Tensor};
use dtensor_array::memory::Purpose;
use dtensor_array::origin::with_caller_line;

/// Options of a backward pass: [`Tensor::backward_with`] and [`grad`].
///
/// ```
/// use dtensor::{BackwardOptions, DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::full([2], 3.0, DType::F64)?.requires_grad_(true)?;
/// let y = x.mul(&x)?;
/// let gradient = Some(Tensor::from_slice(&[1f64, 10.], [2])?);
/// y.backward_with(BackwardOptions { gradient, retain_graph: true, ..Default::default() })?;
/// assert_eq!(x.grad().unwrap().to_vec::<f64>()?, [6., 60.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct BackwardOptions {
    /// The gradient of the result. Optional if the result has one element; it is then 1.
    pub gradient: Option<Tensor>,
    /// Keeps the saved values, so that another pass can go through the same operators.
    pub retain_graph: bool,
    /// Records the pass itself, so that the gradients have gradients. Implies `retain_graph`. A leaf then holds a gradient
    /// whose graph leads back to the leaf, so both stay alive until [`zero_grad`](Tensor::zero_grad). [`grad`] makes no such cycle.
    pub create_graph: bool,
}

impl Tensor {
    /// Adds the gradient of this one-element tensor to every leaf that it was computed from.
    ///
    /// Frees the values that were saved for backward. [`backward_with`](Tensor::backward_with) keeps them, or takes the
    /// gradient of a larger result. Returns an error if the tensor does not require a gradient or has several elements; then
    /// no leaf has changed.
    ///
    /// ```
    /// use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::scalar(3f64)?.requires_grad_(true)?;
    /// x.mul(&x)?.backward()?;
    /// assert_eq!(x.grad().unwrap().item::<f64>()?, 6.0);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_with(BackwardOptions::default())
    }

    /// Runs [`backward`](Tensor::backward) with options: a gradient of the result, a retained graph, or a recorded pass.
    #[track_caller]
    pub fn backward_with(&self, options: BackwardOptions) -> Result<()> {
        let mut pass = Pass::new(&options);
        pass.run(self, &options)
    }
}

/// Returns the gradients of `output` with respect to `inputs`; `None` for an input that `output` does not depend on.
///
/// Leaves accumulate nothing. Only the operators between `output` and `inputs` run, and only their saved values are freed.
///
/// ```
/// use dtensor::{BackwardOptions, Tensor, grad};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::scalar(3f64)?.requires_grad_(true)?;
/// let y = x.pow(3)?;
/// let options = BackwardOptions { create_graph: true, ..Default::default() };
/// let dy = grad(&y, &[&x], options)?.remove(0).unwrap();
/// assert_eq!(dy.item::<f64>()?, 27.0);
/// let ddy = grad(&dy, &[&x], Default::default())?.remove(0).unwrap();
/// assert_eq!(ddy.item::<f64>()?, 18.0);
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn grad(output: &Tensor, inputs: &[&Tensor], options: BackwardOptions) -> Result<Vec<Option<Tensor>>> {
    let mut targets = HashMap::new();
    for (i, input) in inputs.iter().enumerate() {
        let target = Target::of(input.link()).ok_or_else(|| Error::Argument {
            op: "grad",
            message: format!("input {i} does not require grad"),
        })?;
        targets.insert(target, None);
    }
    let mut pass = Pass::new(&options);
    pass.requested = Some(Requested::new(output, targets));
    pass.run(output, &options)?;
    let found = pass.requested.map(|requested| requested.found).unwrap_or_default();
    Ok(inputs.iter().map(|x| Target::of(x.link()).and_then(|t| found.get(&t).cloned().flatten())).collect())
}

/// Identifies a leaf, or an output of a node, by address. Valid while the graph keeps it alive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Target(usize, usize);

impl Target {
    fn of(link: &Link) -> Option<Target> {
        match link {
            Link::None => None,
            Link::Leaf(leaf) => Some(Target(Arc::as_ptr(leaf).addr(), 0)),
            Link::Node(node, output) => Some(Target(address(node), *output)),
        }
    }
}

/// A node in the queue of a pass. The latest comes first. Nodes recorded by different threads can have equal moments; of
/// these the one reached first comes first, so that every run adds in the same order.
struct QueuedNode {
    moment: Moment,
    reached: usize,
    node: Arc<Node>,
}

impl PartialEq for QueuedNode {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for QueuedNode {}
impl PartialOrd for QueuedNode {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for QueuedNode {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.moment, other.reached).cmp(&(other.moment, self.reached))
    }
}

/// One backward pass.
struct Pass {
    /// The line that started the pass.
    at: &'static Location<'static>,
    retain: bool,
    create: bool,
    queue: BinaryHeap<QueuedNode>,
    /// The gradients of the outputs of every node in the queue, by the node's address.
    grads: HashMap<usize, SmallVec<[Option<Tensor>; 1]>>,
    reached: usize,
    /// The gradients of leaves, in the order in which leaves were reached. They are stored in the leaves after the whole pass has
    /// succeeded, so that a failing pass changes nothing.
    leaves: Vec<LeafGradient>,
    /// The recomputed values of checkpoints, until the pass has gone past them.
    recomputed: Vec<(Arc<Region>, Vec<Recomputed>)>,
    /// Set for [`grad`]: the pass collects gradients for these targets only, and leaves accumulate nothing.
    requested: Option<Requested>,
}

/// A leaf and the gradients that reached it.
struct LeafGradient {
    leaf: Arc<Leaf>,
    /// One sum per layout, so that each layout is redistributed to that of the leaf only once.
    grads: SmallVec<[Tensor; 1]>,
    /// The module that used the leaf.
    module: Option<&'static RunningModule>,
}

impl LeafGradient {
    fn add(&mut self, grad: Tensor) -> Result<()> {
        let can_add =
            |known: &&mut Tensor| known.layout() == grad.layout() && grad.layout().is_none_or(is_additive);
        match self.grads.iter_mut().find(can_add) {
            Some(known) => *known = known.add(&grad)?,
            None => self.grads.push(grad),
        }
        Ok(())
    }

    /// Returns the gradient that the leaf has now, and its sum with that of this pass.
    fn accumulate(&self, at: &'static Location<'static>) -> Result<(Option<Tensor>, Option<Tensor>)> {
        journal::note(&self.leaf, Access::Read);
        let before = self.leaf.grad.lock().clone();
        let sum = {
            let grads: SmallVec<[&Tensor; 4]> = before.iter().chain(&self.grads).collect();
            within_module(self.module, || self.leaf.sum_gradients(&grads, &Site::of(at)))?
        };
        Ok((before, sum))
    }
}

/// Adds the gradients of each leaf, in the layout of the leaf. The redistributions of all leaves begin together, so that those of
/// one kind are one collective.
fn sum_gradients(leaves: &mut [LeafGradient], at: &'static Location<'static>) -> Result<()> {
    let mut moved = Vec::new();
    for (i, LeafGradient { leaf, grads, .. }) in leaves.iter().enumerate() {
        let Some(layout) = leaf.common_layout(grads.len()) else { continue };
        let other = grads.iter().enumerate().filter(|(_, grad)| grad.layout() != Some(&layout));
        moved.extend(other.map(|(j, _)| (i, j, layout.clone())));
    }
    // A collective for several leaves belongs to the innermost module that ran all of theirs.
    let module = RunningModule::common(moved.iter().map(|(i, ..)| leaves[*i].module));
    let redistributed = within_module(module, || {
        let grads: Vec<(&Tensor, &Layout)> =
            moved.iter().map(|(i, j, layout)| (&leaves[*i].grads[*j], layout)).collect();
        begin_redistributions(&grads, &Site::of(at))
    })?;
    for ((i, j, _), grad) in moved.into_iter().zip(redistributed) {
        leaves[i].grads[j] = grad;
    }
    for LeafGradient { leaf, grads, module } in leaves {
        let sum = {
            let given: SmallVec<[&Tensor; 4]> = grads.iter().collect();
            within_module(*module, || leaf.sum_gradients(&given, &Site::of(at)))?
        };
        // A gradient that is still on its way must arrive before any leaf changes.
        if let Some(array) = sum.as_ref().map(|sum| sum.value().part.array()).transpose()?.flatten() {
            array.count_as(Purpose::Gradient);
        }
        *grads = sum.into_iter().collect();
    }
    Ok(())
}

/// The targets of [`grad`], and the nodes that lead to them.
struct Requested {
    found: HashMap<Target, Option<Tensor>>,
    /// The nodes between the output and a target. The other nodes do not run, and their saved values stay.
    on_path: HashSet<usize>,
}

impl Requested {
    fn new(output: &Tensor, targets: HashMap<Target, Option<Tensor>>) -> Self {
        let mut requested = Requested { found: targets, on_path: HashSet::new() };
        let mut seen = HashSet::new();
        // A depth-first search that visits each node twice: before and after the nodes below it.
        let mut pending: Vec<(&Arc<Node>, bool)> = match output.link() {
            Link::Node(node, _) => vec![(node, false)],
            _ => Vec::new(),
        };
        while let Some((node, visited_below)) = pending.pop() {
            if visited_below {
                if node.edges.iter().any(|edge| requested.leads_to_target(edge)) {
                    requested.on_path.insert(address(node));
                }
            } else if seen.insert(address(node)) {
                pending.push((node, true));
                for edge in &node.edges {
                    if let Link::Node(below, _) = edge {
                        pending.push((below, false));
                    }
                }
            }
        }
        requested
    }

    fn leads_to_target(&self, edge: &Link) -> bool {
        Target::of(edge).is_some_and(|target| self.found.contains_key(&target))
            || matches!(edge, Link::Node(node, _) if self.on_path.contains(&address(node)))
    }
}

fn address(node: &Arc<Node>) -> usize {
    Arc::as_ptr(node).cast::<()>().addr()
}

impl Pass {
    #[track_caller]
    fn new(options: &BackwardOptions) -> Self {
        Pass {
            at: Location::caller(),
            retain: options.retain_graph || options.create_graph,
            create: options.create_graph,
            queue: BinaryHeap::new(),
            grads: HashMap::new(),
            reached: 0,
            leaves: Vec::new(),
            recomputed: Vec::new(),
            requested: None,
        }
    }

    fn run(&mut self, output: &Tensor, options: &BackwardOptions) -> Result<()> {
        let at = self.at;
        let mut walk = || {
            if self.create {
                enable_grad(|| self.walk(output, options))
            } else {
                no_grad(|| self.walk(output, options))
            }
        };
        in_phase(Phase::Backward, || autocast_off(|| with_caller_line(at, &mut walk)))
    }

    fn walk(&mut self, output: &Tensor, options: &BackwardOptions) -> Result<()> {
        const OP: &str = "backward";
        if !output.requires_grad() {
            let message = "the tensor does not require grad and does not have a gradient rule".into();
            return Err(Error::Argument { op: OP, message });
        }
        let seed = match &options.gradient {
            Some(gradient) => gradient.clone(),
            None if output.numel() == 1 => output.detach().ones_like()?,
            None => {
                let shape = output.shape();
                let message = format!(
                    "grad can be implicitly created only for scalar outputs, and this tensor has shape {shape}: \
                     pass the gradient of the result"
                );
                return Err(Error::Argument { op: OP, message });
            }
        };
        output.expect_meta(OP, "the gradient must have the result's shape", &seed)?;
        if seed.mesh() != output.mesh() {
            return Err(Layout::mismatch(OP, output.layout(), seed.layout()));
        }
        self.accept(output.link(), seed, None)?;
        while let Some(QueuedNode { node, .. }) = self.queue.pop() {
            let grads = self.grads.remove(&address(&node)).unwrap_or_default();
            if let Some(requested) = &mut self.requested {
                for (i, grad) in grads.iter().enumerate() {
                    if let Some(slot) = requested.found.get_mut(&Target(address(&node), i)) {
                        slot.clone_from(grad);
                    }
                }
                if !requested.on_path.contains(&address(&node)) {
                    continue;
                }
            }
            self.recomputed.retain(|(region, _)| region.began() <= node.moment);
            let cx =
                Backward::new(&node, self.take_saved(&node, self.retain)?, &grads, self.take_known(&node));
            let inputs = within_module(node.module, || with_caller_line(node.at, || node.op.gradient(&cx)))?;
            let known = cx.take_known(|_| true);
            drop(cx);
            if let (Some(slot), Some(known)) = (self.known_slot(&node), known) {
                *slot = Some(known);
            }
            drop(grads);
            self.check(&node, &inputs)?;
            for (link, grad) in node.edges.iter().zip(inputs) {
                let Some(grad) = grad else { continue };
                if self.requested.as_ref().is_none_or(|requested| requested.leads_to_target(link)) {
                    within_module(node.module, || self.accept(link, grad, node.module))?;
                }
            }
        }
        self.commit()
    }

    /// Takes the gradient that the first input of a node has so far, if the node's operator adds it to its own.
    fn take_known(&mut self, node: &Node) -> Option<Tensor> {
        let is_plain = !self.create && self.requested.is_none();
        if is_plain && node.op.adds_known() { self.known_slot(node)?.take() } else { None }
    }

    /// Returns the place of the gradient of a node's first input, if that is the output of a node that has been reached.
    fn known_slot(&mut self, node: &Node) -> Option<&mut Option<Tensor>> {
        let Some(Link::Node(from, output)) = node.edges.first() else { return None };
        self.grads.get_mut(&address(from))?.get_mut(*output)
    }

    /// Returns the saved values of a node, recomputed if it is in a checkpoint. `retain` keeps them for another pass.
    fn take_saved(&mut self, node: &Arc<Node>, retain: bool) -> Result<SavedValues> {
        let mut saved = node.saved.lock();
        let (region, n) = match &*saved {
            // What saves nothing has nothing to free, and may be passed again: other outputs of a `split`, say.
            Saved::Values(values) if retain || values.is_empty() => return Ok(values.clone()),
            Saved::Recompute(region, n) => (region.clone(), *n),
            _ => {
                let Saved::Values(values) = std::mem::replace(&mut *saved, Saved::Freed) else {
                    return Err(already_freed(node));
                };
                return Ok(values);
            }
        };
        // Unlock before the body runs: a backward pass inside the body may come to this node too.
        drop(saved);
        let values = match self.take_recomputed(&region, n, node)? {
            Some(values) => values,
            None => {
                let inputs = self.take_saved(region.entry()?, true)?;
                let recomputed = region.recompute(&inputs)?;
                self.recomputed.retain(|(other, _)| !Arc::ptr_eq(other, &region));
                self.recomputed.push((region.clone(), recomputed));
                self.take_recomputed(&region, n, node)?.ok_or_else(|| already_freed(node))?
            }
        };
        if !retain {
            *node.saved.lock() = Saved::Freed;
        }
        Ok(values)
    }

    fn take_recomputed(
        &mut self,
        region: &Arc<Region>,
        n: usize,
        node: &Node,
    ) -> Result<Option<SavedValues>> {
        let found = self.recomputed.iter_mut().find(|(other, _)| Arc::ptr_eq(other, region));
        match found.and_then(|(_, recomputed)| recomputed.get_mut(n)) {
            Some(recomputed) => recomputed.take(node),
            None => Ok(None),
        }
    }

    /// Returns an error if a gradient rule returned a wrong count, shape, dtype or mesh, so that the error names the rule and
    /// not an operator that runs later.
    fn check(&self, node: &Node, grads: &[Option<Tensor>]) -> Result<()> {
        let wrong = |message: String| Err(Error::Argument { op: node.op.name(), message });
        if grads.len() != node.inputs.len() {
            return wrong(format!(
                "the gradient rule returned {} gradients for {} inputs",
                grads.len(),
                node.inputs.len()
            ));
        }
        for (i, (grad, meta)) in grads.iter().zip(&node.inputs).enumerate() {
            match grad {
                Some(g)
                    if g.dims() != &meta.shape[..]
                        || (g.dtype() != meta.dtype
                            && !(g.dtype().is_float() && node.edges[i].takes_any_float())) =>
                {
                    return wrong(format!(
                        "the gradient rule returned {} {} for input {i}, which is {} {}",
                        g.dtype(),
                        g.shape(),
                        meta.dtype,
                        meta.shape
                    ));
                }
                Some(g) if g.mesh() != node.mesh_of(i) => {
                    let side = |on: Option<&DeviceMesh>| on.map_or("local".into(), ToString::to_string);
                    return wrong(format!(
                        "the gradient rule returned a tensor on {} for input {i}, which is on {}",
                        side(g.mesh()),
                        side(node.mesh_of(i))
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds a gradient, computed by an operator of this module, to those that reached this link before.
    fn accept(&mut self, link: &Link, grad: Tensor, module: Option<&'static RunningModule>) -> Result<()> {
        match link {
            Link::None => Ok(()),
            Link::Leaf(leaf) => {
                if self.requested.is_none() {
                    leaf.owner.check("backward", "a leaf that would accumulate the gradient")?;
                }
                let grad = if self.create { grad } else { grad.detach() };
                match self.leaves.iter_mut().find(|known| Arc::ptr_eq(&known.leaf, leaf)) {
                    Some(known) => known.add(grad),
                    None => {
                        let grads = SmallVec::from_elem(grad, 1);
                        self.leaves.push(LeafGradient { leaf: leaf.clone(), grads, module });
                        Ok(())
                    }
                }
            }
            Link::Node(node, output) => {
                let slots = self.grads.entry(address(node)).or_insert_with(|| {
                    self.reached += 1;
                    self.queue.push(QueuedNode {
                        moment: node.moment,
                        reached: self.reached,
                        node: node.clone(),
                    });
                    node.outputs.iter().map(|_| None).collect()
                });
                slots[*output] = Some(sum(slots[*output].take(), grad)?);
                Ok(())
            }
        }
    }

    /// Stores the gradients of the leaves. Computes all sums before it stores the first, so that an error changes no leaf.
    fn commit(&mut self) -> Result<()> {
        let mut leaves = std::mem::take(&mut self.leaves);
        sum_gradients(&mut leaves, self.at)?;
        if let Some(requested) = &mut self.requested {
            for LeafGradient { leaf, grads, .. } in leaves {
                let target = Target::of(&Link::Leaf(leaf)).expect("a leaf can be a target");
                requested.found.insert(target, grads.into_iter().next());
            }
            return Ok(());
        }
        // Adding may communicate, so no leaf is locked meanwhile. If a pass on another thread has changed a gradient since, its sum is
        // computed again.
        let mut sums: Vec<(Option<Tensor>, Option<Tensor>)> = Vec::new();
        for leaf in &leaves {
            sums.push(leaf.accumulate(self.at)?);
        }
        leaves.iter().for_each(|leaf| journal::note(&leaf.leaf, Access::Replace));
        // All threads lock leaves in the order of their addresses, so they cannot deadlock.
        let mut order: Vec<usize> = (0..leaves.len()).collect();
        order.sort_by_key(|&i| Arc::as_ptr(&leaves[i].leaf).addr());
        loop {
            let mut stores: Vec<_> = order.iter().map(|&i| (i, leaves[i].leaf.grad.lock())).collect();
            let stale = stores.iter().find(|(i, store)| !same(store.as_ref(), sums[*i].0.as_ref()));
            let Some(stale) = stale.map(|(i, _)| *i) else {
                stores.iter_mut().for_each(|(i, store)| **store = sums[*i].1.take());
                return Ok(());
            };
            drop(stores);
            sums[stale] = leaves[stale].accumulate(self.at)?;
        }
    }
}

fn already_freed(node: &Node) -> Error {
    Error::Argument {
        op: node.op.name(),
        message: "trying to backward through the graph a second time: the saved values have been freed; set `retain_graph` \
                  in the first pass"
            .into(),
    }
}

/// Returns true if both are handles of one tensor, not only equal.
fn same(a: Option<&Tensor>, b: Option<&Tensor>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_same(b),
        (None, None) => true,
        _ => false,
    }
}

fn sum(before: Option<Tensor>, grad: Tensor) -> Result<Tensor> {
    match before {
        Some(before) if before.dtype() != grad.dtype() => {
            let wider =
                if before.dtype().size() > grad.dtype().size() { before.dtype() } else { grad.dtype() };
            before.to_dtype(wider)?.add(&grad.to_dtype(wider)?)
        }
        Some(before) => before.add(&grad),
        None => Ok(grad),
    }
}
