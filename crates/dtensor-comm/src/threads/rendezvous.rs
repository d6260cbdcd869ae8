//! The rendezvous of a group: how its members, which are threads, run a collective together.
//!
//! Each collective is one **round**. A member **arrives** with an input and does not wait. The last member to arrive opens the
//! round: it turns the inputs of all members into work, split into parts. Every member that **waits** helps: it runs the next
//! part that no member has taken. The result does not depend on who runs a part, and a member that is not running does not
//! block the others. The member that finishes the last part closes the round, and all members get the output. Small work has
//! one part, which the last member to arrive runs itself, so the others wake up only once, when the output is ready.
//!
//! This module does not depend on tensors and has no unsafe code. Errors are passed in as a `Fault`: a member that **leaves**
//! fails every round at which it has not arrived, and a rendezvous that has **failed** stays failed.

use std::time::Instant;

use super::sync::{Arc, AtomicUsize, Backoff, Condvar, Mutex, Ordering, wait_until};

/// What the members do in a round.
pub(crate) trait RoundTask: Send + Sync + 'static {
    /// The input of one member.
    type Input: Send;
    /// The work of a round, split into parts that may run at the same time.
    type Work: Send + Sync;
    /// The result of a round.
    type Output: Clone + Send;
    /// Why a round has no result.
    type Fault: Clone + Send;

    /// Makes the work from the inputs of all members, in member order.
    fn open(&self, inputs: Vec<Self::Input>) -> Result<Self::Work, Self::Fault>;
    /// Returns the number of parts.
    fn parts(work: &Self::Work) -> usize;
    /// Runs one part. Called once per part.
    fn run(work: &Self::Work, part: usize);
    /// Returns the output. Called once, when all parts are done.
    fn close(&self, work: &Self::Work) -> Result<Self::Output, Self::Fault>;
    /// Returns the fault of a round whose work panicked.
    fn panic_fault(&self) -> Self::Fault;
}

/// The rounds of one group.
pub(crate) struct Rendezvous<T: RoundTask> {
    task: T,
    members: usize,
    state: Mutex<RendezvousState<T>>,
}

struct RendezvousState<T: RoundTask> {
    incomplete: Vec<IncompleteRound<T>>,
    failed: Option<T::Fault>,
    /// For each member: why it left, if it did.
    left: Vec<Option<T::Fault>>,
}

/// A round at which some members have not arrived.
struct IncompleteRound<T: RoundTask> {
    sequence: u64,
    inputs: Vec<Option<T::Input>>,
    arrived: usize,
    round: Arc<Round<T>>,
}

/// One round, as its members hold it.
pub(crate) struct Round<T: RoundTask> {
    members: usize,
    phase: AtomicUsize,
    /// The next part that no member has taken.
    next: AtomicUsize,
    done: AtomicUsize,
    parts: AtomicUsize,
    state: Mutex<RoundState<T>>,
    sleepers: AtomicUsize,
    wakeup: Condvar,
}

struct RoundState<T: RoundTask> {
    work: Option<Arc<T::Work>>,
    result: Option<Result<T::Output, T::Fault>>,
}

const ARRIVING: usize = 0;
const WORKING: usize = 1;
const FINISHED: usize = 2;

impl<T: RoundTask> Rendezvous<T> {
    pub(crate) fn new(task: T, members: usize) -> Self {
        let state = RendezvousState {
            incomplete: Vec::new(),
            failed: None,
            left: (0..members).map(|_| None).collect(),
        };
        Rendezvous { task, members, state: Mutex::new(state) }
    }

    /// Registers a member and its input at the round with this number. The last member to arrive opens the round. Returns
    /// without waiting for the output.
    pub(crate) fn arrive(
        &self,
        member: usize,
        sequence: u64,
        input: T::Input,
    ) -> Result<Arc<Round<T>>, T::Fault> {
        let mut state = self.state.lock();
        if let Some(fault) = &state.failed {
            return Err(fault.clone());
        }
        let at = match state.incomplete.iter().position(|incomplete| incomplete.sequence == sequence) {
            Some(at) => at,
            None => {
                if let Some(fault) = state.left.iter().flatten().next() {
                    let fault = fault.clone();
                    drop(state);
                    return Err(self.fail(fault));
                }
                state.incomplete.push(IncompleteRound {
                    sequence,
                    inputs: (0..self.members).map(|_| None).collect(),
                    arrived: 0,
                    round: Arc::new(Round::new(self.members)),
                });
                state.incomplete.len() - 1
            }
        };
        let incomplete = &mut state.incomplete[at];
        if incomplete.inputs[member].replace(input).is_none() {
            incomplete.arrived += 1;
        }
        if incomplete.arrived < self.members {
            return Ok(incomplete.round.clone());
        }
        let incomplete = state.incomplete.swap_remove(at);
        drop(state);
        let _guard = PanicGuard::new(&incomplete.round, &self.task);
        match self.task.open(incomplete.inputs.into_iter().flatten().collect()) {
            Ok(work) => incomplete.round.begin(&self.task, work),
            Err(fault) => {
                let fault = self.fail(fault);
                incomplete.round.end(Err(fault));
            }
        }
        Ok(incomplete.round.clone())
    }

    /// Returns true if the rendezvous has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.lock().failed.is_some()
    }

    /// Returns the members that have not arrived at a round. Empty if the round has begun or failed.
    pub(crate) fn missing(&self, sequence: u64) -> Vec<usize> {
        let state = self.state.lock();
        match state.incomplete.iter().find(|incomplete| incomplete.sequence == sequence) {
            Some(incomplete) => (0..self.members).filter(|&m| incomplete.inputs[m].is_none()).collect(),
            None => Vec::new(),
        }
    }

    /// Records that a member has left. If a round waits for it, the rendezvous fails: no member can arrive at a later round.
    pub(crate) fn leave(&self, member: usize, fault: T::Fault) {
        let mut state = self.state.lock();
        if state.left[member].is_some() {
            return;
        }
        if state.failed.is_none()
            && state.incomplete.iter().any(|incomplete| incomplete.inputs[member].is_none())
        {
            state.failed = Some(fault.clone());
            Self::end_incomplete(state, &fault);
            state = self.state.lock();
        }
        state.left[member] = Some(fault);
    }

    /// Fails every incomplete round and all later ones. Only the first fault counts, and this returns it.
    pub(crate) fn fail(&self, fault: T::Fault) -> T::Fault {
        let mut state = self.state.lock();
        let fault = state.failed.get_or_insert(fault).clone();
        Self::end_incomplete(state, &fault);
        fault
    }

    fn end_incomplete(mut state: super::sync::MutexGuard<'_, RendezvousState<T>>, fault: &T::Fault) {
        let ended = std::mem::take(&mut state.incomplete);
        drop(state);
        for incomplete in ended {
            incomplete.round.end(Err(fault.clone()));
        }
    }
}

/// Ends a round with a fault if its work panics.
struct PanicGuard<'a, T: RoundTask> {
    round: &'a Round<T>,
    task: &'a T,
    /// True if the thread was unwinding before. Then this work has not panicked and may finish.
    unwinding: bool,
}

impl<'a, T: RoundTask> PanicGuard<'a, T> {
    fn new(round: &'a Round<T>, task: &'a T) -> Self {
        PanicGuard { round, task, unwinding: std::thread::panicking() }
    }
}

impl<T: RoundTask> Drop for PanicGuard<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.unwinding {
            self.round.end(Err(self.task.panic_fault()));
        }
    }
}

/// The deadline passed before the round was over.
#[derive(Debug)]
pub(crate) struct TimedOut;

impl<T: RoundTask> Round<T> {
    fn new(members: usize) -> Self {
        Round {
            members,
            phase: AtomicUsize::new(ARRIVING),
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            parts: AtomicUsize::new(0),
            state: Mutex::new(RoundState { work: None, result: None }),
            sleepers: AtomicUsize::new(0),
            wakeup: Condvar::new(),
        }
    }

    /// Publishes the work and runs parts of it. Work without parts finishes the round at once.
    fn begin(&self, task: &T, work: T::Work) {
        let parts = T::parts(&work);
        if parts == 0 {
            self.end(task.close(&work));
            return;
        }
        self.state.lock().work = Some(Arc::new(work));
        self.parts.store(parts, Ordering::SeqCst);
        self.phase.store(WORKING, Ordering::SeqCst);
        if parts > 1 {
            self.wake();
        }
        self.run_parts(task);
    }

    /// Runs parts until none is left to take.
    fn run_parts(&self, task: &T) {
        let parts = self.parts.load(Ordering::SeqCst);
        if self.next.load(Ordering::SeqCst) >= parts {
            return;
        }
        let Some(work) = self.state.lock().work.clone() else { return };
        let _guard = PanicGuard::new(self, task);
        loop {
            let part = self.next.fetch_add(1, Ordering::SeqCst);
            if part >= parts {
                return;
            }
            T::run(&work, part);
            if self.done.fetch_add(1, Ordering::SeqCst) + 1 == parts {
                self.end(task.close(&work));
                return;
            }
        }
    }

    /// Sets the result, unless there is one already, and wakes all members.
    fn end(&self, result: Result<T::Output, T::Fault>) {
        let mut state = self.state.lock();
        let work = state.work.take();
        if state.result.is_none() {
            state.result = Some(result);
        }
        drop(state);
        self.phase.store(FINISHED, Ordering::SeqCst);
        self.wake();
        drop(work);
    }

    /// Wakes the members that sleep. A sleeper increments `sleepers` before it reads the phase for the last time, and the phase
    /// changes before `sleepers` is read here. So either the sleeper sees the change, or this sees the sleeper.
    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.state.lock());
            self.wakeup.notify_all();
        }
    }

    /// Returns true if the round is over or has a part to run, so that a member need not sleep.
    fn is_actionable(&self) -> bool {
        match self.phase.load(Ordering::SeqCst) {
            ARRIVING => false,
            WORKING => self.next.load(Ordering::SeqCst) < self.parts.load(Ordering::SeqCst),
            _ => true,
        }
    }

    /// Runs parts if there are any to take. Returns true if the round is over.
    pub(crate) fn poll(&self, rendezvous: &Rendezvous<T>) -> bool {
        if self.phase.load(Ordering::SeqCst) == WORKING {
            self.run_parts(&rendezvous.task);
        }
        self.phase.load(Ordering::SeqCst) == FINISHED
    }

    /// Runs parts and waits until the round is over. Returns its result, or an error if the deadline passes first.
    pub(crate) fn wait(
        &self,
        rendezvous: &Rendezvous<T>,
        deadline: Instant,
    ) -> Result<Result<T::Output, T::Fault>, TimedOut> {
        let mut backoff = Backoff::new(self.members);
        while !self.poll(rendezvous) {
            if backoff.pause() {
                continue;
            }
            let mut state = self.state.lock();
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let mut late = false;
            while !self.is_actionable() && !late {
                late = wait_until(&self.wakeup, &mut state, deadline);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            drop(state);
            if late && !self.poll(rendezvous) {
                return Err(TimedOut);
            }
        }
        Ok(self.state.lock().result.clone().expect("a finished round has a result"))
    }
}

impl<T: RoundTask> std::fmt::Debug for Rendezvous<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rendezvous({} members)", self.members)
    }
}

impl<T: RoundTask> std::fmt::Debug for Round<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Round({} members)", self.members)
    }
}
