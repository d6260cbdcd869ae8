//! Cross-entropy: from log-probabilities (negative log-likelihood) and, fused, from logits.
//!
//! Arrays are `[outer, classes, inner]`, contiguous or not; trailing dims beyond the third count as inner.
//! Targets, losses and gradients of losses are one per `(outer, inner)` position, in that order. A position
//! whose target is `ignore_index` has loss, weight and gradient 0 whatever its logits are.

use std::mem::MaybeUninit;

use super::rows::{COLUMNS, Columns, exp_row, max_of, sum_of, sums};
use super::{copy, fill_local, fill_vec, simd};
use crate::engine::{Elem, Float, Local, Num, Real, with_float};
use crate::{Element, Error, Result};

/// Each position's class, or `None` where it is ignored.
fn classes_of(op: &'static str, target: &Local, classes: usize, ignore: i64) -> Result<Vec<Option<usize>>> {
    let class = |index: i64| match usize::try_from(index) {
        _ if index == ignore => Ok(None),
        Ok(class) if class < classes => Ok(Some(class)),
        _ => Err(Error::IndexOutOfBounds { op, index, dim: 1, size: classes }),
    };
    target.to_vec::<i64>()?.into_iter().map(class).collect()
}

/// The sizes `[outer, classes, inner]`.
fn sizes(dims: &[usize]) -> (usize, usize, usize) {
    (dims[0], dims[1], dims[2..].iter().product())
}

/// The class weights, widened.
fn widened<T: Element>(weight: Option<&Local>) -> Result<Option<Vec<T::Acc>>> {
    let widen = |weight: &Local| Ok(weight.to_vec::<T>()?.into_iter().map(T::acc).collect());
    weight.map(widen).transpose()
}

/// Each position's weight: that of its class, 0 where it is ignored.
fn weights_of<T: Float>(targets: &[Option<usize>], weight: Option<&[T::Acc]>) -> Vec<T> {
    let of = |class: usize| weight.map_or(T::Acc::ONE, |weight| weight[class]);
    targets.iter().map(|target| T::from_acc(target.map_or(T::Acc::ZERO, of))).collect()
}

/// The loss `−weight · logp` of each position's target class, and that weight.
pub(crate) fn nll_forward(
    logp: &Local,
    target: &Local,
    weight: Option<&Local>,
    ignore_index: i64,
) -> Result<(Local, Local)> {
    let (_, classes, inner) = sizes(logp.dims());
    let targets = classes_of("nll_loss", target, classes, ignore_index)?;
    let logp = logp.contiguous()?;
    with_float!("nll_loss", logp.dtype(), T => {
        let weight = widened::<T>(weight)?;
        let read = logp.read::<T>()?;
        let data = read.data();
        let loss = |(position, target): (usize, &Option<usize>)| {
            let Some(class) = *target else { return T::default() };
            let (o, i) = (position / inner, position % inner);
            let logp = data[(o * classes + class) * inner + i].acc();
            T::from_acc(-weight.as_ref().map_or(logp, |weight| weight[class] * logp))
        };
        let losses = targets.iter().enumerate().map(loss).collect();
        let weights = weights_of::<T>(&targets, weight.as_deref());
        let shape = [targets.len()];
        Ok((Local::from_vec::<T>(losses, &shape)?, Local::from_vec(weights, &shape)?))
    })
}

/// The gradient of the log-probabilities, `[outer, classes, inner]`: `−scale` at each position's target, where
/// `scale` is the gradient of its loss times its weight.
pub(crate) fn nll_backward(
    scale: &Local,
    target: &Local,
    outer: usize,
    classes: usize,
    inner: usize,
    ignore_index: i64,
) -> Result<Local> {
    let targets = classes_of("nll_loss", target, classes, ignore_index)?;
    with_float!("nll_loss", scale.dtype(), T => {
        let scales = scale.to_vec::<T>()?;
        let mut grad = vec![T::default(); outer * classes * inner];
        for (position, (target, scale)) in targets.iter().zip(scales).enumerate() {
            if let Some(class) = *target {
                let (o, i) = (position / inner, position % inner);
                grad[(o * classes + class) * inner + i] = T::from_acc(-scale.acc());
            }
        }
        Local::from_vec(grad, &[outer, classes, inner])
    })
}

/// What every position of a fused loss needs.
struct Loss<'a, A> {
    targets: &'a [Option<usize>],
    classes: usize,
    /// The class weights; none means 1 for all.
    weight: Option<&'a [A]>,
    /// The class weights again, with the ones written out, where smoothing has to go over them.
    smooth: Option<&'a [A]>,
    /// `1 − label smoothing`.
    keep: A,
    /// `label smoothing / classes`.
    spread: A,
    /// The sum of the class weights.
    weight_sum: A,
}

impl<A: Real> Loss<'_, A> {
    /// Builds one and passes it to `body`, which owns nothing of it.
    fn with<T: Float<Acc = A> + Element, R>(
        targets: &[Option<usize>],
        classes: usize,
        weight: Option<&Local>,
        label_smoothing: f64,
        body: impl FnOnce(&Loss<'_, A>) -> Result<R>,
    ) -> Result<R> {
        let weight = widened::<T>(weight)?;
        let smooth = (label_smoothing != 0.0).then(|| weight.clone().unwrap_or(vec![A::ONE; classes]));
        let loss = Loss {
            targets,
            classes,
            weight: weight.as_deref(),
            smooth: smooth.as_deref(),
            keep: A::from_f64(1.0 - label_smoothing),
            spread: A::from_f64(label_smoothing / classes as f64),
            weight_sum: smooth.as_ref().map_or(A::ZERO, |w| sum_of(w, |w| w)),
        };
        body(&loss)
    }

    #[inline(always)]
    fn weight_of(&self, class: usize) -> A {
        self.weight.map_or(A::ONE, |weight| weight[class])
    }

    /// The loss of a position whose target class has the logit `x`: everything relative to the largest logit.
    /// `weighted` is the sum of the logits, each with its class weight.
    #[inline(always)]
    fn value(&self, class: usize, x: A, log_sum: A, weighted: A) -> A {
        let likely = self.keep * self.weight_of(class) * (log_sum - x);
        if self.smooth.is_some() {
            likely + self.spread * (self.weight_sum * log_sum - weighted)
        } else {
            likely
        }
    }

    /// The factor of every probability, what is taken off at the target, and what is taken off of every class
    /// times its weight.
    #[inline(always)]
    fn factors(&self, class: usize, scale: A) -> (A, A, A) {
        let at_target = scale * self.keep * self.weight_of(class);
        let everywhere = scale * self.spread;
        (at_target + everywhere * self.weight_sum, at_target, everywhere)
    }
}

/// The cross-entropy of each position from logits, with class weights and label smoothing; each position's
/// target weight; and the logarithm of each position's sum of exponentials, in the dtype of the arithmetic.
pub(crate) fn cross_entropy_forward(
    logits: &Local,
    target: &Local,
    weight: Option<&Local>,
    ignore_index: i64,
    label_smoothing: f64,
) -> Result<(Local, Local, Local)> {
    with_float!("cross_entropy", logits.dtype(), T =>
        forward::<T>(logits, target, weight, ignore_index, label_smoothing))
}

fn forward<T: Float<Acc: Element> + Element>(
    logits: &Local,
    target: &Local,
    weight: Option<&Local>,
    ignore_index: i64,
    label_smoothing: f64,
) -> Result<(Local, Local, Local)> {
    let (outer, classes, inner) = sizes(logits.dims());
    let targets = classes_of("cross_entropy", target, classes, ignore_index)?;
    let logits = logits.contiguous()?;
    let read = logits.read::<T>()?;
    let data = &read.data()[..logits.numel()];
    let n = targets.len();
    Loss::with::<T, _>(&targets, classes, weight, label_smoothing, |loss| {
        let mut lse = vec![T::Acc::ZERO; n];
        let mut exps = vec![T::Acc::ZERO; classes * inner.min(COLUMNS)];
        // SAFETY: both functions write the loss of every position.
        let losses = unsafe {
            fill_vec::<T>(n, |out| {
                simd::<T, _>(
                    #[inline(always)]
                    || match inner {
                        1 => forward_rows(loss, data, &mut exps, &mut lse, out),
                        _ => forward_columns(loss, data, outer, inner, &mut exps, &mut lse, out),
                    },
                )
            })?
        };
        let weights = weights_of::<T>(&targets, loss.weight);
        Ok((Local::from_vec(losses, &[n])?, Local::from_vec(weights, &[n])?, Local::from_vec(lse, &[n])?))
    })
}

#[inline(always)]
fn forward_rows<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    exps: &mut [T::Acc],
    lse: &mut [T::Acc],
    out: &mut [MaybeUninit<T>],
) {
    for (row, ((&target, lse), out)) in loss.targets.iter().zip(lse).zip(out).enumerate() {
        let Some(class) = target else {
            out.write(T::default());
            continue;
        };
        let x = &data[row * loss.classes..][..loss.classes];
        let max = max_of(x);
        let log_sum = exp_row(x, max, exps).ln();
        let weighted = loss.smooth.map_or(T::Acc::ZERO, |weight| {
            sums(
                x,
                weight,
                x,
                #[inline(always)]
                |x, weight, _| [(x.acc() - max) * weight],
            )[0]
        });
        *lse = max + log_sum;
        out.write(T::from_acc(loss.value(class, x[class].acc() - max, log_sum, weighted)));
    }
}

#[inline(always)]
fn forward_columns<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    outer: usize,
    inner: usize,
    exps: &mut [T::Acc],
    lse: &mut [T::Acc],
    out: &mut [MaybeUninit<T>],
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
                let log_sum = sum[c].ln();
                let value = loss.targets[position].map_or(T::Acc::ZERO, |class| {
                    lse[position] = max[c] + log_sum;
                    let x = block.row(data, class)[c].acc() - max[c];
                    loss.value(class, x, log_sum, weighted[c])
                });
                out[position].write(T::from_acc(value));
            }
        },
    );
}

/// The gradient of the logits, from each position's `scale`, the gradient of its loss.
pub(crate) fn cross_entropy_backward(
    logits: &Local,
    lse: &Local,
    target: &Local,
    weight: Option<&Local>,
    scale: &Local,
    ignore_index: i64,
    label_smoothing: f64,
) -> Result<Local> {
    with_float!("cross_entropy", logits.dtype(), T =>
        backward::<T>(logits, lse, target, weight, scale, ignore_index, label_smoothing))
}

fn backward<T: Float<Acc: Element> + Element>(
    logits: &Local,
    lse: &Local,
    target: &Local,
    weight: Option<&Local>,
    scale: &Local,
    ignore_index: i64,
    label_smoothing: f64,
) -> Result<Local> {
    let (outer, classes, inner) = sizes(logits.dims());
    let targets = classes_of("cross_entropy", target, classes, ignore_index)?;
    let lse = lse.to_vec::<T::Acc>()?;
    let scale: Vec<T::Acc> = scale.to_vec::<T>()?.into_iter().map(T::acc).collect();
    let logits = logits.contiguous()?;
    let read = logits.read::<T>()?;
    let data = &read.data()[..logits.numel()];
    let mut exps = vec![T::Acc::ZERO; classes * inner.min(COLUMNS)];
    Loss::with::<T, _>(&targets, classes, weight, label_smoothing, |loss| {
        let fill = |out: &mut [_]| {
            simd::<T, _>(
                #[inline(always)]
                || match inner {
                    1 => backward_rows(loss, data, &lse, &scale, &mut exps, out),
                    _ => backward_columns(loss, data, &lse, &scale, (outer, inner), &mut exps, out),
                },
            )
        };
        // SAFETY: both functions write rows, or blocks of columns, that cover the array.
        unsafe { fill_local(logits.dims(), fill) }
    })
}

// The stored logarithm is rounded, which matters where logits are large, so both loops below divide by the
// sum once more instead of taking it for 1.

#[inline(always)]
fn backward_rows<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    lse: &[T::Acc],
    scale: &[T::Acc],
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
        let sum = exp_row(&data[row * n..][..n], lse[row], exps);
        let (all, at_target, everywhere) = loss.factors(class, scale[row]);
        let factor = all / sum;
        let target = exps[class] * factor - at_target;
        match loss.smooth {
            None => {
                for (out, &e) in out.iter_mut().zip(&*exps) {
                    out.write(T::from_acc(e * factor));
                }
                out[class].write(T::from_acc(target));
            }
            Some(weight) => {
                for ((out, &e), &weight) in out.iter_mut().zip(&*exps).zip(weight) {
                    out.write(T::from_acc(e * factor - everywhere * weight));
                }
                out[class].write(T::from_acc(target - everywhere * weight[class]));
            }
        }
    }
}

#[inline(always)]
fn backward_columns<T: Float>(
    loss: &Loss<'_, T::Acc>,
    data: &[T],
    lse: &[T::Acc],
    scale: &[T::Acc],
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
            let sum = block.exp(data, classes, &lse[first..first + width], exps);
            let (mut factor, mut off) = ([T::Acc::ZERO; COLUMNS], [T::Acc::ZERO; COLUMNS]);
            for c in 0..width {
                if let Some(class) = loss.targets[first + c] {
                    let (all, _, everywhere) = loss.factors(class, scale[first + c]);
                    (factor[c], off[c]) = (all / sum[c], everywhere);
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
                match loss.targets[first + c] {
                    None => (0..classes).for_each(|j| _ = block.row_mut(out, j)[c].write(T::default())),
                    Some(class) => {
                        let (_, at_target, everywhere) = loss.factors(class, scale[first + c]);
                        let off = loss.smooth.map_or(T::Acc::ZERO, |weight| everywhere * weight[class]);
                        let value = exps[class * width + c] * factor[c] - at_target - off;
                        block.row_mut(out, class)[c].write(T::from_acc(value));
                    }
                }
            }
        },
    );
}

#[cfg(test)]
mod tests;
