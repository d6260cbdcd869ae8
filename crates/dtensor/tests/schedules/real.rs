//! The meeting of ranks on the primitives that it has in the library.

#[path = "../../src/comm/threads/rendezvous.rs"]
pub(crate) mod rendezvous;
#[path = "../../src/comm/threads/sync.rs"]
mod sync;
