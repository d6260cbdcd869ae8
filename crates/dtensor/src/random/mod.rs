//! Random tensors from a counter-based generator (Philox 4×32-10).
//!
//! A draw is identified by a seed and a stream number. Each element is a function of the draw and the element's
//! global index only. So a tensor has the same elements however it is sharded, and drawing it again needs no saved
//! state.

mod draw;
mod generator;
mod table;
mod thread;

pub use generator::{Generator, GeneratorState};
pub(crate) use table::distributions;
pub(crate) use thread::{lend, next_draw, without_draw_check};
pub use thread::{manual_seed, rng_state, set_rng_state, synchronize_rng, with_generator};

pub(crate) use dtensor_array::kernels::random::{Distribution, Draw};
