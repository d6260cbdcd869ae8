//! Reductions: sum, mean, extrema, product, variance and norms.

use super::{
    Arrays, Bits, Here, Metas, Op, Precision, Together, grads, need_float, one, reshaped, statistics_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::{Error, Result, Tensor, apply};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::reduce::{self as kernel, Reduce};
use dtensor_array::kernels::{cast, moments, scalar};
use dtensor_array::shape::{DimList, Dims};
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::{Rule, named};

/// The shape once `dims` are reduced.
pub(super) fn reduced(shape: &Shape, dims: &[usize], keepdim: bool) -> Shape {
    let size = |(d, &n): (usize, &usize)| match (dims.contains(&d), keepdim) {
        (true, true) => Some(1),
        (true, false) => None,
        (false, _) => Some(n),
    };
    shape.iter().enumerate().filter_map(size).collect()
}

/// Which dims of the input go, and whether they stay as 1.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Over {
    pub(super) dims: DimList,
    pub(super) keepdim: bool,
}

impl Over {
    fn new(op: &'static str, x: &Tensor, dims: Dims, keepdim: bool) -> Result<Self> {
        let mut dims = dims.resolve(op, x.rank())?;
        if x.rank() == 0 {
            // A scalar may be reduced over "its dim".
            dims.clear();
        }
        Ok(Over { dims, keepdim })
    }

    fn all(x: &Tensor) -> Self {
        Over { dims: (0..x.rank()).collect(), keepdim: false }
    }

    pub(super) fn shape(&self, x: &Shape) -> Shape {
        reduced(x, &self.dims, self.keepdim)
    }

    /// `a0 a1 -> a0`: parts of the dims that stay pass.
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rank = x[0].shape.rank();
        let name = |d: usize| format!("a{d}");
        let gone = |d: usize| self.dims.contains(&d);
        let kept = if self.keepdim {
            named(0..rank, |d| if gone(d) { "1".into() } else { name(d) })
        } else {
            named((0..rank).filter(|&d| !gone(d)), name)
        };
        let out_of = vec![kept; out.len()].join(", ");
        Rule::of(&format!("{} -> {out_of}", named(0..rank, name)), x, out)
    }

    /// As [`rule`](Over::rule), for where something is: what ranks found is merged, and they know where their part is.
    pub(super) fn located_rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = self.rule(x, out)?.merging(x[0].dtype.size() + DType::I64.size());
        self.dims.iter().try_fold(rule, |rule, d| rule.contiguous(&format!("a{d}")))
    }

    /// The number of elements that go into one.
    pub(super) fn count(&self, x: &Shape) -> usize {
        self.dims.iter().map(|&d| x[d]).product()
    }

    /// A result with the reduced dims put back as 1, so that it broadcasts against the input.
    pub(super) fn restore(&self, y: &Tensor, x: &Shape) -> Result<Tensor> {
        if self.keepdim { Ok(y.clone()) } else { y.reshape(reduced(x, &self.dims, true)) }
    }
}

/// Sum, mean, extremum or product over some dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ReduceDims {
    f: Reduce,
    over: Over,
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
                let message = format!("the reduced dims of shape {} hold nothing to choose from", x[0].shape);
                return Err(Error::argument(self.name(), message));
            }
            _ => {}
        }
        Ok(one(out))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = self.over.rule(x, out)?;
        match self.f {
            // Sums that wrap as u8 would not as i64.
            Reduce::Sum if x[0].dtype == DType::U8 => Ok(rule),
            Reduce::Prod if x[0].dtype == DType::U8 => Ok(rule.reducing(ReduceOp::Product)),
            Reduce::Sum | Reduce::Mean => rule.linear(&[0]),
            Reduce::Max => rule.reducing(ReduceOp::Max).passing(&[ReduceOp::Max], &[0]),
            Reduce::Min => rule.reducing(ReduceOp::Min).passing(&[ReduceOp::Min], &[0]),
            Reduce::Prod => rule.reducing(ReduceOp::Product).passing(&[ReduceOp::Product], &[0]),
        }
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let Over { dims, keepdim } = &self.over;
        let (part, whole) = (self.over.count(&x[0].dims().into()), self.over.count(&here.whole(0).shape));
        if self.f == Reduce::Mean && part != whole {
            // Each rank has a share of the mean, by how much it has of what the mean is of.
            let f = if part == 0 { Reduce::Sum } else { Reduce::Mean };
            let mean = kernel::reduce(f, x[0], dims, *keepdim)?;
            return Ok(one(scalar::affine(&mean, part as f64 / whole as f64, 0.0)?));
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
            // The mean of nothing is not a number, but it does not depend on anything.
            Reduce::Mean => dy.mul(1.0 / self.over.count(shape).max(1) as f64)?.expand(shape)?,
            Reduce::Max | Reduce::Min => {
                // All that reach the extremum share the gradient.
                let y = self.over.restore(&cx.output(0)?.detach(), shape)?;
                share(&cx.input(0)?.detach(), &y, &dy, &self.over)?
            }
            Reduce::Prod => {
                // The reduced dims as the last one.
                let (dims, x) = (&self.over.dims, cx.input(0)?);
                let order: DimList =
                    (0..shape.rank()).filter(|d| !dims.contains(d)).chain(dims.iter().copied()).collect();
                let turned = x.permute(&order[..])?;
                let rest = &turned.dims()[..shape.rank() - dims.len()];
                let flat: Shape = rest.iter().copied().chain([self.over.count(shape)]).collect();
                let others = others(&turned.reshape(flat)?)?.reshape(turned.shape())?;
                let mut back = order.clone();
                order.iter().enumerate().for_each(|(to, &from)| back[from] = to);
                dy.mul(&others.permute(&back[..])?)?
            }
        };
        Ok(grads![Some(dx)])
    }
}

/// For each element of the last dim, the product of all others, by a tree of products. Nothing is divided by, so zeros
/// are numbers like any other, for the gradient of this, too.
fn others(x: &Tensor) -> Result<Tensor> {
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

/// `dy` spread evenly over the elements of `x` that equal `y`.
fn share(x: &Tensor, y: &Tensor, dy: &Tensor, over: &Over) -> Result<Tensor> {
    let reach = x.eq(y)?.to_dtype(x.dtype())?;
    let count = reach.sum_keepdim(&over.dims[..])?;
    dy.div(&count)?.mul(&reach)
}

/// `dy / y`, and 0 where y is: so is the gradient of this, which 0 / 0 would spoil even where it is not used.
fn over_or_zero(dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    let zero = y.eq(0.0)?;
    dy.div(&y.masked_fill(&zero, 1.0)?)?.masked_fill(&zero, 0.0)
}

/// Variance or standard deviation over some dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Variance {
    over: Over,
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
        // Three numbers: count, mean and sum of squares.
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
            dy = over_or_zero(&dy, &y)?.mul(0.5)?;
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
    over: Over,
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
            return Err(Error::argument("norm", format!("the {p}-norm of nothing is not defined")));
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
            // Half precision would be rounded once for each part.
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
            x.mul(&over_or_zero(&dy, &y)?)?
        } else if p.is_infinite() {
            share(&x.abs()?.detach(), &y.detach(), &dy, &self.over)?.mul(&x.sign()?)?
        } else {
            let scale = over_or_zero(&dy, &y.pow(p - 1.0)?)?;
            let slope = x.sign()?.mul(&x.abs()?.pow(p - 1.0)?.masked_fill(&x.eq(0.0)?, 0.0)?)?;
            slope.mul(&scale)?
        };
        Ok(grads![Some(dx)])
    }
}

macro_rules! reductions {
    ($($f:ident: $op:literal, $what:literal, $all:ident, $some:ident, $keep:ident;)*) => {
        impl Tensor {$(
            #[doc = concat!($what, " of all elements.")]
            #[track_caller]
            pub fn $all(&self) -> Result<Tensor> {
                apply(ReduceDims { f: Reduce::$f, over: Over::all(self) }, &[self])
            }

            #[doc = concat!($what, " over one or several dims, which go.")]
            #[track_caller]
            pub fn $some(&self, dims: impl Into<Dims>) -> Result<Tensor> {
                let over = Over::new($op, self, dims.into(), false)?;
                apply(ReduceDims { f: Reduce::$f, over }, &[self])
            }

            #[doc = concat!($what, " over one or several dims, which stay with size 1.")]
            #[track_caller]
            pub fn $keep(&self, dims: impl Into<Dims>) -> Result<Tensor> {
                let over = Over::new($op, self, dims.into(), true)?;
                apply(ReduceDims { f: Reduce::$f, over }, &[self])
            }
        )*}
    };
}

reductions! {
    Sum: "sum", "The sum (of `u8`, as `i64`)", sum_all, sum, sum_keepdim;
    Mean: "mean", "The mean", mean_all, mean, mean_keepdim;
    Max: "max", "The largest (NaN if there is one); ties share the gradient", max_all, max, max_keepdim;
    Min: "min", "The smallest (NaN if there is one); ties share the gradient", min_all, min, min_keepdim;
    Prod: "prod", "The product (of `u8`, as `i64`)", prod_all, prod, prod_keepdim;
}

impl Tensor {
    /// The variance of all elements, with Bessel's correction.
    #[track_caller]
    pub fn var_all(&self) -> Result<Tensor> {
        self.variance(Over::all(self), 1.0, false)
    }

    /// The variance over some dims; `correction` is subtracted from the number of elements (1 is Bessel's).
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
        self.variance(Over::new("var", self, dims.into(), keepdim)?, correction, false)
    }

    /// The standard deviation of all elements, with Bessel's correction.
    #[track_caller]
    pub fn std_all(&self) -> Result<Tensor> {
        self.variance(Over::all(self), 1.0, true)
    }

    /// The standard deviation over some dims; `correction` as in [`var`](Tensor::var). Where it is 0, so is its gradient.
    #[track_caller]
    pub fn std(&self, dims: impl Into<Dims>, correction: f64, keepdim: bool) -> Result<Tensor> {
        self.variance(Over::new("std", self, dims.into(), keepdim)?, correction, true)
    }

    #[track_caller]
    fn variance(&self, over: Over, correction: f64, root: bool) -> Result<Tensor> {
        apply(Variance { over, correction: Bits::new(correction), root }, &[self])
    }

    /// The p-norm of all elements.
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
        apply(Norm { over: Over::all(self), p: Bits::new(p) }, &[self])
    }

    /// The p-norm over some dims.
    #[track_caller]
    pub fn norm(&self, p: f64, dims: impl Into<Dims>, keepdim: bool) -> Result<Tensor> {
        apply(Norm { over: Over::new("norm", self, dims.into(), keepdim)?, p: Bits::new(p) }, &[self])
    }
}
