//! Tests of modules and functions on a mesh: plans, styles, `local_map`, data and context parallelism, parallel losses
//! and `CommDebugMode`.

use dtensor_tests as common;

mod comm_debug_mode;
mod context_parallel;
mod data_parallel;
mod heads;
mod local_map;
mod loss_parallel;
mod parallelize;
mod replicated;
mod whole_models;
