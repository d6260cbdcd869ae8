//! Losses.

use super::{
    Bits, Here, Locals, Metas, Op, Precision, grads, need_dtype, need_float, no_second, reshaped,
    statistics_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::dispatch::prepared;
use crate::engine::Local;
use crate::engine::kernels::loss as kernel;
use crate::sharding::Rule;
use crate::tensor::{DType, Meta, Shape};
use crate::{Error, Result, Tensor, apply, apply_all};

/// What becomes of the losses of all positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their (weighted) mean.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// They stay as they are.
    None,
}

impl Reduction {
    #[track_caller]
    fn apply(self, losses: &Tensor) -> Result<Tensor> {
        match self {
            Reduction::Mean => losses.mean_all(),
            Reduction::Sum => losses.sum_all(),
            Reduction::None => Ok(losses.clone()),
        }
    }
}

/// How [`cross_entropy`](Tensor::cross_entropy) and [`nll_loss`](Tensor::nll_loss) are to be done.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// One factor per class.
    pub weight: Option<&'a Tensor>,
    /// A target that counts for nothing; −100 unless said otherwise.
    pub ignore_index: i64,
    /// What becomes of the losses.
    pub reduction: Reduction,
    /// How much of the target is spread over all classes, from 0 to 1.
    pub label_smoothing: f64,
}

impl Default for CrossEntropy<'_> {
    fn default() -> Self {
        CrossEntropy { weight: None, ignore_index: -100, reduction: Reduction::Mean, label_smoothing: 0.0 }
    }
}

/// The class dim, and the sizes before and after it.
#[derive(Clone, Copy, Debug)]
struct Classes {
    outer: usize,
    classes: usize,
    inner: usize,
}

impl Classes {
    /// Of scores `[C]`, `[N, C]` or `[N, C, …]`.
    fn of(shape: &[usize]) -> Classes {
        match shape {
            [classes] => Classes { outer: 1, classes: *classes, inner: 1 },
            [outer, classes, inner @ ..] => {
                Classes { outer: *outer, classes: *classes, inner: inner.iter().product() }
            }
            [] => Classes { outer: 1, classes: 1, inner: 1 },
        }
    }

    fn scores(self, x: &Local) -> Result<Local> {
        x.contiguous()?.view_with(|t| t.reshape((self.outer, self.classes, self.inner)))
    }

    fn positions(self, x: &Local) -> Result<Local> {
        x.contiguous()?.view_with(|t| t.reshape((self.outer, self.inner)))
    }

    fn flat(self, x: &Local) -> Result<Local> {
        x.contiguous()?.view_with(|t| t.reshape(self.outer * self.inner))
    }
}

/// The shape of the targets for given scores.
fn target_shape(op: &'static str, scores: &Meta) -> Result<Shape> {
    match &scores.shape[..] {
        [] => Err(Error::argument(op, "the input must have a class dim")),
        [_] => Ok(Shape::scalar()),
        [outer, _, inner @ ..] => Ok([*outer].iter().chain(inner).copied().collect()),
    }
}

/// The names of the dims of scores, and of one number per position. Classes stay together.
fn by_class(scores: &Meta) -> (&'static str, &'static str) {
    if scores.shape.rank() == 1 { ("c!", "") } else { ("n c! …", "n …") }
}

/// The loss of each position. Inputs: scores (logits, or log-probabilities), targets, and class weights if there are
/// any. Outputs: the losses, the weight of each position, and for logits their log-sum-exp.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassLoss {
    from_logits: bool,
    ignore_index: i64,
    smoothing: Bits,
}

impl Op for ClassLoss {
    fn name(&self) -> &'static str {
        if self.from_logits { "cross_entropy" } else { "nll_loss" }
    }

    fn precision(&self) -> Precision {
        Precision::Single
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let op = self.name();
        need_float(op, x[0].dtype)?;
        need_dtype(op, "the target", &x[1], DType::I64)?;
        let positions = target_shape(op, &x[0])?;
        if x[1].shape != positions {
            return Err(Error::ShapeMismatch {
                op,
                why: "the input's shape without its class dim must be the target's",
                left: x[0].shape.clone(),
                right: x[1].shape.clone(),
            });
        }
        if let Some(weight) = x.get(2) {
            need_dtype(op, "the weight", weight, x[0].dtype)?;
            let classes = Classes::of(&x[0].shape).classes;
            if weight.shape[..] != [classes] {
                let message = format!(
                    "the weight must have one element for each of {classes} classes, not {}",
                    weight.shape
                );
                return Err(Error::argument(op, message));
            }
        }
        let losses = reshaped(&x[0], positions);
        let statistics = statistics_dtype(losses.dtype);
        let mut out: Metas = [losses.clone(), losses.clone()].into_iter().collect();
        if self.from_logits {
            out.push(Meta { dtype: statistics, ..losses });
        }
        Ok(out)
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (scores, positions) = by_class(&x[0]);
        let weight = if x.len() == 3 { ", c!" } else { "" };
        let out_of = vec![positions; out.len()].join(", ");
        Rule::of(&format!("{scores}, {positions}{weight} -> {out_of}"), x, out)
    }

    fn kernel(&self, x: &[&Local], here: &Here<'_>) -> Result<Locals> {
        let out = here.out();
        let by = Classes::of(x[0].dims());
        let (scores, target) = (by.scores(x[0])?, by.positions(x[1])?);
        let weight = x.get(2).copied();
        let shaped = |y: Local| y.view_with(|t| t.reshape(&out[0].shape[..]));
        if !self.from_logits {
            let (losses, weights) = kernel::nll_forward(&scores, &target, weight, self.ignore_index)?;
            return Ok([shaped(losses)?, shaped(weights)?].into_iter().collect());
        }
        let (losses, weights, lse) =
            kernel::cross_entropy_forward(&scores, &target, weight, self.ignore_index, self.smoothing.get())?;
        Ok([shaped(losses)?, shaped(weights)?, shaped(lse)?].into_iter().collect())
    }

    fn saves(&self) -> Saves {
        Saves::only(&[0, 1, 2], if self.from_logits { &[2] } else { &[1] })
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let mut inputs = vec![cx.dy()?, cx.input(0)?, cx.input(1)?];
        // Weights and log-sum-exp are constants of the backward pass.
        inputs.push(cx.output(if self.from_logits { 2 } else { 1 })?.detach());
        if cx.inputs() == 3 {
            inputs.push(cx.input(2)?);
        }
        let dx = || apply(ClassLossGrad(self.clone()), &inputs.iter().collect::<Vec<_>>());
        let mut grads: Grads = grads![cx.when(0, dx)?, None];
        if cx.inputs() == 3 {
            grads.push(None);
        }
        Ok(grads)
    }
}

/// The gradient of the scores from that of the losses, the scores, the targets, the saved statistics and the class
/// weights.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassLossGrad(ClassLoss);

impl Op for ClassLossGrad {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[1].clone()].into_iter().collect())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (scores, positions) = by_class(&x[1]);
        let weight = if x.len() == 5 { ", c!" } else { "" };
        Rule::of(&format!("{positions}, {scores}, {positions}, {positions}{weight} -> {scores}"), x, out)
    }

    fn kernel(&self, x: &[&Local], here: &Here<'_>) -> Result<Locals> {
        let out = here.out();
        use crate::engine::kernels::binary::{Binary, binary};
        let by = Classes::of(x[1].dims());
        let target = by.positions(x[2])?;
        let dx = if self.0.from_logits {
            let (dy, lse) = (by.flat(x[0])?, by.flat(x[3])?);
            let (ignore, smoothing) = (self.0.ignore_index, self.0.smoothing.get());
            kernel::cross_entropy_backward(
                &by.scores(x[1])?,
                &lse,
                &target,
                x.get(4).copied(),
                &dy,
                ignore,
                smoothing,
            )?
        } else {
            let scale = by.flat(&binary(Binary::Mul, x[0], x[3])?)?;
            kernel::nll_backward(&scale, &target, by.outer, by.classes, by.inner, self.0.ignore_index)?
        };
        Ok([dx.view_with(|t| t.reshape(&out[0].shape[..]))?].into_iter().collect())
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        if self.0.from_logits {
            return no_second(self.name());
        }
        // Linear in the losses' gradient, and independent of the scores: forward again, with minus the weights.
        let mut inputs = vec![cx.dy()?, cx.input(2)?];
        if cx.inputs() == 5 {
            inputs.push(cx.input(4)?);
        }
        let ddy = || Ok(apply_all(self.0.clone(), &inputs.iter().collect::<Vec<_>>())?.swap_remove(0));
        let mut grads: Grads = grads![cx.when(0, ddy)?];
        grads.push(cx.when(1, || cx.input(1)?.zeros_like())?);
        grads.extend((2..cx.inputs()).map(|_| None));
        Ok(grads)
    }
}

impl Tensor {
    /// Cross-entropy between these logits, `[C]`, `[N, C]` or `[N, C, …]`, and class indices (`i64`) of the shape
    /// without C.
    ///
    /// ```
    /// use dtensor::{CrossEntropy, DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let logits = Tensor::zeros([3, 10], DType::F32)?;
    /// let target = Tensor::from_slice(&[1i64, 2, -100], [3])?;
    /// let loss = logits.cross_entropy(&target, CrossEntropy::default())?;
    /// assert!((loss.item::<f32>()? - 10f32.ln()).abs() < 1e-6);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
        if !(0.0..=1.0).contains(&options.label_smoothing) {
            let message =
                format!("label_smoothing must be between 0.0 and 1.0, got {}", options.label_smoothing);
            return Err(Error::argument("cross_entropy", message));
        }
        self.class_loss(true, target, options)
    }

    /// The negative log-likelihood of class indices under these log-probabilities; shapes as in
    /// [`cross_entropy`](Tensor::cross_entropy). Label smoothing does not apply.
    #[track_caller]
    pub fn nll_loss(&self, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
        if options.label_smoothing != 0.0 {
            return Err(Error::argument("nll_loss", "label_smoothing belongs to cross_entropy"));
        }
        self.class_loss(false, target, options)
    }

    #[track_caller]
    fn class_loss(&self, from_logits: bool, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
        let op = ClassLoss {
            from_logits,
            ignore_index: options.ignore_index,
            smoothing: Bits::new(options.label_smoothing),
        };
        if options.weight.is_some_and(|weight| weight.requires_grad()) {
            let message = "no gradient flows into the class weights: detach them".into();
            return Err(Error::Autograd { op: op.name(), message });
        }
        let inputs: Vec<&Tensor> = [Some(self), Some(target), options.weight].into_iter().flatten().collect();
        let out = apply_all(op, &inputs)?;
        if options.reduction == Reduction::None {
            return Ok(out[0].clone());
        }
        // Sums over many positions would overflow half precision where their quotient does not.
        let dtype = statistics_dtype(out[0].dtype());
        let total = out[0].to_dtype(dtype)?.sum_all()?;
        let loss = match options.reduction {
            Reduction::Mean => total.div(&out[1].detach().to_dtype(dtype)?.sum_all()?)?,
            _ => total,
        };
        loss.to_dtype(out[0].dtype())
    }

    /// The squared difference with `target`.
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        if self.dims() != target.dims() {
            return Err(Error::ShapeMismatch {
                op: "mse_loss",
                why: "input and target must have the same shape",
                left: self.shape(),
                right: target.shape(),
            });
        }
        // No closure, which would call in its own name.
        let (x, target) = (prepared(self, Precision::Single)?, prepared(target, Precision::Single)?);
        let difference = x.sub(&target)?;
        reduction.apply(&difference.mul(&difference)?)
    }
}
