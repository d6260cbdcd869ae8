//! Random numbers have the bits of a single device on every mesh and with all placements, and they pass statistical
//! tests.
//!
//! The known answers of the generator itself are in `host::random::philox::tests::known_answers` of `dtensor-array`.

mod bits;
mod coming_apart;
mod distributions;
mod dropout;
mod factories;
mod generators;
mod initialisers;
mod same_bits;
mod statistics;
