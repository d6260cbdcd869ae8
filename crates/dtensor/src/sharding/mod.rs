//! Which parts of its inputs an operator is run on: from shapes, layouts and what a mesh has planned. Nothing is moved here.

mod cache;
mod choose;
mod rule;

pub use cache::{Attributes, CacheStats};
pub(crate) use cache::{Decisions, digest};
pub(crate) use choose::{Candidate, Decision, candidates, check, choose};
pub use rule::Rule;
pub(crate) use rule::{around, named};
