//! Ranks and collectives: [`launch`], [`World`], [`Group`].
//!
//! A [`World`] is all ranks: threads of this process ([`launch`]), processes over MPI (feature `mpi`), or one rank of a simulated
//! world. A [`Group`] is some of them and has the collectives, which take and return local tensors. Gradients pass through most
//! collectives; the others return an error.
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
//! The documentation of the crate `dtensor-comm` describes faults, timeouts, and the order in which reductions add.

pub use dtensor_comm::{
    Bundle, Call, Cause, Collective, Departure, DrawRecord, Failure, Fault, Group, Pending, PerRank,
    ReduceOp, Replica, ReplicaRecord, Site, Value, World, WorldKind, launch, launch_each, record, run,
    run_each,
};
#[cfg(feature = "mpi")]
pub use dtensor_comm::{MpiOptions, mpirun};

pub(crate) use dtensor_comm::{
    Arrays, CALLS, RunningModule, enter_styled_module, running_module, set_running_module, styled_module,
    within_module,
};
