//! Laws over tables and random cases: compares operators, gradients, layouts, meshes and random numbers with one
//! device.

use dtensor_tests as common;

mod laws_bad_input;
mod laws_bad_layouts;
mod laws_checkpoint;
mod laws_fully_sharded;
mod laws_gradients;
mod laws_layout_gradients;
mod laws_local_gradients;
mod laws_mesh;
mod laws_operators;
mod laws_random;
mod laws_redistribute;
mod laws_tensor_parallel;
