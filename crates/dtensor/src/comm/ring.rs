//! What each rank called last, and those who are told of it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use parking_lot::Mutex;

use super::call::Call;
use super::fault::{Cause, Fault};
use crate::Error;

/// How many of its last collectives a rank remembers.
const REMEMBERED: usize = 8;

/// The last collectives of one rank.
#[derive(Debug, Default)]
pub(crate) struct Ring(Mutex<VecDeque<Call>>);

impl Ring {
    /// Notes a call, and tells those who listen on this thread.
    pub(crate) fn note(&self, call: &Call) {
        if LISTENED.get() {
            LISTENERS.with_borrow(Clone::clone).iter().for_each(|listener| listener(call));
        }
        let mut ring = self.0.lock();
        if ring.len() == REMEMBERED {
            ring.pop_back();
        }
        ring.push_front(call.clone());
    }

    /// The newest.
    pub(crate) fn last(&self) -> Option<Call> {
        self.0.lock().front().cloned()
    }

    /// The error of a call that was noted here before.
    pub(crate) fn fault(&self, rank: usize, call: &Call, cause: Arc<Cause>, earlier: bool) -> Error {
        let recent = self.0.lock().iter().filter(|other| *other != call).cloned().collect();
        Error::Collective(Box::new(Fault { rank, call: call.clone(), cause, earlier, recent }))
    }
}

thread_local! {
    static LISTENED: Cell<bool> = const { Cell::new(false) };
    static LISTENERS: RefCell<Vec<Listener>> = const { RefCell::new(Vec::new()) };
}

/// Somebody who is told of every collective that this thread calls.
pub(crate) type Listener = Rc<dyn Fn(&Call)>;

/// Runs `body`, of whose collectives the listener is told.
pub(crate) fn listened<R>(listener: Listener, body: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            LISTENED.set(LISTENERS.with_borrow_mut(|listeners| {
                listeners.pop();
                !listeners.is_empty()
            }));
        }
    }
    LISTENERS.with_borrow_mut(|listeners| listeners.push(listener));
    LISTENED.set(true);
    let _restore = Restore;
    body()
}

/// Runs `body` and lists the collectives that this thread called meanwhile, on any world. Recordings nest: an inner one
/// takes its calls away from nobody.
///
/// ```
/// use dtensor::comm::{World, record};
/// use dtensor::{DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let world = World::simulated(256, 0)?;
/// let x = Tensor::meta_of([8, 8], DType::F32)?;
/// let (y, calls) = record(|| world.group().all_gather_tensor(&x, 0));
/// assert_eq!(y?.dims(), [2048, 8]);
/// assert_eq!(calls[0].collective.name(), "all_gather");
/// # Ok(())
/// # }
/// ```
pub fn record<R>(body: impl FnOnce() -> R) -> (R, Vec<Call>) {
    let calls = Rc::new(RefCell::new(Vec::new()));
    let kept = calls.clone();
    let result = listened(Rc::new(move |call| kept.borrow_mut().push(call.clone())), body);
    (result, calls.take())
}
