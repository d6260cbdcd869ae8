//! [`ReduceOp`]: how a collective combines the values of several ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::host::reduce::Reduce;

/// How a collective combines the values of several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum, in rank order.
    Sum,
    /// The average: the sum divided by the number of ranks. Not defined for integers.
    Avg,
    /// The largest value; NaN if any value is NaN.
    Max,
    /// The smallest value; NaN if any value is NaN.
    Min,
    /// The product, in rank order.
    Product,
}

impl ReduceOp {
    /// All reductions. The index of each is its discriminant.
    pub const ALL: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product];

    /// Returns true if reducing sums gives the sum of the reduced terms: `r(a + b) = r(a) + r(b)`.
    #[inline]
    pub fn is_linear(self) -> bool {
        matches!(self, ReduceOp::Sum | ReduceOp::Avg)
    }

    /// Returns true if one mesh dim can be reduced by `self` and another by `other` in any order, or both at once.
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
    fn all_is_in_the_order_of_the_discriminants() {
        for (i, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, i);
        }
    }
}
