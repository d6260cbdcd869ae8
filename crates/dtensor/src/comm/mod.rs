//! Ranks, and what they do together.
//!
//! A [`World`] is all ranks there are: threads of this process ([`launch`]), processes over MPI (feature `mpi`), or
//! one rank of a simulated many. A [`Group`] is some of them, and has the collectives. They take and give tensors of this
//! rank; gradients pass through those that have one.
//!
//! ```
//! use dtensor::comm::{ReduceOp, launch};
//! use dtensor::{DType, Tensor};
//!
//! # fn main() -> dtensor::Result<()> {
//! launch(3, |world| {
//!     let x = Tensor::full([2], world.rank() as f64, DType::F32)?;
//!     let all = world.group().all_gather_tensor(&x, 0)?;
//!     assert_eq!(all.to_vec::<f32>()?, [0., 0., 1., 1., 2., 2.]);
//!     let sum = world.group().all_reduce(&x, ReduceOp::Sum)?;
//!     assert_eq!(sum.to_vec::<f32>()?, [3., 3.]);
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

mod call;
mod coalesced;
mod drawn;
mod fault;
mod functional;
mod group;
#[cfg(feature = "mpi")]
#[allow(unsafe_code)]
mod mpi;
mod object;
mod reduce_op;
mod ring;
mod running;
mod simulated;
mod site;
#[allow(unsafe_code)]
mod threads;
mod transport;
mod world;

pub use call::{Bundle, Call, Collective, PerRank};
pub use drawn::Drawn;
pub use fault::{Cause, Departure, Fault};
pub use functional::Pending;
pub use group::Group;
#[cfg(feature = "mpi")]
pub use mpi::{MpiOptions, mpirun};
pub use reduce_op::ReduceOp;
pub(crate) use ring::listened;
pub use ring::record;
pub(crate) use running::{Running, running_module, set_running_module, within_module};
pub use site::Site;
pub(crate) use site::{asked_by, on_behalf_of, origin};
pub use world::{World, WorldKind, launch, launch_each, run, run_each};
