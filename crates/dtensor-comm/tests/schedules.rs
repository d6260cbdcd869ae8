//! The meeting of ranks under a checker of schedules: the source of the library, compiled with primitives that let the
//! checker say at every step who goes on.
// It is compiled twice, with the primitives of the library too.
#![allow(clippy::duplicate_mod)]

#[allow(dead_code)]
#[path = "schedules/real.rs"]
mod real;
#[path = "../src/threads/rendezvous.rs"]
#[allow(dead_code)]
mod rendezvous;

use std::collections::BTreeSet;
use std::sync::Mutex as Notes;
use std::time::{Duration, Instant};

use rendezvous::{Hub, Meeting, Round};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::{Config, FailurePersistence, Runner, thread};
use sync::Arc;

/// What `src/threads/sync.rs` has, for the checker.
mod sync {
    use std::cell::Cell;
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::Instant;

    pub(crate) use shuttle::sync::Arc;
    pub(crate) use shuttle::sync::atomic::{AtomicUsize, Ordering};

    /// A mistake that the primitives make, to see whether it is found.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Mistake {
        None,
        /// Nobody is woken.
        Deaf,
        /// Whoever goes to sleep can be missed between letting go of the lock and sleeping.
        Drowsy,
    }

    std::thread_local! {
        /// All tasks of a checker run on the thread that called it.
        pub(crate) static MISTAKE: Cell<Mistake> = const { Cell::new(Mistake::None) };
    }

    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        lock: &'a Mutex<T>,
        /// Away only while it waits.
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
            self.guard.as_ref().expect("it does not wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.guard.as_mut().expect("it does not wait")
        }
    }

    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Condvar(shuttle::sync::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            if MISTAKE.get() != Mistake::Deaf {
                self.0.notify_all();
            }
        }
    }

    /// There is no time here, so no deadline passes: whoever is never woken is found asleep at the end.
    pub(crate) fn wait_until<T>(bell: &Condvar, guard: &mut MutexGuard<'_, T>, _: Instant) -> bool {
        let mut held = guard.guard.take().expect("it does not wait");
        if MISTAKE.get() == Mistake::Drowsy {
            drop(held);
            held = guard.lock.0.lock().unwrap_or_else(PoisonError::into_inner);
        }
        guard.guard = Some(bell.0.wait(held).unwrap_or_else(PoisonError::into_inner));
        false
    }

    /// Looks once more, so that both ways are taken.
    #[derive(Debug)]
    pub(crate) struct Patience(bool);

    impl Patience {
        pub(crate) fn new(_: usize) -> Self {
            Patience(true)
        }

        pub(crate) fn pause(&mut self) -> bool {
            std::mem::replace(&mut self.0, false)
        }
    }
}

/// Members bring a number each, and get the list of them.
struct Lists {
    members: usize,
}

/// The number of a member, and in how many parts it wants it done.
#[derive(Debug, Clone, Copy)]
struct Ticket {
    number: u64,
    parts: usize,
}

/// As the parts of a ticket: there is nothing that could be done.
const REFUSED: usize = usize::MAX;

struct Work {
    numbers: Vec<u64>,
    done: Vec<AtomicUsize>,
    closed: AtomicUsize,
}

type Fault = &'static str;

impl Meeting for Lists {
    type Ticket = Ticket;
    type Work = Work;
    type Outcome = Arc<Vec<u64>>;
    type Fault = Fault;

    fn open(&self, tickets: Vec<Ticket>) -> Result<Work, Fault> {
        assert_eq!(tickets.len(), self.members, "opened before all have come");
        if tickets.iter().any(|ticket| ticket.parts == REFUSED) {
            return Err("refused");
        }
        let done = (0..tickets[0].parts).map(|_| AtomicUsize::new(0)).collect();
        Ok(Work { numbers: tickets.iter().map(|t| t.number).collect(), done, closed: AtomicUsize::new(0) })
    }

    fn parts(work: &Work) -> usize {
        work.done.len()
    }

    fn run(work: &Work, part: usize) {
        assert_eq!(work.done[part].fetch_add(1, Ordering::SeqCst), 0, "part {part} was done twice");
    }

    fn close(&self, work: &Work) -> Result<Arc<Vec<u64>>, Fault> {
        let done = work.done.iter().all(|part| part.load(Ordering::SeqCst) == 1);
        assert!(done, "closed before every part was done");
        assert_eq!(work.closed.fetch_add(1, Ordering::SeqCst), 0, "closed twice");
        Ok(Arc::new(work.numbers.clone()))
    }

    fn broken(&self) -> Fault {
        "broken"
    }
}

type Table = Arc<Hub<Lists>>;

fn table(members: usize) -> Table {
    Arc::new(Hub::new(Lists { members }, members))
}

/// What a member brings to a meeting.
fn number(member: usize, sequence: u64) -> u64 {
    100 * sequence + member as u64
}

fn arrive(hub: &Table, member: usize, sequence: u64, parts: usize) -> Result<Arc<Round<Lists>>, Fault> {
    hub.arrive(member, sequence, Ticket { number: number(member, sequence), parts })
}

fn wait(hub: &Table, round: &Round<Lists>) -> Result<Arc<Vec<u64>>, Fault> {
    round.wait(hub, Instant::now()).expect("no deadline passes")
}

fn expected(members: usize, sequence: u64) -> Vec<u64> {
    (0..members).map(|member| number(member, sequence)).collect()
}

/// Runs every member's work as a task of its own, to the end, and gives what each returned.
fn together<T: Send + 'static>(members: usize, work: impl Fn(usize) -> T + Send + Sync + 'static) -> Vec<T> {
    let work = Arc::new(work);
    let tasks: Vec<_> = (0..members)
        .map(|member| {
            let work = work.clone();
            thread::spawn(move || work(member))
        })
        .collect();
    tasks.into_iter().map(|task| task.join().expect("it has not panicked")).collect()
}

fn config() -> Config {
    let mut config = Config::new();
    // The message says what went wrong; the schedule would be pages.
    config.failure_persistence = FailurePersistence::None;
    config
}

/// Checks `body` under many schedules: random ones, and ones that are unfair on purpose.
fn check(times: usize, body: impl Fn() + Send + Sync + Clone + 'static) {
    // Always the same ones: what fails today fails tomorrow.
    Runner::new(RandomScheduler::new_from_seed(1, times), config()).run(body.clone());
    Runner::new(PctScheduler::new_from_seed(2, 3, times), config()).run(body);
}

/// Checks `body` under all schedules if there are no more than so many, else under the first of them.
fn check_all(most: usize, body: impl Fn() + Send + Sync + 'static) {
    Runner::new(DfsScheduler::new(Some(most), false), config()).run(body);
}

/// Members meet in turn, and each waits before it comes again.
fn in_turn(members: usize, parts: &'static [usize]) -> impl Fn() + Send + Sync + Clone + 'static {
    move || {
        let hub = table(members);
        let results = together(members, move |member| {
            let meet = |(sequence, &parts): (usize, &usize)| {
                let round = arrive(&hub, member, sequence as u64, parts)?;
                wait(&hub, &round)
            };
            parts.iter().enumerate().map(meet).collect::<Result<Vec<_>, Fault>>()
        });
        let results: Vec<_> = results.into_iter().map(|result| result.expect("nothing has failed")).collect();
        for sequence in 0..parts.len() {
            assert_eq!(*results[0][sequence], expected(members, sequence as u64));
            assert!(results.iter().all(|mine| Arc::ptr_eq(&mine[sequence], &results[0][sequence])));
        }
    }
}

#[test]
fn every_part_is_done_once_and_everybody_gets_the_same() {
    for members in 2..=4 {
        check(2400, in_turn(members, &[0, 1, 3, 1, 0, 2]));
    }
    check(1800, in_turn(3, &[7]));
    for parts in [&[0][..], &[1], &[2], &[1, 1], &[3]] {
        check_all(24000, in_turn(2, parts));
    }
    check_all(24000, in_turn(3, &[2]));
}

#[test]
fn meetings_may_be_under_way_at_the_same_time() {
    // All come to three meetings before they wait, each in an order of its own, some of them only looking at first.
    check(3600, || {
        let hub = table(3);
        let results = together(3, move |member| {
            let rounds: Vec<_> = [2, 0, 1]
                .iter()
                .enumerate()
                .map(|(s, &parts)| arrive(&hub, member, s as u64, parts))
                .collect();
            let mut results = vec![None; 3];
            for i in 0..3 {
                let at = (member * (i + 1) + i) % 3;
                let at =
                    (at..at + 3).map(|at| at % 3).find(|&at| results[at].is_none()).expect("one is left");
                let round = rounds[at].as_ref().expect("nothing has failed");
                if member != 1 {
                    round.poll(&hub);
                }
                results[at] = Some(wait(&hub, round).expect("nothing has failed"));
                assert!(round.poll(&hub));
            }
            results
        });
        for (sequence, first) in results[0].iter().flatten().enumerate() {
            assert_eq!(**first, expected(3, sequence as u64));
            assert!(results.iter().all(|mine| Arc::ptr_eq(mine[sequence].as_ref().unwrap(), first)));
        }
    });
    // In another order on each: the number says which is which.
    let crossed = || {
        let hub = table(2);
        let results = together(2, move |member| {
            let order = if member == 0 { [0, 1] } else { [1, 0] };
            let rounds = order.map(|sequence| arrive(&hub, member, sequence, 2).expect("nothing has failed"));
            let mut results = rounds.map(|round| wait(&hub, &round).expect("nothing has failed"));
            if member == 1 {
                results.reverse();
            }
            results
        });
        for mine in results {
            assert_eq!([&*mine[0], &*mine[1]], [&expected(2, 0), &expected(2, 1)]);
        }
    };
    check(3600, crossed);
    check_all(24000, crossed);
    // Somebody who does not wait holds nobody up, wherever it comes from the last of them.
    check(3600, || {
        let hub = table(3);
        let results = together(3, move |member| {
            let rounds =
                [3, 1].map(|parts| arrive(&hub, member, parts as u64, parts).expect("nothing has failed"));
            (member > 0).then(|| rounds.map(|round| wait(&hub, &round).expect("nothing has failed")))
        });
        for mine in results.into_iter().flatten() {
            assert_eq!([&*mine[0], &*mine[1]], [&expected(3, 3), &expected(3, 1)]);
        }
    });
}

/// Members meet until something fails, and then come once more, to be told the same. Gives the number of
/// meetings that went well, and the fault.
fn until_failed(hub: &Table, member: usize, meetings: u64, parts: usize) -> (u64, Fault) {
    for sequence in 0..meetings {
        let result = arrive(hub, member, sequence, parts).and_then(|round| wait(hub, &round));
        match result {
            Ok(list) => assert_eq!(*list, expected(list.len(), sequence)),
            Err(fault) => {
                assert_eq!(arrive(hub, member, sequence + 1, parts).err(), Some(fault), "failed, then not");
                assert_eq!(hub.fail("too late"), fault);
                return (sequence, fault);
            }
        }
    }
    (meetings, "")
}

#[test]
fn when_a_member_leaves_everybody_who_waits_for_it_is_told() {
    for parts in [0, 1, 2] {
        for comes in 0..3 {
            // It comes to some meetings, and to no more. Everybody goes through those, and nobody through another.
            let leaves = move || {
                let hub = table(3);
                let results = together(3, move |member| {
                    if member > 0 {
                        return until_failed(&hub, member, 4, parts);
                    }
                    for sequence in 0..comes {
                        let round = arrive(&hub, 0, sequence, parts).expect("nothing has failed");
                        wait(&hub, &round).expect("nothing has failed");
                    }
                    hub.leave(0, "left");
                    (comes, "left")
                });
                assert!(results.iter().all(|&result| result == (comes, "left")), "{results:?}");
            };
            check(900, leaves);
            check_all(6000, leaves);
        }
    }
    // It does not wait for the meetings it came to: they go well for the others if they come in time.
    check(3600, || {
        let hub = table(3);
        let results = together(3, move |member| {
            if member > 0 {
                return until_failed(&hub, member, 3, 2);
            }
            for sequence in 0..2 {
                let _ = arrive(&hub, 0, sequence, 2).expect("nothing has failed");
            }
            hub.leave(0, "left");
            (2, "left")
        });
        assert!(results.iter().all(|&(meetings, fault)| meetings == 2 && fault == "left"), "{results:?}");
    });
}

#[test]
fn when_members_leave_who_are_awaited_at_different_meetings_nobody_sleeps_on() {
    // The first to leave has come to one meeting, the second to none, and the third waits at both, for the first of them
    // first: it must not wait for ever, whoever leaves first and wherever the others are.
    let leave = || {
        let hub = table(3);
        let results = together(3, move |member| {
            match member {
                0 => {
                    let _ = arrive(&hub, 0, 0, 1);
                    hub.leave(0, "zero left");
                }
                1 => hub.leave(1, "one left"),
                _ => {
                    let rounds = [0, 1].map(|sequence| arrive(&hub, 2, sequence, 1));
                    let faults = rounds.map(|round| round.and_then(|round| wait(&hub, &round)).err());
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
fn the_first_fault_is_the_one_that_all_are_told() {
    let outcomes: &'static Notes<BTreeSet<(u64, Fault)>> = Box::leak(Box::default());
    check(3600, || {
        let hub = table(2);
        let results = together(4, move |member| match member {
            0 | 1 => until_failed(&hub, member, 3, 2),
            2 => (0, hub.fail("two")),
            _ => (0, hub.fail("three")),
        });
        let fault = results[2].1;
        assert_eq!(fault, results[3].1, "both think they were the first");
        for &(meetings, told) in &results[..2] {
            assert!(meetings == 3 || told == fault, "{results:?}");
        }
        assert!(results[0].0.abs_diff(results[1].0) <= 1, "a meeting is over for both or for none");
        outcomes.lock().unwrap().insert((results[0].0, fault));
    });
    // The schedules were different enough that it came at every point, and either was the first.
    let outcomes = outcomes.lock().unwrap();
    for meetings in 0..=3 {
        assert!(outcomes.iter().any(|o| o.0 == meetings), "never after {meetings} meetings: {outcomes:?}");
    }
    assert!(outcomes.iter().any(|o| o.1 == "two") && outcomes.iter().any(|o| o.1 == "three"));
}

#[test]
fn a_meeting_that_cannot_be_opened_fails_for_all_of_them() {
    let refuse = || {
        let hub = table(3);
        let results = together(3, move |member| {
            // The second meeting is the one, and all have come to the third before it is known.
            let parts = if member == 1 { REFUSED } else { 2 };
            let first = wait(&hub, &arrive(&hub, member, 0, 2).expect("nothing has failed"));
            assert!(first.is_ok());
            let rounds = [(1, parts), (2, 1)].map(|(sequence, parts)| arrive(&hub, member, sequence, parts));
            rounds.map(|round| round.and_then(|round| wait(&hub, &round)).err())
        });
        // Who came to the third before the second failed may have met there all the same: then all did.
        let third: BTreeSet<_> = results.iter().map(|faults| faults[1]).collect();
        assert!(results.iter().all(|faults| faults[0] == Some("refused")), "{results:?}");
        assert_eq!(third.len(), 1, "{results:?}");
    };
    check(4800, refuse);
}

/// Runs the meetings on primitives that make a mistake. That it is found is a panic, whose words are returned.
fn found(mistake: sync::Mistake, members: usize, parts: &'static [usize]) -> String {
    sync::MISTAKE.set(mistake);
    let result = std::panic::catch_unwind(|| check(1000, in_turn(members, parts)));
    sync::MISTAKE.set(sync::Mistake::None);
    match result {
        Ok(()) => "nothing".into(),
        Err(payload) => match payload.downcast::<String>() {
            Ok(message) => *message,
            Err(payload) => payload.downcast_ref::<&str>().copied().unwrap_or_default().to_string(),
        },
    }
}

#[test]
fn a_bell_that_does_not_ring_is_noticed() {
    let message = found(sync::Mistake::Deaf, 2, &[1]);
    assert!(message.contains("deadlock"), "found {message}");
}

#[test]
fn a_sleeper_that_can_be_missed_is_noticed() {
    let message = found(sync::Mistake::Drowsy, 2, &[1]);
    assert!(message.contains("deadlock"), "found {message}");
}

/// On the primitives of the library, as panics cannot be had under the checker.
mod panics {
    use super::real::rendezvous::{Hub, Meeting};
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Where {
        Open,
        Part,
        Close,
        CloseWithoutParts,
    }

    struct Panics;

    impl Meeting for Panics {
        type Ticket = Where;
        type Work = Where;
        type Outcome = ();
        type Fault = Fault;

        fn open(&self, tickets: Vec<Where>) -> Result<Where, Fault> {
            if tickets[0] == Where::Open {
                panic!("on purpose");
            }
            Ok(tickets[0])
        }
        fn parts(work: &Where) -> usize {
            if *work == Where::CloseWithoutParts { 0 } else { 8 }
        }
        fn run(work: &Where, part: usize) {
            if *work == Where::Part && part == 5 {
                panic!("on purpose");
            }
        }
        fn close(&self, _: &Where) -> Result<(), Fault> {
            panic!("on purpose")
        }
        fn broken(&self) -> Fault {
            "broken"
        }
    }

    #[test]
    fn a_panic_in_the_work_is_a_fault_for_everybody_else() {
        for place in [Where::Open, Where::Part, Where::Close, Where::CloseWithoutParts] {
            for _ in 0..20 {
                let hub = Hub::new(Panics, 3);
                let deadline = Instant::now() + Duration::from_secs(10);
                let hub = &hub;
                let results: Vec<_> = std::thread::scope(|scope| {
                    let meet = |member| {
                        scope.spawn(move || {
                            hub.arrive(member, 0, place).map(|round| round.wait(hub, deadline))
                        })
                    };
                    let threads = [0, 1, 2].map(meet);
                    threads.into_iter().map(|thread| thread.join()).collect()
                });
                assert_eq!(
                    results.iter().filter(|result| result.is_err()).count(),
                    1,
                    "one panics: {place:?}"
                );
                for result in results.into_iter().flatten() {
                    let result = result.expect("it could come").expect("it was told in time");
                    assert_eq!(result, Err("broken"), "{place:?}");
                }
            }
        }
    }
}
