//! Looking at what distributed tensors do. Nothing here communicates or changes a tensor.

mod sharding;

pub use sharding::{ShardingMap, sharding_map, visualize_sharding};
