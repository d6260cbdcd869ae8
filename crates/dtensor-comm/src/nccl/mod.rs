//! Collectives between ranks that have a GPU each, through NCCL.
//!
//! This is no kind of world. Threads and MPI compare the descriptors, find out who is missing and tell of failures, as for all
//! collectives. Then, if each rank's value is on a GPU of its own, the values move through NCCL: [`run`] queues a collective for some of
//! its ranks, on the streams of their communicators, and waits for nothing. If the GPUs do not finish it within the timeout, it is
//! aborted ([`Watch`]), and the group fails.

mod plan;
mod ranks;

use std::sync::Arc;

use dtensor_array::Device;
use dtensor_array::cuda::nccl::{self, Communicator, Usage, Watch};

use self::plan::Plan;
pub(crate) use self::ranks::Ranks;
use crate::call::{Call, Collective};
use crate::{Arrays, Result};
use dtensor_array::Meta;

/// Returns true if groups of `size` ranks may use NCCL in this process.
pub(crate) fn is_enabled(size: usize) -> Result<bool> {
    Ok(match nccl::usage()? {
        Usage::Off => false,
        Usage::Auto => size > 1 && nccl::check_available().is_ok(),
        Usage::Force => true,
    })
}

/// Returns true if a collective moves values that may be on GPUs.
pub(crate) fn moves_values(collective: &Collective) -> bool {
    !matches!(
        collective,
        Collective::Barrier | Collective::Join | Collective::Send { .. } | Collective::Recv { .. }
    )
}

/// Returns true if these arrays are on this GPU.
pub(crate) fn are_on(values: &Arrays, device: Device) -> bool {
    values.iter().all(|x| x.device() == device)
}

/// One rank's part in a collective.
pub(crate) struct Seat<'a> {
    pub(crate) communicator: &'a Arc<Communicator>,
    /// The rank's position in the group.
    pub(crate) me: usize,
    pub(crate) collective: &'a Collective,
    pub(crate) values: Arrays,
    /// What each member sends to this rank, if they are not all alike.
    pub(crate) metas: Vec<Meta>,
}

/// Queues a collective for some ranks of a group, and returns their results, which later work on their GPUs waits for.
pub(crate) fn run(seats: Vec<Seat<'_>>, watch: Watch) -> Result<Vec<Arrays>> {
    let (mut queued, mut finishes) = (Vec::with_capacity(seats.len()), Vec::with_capacity(seats.len()));
    for seat in seats {
        let communicator = seat.communicator;
        let Plan { transfers, finish } = communicator.run(|| Plan::new(seat))??;
        queued.push((communicator, transfers));
        finishes.push((communicator, finish));
    }
    nccl::communicate(&queued, watch)?;
    finishes.into_iter().map(|(communicator, finish)| communicator.run(finish)?).collect()
}

/// Returns the error for ranks that have to use NCCL, but cannot.
pub(crate) fn shared_gpu(call: &Call) -> crate::Error {
    let message = "DTENSOR_NCCL=force, but ranks of the group share a GPU: NCCL needs a GPU for each rank";
    crate::Error::argument(call.collective.name(), message)
}
