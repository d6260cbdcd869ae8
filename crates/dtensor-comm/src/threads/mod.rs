//! A world whose ranks are threads of this process.
//!
//! Values are passed as handles: a rank reads another's value where it lies, and a result that is equal on all ranks is one
//! allocation that all of them hold.

mod mail;
mod rendezvous;
mod sync;
mod work;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::mail::{Address, Mail, Ticket};
use self::rendezvous::{Hub, Meeting, Round};
use self::work::{Shares, Work};
use crate::Arrays;
use crate::call::Call;
use crate::fault::{Cause, Departure};
use crate::ring::Ring;
use crate::transport::{Channel, InFlight, Joining, Key, Transport, deadline};
use crate::{Error, Result};
use dtensor_array::Array;

/// What all ranks of a world share.
#[derive(Debug)]
struct Shared {
    rings: Vec<Ring>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Groups that not all members have joined, and how many have.
    joining: HashMap<Key, (Arc<Table>, usize)>,
    /// Every group that somebody still holds.
    tables: Vec<Weak<Table>>,
    left: HashMap<usize, Arc<Cause>>,
}

/// Where a group's members meet.
#[derive(Debug)]
struct Table {
    members: Arc<[usize]>,
    hub: Hub<Together>,
    mail: Mail,
}

impl Table {
    fn leave(&self, rank: usize, cause: &Arc<Cause>) {
        if let Some(member) = self.members.iter().position(|&r| r == rank) {
            self.hub.leave(member, cause.clone());
            self.mail.leave(member, cause.clone());
        }
    }

    fn fail(&self, cause: Arc<Cause>) -> Arc<Cause> {
        let cause = self.hub.fail(cause);
        self.mail.fail(cause.clone());
        cause
    }
}

/// A collective as the meeting of a group.
#[derive(Debug)]
struct Together {
    members: Arc<[usize]>,
}

impl Meeting for Together {
    type Ticket = (Call, Arrays);
    type Work = Work;
    type Outcome = Arc<Shares>;
    type Fault = Arc<Cause>;

    fn open(&self, tickets: Vec<Self::Ticket>) -> std::result::Result<Self::Work, Self::Fault> {
        let (calls, values): (Vec<Call>, Vec<Arrays>) = tickets.into_iter().unzip();
        if let Some((a, b)) = Call::first_mismatch(&calls.iter().collect::<Vec<_>>()) {
            let named = |member: usize| (self.members[member], Box::new(calls[member].clone()));
            return Err(Arc::new(Cause::Mismatch { one: named(a), other: named(b) }));
        }
        work::plan(&calls, values).map_err(|error| self.broke(error.to_string()))
    }

    fn parts(work: &Self::Work) -> usize {
        work.parts()
    }

    fn run(work: &Self::Work, part: usize) {
        work.run(part);
    }

    fn close(&self, work: &Self::Work) -> std::result::Result<Self::Outcome, Self::Fault> {
        work.close().map(Arc::new).map_err(|error| self.broke(error.to_string()))
    }

    fn broken(&self) -> Self::Fault {
        self.broke("the arithmetic of a collective panicked".into())
    }
}

impl Together {
    fn broke(&self, message: String) -> Arc<Cause> {
        Arc::new(Cause::Transport { rank: self.members[0], message })
    }
}

/// One rank of a world of threads.
#[derive(Debug)]
pub(crate) struct Thread {
    rank: usize,
    shared: Arc<Shared>,
}

/// The ranks of a new world.
pub(crate) fn ranks(n: usize) -> Vec<Thread> {
    let rings = (0..n).map(|_| Ring::default()).collect();
    let shared = Arc::new(Shared { rings, state: Mutex::default() });
    (0..n).map(|rank| Thread { rank, shared: shared.clone() }).collect()
}

impl Transport for Thread {
    fn join(&self, joining: &Joining) -> Result<Arc<dyn Channel>> {
        let Joining { key, me, .. } = joining;
        let members = &key.members;
        let mut state = self.shared.state.lock();
        let State { joining, tables, left } = &mut *state;
        let table = match joining.get_mut(key) {
            Some((table, count)) => {
                *count += 1;
                let (table, complete) = (table.clone(), *count == members.len());
                if complete {
                    joining.remove(key);
                }
                table
            }
            None => {
                let hub = Hub::new(Together { members: members.clone() }, members.len());
                let mail = Mail::new(members.len());
                let table = Arc::new(Table { members: members.clone(), hub, mail });
                let gone: Vec<_> = left.iter().filter(|(rank, _)| members.contains(rank)).collect();
                gone.iter().for_each(|(rank, cause)| table.leave(**rank, cause));
                tables.retain(|table| table.strong_count() > 0);
                tables.push(Arc::downgrade(&table));
                // One that has left will never join, so nobody needs to find this one.
                if gone.is_empty() && members.len() > 1 {
                    joining.insert(key.clone(), (table.clone(), 1));
                }
                table
            }
        };
        drop(state);
        Ok(Arc::new(Seat { rank: self.rank, me: *me, table, shared: self.shared.clone() }))
    }

    fn depart(&self, how: Departure) {
        let last = self.shared.rings[self.rank].last();
        let cause = Arc::new(Cause::Left { rank: self.rank, how, last: last.map(Box::new) });
        let mut state = self.shared.state.lock();
        state.left.insert(self.rank, cause.clone());
        let tables: Vec<Arc<Table>> = state.tables.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        for table in tables {
            table.leave(self.rank, &cause);
        }
    }
}

/// One rank's seat at a group's table.
#[derive(Debug)]
struct Seat {
    rank: usize,
    me: usize,
    table: Arc<Table>,
    shared: Arc<Shared>,
}

impl Seat {
    /// The error of a call. Whatever went wrong, the group stays failed.
    fn fault(&self, call: &Call, cause: Arc<Cause>, earlier: bool) -> Error {
        let cause = self.table.fail(cause);
        self.shared.rings[self.rank].fault(self.rank, call, cause, earlier)
    }

    /// Why members who are not there have failed the group.
    fn late(&self, members: &[usize], waited: Duration) -> Arc<Cause> {
        let ranks = members.iter().map(|&m| self.table.members[m]);
        let ranks = ranks.map(|rank| (rank, self.shared.rings[rank].last())).collect();
        Arc::new(Cause::Late { ranks, waited })
    }
}

impl Channel for Seat {
    fn start(self: Arc<Self>, call: Call, mut values: Arrays, timeout: Duration) -> Result<Box<dyn InFlight>> {
        self.note(&call);
        if call.collective.reduces()
            && let Some(x) = values.first_mut()
        {
            // Sums run over rows of memory.
            *x = x.contiguous()?;
        }
        let earlier = self.table.hub.has_failed();
        match self.table.hub.arrive(self.me, call.sequence, (call.clone(), values)) {
            Ok(round) => Ok(Box::new(Meet { round, call, seat: self, timeout, since: None })),
            Err(cause) => Err(self.fault(&call, cause, earlier)),
        }
    }

    fn send(&self, call: Call, value: Array, dst: usize, tag: u32) -> Result<()> {
        self.note(&call);
        let earlier = self.table.hub.has_failed();
        let sent = self.table.mail.put(Address { from: self.me, to: dst, tag }, value);
        sent.map_err(|cause| self.fault(&call, cause, earlier))
    }

    fn receive(
        self: Arc<Self>,
        call: Call,
        src: usize,
        tag: u32,
        timeout: Duration,
    ) -> Result<Box<dyn InFlight>> {
        self.note(&call);
        let ticket = self.table.mail.ask(Address { from: src, to: self.me, tag });
        Ok(Box::new(Letter { ticket, call, seat: self, timeout, since: None }))
    }

    fn note(&self, call: &Call) {
        self.shared.rings[self.rank].note(call);
    }
}

/// A collective on its way.
#[derive(Debug)]
struct Meet {
    round: Arc<Round<Together>>,
    call: Call,
    seat: Arc<Seat>,
    timeout: Duration,
    /// When it was first asked for.
    since: Option<Instant>,
}

/// When the time is up of something that was first asked for at `since`, or is now.
fn time_is_up(since: &mut Option<Instant>, timeout: Duration) -> Instant {
    let since = *since.get_or_insert_with(Instant::now);
    since.checked_add(timeout).unwrap_or_else(|| deadline(timeout))
}

impl InFlight for Meet {
    fn poll(&mut self) -> bool {
        let hub = &self.seat.table.hub;
        // Whoever only polls must hear of it too when the time is up; it is told when it waits.
        self.round.poll(hub)
            || (Instant::now() > time_is_up(&mut self.since, self.timeout)
                && !hub.missing(self.call.sequence).is_empty())
    }

    fn wait(mut self: Box<Self>) -> Result<Arrays> {
        let mut until = time_is_up(&mut self.since, self.timeout);
        let Seat { me, table, .. } = &*self.seat;
        loop {
            match self.round.wait(&table.hub, until) {
                Ok(Ok(shares)) => return Ok(shares[if shares.len() == 1 { 0 } else { *me }].clone()),
                Ok(Err(cause)) => return Err(self.seat.fault(&self.call, cause, false)),
                Err(_) => {
                    let missing = table.hub.missing(self.call.sequence);
                    if !missing.is_empty() {
                        let cause = self.seat.late(&missing, self.timeout);
                        return Err(self.seat.fault(&self.call, cause, false));
                    }
                    // All have come, and somebody is still at work: that ends by itself.
                    until = deadline(self.timeout);
                }
            }
        }
    }
}

/// A message on its way.
#[derive(Debug)]
struct Letter {
    ticket: Ticket,
    call: Call,
    seat: Arc<Seat>,
    timeout: Duration,
    /// When it was first asked for.
    since: Option<Instant>,
}

impl InFlight for Letter {
    fn poll(&mut self) -> bool {
        self.seat.table.mail.ready(self.ticket) || Instant::now() > time_is_up(&mut self.since, self.timeout)
    }

    fn wait(mut self: Box<Self>) -> Result<Arrays> {
        let until = time_is_up(&mut self.since, self.timeout);
        let Letter { ticket, call, seat, timeout, .. } = &*self;
        match seat.table.mail.take(*ticket, until) {
            Ok(Some(value)) => Ok(Arrays::from_elem(value, 1)),
            Ok(None) => Err(seat.fault(call, seat.late(&[ticket.0.from], *timeout), false)),
            Err(cause) => Err(seat.fault(call, cause, false)),
        }
    }
}

impl Drop for Letter {
    fn drop(&mut self) {
        self.seat.table.mail.abandon(self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use dtensor_array::Array;

    use crate::{Group, ReduceOp, Result, launch};

    /// Where a value lies, as a number that can be compared between ranks.
    fn address(x: &Array) -> Result<i64> {
        Ok(x.copy_to_host_memory()?.as_ptr() as i64)
    }

    fn addresses(group: &Group, x: &Array) -> Result<Vec<i64>> {
        group.all_gather_object(&address(x)?)
    }

    #[test]
    fn what_is_equal_on_all_ranks_is_one_allocation() {
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
                // The rank whose value was broadcast holds its own, and each rank's own value is still its own.
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
    fn a_shared_value_is_not_its_owners_to_change_until_the_others_let_it_go() {
        launch(2, |world| {
            let group = world.group();
            let x = Array::from_vec(vec![1f32; 8], &[8])?;
            let mut sum = group.all_reduce(&x, ReduceOp::Sum)?;
            group.barrier()?;
            assert!(!sum.is_unique(), "two ranks hold it");
            group.barrier()?;
            if world.rank() == 0 {
                drop(sum);
                return group.barrier();
            }
            group.barrier()?;
            assert!(sum.is_unique(), "the other one has let it go");
            Ok(())
        })
        .unwrap();
    }
}
