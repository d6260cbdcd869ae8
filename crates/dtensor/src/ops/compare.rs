//! Comparisons with broadcasting: 1 (true) or 0 (false) as `u8`.

use super::{Arrays, Here, Metas, Op, Precision, one, same_dtype};
use crate::op::apply;
use crate::tensor::Operand;
use crate::{Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::binary::{self, Compare};
use dtensor_array::{DType, Meta};
use dtensor_layout::Rule;

/// An element-wise comparison.
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
                        let other = self.scalar_like(op.name(), scalar)?;
                        apply(op, &[self, &other])
                    }
                }
            })*
        }
    };
}

methods! {
    /// Returns 1 where the elements are equal, else 0, as `u8`.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2., 3.], [3])?;
    /// assert_eq!(x.eq(2.0)?.to_vec::<u8>()?, [0, 1, 0]);
    /// # Ok(())
    /// # }
    /// ```
    eq => Eq;
    /// Returns 1 where the elements differ, else 0, as `u8`. NaN differs from itself.
    ne => Ne;
    /// Returns 1 where this tensor is less than `other`, else 0, as `u8`.
    lt => Lt;
    /// Returns 1 where this tensor is less than or equal to `other`, else 0, as `u8`.
    le => Le;
    /// Returns 1 where this tensor is greater than `other`, else 0, as `u8`.
    gt => Gt;
    /// Returns 1 where this tensor is greater than or equal to `other`, else 0, as `u8`.
    ge => Ge;
}
