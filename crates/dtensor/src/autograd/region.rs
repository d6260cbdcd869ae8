//! A stretch of a program whose operators keep no values for their gradients.
//!
//! Its operators are recorded like any others, with the same moments and links; only what they would save is let go. When a
//! backward pass comes to the first of them it reaches, the stretch is run again, and each of them is given what it would have
//! saved: the n-th what the n-th operator of the second run saves. So a pass goes the same way, forms the same sums and calls
//! collectives in the same order as if everything had been kept.
//!
//! That the stretch is run again when *any* of its operators is reached, whether or not it needs a value, keeps ranks
//! together: collectives of the second run come after the gradients of all that was called later than the stretch, and before
//! those of the stretch itself, whatever else each rank did there.

use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use dtensor_array::mode;
use dtensor_array::mode::Snapshot;
use dtensor_array::origin::asked_by;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::look::{Look, compare};
use super::mode::{Phase, enable_grad, in_phase};
use super::saved::{Saved, SavedValues};
use super::{Backward, Grads, Link, Moment, Node, Recorded, Saves};
use crate::random::drawing_again;
use crate::{Error, Result, Tensor};

const OP: &str = "checkpoint";

/// What is run in a region, again for each pass that comes back through it.
pub(super) type Body = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync>;

pub(crate) struct Region {
    body: Body,
    /// The node that keeps the inputs. If the region lies in another, that one's second run brings them back.
    entry: Link,
    began: Moment,
    /// The modes of the first run, which hold for every other run too.
    modes: Snapshot,
    /// How many operators have been recorded in it.
    recorded: AtomicUsize,
    /// What came out of the first run, once it is over.
    outputs: OnceLock<Vec<Look>>,
}

/// What a region's inputs are kept by. No gradient comes to it: it has no outputs.
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
        Err(Error::Argument { op: OP, message: "the inputs of a checkpoint have no gradient rule".into() })
    }
}

/// What happens to operators that are recorded on this thread.
#[derive(Clone)]
enum Scope {
    /// They keep nothing.
    First(Arc<Region>),
    /// What they keep is listed, too.
    Second(Arc<Mutex<Vec<Remade>>>),
}

mode! {
    static IN_REGION: Cell<bool> = false;
    static SCOPE: RefCell<Option<Scope>> = None;
}

/// Whether this thread runs a region.
#[inline]
pub(super) fn in_region() -> bool {
    IN_REGION.get()
}

/// Makes a node that has just been recorded part of the region that runs.
#[cold]
pub(super) fn enter(node: &Arc<Node>) {
    match SCOPE.get() {
        Some(Scope::First(region)) => {
            let n = region.recorded.fetch_add(1, Ordering::Relaxed);
            *node.saved.lock() = Saved::Again(region, n);
        }
        Some(Scope::Second(remade)) => {
            if let Saved::Values(values) = &*node.saved.lock() {
                remade.lock().push(Remade { look: Look::of(node), values: Some(values.clone()) });
            }
        }
        None => {}
    }
}

fn scoped<R>(scope: Scope, body: impl FnOnce() -> R) -> R {
    SCOPE.within(Some(scope), || IN_REGION.within(true, body))
}

impl Region {
    /// Runs `body` as a region, for the first time.
    #[track_caller]
    pub(super) fn run(inputs: &[&Tensor], body: Body) -> Result<Vec<Tensor>> {
        let metas = inputs.iter().map(|x| x.meta()).collect();
        let at = asked_by(Location::caller());
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
        let outputs = scoped(Scope::First(region.clone()), || (region.body)(&inputs))?;
        // Nobody else sets this: a region is run for the first time once.
        let _ = region.outputs.set(outputs.iter().map(Look::of_tensor).collect());
        Ok(outputs)
    }

    /// Runs the body again on these inputs, and gives what its operators save.
    pub(super) fn run_again(&self, inputs: &SavedValues) -> Result<Vec<Remade>> {
        let entry = self.entry()?;
        let inputs: Option<Vec<Tensor>> = (0..entry.edges.len())
            .map(|i| Some(Tensor::new(inputs.input(i)?, entry.edges[i].clone())))
            .collect();
        let inputs = inputs.ok_or_else(gone)?;
        let remade = Arc::default();
        let outputs = self.modes.within(|| {
            drawing_again(|| {
                in_phase(Phase::Recomputation, || {
                    enable_grad(|| scoped(Scope::Second(Arc::clone(&remade)), || (self.body)(&inputs)))
                })
            })
        })?;
        let remade = std::mem::take(&mut *remade.lock());
        // A pass inside the body comes back to a region whose first run is not over.
        if let Some(first) = self.outputs.get() {
            let outputs: Vec<Look> = outputs.iter().map(Look::of_tensor).collect();
            compare(OP, first, &outputs)?;
            let recorded = self.recorded.load(Ordering::Relaxed);
            if recorded != remade.len() {
                let message = format!(
                    "a different number of tensors was saved during the original forward and recomputation: {recorded} \
                     operators were recorded, and then {}",
                    remade.len()
                );
                return Err(Error::Argument { op: OP, message });
            }
        }
        Ok(remade)
    }

    pub(super) fn entry(&self) -> Result<&Arc<Node>> {
        match &self.entry {
            Link::Node(entry, _) => Ok(entry),
            _ => Err(gone()),
        }
    }

    /// When it was run: earlier than all that was recorded in it.
    pub(super) fn began(&self) -> Moment {
        self.began
    }
}

fn gone() -> Error {
    Error::Argument { op: OP, message: "the inputs are not there any more".into() }
}

/// What an operator of a second run saves.
pub(super) struct Remade {
    look: Look,
    values: Option<SavedValues>,
}

impl Remade {
    /// The values for a node of the first run, if this is its counterpart. They are there once.
    pub(super) fn take(&mut self, node: &Node) -> Result<Option<SavedValues>> {
        compare(OP, &[Look::of(node)], std::slice::from_ref(&self.look))?;
        Ok(self.values.take())
    }
}
