//! Helpers that several test programs share: tables of operators, inputs in all layouts, oracles, and access to arrays.

// Every test program compiles this whole module, and none of them uses all of it.
#![allow(dead_code)]

pub(crate) mod cases;
pub(crate) mod golden;
pub(crate) mod inputs;
pub(crate) mod laid;
pub(crate) mod layouts;
pub(crate) mod methods;
pub(crate) mod modules;
pub(crate) mod operators;
pub(crate) mod peek;
pub(crate) mod ranks;
pub(crate) mod refused;
pub(crate) mod scratch;
pub(crate) mod table;
pub(crate) mod warnings;
