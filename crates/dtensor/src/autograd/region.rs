//! Checkpointed regions: operators recorded without their saved values, which a backward pass recomputes.
//!
//! The operators of a region are recorded like any others, with the same moments and links; only their saved values are dropped.
//! When a backward pass reaches the first of them, it runs the body of the region again, and the n-th operator of the first run
//! gets the values that the n-th operator of the second run saves. So the pass visits the same nodes, adds in the same order and
//! calls collectives in the same order as without a checkpoint.
//!
//! A pass runs the body again when it reaches *any* operator of the region, even one that saves nothing. This keeps ranks in
//! sync: the collectives of the second run come after the gradients of everything recorded after the region, and before the
//! gradients of the region itself, whatever other operators each rank has recorded in it.

use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use dtensor_array::mode;
use dtensor_array::mode::Snapshot;
use dtensor_array::origin::caller_line;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::mode::{Phase, enable_grad, in_phase};
use super::saved::{Saved, SavedValues};
use super::signature::{Signature, check_same};
use super::{Backward, Grads, Link, Moment, Node, Recorded, Saves};
use crate::random::without_draw_check;
use crate::{Error, Result, Tensor};

const OP: &str = "checkpoint";

/// The function that a region runs: once in forward, and again for each backward pass through the region.
pub(super) type Body = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync>;

/// A checkpointed part of the graph.
pub(crate) struct Region {
    body: Body,
    /// The node that saves the inputs. If the region is inside another one, recomputing the outer one restores them.
    entry: Link,
    began: Moment,
    /// The modes of the first run; every later run has the same.
    modes: Snapshot,
    /// The number of operators recorded in the region.
    recorded: AtomicUsize,
    /// The signatures of the outputs, set when the first run has ended.
    outputs: OnceLock<Vec<Signature>>,
}

/// The operator of the node that saves the inputs of a region. It has no outputs, so no gradient reaches it.
#[derive(Debug)]
struct Entry;

impl Recorded for Entry {
    fn name(&self) -> &'static str {
        OP
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, _: &Backward<'_>) -> Result<Grads> {
        Err(Error::Argument {
            op: OP,
            message: "the node of a checkpoint's inputs has no gradient rule".into(),
        })
    }
}

/// Tells [`add_to_region`] how to treat the operators that this thread records.
#[derive(Clone)]
enum Scope {
    /// The first run: operators save nothing.
    Forward(Arc<Region>),
    /// A later run: the values that operators save are also listed here.
    Recompute(Arc<Mutex<Vec<Recomputed>>>),
}

mode! {
    static IN_REGION: Cell<bool> = false;
    static SCOPE: RefCell<Option<Scope>> = None;
}

/// Returns true if this thread runs the body of a region.
#[inline]
pub(super) fn in_region() -> bool {
    IN_REGION.get()
}

/// Adds a node that has just been recorded to the region that runs.
#[cold]
pub(super) fn add_to_region(node: &Arc<Node>) {
    match SCOPE.get() {
        Some(Scope::Forward(region)) => {
            let n = region.recorded.fetch_add(1, Ordering::Relaxed);
            *node.saved.lock() = Saved::Recompute(region, n);
        }
        Some(Scope::Recompute(recomputed)) => {
            if let Saved::Values(values) = &*node.saved.lock() {
                let signature = Signature::of(node);
                recomputed.lock().push(Recomputed { signature, values: Some(values.clone()) });
            }
        }
        None => {}
    }
}

fn within_scope<R>(scope: Scope, body: impl FnOnce() -> R) -> R {
    SCOPE.within(Some(scope), || IN_REGION.within(true, body))
}

impl Region {
    /// Runs `body` as a new region and returns its outputs.
    #[track_caller]
    pub(super) fn run(inputs: &[&Tensor], body: Body) -> Result<Vec<Tensor>> {
        let metas = inputs.iter().map(|x| x.meta()).collect();
        let at = caller_line(Location::caller());
        let entry = Node::record(Entry, inputs, metas, &[], SmallVec::new(), at, None);
        let region = Arc::new(Region {
            body,
            began: entry.moment,
            entry: Link::Node(entry, 0),
            modes: Snapshot::now(),
            recorded: AtomicUsize::new(0),
            outputs: OnceLock::new(),
        });
        let inputs: Vec<Tensor> = inputs.iter().map(|&x| x.clone()).collect();
        let outputs = within_scope(Scope::Forward(region.clone()), || (region.body)(&inputs))?;
        // This cannot fail: only this line sets the cell, once per region.
        let _ = region.outputs.set(outputs.iter().map(Signature::of_tensor).collect());
        Ok(outputs)
    }

    /// Runs the body again on these inputs, and returns the values that its operators save.
    pub(super) fn recompute(&self, inputs: &SavedValues) -> Result<Vec<Recomputed>> {
        let entry = self.entry()?;
        let inputs: Option<Vec<Tensor>> = (0..entry.edges.len())
            .map(|i| Some(Tensor::new(inputs.input(i)?, entry.edges[i].clone())))
            .collect();
        let inputs = inputs.ok_or_else(missing_inputs)?;
        let recomputed = Arc::default();
        let outputs = self.modes.within(|| {
            without_draw_check(|| {
                in_phase(Phase::Recomputation, || {
                    let scope = Scope::Recompute(Arc::clone(&recomputed));
                    enable_grad(|| within_scope(scope, || (self.body)(&inputs)))
                })
            })
        })?;
        let recomputed = std::mem::take(&mut *recomputed.lock());
        // If the body itself runs a backward pass, that pass reaches this region before its first run has ended: `outputs` is not
        // set then.
        if let Some(first) = self.outputs.get() {
            let outputs: Vec<Signature> = outputs.iter().map(Signature::of_tensor).collect();
            check_same(OP, first, &outputs)?;
            let recorded = self.recorded.load(Ordering::Relaxed);
            if recorded != recomputed.len() {
                let message = format!(
                    "a different number of tensors was saved during the original forward and recomputation: forward recorded \
                     {recorded} operators, recomputation {}; the body of a checkpoint must do the same on each run",
                    recomputed.len()
                );
                return Err(Error::Argument { op: OP, message });
            }
        }
        Ok(recomputed)
    }

    pub(super) fn entry(&self) -> Result<&Arc<Node>> {
        match &self.entry {
            Link::Node(entry, _) => Ok(entry),
            _ => Err(missing_inputs()),
        }
    }

    /// The moment the region started: earlier than every node in it.
    pub(super) fn began(&self) -> Moment {
        self.began
    }
}

fn missing_inputs() -> Error {
    Error::Argument { op: OP, message: "the saved inputs have been freed".into() }
}

/// The values that one operator saves when its region runs again.
pub(super) struct Recomputed {
    signature: Signature,
    values: Option<SavedValues>,
}

impl Recomputed {
    /// Moves the values out for their node of the first run; `None` the second time. Returns an error if the operators differ.
    pub(super) fn take(&mut self, node: &Node) -> Result<Option<SavedValues>> {
        check_same(OP, &[Signature::of(node)], std::slice::from_ref(&self.signature))?;
        Ok(self.values.take())
    }
}
