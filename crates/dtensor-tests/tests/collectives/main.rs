//! Tests of collectives on threads and processes: their results, their gradients, and thousands of them in flight.

use dtensor_tests as common;

mod coalesced_collectives;
mod laws_collective_gradients;
mod laws_collectives;
mod soak_collectives;
