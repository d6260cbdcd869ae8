//! The walk from a result back to the leaves.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use super::mode::{Phase, enable_grad, in_phase, no_grad};
use super::node::adds_up;
use super::region::{Region, Remade};
use super::saved::{Saved, SavedValues};
use super::{Backward, Leaf, Link, Moment, Node};
use crate::comm::{Running, Site, within_module};
use crate::dispatch::autocast_off;
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::{Error, Result, Tensor};
use dtensor_array::origin::on_behalf_of;

/// How a backward pass is run.
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
    /// The gradient of the result; may be left out when the result has one element, and is then one.
    pub gradient: Option<Tensor>,
    /// Keep the saved values, so that another pass can go through the same operators.
    pub retain_graph: bool,
    /// Record the pass itself, so that the gradients have gradients. Implies `retain_graph`. A leaf then holds a gradient
    /// that leads back to the leaf, and both stay alive until [`zero_grad`](Tensor::zero_grad); [`grad`] has no such cycle.
    pub create_graph: bool,
}

impl Tensor {
    /// Adds the gradient of this one-element tensor to every leaf it was computed from, and frees the values that
    /// were saved for it (see [`BackwardOptions`] for the rest).
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_with(BackwardOptions::default())
    }

    /// [`backward`](Tensor::backward) with a given gradient, keeping the graph, or recording the pass itself.
    #[track_caller]
    pub fn backward_with(&self, options: BackwardOptions) -> Result<()> {
        let mut pass = Pass::new(&options);
        pass.run(self, &options)
    }
}

/// The gradients of `output` with respect to `inputs`, leaving every leaf's own store alone, and running (and freeing)
/// only what lies between them. `None` for an input that `output` does not depend on.
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
    pass.wanted = Some(Wanted::new(output, targets));
    pass.run(output, &options)?;
    let found = pass.wanted.map(|wanted| wanted.found).unwrap_or_default();
    Ok(inputs.iter().map(|x| Target::of(x.link()).and_then(|t| found.get(&t).cloned().flatten())).collect())
}

/// The identity of a place that a gradient can flow to, while the graph holds it alive.
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

/// A node waiting for its turn: the latest first, and among equals, which different threads recorded, the one reached
/// first, so that sums are formed in the same order on every run.
struct Waiting {
    moment: Moment,
    reached: usize,
    node: Arc<Node>,
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Waiting {}
impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.moment, other.reached).cmp(&(other.moment, self.reached))
    }
}

struct Pass {
    /// The line that asked for the pass.
    at: &'static Location<'static>,
    retain: bool,
    create: bool,
    queue: BinaryHeap<Waiting>,
    /// The gradients of the outputs of every node in the queue, by the node's address.
    grads: HashMap<usize, SmallVec<[Option<Tensor>; 1]>>,
    reached: usize,
    /// The gradients of leaves, in the order they were reached. They go into the leaves' own stores when the pass has
    /// succeeded: one that fails changes nothing.
    leaves: Vec<Reached>,
    /// What the bodies of checkpoints have made again, until the pass has gone past them.
    remade: Vec<(Arc<Region>, Vec<Remade>)>,
    /// If set, gradients are collected for these targets alone, and the leaves' stores stay as they are.
    wanted: Option<Wanted>,
}

/// A leaf and its gradient.
struct Reached {
    leaf: Arc<Leaf>,
    /// What has come to it, added up where it lay alike: each is brought to where the leaf lies once.
    grads: SmallVec<[Tensor; 1]>,
    /// The module that used the leaf.
    module: Option<&'static Running>,
}

impl Reached {
    fn add(&mut self, grad: Tensor) -> Result<()> {
        let alike =
            |known: &&mut Tensor| known.layout() == grad.layout() && grad.layout().is_none_or(adds_up);
        match self.grads.iter_mut().find(alike) {
            Some(known) => *known = known.add(&grad)?,
            None => self.grads.push(grad),
        }
        Ok(())
    }

    /// What the leaf has, and the sum with it.
    fn added(&self, at: &'static Location<'static>) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let before = self.leaf.grad.lock().clone();
        let sum = self.settled(before.as_ref(), at)?;
        Ok((before, sum))
    }

    /// The sum of what has come, and of what came before, where the leaf lies.
    fn settled(&self, before: Option<&Tensor>, at: &'static Location<'static>) -> Result<Option<Tensor>> {
        let grads: SmallVec<[&Tensor; 4]> = before.into_iter().chain(&self.grads).collect();
        within_module(self.module, || self.leaf.settled(&grads, &Site::of(at)))
    }
}

/// What [`grad`] asks for.
struct Wanted {
    found: HashMap<Target, Option<Tensor>>,
    /// The nodes on the way to a target. The others are not run, and what they saved stays.
    on_the_way: HashSet<usize>,
}

impl Wanted {
    fn new(output: &Tensor, targets: HashMap<Target, Option<Tensor>>) -> Self {
        let mut wanted = Wanted { found: targets, on_the_way: HashSet::new() };
        let mut seen = HashSet::new();
        // Each node is looked at twice: on the way down, and again when all below it is known.
        let mut pending: Vec<(&Arc<Node>, bool)> = match output.link() {
            Link::Node(node, _) => vec![(node, false)],
            _ => Vec::new(),
        };
        while let Some((node, known)) = pending.pop() {
            if known {
                if node.edges.iter().any(|edge| wanted.leads_to_target(edge)) {
                    wanted.on_the_way.insert(address(node));
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
        wanted
    }

    fn leads_to_target(&self, edge: &Link) -> bool {
        Target::of(edge).is_some_and(|target| self.found.contains_key(&target))
            || matches!(edge, Link::Node(node, _) if self.on_the_way.contains(&address(node)))
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
            remade: Vec::new(),
            wanted: None,
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
        in_phase(Phase::Backward, || autocast_off(|| on_behalf_of(at, &mut walk)))
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
        while let Some(Waiting { node, .. }) = self.queue.pop() {
            let grads = self.grads.remove(&address(&node)).unwrap_or_default();
            if let Some(wanted) = &mut self.wanted {
                for (i, grad) in grads.iter().enumerate() {
                    if let Some(slot) = wanted.found.get_mut(&Target(address(&node), i)) {
                        slot.clone_from(grad);
                    }
                }
                if !wanted.on_the_way.contains(&address(&node)) {
                    continue;
                }
            }
            self.remade.retain(|(region, _)| region.began() <= node.moment);
            let cx = Backward::new(&node, self.saved(&node, self.retain)?, &grads);
            let inputs = within_module(node.module, || on_behalf_of(node.at, || node.op.gradient(&cx)))?;
            drop(cx);
            drop(grads);
            self.check(&node, &inputs)?;
            for (link, grad) in node.edges.iter().zip(inputs) {
                let Some(grad) = grad else { continue };
                if self.wanted.as_ref().is_none_or(|wanted| wanted.leads_to_target(link)) {
                    within_module(node.module, || self.accept(link, grad, node.module))?;
                }
            }
        }
        self.commit()
    }

    /// Takes what a node saved; `retain` leaves it for another pass.
    fn saved(&mut self, node: &Arc<Node>, retain: bool) -> Result<SavedValues> {
        let mut saved = node.saved.lock();
        let (region, n) = match &*saved {
            Saved::Values(values) if retain => return Ok(values.clone()),
            Saved::Again(region, n) => (region.clone(), *n),
            _ => {
                let Saved::Values(values) = std::mem::replace(&mut *saved, Saved::Freed) else {
                    return Err(used_up(node));
                };
                return Ok(values);
            }
        };
        // Whatever the body does, it may come here too.
        drop(saved);
        let values = match self.take_remade(&region, n, node)? {
            Some(values) => values,
            None => {
                let inputs = self.saved(region.entry()?, true)?;
                let remade = region.run_again(&inputs)?;
                self.remade.retain(|(other, _)| !Arc::ptr_eq(other, &region));
                self.remade.push((region.clone(), remade));
                self.take_remade(&region, n, node)?.ok_or_else(|| used_up(node))?
            }
        };
        if !retain {
            *node.saved.lock() = Saved::Freed;
        }
        Ok(values)
    }

    fn take_remade(&mut self, region: &Arc<Region>, n: usize, node: &Node) -> Result<Option<SavedValues>> {
        let found = self.remade.iter_mut().find(|(other, _)| Arc::ptr_eq(other, region));
        match found.and_then(|(_, remade)| remade.get_mut(n)) {
            Some(remade) => remade.take(node),
            None => Ok(None),
        }
    }

    /// A gradient rule that returns the wrong shape is found where it is wrong, not three operators later.
    fn check(&self, node: &Node, grads: &[Option<Tensor>]) -> Result<()> {
        let wrong = |message: String| Err(Error::Argument { op: node.op.name(), message });
        if grads.len() != node.inputs.len() {
            return wrong(format!(
                "the gradient rule gave {} gradients for {} inputs",
                grads.len(),
                node.inputs.len()
            ));
        }
        for (i, (grad, meta)) in grads.iter().zip(&node.inputs).enumerate() {
            match grad {
                Some(g) if g.dims() != &meta.shape[..] || g.dtype() != meta.dtype => {
                    return wrong(format!(
                        "the gradient rule gave {} {} for input {i}, which is {} {}",
                        g.dtype(),
                        g.shape(),
                        meta.dtype,
                        meta.shape
                    ));
                }
                Some(g) if g.mesh() != node.mesh() => {
                    let side = |on: Option<&DeviceMesh>| on.map_or("local".into(), ToString::to_string);
                    return wrong(format!(
                        "the gradient rule gave a tensor on {} for input {i}, which is on {}",
                        side(g.mesh()),
                        side(node.mesh())
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds a gradient to what has come to a place before, from an operator of this module.
    fn accept(&mut self, link: &Link, grad: Tensor, module: Option<&'static Running>) -> Result<()> {
        match link {
            Link::None => Ok(()),
            Link::Leaf(leaf) => {
                if self.wanted.is_none() {
                    leaf.owner.check("backward", "a leaf that would collect the gradient")?;
                }
                let grad = if self.create { grad } else { grad.detach() };
                match self.leaves.iter_mut().find(|known| Arc::ptr_eq(&known.leaf, leaf)) {
                    Some(known) => known.add(grad),
                    None => {
                        let grads = SmallVec::from_elem(grad, 1);
                        self.leaves.push(Reached { leaf: leaf.clone(), grads, module });
                        Ok(())
                    }
                }
            }
            Link::Node(node, output) => {
                let slots = self.grads.entry(address(node)).or_insert_with(|| {
                    self.reached += 1;
                    self.queue.push(Waiting {
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

    /// Hands out the gradients of the leaves. All sums are there before any is: what goes wrong on the way changes no leaf.
    fn commit(&mut self) -> Result<()> {
        let mut leaves = std::mem::take(&mut self.leaves);
        for reached in &mut leaves {
            reached.grads = reached.settled(None, self.at)?.into_iter().collect();
        }
        if let Some(wanted) = &mut self.wanted {
            for Reached { leaf, grads, .. } in leaves {
                let target = Target::of(&Link::Leaf(leaf)).expect("a leaf can be a target");
                wanted.found.insert(target, grads.into_iter().next());
            }
            return Ok(());
        }
        // To add them may communicate, so nothing is locked meanwhile. If another thread's pass has changed what was added to, that
        // one is added anew.
        let mut sums: Vec<(Option<Tensor>, Option<Tensor>)> = Vec::new();
        for reached in &leaves {
            sums.push(reached.added(self.at)?);
        }
        // All threads lock in one order.
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
            sums[stale] = leaves[stale].added(self.at)?;
        }
    }
}

fn used_up(node: &Node) -> Error {
    Error::Argument {
        op: node.op.name(),
        message: "trying to backward through the graph a second time: the saved values have been freed; ask the first \
                  pass to retain the graph"
            .into(),
    }
}

/// Whether these are one tensor, and not only equal ones.
fn same(a: Option<&Tensor>, b: Option<&Tensor>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_same(b),
        (None, None) => true,
        _ => false,
    }
}

fn sum(before: Option<Tensor>, grad: Tensor) -> Result<Tensor> {
    match before {
        Some(before) => before.add(&grad),
        None => Ok(grad),
    }
}
