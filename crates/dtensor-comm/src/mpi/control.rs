//! The line for bad news: who has left the world, and which groups have failed. And values on their way to others.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::MpiOptions;
use super::letter::{Letter, write};
use super::raw::Comm;
use super::seat::Voyage;
use super::step::Step;
use crate::fault::{Cause, Departure};
use crate::ring::Ring;
use crate::transport::Key;

use crate::Result;

/// The longest piece of news.
const NEWS: usize = 16 << 10;
/// The most that is said of an error or panic.
const WORDS: usize = 2 << 10;
const TAG: i32 = 0;
/// How long a rank that returns waits for what it has sent to be taken.
const LINGER: Duration = Duration::from_secs(10);

/// What ranks tell each other besides collectives.
#[derive(Debug, Serialize, Deserialize)]
enum News {
    Left(Cause),
    Failed(Key, Cause),
}

/// One rank's end of the line.
#[derive(Debug)]
pub(super) struct Control {
    rank: usize,
    size: usize,
    comm: Comm,
    pub(super) options: MpiOptions,
    pub(super) ring: Ring,
    state: Mutex<State>,
    /// The collectives that are on their way.
    voyages: Mutex<Vec<Arc<Mutex<Voyage>>>>,
}

#[derive(Debug)]
struct State {
    /// The next piece of news, when it comes.
    inbox: Letter,
    left: HashMap<usize, (Arc<Cause>, Instant)>,
    failed: HashMap<Key, Arc<Cause>>,
    /// Values and news that have been sent and not yet taken.
    outbox: Vec<Step>,
    letters: Vec<Letter>,
}

impl Control {
    pub(super) fn new(rank: usize, size: usize, comm: Comm, options: MpiOptions) -> Result<Self> {
        let state = State {
            inbox: Letter::receive(comm, NEWS, None, TAG)?,
            left: HashMap::new(),
            failed: HashMap::new(),
            outbox: Vec::new(),
            letters: Vec::new(),
        };
        let (state, voyages) = (Mutex::new(state), Mutex::default());
        Ok(Control { rank, size, comm, options, ring: Ring::default(), state, voyages })
    }

    /// Takes a collective along that is on its way.
    pub(super) fn take_along(&self, voyage: Arc<Mutex<Voyage>>) {
        self.voyages.lock().push(voyage);
    }

    /// Whether more than one collective is on its way.
    pub(super) fn others_wait(&self) -> bool {
        self.voyages.lock().len() > 1
    }

    /// Reads what has come, and helps everything on its way.
    pub(super) fn poll(&self) -> Result<()> {
        self.keep_voyages(|voyage| !voyage.advance());
        let mut state = self.state.lock();
        let State { outbox, letters, .. } = &mut *state;
        let mut error = None;
        outbox.retain_mut(|step| match step.test() {
            Ok((done, _)) => !done,
            Err(e) => {
                error.get_or_insert(e);
                false
            }
        });
        letters.retain_mut(|letter| match letter.test() {
            Ok(done) => !done,
            Err(e) => {
                error.get_or_insert(e);
                false
            }
        });
        let mut failed = false;
        while state.inbox.test()? {
            let next = Letter::receive(self.comm, NEWS, None, TAG)?;
            match std::mem::replace(&mut state.inbox, next).read()? {
                News::Left(cause) => {
                    if let Cause::Left { rank, .. } = cause {
                        state.left.entry(rank).or_insert((Arc::new(cause), Instant::now()));
                    }
                }
                News::Failed(key, cause) => {
                    state.failed.entry(key).or_insert(Arc::new(cause));
                    failed = true;
                }
            }
        }
        drop(state);
        if failed {
            self.keep_voyages(|voyage| self.failed(voyage.key()).is_none());
        }
        error.map_or(Ok(()), Err)
    }

    /// Gives up the voyages for which `keep` is false. That may end the last handle to a group, which looks in here: so
    /// nothing is locked then.
    fn keep_voyages(&self, keep: impl Fn(&mut Voyage) -> bool) {
        let voyages = std::mem::take(&mut *self.voyages.lock());
        // One that is locked is being moved on by somebody else.
        let keeps =
            |voyage: &&Arc<Mutex<Voyage>>| voyage.try_lock().is_none_or(|mut voyage| keep(&mut voyage));
        let kept: Vec<_> = voyages.iter().filter(keeps).cloned().collect();
        // Those that have been taken along meanwhile come after them.
        self.voyages.lock().splice(0..0, kept);
        drop(voyages);
    }

    /// Sends a letter, and keeps it until it has been taken.
    pub(super) fn post(&self, comm: Comm, text: Vec<u8>, rank: usize, tag: i32) -> Result<()> {
        let letter = Letter::send(comm, text, rank, tag)?;
        self.state.lock().letters.push(letter);
        Ok(())
    }

    /// Why a rank will not come any more.
    pub(super) fn left(&self, rank: usize) -> Option<Arc<Cause>> {
        // What it sent before it left may be behind the news that it did.
        const GRACE: Duration = Duration::from_millis(100);
        let state = self.state.lock();
        state.left.get(&rank).filter(|(_, since)| since.elapsed() > GRACE).map(|(cause, _)| cause.clone())
    }

    /// Why a group has failed.
    pub(super) fn failed(&self, key: &Key) -> Option<Arc<Cause>> {
        self.state.lock().failed.get(key).cloned()
    }

    /// A group has failed: its members are told. The first cause is the one that counts.
    pub(super) fn fail(&self, key: &Key, cause: Arc<Cause>) -> Arc<Cause> {
        self.keep_voyages(|voyage| voyage.key() != key);
        let mut state = self.state.lock();
        if let Some(cause) = state.failed.get(key) {
            return cause.clone();
        }
        state.failed.insert(key.clone(), cause.clone());
        drop(state);
        let others = key.members.iter().copied().filter(|&rank| rank != self.rank);
        self.tell(others, &News::Failed(key.clone(), Cause::clone(&cause)));
        cause
    }

    /// Keeps something that was sent until it has been taken.
    pub(super) fn keep(&self, step: Step) {
        self.state.lock().outbox.push(step);
    }

    /// Tells all ranks that this one has left.
    pub(super) fn depart(&self, how: Departure) {
        let how = match how {
            // What it has sent is still on its way, and so is its part in what it has begun.
            Departure::Returned => {
                self.linger();
                Departure::Returned
            }
            Departure::Failed(words) => Departure::Failed(cut(words)),
            Departure::Panicked(words) => Departure::Panicked(cut(words)),
        };
        let cause = Cause::Left { rank: self.rank, how, last: self.ring.last().map(Box::new) };
        self.tell((0..self.size).filter(|&rank| rank != self.rank), &News::Left(cause));
    }

    fn linger(&self) {
        let deadline = Instant::now() + LINGER;
        while Instant::now() < deadline && self.poll().is_ok() {
            let state = self.state.lock();
            if state.outbox.is_empty() && self.voyages.lock().is_empty() {
                return;
            }
            drop(state);
            std::thread::yield_now();
        }
    }

    /// Sends news. Who cannot be told finds out by waiting.
    fn tell(&self, ranks: impl Iterator<Item = usize>, news: &News) {
        let Ok(text) = write(news, NEWS) else { return };
        for rank in ranks.filter(|rank| !self.state.lock().left.contains_key(rank)) {
            let _ = self.post(self.comm, text.clone(), rank, TAG);
        }
    }
}

/// The beginning of a long text.
fn cut(mut words: String) -> String {
    if words.len() > WORDS {
        let end = (0..=WORDS).rev().find(|&end| words.is_char_boundary(end)).unwrap_or(0);
        words.truncate(end);
        words.push('…');
    }
    words
}
