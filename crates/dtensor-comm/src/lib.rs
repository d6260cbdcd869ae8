//! Ranks, groups of ranks, and collectives on arrays.
//!
//! A [`World`] holds all ranks: threads of this process ([`launch`]), processes connected by MPI (feature `mpi`), or one rank
//! of a simulated world. A [`Group`] is a list of ranks in a fixed order. The collectives are its methods.
//!
//! This crate depends on arrays only, not on gradients or layouts. A crate above runs the same collectives on a richer type by
//! implementing [`Value`].
//!
//! ```
//! use dtensor_array::Array;
//! use dtensor_comm::{ReduceOp, launch};
//!
//! # fn main() -> dtensor_comm::Result<()> {
//! launch(3, |world| {
//!     let x = Array::from_vec(vec![world.rank() as f32; 2], &[2])?;
//!     let all = world.group().all_gather_tensor(&x, 0)?;
//!     assert_eq!(all.copy_to_host::<f32>()?, [0., 0., 1., 1., 2., 2.]);
//!     let sum = world.group().all_reduce(&x, ReduceOp::Sum)?;
//!     assert_eq!(sum.copy_to_host::<f32>()?, [3., 3.]);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Errors instead of hangs
//!
//! Every collective carries a descriptor ([`Call`]): group, sequence number, collective, dtype, shape, the calling source line,
//! a digest of the random draws the rank made for tensors that it shares with the group, and of the arrays that it took as
//! replicated over the group ([`ReplicaRecord`]). Ranks compare their descriptors. If two differ, both ranks get an error that
//! shows both calls, or both arrays.
//!
//! If a rank returns, errs, panics, or does not arrive within the timeout (30 s by default, [`World::with_timeout`]), every rank
//! that waits for it gets an error that names the rank, the collective and the source line. A failed group stays failed. The
//! process continues, and a new world works.
//!
//! # Reduction order
//!
//! Reductions add up values in the order of the group's ranks, and accumulate half precision in `f32`. The result is
//! bit-identical on every rank, in every run and in every kind of world. The exception are ranks that have a GPU each (feature
//! `cuda`): if NCCL is found, it moves and reduces the values that are on GPUs, in an order and a precision of its own.

#![warn(missing_docs)]

#[cfg(any(feature = "mpi", feature = "cuda"))]
mod blocks;
mod call;
mod coalesced;
mod collectives;
mod drawn;
mod failure;
mod fault;
mod group;
#[cfg(feature = "mpi")]
#[allow(unsafe_code)]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod object;
mod pending;
mod replicas;
mod ring;
mod running;
mod simulated;
mod site;
mod threads;
mod transport;
mod value;
mod world;

pub use call::{Bundle, Call, Collective, PerRank};
pub use drawn::DrawRecord;
pub use dtensor_array::{Error, ReduceOp, Result};
pub use failure::Failure;
pub use fault::{Cause, Departure, Fault};
pub use group::Group;
#[cfg(feature = "mpi")]
pub use mpi::{MpiOptions, mpirun};
pub use pending::Pending;
pub use replicas::{Replica, ReplicaRecord};
pub use ring::{CALLS, record};
pub use running::{
    RunningModule, enter_styled_module, running_module, set_running_module, styled_module, within_module,
};
pub use site::Site;
pub use value::{Finish, Value};
pub use world::{RankId, World, WorldKind, current_rank, launch, launch_each, run, run_each};

/// The arrays that one rank passes to a collective or receives from it.
pub type Arrays = smallvec::SmallVec<[dtensor_array::Array; 1]>;
