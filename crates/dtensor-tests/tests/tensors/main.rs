//! Tests local and distributed tensors: construction, operators, autograd, meshes and redistribution.

use dtensor_tests as common;

mod arithmetic_operators;
mod autograd;
mod candle;
mod distributed_tensors;
mod meshes_of_meshes;
mod modes;
mod operator_tables;
mod redistribute_traces;
mod sharded_operators;
mod shared_between_ranks;
mod tensor;
mod windows;
