//! Tests that compare the losses with their formulas in double precision.

use super::super::testing::{FLOATS, assert_close, ids, local, noise, strided, tolerance, values};
use super::*;
use crate::DType;

const IGNORE: i64 = -100;

/// Creates the targets of a loss whose array holds all classes.
fn goal<'a>(
    target: &'a Array,
    weight: Option<&'a Array>,
    classes: usize,
    label_smoothing: f64,
) -> ClassTargets<'a> {
    ClassTargets { target, weight, first: 0, classes, ignore_index: IGNORE, label_smoothing }
}

/// Returns targets for `n` positions. Every fifth one is ignored.
fn some_targets(n: usize, classes: usize) -> Vec<i64> {
    (0..n).map(|i| if i % 5 == 3 { IGNORE } else { ((i * 7 + 1) % classes) as i64 }).collect()
}

/// Computes losses, weights and the gradient of the logits by the formula. `scale` is the gradient of each loss.
fn naive(
    x: &[f64],
    (outer, classes, inner): (usize, usize, usize),
    targets: &[i64],
    weight: &[f64],
    smoothing: f64,
    scale: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let n = outer * inner;
    let (mut losses, mut weights, mut grad) = (vec![0.0; n], vec![0.0; n], vec![0.0; x.len()]);
    for p in 0..n {
        if targets[p] == IGNORE {
            continue;
        }
        let t = targets[p] as usize;
        let at = |c: usize| (p / inner * classes + c) * inner + p % inner;
        let max = (0..classes).map(|c| x[at(c)]).fold(f64::NEG_INFINITY, f64::max);
        let lse = max + (0..classes).map(|c| (x[at(c)] - max).exp()).sum::<f64>().ln();
        weights[p] = weight[t];
        // The weight of the log-probability of each class in the loss.
        let share = |c: usize| {
            smoothing / classes as f64 * weight[c] + if c == t { (1.0 - smoothing) * weight[t] } else { 0.0 }
        };
        losses[p] = (0..classes).map(|c| share(c) * (lse - x[at(c)])).sum();
        let all: f64 = (0..classes).map(share).sum();
        for c in 0..classes {
            grad[at(c)] = scale[p] * (all * (x[at(c)] - lse).exp() - share(c));
        }
    }
    (losses, weights, grad)
}

fn cases() -> Vec<Vec<usize>> {
    vec![
        vec![1, 1],
        vec![6, 10],
        vec![3, 200],
        vec![2, 5, 7],
        vec![2, 70, 130],
        vec![3, 4, 2, 5],
        vec![0, 3],
        vec![2, 3, 0],
    ]
}

#[test]
fn fused_loss_agrees_with_the_formula() {
    for dtype in FLOATS {
        for shape in cases() {
            let dims = sizes(&shape);
            let (outer, classes, inner) = dims;
            let (n, len) = (outer * inner, shape.iter().product());
            let x = local(dtype, &noise(len, 1).iter().map(|x| x * 3.0).collect::<Vec<_>>(), &shape);
            let w = local(dtype, &noise(classes, 2).iter().map(|x| x + 2.5).collect::<Vec<_>>(), &[classes]);
            let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
            let scale = local(wide, &noise(n, 3), &[n]);
            let targets = some_targets(n, classes);
            let target = ids(&targets, &[outer, inner]);
            let tol = tolerance(dtype) * 2.0;
            for weight in [None, Some(&w)] {
                let ws = weight.map_or(vec![1.0; classes], values);
                for smoothing in [0.0, 0.1] {
                    let (losses, weights, grad) =
                        naive(&values(&x), dims, &targets, &ws, smoothing, &values(&scale));
                    for (x, target) in [(x.clone(), target.clone()), (strided(&x), strided(&target))] {
                        let goal = goal(&target, weight, classes, smoothing);
                        let [got, got_weights, max, sum] = cross_entropy_forward(&x, &goal).unwrap();
                        assert_close(&got, &losses, tol);
                        assert_close(&got_weights, &weights, 0.0);
                        assert_eq!(got.dims(), [n]);
                        for x in [&got, &got_weights, &max, &sum] {
                            assert_eq!(x.dtype(), wide);
                        }
                        let got = cross_entropy_backward(&x, [&max, &sum], &scale, &goal).unwrap();
                        assert_close(&got, &grad, tol);
                        assert_eq!(got.dims(), &shape[..]);
                        for split in [0, 1, classes / 2, classes] {
                            let (all, back) = sharded(&x, split.min(classes), &scale, &goal);
                            assert_close(&all[0], &losses, tol);
                            assert_close(&all[1], &weights, 0.0);
                            assert_close(&all[2], &values(&max), 0.0);
                            assert_close(&all[3], &values(&sum), 1e-6);
                            assert_close(&back, &grad, tol);
                        }
                    }
                }
            }
        }
    }
}

/// Computes loss and gradient with two shards of the classes: those before `split`, and the rest.
fn sharded(x: &Array, split: usize, scale: &Array, goal: &ClassTargets<'_>) -> ([Array; 4], Array) {
    use super::super::reduce::{Reduce, reduce};
    use super::super::{cat::cat, softmax};
    let shards = [(0, split), (split, goal.classes - split)]
        .map(|(first, n)| (x.narrow(1, first, n).unwrap(), ClassTargets { first, ..*goal }));
    let all = |f: Reduce, of: &dyn Fn(&Array, &ClassTargets<'_>) -> Result<Array>| {
        let each = shards
            .each_ref()
            .map(|(x, goal)| of(x, goal).and_then(|y| y.contiguous()?.unsqueeze(0)).unwrap());
        reduce(f, &cat(&each.each_ref()[..], 0).unwrap(), &[0], false).unwrap()
    };
    let max = all(Reduce::Max, &|x, _| softmax::maxima(x, 1));
    let sum = all(Reduce::Sum, &|x, _| softmax::exp_sums(x, &max, 1));
    let picked = all(Reduce::Sum, &|x, goal| cross_entropy_picked(x, &max, goal));
    let losses = cross_entropy_losses(x, [&max, &sum, &picked], goal).unwrap();
    let back = |(x, goal): &(Array, ClassTargets<'_>)| {
        cross_entropy_backward(x, [&losses[2], &losses[3]], scale, goal).unwrap()
    };
    let back = shards.each_ref().map(back);
    let back = cat(&back.each_ref()[..], 1).unwrap();
    (losses, back)
}

#[test]
fn nll_selects_the_target() {
    for dtype in FLOATS {
        for shape in cases() {
            let (outer, classes, inner) = sizes(&shape);
            let n = outer * inner;
            let logp = local(dtype, &noise(shape.iter().product(), 1), &shape);
            let w = local(dtype, &noise(classes, 2), &[classes]);
            let targets = some_targets(n, classes);
            let target = ids(&targets, &[outer, inner]);
            let (xs, ws) = (values(&logp), values(&w));
            let scale = local(dtype, &noise(n, 3), &[n]);
            let (mut losses, mut weights, mut grad) = (vec![0.0; n], vec![0.0; n], vec![0.0; xs.len()]);
            for p in (0..n).filter(|&p| targets[p] != IGNORE) {
                let t = targets[p] as usize;
                let at = (p / inner * classes + t) * inner + p % inner;
                (losses[p], weights[p], grad[at]) = (-ws[t] * xs[at], ws[t], -values(&scale)[p]);
            }
            for (logp, target) in [(logp.clone(), target.clone()), (strided(&logp), strided(&target))] {
                let (weighted, plain) =
                    (goal(&target, Some(&w), classes, 0.0), goal(&target, None, classes, 0.0));
                let (got, got_weights) = nll_forward(&logp, &weighted).unwrap();
                assert_close(&got, &losses, tolerance(dtype));
                assert_close(&got_weights, &weights, 0.0);
                let (_, got_weights) = nll_forward(&logp, &plain).unwrap();
                let ones: Vec<f64> = targets.iter().map(|&t| f64::from(t != IGNORE)).collect();
                assert_close(&got_weights, &ones, 0.0);
                let got = nll_backward(&scale, [outer, classes, inner], &plain).unwrap();
                assert_close(&got, &grad, 0.0);
                assert_eq!(got.dims(), [outer, classes, inner]);
            }
        }
    }
}

#[test]
fn bad_targets_are_errors() {
    let x = local(DType::F32, &noise(6, 1), &[2, 3]);
    let scale = local(DType::F32, &[1.0, 1.0], &[2]);
    for bad in [-1, 3, i64::MIN] {
        let target = ids(&[0, bad], &[2, 1]);
        let is_bad = |error: Error| {
            assert!(
                matches!(error, Error::IndexOutOfBounds { index, size: 3, .. } if index == bad),
                "{error}"
            )
        };
        let goal = goal(&target, None, 3, 0.0);
        is_bad(nll_forward(&x, &goal).unwrap_err());
        is_bad(nll_backward(&scale, [2, 3, 1], &goal).unwrap_err());
        is_bad(cross_entropy_forward(&x, &goal).unwrap_err());
        is_bad(cross_entropy_backward(&x, [&scale, &scale], &scale, &goal).unwrap_err());
        is_bad(cross_entropy_picked(&x, &scale, &goal).unwrap_err());
    }
    // `ignore_index` may also be a valid class.
    let target = ids(&[1, 1], &[2, 1]);
    let goal = ClassTargets { ignore_index: 1, ..goal(&target, None, 3, 0.0) };
    assert_eq!(values(&nll_forward(&x, &goal).unwrap().0), [0.0, 0.0]);
}

#[test]
fn infinities_and_nan_follow_ieee() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    // A masked class; a masked target; a NaN; only masked classes; a NaN at an ignored position.
    let x = [-inf, 0.0, 0.0, -inf, 0.0, nan, -inf, -inf, nan, nan];
    let targets = [1, 1, 0, 0, IGNORE];
    let transpose = |v: &[f64]| (0..10).map(|i| v[i % 5 * 2 + i / 5]).collect::<Vec<f64>>();
    let (losses, grad) = ([0.0, inf, nan, nan, 0.0], [0.0, 0.0, 1.0, -1.0, nan, nan, nan, nan, 0.0, 0.0]);
    let scale = local(DType::F32, &[1.0; 5], &[5]);
    let target = ids(&targets, &[5, 1]);
    let rows = local(DType::F32, &x, &[5, 2]);
    let check = |x: &Array, target: &Array, grad: &[f64]| {
        let goal = goal(target, None, 2, 0.0);
        let [got, _, max, sum] = cross_entropy_forward(x, &goal).unwrap();
        assert_close(&got, &losses, 0.0);
        assert_close(&cross_entropy_backward(x, [&max, &sum], &scale, &goal).unwrap(), grad, 0.0);
        let (got, back) = sharded(x, 1, &scale, &goal);
        assert_close(&got[0], &losses, 0.0);
        assert_close(&back, grad, 0.0);
    };
    check(&rows, &target, &grad);
    let columns = local(DType::F32, &transpose(&x), &[1, 2, 5]);
    let target = ids(&targets, &[1, 5]);
    check(&columns, &target, &transpose(&grad));
}

#[test]
fn large_logits_cost_no_accuracy() {
    let xs: Vec<f64> = noise(300, 1).iter().map(|x| (1e4 + x) as f32 as f64).collect();
    let x = local(DType::F32, &xs, &[3, 100]);
    let target = ids(&[5, 50, 99], &[3, 1]);
    let (losses, _, grad) = naive(&xs, (3, 100, 1), &[5, 50, 99], &[1.0; 100], 0.1, &[1.0; 3]);
    let goal = goal(&target, None, 100, 0.1);
    let [got, _, max, sum] = cross_entropy_forward(&x, &goal).unwrap();
    assert_close(&got, &losses, 1e-6);
    let scale = local(DType::F32, &[1.0; 3], &[3]);
    let got = values(&cross_entropy_backward(&x, [&max, &sum], &scale, &goal).unwrap());
    for (got, want) in got.iter().zip(grad) {
        assert!((got - want).abs() <= 1e-5 * want.abs() + 1e-9, "{got} {want}");
    }
}
