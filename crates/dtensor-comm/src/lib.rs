//! Worlds of ranks, and collectives on arrays.
//!
//! This crate knows worlds, groups, collectives, transports and what to say when a collective cannot be finished. It knows
//! arrays, and nothing of gradients or layouts: a crate above makes collectives of a richer type by implementing [`Value`].
//!
//! A [`World`] is all ranks: threads of this process ([`launch`]), processes over MPI (feature `mpi`), or one rank of a simulated
//! world. A [`Group`] is some of them, and has the collectives.
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
//! # When something goes wrong
//!
//! Every collective carries a descriptor: group, number, what is to be done, dtype, shape, the line that called it, and
//! what the rank has drawn of random tensors that the group has together. Ranks compare them, so two ranks that mean
//! different things both get an error that shows both. A rank that returns, fails, panics or does not come within the
//! timeout (30 s, [`World::with_timeout`]) makes every rank that waits for it return an error that names the rank, the
//! collective and the line. A group that has failed stays failed; the process goes on, and a new world works.
//!
//! # Order
//!
//! Reductions run in the order of the group's ranks, half precision in `f32`: the same bits on every rank, in every run and
//! in every kind of world.

#![warn(missing_docs)]

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
mod object;
mod pending;
mod ring;
mod running;
mod simulated;
mod site;
mod threads;
mod transport;
mod value;
mod world;

pub use call::{Bundle, Call, Collective, PerRank};
pub use drawn::Drawn;
pub use dtensor_array::{Error, ReduceOp, Result};
pub use failure::Failure;
pub use fault::{Cause, Departure, Fault};
pub use group::Group;
#[cfg(feature = "mpi")]
pub use mpi::{MpiOptions, mpirun};
pub use pending::Pending;
pub use ring::{CALLS, record};
pub use running::{Running, running_module, set_running_module, within_module};
pub use site::Site;
pub use value::{Finish, Value};
pub use world::{RankId, World, WorldKind, current_rank, launch, launch_each, run, run_each};

/// The arrays that one rank gives to a collective, or gets from it.
pub type Arrays = smallvec::SmallVec<[dtensor_array::Array; 1]>;
