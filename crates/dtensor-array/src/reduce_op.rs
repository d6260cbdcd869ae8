//! How values of several ranks become one.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::host::reduce::Reduce;

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum, added in rank order.
    Sum,
    /// The sum divided by the number of ranks. Not for integers.
    Avg,
    /// The largest; NaN if there is one.
    Max,
    /// The smallest; NaN if there is one.
    Min,
    /// The product, in rank order.
    Product,
}

impl ReduceOp {
    /// All there are, each at the place of its number.
    pub const ALL: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product];

    /// Whether what is reduced of sums is the sum of what is reduced of each.
    #[inline]
    pub fn is_linear(self) -> bool {
        matches!(self, ReduceOp::Sum | ReduceOp::Avg)
    }

    /// Whether values can be reduced so along one mesh dim and in the other way along another, in any order or at once.
    #[inline]
    pub fn commutes_with(self, other: ReduceOp) -> bool {
        self == other || (self.is_linear() && other.is_linear())
    }
}

impl From<ReduceOp> for Reduce {
    fn from(op: ReduceOp) -> Self {
        match op {
            ReduceOp::Sum => Reduce::Sum,
            ReduceOp::Avg => Reduce::Mean,
            ReduceOp::Max => Reduce::Max,
            ReduceOp::Min => Reduce::Min,
            ReduceOp::Product => Reduce::Prod,
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Product => "product",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reduction_is_at_the_place_of_its_number() {
        for (i, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, i);
        }
    }
}
