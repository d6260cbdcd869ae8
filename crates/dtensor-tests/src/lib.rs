//! What the test programs share: tables of operators, inputs in all layouts, oracles, and access to arrays. The programs are in `tests/`.
//!
//! They are a crate of their own because they are compiled without optimisation, which takes a fifth of the time, and `dtensor` is not.

// Nothing prints these, and nothing else implements traits for them.
#![allow(missing_debug_implementations, clippy::should_implement_trait, clippy::new_without_default)]

pub mod cases;
pub mod golden;
pub mod inputs;
pub mod laid;
pub mod layouts;
pub mod methods;
pub mod modules;
pub mod operators;
pub mod peek;
pub mod ranks;
pub mod refused;
pub mod scratch;
pub mod table;
pub mod warnings;
