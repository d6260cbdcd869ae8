//! [`Gpus`]: whether the values of a group move through NCCL, and its communicator.
//!
//! Descriptors carry the identity of each member's GPU until the group has decided, and an id from the first member. All members decide
//! the same, because they have the same descriptors. NCCL needs transfers in the same order on all ranks, but descriptors may arrive in
//! any order. So each collective takes a number when it starts, and moves its values when its turn has come.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use dtensor_array::Device;
use dtensor_array::cuda::nccl::{self, Communicator, UniqueId, Usage, Watch};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::member::Member;
use super::stage::{Next, StageError, StageResult, Wait};
use crate::call::{Call, Collective};
use crate::fault::Cause;
use crate::nccl::{Seat, are_on, is_enabled, moves_values, run, shared_gpu};
use crate::{Arrays, Error, Result};
use dtensor_array::Meta;

/// What a member tells the others about its GPU, until the group has decided.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Offer {
    gpu: [u8; 16],
    /// From the first member: the id of the communicators.
    id: Option<Vec<u8>>,
}

#[derive(Debug, Default)]
enum Decision {
    #[default]
    Open,
    /// Ranks share a GPU, or one of them cannot use NCCL.
    No,
    /// The members' GPUs, and this member's communicator.
    Yes(Vec<Device>, Arc<Communicator>),
}

#[derive(Debug, Default)]
struct State {
    /// How many collectives have taken a number, and how many have had their turn.
    taken: u64,
    served: u64,
    offered: bool,
    decision: Decision,
}

/// The GPUs of a group, as one member sees them.
#[derive(Debug)]
pub(super) struct Gpus {
    state: Mutex<State>,
}

/// A collective's turn to move values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn(u64);

/// What a member has learned of another from its descriptor.
pub(super) struct Peer {
    pub(super) device: Device,
    pub(super) offer: Option<Offer>,
}

impl Gpus {
    pub(super) fn new() -> Self {
        Gpus { state: Mutex::default() }
    }

    /// Takes the turn of a collective that starts now. `None` if this process does not use NCCL.
    pub(super) fn take_turn(&self, size: usize) -> Result<Option<Turn>> {
        if !is_enabled(size)? {
            return Ok(None);
        }
        let mut state = self.state.lock();
        state.taken += 1;
        Ok(Some(Turn(state.taken - 1)))
    }

    /// Returns what the others need to decide. `None` if the group has decided, or the value is not on a GPU. Without a check of
    /// descriptors (`check`), only the first collective on GPUs decides.
    pub(super) fn offer(&self, call: &Call, me: usize, check: bool) -> Result<Option<Offer>> {
        let mut state = self.state.lock();
        let is_open = matches!(state.decision, Decision::Open) && (check || !state.offered);
        if !is_open || !matches!(call.meta.device, Device::Cuda(_)) || !moves_values(&call.collective) {
            return Ok(None);
        }
        state.offered = true;
        drop(state);
        nccl::check_available()?;
        let id = if me == 0 { Some(nccl::unique_id()?.0.to_vec()) } else { None };
        Ok(Some(Offer { gpu: nccl::identity(call.meta.device)?, id }))
    }
}

/// Moves the values of a collective when its turn has come: through NCCL if the group has decided so, else by `elsewhere`. `peers` is
/// empty if descriptors are not checked.
pub(super) fn run_in_turn(
    call: Call,
    values: Arrays,
    metas: Vec<Meta>,
    peers: Vec<Peer>,
    turn: Turn,
    timeout: Duration,
    elsewhere: impl FnOnce(&Arc<Member>, &Call, Arrays, &[Meta]) -> StageResult + Send + 'static,
) -> StageResult {
    let mut joining: Option<JoinHandle<Result<Arc<Communicator>>>> = None;
    let mut rest = Some((call, values, elsewhere));
    let wait = move |member: &Arc<Member>| -> Option<StageResult> {
        if member.gpus.state.lock().served != turn.0 {
            return None;
        }
        let (call, ..) = rest.as_ref()?;
        let communicator = match joining.as_ref() {
            Some(thread) if !thread.is_finished() => return None,
            Some(_) => {
                let joined = joining.take().map(JoinHandle::join);
                let lost = || Err(Error::argument("nccl", "the thread that connects the ranks panicked"));
                match joined.and_then(|joined| joined.ok()).unwrap_or_else(lost) {
                    Ok(communicator) => {
                        let devices = peers.iter().map(|peer| peer.device).collect();
                        member.gpus.state.lock().decision = Decision::Yes(devices, communicator.clone());
                        Ok(Some(communicator))
                    }
                    Err(error) => Err(error),
                }
            }
            None => match decide(member, call, &peers) {
                Ok(Decided::Now(communicator)) => Ok(communicator),
                Ok(Decided::Join(thread)) => {
                    joining = Some(thread);
                    return None;
                }
                Err(error) => Err(error),
            },
        };
        let (call, values, elsewhere) = rest.take()?;
        let result = communicator.map_err(StageError::from).and_then(|communicator| match communicator {
            Some(communicator) => queue(member, &call, values, &metas, &communicator, timeout),
            None => elsewhere(member, &call, values, &metas),
        });
        member.gpus.state.lock().served += 1;
        Some(result)
    };
    Ok(Next::Wait(Wait(Box::new(wait))))
}

enum Decided {
    /// A communicator, or none if the values go through main memory.
    Now(Option<Arc<Communicator>>),
    /// The members connect on another thread, because that waits for all of them.
    Join(JoinHandle<Result<Arc<Communicator>>>),
}

/// Decides how the values of a collective move.
fn decide(member: &Arc<Member>, call: &Call, peers: &[Peer]) -> Result<Decided> {
    let is_gpu = |device: &Device| matches!(device, Device::Cuda(_));
    let mut state = member.gpus.state.lock();
    match &state.decision {
        Decision::No => return Ok(Decided::Now(None)),
        Decision::Yes(devices, communicator) => {
            let is_usable = moves_values(&call.collective)
                && match call.collective {
                    _ if peers.is_empty() => call.meta.device == communicator.device(),
                    Collective::Scatter { src } => peers[src].device == devices[src],
                    _ => peers.iter().zip(devices).all(|(peer, device)| peer.device == *device),
                };
            return Ok(Decided::Now(is_usable.then(|| communicator.clone())));
        }
        Decision::Open => {}
    }
    let offers: Option<Vec<&Offer>> = peers.iter().map(|peer| peer.offer.as_ref()).collect();
    let all_on_gpus = moves_values(&call.collective) && peers.iter().all(|peer| is_gpu(&peer.device));
    let Some(offers) = offers.filter(|_| !peers.is_empty()) else {
        // A member on a GPU that offers nothing cannot use NCCL.
        if all_on_gpus && !peers.is_empty() || !member.checks() && is_gpu(&call.meta.device) {
            state.decision = Decision::No;
        }
        return Ok(Decided::Now(None));
    };
    let is_shared = (1..offers.len()).any(|i| offers[..i].iter().any(|other| other.gpu == offers[i].gpu));
    let id = offers[0].id.as_ref().and_then(|id| <[u8; 128]>::try_from(&id[..]).ok()).map(UniqueId);
    let Some(id) = id.filter(|_| !is_shared) else {
        state.decision = Decision::No;
        return if nccl::usage()? == Usage::Force { Err(shared_gpu(call)) } else { Ok(Decided::Now(None)) };
    };
    let (size, me, device) = (member.size(), member.me, call.meta.device);
    let join = move || Ok(Communicator::join(&id, size, &[(me, device)])?.swap_remove(0));
    let thread = std::thread::Builder::new().name("nccl".into()).spawn(join);
    let thread =
        thread.map_err(|error| Error::argument("nccl", format!("cannot start a thread: {error}")))?;
    Ok(Decided::Join(thread))
}

/// Queues a collective on this rank's GPU.
fn queue(
    member: &Arc<Member>,
    call: &Call,
    values: Arrays,
    metas: &[Meta],
    communicator: &Arc<Communicator>,
    timeout: Duration,
) -> StageResult {
    if !are_on(&values, communicator.device()) {
        let message = format!("expected all values on {}, the GPU of this rank", communicator.device());
        return Err(Error::argument(call.collective.name(), message).into());
    }
    let (failing, failed) = (Arc::downgrade(member), call.clone());
    let on_failure = move |why: &str| {
        let Some(member) = failing.upgrade() else { return Vec::new() };
        let cause = Cause::Aborted { rank: member.rank, call: Box::new(failed.clone()), why: why.to_owned() };
        vec![member.fault(&failed, Arc::new(cause), false)]
    };
    let seat =
        Seat { communicator, me: member.me, collective: &call.collective, values, metas: metas.to_vec() };
    let watch = Watch { timeout, on_failure: Box::new(on_failure) };
    Ok(Next::Done(run(vec![seat], watch)?.swap_remove(0)))
}
