//! Looking at what distributed tensors do. Nothing here communicates or changes a tensor.

mod comm_mode;
mod sharding;

pub use crate::autograd::Phase;
pub use comm_mode::{
    CollectiveRecord, CommCounts, CommDebugMode, ModuleCounts, ModuleInfo, OperationRecord, TensorRecord,
};
pub use sharding::{ShardingMap, sharding_map, visualize_sharding};
