//! Messages between two members of a group: `send` and `recv` on threads.
//!
//! The n-th message from one member to another with a tag goes to the n-th receive that was begun for it, even if a later
//! receive is waited for first.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::sync::Backoff;
use crate::fault::Cause;
use dtensor_array::Array;

/// The messages of one group that have been sent but not received.
pub(crate) struct Mailbox {
    members: usize,
    state: Mutex<MailboxState>,
    wakeup: Condvar,
}

/// Sender, receiver and tag of a message. Messages with the same route arrive in the order in which they were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Route {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) tag: u32,
}

/// Identifies a message: its route and its number on that route.
pub(crate) type MessageId = (Route, u64);

struct MailboxState {
    messages: HashMap<MessageId, Array>,
    /// Messages whose receive was dropped before they arrived. They are dropped when they arrive.
    abandoned: HashSet<MessageId>,
    /// How many messages have been sent on each route.
    sent: HashMap<Route, u64>,
    /// How many receives have begun on each route.
    receives: HashMap<Route, u64>,
    /// For each member: why it left, if it did.
    left: Vec<Option<Arc<Cause>>>,
    failed: Option<Arc<Cause>>,
}

/// Returns the id of the next message on a route, and counts it.
fn next_id(counts: &mut HashMap<Route, u64>, route: Route) -> MessageId {
    let count = counts.entry(route).or_default();
    *count += 1;
    (route, *count - 1)
}

impl Mailbox {
    pub(crate) fn new(members: usize) -> Self {
        let state = MailboxState {
            messages: HashMap::new(),
            abandoned: HashSet::new(),
            sent: HashMap::new(),
            receives: HashMap::new(),
            left: vec![None; members],
            failed: None,
        };
        Mailbox { members, state: Mutex::new(state), wakeup: Condvar::new() }
    }

    /// Delivers a message. Returns an error if the group has failed or the receiver has left.
    pub(crate) fn send(&self, route: Route, value: Array) -> Result<(), Arc<Cause>> {
        let mut state = self.state.lock();
        if let Some(cause) = state.failed.as_ref().or(state.left[route.to].as_ref()) {
            return Err(cause.clone());
        }
        let id = next_id(&mut state.sent, route);
        if !state.abandoned.remove(&id) {
            state.messages.insert(id, value);
        }
        drop(state);
        self.wakeup.notify_all();
        Ok(())
    }

    /// Begins a receive and returns the id of the message that it will get.
    pub(crate) fn begin_receive(&self, route: Route) -> MessageId {
        next_id(&mut self.state.lock().receives, route)
    }

    /// Abandons a receive. Its message is dropped.
    pub(crate) fn abandon(&self, id: MessageId) {
        let mut state = self.state.lock();
        let message = state.messages.remove(&id);
        if message.is_none() {
            state.abandoned.insert(id);
        }
        drop(state);
        drop(message);
    }

    /// Returns true if [`receive`](Self::receive) would return at once.
    pub(crate) fn is_ready(&self, id: MessageId) -> bool {
        let state = self.state.lock();
        state.failed.is_some() || state.left[id.0.from].is_some() || state.messages.contains_key(&id)
    }

    /// Waits for a message. Returns `None` if the deadline passes first.
    pub(crate) fn receive(&self, id: MessageId, deadline: Instant) -> Result<Option<Array>, Arc<Cause>> {
        let mut backoff = Backoff::new(self.members);
        let (mut may_sleep, mut late) = (false, false);
        loop {
            let mut state = self.state.lock();
            if let Some(cause) = &state.failed {
                return Err(cause.clone());
            }
            if let Some(value) = state.messages.remove(&id) {
                return Ok(Some(value));
            }
            // Checked after the messages, because the sender may have sent this one before it left.
            if let Some(cause) = &state.left[id.0.from] {
                return Err(cause.clone());
            }
            if late {
                return Ok(None);
            }
            if !may_sleep {
                drop(state);
                // Check again before sleeping, because a message may have arrived while the lock was not held.
                may_sleep = !backoff.pause();
                continue;
            }
            late = self.wakeup.wait_until(&mut state, deadline).timed_out();
        }
    }

    /// Records that a member has left. It will send no more messages.
    pub(crate) fn leave(&self, member: usize, cause: Arc<Cause>) {
        self.state.lock().left[member].get_or_insert(cause);
        self.wakeup.notify_all();
    }

    /// Fails all sends and receives from now on, and drops the messages.
    pub(crate) fn fail(&self, cause: Arc<Cause>) {
        let mut state = self.state.lock();
        state.failed.get_or_insert(cause);
        let messages = std::mem::take(&mut state.messages);
        drop(state);
        self.wakeup.notify_all();
        drop(messages);
    }
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mailbox({} members)", self.members)
    }
}
