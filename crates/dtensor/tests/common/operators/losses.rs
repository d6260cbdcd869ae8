//! Examples of losses.

use dtensor::{CrossEntropyOptions, DType, Reduction, Tensor};

use super::{Operator, SHAPES, half, ids, positive};

const REDUCTIONS: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];

pub(super) fn operators() -> Vec<Operator> {
    let mut all = Vec::new();
    for reduction in REDUCTIONS {
        let base = CrossEntropyOptions { reduction, ..Default::default() };
        let forms = [
            ("", base),
            (", ignore 1", CrossEntropyOptions { ignore_index: 1, ..base }),
            (", smoothing", CrossEntropyOptions { label_smoothing: 0.25, ..base }),
        ];
        for (form, options) in forms {
            let (smooth, form) = (options.label_smoothing > 0.0, format!("{reduction:?}{form}"));
            // A target that is not a valid class is an error unless it is ignored.
            let on_targets = |operator, weighted| on_targets(operator, weighted, options.ignore_index < 0);
            let plain =
                Operator::one("cross_entropy", &form[..], move |x| x[0].cross_entropy(&x[1], options));
            all.push(on_targets(plain, false));
            let weighted = Operator::one("cross_entropy", format!("{form}, weights"), move |x| {
                x[0].cross_entropy(&x[1], CrossEntropyOptions { weight: Some(&x[2]), ..options })
            });
            all.push(on_targets(weighted.constant(&[2]), true));
            if smooth {
                continue;
            }
            let plain = Operator::one("nll_loss", &form[..], move |x| x[0].nll_loss(&x[1], options));
            all.push(on_targets(plain, false));
            let weighted = Operator::one("nll_loss", format!("{form}, weights"), move |x| {
                x[0].nll_loss(&x[1], CrossEntropyOptions { weight: Some(&x[2]), ..options })
            });
            all.push(on_targets(weighted.constant(&[2]), true));
        }
        let mut mse =
            Operator::one("mse_loss", format!("{reduction:?}"), move |x| x[0].mse_loss(&x[1], reduction));
        for shape in SHAPES {
            mse = mse.on([half(shape, 1), half(shape, 2)]);
        }
        all.push(mse.on([half(&[4, 2], 1), half(&[4, 1], 2)]));
    }
    all
}

/// Adds inputs: logits, targets of which some are ignored, and optional class weights.
fn on_targets(mut operator: Operator, weighted: bool, ignored: bool) -> Operator {
    let shapes: [(&[usize], &[usize]); 6] = [
        (&[8, 4], &[8]),
        (&[5, 3], &[5]),
        (&[2, 4, 3], &[2, 3]),
        (&[1, 2, 4, 1], &[1, 4, 1]),
        (&[4], &[]),
        (&[0, 4], &[0]),
    ];
    for (i, (shape, positions)) in shapes.into_iter().enumerate() {
        let classes = if shape.len() == 1 { shape[0] } else { shape[1] };
        let mut target = ids(positions, 2, classes);
        if ignored && i % 2 == 0 {
            target = with_ignored(&target);
        }
        let weight = weighted.then(|| positive(&[classes], 3));
        operator = operator.on([half(shape, 1), target].into_iter().chain(weight).collect::<Vec<_>>());
    }
    operator
}

/// Sets every third target to −100, the default `ignore_index`.
fn with_ignored(target: &Tensor) -> Tensor {
    let kept = target.to_f64_vec().unwrap().into_iter().enumerate();
    let kept = kept.map(|(i, class)| if i % 3 == 1 { -100.0 } else { class }).collect();
    Tensor::from_vec(kept, target.shape()).unwrap().to_dtype(DType::I64).unwrap()
}
