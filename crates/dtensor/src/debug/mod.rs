//! Debugging tools: which collectives ran and why ([`CommDebugMode`]), and pictures of layouts ([`visualize_sharding`]).
//!
//! Nothing here communicates or changes a tensor.

mod comm_mode;
mod sharding;

pub use crate::autograd::Phase;
pub use comm_mode::{
    CollectiveRecord, CommCounts, CommDebugMode, ModuleCounts, ModuleInfo, OperationRecord, TensorRecord,
};
pub use sharding::{ShardingMap, sharding_map, visualize_sharding};
