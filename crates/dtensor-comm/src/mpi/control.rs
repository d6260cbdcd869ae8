//! The control channel of a rank: notices about ranks that left and groups that failed, and the sends and collectives that are
//! still in progress.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::MpiOptions;
use super::member::Operation;
use super::message::{Message, encode};
use super::raw::Comm;
use super::stage::Stage;
use crate::fault::{Cause, Departure};
use crate::ring::Ring;
use crate::transport::Key;

use crate::Result;

/// The maximum length of a notice, in bytes.
const MAX_NOTICE: usize = 16 << 10;
/// The maximum length of an error or panic message in a notice, in bytes.
const MAX_ERROR: usize = 2 << 10;
const TAG: i32 = 0;
/// How long a rank that returns waits for its sends and collectives to finish.
const LINGER: Duration = Duration::from_secs(10);

/// A notice that ranks send besides collectives.
#[derive(Debug, Serialize, Deserialize)]
enum Notice {
    /// The sender left the world.
    Left(Cause),
    /// A group failed.
    Failed(Key, Cause),
}

/// One rank's end of the control channel.
#[derive(Debug)]
pub(super) struct Control {
    rank: usize,
    size: usize,
    comm: Comm,
    pub(super) options: MpiOptions,
    pub(super) ring: Ring,
    state: Mutex<ControlState>,
    /// The collectives and receives in progress.
    operations: Mutex<Vec<Arc<Mutex<Operation>>>>,
}

#[derive(Debug)]
struct ControlState {
    /// The receive of the next notice.
    inbox: Message,
    /// The ranks that left, why, and when this rank learned of it.
    left: HashMap<usize, (Arc<Cause>, Instant)>,
    failed: HashMap<Key, Arc<Cause>>,
    /// Values whose send is not done.
    sends: Vec<Stage>,
    /// Messages whose send is not done.
    messages: Vec<Message>,
}

impl Control {
    pub(super) fn new(rank: usize, size: usize, comm: Comm, options: MpiOptions) -> Result<Self> {
        let state = ControlState {
            inbox: Message::receive(comm, MAX_NOTICE, None, TAG)?,
            left: HashMap::new(),
            failed: HashMap::new(),
            sends: Vec::new(),
            messages: Vec::new(),
        };
        let (state, operations) = (Mutex::new(state), Mutex::default());
        Ok(Control { rank, size, comm, options, ring: Ring::default(), state, operations })
    }

    /// Adds an operation in progress, which `poll` advances from now on.
    pub(super) fn add_operation(&self, operation: Arc<Mutex<Operation>>) {
        self.operations.lock().push(operation);
    }

    /// Returns true if more than one operation is in progress.
    pub(super) fn has_several_operations(&self) -> bool {
        self.operations.lock().len() > 1
    }

    /// Reads the notices that arrived and advances everything in progress.
    pub(super) fn poll(&self) -> Result<()> {
        self.retain_operations(|operation| !operation.advance());
        let mut state = self.state.lock();
        let ControlState { sends, messages, .. } = &mut *state;
        let mut error = None;
        sends.retain_mut(|stage| match stage.test() {
            Ok((done, _)) => !done,
            Err(e) => {
                error.get_or_insert(e);
                false
            }
        });
        messages.retain_mut(|message| match message.test() {
            Ok(done) => !done,
            Err(e) => {
                error.get_or_insert(e);
                false
            }
        });
        let mut failed = false;
        while state.inbox.test()? {
            let next = Message::receive(self.comm, MAX_NOTICE, None, TAG)?;
            match std::mem::replace(&mut state.inbox, next).decode()? {
                Notice::Left(cause) => {
                    if let Cause::Left { rank, .. } = cause {
                        state.left.entry(rank).or_insert((Arc::new(cause), Instant::now()));
                    }
                }
                Notice::Failed(key, cause) => {
                    state.failed.entry(key).or_insert(Arc::new(cause));
                    failed = true;
                }
            }
        }
        drop(state);
        if failed {
            self.retain_operations(|operation| self.failed(operation.key()).is_none());
        }
        error.map_or(Ok(()), Err)
    }

    /// Drops the operations for which `keep` returns false. Dropping one may drop the last handle to a group, which locks
    /// `state`, so nothing is locked meanwhile.
    fn retain_operations(&self, keep: impl Fn(&mut Operation) -> bool) {
        let operations = std::mem::take(&mut *self.operations.lock());
        // Another thread is advancing an operation that is locked, so it stays.
        let stays = |operation: &&Arc<Mutex<Operation>>| {
            operation.try_lock().is_none_or(|mut operation| keep(&mut operation))
        };
        let retained: Vec<_> = operations.iter().filter(stays).cloned().collect();
        // Before the operations that other threads added meanwhile.
        self.operations.lock().splice(0..0, retained);
        drop(operations);
    }

    /// Sends a message and holds its memory until the send is done.
    pub(super) fn post(&self, comm: Comm, bytes: Vec<u8>, rank: usize, tag: i32) -> Result<()> {
        let message = Message::send(comm, bytes, rank, tag)?;
        self.state.lock().messages.push(message);
        Ok(())
    }

    /// Returns why a rank left the world, if it did.
    pub(super) fn left(&self, rank: usize) -> Option<Arc<Cause>> {
        // Messages that the rank sent before it left may arrive after its notice.
        const GRACE: Duration = Duration::from_millis(100);
        let state = self.state.lock();
        state.left.get(&rank).filter(|(_, since)| since.elapsed() > GRACE).map(|(cause, _)| cause.clone())
    }

    /// Returns why a group failed, if it did.
    pub(super) fn failed(&self, key: &Key) -> Option<Arc<Cause>> {
        self.state.lock().failed.get(key).cloned()
    }

    /// Fails a group and notifies its members. Only the first cause counts, and this returns it.
    pub(super) fn fail(&self, key: &Key, cause: Arc<Cause>) -> Arc<Cause> {
        self.retain_operations(|operation| operation.key() != key);
        let mut state = self.state.lock();
        if let Some(cause) = state.failed.get(key) {
            return cause.clone();
        }
        state.failed.insert(key.clone(), cause.clone());
        drop(state);
        let others = key.members.iter().copied().filter(|&rank| rank != self.rank);
        self.notify(others, &Notice::Failed(key.clone(), Cause::clone(&cause)));
        cause
    }

    /// Holds the memory of a send until it is done.
    pub(super) fn hold(&self, send: Stage) {
        self.state.lock().sends.push(send);
    }

    /// Notifies all ranks that this one has left.
    pub(super) fn depart(&self, how: Departure) {
        let how = match how {
            // Sends and collectives that this rank began may still be in progress.
            Departure::Returned => {
                self.linger();
                Departure::Returned
            }
            Departure::Failed(message) => Departure::Failed(truncate(message)),
            Departure::Panicked(message) => Departure::Panicked(truncate(message)),
        };
        let cause = Cause::Left { rank: self.rank, how, last: self.ring.last().map(Box::new) };
        self.notify((0..self.size).filter(|&rank| rank != self.rank), &Notice::Left(cause));
    }

    /// Waits, for a limited time, until the sends and operations in progress are done.
    fn linger(&self) {
        let deadline = Instant::now() + LINGER;
        while Instant::now() < deadline && self.poll().is_ok() {
            let state = self.state.lock();
            if state.sends.is_empty() && self.operations.lock().is_empty() {
                return;
            }
            drop(state);
            std::thread::yield_now();
        }
    }

    /// Sends a notice. Errors are ignored: a rank that does not get it runs into its timeout.
    fn notify(&self, ranks: impl Iterator<Item = usize>, notice: &Notice) {
        let Ok(bytes) = encode(notice, MAX_NOTICE) else { return };
        for rank in ranks.filter(|rank| !self.state.lock().left.contains_key(rank)) {
            let _ = self.post(self.comm, bytes.clone(), rank, TAG);
        }
    }
}

/// Shortens a long error message.
fn truncate(mut message: String) -> String {
    if message.len() > MAX_ERROR {
        let end = (0..=MAX_ERROR).rev().find(|&end| message.is_char_boundary(end)).unwrap_or(0);
        message.truncate(end);
        message.push('…');
    }
    message
}
