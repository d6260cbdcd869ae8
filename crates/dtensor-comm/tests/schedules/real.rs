//! The rendezvous with the primitives that the library uses.

#[path = "../../src/threads/rendezvous.rs"]
pub(crate) mod rendezvous;
#[path = "../../src/threads/sync.rs"]
mod sync;
