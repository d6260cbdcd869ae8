//! Where the members of a group meet, once per collective.
//!
//! A member **arrives** with a ticket: what it wants, and the values it brings. It does not wait for anybody. Whoever
//! arrives last opens the meeting: from all tickets it makes the work, cut into parts. Every member that **waits** helps:
//! it takes the next part that nobody has taken. Who does a part makes no difference to its result, and a member
//! that is not running holds nobody up. Whoever finishes the last part closes the meeting, and all take the outcome.
//! Small work has one part, which the last to arrive does itself: then nobody is woken before the outcome is there.
//!
//! Nothing here knows of tensors, and nothing is unsafe. What can go wrong is handed in as a `Fault`: a member
//! that **leaves** fails every meeting it has not arrived at, and a hub that has **failed** stays failed.

use std::time::Instant;

use super::sync::{Arc, AtomicUsize, Condvar, Mutex, Ordering, Patience, wait_until};

/// What members meet for.
pub(crate) trait Meeting: Send + Sync + 'static {
    /// What a member brings.
    type Ticket: Send;
    /// What is to be done, in parts that may run at the same time.
    type Work: Send + Sync;
    /// What comes of it.
    type Outcome: Clone + Send;
    /// Why nothing came of it.
    type Fault: Clone + Send;

    /// Makes the work from the tickets of all members, in their order.
    fn open(&self, tickets: Vec<Self::Ticket>) -> Result<Self::Work, Self::Fault>;
    /// The number of parts.
    fn parts(work: &Self::Work) -> usize;
    /// Does one part. Each is done once.
    fn run(work: &Self::Work, part: usize);
    /// Called once, when all parts are done.
    fn close(&self, work: &Self::Work) -> Result<Self::Outcome, Self::Fault>;
    /// What is said when a part panics.
    fn broken(&self) -> Self::Fault;
}

/// The meetings of one group.
pub(crate) struct Hub<M: Meeting> {
    meeting: M,
    members: usize,
    state: Mutex<State<M>>,
}

struct State<M: Meeting> {
    gathering: Vec<Gathering<M>>,
    failed: Option<M::Fault>,
    /// Why a member will not come again.
    left: Vec<Option<M::Fault>>,
}

/// A meeting that not all have arrived at.
struct Gathering<M: Meeting> {
    sequence: u64,
    tickets: Vec<Option<M::Ticket>>,
    arrived: usize,
    round: Arc<Round<M>>,
}

/// One meeting, as its members hold it.
pub(crate) struct Round<M: Meeting> {
    members: usize,
    phase: AtomicUsize,
    /// The next part to be taken.
    next: AtomicUsize,
    done: AtomicUsize,
    parts: AtomicUsize,
    inner: Mutex<Inner<M>>,
    sleepers: AtomicUsize,
    bell: Condvar,
}

struct Inner<M: Meeting> {
    work: Option<Arc<M::Work>>,
    result: Option<Result<M::Outcome, M::Fault>>,
}

const GATHERING: usize = 0;
const WORKING: usize = 1;
const OVER: usize = 2;

impl<M: Meeting> Hub<M> {
    pub(crate) fn new(meeting: M, members: usize) -> Self {
        let state = State { gathering: Vec::new(), failed: None, left: (0..members).map(|_| None).collect() };
        Hub { meeting, members, state: Mutex::new(state) }
    }

    /// A member comes to the meeting with this number. Who comes last begins it; nobody has to wait for the outcome.
    pub(crate) fn arrive(
        &self,
        member: usize,
        sequence: u64,
        ticket: M::Ticket,
    ) -> Result<Arc<Round<M>>, M::Fault> {
        let mut state = self.state.lock();
        if let Some(fault) = &state.failed {
            return Err(fault.clone());
        }
        let at = match state.gathering.iter().position(|g| g.sequence == sequence) {
            Some(at) => at,
            None => {
                if let Some(fault) = state.left.iter().flatten().next() {
                    let fault = fault.clone();
                    drop(state);
                    return Err(self.fail(fault));
                }
                state.gathering.push(Gathering {
                    sequence,
                    tickets: (0..self.members).map(|_| None).collect(),
                    arrived: 0,
                    round: Arc::new(Round::new(self.members)),
                });
                state.gathering.len() - 1
            }
        };
        let gathering = &mut state.gathering[at];
        if gathering.tickets[member].replace(ticket).is_none() {
            gathering.arrived += 1;
        }
        if gathering.arrived < self.members {
            return Ok(gathering.round.clone());
        }
        let gathering = state.gathering.swap_remove(at);
        drop(state);
        let _guard = Guard::new(&gathering.round, &self.meeting);
        match self.meeting.open(gathering.tickets.into_iter().flatten().collect()) {
            Ok(work) => gathering.round.begin(&self.meeting, work),
            Err(fault) => {
                let fault = self.fail(fault);
                gathering.round.end(Err(fault));
            }
        }
        Ok(gathering.round.clone())
    }

    /// Whether a fault has been.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.lock().failed.is_some()
    }

    /// The members that have not arrived at a meeting. None if it has begun or failed.
    pub(crate) fn missing(&self, sequence: u64) -> Vec<usize> {
        let state = self.state.lock();
        match state.gathering.iter().find(|g| g.sequence == sequence) {
            Some(g) => (0..self.members).filter(|&m| g.tickets[m].is_none()).collect(),
            None => Vec::new(),
        }
    }

    /// A member will not come again. If a meeting waits for it, the hub has failed: nobody can come to any other either.
    pub(crate) fn leave(&self, member: usize, fault: M::Fault) {
        let mut state = self.state.lock();
        if state.left[member].is_some() {
            return;
        }
        if state.failed.is_none() && state.gathering.iter().any(|g| g.tickets[member].is_none()) {
            state.failed = Some(fault.clone());
            Self::dissolve(state, &fault);
            state = self.state.lock();
        }
        state.left[member] = Some(fault);
    }

    /// Fails every meeting, now and later. The first fault is the one that counts, and is returned.
    pub(crate) fn fail(&self, fault: M::Fault) -> M::Fault {
        let mut state = self.state.lock();
        let fault = state.failed.get_or_insert(fault).clone();
        Self::dissolve(state, &fault);
        fault
    }

    fn dissolve(mut state: super::sync::MutexGuard<'_, State<M>>, fault: &M::Fault) {
        let gone = std::mem::take(&mut state.gathering);
        drop(state);
        for gathering in gone {
            gathering.round.end(Err(fault.clone()));
        }
    }
}

/// Ends a meeting whose work panics.
struct Guard<'a, M: Meeting> {
    round: &'a Round<M>,
    meeting: &'a M,
    /// A thread that was unwinding before may do this properly.
    unwinding: bool,
}

impl<'a, M: Meeting> Guard<'a, M> {
    fn new(round: &'a Round<M>, meeting: &'a M) -> Self {
        Guard { round, meeting, unwinding: std::thread::panicking() }
    }
}

impl<M: Meeting> Drop for Guard<'_, M> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.unwinding {
            self.round.end(Err(self.meeting.broken()));
        }
    }
}

/// The deadline passed before the meeting was over.
#[derive(Debug)]
pub(crate) struct TimedOut;

impl<M: Meeting> Round<M> {
    fn new(members: usize) -> Self {
        Round {
            members,
            phase: AtomicUsize::new(GATHERING),
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            parts: AtomicUsize::new(0),
            inner: Mutex::new(Inner { work: None, result: None }),
            sleepers: AtomicUsize::new(0),
            bell: Condvar::new(),
        }
    }

    fn begin(&self, meeting: &M, work: M::Work) {
        let parts = M::parts(&work);
        if parts == 0 {
            self.end(meeting.close(&work));
            return;
        }
        self.inner.lock().work = Some(Arc::new(work));
        self.parts.store(parts, Ordering::SeqCst);
        self.phase.store(WORKING, Ordering::SeqCst);
        if parts > 1 {
            self.wake();
        }
        self.help(meeting);
    }

    /// Takes parts until there are no more to take.
    fn help(&self, meeting: &M) {
        let parts = self.parts.load(Ordering::SeqCst);
        if self.next.load(Ordering::SeqCst) >= parts {
            return;
        }
        let Some(work) = self.inner.lock().work.clone() else { return };
        let _guard = Guard::new(self, meeting);
        loop {
            let part = self.next.fetch_add(1, Ordering::SeqCst);
            if part >= parts {
                return;
            }
            M::run(&work, part);
            if self.done.fetch_add(1, Ordering::SeqCst) + 1 == parts {
                self.end(meeting.close(&work));
                return;
            }
        }
    }

    /// The first result is the one that counts.
    fn end(&self, result: Result<M::Outcome, M::Fault>) {
        let mut inner = self.inner.lock();
        let work = inner.work.take();
        if inner.result.is_none() {
            inner.result = Some(result);
        }
        drop(inner);
        self.phase.store(OVER, Ordering::SeqCst);
        self.wake();
        drop(work);
    }

    /// Sleepers count themselves before they look at the phase for the last time, and the phase is changed before they are
    /// counted: so either they see the change or they are seen.
    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.inner.lock());
            self.bell.notify_all();
        }
    }

    /// Whether there is something to do but wait.
    fn calls(&self) -> bool {
        match self.phase.load(Ordering::SeqCst) {
            GATHERING => false,
            WORKING => self.next.load(Ordering::SeqCst) < self.parts.load(Ordering::SeqCst),
            _ => true,
        }
    }

    /// Helps if there is something to do. True if the meeting is over.
    pub(crate) fn poll(&self, hub: &Hub<M>) -> bool {
        if self.phase.load(Ordering::SeqCst) == WORKING {
            self.help(&hub.meeting);
        }
        self.phase.load(Ordering::SeqCst) == OVER
    }

    /// Helps, and waits until the meeting is over.
    pub(crate) fn wait(
        &self,
        hub: &Hub<M>,
        deadline: Instant,
    ) -> Result<Result<M::Outcome, M::Fault>, TimedOut> {
        let mut patience = Patience::new(self.members);
        while !self.poll(hub) {
            if patience.pause() {
                continue;
            }
            let mut inner = self.inner.lock();
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let mut late = false;
            while !self.calls() && !late {
                late = wait_until(&self.bell, &mut inner, deadline);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            drop(inner);
            if late && !self.poll(hub) {
                return Err(TimedOut);
            }
        }
        Ok(self.inner.lock().result.clone().expect("a meeting that is over has a result"))
    }
}

impl<M: Meeting> std::fmt::Debug for Hub<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hub({} members)", self.members)
    }
}

impl<M: Meeting> std::fmt::Debug for Round<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Round({} members)", self.members)
    }
}
