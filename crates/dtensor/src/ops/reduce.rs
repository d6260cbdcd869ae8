//! Reductions: sum, mean, extrema, product, variance and norms.

use super::{
    Arrays, Bits, Here, Metas, Op, Precision, Together, grads, need_float, one, reshaped, statistics_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::reduce::{self as kernel, Reduce};
use dtensor_array::kernels::{cast, moments, scalar};
use dtensor_array::shape::{DimList, Dims};
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::{Rule, named};

/// Returns the shape after reducing `dims`, which are removed or, with `keepdim`, become 1.
pub(super) fn reduced_shape(shape: &Shape, dims: &[usize], keepdim: bool) -> Shape {
    let size = |(d, &n): (usize, &usize)| match (dims.contains(&d), keepdim) {
        (true, true) => Some(1),
        (true, false) => None,
        (false, _) => Some(n),
    };
    shape.iter().enumerate().filter_map(size).collect()
}

/// The dims that a reduction reduces, and whether they stay with size 1.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ReducedDims {
    pub(super) dims: DimList,
    pub(super) keepdim: bool,
}

impl ReducedDims {
    fn new(op: &'static str, x: &Tensor, dims: Dims, keepdim: bool) -> Result<Self> {
        let mut dims = dims.resolve(op, x.ndim())?;
        if x.ndim() == 0 {
            // As in PyTorch, a scalar may be reduced over dim 0 or −1.
            dims.clear();
        }
        Ok(ReducedDims { dims, keepdim })
    }

    fn all(x: &Tensor) -> Self {
        ReducedDims { dims: (0..x.ndim()).collect(), keepdim: false }
    }

    pub(super) fn shape(&self, x: &Shape) -> Shape {
        reduced_shape(x, &self.dims, self.keepdim)
    }

    /// `a0 a1 -> a0`: the remaining dims may be sharded, and so may the reduced ones, with partial results.
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rank = x[0].shape.ndim();
        let name = |d: usize| format!("a{d}");
        let is_reduced = |d: usize| self.dims.contains(&d);
        let remaining = if self.keepdim {
            named(0..rank, |d| if is_reduced(d) { "1".into() } else { name(d) })
        } else {
            named((0..rank).filter(|&d| !is_reduced(d)), name)
        };
        let out_of = vec![remaining; out.len()].join(", ");
        Rule::of(&format!("{} -> {out_of}", named(0..rank, name)), x, out)
    }

    /// Like [`rule`](ReducedDims::rule), for operators that return indices: ranks merge candidates, and shards are
    /// ranges so that local indices can be shifted to global ones.
    pub(super) fn index_rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = self.rule(x, out)?.merging(x[0].dtype.size() + DType::I64.size());
        self.dims.iter().try_fold(rule, |rule, d| rule.contiguous(&format!("a{d}")))
    }

    /// Returns the number of elements that are reduced to one.
    pub(super) fn count(&self, x: &Shape) -> usize {
        self.dims.iter().map(|&d| x[d]).product()
    }

    /// Reshapes a result so that the reduced dims are back with size 1 and it broadcasts against the input.
    pub(super) fn restore(&self, y: &Tensor, x: &Shape) -> Result<Tensor> {
        if self.keepdim { Ok(y.clone()) } else { y.reshape(reduced_shape(x, &self.dims, true)) }
    }
}

/// Sum, mean, maximum, minimum or product over some dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ReduceDims {
    f: Reduce,
    over: ReducedDims,
}

impl Op for ReduceDims {
    fn name(&self) -> &'static str {
        match self.f {
            Reduce::Sum => "sum",
            Reduce::Mean => "mean",
            Reduce::Max => "max",
            Reduce::Min => "min",
            Reduce::Prod => "prod",
        }
    }

    fn precision(&self) -> Precision {
        if self.f == Reduce::Prod { Precision::Single } else { Precision::AsGiven }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let mut out = reshaped(&x[0], self.over.shape(&x[0].shape));
        match self.f {
            Reduce::Mean => need_float("mean", x[0].dtype)?,
            Reduce::Sum | Reduce::Prod if x[0].dtype == DType::U8 => out.dtype = DType::I64,
            Reduce::Max | Reduce::Min if self.over.count(&x[0].shape) == 0 && out.shape.numel() > 0 => {
                let message =
                    format!("expected the reduced dims to have non-zero size, got shape {}", x[0].shape);
                return Err(Error::argument(self.name(), message));
            }
            _ => {}
        }
        Ok(one(out))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = self.over.rule(x, out)?;
        match self.f {
            // Partial `u8` values wrap when they are summed, but their `i64` sums do not.
            Reduce::Sum if x[0].dtype == DType::U8 => Ok(rule),
            Reduce::Prod if x[0].dtype == DType::U8 => Ok(rule.reducing(ReduceOp::Product)),
            Reduce::Sum | Reduce::Mean => rule.linear(&[0]),
            Reduce::Max => rule.reducing(ReduceOp::Max).passing(&[ReduceOp::Max], &[0]),
            Reduce::Min => rule.reducing(ReduceOp::Min).passing(&[ReduceOp::Min], &[0]),
            Reduce::Prod => rule.reducing(ReduceOp::Product).passing(&[ReduceOp::Product], &[0]),
        }
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let ReducedDims { dims, keepdim } = &self.over;
        let (local, global) = (self.over.count(&x[0].dims().into()), self.over.count(&here.whole(0).shape));
        if self.f == Reduce::Mean && local != global {
            // Each rank scales the mean of its shard by the shard's share of the elements, so that the results add
            // up to the mean.
            let f = if local == 0 { Reduce::Sum } else { Reduce::Mean };
            let mean = kernel::reduce(f, x[0], dims, *keepdim)?;
            return Ok(one(scalar::affine(&mean, local as f64 / global as f64, 0.0)?));
        }
        Ok(one(kernel::reduce(self.f, x[0], dims, *keepdim)?))
    }

    fn saves(&self) -> Saves {
        match self.f {
            Reduce::Sum | Reduce::Mean => Saves::NOTHING,
            Reduce::Prod => Saves::INPUTS,
            Reduce::Max | Reduce::Min => Saves::ALL,
        }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let shape = &cx.input_meta(0).shape;
        let dy = self.over.restore(&cx.dy()?, shape)?;
        let dx = match self.f {
            Reduce::Sum => dy.expand(shape)?,
            // The mean over zero elements is NaN, but it depends on no element; `max(1)` avoids 1 / 0.
            Reduce::Mean => dy.mul(1.0 / self.over.count(shape).max(1) as f64)?.expand(shape)?,
            Reduce::Max | Reduce::Min => {
                // Ties share the gradient.
                let y = self.over.restore(&cx.output(0)?.detach(), shape)?;
                share_among_ties(&cx.input(0)?.detach(), &y, &dy, &self.over)?
            }
            Reduce::Prod => {
                // Flatten the reduced dims into the last dim.
                let (dims, x) = (&self.over.dims, cx.input(0)?);
                let order: DimList =
                    (0..shape.ndim()).filter(|d| !dims.contains(d)).chain(dims.iter().copied()).collect();
                let permuted = x.permute(&order[..])?;
                let rest = &permuted.dims()[..shape.ndim() - dims.len()];
                let flat: Shape = rest.iter().copied().chain([self.over.count(shape)]).collect();
                let others = products_of_others(&permuted.reshape(flat)?)?.reshape(permuted.shape())?;
                let mut back = order.clone();
                order.iter().enumerate().for_each(|(to, &from)| back[from] = to);
                dy.mul(&others.permute(&back[..])?)?
            }
        };
        Ok(grads![Some(dx)])
    }
}

/// Computes, for each element of the last dim, the product of all others, with a tree of products. There is no
/// division, so zeros need no special case, here or in the second derivative.
fn products_of_others(x: &Tensor) -> Result<Tensor> {
    let mut level = x.clone();
    let mut pairs = Vec::new();
    loop {
        let n = level.size(-1)?;
        if n <= 1 {
            break;
        }
        if n % 2 == 1 {
            level = Tensor::cat(&[&level, &level.detach().narrow(-1, 0, 1)?.ones_like()?], -1)?;
        }
        let half = |start| level.slice(-1, start, n as isize + 1, 2);
        let (left, right) = (half(0)?, half(1)?);
        level = left.mul(&right)?;
        pairs.push((n, left, right));
    }
    let mut out = level.detach().ones_like()?;
    for (n, left, right) in pairs.iter().rev() {
        out = Tensor::stack(&[&out.mul(right)?, &out.mul(left)?], -1)?.flatten(-2, -1)?.narrow(-1, 0, *n)?;
    }
    Ok(out)
}

/// Splits `dy` evenly among the elements of `x` that equal `y`.
fn share_among_ties(x: &Tensor, y: &Tensor, dy: &Tensor, over: &ReducedDims) -> Result<Tensor> {
    let reach = x.eq(y)?.to_dtype(x.dtype())?;
    let count = reach.sum_keepdim(&over.dims[..])?;
    dy.div(&count)?.mul(&reach)
}

/// Computes `dy / y`, and 0 where `y` is 0. The zeros are masked before the division, because 0 / 0 would make this
/// function's own gradient NaN.
fn div_or_zero(dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    let zero = y.eq(0.0)?;
    dy.div(&y.masked_fill(&zero, 1.0)?)?.masked_fill(&zero, 0.0)
}

/// Variance or standard deviation over some dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Variance {
    over: ReducedDims,
    correction: Bits,
    root: bool,
}

impl Op for Variance {
    fn name(&self) -> &'static str {
        if self.root { "std" } else { "var" }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_float(self.name(), x[0].dtype)?;
        Ok(one(reshaped(&x[0], self.over.shape(&x[0].shape))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        // Each rank contributes three numbers per result: count, mean and sum of squares.
        Ok(self.over.rule(x, out)?.merging(3 * DType::F64.size()))
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let f = if self.root { moments::deviation } else { moments::variance };
        Ok(one(f(x[0], &self.over.dims, self.over.keepdim, self.correction.get())?))
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        let [parts, ..] = known else {
            let part = moments::moments_part(x[0], &self.over.dims, self.over.keepdim)?;
            return Ok(Together::Stack(one(part)));
        };
        let dtype = here.out()[0].dtype;
        let merged = moments::merge_moments(parts, self.correction.get(), self.root, dtype)?;
        Ok(Together::Done(one(merged)))
    }

    fn saves(&self) -> Saves {
        if self.root { Saves::ALL } else { Saves::INPUTS }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let x = cx.input(0)?;
        let shape = x.shape();
        let mut dy = self.over.restore(&cx.dy()?, &shape)?;
        if self.root {
            let y = self.over.restore(&cx.output(0)?, &shape)?;
            dy = div_or_zero(&dy, &y)?.mul(0.5)?;
        }
        let degrees = (self.over.count(&shape) as f64 - self.correction.get()).max(0.0);
        let degrees = if shape.numel() == 0 { 1.0 } else { degrees };
        let centred = x.sub(&x.mean_keepdim(&self.over.dims[..])?)?;
        Ok(grads![Some(centred.mul(&dy.mul(2.0 / degrees)?)?)])
    }
}

/// The p-norm over some dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Norm {
    over: ReducedDims,
    p: Bits,
}

impl Op for Norm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_float("norm", x[0].dtype)?;
        let out = self.over.shape(&x[0].shape);
        let p = self.p.get();
        if (p < 0.0 || p.is_infinite()) && self.over.count(&x[0].shape) == 0 && out.numel() > 0 {
            return Err(Error::argument("norm", format!("the {p}-norm of zero elements is not defined")));
        }
        Ok(one(reshaped(&x[0], out)))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Ok(self.over.rule(x, out)?.merging(statistics_dtype(x[0].dtype).size()))
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::norm(x[0], self.p.get(), &self.over.dims, self.over.keepdim)?))
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        let [parts, ..] = known else {
            // In half precision, the norm of each shard would be rounded.
            let x = cast::cast(x[0], statistics_dtype(x[0].dtype()))?;
            return Ok(Together::Stack(self.kernel(&[&x], here)?));
        };
        let norm = kernel::merge_norm(parts, self.p.get())?;
        Ok(Together::Done(one(cast::cast(&norm, here.out()[0].dtype)?)))
    }

    fn saves(&self) -> Saves {
        Saves::ALL
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (x, p) = (cx.input(0)?, self.p.get());
        let shape = x.shape();
        let y = self.over.restore(&cx.output(0)?, &shape)?;
        let dy = self.over.restore(&cx.dy()?, &shape)?;
        let dx = if p == 0.0 {
            x.zeros_like()?
        } else if p == 1.0 {
            dy.mul(&x.sign()?)?
        } else if p == 2.0 {
            x.mul(&div_or_zero(&dy, &y)?)?
        } else if p.is_infinite() {
            share_among_ties(&x.abs()?.detach(), &y.detach(), &dy, &self.over)?.mul(&x.sign()?)?
        } else {
            let scale = div_or_zero(&dy, &y.pow(p - 1.0)?)?;
            let slope = x.sign()?.mul(&x.abs()?.pow(p - 1.0)?.masked_fill(&x.eq(0.0)?, 0.0)?)?;
            slope.mul(&scale)?
        };
        Ok(grads![Some(dx)])
    }
}

macro_rules! reductions {
    ($($f:ident: $op:literal, $what:literal, $note:literal, $example:literal, $all:ident, $some:ident, $keep:ident;)*) => {
        impl Tensor {$(
            #[doc = concat!("Computes ", $what, " of all elements", $note, ".")]
            #[track_caller]
            pub fn $all(&self) -> Result<Tensor> {
                apply(ReduceDims { f: Reduce::$f, over: ReducedDims::all(self) }, &[self])
            }

            #[doc = concat!("Computes ", $what, " over one or more dims, which are removed", $note, ".")]
            ///
            /// ```
            /// # use dtensor::Tensor;
            /// # fn main() -> dtensor::Result<()> {
            /// let x = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2])?;
            #[doc = concat!("assert_eq!(x.", stringify!($some), "(0)?.to_vec::<f32>()?, ", $example, ");")]
            /// # Ok(())
            /// # }
            /// ```
            #[track_caller]
            pub fn $some(&self, dims: impl Into<Dims>) -> Result<Tensor> {
                let over = ReducedDims::new($op, self, dims.into(), false)?;
                apply(ReduceDims { f: Reduce::$f, over }, &[self])
            }

            #[doc = concat!("Computes ", $what, " over one or more dims, which stay with size 1", $note, ".")]
            #[track_caller]
            pub fn $keep(&self, dims: impl Into<Dims>) -> Result<Tensor> {
                let over = ReducedDims::new($op, self, dims.into(), true)?;
                apply(ReduceDims { f: Reduce::$f, over }, &[self])
            }
        )*}
    };
}

reductions! {
    Sum: "sum", "the sum", " (`u8` is summed as `i64`)", "[4., 6.]", sum_all, sum, sum_keepdim;
    Mean: "mean", "the mean", "", "[2., 3.]", mean_all, mean, mean_keepdim;
    Max: "max", "the maximum", ". NaN propagates; ties share the gradient", "[3., 4.]", max_all, max, max_keepdim;
    Min: "min", "the minimum", ". NaN propagates; ties share the gradient", "[1., 2.]", min_all, min, min_keepdim;
    Prod: "prod", "the product", " (`u8` is multiplied as `i64`)", "[3., 8.]", prod_all, prod, prod_keepdim;
}

impl Tensor {
    /// Computes the variance of all elements, with Bessel's correction.
    #[track_caller]
    pub fn var_all(&self) -> Result<Tensor> {
        self.variance(ReducedDims::all(self), 1.0, false)
    }

    /// Computes the variance over some dims. The divisor is the number of elements minus `correction`: 1 is
    /// Bessel's correction.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 3., 10., 10.], [2, 2])?;
    /// assert_eq!(x.var(1, 1.0, false)?.to_vec::<f32>()?, [2., 0.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn var(&self, dims: impl Into<Dims>, correction: f64, keepdim: bool) -> Result<Tensor> {
        self.variance(ReducedDims::new("var", self, dims.into(), keepdim)?, correction, false)
    }

    /// Computes the standard deviation of all elements, with Bessel's correction.
    #[track_caller]
    pub fn std_all(&self) -> Result<Tensor> {
        self.variance(ReducedDims::all(self), 1.0, true)
    }

    /// Computes the standard deviation over some dims; `correction` as in [`var`](Tensor::var). Where it is 0, its
    /// gradient is 0.
    #[track_caller]
    pub fn std(&self, dims: impl Into<Dims>, correction: f64, keepdim: bool) -> Result<Tensor> {
        self.variance(ReducedDims::new("std", self, dims.into(), keepdim)?, correction, true)
    }

    #[track_caller]
    fn variance(&self, over: ReducedDims, correction: f64, root: bool) -> Result<Tensor> {
        apply(Variance { over, correction: Bits::new(correction), root }, &[self])
    }

    /// Computes the p-norm of all elements.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::from_slice(&[3f32, -4.], [2])?.norm_all(2.0)?.item::<f32>()?, 5.0);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn norm_all(&self, p: f64) -> Result<Tensor> {
        apply(Norm { over: ReducedDims::all(self), p: Bits::new(p) }, &[self])
    }

    /// Computes the p-norm over some dims.
    #[track_caller]
    pub fn norm(&self, p: f64, dims: impl Into<Dims>, keepdim: bool) -> Result<Tensor> {
        apply(Norm { over: ReducedDims::new("norm", self, dims.into(), keepdim)?, p: Bits::new(p) }, &[self])
    }
}
