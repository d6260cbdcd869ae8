//! The graph of recorded operators, and the way back through it.
//!
//! An operator on a tensor that requires a gradient leaves a [`Node`]: the operator itself, the values its
//! gradient rule needs, and links to the nodes its inputs came from. [`Tensor::backward`] walks the nodes from the
//! last to the first and asks each operator for the gradients of its inputs. The rules are written with the same
//! public operators as everything else, so a gradient can have a gradient.
//!
//! **Retaining the graph.** A backward pass frees the values each node saved as soon as it has used them, so that
//! memory falls while the pass runs. A second pass through the same nodes is an error unless the first was asked
//! to retain them: [`BackwardOptions::retain_graph`].
//!
//! **Checkpoints.** Operators in the body of a [`checkpoint`] save nothing; a pass runs the body again when it comes there.

mod backward;
mod checkpoint;
mod look;
mod mode;
mod node;
mod region;
mod saved;

pub use backward::{BackwardOptions, grad};
pub use checkpoint::{checkpoint, checkpoint_all};
#[cfg(test)]
pub(crate) use mode::in_phase;
pub use mode::{Phase, enable_grad, no_grad};
pub(crate) use mode::{grad_enabled, phase};
pub use node::{Backward, Grads};
pub(crate) use node::{Leaf, Link, Moment, Node, Recorded};
pub use saved::Saves;
