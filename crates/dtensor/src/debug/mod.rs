//! Debugging tools: which collectives ran and why ([`CommDebugMode`]), pictures of layouts ([`visualize_sharding`]), and peak memory
//! ([`record_memory`]).
//!
//! Nothing here communicates or changes a tensor.

mod comm_mode;
mod sharding;

pub use crate::autograd::Phase;
pub use comm_mode::{
    CollectiveRecord, CommCounts, CommDebugMode, ModuleCounts, ModuleInfo, OperationRecord, TensorRecord,
};
pub use dtensor_array::memory::{MemoryPeaks, record as record_memory};
pub use sharding::{ShardingMap, sharding_map, visualize_sharding};
