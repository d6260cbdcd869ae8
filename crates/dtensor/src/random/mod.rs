//! Random tensors from a counter-based generator.
//!
//! A draw is named by a seed and a stream, and each element of it is a function of the element's index alone
//! (Philox 4×32-10). So a tensor has the same elements however it is cut up, and nothing needs to be saved to draw it
//! again.

mod draw;
mod generator;
mod table;
mod thread;

pub use generator::{Generator, GeneratorState};
pub(crate) use table::distributions;
pub(crate) use thread::{drawing_again, lend, next_draw};
pub use thread::{manual_seed, rng_state, set_rng_state, synchronize_rng, with_generator};

pub(crate) use dtensor_array::kernels::random::{Distribution, Draw};
