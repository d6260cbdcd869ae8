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

mod backward;
mod mode;
mod node;

pub use backward::{BackwardOptions, grad};
pub(crate) use mode::grad_enabled;
pub use mode::{enable_grad, no_grad};
pub use node::{Backward, Grads, Saves};
pub(crate) use node::{Leaf, Link, Moment, Node, Recorded};
