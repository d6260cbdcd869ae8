//! The last collectives of each rank, which errors show, and listeners for collectives.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use dtensor_array::listeners;
use parking_lot::Mutex;

use crate::call::Call;
use crate::fault::{Cause, Fault};
use crate::{Error, Failure};

/// How many calls a ring holds.
const CAPACITY: usize = 8;

/// The last calls of one rank.
#[derive(Debug, Default)]
pub(crate) struct Ring(Mutex<VecDeque<Call>>);

impl Ring {
    /// Adds a call and notifies the listeners of this thread.
    pub(crate) fn note(&self, call: &Call) {
        CALLS.notify(call);
        let mut ring = self.0.lock();
        if ring.len() == CAPACITY {
            ring.pop_back();
        }
        ring.push_front(call.clone());
    }

    /// Returns the newest call.
    pub(crate) fn last(&self) -> Option<Call> {
        self.0.lock().front().cloned()
    }

    /// Creates the error of a call that is already in the ring.
    pub(crate) fn fault(&self, rank: usize, call: &Call, cause: Arc<Cause>, earlier: bool) -> Error {
        let recent = self.0.lock().iter().filter(|other| *other != call).cloned().collect();
        Failure::Collective(Box::new(Fault { rank, call: call.clone(), cause, earlier, recent })).into()
    }
}

listeners! {
    /// Listeners that this thread calls for every collective it starts.
    pub static CALLS: dyn Fn(&Call);
}

/// Runs `body` and returns its result and the collectives that this thread called meanwhile, on any world. Recordings nest: an
/// outer one also gets the calls of an inner one.
///
/// ```
/// use dtensor_comm::{World, record};
/// use dtensor_array::Array;
/// # fn main() -> dtensor_comm::Result<()> {
/// let world = World::simulated(256, 0)?;
/// let x = Array::from_vec(vec![0f32; 64], &[8, 8])?;
/// let (y, calls) = record(|| world.group().all_gather_tensor(&x, 0));
/// assert_eq!(y?.dims(), [2048, 8]);
/// assert_eq!(calls[0].collective.name(), "all_gather");
/// # Ok(())
/// # }
/// ```
pub fn record<R>(body: impl FnOnce() -> R) -> (R, Vec<Call>) {
    let calls = Rc::new(RefCell::new(Vec::new()));
    let recorded = calls.clone();
    let result = CALLS.listen(Rc::new(move |call: &Call| recorded.borrow_mut().push(call.clone())), body);
    (result, calls.take())
}
