//! Ranks, and what they do together.
//!
//! A [`World`] is all ranks there are: threads of this process ([`launch`]), processes over MPI (feature `mpi`), or one rank of a
//! simulated many. A [`Group`] is some of them, and has the collectives. They take and give tensors of this rank; gradients pass
//! through those that have one.
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
//! The crate `dtensor-comm` has the details: what happens when something goes wrong, and in which order reductions run.

pub use dtensor_comm::{
    Bundle, Call, Cause, Collective, Departure, Drawn, Failure, Fault, Group, Pending, PerRank, ReduceOp,
    Site, Value, World, WorldKind, launch, launch_each, record, run, run_each,
};
#[cfg(feature = "mpi")]
pub use dtensor_comm::{MpiOptions, mpirun};

pub(crate) use dtensor_comm::{CALLS, Running, running_module, set_running_module, within_module};
