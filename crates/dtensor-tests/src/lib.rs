//! What the test programs share: tables of operators, inputs in all layouts, oracles, and access to arrays. The programs are in `tests/`.
//!
//! They are a crate of their own because they are compiled without optimisation, which takes a fifth of the time, and `dtensor` is not.

#![allow(missing_debug_implementations)] // Nothing prints these.

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
