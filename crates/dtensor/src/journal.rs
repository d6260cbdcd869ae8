//! [`Journal`]: the cells that a step uses while it is recorded: values of parameters and buffers, gradients of leaves.
//!
//! A recorded step runs on the host, but not on the GPU. So if the recording fails, the journal restores all cells. If it succeeds, the
//! journal says in which state the cells must be for a replay, and what a replay leaves in them.

// Without GPUs, nothing opens a journal.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use dtensor_array::Meta;
use parking_lot::RwLock;

use crate::autograd::{Leaf, Link};
use crate::{Result, Tensor};

/// A cell whose content a step may change.
pub(crate) trait Content: Send + Sync + 'static {
    /// Returns the content.
    fn content(&self) -> Option<Tensor>;
    /// Replaces the content.
    fn restore(&self, content: Option<Tensor>);
}

impl Content for Leaf {
    fn content(&self) -> Option<Tensor> {
        self.grad.lock().clone()
    }

    fn restore(&self, content: Option<Tensor>) {
        let before = std::mem::replace(&mut *self.grad.lock(), content);
        drop(before);
    }
}

impl Content for RwLock<Tensor> {
    fn content(&self) -> Option<Tensor> {
        Some(self.read().clone())
    }

    fn restore(&self, content: Option<Tensor>) {
        if let Some(tensor) = content {
            let before = std::mem::replace(&mut *self.write(), tensor);
            drop(before);
        }
    }
}

/// What is about to happen to a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// The content is read.
    Read,
    /// The elements are changed in place if nobody shares them, else replaced.
    Change,
    /// The content is replaced.
    Replace,
}

/// A cell that has been used.
pub(crate) struct Entry {
    pub(crate) cell: Arc<dyn Content>,
    /// The first use.
    pub(crate) first: Access,
    /// The content at the first use, without its memory.
    pub(crate) start: Option<Place>,
    /// The content before it was replaced for the first time.
    pub(crate) before: Option<Option<Tensor>>,
    /// Whether the content has changed in place.
    pub(crate) is_changed: bool,
}

/// Where the content of a cell is: not the elements themselves, because an array with two holders cannot change in place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    address: usize,
    offset: usize,
    strides: Vec<usize>,
    meta: Meta,
    /// The leaf that collects the gradient, if any.
    leaf: usize,
}

impl Place {
    pub(crate) fn of(x: &Tensor) -> Option<Place> {
        let array = x.value().part.array().ok().flatten()?;
        let (strides, meta) = (array.strides().to_vec(), array.meta());
        Some(Place { address: array.address(), offset: array.offset(), strides, meta, leaf: leaf_of(x) })
    }

    /// Returns true if the elements of `x` are here.
    pub(crate) fn holds(&self, x: &Tensor) -> bool {
        let Ok(Some(array)) = x.value().part.array() else { return false };
        (array.address(), array.offset(), leaf_of(x)) == (self.address, self.offset, self.leaf)
            && array.strides() == self.strides
            && array.shape() == &self.meta.shape
            && array.dtype() == self.meta.dtype
            && array.device() == self.meta.device
    }
}

fn leaf_of(x: &Tensor) -> usize {
    match x.link() {
        Link::Leaf(leaf) => Arc::as_ptr(leaf).addr(),
        _ => 0,
    }
}

/// The cells that the running step has used.
#[derive(Default)]
pub(crate) struct Journal {
    pub(crate) entries: Vec<Entry>,
    /// Steps of optimizers.
    pub(crate) steps: Vec<Box<dyn RecordedStep>>,
}

/// A recorded step of an optimizer.
pub(crate) trait RecordedStep {
    /// Takes back what the step has changed on the host.
    fn undo(&self);
    /// Drops what only [`undo`](RecordedStep::undo) needs.
    fn forget(&mut self);
    /// Returns the state tensors, which the step changes in place.
    fn state(&self) -> Vec<Tensor>;
    /// Returns true if another step would do the same with other numbers.
    fn is_repeatable(&self) -> bool;
    /// Counts another step, and passes on its numbers: each list with the byte at which it was recorded.
    fn advance(&self, set: &mut dyn FnMut(usize, &[f64]));
}

thread_local! {
    static ANY: Cell<bool> = const { Cell::new(false) };
    static JOURNAL: RefCell<Option<Journal>> = const { RefCell::new(None) };
}

/// Notes a use of a cell. The cell must not be locked.
#[inline]
pub(crate) fn note<C: Content>(cell: &Arc<C>, access: Access) {
    if ANY.get() {
        add(cell.clone(), access);
    }
}

#[cold]
fn add(cell: Arc<dyn Content>, access: Access) {
    let content = cell.content();
    JOURNAL.with(|journal| {
        let Some(journal) = &mut *journal.borrow_mut() else { return };
        let known = journal.entries.iter().position(|entry| Arc::ptr_eq(&entry.cell, &cell));
        let at = known.unwrap_or_else(|| {
            let start = content.as_ref().and_then(Place::of);
            journal.entries.push(Entry { cell, first: access, start, before: None, is_changed: false });
            journal.entries.len() - 1
        });
        let entry = &mut journal.entries[at];
        match access {
            Access::Read => {}
            Access::Replace => entry.before = entry.before.take().or(Some(content)),
            Access::Change => {
                entry.is_changed = true;
                // One of the holders is `content`.
                let is_shared = content.as_ref().is_some_and(|x| holders(x) > 2);
                if is_shared {
                    entry.before = entry.before.take().or(Some(content));
                }
            }
        }
    });
}

/// Returns the number of arrays and storages' views that share the elements of a tensor.
pub(crate) fn holders(x: &Tensor) -> usize {
    x.value().part.array().ok().flatten().map_or(0, |array| array.holders())
}

/// Adds a step of an optimizer.
pub(crate) fn note_step(step: Box<dyn RecordedStep>) {
    JOURNAL.with(|journal| {
        if let Some(journal) = &mut *journal.borrow_mut() {
            journal.steps.push(step);
        }
    });
}

/// Returns true while this thread keeps a journal.
#[inline]
pub(crate) fn is_open() -> bool {
    ANY.get()
}

/// Makes the recording of this thread fail, if there is one, because it cannot contain `what`.
#[inline]
pub(crate) fn forbid(what: &'static str) {
    // The recording remembers the error.
    drop(expect_closed(what));
}

/// Returns an error if this thread records, because a recording cannot contain `what`.
#[inline]
pub(crate) fn expect_closed(what: &'static str) -> Result<()> {
    #[cfg(feature = "cuda")]
    if ANY.get() {
        return Err(dtensor_array::cuda::refuse(what));
    }
    #[cfg(not(feature = "cuda"))]
    let _ = what;
    Ok(())
}

/// Returns how many bytes of numbers that change from replay to replay this thread has recorded.
pub(crate) fn recorded_numbers() -> usize {
    #[cfg(feature = "cuda")]
    return dtensor_array::cuda::recorded_numbers();
    #[cfg(not(feature = "cuda"))]
    0
}

/// Opens a journal.
pub(crate) fn open() {
    JOURNAL.set(Some(Journal::default()));
    ANY.set(true);
}

/// Closes the journal and returns it.
pub(crate) fn close() -> Journal {
    ANY.set(false);
    JOURNAL.take().unwrap_or_default()
}

impl Journal {
    /// Restores all cells.
    pub(crate) fn undo(self) {
        self.steps.iter().rev().for_each(|step| step.undo());
        for Entry { cell, before, .. } in self.entries.into_iter().rev() {
            if let Some(before) = before {
                cell.restore(before);
            }
        }
    }
}
