//! Losses.

use super::loss_parallel::{Asked, place_targets, replicate_beside, without_partials};
use super::{
    Arrays, Bits, Here, Metas, Op, Precision, Together, grads, need_dtype, need_float, no_second, reshaped,
    statistics_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::dispatch::{cast_metas, one_mesh, prepared};
use crate::{Error, Result, Tensor, apply, apply_all};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::loss::{self as kernel, Goal};
use dtensor_array::kernels::softmax as parts;
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::Rule;

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

    fn scores(self, x: &Array) -> Result<Array> {
        x.contiguous()?.reshape(&[self.outer, self.classes, self.inner])
    }

    fn positions(self, x: &Array) -> Result<Array> {
        x.contiguous()?.reshape(&[self.outer, self.inner])
    }

    fn flat(self, x: &Array) -> Result<Array> {
        x.flatten()
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

/// The names of the dims of scores, and of one number per position.
fn by_class(scores: &Meta) -> (&'static str, &'static str) {
    if scores.shape.rank() == 1 { ("c", "") } else { ("n c …", "n …") }
}

/// The class dim of scores that have so many.
fn class_dim(rank: usize) -> usize {
    if rank == 1 { 0 } else { 1 }
}

/// The loss of each position. Inputs: scores (logits, or log-probabilities), targets, and class weights if there are
/// any. Outputs: the losses, the weight of each position, and for logits the largest one and the sum of their exponentials
/// relative to that.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassLoss {
    from_logits: bool,
    ignore_index: i64,
    smoothing: Bits,
    /// Whether it was applied inside [`loss_parallel`](crate::parallel::loss_parallel).
    asked: Asked,
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
            let statistics = Meta { dtype: statistics, ..losses };
            out.extend([statistics.clone(), statistics]);
        }
        Ok(out)
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (scores, positions) = by_class(&x[0]);
        // The weights of all classes are needed for the sum of them.
        let weight = if x.len() == 3 { ", w!" } else { "" };
        let out_of = vec![positions; out.len()].join(", ");
        let rule = Rule::of(&format!("{scores}, {positions}{weight} -> {out_of}"), x, out)?;
        rule.merging_along("c")?.contiguous("c")
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let by = Classes::of(x[0].dims());
        let (scores, target) = (by.scores(x[0])?, by.positions(x[1])?);
        let goal = self.goal(&target, x.get(2).copied(), 0, here);
        if self.from_logits {
            return shaped(kernel::cross_entropy_forward(&scores, &goal)?, here);
        }
        let (losses, weights) = kernel::nll_forward(&scores, &goal)?;
        shaped([losses, weights], here)
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        let by = Classes::of(x[0].dims());
        let (scores, target) = (by.scores(x[0])?, by.positions(x[1])?);
        let goal = self.goal(&target, x.get(2).copied(), 0, here);
        if !self.from_logits {
            // Targets are of one rank only: the others add zeros.
            let (losses, weights) = kernel::nll_forward(&scores, &goal)?;
            return Ok(match known {
                [] => Together::Reduce(losses, ReduceOp::Sum),
                [losses, ..] => Together::Done(shaped([losses.clone(), weights], here)?),
            });
        }
        Ok(match known {
            [] => {
                // A target that is no class is found by all that have its position, before they meet.
                goal.check(self.name())?;
                Together::Reduce(parts::maxima(&scores, 1)?, ReduceOp::Max)
            }
            [max] => Together::Reduce(parts::exp_sums(&scores, max, 1)?, ReduceOp::Sum),
            [max, _] => Together::Reduce(kernel::cross_entropy_picked(&scores, max, &goal)?, ReduceOp::Sum),
            [max, sum, picked, ..] => {
                let losses = kernel::cross_entropy_losses(&scores, [max, sum, picked], &goal)?;
                Together::Done(shaped(losses, here)?)
            }
        })
    }

    fn saves(&self) -> Saves {
        Saves::only(&[0, 1, 2], self.kept())
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let mut inputs = vec![cx.dy()?, cx.input(0)?, cx.input(1)?];
        // Weights and sums are constants of the backward pass.
        for &output in self.kept() {
            inputs.push(cx.output(output as usize)?.detach());
        }
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

impl ClassLoss {
    /// What the losses of scores, the input `scores` of an operator, are taken against.
    fn goal<'a>(
        &self,
        target: &'a Array,
        weight: Option<&'a Array>,
        scores: usize,
        here: &Here<'_>,
    ) -> Goal<'a> {
        let whole = &here.whole(scores).shape;
        let dim = class_dim(whole.rank());
        Goal {
            target,
            weight,
            first: here.offset(scores, dim),
            classes: whole[dim],
            ignore_index: self.ignore_index,
            label_smoothing: self.smoothing.get(),
        }
    }

    /// The outputs that the gradient is given: what the logits' exponentials were relative to and add up to, or the weights.
    fn kept(&self) -> &'static [u32] {
        if self.from_logits { &[2, 3] } else { &[1] }
    }
}

/// Numbers for all positions in the shape that they have here.
fn shaped<const N: usize>(values: [Array; N], here: &Here<'_>) -> Result<Arrays> {
    let shape = &here.out()[0].shape[..];
    values.into_iter().map(|y| y.reshape(shape)).collect()
}

/// The gradient of the scores from that of the losses, the scores, the targets, the saved outputs and the class
/// weights.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassLossGrad(ClassLoss);

impl ClassLossGrad {
    /// Which of so many inputs are the class weights, if there are any.
    fn weight(&self, inputs: usize) -> Option<usize> {
        let before = 3 + self.0.kept().len();
        (inputs > before).then_some(before)
    }
}

impl Op for ClassLossGrad {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[1].clone()].into_iter().collect())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (scores, positions) = by_class(&x[1]);
        let constants = vec![positions; self.0.kept().len()].join(", ");
        let weight = if self.weight(x.len()).is_some() { ", w!" } else { "" };
        let text = format!("{positions}, {scores}, {positions}, {constants}{weight} -> {scores}");
        Rule::of(&text, x, out)?.contiguous("c")
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        use dtensor_array::kernels::binary::{Binary, binary};
        let by = Classes::of(x[1].dims());
        let target = by.positions(x[2])?;
        let goal = self.0.goal(&target, self.weight(x.len()).map(|i| x[i]), 1, here);
        let dx = if self.0.from_logits {
            let (dy, known) = (by.flat(x[0])?, [&by.flat(x[3])?, &by.flat(x[4])?]);
            kernel::cross_entropy_backward(&by.scores(x[1])?, known, &dy, &goal)?
        } else {
            let scale = by.flat(&binary(Binary::Mul, x[0], x[3])?)?;
            kernel::nll_backward(&scale, [by.outer, by.classes, by.inner], &goal)?
        };
        shaped([dx], here)
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
        if let Some(weight) = self.weight(cx.inputs()) {
            inputs.push(cx.input(weight)?);
        }
        let ddy = || {
            let _allowed = self.0.asked.allow();
            Ok(apply_all(self.0.clone(), &inputs.iter().collect::<Vec<_>>())?.swap_remove(0))
        };
        let mut grads: Grads = grads![cx.when(0, ddy)?];
        grads.push(cx.when(1, || cx.input(1)?.zeros_like())?);
        grads.extend((2..cx.inputs()).map(|_| None));
        Ok(grads)
    }
}

impl Tensor {
    /// Cross-entropy between these logits, `[C]`, `[N, C]` or `[N, C, …]`, and class indices (`i64`) of the
    /// shape without C. Where C is cut, each rank having some classes one after the other, it stays so: a few
    /// numbers per position are reduced, three times on the way forward and never on the way back
    /// ([`loss_parallel`](crate::parallel::loss_parallel)).
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
            asked: Asked::now(),
        };
        if options.weight.is_some_and(|weight| weight.requires_grad()) {
            let message = "no gradient flows into the class weights: detach them".into();
            return Err(Error::Argument { op: op.name(), message });
        }
        let (mut target, mut weight) = (target.clone(), options.weight.cloned());
        if op.asked.is_set() {
            // Before anything is moved.
            let inputs: Vec<&Tensor> =
                [Some(self), Some(&target), options.weight].into_iter().flatten().collect();
            op.shape(&cast_metas(&op, &inputs))?;
            target = place_targets(op.name(), self, &target, class_dim(self.rank()))?;
            weight = weight.map(|weight| replicate_beside(self, &weight)).transpose()?;
        }
        let inputs: Vec<&Tensor> =
            [Some(self), Some(&target), weight.as_ref()].into_iter().flatten().collect();
        let asked = op.asked;
        let out = {
            let _allowed = asked.allow();
            apply_all(op, &inputs)?
        };
        if options.reduction == Reduction::None {
            return Ok(out[0].clone());
        }
        // Sums over many positions would overflow half precision where their quotient does not.
        let dtype = statistics_dtype(out[0].dtype());
        let total = out[0].to_dtype(dtype)?.sum_all()?;
        let mut loss = match options.reduction {
            Reduction::Mean => {
                let weights = out[1].detach().to_dtype(dtype)?.sum_all()?;
                total.div(&if asked.is_set() { without_partials(&weights)? } else { weights })?
            }
            _ => total,
        };
        if asked.is_set() && dtype != out[0].dtype() {
            loss = without_partials(&loss)?;
        }
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
        one_mesh("mse_loss", &[self, target])?;
        // No closure, which would call in its own name.
        let (x, target) = (prepared(self, Precision::Single)?, prepared(target, Precision::Single)?);
        let difference = x.sub(&target)?;
        reduction.apply(&difference.mul(&difference)?)
    }
}
