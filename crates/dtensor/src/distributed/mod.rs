//! Tensors on a mesh: how they come there, move, and come back.

mod convert;
mod distribute;
mod from_local;
pub mod sharded;

pub use convert::RedistributeOptions;
pub use distribute::{distribute_tensor, distribute_tensor_from};
pub use from_local::FromLocal;
pub(crate) use from_local::{Told, tell};
