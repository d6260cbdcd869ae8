//! The meeting of ranks on the primitives that it has in the library.

#[path = "../../src/threads/rendezvous.rs"]
pub(crate) mod rendezvous;
#[path = "../../src/threads/sync.rs"]
mod sync;
