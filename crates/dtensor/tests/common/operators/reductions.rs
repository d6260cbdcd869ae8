//! Examples of reductions, of operators that find or sort elements along a dim, and of normalisations.

use dtensor::{Result, Tensor};

use super::{Make, Operator, SHAPES, Unary, half, mask, nonzero, on_shapes, positive, special, whole};

type Over = fn(&Tensor, &[isize]) -> Result<Tensor>;

/// Shapes, each with the dims to reduce.
const OVER: [(&[usize], &[isize]); 10] = [
    (&[8, 4], &[0]),
    (&[8, 4], &[-1]),
    (&[5, 3], &[0]),
    (&[2, 5, 4], &[0, 2]),
    (&[2, 3, 2], &[2, 1, 0]),
    (&[3, 1], &[1]),
    (&[], &[0]),
    (&[4], &[]),
    (&[0, 3], &[1]),
    (&[0, 3], &[0]),
];

/// Shapes, each with one dim.
const ALONG: [(&[usize], isize); 9] = [
    (&[8], 0),
    (&[8, 4], 0),
    (&[8, 4], -1),
    (&[5, 3], 0),
    (&[2, 7], 1),
    (&[2, 3, 4], -2),
    (&[1, 3], 0),
    (&[], 0),
    (&[0, 3], 1),
];

pub(super) fn operators() -> Vec<Operator> {
    let mut all = folds();
    all.extend(moments());
    all.extend(along());
    all.extend(normalisations());
    all
}

fn folds() -> Vec<Operator> {
    let functions: [(&'static str, &'static str, &'static str, Make, Unary, Over, Over); 5] = [
        ("sum_all", "sum", "sum_keepdim", half, |x| x.sum_all(), |x, d| x.sum(d), |x, d| x.sum_keepdim(d)),
        (
            "mean_all",
            "mean",
            "mean_keepdim",
            half,
            |x| x.mean_all(),
            |x, d| x.mean(d),
            |x, d| x.mean_keepdim(d),
        ),
        (
            "prod_all",
            "prod",
            "prod_keepdim",
            nonzero,
            |x| x.prod_all(),
            |x, d| x.prod(d),
            |x, d| x.prod_keepdim(d),
        ),
        ("max_all", "max", "max_keepdim", half, |x| x.max_all(), |x, d| x.max(d), |x, d| x.max_keepdim(d)),
        ("min_all", "min", "min_keepdim", half, |x| x.min_all(), |x, d| x.min(d), |x, d| x.min_keepdim(d)),
    ];
    let mut all = Vec::new();
    for (full, some, keep, make, f, g, h) in functions {
        let whole_tensor = on_shapes(Operator::one(full, "", move |x| f(&x[0])), make, &SHAPES);
        all.push(on_shapes(whole_tensor, whole, &[&[8, 2], &[5]]).on([mask(&[8, 2], 1)]));
        all.push(on_shapes(Operator::one(full, "NaN", move |x| f(&x[0])), special, &[&[8, 4], &[5]]));
        for (shape, dims) in OVER {
            let form = format!("{dims:?}");
            all.push(Operator::one(some, &form[..], move |x| g(&x[0], dims)).on([make(shape, 1)]));
            all.push(Operator::one(keep, form, move |x| h(&x[0], dims)).on([make(shape, 1)]));
        }
        let rows = Operator::one(some, "other numbers", move |x| g(&x[0], &[0]));
        let rows = on_shapes(on_shapes(rows, special, &[&[8, 3], &[5]]), whole, &[&[8, 3], &[5]]);
        all.push(rows.on([mask(&[8, 3], 1)]).on([half(&[8, 3], 7)]));
    }
    all
}

fn moments() -> Vec<Operator> {
    let mut all = vec![
        on_shapes(Operator::one("var_all", "", |x| x[0].var_all()), half, &SHAPES),
        on_shapes(Operator::one("std_all", "", |x| x[0].std_all()), half, &SHAPES),
    ];
    for (shape, dims) in OVER {
        for (correction, keepdim) in [(0.0, false), (1.0, true), (0.5, false)] {
            let form = format!("{dims:?}, correction {correction}");
            all.push(
                Operator::one("var", &form[..], move |x| x[0].var(dims, correction, keepdim))
                    .on([half(shape, 1)]),
            );
            all.push(
                Operator::one("std", form, move |x| x[0].std(dims, correction, keepdim)).on([half(shape, 1)]),
            );
        }
    }
    for p in [0.0, 1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY] {
        let norm = Operator::one("norm_all", p.to_string(), move |x| x[0].norm_all(p));
        all.push(on_shapes(norm, half, &SHAPES));
        for (i, (shape, dims)) in OVER.into_iter().enumerate() {
            let keepdim = i % 2 == 1;
            let norm = Operator::one("norm", format!("{p}, {dims:?}"), move |x| x[0].norm(p, dims, keepdim));
            all.push(norm.on([half(shape, 1)]));
        }
    }
    all
}

fn along() -> Vec<Operator> {
    fn pair((values, indices): (Tensor, Tensor)) -> Vec<Tensor> {
        vec![values, indices]
    }
    let mut all = Vec::new();
    for (shape, dim) in ALONG {
        let form = format!("{dim}");
        let tries = |operator: Operator| {
            let operator = operator.on([half(shape, 1)]).on([whole(shape, 2)]);
            if shape.len() == 1 { operator.on([special(shape, 3)]) } else { operator }
        };
        for keepdim in [false, true] {
            let form = format!("{dim}, keepdim {keepdim}");
            all.extend([
                tries(Operator::several("max_dim", &form[..], move |x| x[0].max_dim(dim, keepdim).map(pair))),
                tries(Operator::several("min_dim", &form[..], move |x| x[0].min_dim(dim, keepdim).map(pair))),
                tries(Operator::one("argmax", &form[..], move |x| x[0].argmax(dim, keepdim))),
                tries(Operator::one("argmin", &form[..], move |x| x[0].argmin(dim, keepdim))),
            ]);
        }
        for largest in [false, true] {
            let form = format!("{dim}, {}", if largest { "largest first" } else { "smallest first" });
            all.push(tries(
                Operator::several("sort", &form[..], move |x| x[0].sort(dim, largest).map(pair)).exact(),
            ));
            for k in [1, 3] {
                let form = format!("{k}, {form}");
                let top = Operator::several("topk", form, move |x| x[0].topk(k, dim, largest).map(pair));
                all.push(tries(top.exact()));
            }
        }
        all.push(tries(Operator::one("cumsum", &form[..], move |x| x[0].cumsum(dim))));
        let floats = |operator: Operator| operator.on([half(shape, 1)]);
        all.push(floats(Operator::one("softmax", &form[..], move |x| x[0].softmax(dim))));
        all.push(floats(Operator::one("log_softmax", form, move |x| x[0].log_softmax(dim))));
    }
    // `argmax` of an empty dim is an error; sorting an empty dim is not.
    all.push(Operator::one("argmax", "an empty dim", |x| x[0].argmax(0, false)).on([half(&[0, 3], 1)]));
    all.push(
        Operator::several("sort", "an empty dim", |x| x[0].sort(0, false).map(pair)).on([half(&[0, 3], 1)]),
    );
    all.push(Operator::one("softmax", "an empty dim", |x| x[0].softmax(0)).on([half(&[0, 3], 1)]));
    let shapes: [&[usize]; 4] = [&[8, 4], &[5, 3], &[2, 1, 3], &[]];
    all.push(on_shapes(Operator::one("argmax_all", "", |x| x[0].argmax_all()), half, &shapes));
    all.push(on_shapes(Operator::one("argmin_all", "", |x| x[0].argmin_all()), half, &shapes));
    all.push(on_shapes(Operator::one("argmax_all", "NaN", |x| x[0].argmax_all()), special, &[&[8, 2]]));
    all
}

fn normalisations() -> Vec<Operator> {
    let mut all = Vec::new();
    let eps = 1e-3;
    let shapes: [(&[usize], usize); 7] =
        [(&[8, 4], 1), (&[5, 3], 1), (&[2, 3, 4], 1), (&[4, 2, 3], 2), (&[8], 1), (&[0, 4], 1), (&[4, 2], 2)];
    for (shape, dims) in shapes {
        let row = &shape[shape.len() - dims..];
        let x = || half(shape, 1);
        let (weight, bias) = (|| positive(row, 2), || half(row, 3));
        let name = |with: &str| format!("{dims} dims{with}");
        all.extend([
            Operator::one("layer_norm", name(""), move |x| x[0].layer_norm(dims, None, None, eps)).on([x()]),
            Operator::one("layer_norm", name(", weight"), move |x| {
                x[0].layer_norm(dims, Some(&x[1]), None, eps)
            })
            .on([x(), weight()]),
            Operator::one("layer_norm", name(", bias"), move |x| {
                x[0].layer_norm(dims, None, Some(&x[1]), eps)
            })
            .on([x(), bias()]),
            Operator::one("layer_norm", name(", weight, bias"), move |x| {
                x[0].layer_norm(dims, Some(&x[1]), Some(&x[2]), eps)
            })
            .on([x(), weight(), bias()]),
            Operator::one("rms_norm", name(""), move |x| x[0].rms_norm(dims, None, eps)).on([x()]),
            Operator::one("rms_norm", name(", weight"), move |x| x[0].rms_norm(dims, Some(&x[1]), eps))
                .on([x(), weight()]),
        ]);
    }
    all
}
