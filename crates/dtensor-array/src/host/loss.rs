//! Cross-entropy: from log-probabilities (negative log-likelihood) and, fused, from logits.
//!
//! Arrays are `[outer, classes, inner]`, with any strides. Dims after the third count as inner. There is one target, loss and
//! gradient of a loss for each `(outer, inner)` position, in row-major order. A position whose target is `ignore_index` has loss,
//! weight and gradient 0 for any logits.
//!
//! An array may be a shard that holds a range of the classes. Targets and class weights are always those of all classes. Functions
//! that need the largest logit of a position and the sum of its exponentials over all classes take them as arguments.

use std::mem::MaybeUninit;

use super::rows::{COLUMNS, Columns, exp_row, max_of, sum_of, sums};
use super::{copy, fill_array, simd};
use crate::{Array, Elem, Float, Num, Real, with_float};
use crate::{Device, Element, Error, Result};

mod parts;

pub(crate) use parts::{cross_entropy_losses, cross_entropy_picked};

/// The targets of a loss, and its options.
#[derive(Clone, Copy, Debug)]
pub struct ClassTargets<'a> {
    /// The target class of each position.
    pub target: &'a Array,
    /// The weight of each class, for all classes.
    pub weight: Option<&'a Array>,
    /// The first class that the array holds.
    pub first: usize,
    /// The total number of classes.
    pub classes: usize,
    /// The target of positions that are ignored.
    pub ignore_index: i64,
    /// The fraction of the target that is spread evenly over all classes.
    pub label_smoothing: f64,
}

impl ClassTargets<'_> {
    /// Returns the class of each position, or `None` if it is ignored.
    fn classes(&self, op: &'static str) -> Result<Vec<Option<usize>>> {
        let class = |index: i64| match usize::try_from(index) {
            _ if index == self.ignore_index => Ok(None),
            Ok(class) if class < self.classes => Ok(Some(class)),
            _ => Err(Error::IndexOutOfBounds { op, index, dim: 1, size: self.classes }),
        };
        self.target.copy_to_host::<i64>()?.into_iter().map(class).collect()
    }

    /// Returns an error if a target is neither a class nor `ignore_index`. On a GPU, the kernels report it later.
    pub fn check(&self, op: &'static str) -> Result<()> {
        match self.target.device() {
            Device::Cpu => self.classes(op).map(drop),
            _ => Ok(()),
        }
    }

    /// Returns the class weights, widened.
    fn widened<T: Element>(&self) -> Result<Option<Vec<T::Acc>>> {
        let widen = |weight: &Array| Ok(weight.copy_to_host::<T>()?.into_iter().map(T::acc).collect());
        self.weight.map(widen).transpose()
    }
}

/// Returns the sizes `(outer, classes, inner)`.
fn sizes(dims: &[usize]) -> (usize, usize, usize) {
    (dims[0], dims[1], dims[2..].iter().product())
}

/// Returns the index of a class in an array of `classes` classes that begins with class `first`, or `None` if it is not there.
#[inline(always)]
fn local_index(class: usize, first: usize, classes: usize) -> Option<usize> {
    class.checked_sub(first).filter(|&at| at < classes)
}

/// Returns the weight of each position: that of its class, or 0 if it is ignored.
fn weights_of<T: Float>(targets: &[Option<usize>], weight: Option<&[T::Acc]>) -> Vec<T> {
    let of = |class: usize| weight.map_or(T::Acc::ONE, |weight| weight[class]);
    targets.iter().map(|target| T::from_acc(target.map_or(T::Acc::ZERO, of))).collect()
}

/// Computes, for each position, the loss `−weight · logp` of its target class and the weight of that class. The loss is 0
/// if the array does not hold the class.
pub(crate) fn nll_forward(logp: &Array, goal: &ClassTargets<'_>) -> Result<(Array, Array)> {
    let (_, classes, inner) = sizes(logp.dims());
    let targets = goal.classes("nll_loss")?;
    let logp = logp.contiguous()?;
    with_float!("nll_loss", logp.dtype(), T => {
        let weight = goal.widened::<T>()?;
        let read = logp.read::<T>()?;
        let data = read.data();
        let loss = |(position, target): (usize, &Option<usize>)| {
            let Some(class) = *target else { return T::default() };
            let Some(at) = local_index(class, goal.first, classes) else { return T::default() };
            let (o, i) = (position / inner, position % inner);
            let logp = data[(o * classes + at) * inner + i].acc();
            T::from_acc(-weight.as_ref().map_or(logp, |weight| weight[class] * logp))
        };
        let losses = targets.iter().enumerate().map(loss).collect();
        let weights = weights_of::<T>(&targets, weight.as_deref());
        let shape = [targets.len()];
        Ok((Array::from_vec::<T>(losses, &shape)?, Array::from_vec(weights, &shape)?))
    })
}

/// Computes the gradient of the log-probabilities `[outer, classes, inner]`: `−scale` at each position's target class, and
/// zero elsewhere. `scale` is the gradient of the position's loss times its weight.
pub(crate) fn nll_backward(scale: &Array, dims: [usize; 3], goal: &ClassTargets<'_>) -> Result<Array> {
    let [_, classes, inner] = dims;
    let targets = goal.classes("nll_loss")?;
    with_float!("nll_loss", scale.dtype(), T => {
        let scales = scale.copy_to_host::<T>()?;
        let mut grad = vec![T::default(); dims.iter().product()];
        for (position, (target, scale)) in targets.iter().zip(scales).enumerate() {
            if let Some(at) = target.and_then(|class| local_index(class, goal.first, classes)) {
                let (o, i) = (position / inner, position % inner);
                grad[(o * classes + at) * inner + i] = T::from_acc(-scale.acc());
            }
        }
        Array::from_vec(grad, &dims)
    })
}

/// The arguments of a fused loss that all positions share.
struct Loss<'a, A> {
    targets: &'a [Option<usize>],
    /// The number of classes in the array.
    classes: usize,
    /// The first class in the array.
    first: usize,
    /// The weights of all classes; `None` means that all are 1.
    weight: Option<&'a [A]>,
    /// The weights of the classes in the array, all written out; `None` without label smoothing.
    smooth: Option<&'a [A]>,
    /// `1 − label smoothing`.
    keep: A,
    /// `label smoothing / total number of classes`.
    spread: A,
    /// The sum of the weights of all classes.
    weight_sum: A,
}

impl<A: Real> Loss<'_, A> {
    /// Creates the arguments for an array of `classes` classes and calls `body` with them.
    fn with<T: Float<Acc = A> + Element, R>(
        targets: &[Option<usize>],
        classes: usize,
        goal: &ClassTargets<'_>,
        body: impl FnOnce(&Loss<'_, A>) -> Result<R>,
    ) -> Result<R> {
        let weight = goal.widened::<T>()?;
        let smooth =
            (goal.label_smoothing != 0.0).then(|| weight.clone().unwrap_or(vec![A::ONE; goal.classes]));
        let loss = Loss {
            targets,
            classes,
            first: goal.first,
            weight: weight.as_deref(),
            smooth: smooth.as_ref().map(|all| &all[goal.first..][..classes]),
            keep: A::from_f64(1.0 - goal.label_smoothing),
            spread: A::from_f64(goal.label_smoothing / goal.classes as f64),
            weight_sum: smooth.as_ref().map_or(A::ZERO, |w| sum_of(w, |w| w)),
        };
        body(&loss)
    }

    /// Returns the index of a class in the array, or `None` if the array does not hold it.
    #[inline(always)]
    fn local_index(&self, class: usize) -> Option<usize> {
        local_index(class, self.first, self.classes)
    }

    #[inline(always)]
    fn weight_of(&self, class: usize) -> A {
        self.weight.map_or(A::ONE, |weight| weight[class])
    }

    /// Returns the weight of each position: that of its class, or 0 if it is ignored.
    fn weights(&self) -> Vec<A> {
        self.targets.iter().map(|target| target.map_or(A::ZERO, |class| self.weight_of(class))).collect()
    }

    /// Returns the loss of a position. All logits are relative to the largest one: `x` is the logit of the target class, `log_sum`
    /// the logarithm of the sum of exponentials, and `weighted` the sum of the logits times their class weights.
    #[inline(always)]
    fn value(&self, class: usize, x: A, log_sum: A, weighted: A) -> A {
        let target_term = self.keep * self.weight_of(class) * (log_sum - x);
        if self.smooth.is_some() {
            target_term + self.spread * (self.weight_sum * log_sum - weighted)
        } else {
            target_term
        }
    }

    /// Returns three factors of the gradient: of every probability, the term subtracted at the target, and the term subtracted
    /// at every class times its weight.
    #[inline(always)]
    fn factors(&self, class: usize, scale: A) -> (A, A, A) {
        let at_target = scale * self.keep * self.weight_of(class);
        let everywhere = scale * self.spread;
        (at_target + everywhere * self.weight_sum, at_target, everywhere)
    }
}

/// Computes the cross-entropy from logits, with class weights and label smoothing. The array must hold all classes.
pub(crate) fn cross_entropy_forward(logits: &Array, goal: &ClassTargets<'_>) -> Result<[Array; 4]> {
    with_float!("cross_entropy", logits.dtype(), T => forward::<T>(logits, goal))
}

fn forward<T: Float<Acc: Element> + Element>(logits: &Array, goal: &ClassTargets<'_>) -> Result<[Array; 4]> {
    let (outer, classes, inner) = sizes(logits.dims());
    let targets = goal.classes("cross_entropy")?;
    let logits = logits.contiguous()?;
    let read = logits.read::<T>()?;
    let data = &read.data()[..logits.numel()];
    let n = targets.len();
    Loss::with::<T, _>(&targets, classes, goal, |loss| {
        let (mut maxima, mut totals) = (vec![T::Acc::ZERO; n], vec![T::Acc::ONE; n]);
        let mut losses = vec![T::Acc::ZERO; n];
        let mut exps = vec![T::Acc::ZERO; classes * inner.min(COLUMNS)];
        simd::<T, _>(
            #[inline(always)]
            || match inner {
                1 => forward_rows(loss, data, &mut exps, &mut maxima, &mut totals, &mut losses),
                _ => {
                    let sizes = (outer, inner);
                    forward_columns(loss, data, sizes, &mut exps, &mut maxima, &mut totals, &mut losses)
                }
            },
        );
        let weights = loss.weights();
        Ok([
            Array::from_vec(losses, &[n])?,
            Array::from_vec(weights, &[n])?,
            Array::from_vec(maxima, &[n])?,
            Array::from_vec(totals, &[n])?,
        ])
    })
}

#[inline(always)]
fn forward_rows<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    exps: &mut [T::Acc],
    maxima: &mut [T::Acc],
    totals: &mut [T::Acc],
    out: &mut [T::Acc],
) {
    for (row, (&target, out)) in loss.targets.iter().zip(out).enumerate() {
        let Some(class) = target else { continue };
        let x = &data[row * loss.classes..][..loss.classes];
        let max = max_of(x);
        let sum = exp_row(x, max, exps);
        let weighted = loss.smooth.map_or(T::Acc::ZERO, |weight| {
            sums(
                x,
                weight,
                x,
                #[inline(always)]
                |x, weight, _| [(x.acc() - max) * weight],
            )[0]
        });
        (maxima[row], totals[row]) = (max, sum);
        *out = loss.value(class, x[class].acc() - max, sum.ln(), weighted);
    }
}

#[inline(always)]
fn forward_columns<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    (outer, inner): (usize, usize),
    exps: &mut [T::Acc],
    maxima: &mut [T::Acc],
    totals: &mut [T::Acc],
    out: &mut [T::Acc],
) {
    let classes = loss.classes;
    Columns::each(
        outer,
        classes,
        inner,
        #[inline(always)]
        |block| {
            let max = block.max(data, classes);
            let sum = block.exp(data, classes, &max, exps);
            let weighted = loss.smooth.map_or([T::Acc::ZERO; COLUMNS], |weight| {
                block.sum(
                    classes,
                    #[inline(always)]
                    |j, sums| {
                        for ((sum, x), &max) in sums.iter_mut().zip(block.row(data, j)).zip(&max) {
                            *sum = *sum + (x.acc() - max) * weight[j];
                        }
                    },
                )
            });
            for c in 0..block.width {
                let position = block.first + c;
                let Some(class) = loss.targets[position] else { continue };
                (maxima[position], totals[position]) = (max[c], sum[c]);
                let x = block.row(data, class)[c].acc() - max[c];
                out[position] = loss.value(class, x, sum[c].ln(), weighted[c]);
            }
        },
    );
}

/// Computes the gradient of the logits. `sums` are each position's largest logit and sum of exponentials over all classes,
/// and `scale` is the gradient of its loss, in the accumulation dtype.
pub(crate) fn cross_entropy_backward(
    logits: &Array,
    [maxima, totals]: [&Array; 2],
    scale: &Array,
    goal: &ClassTargets<'_>,
) -> Result<Array> {
    with_float!("cross_entropy", logits.dtype(), T => backward::<T>(logits, maxima, totals, scale, goal))
}

fn backward<T: Float<Acc: Element> + Element>(
    logits: &Array,
    maxima: &Array,
    totals: &Array,
    scale: &Array,
    goal: &ClassTargets<'_>,
) -> Result<Array> {
    let (outer, classes, inner) = sizes(logits.dims());
    let targets = goal.classes("cross_entropy")?;
    let (maxima, totals) = (maxima.copy_to_host::<T::Acc>()?, totals.copy_to_host::<T::Acc>()?);
    let scale = scale.copy_to_host::<T::Acc>()?;
    let logits = logits.contiguous()?;
    let read = logits.read::<T>()?;
    let data = &read.data()[..logits.numel()];
    let mut exps = vec![T::Acc::ZERO; classes * inner.min(COLUMNS)];
    Loss::with::<T, _>(&targets, classes, goal, |loss| {
        let saved = Saved { maxima: &maxima, totals: &totals, scale: &scale };
        let fill = |out: &mut [_]| {
            simd::<T, _>(
                #[inline(always)]
                || match inner {
                    1 => backward_rows(loss, data, &saved, &mut exps, out),
                    _ => backward_columns(loss, data, &saved, (outer, inner), &mut exps, out),
                },
            )
        };
        // SAFETY: both functions write rows, or blocks of columns, that cover the array.
        unsafe { fill_array(logits.dims(), fill) }
    })
}

/// The values of each position that the backward pass needs.
struct Saved<'a, A> {
    maxima: &'a [A],
    totals: &'a [A],
    scale: &'a [A],
}

#[inline(always)]
fn backward_rows<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    saved: &Saved<'_, T::Acc>,
    exps: &mut [T::Acc],
    out: &mut [MaybeUninit<T>],
) {
    let n = loss.classes;
    for (row, &target) in loss.targets.iter().enumerate() {
        let out = &mut out[row * n..][..n];
        let Some(class) = target else {
            copy::fill(out, T::default());
            continue;
        };
        let (all, at_target, everywhere) = loss.factors(class, saved.scale[row]);
        let (max, factor) = (saved.maxima[row], all / saved.totals[row]);
        let x = &data[row * n..][..n];
        // The exponentials are a separate loop because they vectorise best so.
        for (e, &x) in exps.iter_mut().zip(x) {
            *e = (x.acc() - max).exp();
        }
        match loss.smooth {
            None => {
                for (out, &e) in out.iter_mut().zip(&*exps) {
                    out.write(T::from_acc(e * factor));
                }
            }
            Some(weight) => {
                for ((out, &e), &weight) in out.iter_mut().zip(&*exps).zip(weight) {
                    out.write(T::from_acc(e * factor - everywhere * weight));
                }
            }
        }
        if let Some(at) = loss.local_index(class) {
            let off = loss.smooth.map_or(T::Acc::ZERO, |weight| everywhere * weight[at]);
            out[at].write(T::from_acc(exps[at] * factor - at_target - off));
        }
    }
}

#[inline(always)]
fn backward_columns<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    saved: &Saved<'_, T::Acc>,
    (outer, inner): (usize, usize),
    exps: &mut [T::Acc],
    out: &mut [MaybeUninit<T>],
) {
    let classes = loss.classes;
    Columns::each(
        outer,
        classes,
        inner,
        #[inline(always)]
        |block| {
            let (first, width) = (block.first, block.width);
            block.exp(data, classes, &saved.maxima[first..first + width], exps);
            let (mut factor, mut off) = ([T::Acc::ZERO; COLUMNS], [T::Acc::ZERO; COLUMNS]);
            for c in 0..width {
                if let Some(class) = loss.targets[first + c] {
                    let (all, _, everywhere) = loss.factors(class, saved.scale[first + c]);
                    (factor[c], off[c]) = (all / saved.totals[first + c], everywhere);
                }
            }
            for j in 0..classes {
                let off_weight = loss.smooth.map_or(T::Acc::ZERO, |weight| weight[j]);
                let exps = &exps[j * width..][..width];
                for (((out, &e), &factor), &off) in
                    block.row_mut(out, j).iter_mut().zip(exps).zip(&factor).zip(&off)
                {
                    out.write(T::from_acc(e * factor - off * off_weight));
                }
            }
            for c in 0..width {
                let Some(class) = loss.targets[first + c] else {
                    (0..classes).for_each(|j| _ = block.row_mut(out, j)[c].write(T::default()));
                    continue;
                };
                if let Some(at) = loss.local_index(class) {
                    let (_, at_target, everywhere) = loss.factors(class, saved.scale[first + c]);
                    let off = loss.smooth.map_or(T::Acc::ZERO, |weight| everywhere * weight[at]);
                    let value = exps[at * width + c] * factor[c] - at_target - off;
                    block.row_mut(out, at)[c].write(T::from_acc(value));
                }
            }
        },
    );
}

#[cfg(test)]
mod tests;
