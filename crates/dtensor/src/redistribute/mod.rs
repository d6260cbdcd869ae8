//! From one layout to another: the cheapest steps ([`Plan`]), and their execution.
//!
//! Planning is pure, so that all ranks of a mesh come to the same plan without a word, and is done once for each pair of
//! layouts. A step changes what the ranks along one mesh dim hold, or along several at once, by a collective or by itself.

mod cost;
mod execute;
mod plan;
mod search;
mod state;

pub use cost::{CostModel, Link};
pub(crate) use execute::{execute, keep};
pub use plan::{Plan, Step};
