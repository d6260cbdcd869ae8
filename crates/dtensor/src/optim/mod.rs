//! Optimizers.

mod sgd;

pub use sgd::Sgd;
