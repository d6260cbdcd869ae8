//! One rank as a member of a group over MPI: begins its collectives and waits for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::control::Control;
use super::exchange::run_collective;
use super::gpus::{Gpus, Offer, Peer, Turn, run_in_turn};
use super::message::{decode, encode};
use super::raw::{Comm, ReceiveBuffer, Request, Span};
use super::stage::{Next, Stage, StageError, StageResult, Wait};
use crate::Arrays;
use crate::call::{Call, Collective, empty_meta};
use crate::fault::Cause;
use crate::transport::{Channel, InFlight, Key};
use crate::{Error, Result};
use dtensor_array::{Array, Device, Meta};

/// One rank as a member of a group.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) me: usize,
    key: Key,
    pub(super) comm: Comm,
    control: Arc<Control>,
    pub(super) gpus: Gpus,
}

/// What a member sends to another before a collective or a value.
#[derive(Serialize, Deserialize)]
struct Descriptor {
    call: Call,
    /// Shape and dtype of the value that the receiver will get, if it cannot know them from its own call.
    value: Option<Meta>,
    /// What the members need to decide whether to use NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    offer: Option<Offer>,
}

impl Member {
    pub(super) fn new(rank: usize, me: usize, key: Key, comm: Comm, control: Arc<Control>) -> Self {
        Member { rank, me, key, comm, control, gpus: Gpus::new() }
    }

    pub(super) fn size(&self) -> usize {
        self.key.members.len()
    }

    /// Iterates over the positions of the other members.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.size()).filter(move |&member| member != me)
    }

    /// Returns true if ranks compare their calls.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) fn checks(&self) -> bool {
        self.control.options.check
    }

    /// Returns the error of a call and fails the group.
    pub(super) fn fault(&self, call: &Call, cause: Arc<Cause>, earlier: bool) -> Error {
        let cause = self.control.fail(&self.key, cause);
        self.control.ring.fault(self.rank, call, cause, earlier)
    }

    /// Same as [`fault`](Self::fault), for a stage that failed.
    fn stage_fault(&self, call: &Call, error: StageError) -> Error {
        match error {
            StageError::Cause(cause) => self.fault(call, cause, false),
            StageError::Error(error) => {
                let cause = Cause::Transport { rank: self.rank, message: error.to_string() };
                self.fault(call, Arc::new(cause), false)
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // After a failure the other members may still use the communicator, so it leaks.
        if self.control.failed(&self.key).is_none() {
            self.comm.free();
        }
    }
}

impl Channel for Member {
    fn start(self: Arc<Self>, call: Call, values: Arrays, timeout: Duration) -> Result<Box<dyn InFlight>> {
        self.control.ring.note(&call);
        self.control.poll().map_err(|error| self.stage_fault(&call, error.into()))?;
        if let Some(cause) = self.control.failed(&self.key) {
            return Err(self.fault(&call, cause, true));
        }
        let turn = self.gpus.take_turn(self.size()).map_err(|error| self.stage_fault(&call, error.into()))?;
        let values = if turn.is_none() { to_main_memory(&values)? } else { values };
        let next = begin(&self, &call, values, turn, timeout);
        Ok(OperationInFlight::start(self, call, next, timeout))
    }

    fn send(&self, call: Call, value: Array, dst: usize, user_tag: u32) -> Result<()> {
        self.control.ring.note(&call);
        self.control.poll().map_err(|error| self.stage_fault(&call, error.into()))?;
        if let Some(cause) = self.control.failed(&self.key) {
            return Err(self.fault(&call, cause, true));
        }
        if let Some(cause) = self.control.left(self.key.members[dst]) {
            return Err(self.fault(&call, cause, false));
        }
        let meta = value.meta();
        let value = value.copy_to_host_memory()?;
        // The tag of the value contains this rank's message number, which the header carries. So it differs from the tags of
        // other values that were sent with the same user tag.
        let value_tag = tag(call.sequence, MessageKind::Value);
        let descriptor = Descriptor { value: Some(meta), call, offer: None };
        let header = encode(&descriptor, max_descriptor_len(self.size()))?;
        let stage = Stage::post(
            (header, value),
            |(header, value), requests| {
                // SAFETY: the stage owns both until they are sent, and leaks them otherwise.
                unsafe {
                    let header = Span::of_bytes(header);
                    requests.push(self.comm.send(&header, dst, tag(user_tag.into(), MessageKind::Header))?);
                    for message in Span::of(value).messages() {
                        requests.push(self.comm.send(&message, dst, value_tag)?);
                    }
                }
                Ok(())
            },
            |_, _| Ok(Next::Done(Arrays::new())),
        )?;
        self.control.hold(stage);
        Ok(())
    }

    fn receive(
        self: Arc<Self>,
        call: Call,
        src: usize,
        user_tag: u32,
        timeout: Duration,
    ) -> Result<Box<dyn InFlight>> {
        self.control.ring.note(&call);
        if let Some(cause) = self.control.failed(&self.key) {
            return Err(self.fault(&call, cause, true));
        }
        let stage = Stage::post(
            vec![0; max_descriptor_len(self.size())],
            |header, requests| {
                let header = Span::of_bytes(header);
                // SAFETY: the stage owns the header until it has arrived, and leaks it otherwise.
                requests.push(unsafe {
                    self.comm.receive_up_to(&header, Some(src), tag(user_tag.into(), MessageKind::Header))?
                });
                Ok(())
            },
            move |member, header| {
                let Descriptor { call, value, .. } = decode(&header)?;
                let meta = value.unwrap_or_else(empty_meta);
                let device = meta.device;
                let buffer = ReceiveBuffer::new(&meta)?;
                let post = |buffer: &mut ReceiveBuffer, requests: &mut Vec<Request>| {
                    let tag = tag(call.sequence, MessageKind::Value);
                    for message in buffer.span.messages() {
                        // SAFETY: as above, for the buffer.
                        requests.push(unsafe { member.comm.receive(&message, src, tag)? });
                    }
                    Ok(())
                };
                Ok(Next::Stage(Stage::post(buffer, post, move |_, buffer| {
                    // SAFETY: the requests are done, so the library has written the whole buffer.
                    let value = unsafe { buffer.into_array()? };
                    Ok(Next::Done(Arrays::from_elem(value.to_device(device)?, 1)))
                })?))
            },
        )?;
        Ok(OperationInFlight::start(self, call, Ok(Next::Stage(stage)), timeout))
    }

    fn note(&self, call: &Call) {
        self.control.ring.note(call);
    }
}

/// What a message between two members contains.
#[derive(Clone, Copy, Debug)]
pub(super) enum MessageKind {
    /// The descriptor of a collective.
    Descriptor,
    /// The data that a collective moves in its first exchange.
    Data,
    /// The data that a collective moves in its second exchange.
    MoreData,
    /// The descriptor of a value that `send` sends.
    Header,
    /// The value that `send` sends.
    Value,
}

/// Returns the MPI tag of a message. `number` is the sequence number of its collective, or the user's tag for a header. Numbers
/// wrap around, but so late that no two messages in progress share a tag.
pub(super) fn tag(number: u64, kind: MessageKind) -> i32 {
    const NUMBERS: u64 = 1 << 24;
    (number % NUMBERS) as i32 * 8 + kind as i32
}

/// A collective or receive in progress. The other members may need this rank's share of it while this rank waits for another
/// operation or does not wait at all. So the rank's [`Control`] owns all operations and advances them whenever it waits for one.
#[derive(Debug)]
pub(super) struct Operation {
    next: Option<StageResult>,
    member: Arc<Member>,
    /// When the operation last made progress. Set when this rank begins to wait for it.
    last_progress: Option<Instant>,
}

impl Operation {
    pub(super) fn key(&self) -> &Key {
        &self.member.key
    }

    /// Makes as much progress as possible without waiting. Returns true if the operation is over.
    pub(super) fn advance(&mut self) -> bool {
        loop {
            let stage = match &mut self.next {
                Some(Ok(Next::Stage(stage))) => stage,
                Some(Ok(Next::Wait(Wait(wait)))) => match wait(&self.member) {
                    None => return false,
                    next => {
                        self.last_progress = self.last_progress.map(|_| Instant::now());
                        self.next = next;
                        continue;
                    }
                },
                _ => return true,
            };
            match stage.test() {
                Ok((false, progressed)) => {
                    if progressed {
                        self.last_progress = self.last_progress.map(|_| Instant::now());
                    }
                    return false;
                }
                Ok((true, _)) => {
                    self.last_progress = self.last_progress.map(|_| Instant::now());
                    let Some(Ok(Next::Stage(stage))) = self.next.take() else { return true };
                    self.next = Some(stage.finish(&self.member));
                }
                Err(error) => self.next = Some(Err(error.into())),
            }
        }
    }
}

/// This rank's handle to an operation in progress.
#[derive(Debug)]
struct OperationInFlight {
    operation: Arc<Mutex<Operation>>,
    member: Arc<Member>,
    call: Call,
    timeout: Duration,
}

impl OperationInFlight {
    fn start(member: Arc<Member>, call: Call, next: StageResult, timeout: Duration) -> Box<dyn InFlight> {
        let mut operation = Operation { next: Some(next), member: member.clone(), last_progress: None };
        let over = operation.advance();
        let operation = Arc::new(Mutex::new(operation));
        if !over {
            member.control.add_operation(operation.clone());
        }
        Box::new(OperationInFlight { operation, member, call, timeout })
    }

    /// Returns why the operation can never finish, if so. The timeout begins when this is first called, and again whenever the
    /// operation makes progress.
    fn failure(&self) -> Option<Arc<Cause>> {
        let Member { key, control, .. } = &*self.member;
        let polled = control.poll();
        let (waiting, last_progress) = {
            let mut operation = self.operation.lock();
            let last_progress = *operation.last_progress.get_or_insert_with(Instant::now);
            match &operation.next {
                Some(Ok(Next::Stage(stage))) => (stage.peers(), last_progress),
                Some(Ok(Next::Wait(_))) => (Vec::new(), last_progress),
                _ => return None,
            }
        };
        if let Err(error) = polled {
            let cause = Cause::Transport { rank: self.member.rank, message: error.to_string() };
            return Some(Arc::new(cause));
        }
        if let Some(cause) = control.failed(key) {
            return Some(cause);
        }
        let ranks = waiting.iter().map(|&member| key.members[member]);
        if let Some(cause) = ranks.clone().find_map(|rank| control.left(rank)) {
            return Some(cause);
        }
        (last_progress.elapsed() >= self.timeout).then(|| {
            if waiting.is_empty() {
                let message = format!("NCCL did not connect the ranks within {:?}, or an earlier collective of the group is not done", self.timeout);
                return Arc::new(Cause::Transport { rank: self.member.rank, message });
            }
            let ranks = ranks.map(|rank| (rank, None)).collect();
            Arc::new(Cause::Late { ranks, waited: self.timeout })
        })
    }
}

impl InFlight for OperationInFlight {
    fn poll(&mut self) -> bool {
        // After a failure the result is an error, which `wait` returns: so it is ready.
        self.operation.lock().advance() || self.failure().is_some()
    }

    fn wait(self: Box<Self>) -> Result<Arrays> {
        let mut idle = 0u32;
        while !self.operation.lock().advance() {
            idle += 1;
            if (self.member.control.has_several_operations() || idle.is_multiple_of(16))
                && let Some(cause) = self.failure()
            {
                return Err(self.member.fault(&self.call, cause, false));
            }
            std::thread::yield_now();
        }
        let next = self.operation.lock().next.take();
        match next {
            Some(Ok(Next::Done(values))) => Ok(values),
            Some(Err(error)) => Err(self.member.stage_fault(&self.call, error)),
            _ => Err(Error::argument("mpi", "a collective ended without a result")),
        }
    }
}

/// Returns the maximum length of a descriptor in bytes. It may list a size for every member, and some replicas.
fn max_descriptor_len(members: usize) -> usize {
    8192 + 64 * members
}

/// Copies values to main memory, which the library moves.
fn to_main_memory(values: &Arrays) -> Result<Arrays> {
    values.iter().map(|x| x.to_device(Device::Cpu)).collect()
}

/// Moves the values of a collective after the ranks have compared their calls.
fn move_values(
    member: &Arc<Member>,
    call: Call,
    values: Arrays,
    (metas, peers): (Vec<Meta>, Vec<Peer>),
    turn: Option<Turn>,
    timeout: Duration,
) -> StageResult {
    match turn {
        None => run_collective(member, &call, values, &metas),
        Some(turn) => {
            run_in_turn(call, values, metas, peers, turn, timeout, |member, call, values, metas| {
                let values = to_main_memory(&values)?;
                if member.size() == 1 {
                    return Ok(Next::Done(values));
                }
                run_collective(member, call, values, metas)
            })
        }
    }
}

/// Begins a collective: exchanges descriptors or, if checking is off, moves the data at once.
fn begin(
    member: &Arc<Member>,
    call: &Call,
    values: Arrays,
    turn: Option<Turn>,
    timeout: Duration,
) -> StageResult {
    let offer = turn.map(|_| member.gpus.offer(call, member.me, member.checks())).transpose()?.flatten();
    if member.size() == 1 {
        if turn.is_none() {
            return Ok(Next::Done(values));
        }
        let metas = vec![values.first().map_or_else(|| call.meta.clone(), Array::meta)];
        let peers = vec![Peer { device: call.meta.device, offer }];
        return move_values(member, call.clone(), values, (metas, peers), turn, timeout);
    }
    // These need the descriptors even if checking is off: a rank learns from them the sizes it receives, and a barrier consists
    // of nothing else.
    let needed = offer.is_some()
        || matches!(
            call.collective,
            Collective::Scatter { .. }
                | Collective::Gather { .. }
                | Collective::Exchange
                | Collective::Barrier
        );
    if !needed && !member.checks() {
        return move_values(member, call.clone(), values, (Vec::new(), Vec::new()), turn, timeout);
    }
    let max_len = max_descriptor_len(member.size());
    let sent: Vec<(usize, Vec<u8>)> = member
        .others()
        .map(|other| {
            let value = match call.collective {
                Collective::Scatter { src } if src == member.me => {
                    values.get(other).map(|x| Meta { device: call.meta.device, ..x.meta() })
                }
                _ => None,
            };
            let descriptor = Descriptor { call: call.clone(), value, offer: offer.clone() };
            Ok((other, encode(&descriptor, max_len)?))
        })
        .collect::<Result<_>>()?;
    let received: Vec<(usize, Vec<u8>)> = member.others().map(|other| (other, vec![0; max_len])).collect();
    let tag = tag(call.sequence, MessageKind::Descriptor);
    let call = call.clone();
    let stage = Stage::post(
        (sent, received),
        |(sent, received), requests| {
            // SAFETY: the stage owns all bytes until the requests are done, and leaks them otherwise.
            unsafe {
                for (other, bytes) in received {
                    let bytes = Span::of_bytes(bytes);
                    requests.push(member.comm.receive_up_to(&bytes, Some(*other), tag)?);
                }
                for (other, bytes) in sent {
                    requests.push(member.comm.send(&Span::of_bytes(bytes), *other, tag)?);
                }
            }
            Ok(())
        },
        move |member, (_, received)| {
            let mut descriptors = Vec::with_capacity(member.size());
            for (_, bytes) in &received {
                descriptors.push(decode::<Descriptor>(bytes)?);
            }
            // Insert this rank's own descriptor at its position.
            let own = values.get(member.me).or(values.first()).map(Array::meta);
            descriptors.insert(member.me, Descriptor { call: call.clone(), value: own, offer });
            let calls: Vec<&Call> = descriptors.iter().map(|descriptor| &descriptor.call).collect();
            if let Some(cause) = Call::compare(&calls, &member.key.members) {
                return Err(StageError::Cause(Arc::new(cause)));
            }
            // Shape and dtype of the value that each member sends to this rank.
            let meta = |d: &Descriptor| d.value.clone().unwrap_or_else(|| d.call.meta.clone());
            let metas: Vec<Meta> = descriptors.iter().map(meta).collect();
            let peer = |d: Descriptor| Peer { device: d.call.meta.device, offer: d.offer };
            let peers = descriptors.into_iter().map(peer).collect();
            move_values(member, call, values, (metas, peers), turn, timeout)
        },
    )?;
    Ok(Next::Stage(stage))
}
