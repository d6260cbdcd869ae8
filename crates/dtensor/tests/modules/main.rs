//! Tests modules, layers, models and optimizers, including activation checkpoints and autocast.

#[path = "../common/mod.rs"]
mod common;

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
