//! Tests against PyTorch: its own tests, golden values, API names, and known defects.

use dtensor_tests as common;

mod api_map;
mod better_than_pytorch;
mod golden;
mod pytorch_api;
mod pytorch_comm_mode_features;
mod pytorch_common_dtensor;
mod pytorch_local_map;
mod pytorch_tp_style;
