//! [`Nccl`]: the functions of the library that the engine needs.

use crate::cuda::Stream;
use crate::cuda::device::Gpu;
use crate::cuda::driver::{Address, Handle};
use crate::{DType, ReduceOp, Result};

/// Identifies a group of communicators on all its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// What a transfer does. Ranks are numbered by their position in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    Reduce(ReduceOp, usize),
    AllGather,
    Broadcast(usize),
    Send(usize),
    Receive(usize),
}

/// A transfer of `count` elements per rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queued {
    pub(crate) kind: Kind,
    pub(crate) from: Address,
    pub(crate) to: Address,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

/// The library, or what emulates it.
pub(crate) trait Nccl: Send + Sync {
    /// Returns the version, as `10000 · major + 100 · minor + patch`.
    fn version(&self) -> Result<i32>;
    /// Creates the id of a new group.
    fn unique_id(&self) -> Result<UniqueId>;
    /// Joins a group of `size` ranks as some of them. Waits for the others.
    fn join(&self, id: &UniqueId, size: usize, ranks: &[(usize, &'static Gpu)]) -> Result<Vec<Handle>>;
    /// Returns true if [`destroy`](Nccl::destroy) and [`abort`](Nccl::abort) may wait for other ranks or for the GPU.
    fn waits_for_others(&self) -> bool;
    /// Frees a communicator whose transfers are done.
    fn destroy(&self, communicator: Handle);
    /// Ends the transfers of a communicator, and frees it.
    fn abort(&self, communicator: Handle, stream: &Stream);
    /// Returns the error that a communicator has found since it was created, if any.
    fn error(&self, communicator: Handle) -> Result<()>;
    /// Begins a group of transfers.
    fn group_start(&self) -> Result<()>;
    /// Queues the transfers of the group.
    fn group_end(&self) -> Result<()>;
    /// Adds a transfer to the group.
    ///
    /// # Safety
    /// The addresses must be valid for the count on the communicator's GPU until the stream has run the transfer.
    unsafe fn queue(&self, communicator: Handle, transfer: &Queued, stream: Handle) -> Result<()>;
}
