//! The watchdog: a thread that looks after transfers which have been queued, and aborts those that do not finish.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Communicator;
use crate::cuda::driver::Handle;
use crate::{Error, Result};

/// How long transfers may take, and what happens if they take longer or fail.
pub struct Watch {
    /// How long the transfers may take from when the GPU begins them.
    pub timeout: Duration,
    /// Called once with the reason if they do not finish. Returns the error for each rank, in their order, which is returned to those who
    /// read the results.
    pub on_failure: OnFailure,
}

/// What happens if transfers do not finish.
pub type OnFailure = Box<dyn FnOnce(&str) -> Vec<Error> + Send>;

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watch({:?})", self.timeout)
    }
}

/// Transfers in progress.
struct Flight {
    number: u64,
    ranks: Vec<Arc<Communicator>>,
    /// For each rank: what happens when the GPU begins its transfers, and when it has done them.
    started: Vec<Handle>,
    /// Empty while the library queues the transfers, which may wait for other ranks when they first connect.
    ended: Vec<Handle>,
    since: Option<Instant>,
    watch: Watch,
    /// Why they failed, for the thread that still queues them.
    why: Arc<OnceLock<String>>,
}

#[derive(Default)]
struct Watchdog {
    flights: Mutex<(Vec<Flight>, u64)>,
    wakeup: Condvar,
}

static WATCHDOG: OnceLock<std::result::Result<&'static Watchdog, String>> = OnceLock::new();

/// Stops the watchdog for good, between two looks at the transfers: the process ends, and the driver with it.
pub(super) fn stop() {
    if let Some(Ok(watchdog)) = WATCHDOG.get() {
        std::mem::forget(watchdog.flights.try_lock_for(Duration::from_secs(5)));
    }
}

/// Returns the watchdog, which runs from the first call on.
fn watchdog() -> Result<&'static Watchdog> {
    let started = WATCHDOG.get_or_init(|| {
        super::expect_end();
        let watchdog: &'static Watchdog = Box::leak(Box::default());
        let thread = std::thread::Builder::new().name("nccl watchdog".into()).spawn(|| watchdog.run());
        thread.map(|_| watchdog).map_err(|error| error.to_string())
    });
    started.clone().map_err(|why| Error::argument("nccl", format!("cannot start the watchdog: {why}")))
}

/// Transfers that are being queued.
pub(super) struct Queueing {
    watchdog: &'static Watchdog,
    number: u64,
    why: Arc<OnceLock<String>>,
}

/// Marks the streams of some ranks, on which transfers will be queued now.
pub(super) fn begin(ranks: Vec<Arc<Communicator>>, watch: Watch) -> Result<Queueing> {
    let watchdog = watchdog()?;
    let started = mark(&ranks)?;
    let mut state = watchdog.flights.lock();
    let (flights, count) = &mut *state;
    *count += 1;
    let (number, why) = (*count, Arc::new(OnceLock::new()));
    flights.push(Flight { number, ranks, started, ended: Vec::new(), since: None, watch, why: why.clone() });
    // With others in progress, the watchdog will look by itself.
    if flights.len() == 1 {
        watchdog.wakeup.notify_one();
    }
    drop(state);
    Ok(Queueing { watchdog, number, why })
}

/// Records an event on the stream of each rank.
fn mark(ranks: &[Arc<Communicator>]) -> Result<Vec<Handle>> {
    let mark = |rank: &Arc<Communicator>| {
        let gpu = rank.stream.gpu;
        gpu.enter()?;
        let event = gpu.take_event()?;
        gpu.driver.record(event, rank.stream.handle)?;
        Ok(event)
    };
    ranks.iter().map(mark).collect()
}

impl Queueing {
    /// Marks the end of queueing. If queueing failed, the watchdog stops watching these transfers.
    pub(super) fn end(self, queued: Result<()>) -> Result<()> {
        let mut state = self.watchdog.flights.lock();
        let Some(at) = state.0.iter().position(|flight| flight.number == self.number) else {
            // The watchdog has aborted them meanwhile.
            let why = self.why.get().map_or("the communicator has been aborted", String::as_str);
            return Err(Error::argument("nccl", why));
        };
        let result = queued.and_then(|()| mark(&state.0[at].ranks));
        match result {
            Ok(ended) => state.0[at].ended = ended,
            Err(error) => {
                let flight = state.0.remove(at);
                drop(state);
                drop(flight);
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Watchdog {
    fn run(&self) {
        let mut state = self.flights.lock();
        loop {
            let (mut over, mut failed) = (Vec::new(), Vec::<(Flight, String)>::new());
            let mut waiting = Vec::<Flight>::new();
            for mut flight in std::mem::take(&mut state.0) {
                // A communicator runs its transfers in order, so the first that is not done is enough to look at.
                let is_behind = waiting.iter().any(|other| other.has_ranks_of(&flight));
                let is_lost = failed.iter().any(|(other, _)| other.has_ranks_of(&flight));
                match if is_behind || is_lost { Ok(is_lost) } else { flight.look() } {
                    Ok(false) => waiting.push(flight),
                    Ok(true) => over.push(flight),
                    Err(why) => {
                        let _ = flight.why.set(why.clone());
                        failed.push((flight, why));
                    }
                }
            }
            state.0 = waiting;
            let least = state.0.iter().map(|flight| flight.watch.timeout / 4).min();
            let pause = least.map(|pause| pause.clamp(Duration::from_millis(1), Duration::from_millis(50)));
            if over.is_empty() && failed.is_empty() {
                match pause {
                    Some(pause) => drop(self.wakeup.wait_for(&mut state, pause)),
                    None => self.wakeup.wait(&mut state),
                }
                continue;
            }
            // What these hold may be dropped with them, or call back.
            drop(state);
            drop(over);
            failed.into_iter().for_each(|(flight, why)| flight.fail(&why));
            state = self.flights.lock();
        }
    }
}

impl Flight {
    fn has_ranks_of(&self, other: &Flight) -> bool {
        Arc::ptr_eq(&self.ranks[0], &other.ranks[0])
    }

    /// Returns true if the transfers are done, or why they never will be.
    fn look(&mut self) -> std::result::Result<bool, String> {
        let happened = |events: &[Handle]| {
            let mut all = self.ranks.iter().zip(events);
            all.try_fold(true, |all, (rank, &event)| {
                rank.stream.gpu.enter()?;
                Ok(all && rank.stream.gpu.driver.has_happened(event)?)
            })
        };
        if self.ranks.iter().any(|rank| rank.is_aborted()) {
            // An earlier transfer of the communicator has failed, and its error was reported.
            return Ok(true);
        }
        let text = |error: Error| error.to_string().trim_start_matches("cuda: ").to_owned();
        if !self.ended.is_empty() && happened(&self.ended).map_err(text)? {
            return Ok(true);
        }
        for rank in &self.ranks {
            rank.nccl.error(rank.handle).map_err(text)?;
        }
        if self.since.is_none() && (self.ended.is_empty() || happened(&self.started).map_err(text)?) {
            self.since = Some(Instant::now());
        }
        match self.since.is_some_and(|since| since.elapsed() >= self.watch.timeout) {
            true => Err(format!("NCCL did not finish it within {:?}", self.watch.timeout)),
            false => Ok(false),
        }
    }

    /// Tells everybody, and ends the transfers.
    fn fail(mut self, why: &str) {
        let on_failure = std::mem::replace(&mut self.watch.on_failure, Box::new(|_| Vec::new()));
        let errors = on_failure(why);
        // Before the transfers end, so that those who wait for them see the error.
        for (rank, error) in self.ranks.iter().zip(errors) {
            rank.stream.fail(error);
        }
        self.ranks.iter().for_each(|rank| rank.abort());
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        for events in [&self.started, &self.ended] {
            self.ranks.iter().zip(events).for_each(|(rank, &event)| rank.stream.gpu.return_event(event));
        }
    }
}
