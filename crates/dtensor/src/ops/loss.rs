//! Losses: `cross_entropy`, `nll_loss` and `mse_loss`.

use super::loss_parallel::{LossScope, place_targets, reduce_partials, replicate_like};
use super::{
    Arrays, Bits, Here, Metas, Op, Precision, Together, grads, need_dtype, need_float, no_second, reshaped,
    statistics_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use std::panic::Location;

use crate::dispatch::{autocast_dtype, cast_input, cast_metas, check_same_mesh, locate};
use crate::op::{apply, apply_all};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::cast::cast;
use dtensor_array::kernels::loss::{self as kernel, ClassTargets};
use dtensor_array::kernels::softmax as parts;
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::Rule;

/// How the losses of all positions are reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Mean, weighted by class weights if given.
    #[default]
    Mean,
    /// Sum.
    Sum,
    /// No reduction: one loss per position.
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

/// Options of [`cross_entropy`](Tensor::cross_entropy) and [`nll_loss`](Tensor::nll_loss).
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions<'a> {
    /// Class weights: one factor per class.
    pub weight: Option<&'a Tensor>,
    /// Targets with this value are ignored; −100 by default.
    pub ignore_index: i64,
    /// How the losses are reduced.
    pub reduction: Reduction,
    /// Label smoothing: the share of the target that is spread evenly over all classes, from 0 to 1.
    pub label_smoothing: f64,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        CrossEntropyOptions {
            weight: None,
            ignore_index: -100,
            reduction: Reduction::Mean,
            label_smoothing: 0.0,
        }
    }
}

/// The sizes of the class dim, and of all dims before and after it.
#[derive(Clone, Copy, Debug)]
struct Classes {
    outer: usize,
    classes: usize,
    inner: usize,
}

impl Classes {
    /// Splits the shape of logits `[C]`, `[N, C]` or `[N, C, …]`.
    fn of(shape: &[usize]) -> Classes {
        match shape {
            [classes] => Classes { outer: 1, classes: *classes, inner: 1 },
            [outer, classes, inner @ ..] => {
                Classes { outer: *outer, classes: *classes, inner: inner.iter().product() }
            }
            [] => Classes { outer: 1, classes: 1, inner: 1 },
        }
    }

    fn reshape_logits(self, x: &Array) -> Result<Array> {
        x.contiguous()?.reshape(&[self.outer, self.classes, self.inner])
    }

    fn reshape_positions(self, x: &Array) -> Result<Array> {
        x.contiguous()?.reshape(&[self.outer, self.inner])
    }

    fn flat(self, x: &Array) -> Result<Array> {
        x.flatten()
    }
}

/// Returns the shape of the targets for these logits.
fn target_shape(op: &'static str, logits: &Meta) -> Result<Shape> {
    match &logits.shape[..] {
        [] => Err(Error::argument(op, "the input must have a class dim")),
        [_] => Ok(Shape::scalar()),
        [outer, _, inner @ ..] => Ok([*outer].iter().chain(inner).copied().collect()),
    }
}

/// Returns the rule's dim names of logits, and of tensors with one number per position.
fn by_class(logits: &Meta) -> (&'static str, &'static str) {
    if logits.shape.ndim() == 1 { ("c", "") } else { ("n c …", "n …") }
}

/// Returns the class dim of logits with this number of dims.
fn class_dim(rank: usize) -> usize {
    if rank == 1 { 0 } else { 1 }
}

/// The loss of each position. Inputs: logits (or log-probabilities), targets, and class weights if given. Outputs:
/// the losses, the weight of each position, and, for logits, the maximum and the sum of exponentials relative to
/// it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassLoss {
    from_logits: bool,
    /// Half-precision logits have losses in single precision. As precise as casting the logits, which are large.
    widens: bool,
    ignore_index: i64,
    smoothing: Bits,
    /// Records whether the operator was applied inside [`loss_parallel`](crate::parallel::loss_parallel).
    scope: LossScope,
}

impl Op for ClassLoss {
    fn name(&self) -> &'static str {
        if self.from_logits { "cross_entropy" } else { "nll_loss" }
    }

    fn precision(&self) -> Precision {
        if self.widens { Precision::AsGiven } else { Precision::Single }
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
        let statistics = Meta { dtype: statistics_dtype(losses.dtype), ..losses.clone() };
        let losses = if self.widens { statistics.clone() } else { losses };
        let mut out: Metas = [losses.clone(), losses].into_iter().collect();
        if self.from_logits {
            out.extend([statistics.clone(), statistics]);
        }
        Ok(out)
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (logits, positions) = by_class(&x[0]);
        // All class weights are needed, because their sum is.
        let weight = if x.len() == 3 { ", w!" } else { "" };
        let out_of = vec![positions; out.len()].join(", ");
        let rule = Rule::of(&format!("{logits}, {positions}{weight} -> {out_of}"), x, out)?;
        rule.merging_along("c")?.contiguous("c")
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let by = Classes::of(x[0].dims());
        let (logits, target) = (by.reshape_logits(x[0])?, by.reshape_positions(x[1])?);
        let goal = self.goal(&target, x.get(2).copied(), 0, here);
        if self.from_logits {
            return reshape_outputs(kernel::cross_entropy_forward(&logits, &goal)?, here);
        }
        let (losses, weights) = kernel::nll_forward(&logits, &goal)?;
        reshape_outputs([losses, weights], here)
    }

    fn together(&self, x: &[&Array], known: &[Array], here: &Here<'_>) -> Result<Together> {
        let by = Classes::of(x[0].dims());
        let (logits, target) = (by.reshape_logits(x[0])?, by.reshape_positions(x[1])?);
        let goal = self.goal(&target, x.get(2).copied(), 0, here);
        if !self.from_logits {
            // Each target's class is on one rank only; the other ranks add zeros.
            let (losses, weights) = kernel::nll_forward(&logits, &goal)?;
            return Ok(match known {
                [] => Together::Reduce(losses, ReduceOp::Sum),
                [losses, ..] => Together::Done(reshape_outputs([losses.clone(), weights], here)?),
            });
        }
        Ok(match known {
            [] => {
                // Targets out of range return an error on all ranks that have the position, before any collective.
                goal.check(self.name())?;
                Together::Reduce(parts::maxima(&logits, 1)?, ReduceOp::Max)
            }
            [max] => Together::Reduce(parts::exp_sums(&logits, max, 1)?, ReduceOp::Sum),
            [max, _] => Together::Reduce(kernel::cross_entropy_picked(&logits, max, &goal)?, ReduceOp::Sum),
            [max, sum, picked, ..] => {
                let losses = kernel::cross_entropy_losses(&logits, [max, sum, picked], &goal)?;
                Together::Done(reshape_outputs(losses, here)?)
            }
        })
    }

    fn saves(&self) -> Saves {
        Saves::only(&[0, 1, 2], self.saved_outputs())
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let mut inputs = vec![cx.dy()?, cx.input(0)?, cx.input(1)?];
        // Weights and statistics count as constants in the backward pass.
        for &output in self.saved_outputs() {
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
    /// Returns the kernel's targets and options; `logits` is the operator's input that has the logits.
    fn goal<'a>(
        &self,
        target: &'a Array,
        weight: Option<&'a Array>,
        logits: usize,
        here: &Here<'_>,
    ) -> ClassTargets<'a> {
        let whole = &here.whole(logits).shape;
        let dim = class_dim(whole.ndim());
        ClassTargets {
            target,
            weight,
            first: here.offset(logits, dim),
            classes: whole[dim],
            ignore_index: self.ignore_index,
            label_smoothing: self.smoothing.get(),
        }
    }

    /// Returns the outputs saved for backward: the maximum and the sum of exponentials for logits, else the
    /// weights.
    fn saved_outputs(&self) -> &'static [u32] {
        if self.from_logits { &[2, 3] } else { &[1] }
    }
}

/// Gives the outputs the local shape and the dtype of their metas.
fn reshape_outputs<const N: usize>(values: [Array; N], here: &Here<'_>) -> Result<Arrays> {
    let shape = &here.out()[0].shape[..];
    values.into_iter().zip(here.out()).map(|(y, meta)| cast(&y, meta.dtype)?.reshape(shape)).collect()
}

/// The gradient of the logits, computed from the gradient of the losses, the logits, the targets, the saved outputs
/// and the class weights.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassLossGrad(ClassLoss);

impl ClassLossGrad {
    /// Returns the index of the class weights among the inputs, if given.
    fn weight(&self, inputs: usize) -> Option<usize> {
        let before = 3 + self.0.saved_outputs().len();
        (inputs > before).then_some(before)
    }
}

impl Op for ClassLossGrad {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[1].clone()].into())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (logits, positions) = by_class(&x[1]);
        let constants = vec![positions; self.0.saved_outputs().len()].join(", ");
        let weight = if self.weight(x.len()).is_some() { ", w!" } else { "" };
        let text = format!("{positions}, {logits}, {positions}, {constants}{weight} -> {logits}");
        Rule::of(&text, x, out)?.contiguous("c")
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        use dtensor_array::kernels::binary::{Binary, binary};
        let by = Classes::of(x[1].dims());
        let target = by.reshape_positions(x[2])?;
        let goal = self.0.goal(&target, self.weight(x.len()).map(|i| x[i]), 1, here);
        let dx = if self.0.from_logits {
            let (dy, known) = (by.flat(x[0])?, [&by.flat(x[3])?, &by.flat(x[4])?]);
            let dy = cast(&dy, known[0].dtype())?;
            kernel::cross_entropy_backward(&by.reshape_logits(x[1])?, known, &dy, &goal)?
        } else {
            let scale = by.flat(&binary(Binary::Mul, x[0], x[3])?)?;
            kernel::nll_backward(&scale, [by.outer, by.classes, by.inner], &goal)?
        };
        reshape_outputs([dx], here)
    }

    fn saves(&self) -> Saves {
        Saves::INPUTS
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        if self.0.from_logits {
            return no_second(self.name());
        }
        // This operator is linear in the losses' gradient and independent of the log-probabilities, so its gradient
        // is the forward operator applied to the incoming gradient.
        let mut inputs = vec![cx.dy()?, cx.input(2)?];
        if let Some(weight) = self.weight(cx.inputs()) {
            inputs.push(cx.input(weight)?);
        }
        let ddy = || {
            let _explicit = self.0.scope.allow_merging();
            Ok(apply_all(self.0.clone(), &inputs.iter().collect::<Vec<_>>())?.swap_remove(0))
        };
        let mut grads: Grads = grads![cx.when(0, ddy)?];
        grads.push(cx.when(1, || cx.input(1)?.zeros_like())?);
        grads.extend((2..cx.inputs()).map(|_| None));
        Ok(grads)
    }
}

impl Tensor {
    /// Computes the cross-entropy between these logits, `[C]`, `[N, C]` or `[N, C, …]`, and class indices (`i64`)
    /// of the same shape without C.
    ///
    /// On a mesh, a class dim sharded with [`Shard`](crate::Shard) stays sharded: forward reduces three numbers per
    /// position over the ranks, backward needs no communication. See
    /// [`loss_parallel`](crate::parallel::loss_parallel).
    ///
    /// ```
    /// use dtensor::{CrossEntropyOptions, DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let logits = Tensor::zeros([3, 10], DType::F32)?;
    /// let target = Tensor::from_slice(&[1i64, 2, -100], [3])?;
    /// let loss = logits.cross_entropy(&target, CrossEntropyOptions::default())?;
    /// assert!((loss.item::<f32>()? - 10f32.ln()).abs() < 1e-6);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor, options: CrossEntropyOptions<'_>) -> Result<Tensor> {
        if !(0.0..=1.0).contains(&options.label_smoothing) {
            let message =
                format!("label_smoothing must be between 0.0 and 1.0, got {}", options.label_smoothing);
            return Err(Error::argument("cross_entropy", message));
        }
        self.class_loss(true, target, options)
    }

    /// Computes the negative log-likelihood of class indices under these log-probabilities, with shapes as in
    /// [`cross_entropy`](Tensor::cross_entropy). Returns an error for label smoothing.
    ///
    /// ```
    /// # use dtensor::{CrossEntropyOptions, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let log_probabilities = Tensor::from_slice(&[-1f32, -2., -3., -4.], [2, 2])?;
    /// let target = Tensor::from_slice(&[0i64, 1], [2])?;
    /// assert_eq!(log_probabilities.nll_loss(&target, CrossEntropyOptions::default())?.item::<f32>()?, 2.5);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn nll_loss(&self, target: &Tensor, options: CrossEntropyOptions<'_>) -> Result<Tensor> {
        if options.label_smoothing != 0.0 {
            return Err(Error::argument("nll_loss", "label_smoothing is supported by cross_entropy only"));
        }
        self.class_loss(false, target, options)
    }

    #[track_caller]
    fn class_loss(
        &self,
        from_logits: bool,
        target: &Tensor,
        options: CrossEntropyOptions<'_>,
    ) -> Result<Tensor> {
        let is_half = matches!(self.dtype(), DType::F16 | DType::BF16);
        let op = ClassLoss {
            from_logits,
            widens: from_logits && is_half && options.weight.is_none() && autocast_dtype().is_some(),
            ignore_index: options.ignore_index,
            smoothing: Bits::new(options.label_smoothing),
            scope: LossScope::current(),
        };
        if options.weight.is_some_and(|weight| weight.requires_grad()) {
            let message =
                "the class weights require grad, but they get no gradient: call `detach` on them".into();
            return Err(Error::Argument { op: op.name(), message });
        }
        let (mut target, mut weight) = (target.clone(), options.weight.cloned());
        if op.scope.is_set() {
            // Check shapes before any communication.
            let inputs: Vec<&Tensor> =
                [Some(self), Some(&target), options.weight].into_iter().flatten().collect();
            op.shape(&cast_metas(&op, &inputs))?;
            target = place_targets(op.name(), self, &target, class_dim(self.ndim()))?;
            weight = weight.map(|weight| replicate_like(op.name(), self, "weight", &weight)).transpose()?;
        }
        let inputs: Vec<&Tensor> =
            [Some(self), Some(&target), weight.as_ref()].into_iter().flatten().collect();
        let scope = op.scope;
        let out = {
            let _explicit = scope.allow_merging();
            apply_all(op, &inputs)?
        };
        if options.reduction == Reduction::None {
            return Ok(out[0].clone());
        }
        // Sum in `f32`: in half precision, sums over many positions could overflow although their quotient does
        // not.
        let dtype = statistics_dtype(out[0].dtype());
        let total = out[0].to_dtype(dtype)?.sum_all()?;
        let mut loss = match options.reduction {
            Reduction::Mean => {
                let weights = out[1].detach().to_dtype(dtype)?.sum_all()?;
                total.div(&if scope.is_set() { reduce_partials(&weights)? } else { weights })?
            }
            _ => total,
        };
        if scope.is_set() && dtype != out[0].dtype() {
            loss = reduce_partials(&loss)?;
        }
        loss.to_dtype(out[0].dtype())
    }

    /// Computes the squared difference between this tensor and `target`, of equal shape.
    ///
    /// ```
    /// use dtensor::{Reduction, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let (x, target) = (Tensor::from_slice(&[1f32, 2.], [2])?, Tensor::from_slice(&[1f32, 4.], [2])?);
    /// assert_eq!(x.mse_loss(&target, Reduction::Mean)?.item::<f32>()?, 2.0);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let at = Location::caller();
        let located = |error| locate(error, &[self, target], at);
        if self.dims() != target.dims() {
            return Err(located(Error::ShapeMismatch {
                op: "mse_loss",
                why: "input and target must have the same shape",
                left: self.shape(),
                right: target.shape(),
            }));
        }
        check_same_mesh("mse_loss", &[self, target]).map_err(located)?;
        // No closure, so that collectives carry the source line of the caller.
        let (x, target) = (cast_input(self, Precision::Single)?, cast_input(target, Precision::Single)?);
        let difference = x.sub(&target)?;
        reduction.apply(&difference.mul(&difference)?)
    }
}
