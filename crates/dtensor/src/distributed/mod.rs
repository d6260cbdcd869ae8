//! Distributed tensors: distribute, convert from and to local tensors, redistribute.

mod distribute;
mod execute;
mod from_local;
mod gathered;
mod redistribute;
mod replicated;
pub mod sharded;
mod to_local;

pub(crate) use distribute::distribute_as;
pub use distribute::{distribute_tensor, distribute_tensor_from};
pub use from_local::FromLocalOptions;
pub(crate) use from_local::{ShardInfo, exchange};
pub use gathered::no_sync;
pub(crate) use gathered::{GatherLayouts, GatherSpec, Gathered};
pub(crate) use redistribute::begin_redistributions;
pub use redistribute::{RedistributeOptions, redistribute_coalesced, redistribute_coalesced_async};
pub(crate) use replicated::Taker;
pub use replicated::check_replicated;
