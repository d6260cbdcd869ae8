//! Cross-entropy over sharded classes: the terms of each shard, and the losses from the summed terms.

use super::*;

/// Computes the other terms of a cross-entropy over sharded classes, for one shard. The terms of all shards must be
/// summed for [`cross_entropy_losses`].
pub(crate) fn cross_entropy_picked(logits: &Array, maxima: &Array, goal: &ClassTargets<'_>) -> Result<Array> {
    with_float!("cross_entropy", logits.dtype(), T => picked::<T>(logits, maxima, goal))
}

fn picked<T: Float<Acc: Element> + Element>(
    logits: &Array,
    maxima: &Array,
    goal: &ClassTargets<'_>,
) -> Result<Array> {
    let (outer, classes, inner) = sizes(logits.dims());
    let targets = goal.classes("cross_entropy")?;
    let maxima = maxima.copy_to_host::<T::Acc>()?;
    let logits = logits.contiguous()?;
    let read = logits.read::<T>()?;
    let data = &read.data()[..logits.numel()];
    let n = targets.len();
    Loss::with::<T, _>(&targets, classes, goal, |loss| {
        let of = |(position, target): (usize, &Option<usize>)| {
            let Some(at) = target.and_then(|class| loss.local_index(class)) else { return T::Acc::ZERO };
            let (o, i) = (position / inner, position % inner);
            data[(o * classes + at) * inner + i].acc() - maxima[position]
        };
        let mut out: Vec<T::Acc> = targets.iter().enumerate().map(of).collect();
        if let Some(weight) = loss.smooth {
            out.resize(2 * n, T::Acc::ZERO);
            let weighted = &mut out[n..];
            simd::<T, _>(
                #[inline(always)]
                || sum_weighted(data, weight, &maxima, (outer, inner), weighted),
            );
        }
        let rows = if loss.smooth.is_some() { 2 } else { 1 };
        Array::from_vec(out, &[rows, n])
    })
}

/// Sums, for each position, the differences of the logits from the largest one times the class weights.
#[inline(always)]
fn sum_weighted<T: Float>(
    data: &[T],
    weight: &[T::Acc],
    maxima: &[T::Acc],
    (outer, inner): (usize, usize),
    out: &mut [T::Acc],
) {
    let classes = weight.len();
    if inner == 1 {
        for (row, (out, &max)) in out.iter_mut().zip(maxima).enumerate() {
            let x = &data[row * classes..][..classes];
            *out = sums(
                x,
                weight,
                x,
                #[inline(always)]
                |x, weight, _| [(x.acc() - max) * weight],
            )[0];
        }
        return;
    }
    Columns::each(
        outer,
        classes,
        inner,
        #[inline(always)]
        |block| {
            let maxima = &maxima[block.first..][..block.width];
            let totals = block.sum(
                classes,
                #[inline(always)]
                |j, sums| {
                    for ((sum, x), &max) in sums.iter_mut().zip(block.row(data, j)).zip(maxima) {
                        *sum = *sum + (x.acc() - max) * weight[j];
                    }
                },
            );
            out[block.first..][..block.width].copy_from_slice(&totals[..block.width]);
        },
    );
}

/// Computes the cross-entropy from values that are reduced over all shards: the largest logits, the sums of exponentials,
/// and the summed terms of [`cross_entropy_picked`].
pub(crate) fn cross_entropy_losses(
    like: &Array,
    [maxima, totals, picked]: [&Array; 3],
    goal: &ClassTargets<'_>,
) -> Result<[Array; 4]> {
    with_float!("cross_entropy", like.dtype(), T => losses::<T>(maxima, totals, picked, goal))
}

fn losses<T: Float<Acc: Element> + Element>(
    maxima: &Array,
    totals: &Array,
    picked: &Array,
    goal: &ClassTargets<'_>,
) -> Result<[Array; 4]> {
    let targets = goal.classes("cross_entropy")?;
    let n = targets.len();
    let (mut maxima, mut totals) = (maxima.copy_to_host::<T::Acc>()?, totals.copy_to_host::<T::Acc>()?);
    let picked = picked.copy_to_host::<T::Acc>()?;
    // This step needs no logits, so the number of local classes is 0.
    Loss::with::<T, _>(&targets, 0, goal, |loss| {
        let of = |(position, target): (usize, &Option<usize>)| {
            let Some(class) = *target else {
                (maxima[position], totals[position]) = (T::Acc::ZERO, T::Acc::ONE);
                return T::Acc::ZERO;
            };
            let weighted = if loss.smooth.is_some() { picked[n + position] } else { T::Acc::ZERO };
            loss.value(class, picked[position], totals[position].ln(), weighted)
        };
        let losses: Vec<T::Acc> = targets.iter().enumerate().map(of).collect();
        let weights = loss.weights();
        Ok([
            Array::from_vec(losses, &[n])?,
            Array::from_vec(weights, &[n])?,
            Array::from_vec(maxima, &[n])?,
            Array::from_vec(totals, &[n])?,
        ])
    })
}
