//! Tests modules, layers, models and optimizers, including activation checkpoints and autocast.

use dtensor_tests as common;

mod autocast;
mod checkpoint;
mod compile_errors;
mod forward_macro;
mod layers;
mod located_errors;
mod models;
mod modules;
mod nn;
mod optimizers;
mod resets;
