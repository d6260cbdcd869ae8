//! One rank's connection to a group: how its collectives begin, and how they are waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::control::Control;
use super::exchange::data;
use super::letter::{read, write};
use super::raw::{Comm, Request, Room, Span};
use super::step::{Next, Step, Stepped, Trouble};
use crate::Arrays;
use crate::call::{Call, Collective, empty_meta};
use crate::fault::Cause;
use crate::transport::{Channel, InFlight, Key};
use crate::{Error, Result};
use dtensor_array::Array;
use dtensor_array::Meta;

/// One rank's connection to a group.
#[derive(Debug)]
pub(super) struct Seat {
    rank: usize,
    pub(super) me: usize,
    key: Key,
    pub(super) comm: Comm,
    control: Arc<Control>,
}

/// What a member tells another before a collective.
#[derive(Serialize, Deserialize)]
struct Descriptor {
    call: Call,
    /// What the other one gets, where it cannot know.
    piece: Option<Meta>,
}

impl Seat {
    pub(super) fn new(rank: usize, me: usize, key: Key, comm: Comm, control: Arc<Control>) -> Self {
        Seat { rank, me, key, comm, control }
    }

    pub(super) fn size(&self) -> usize {
        self.key.members.len()
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.size()).filter(move |&member| member != me)
    }

    /// The error of a call. Whatever went wrong, the group stays failed.
    fn fault(&self, call: &Call, cause: Arc<Cause>, earlier: bool) -> Error {
        let cause = self.control.fail(&self.key, cause);
        self.control.ring.fault(self.rank, call, cause, earlier)
    }

    fn trouble(&self, call: &Call, trouble: Trouble) -> Error {
        match trouble {
            Trouble::Cause(cause) => self.fault(call, cause, false),
            Trouble::Error(error) => {
                let cause = Cause::Transport { rank: self.rank, message: error.to_string() };
                self.fault(call, Arc::new(cause), false)
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // After a failure others may still be using it.
        if self.control.failed(&self.key).is_none() {
            self.comm.free();
        }
    }
}

impl Channel for Seat {
    fn start(self: Arc<Self>, call: Call, values: Arrays, timeout: Duration) -> Result<Box<dyn InFlight>> {
        self.control.ring.note(&call);
        self.control.poll().map_err(|error| self.trouble(&call, error.into()))?;
        if let Some(cause) = self.control.failed(&self.key) {
            return Err(self.fault(&call, cause, true));
        }
        let next = begin(&self, &call, values);
        Ok(Passage::book(self, call, next, timeout))
    }

    fn send(&self, call: Call, value: Array, dst: usize, number: u32) -> Result<()> {
        self.control.ring.note(&call);
        self.control.poll().map_err(|error| self.trouble(&call, error.into()))?;
        if let Some(cause) = self.control.failed(&self.key) {
            return Err(self.fault(&call, cause, true));
        }
        if let Some(cause) = self.control.left(self.key.members[dst]) {
            return Err(self.fault(&call, cause, false));
        }
        let value = value.copy_to_host_memory()?;
        // Which message of this rank it is tells the value from others with the same tag.
        let value_tag = tag(call.sequence, Kind::Value);
        let header = write(&Descriptor { piece: Some(value.array().meta()), call }, letter_len(self.size()))?;
        let step = Step::post(
            (header, value),
            |(header, value), requests| {
                // SAFETY: the step keeps both until they are sent, and lets them leak otherwise.
                unsafe {
                    let header = Span::of_bytes(header);
                    requests.push(self.comm.send(&header, dst, tag(number.into(), Kind::Header))?);
                    for part in Span::of(value).messages() {
                        requests.push(self.comm.send(&part, dst, value_tag)?);
                    }
                }
                Ok(())
            },
            |_, _| Ok(Next::Done(Arrays::new())),
        )?;
        self.control.keep(step);
        Ok(())
    }

    fn receive(
        self: Arc<Self>,
        call: Call,
        src: usize,
        number: u32,
        timeout: Duration,
    ) -> Result<Box<dyn InFlight>> {
        self.control.ring.note(&call);
        if let Some(cause) = self.control.failed(&self.key) {
            return Err(self.fault(&call, cause, true));
        }
        let step = Step::post(
            vec![0; letter_len(self.size())],
            |header, requests| {
                let header = Span::of_bytes(header);
                // SAFETY: the step keeps the header until it has come, and lets it leak otherwise.
                requests.push(unsafe {
                    self.comm.receive_up_to(&header, Some(src), tag(number.into(), Kind::Header))?
                });
                Ok(())
            },
            move |seat, header| {
                let Descriptor { call, piece } = read(&header)?;
                let room = Room::new(&piece.unwrap_or_else(empty_meta))?;
                let post = |room: &mut Room, requests: &mut Vec<Request>| {
                    let tag = tag(call.sequence, Kind::Value);
                    for part in room.span.messages() {
                        // SAFETY: as above, for the room.
                        requests.push(unsafe { seat.comm.receive(&part, src, tag)? });
                    }
                    Ok(())
                };
                Ok(Next::Step(Step::post(room, post, |_, room| {
                    // SAFETY: the request is done, so the library has written all of it.
                    Ok(Next::Done(Arrays::from_elem(unsafe { room.arrived()? }, 1)))
                })?))
            },
        )?;
        Ok(Passage::book(self, call, Ok(Next::Step(step)), timeout))
    }

    fn note(&self, call: &Call) {
        self.control.ring.note(call);
    }
}

/// What a message between two members is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// The descriptor of a collective.
    Descriptor,
    /// What a collective moves, and what it moves then.
    Data,
    MoreData,
    /// The description of a value that is sent, and the value.
    Header,
    Value,
}

/// The tag of a message of a collective or of those sent with one tag. Numbers wrap around long before two could meet.
pub(super) fn tag(number: u64, kind: Kind) -> i32 {
    const NUMBERS: u64 = 1 << 24;
    (number % NUMBERS) as i32 * 8 + kind as i32
}

/// A collective on its way. Others may need this rank's part of it while this rank waits for something else, or for
/// nothing: so it belongs to the rank, which moves all of them on whenever it waits for one.
#[derive(Debug)]
pub(super) struct Voyage {
    next: Option<Stepped>,
    seat: Arc<Seat>,
    /// When something last happened, from when on somebody has been waiting.
    moved: Option<Instant>,
}

impl Voyage {
    pub(super) fn key(&self) -> &Key {
        &self.seat.key
    }

    /// Goes as far as it can without waiting. True if it is over.
    pub(super) fn advance(&mut self) -> bool {
        loop {
            let Some(Ok(Next::Step(step))) = &mut self.next else { return true };
            match step.test() {
                Ok((false, moved)) => {
                    if moved {
                        self.moved = self.moved.map(|_| Instant::now());
                    }
                    return false;
                }
                Ok((true, _)) => {
                    self.moved = self.moved.map(|_| Instant::now());
                    let Some(Ok(Next::Step(step))) = self.next.take() else { return true };
                    self.next = Some(step.finish(&self.seat));
                }
                Err(error) => self.next = Some(Err(error.into())),
            }
        }
    }
}

/// What this rank holds of a collective on its way.
#[derive(Debug)]
struct Passage {
    voyage: Arc<Mutex<Voyage>>,
    seat: Arc<Seat>,
    call: Call,
    timeout: Duration,
}

impl Passage {
    fn book(seat: Arc<Seat>, call: Call, next: Stepped, timeout: Duration) -> Box<dyn InFlight> {
        let mut voyage = Voyage { next: Some(next), seat: seat.clone(), moved: None };
        let over = voyage.advance();
        let voyage = Arc::new(Mutex::new(voyage));
        if !over {
            seat.control.take_along(voyage.clone());
        }
        Box::new(Passage { voyage, seat, call, timeout })
    }

    /// Why it will never be over. The time that others have begins when this is first asked, and anew whenever something of
    /// it comes.
    fn hopeless(&self) -> Option<Arc<Cause>> {
        let Seat { key, control, .. } = &*self.seat;
        let polled = control.poll();
        let (waiting, moved) = {
            let mut voyage = self.voyage.lock();
            let moved = *voyage.moved.get_or_insert_with(Instant::now);
            match &voyage.next {
                Some(Ok(Next::Step(step))) => (step.peers(), moved),
                _ => return None,
            }
        };
        if let Err(error) = polled {
            let cause = Cause::Transport { rank: self.seat.rank, message: error.to_string() };
            return Some(Arc::new(cause));
        }
        if let Some(cause) = control.failed(key) {
            return Some(cause);
        }
        let ranks = waiting.iter().map(|&member| key.members[member]);
        if let Some(cause) = ranks.clone().find_map(|rank| control.left(rank)) {
            return Some(cause);
        }
        (moved.elapsed() >= self.timeout).then(|| {
            let ranks = ranks.map(|rank| (rank, None)).collect();
            Arc::new(Cause::Late { ranks, waited: self.timeout })
        })
    }
}

impl InFlight for Passage {
    fn poll(&mut self) -> bool {
        // Whoever only polls must hear of failures too; they are told when it is waited for.
        self.voyage.lock().advance() || self.hopeless().is_some()
    }

    fn wait(self: Box<Self>) -> Result<Arrays> {
        let mut idle = 0u32;
        while !self.voyage.lock().advance() {
            idle += 1;
            if (self.seat.control.others_wait() || idle.is_multiple_of(16))
                && let Some(cause) = self.hopeless()
            {
                return Err(self.seat.fault(&self.call, cause, false));
            }
            std::thread::yield_now();
        }
        let next = self.voyage.lock().next.take();
        match next {
            Some(Ok(Next::Done(values))) => Ok(values),
            Some(Err(trouble)) => Err(self.seat.trouble(&self.call, trouble)),
            _ => Err(Error::argument("mpi", "a collective ended without a result")),
        }
    }
}

/// The longest descriptor. It may list sizes for every member.
fn letter_len(members: usize) -> usize {
    4096 + 64 * members
}

/// The first step of a collective: the exchange of descriptors, or, where it is not wanted, what follows it.
fn begin(seat: &Arc<Seat>, call: &Call, values: Arrays) -> Stepped {
    if seat.size() == 1 {
        return Ok(Next::Done(values));
    }
    // Sizes that a rank cannot know come with the descriptors, and a barrier is nothing else.
    let needed = matches!(
        call.collective,
        Collective::Scatter { .. } | Collective::Gather { .. } | Collective::Exchange | Collective::Barrier
    );
    if !needed && !seat.control.options.check {
        return data(seat, call, values, &[]);
    }
    let most = letter_len(seat.size());
    let sent: Vec<(usize, Vec<u8>)> = seat
        .others()
        .map(|member| {
            let piece = match call.collective {
                Collective::Scatter { src } if src == seat.me => values.get(member).map(Array::meta),
                _ => None,
            };
            Ok((member, write(&Descriptor { call: call.clone(), piece }, most)?))
        })
        .collect::<Result<_>>()?;
    let came: Vec<(usize, Vec<u8>)> = seat.others().map(|member| (member, vec![0; most])).collect();
    let tag = tag(call.sequence, Kind::Descriptor);
    let call = call.clone();
    let step = Step::post(
        (sent, came),
        |(sent, came), requests| {
            // SAFETY: the step keeps all letters until the requests are done, and lets them leak otherwise.
            unsafe {
                for (member, letter) in came {
                    let letter = Span::of_bytes(letter);
                    requests.push(seat.comm.receive_up_to(&letter, Some(*member), tag)?);
                }
                for (member, letter) in sent {
                    requests.push(seat.comm.send(&Span::of_bytes(letter), *member, tag)?);
                }
            }
            Ok(())
        },
        move |seat, (_, came)| {
            let mut descriptors = Vec::with_capacity(seat.size());
            for (_, letter) in &came {
                descriptors.push(read::<Descriptor>(letter)?);
            }
            // This rank's own has its place among them.
            let own = values.get(seat.me).or(values.first()).map(Array::meta);
            descriptors.insert(seat.me, Descriptor { call: call.clone(), piece: own });
            let calls: Vec<&Call> = descriptors.iter().map(|descriptor| &descriptor.call).collect();
            if let Some((a, b)) = Call::first_mismatch(&calls) {
                let named = |member: usize| (seat.key.members[member], Box::new(calls[member].clone()));
                return Err(Trouble::Cause(Arc::new(Cause::Mismatch { one: named(a), other: named(b) })));
            }
            // What each member has for this rank.
            let meta = |d: &Descriptor| d.piece.clone().unwrap_or_else(|| d.call.meta.clone());
            let metas: Vec<Meta> = descriptors.iter().map(meta).collect();
            data(seat, &call, values, &metas)
        },
    )?;
    Ok(Next::Step(step))
}
