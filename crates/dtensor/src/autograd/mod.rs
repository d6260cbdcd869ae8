//! Automatic differentiation: the graph of recorded operators, and the backward pass through it.
//!
//! An operator on a tensor that requires a gradient records a [`Node`]: the operator, the values that its gradient rule needs,
//! and links to the nodes of its inputs. [`Tensor::backward`] walks the nodes from the last to the first and runs their gradient
//! rules. The rules are written with the same public operators as everything else, so a gradient can have a gradient.
//!
//! **Retaining the graph.** A backward pass frees the values that a node saved as soon as it has used them, so that memory falls
//! while the pass runs. A second pass through the same nodes returns an error unless the first one had
//! [`BackwardOptions::retain_graph`].
//!
//! **Checkpoints.** Operators in the body of a [`checkpoint`] save nothing. A backward pass runs the body again when it reaches
//! one of them.

mod backward;
mod checkpoint;
mod mode;
mod node;
mod region;
mod restore;
mod saved;
mod signature;

pub use backward::{BackwardOptions, grad};
pub use checkpoint::{checkpoint, checkpoint_all};
#[cfg(test)]
pub(crate) use mode::in_phase;
pub use mode::{Phase, enable_grad, no_grad};
pub(crate) use mode::{grad_enabled, phase};
pub use node::{Backward, Grads};
pub(crate) use node::{Leaf, Link, Moment, Node, Recorded};
pub(crate) use restore::{Restore, RestoreScope, restore_from};
pub use saved::Saves;
