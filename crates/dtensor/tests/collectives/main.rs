//! Collectives on threads and processes: what they give, their gradients, and thousands of them at once.

#[path = "../common/mod.rs"]
mod common;

mod coalesced_collectives;
mod laws_collective_gradients;
mod laws_collectives;
mod soak_collectives;
