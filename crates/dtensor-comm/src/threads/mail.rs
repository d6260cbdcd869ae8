//! Messages between two members of a group.
//!
//! The n-th message sent from one member to another with a tag goes to the n-th receive begun for it, whoever waits first.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::sync::Patience;
use crate::fault::Cause;
use dtensor_array::Array;

/// The messages of one group that have been sent and not yet taken.
pub(crate) struct Mail {
    members: usize,
    boxes: Mutex<Boxes>,
    bell: Condvar,
}

/// Where messages go that are taken in the order in which they are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) tag: u32,
}

/// One message of an address, by its number.
pub(crate) type Ticket = (Address, u64);

struct Boxes {
    messages: HashMap<Ticket, Array>,
    /// Tickets whose holders have gone: their messages are nobody's.
    abandoned: HashSet<Ticket>,
    /// How many messages have been sent to an address, and how many receives have begun.
    sent: HashMap<Address, u64>,
    asked: HashMap<Address, u64>,
    left: Vec<Option<Arc<Cause>>>,
    failed: Option<Arc<Cause>>,
}

fn next(counts: &mut HashMap<Address, u64>, address: Address) -> Ticket {
    let count = counts.entry(address).or_default();
    *count += 1;
    (address, *count - 1)
}

impl Mail {
    pub(crate) fn new(members: usize) -> Self {
        let boxes = Boxes {
            messages: HashMap::new(),
            abandoned: HashSet::new(),
            sent: HashMap::new(),
            asked: HashMap::new(),
            left: vec![None; members],
            failed: None,
        };
        Mail { members, boxes: Mutex::new(boxes), bell: Condvar::new() }
    }

    /// Hands a message over. An error if the group has failed or the other one will never take it.
    pub(crate) fn put(&self, address: Address, value: Array) -> Result<(), Arc<Cause>> {
        let mut boxes = self.boxes.lock();
        if let Some(cause) = boxes.failed.as_ref().or(boxes.left[address.to].as_ref()) {
            return Err(cause.clone());
        }
        let ticket = next(&mut boxes.sent, address);
        if !boxes.abandoned.remove(&ticket) {
            boxes.messages.insert(ticket, value);
        }
        drop(boxes);
        self.bell.notify_all();
        Ok(())
    }

    /// Begins a receive.
    pub(crate) fn ask(&self, address: Address) -> Ticket {
        next(&mut self.boxes.lock().asked, address)
    }

    /// Gives up a receive: its message is thrown away.
    pub(crate) fn abandon(&self, ticket: Ticket) {
        let mut boxes = self.boxes.lock();
        let message = boxes.messages.remove(&ticket);
        if message.is_none() {
            boxes.abandoned.insert(ticket);
        }
        drop(boxes);
        drop(message);
    }

    /// Whether taking would return at once.
    pub(crate) fn ready(&self, ticket: Ticket) -> bool {
        let boxes = self.boxes.lock();
        boxes.failed.is_some() || boxes.left[ticket.0.from].is_some() || boxes.messages.contains_key(&ticket)
    }

    /// Takes a message. `None` if the deadline passes first.
    pub(crate) fn take(&self, ticket: Ticket, deadline: Instant) -> Result<Option<Array>, Arc<Cause>> {
        let mut patience = Patience::new(self.members);
        let (mut sleepy, mut late) = (false, false);
        loop {
            let mut boxes = self.boxes.lock();
            if let Some(cause) = &boxes.failed {
                return Err(cause.clone());
            }
            if let Some(value) = boxes.messages.remove(&ticket) {
                return Ok(Some(value));
            }
            // What it sent before it left has been looked for.
            if let Some(cause) = &boxes.left[ticket.0.from] {
                return Err(cause.clone());
            }
            if late {
                return Ok(None);
            }
            if !sleepy {
                drop(boxes);
                // Looks once more before it sleeps: something may have come while nothing was locked.
                sleepy = !patience.pause();
                continue;
            }
            late = self.bell.wait_until(&mut boxes, deadline).timed_out();
        }
    }

    /// A member will send nothing more.
    pub(crate) fn leave(&self, member: usize, cause: Arc<Cause>) {
        self.boxes.lock().left[member].get_or_insert(cause);
        self.bell.notify_all();
    }

    /// Nothing more will be sent or taken.
    pub(crate) fn fail(&self, cause: Arc<Cause>) {
        let mut boxes = self.boxes.lock();
        boxes.failed.get_or_insert(cause);
        let messages = std::mem::take(&mut boxes.messages);
        drop(boxes);
        self.bell.notify_all();
        drop(messages);
    }
}

impl std::fmt::Debug for Mail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mail({} members)", self.members)
    }
}
