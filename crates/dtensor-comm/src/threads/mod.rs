//! A world whose ranks are threads of this process.
//!
//! Values are passed as handles: a rank reads another rank's value in place, and a result that is equal on all ranks is one
//! allocation that all of them share.

mod mail;
mod rendezvous;
mod sync;
mod work;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::mail::{Mailbox, MessageId, Route};
use self::rendezvous::{Rendezvous, Round, RoundTask};
use self::work::{Outputs, Work};
use crate::Arrays;
use crate::call::Call;
use crate::fault::{Cause, Departure};
use crate::ring::Ring;
use crate::transport::{Channel, InFlight, Joining, Key, Transport, deadline};
use crate::{Error, Result};
use dtensor_array::Array;

/// The state that all ranks of a world share.
#[derive(Debug)]
struct WorldState {
    rings: Vec<Ring>,
    groups: Mutex<Groups>,
}

#[derive(Debug, Default)]
struct Groups {
    /// Groups that not all members have joined yet, and how many have.
    joining: HashMap<Key, (Arc<GroupState>, usize)>,
    /// Every group that is still in use.
    live: Vec<Weak<GroupState>>,
    /// The ranks that have left the world.
    left: HashMap<usize, Arc<Cause>>,
}

/// The state that the members of a group share.
#[derive(Debug)]
struct GroupState {
    members: Arc<[usize]>,
    rendezvous: Rendezvous<CollectiveTask>,
    mailbox: Mailbox,
    #[cfg(feature = "cuda")]
    gpus: Arc<crate::nccl::Ranks>,
}

impl GroupState {
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn new(members: &Arc<[usize]>, world: &Arc<WorldState>) -> Arc<GroupState> {
        Arc::new_cyclic(|group: &Weak<GroupState>| {
            #[cfg(feature = "cuda")]
            let gpus = Arc::new(crate::nccl::Ranks::default());
            let task = CollectiveTask {
                members: members.clone(),
                #[cfg(feature = "cuda")]
                gpus: gpus.clone(),
                #[cfg(feature = "cuda")]
                failing: Failing { world: Arc::downgrade(world), group: group.clone() },
            };
            GroupState {
                members: members.clone(),
                rendezvous: Rendezvous::new(task, members.len()),
                mailbox: Mailbox::new(members.len()),
                #[cfg(feature = "cuda")]
                gpus,
            }
        })
    }

    /// Records that a rank has left the world, if it is a member.
    fn leave(&self, rank: usize, cause: &Arc<Cause>) {
        if let Some(member) = self.members.iter().position(|&r| r == rank) {
            self.rendezvous.leave(member, cause.clone());
            self.mailbox.leave(member, cause.clone());
        }
    }

    /// Fails the group. Only the first cause counts, and this returns it.
    fn fail(&self, cause: Arc<Cause>) -> Arc<Cause> {
        let cause = self.rendezvous.fail(cause);
        self.mailbox.fail(cause.clone());
        cause
    }
}

/// Runs one collective per round: compares the members' calls, then computes the outputs.
#[derive(Debug)]
struct CollectiveTask {
    members: Arc<[usize]>,
    #[cfg(feature = "cuda")]
    gpus: Arc<crate::nccl::Ranks>,
    #[cfg(feature = "cuda")]
    failing: Failing,
}

/// What a member brings to a collective.
#[derive(Debug)]
struct Arrival {
    call: Call,
    values: Arrays,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    timeout: Duration,
}

impl RoundTask for CollectiveTask {
    type Input = Arrival;
    type Work = Work;
    type Output = Arc<Outputs>;
    type Fault = Arc<Cause>;

    fn open(&self, inputs: Vec<Self::Input>) -> std::result::Result<Self::Work, Self::Fault> {
        #[cfg(feature = "cuda")]
        let timeout = inputs.iter().map(|arrival| arrival.timeout).max().unwrap_or_default();
        let (calls, values): (Vec<Call>, Vec<Arrays>) =
            inputs.into_iter().map(|arrival| (arrival.call, arrival.values)).unzip();
        if let Some(cause) = Call::compare(&calls.iter().collect::<Vec<_>>(), &self.members) {
            return Err(Arc::new(cause));
        }
        let failed = |error: Error| self.transport_cause(error.to_string());
        #[cfg(feature = "cuda")]
        {
            let watch = || self.failing.watch(calls.iter().cloned().enumerate().collect(), timeout);
            if let Some(outputs) = self.gpus.run(&calls, &values, watch).map_err(failed)? {
                return Ok(Work::Ready(outputs));
            }
        }
        work::plan(&calls, values).map_err(failed)
    }

    fn parts(work: &Self::Work) -> usize {
        work.parts()
    }

    fn run(work: &Self::Work, part: usize) {
        work.run(part);
    }

    fn close(&self, work: &Self::Work) -> std::result::Result<Self::Output, Self::Fault> {
        work.close().map(Arc::new).map_err(|error| self.transport_cause(error.to_string()))
    }

    fn panic_fault(&self) -> Self::Fault {
        self.transport_cause("a kernel panicked in a collective".into())
    }
}

impl CollectiveTask {
    fn transport_cause(&self, message: String) -> Arc<Cause> {
        Arc::new(Cause::Transport { rank: self.members[0], message })
    }
}

/// How a group fails when its GPUs do not finish a collective.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
struct Failing {
    world: Weak<WorldState>,
    group: Weak<GroupState>,
}

#[cfg(feature = "cuda")]
impl Failing {
    /// Watches a collective of these members, with their calls.
    fn watch(&self, calls: Vec<(usize, Call)>, timeout: Duration) -> dtensor_array::cuda::nccl::Watch {
        let failing = self.clone();
        let on_failure = move |why: &str| {
            let (Some(world), Some(group)) = (failing.world.upgrade(), failing.group.upgrade()) else {
                return Vec::new();
            };
            let (member, call) = &calls[0];
            let (rank, call) = (group.members[*member], Box::new(call.clone()));
            let cause = group.fail(Arc::new(Cause::Aborted { rank, call, why: why.to_owned() }));
            let fault = |(member, call): &(usize, Call)| {
                let rank = group.members[*member];
                world.rings[rank].fault(rank, call, cause.clone(), false)
            };
            calls.iter().map(fault).collect()
        };
        dtensor_array::cuda::nccl::Watch { timeout, on_failure: Box::new(on_failure) }
    }
}

/// One rank of a world of threads.
#[derive(Debug)]
pub(crate) struct Thread {
    rank: usize,
    world: Arc<WorldState>,
}

/// Creates the ranks of a new world.
pub(crate) fn ranks(n: usize) -> Vec<Thread> {
    let rings = (0..n).map(|_| Ring::default()).collect();
    let world = Arc::new(WorldState { rings, groups: Mutex::default() });
    (0..n).map(|rank| Thread { rank, world: world.clone() }).collect()
}

impl Transport for Thread {
    fn join(&self, joining: &Joining) -> Result<Arc<dyn Channel>> {
        let Joining { key, me, .. } = joining;
        let members = &key.members;
        let mut groups = self.world.groups.lock();
        let Groups { joining, live, left } = &mut *groups;
        let group = match joining.get_mut(key) {
            Some((group, count)) => {
                *count += 1;
                let (group, complete) = (group.clone(), *count == members.len());
                if complete {
                    joining.remove(key);
                }
                group
            }
            None => {
                let group = GroupState::new(members, &self.world);
                let gone: Vec<_> = left.iter().filter(|(rank, _)| members.contains(rank)).collect();
                gone.iter().for_each(|(rank, cause)| group.leave(**rank, cause));
                live.retain(|group| group.strong_count() > 0);
                live.push(Arc::downgrade(&group));
                // If a member has left, the group is never complete and would stay in `joining` for ever. It cannot run a
                // collective anyway.
                if gone.is_empty() && members.len() > 1 {
                    joining.insert(key.clone(), (group.clone(), 1));
                }
                group
            }
        };
        drop(groups);
        Ok(Arc::new(Member { rank: self.rank, me: *me, group, world: self.world.clone() }))
    }

    fn depart(&self, how: Departure) {
        let last = self.world.rings[self.rank].last();
        let cause = Arc::new(Cause::Left { rank: self.rank, how, last: last.map(Box::new) });
        let mut groups = self.world.groups.lock();
        groups.left.insert(self.rank, cause.clone());
        let live: Vec<Arc<GroupState>> = groups.live.iter().filter_map(Weak::upgrade).collect();
        drop(groups);
        for group in live {
            group.leave(self.rank, &cause);
        }
    }
}

/// One rank as a member of a group.
#[derive(Debug)]
struct Member {
    rank: usize,
    me: usize,
    group: Arc<GroupState>,
    world: Arc<WorldState>,
}

impl Member {
    /// Returns the error of a call and fails the group.
    fn fault(&self, call: &Call, cause: Arc<Cause>, earlier: bool) -> Error {
        let cause = self.group.fail(cause);
        self.world.rings[self.rank].fault(self.rank, call, cause, earlier)
    }

    /// Returns an error if this rank records a graph and there are other ranks: their streams wait for each other, and cannot be part
    /// of several graphs.
    fn expect_running(&self, values: &[Array]) -> Result<()> {
        let what = "a collective between ranks that are threads";
        match self.group.members.len() {
            1 => Ok(()),
            _ => values.iter().try_for_each(|x| x.expect_running(what)),
        }
    }

    /// Returns the cause of a timeout that these members caused.
    fn late_cause(&self, members: &[usize], waited: Duration) -> Arc<Cause> {
        let ranks = members.iter().map(|&m| self.group.members[m]);
        let ranks = ranks.map(|rank| (rank, self.world.rings[rank].last())).collect();
        Arc::new(Cause::Late { ranks, waited })
    }
}

impl Channel for Member {
    fn start(
        self: Arc<Self>,
        call: Call,
        mut values: Arrays,
        timeout: Duration,
    ) -> Result<Box<dyn InFlight>> {
        self.expect_running(&values)?;
        self.note(&call);
        if call.collective.reduces() {
            // Reduction kernels read contiguous memory.
            for x in &mut values {
                *x = x.contiguous()?;
            }
        }
        let earlier = self.group.rendezvous.has_failed();
        let arrival = Arrival { call: call.clone(), values, timeout };
        match self.group.rendezvous.arrive(self.me, call.sequence, arrival) {
            Ok(round) => Ok(Box::new(CollectiveInFlight { round, call, member: self, timeout, since: None })),
            Err(cause) => Err(self.fault(&call, cause, earlier)),
        }
    }

    fn send(&self, call: Call, value: Array, dst: usize, tag: u32) -> Result<()> {
        self.expect_running(std::slice::from_ref(&value))?;
        self.note(&call);
        let earlier = self.group.rendezvous.has_failed();
        let result = self.group.mailbox.send(Route { from: self.me, to: dst, tag }, value);
        result.map_err(|cause| self.fault(&call, cause, earlier))
    }

    fn receive(
        self: Arc<Self>,
        call: Call,
        src: usize,
        tag: u32,
        timeout: Duration,
    ) -> Result<Box<dyn InFlight>> {
        self.note(&call);
        let message = self.group.mailbox.begin_receive(Route { from: src, to: self.me, tag });
        Ok(Box::new(ReceiveInFlight { message, call, member: self, timeout, since: None }))
    }

    fn note(&self, call: &Call) {
        self.world.rings[self.rank].note(call);
    }
}

/// A collective that has begun.
#[derive(Debug)]
struct CollectiveInFlight {
    round: Arc<Round<CollectiveTask>>,
    call: Call,
    member: Arc<Member>,
    timeout: Duration,
    /// When it was first polled or waited for. The timeout begins then.
    since: Option<Instant>,
}

/// Returns the deadline of a timeout that begins at `since`. Sets `since` to now if it is not set.
fn deadline_since(since: &mut Option<Instant>, timeout: Duration) -> Instant {
    let since = *since.get_or_insert_with(Instant::now);
    since.checked_add(timeout).unwrap_or_else(|| deadline(timeout))
}

impl InFlight for CollectiveInFlight {
    fn poll(&mut self) -> bool {
        let rendezvous = &self.member.group.rendezvous;
        // After the timeout the result is an error, which `wait` returns: so it is ready.
        self.round.poll(rendezvous)
            || (Instant::now() > deadline_since(&mut self.since, self.timeout)
                && !rendezvous.missing(self.call.sequence).is_empty())
    }

    fn wait(mut self: Box<Self>) -> Result<Arrays> {
        let mut until = deadline_since(&mut self.since, self.timeout);
        let Member { me, group, .. } = &*self.member;
        loop {
            match self.round.wait(&group.rendezvous, until) {
                Ok(Ok(outputs)) => return Ok(outputs[if outputs.len() == 1 { 0 } else { *me }].clone()),
                Ok(Err(cause)) => return Err(self.member.fault(&self.call, cause, false)),
                Err(_) => {
                    let missing = group.rendezvous.missing(self.call.sequence);
                    if !missing.is_empty() {
                        let cause = self.member.late_cause(&missing, self.timeout);
                        return Err(self.member.fault(&self.call, cause, false));
                    }
                    // All members have arrived and the work is running. It ends by itself, so wait on.
                    until = deadline(self.timeout);
                }
            }
        }
    }
}

/// A receive that has begun.
#[derive(Debug)]
struct ReceiveInFlight {
    message: MessageId,
    call: Call,
    member: Arc<Member>,
    timeout: Duration,
    /// When it was first polled or waited for. The timeout begins then.
    since: Option<Instant>,
}

impl InFlight for ReceiveInFlight {
    fn poll(&mut self) -> bool {
        self.member.group.mailbox.is_ready(self.message)
            || Instant::now() > deadline_since(&mut self.since, self.timeout)
    }

    fn wait(mut self: Box<Self>) -> Result<Arrays> {
        let until = deadline_since(&mut self.since, self.timeout);
        let ReceiveInFlight { message, call, member, timeout, .. } = &*self;
        match member.group.mailbox.receive(*message, until) {
            #[cfg(feature = "cuda")]
            Ok(Some(value)) => {
                let (from, to) = (message.0.from, message.0.to);
                let failing =
                    Failing { world: Arc::downgrade(&member.world), group: Arc::downgrade(&member.group) };
                let watch = || failing.watch(vec![(to, call.clone()), (to, call.clone())], *timeout);
                Ok(Arrays::from_elem(member.group.gpus.deliver(value, from, to, watch)?, 1))
            }
            #[cfg(not(feature = "cuda"))]
            Ok(Some(value)) => Ok(Arrays::from_elem(value, 1)),
            Ok(None) => Err(member.fault(call, member.late_cause(&[message.0.from], *timeout), false)),
            Err(cause) => Err(member.fault(call, cause, false)),
        }
    }
}

impl Drop for ReceiveInFlight {
    fn drop(&mut self) {
        self.member.group.mailbox.abandon(self.message);
    }
}

#[cfg(test)]
mod tests {
    use dtensor_array::Array;

    use crate::{Group, ReduceOp, Result, launch};

    /// Returns the memory address of a value, as a number that can be compared between ranks.
    fn address(x: &Array) -> Result<i64> {
        Ok(x.copy_to_host_memory()?.as_ptr() as i64)
    }

    fn addresses(group: &Group, x: &Array) -> Result<Vec<i64>> {
        group.all_gather_object(&address(x)?)
    }

    #[test]
    fn results_equal_on_all_ranks_share_one_allocation() {
        for len in [1usize, 1 << 20] {
            launch(4, |world| {
                let group = world.group();
                let x = Array::from_vec(vec![world.rank() as f32; len], &[len])?;
                let results = [
                    group.all_reduce(&x, ReduceOp::Sum)?,
                    group.all_gather_tensor(&x, 0)?,
                    group.broadcast(&x, 2)?,
                ];
                for y in &results {
                    let at = addresses(group, y)?;
                    assert!(at.iter().all(|a| *a == at[0]), "{at:?}");
                }
                // On rank 2, the source, the broadcast returned the input itself. Each rank still has its own input.
                assert_eq!(addresses(group, &x)?[2], address(&results[2])?);
                let mut own = addresses(group, &x)?;
                own.sort_unstable();
                own.dedup();
                assert_eq!(own.len(), 4);
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn a_shared_result_is_unique_once_all_other_ranks_dropped_it() {
        launch(2, |world| {
            let group = world.group();
            let x = Array::from_vec(vec![1f32; 8], &[8])?;
            let mut sum = group.all_reduce(&x, ReduceOp::Sum)?;
            group.barrier()?;
            assert!(!sum.is_unique(), "both ranks hold it");
            group.barrier()?;
            if world.rank() == 0 {
                drop(sum);
                return group.barrier();
            }
            group.barrier()?;
            assert!(sum.is_unique(), "the other rank has dropped it");
            Ok(())
        })
        .unwrap();
    }
}
