//! The rendezvous under a schedule checker: the source of the library, compiled with primitives that let the checker choose at
//! every step which thread runs next.
// The source is compiled a second time, with the primitives of the library.
#![allow(clippy::duplicate_mod)]

#[allow(dead_code)]
#[path = "schedules/real.rs"]
mod real;
#[path = "../src/threads/rendezvous.rs"]
#[allow(dead_code)]
mod rendezvous;

use std::collections::BTreeSet;
use std::sync::Mutex as StdMutex;
use std::time::{Duration, Instant};

use rendezvous::{Rendezvous, Round, RoundTask};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::{Config, FailurePersistence, Runner, thread};
use sync::Arc;

/// Replaces `src/threads/sync.rs` with the primitives of the checker.
mod sync {
    use std::cell::Cell;
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::Instant;

    pub(crate) use shuttle::sync::Arc;
    pub(crate) use shuttle::sync::atomic::{AtomicUsize, Ordering};

    /// A bug that the primitives have on purpose, to test that the checker finds it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Bug {
        None,
        /// `notify_all` wakes no thread.
        NoNotify,
        /// A wait releases the lock before it sleeps, so that it can miss a notification in between.
        MissedNotify,
    }

    std::thread_local! {
        /// A thread-local suffices, because all tasks of a checker run on the thread that called it.
        pub(crate) static BUG: Cell<Bug> = const { Cell::new(Bug::None) };
    }

    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        lock: &'a Mutex<T>,
        /// `None` only during a wait.
        guard: Option<shuttle::sync::MutexGuard<'a, T>>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            MutexGuard { lock: self, guard: Some(guard) }
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.guard.as_ref().expect("the guard is not in a wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.guard.as_mut().expect("the guard is not in a wait")
        }
    }

    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Condvar(shuttle::sync::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            if BUG.get() != Bug::NoNotify {
                self.0.notify_all();
            }
        }
    }

    /// Waits without a deadline: the checker has no clock. A thread that is never woken shows up as a deadlock.
    pub(crate) fn wait_until<T>(wakeup: &Condvar, guard: &mut MutexGuard<'_, T>, _: Instant) -> bool {
        let mut held = guard.guard.take().expect("the guard is not in a wait");
        if BUG.get() == Bug::MissedNotify {
            drop(held);
            held = guard.lock.0.lock().unwrap_or_else(PoisonError::into_inner);
        }
        guard.guard = Some(wakeup.0.wait(held).unwrap_or_else(PoisonError::into_inner));
        false
    }

    /// Pauses once, then sleeps, so that the checker sees both.
    #[derive(Debug)]
    pub(crate) struct Backoff(bool);

    impl Backoff {
        pub(crate) fn new(_: usize) -> Self {
            Backoff(true)
        }

        pub(crate) fn pause(&mut self) -> bool {
            std::mem::replace(&mut self.0, false)
        }
    }
}

/// Each member passes a number, and all get the list of the numbers.
struct GatherTask {
    members: usize,
}

/// A member's number, and how many parts the work has.
#[derive(Debug, Clone, Copy)]
struct Input {
    number: u64,
    parts: usize,
}

/// As the number of parts: makes opening the round fail.
const OPEN_FAILS: usize = usize::MAX;

struct Work {
    numbers: Vec<u64>,
    done: Vec<AtomicUsize>,
    closed: AtomicUsize,
}

type Fault = &'static str;

impl RoundTask for GatherTask {
    type Input = Input;
    type Work = Work;
    type Output = Arc<Vec<u64>>;
    type Fault = Fault;

    fn open(&self, inputs: Vec<Input>) -> Result<Work, Fault> {
        assert_eq!(inputs.len(), self.members, "opened before all members arrived");
        if inputs.iter().any(|input| input.parts == OPEN_FAILS) {
            return Err("open failed");
        }
        let done = (0..inputs[0].parts).map(|_| AtomicUsize::new(0)).collect();
        Ok(Work {
            numbers: inputs.iter().map(|input| input.number).collect(),
            done,
            closed: AtomicUsize::new(0),
        })
    }

    fn parts(work: &Work) -> usize {
        work.done.len()
    }

    fn run(work: &Work, part: usize) {
        assert_eq!(work.done[part].fetch_add(1, Ordering::SeqCst), 0, "part {part} ran twice");
    }

    fn close(&self, work: &Work) -> Result<Arc<Vec<u64>>, Fault> {
        let done = work.done.iter().all(|part| part.load(Ordering::SeqCst) == 1);
        assert!(done, "closed before every part was done");
        assert_eq!(work.closed.fetch_add(1, Ordering::SeqCst), 0, "closed twice");
        Ok(Arc::new(work.numbers.clone()))
    }

    fn panic_fault(&self) -> Fault {
        "panicked"
    }
}

type Group = Arc<Rendezvous<GatherTask>>;

fn group(members: usize) -> Group {
    Arc::new(Rendezvous::new(GatherTask { members }, members))
}

/// The number that a member passes to a round.
fn number(member: usize, sequence: u64) -> u64 {
    100 * sequence + member as u64
}

fn arrive(
    group: &Group,
    member: usize,
    sequence: u64,
    parts: usize,
) -> Result<Arc<Round<GatherTask>>, Fault> {
    group.arrive(member, sequence, Input { number: number(member, sequence), parts })
}

fn wait(group: &Group, round: &Round<GatherTask>) -> Result<Arc<Vec<u64>>, Fault> {
    round.wait(group, Instant::now()).expect("no deadline passes")
}

fn expected(members: usize, sequence: u64) -> Vec<u64> {
    (0..members).map(|member| number(member, sequence)).collect()
}

/// Runs `work` for each member as its own task and returns the results of all.
fn run_members<T: Send + 'static>(
    members: usize,
    work: impl Fn(usize) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let work = Arc::new(work);
    let tasks: Vec<_> = (0..members)
        .map(|member| {
            let work = work.clone();
            thread::spawn(move || work(member))
        })
        .collect();
    tasks.into_iter().map(|task| task.join().expect("no member panics")).collect()
}

fn config() -> Config {
    let mut config = Config::new();
    // The failing schedule would be pages long, and the panic message says enough.
    config.failure_persistence = FailurePersistence::None;
    config
}

/// Checks `body` under many schedules: random ones, and deliberately unfair ones.
fn check(times: usize, body: impl Fn() + Send + Sync + Clone + 'static) {
    // Fixed seeds, so that a failure is reproducible.
    Runner::new(RandomScheduler::new_from_seed(1, times), config()).run(body.clone());
    Runner::new(PctScheduler::new_from_seed(2, 3, times), config()).run(body);
}

/// Checks `body` under the first `limit` schedules of an exhaustive search: under all of them if there are no more.
fn check_all(limit: usize, body: impl Fn() + Send + Sync + 'static) {
    Runner::new(DfsScheduler::new(Some(limit), false), config()).run(body);
}

/// Returns a test body in which the members run one round after the other, each waiting before it arrives at the next.
fn rounds_in_sequence(members: usize, parts: &'static [usize]) -> impl Fn() + Send + Sync + Clone + 'static {
    move || {
        let group = group(members);
        let results = run_members(members, move |member| {
            let run_round = |(sequence, &parts): (usize, &usize)| {
                let round = arrive(&group, member, sequence as u64, parts)?;
                wait(&group, &round)
            };
            parts.iter().enumerate().map(run_round).collect::<Result<Vec<_>, Fault>>()
        });
        let results: Vec<_> = results.into_iter().map(|result| result.expect("nothing has failed")).collect();
        for sequence in 0..parts.len() {
            assert_eq!(*results[0][sequence], expected(members, sequence as u64));
            assert!(results.iter().all(|mine| Arc::ptr_eq(&mine[sequence], &results[0][sequence])));
        }
    }
}

#[test]
fn every_part_runs_once_and_all_members_get_the_same_output() {
    for members in 2..=4 {
        check(2400, rounds_in_sequence(members, &[0, 1, 3, 1, 0, 2]));
    }
    check(1800, rounds_in_sequence(3, &[7]));
    for parts in [&[0][..], &[1], &[2], &[1, 1], &[3]] {
        check_all(24000, rounds_in_sequence(2, parts));
    }
    check_all(24000, rounds_in_sequence(3, &[2]));
}

#[test]
fn several_rounds_can_be_in_flight_at_once() {
    // All members arrive at three rounds before they wait. Each waits in its own order, and some poll first.
    check(3600, || {
        let group = group(3);
        let results = run_members(3, move |member| {
            let rounds: Vec<_> = [2, 0, 1]
                .iter()
                .enumerate()
                .map(|(s, &parts)| arrive(&group, member, s as u64, parts))
                .collect();
            let mut results = vec![None; 3];
            for i in 0..3 {
                let at = (member * (i + 1) + i) % 3;
                let at =
                    (at..at + 3).map(|at| at % 3).find(|&at| results[at].is_none()).expect("one is left");
                let round = rounds[at].as_ref().expect("nothing has failed");
                if member != 1 {
                    round.poll(&group);
                }
                results[at] = Some(wait(&group, round).expect("nothing has failed"));
                assert!(round.poll(&group));
            }
            results
        });
        for (sequence, first) in results[0].iter().flatten().enumerate() {
            assert_eq!(**first, expected(3, sequence as u64));
            assert!(results.iter().all(|mine| Arc::ptr_eq(mine[sequence].as_ref().unwrap(), first)));
        }
    });
    // The members arrive in different orders. The sequence number identifies the round.
    let different_orders = || {
        let group = group(2);
        let results = run_members(2, move |member| {
            let order = if member == 0 { [0, 1] } else { [1, 0] };
            let rounds =
                order.map(|sequence| arrive(&group, member, sequence, 2).expect("nothing has failed"));
            let mut results = rounds.map(|round| wait(&group, &round).expect("nothing has failed"));
            if member == 1 {
                results.reverse();
            }
            results
        });
        for mine in results {
            assert_eq!([&*mine[0], &*mine[1]], [&expected(2, 0), &expected(2, 1)]);
        }
    };
    check(3600, different_orders);
    check_all(24000, different_orders);
    // A member that never waits does not block the others, even if it arrives last.
    check(3600, || {
        let group = group(3);
        let results = run_members(3, move |member| {
            let rounds =
                [3, 1].map(|parts| arrive(&group, member, parts as u64, parts).expect("nothing has failed"));
            (member > 0).then(|| rounds.map(|round| wait(&group, &round).expect("nothing has failed")))
        });
        for mine in results.into_iter().flatten() {
            assert_eq!([&*mine[0], &*mine[1]], [&expected(3, 3), &expected(3, 1)]);
        }
    });
}

/// Runs rounds until one fails. Checks that the member then gets the same fault again. Returns the number of rounds that
/// succeeded, and the fault.
fn run_until_failed(group: &Group, member: usize, rounds: u64, parts: usize) -> (u64, Fault) {
    for sequence in 0..rounds {
        let result = arrive(group, member, sequence, parts).and_then(|round| wait(group, &round));
        match result {
            Ok(list) => assert_eq!(*list, expected(list.len(), sequence)),
            Err(fault) => {
                let again = arrive(group, member, sequence + 1, parts).err();
                assert_eq!(again, Some(fault), "a failed group must stay failed");
                assert_eq!(group.fail("too late"), fault);
                return (sequence, fault);
            }
        }
    }
    (rounds, "")
}

#[test]
fn a_member_that_leaves_fails_the_rounds_that_wait_for_it() {
    for parts in [0, 1, 2] {
        for attended in 0..3 {
            // Member 0 runs some rounds, then leaves. Those rounds succeed on all members, and no later one does.
            let leaves = move || {
                let group = group(3);
                let results = run_members(3, move |member| {
                    if member > 0 {
                        return run_until_failed(&group, member, 4, parts);
                    }
                    for sequence in 0..attended {
                        let round = arrive(&group, 0, sequence, parts).expect("nothing has failed");
                        wait(&group, &round).expect("nothing has failed");
                    }
                    group.leave(0, "left");
                    (attended, "left")
                });
                assert!(results.iter().all(|&result| result == (attended, "left")), "{results:?}");
            };
            check(900, leaves);
            check_all(6000, leaves);
        }
    }
    // Member 0 arrives at two rounds and leaves without waiting. These rounds still succeed on the other members.
    check(3600, || {
        let group = group(3);
        let results = run_members(3, move |member| {
            if member > 0 {
                return run_until_failed(&group, member, 3, 2);
            }
            for sequence in 0..2 {
                let _ = arrive(&group, 0, sequence, 2).expect("nothing has failed");
            }
            group.leave(0, "left");
            (2, "left")
        });
        assert!(results.iter().all(|&(rounds, fault)| rounds == 2 && fault == "left"), "{results:?}");
    });
}

#[test]
fn members_that_leave_at_different_rounds_wake_every_waiting_member() {
    // Member 0 leaves after it arrived at one round, member 1 leaves without arriving, and member 2 waits at two rounds. It
    // must not wait for ever, in whatever order the others leave.
    let leave = || {
        let group = group(3);
        let results = run_members(3, move |member| {
            match member {
                0 => {
                    let _ = arrive(&group, 0, 0, 1);
                    group.leave(0, "zero left");
                }
                1 => group.leave(1, "one left"),
                _ => {
                    let rounds = [0, 1].map(|sequence| arrive(&group, 2, sequence, 1));
                    let faults = rounds.map(|round| round.and_then(|round| wait(&group, &round)).err());
                    assert_eq!(faults[0], faults[1]);
                    return faults[0];
                }
            }
            None
        });
        assert!(matches!(results[2], Some("zero left" | "one left")), "{results:?}");
    };
    check(9000, leave);
    check_all(30000, leave);
}

#[test]
fn all_members_get_the_first_fault() {
    let outcomes: &'static StdMutex<BTreeSet<(u64, Fault)>> = Box::leak(Box::default());
    check(3600, || {
        let group = group(2);
        let results = run_members(4, move |member| match member {
            0 | 1 => run_until_failed(&group, member, 3, 2),
            2 => (0, group.fail("two")),
            _ => (0, group.fail("three")),
        });
        let fault = results[2].1;
        assert_eq!(fault, results[3].1, "`fail` must return the first fault to both");
        for &(rounds, seen) in &results[..2] {
            assert!(rounds == 3 || seen == fault, "{results:?}");
        }
        assert!(results[0].0.abs_diff(results[1].0) <= 1, "members must not be more than one round apart");
        outcomes.lock().unwrap().insert((results[0].0, fault));
    });
    // The schedules covered a fault after every number of rounds, and each of the two faults as the first.
    let outcomes = outcomes.lock().unwrap();
    for rounds in 0..=3 {
        assert!(outcomes.iter().any(|o| o.0 == rounds), "never after {rounds} rounds: {outcomes:?}");
    }
    assert!(outcomes.iter().any(|o| o.1 == "two") && outcomes.iter().any(|o| o.1 == "three"));
}

#[test]
fn a_round_that_cannot_be_opened_fails_for_all_members() {
    let open_fails = || {
        let group = group(3);
        let results = run_members(3, move |member| {
            // The second round cannot be opened. Members arrive at the third one without waiting for it.
            let parts = if member == 1 { OPEN_FAILS } else { 2 };
            let first = wait(&group, &arrive(&group, member, 0, 2).expect("nothing has failed"));
            assert!(first.is_ok());
            let rounds =
                [(1, parts), (2, 1)].map(|(sequence, parts)| arrive(&group, member, sequence, parts));
            rounds.map(|round| round.and_then(|round| wait(&group, &round)).err())
        });
        // The third round either succeeds on all members, if all arrived before the second failed, or fails on all.
        let third: BTreeSet<_> = results.iter().map(|faults| faults[1]).collect();
        assert!(results.iter().all(|faults| faults[0] == Some("open failed")), "{results:?}");
        assert_eq!(third.len(), 1, "{results:?}");
    };
    check(4800, open_fails);
}

/// Checks the rendezvous with primitives that have a bug, and returns the checker's panic message.
fn message_for(bug: sync::Bug, members: usize, parts: &'static [usize]) -> String {
    sync::BUG.set(bug);
    let result = std::panic::catch_unwind(|| check(1000, rounds_in_sequence(members, parts)));
    sync::BUG.set(sync::Bug::None);
    match result {
        Ok(()) => "nothing".into(),
        Err(payload) => match payload.downcast::<String>() {
            Ok(message) => *message,
            Err(payload) => payload.downcast_ref::<&str>().copied().unwrap_or_default().to_string(),
        },
    }
}

#[test]
fn the_checker_finds_a_missing_notify() {
    let message = message_for(sync::Bug::NoNotify, 2, &[1]);
    assert!(message.contains("deadlock"), "found {message}");
}

#[test]
fn the_checker_finds_a_wait_that_misses_a_notify() {
    let message = message_for(sync::Bug::MissedNotify, 2, &[1]);
    assert!(message.contains("deadlock"), "found {message}");
}

/// Panics in the work. Uses the primitives of the library, because the checker cannot handle panics.
mod panics {
    use super::real::rendezvous::{Rendezvous, RoundTask};
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum PanicIn {
        Open,
        Run,
        Close,
        CloseWithoutParts,
    }

    struct PanickingTask;

    impl RoundTask for PanickingTask {
        type Input = PanicIn;
        type Work = PanicIn;
        type Output = ();
        type Fault = Fault;

        fn open(&self, inputs: Vec<PanicIn>) -> Result<PanicIn, Fault> {
            if inputs[0] == PanicIn::Open {
                panic!("on purpose");
            }
            Ok(inputs[0])
        }
        fn parts(work: &PanicIn) -> usize {
            if *work == PanicIn::CloseWithoutParts { 0 } else { 8 }
        }
        fn run(work: &PanicIn, part: usize) {
            if *work == PanicIn::Run && part == 5 {
                panic!("on purpose");
            }
        }
        fn close(&self, _: &PanicIn) -> Result<(), Fault> {
            panic!("on purpose")
        }
        fn panic_fault(&self) -> Fault {
            "panicked"
        }
    }

    #[test]
    fn a_panic_in_the_work_is_a_fault_on_the_other_members() {
        for place in [PanicIn::Open, PanicIn::Run, PanicIn::Close, PanicIn::CloseWithoutParts] {
            for _ in 0..20 {
                let group = Rendezvous::new(PanickingTask, 3);
                let deadline = Instant::now() + Duration::from_secs(10);
                let group = &group;
                let results: Vec<_> = std::thread::scope(|scope| {
                    let run_member = |member| {
                        scope.spawn(move || {
                            group.arrive(member, 0, place).map(|round| round.wait(group, deadline))
                        })
                    };
                    let threads = [0, 1, 2].map(run_member);
                    threads.into_iter().map(|thread| thread.join()).collect()
                });
                assert_eq!(
                    results.iter().filter(|result| result.is_err()).count(),
                    1,
                    "exactly one member panics: {place:?}"
                );
                for result in results.into_iter().flatten() {
                    let result = result.expect("it arrived").expect("the round ended before the deadline");
                    assert_eq!(result, Err("panicked"), "{place:?}");
                }
            }
        }
    }
}
