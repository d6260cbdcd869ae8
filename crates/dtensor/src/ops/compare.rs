//! Comparisons: 0 or 1 as `u8`, with broadcasting.

use super::{Arrays, Here, Metas, Op, Precision, one, same_dtype};
use crate::tensor::Operand;
use crate::{Result, Tensor, apply};
use dtensor_array::Array;
use dtensor_array::kernels::binary::{self, Compare};
use dtensor_array::{DType, Meta};
use dtensor_layout::Rule;

/// A test applied to pairs of elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Comparison(Compare);

impl Op for Comparison {
    fn name(&self) -> &'static str {
        match self.0 {
            Compare::Eq => "eq",
            Compare::Ne => "ne",
            Compare::Lt => "lt",
            Compare::Le => "le",
            Compare::Gt => "gt",
            Compare::Ge => "ge",
        }
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        same_dtype(self.name(), x)?;
        let shape = x[0].shape.broadcast(self.name(), &x[1].shape)?;
        Ok(one(Meta { shape, dtype: DType::U8, device: x[0].device }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(binary::compare(self.0, x[0], x[1])?))
    }

    fn differentiable(&self) -> bool {
        false
    }
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident => $f:ident;)*) => {
        impl Tensor {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
                let op = Comparison(Compare::$f);
                match other.into() {
                    Operand::Tensor(other) => apply(op, &[self, other]),
                    Operand::Scalar(scalar) => {
                        let other = self.beside(op.name(), scalar)?;
                        apply(op, &[self, &other])
                    }
                }
            })*
        }
    };
}

methods! {
    /// Where the elements are equal.
    eq => Eq;
    /// Where the elements differ. NaN differs from itself.
    ne => Ne;
    /// Where this is less than the other.
    lt => Lt;
    /// Where this is less than or equal to the other.
    le => Le;
    /// Where this is greater than the other.
    gt => Gt;
    /// Where this is greater than or equal to the other.
    ge => Ge;
}
