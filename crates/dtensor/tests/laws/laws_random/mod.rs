//! Law: random numbers are those of a single device, bit for bit, whatever the mesh and the placements; and they are
//! random.
//!
//! The generator's own known answers are in `host::random::philox::tests::known_answers` of `dtensor-array`.

mod bits;
mod coming_apart;
mod distributions;
mod dropout;
mod factories;
mod generators;
mod initialisers;
mod same_bits;
mod statistics;
