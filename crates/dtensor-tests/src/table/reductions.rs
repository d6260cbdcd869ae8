//! Rows of reductions, and of scans, softmaxes and sorts along a dim.

use std::collections::BTreeSet;

use dtensor::{Interpolation, Result, Tensor};

use super::form::{Form, one, several};
use super::{AS_IS, Dtypes, INDEX, Row, SHAPES, SINGLE, Sizes, Unary, pair};
use crate::inputs::{Make, given, mask, nonzero, real, special, whole};

type Over = fn(&Tensor, &[isize]) -> Result<Tensor>;
/// A reduction of all dims, of some dims, and with the dims kept.
type Folds = (Unary, Over, Over);
type Pair = (Tensor, Tensor);

/// Shapes, each with the dims to reduce.
const OVER: [(Sizes, &[isize]); 10] = [
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
const ALONG: [(Sizes, isize); 9] = [
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

const KINDS: [Interpolation; 5] = [
    Interpolation::Linear,
    Interpolation::Lower,
    Interpolation::Higher,
    Interpolation::Nearest,
    Interpolation::Midpoint,
];

pub(crate) fn rows() -> Vec<Row> {
    let mut all = dims();
    all.extend(moments());
    all.extend(norms());
    all.extend(extremes());
    all.extend(quantiles());
    all.extend(along());
    all
}

fn numel(shape: &[usize]) -> usize {
    shape.iter().product()
}

fn dims() -> Vec<Row> {
    let functions: [([&'static str; 3], Dtypes, Make, Folds); 5] = [
        (
            ["sum_all", "sum", "sum_keepdim"],
            AS_IS,
            real,
            (|x| x.sum_all(), |x, d| x.sum(d), |x, d| x.sum_keepdim(d)),
        ),
        (
            ["mean_all", "mean", "mean_keepdim"],
            AS_IS,
            real,
            (|x| x.mean_all(), |x, d| x.mean(d), |x, d| x.mean_keepdim(d)),
        ),
        (
            ["prod_all", "prod", "prod_keepdim"],
            SINGLE,
            nonzero,
            (|x| x.prod_all(), |x, d| x.prod(d), |x, d| x.prod_keepdim(d)),
        ),
        (
            ["max_all", "max", "max_keepdim"],
            AS_IS,
            real,
            (|x| x.max_all(), |x, d| x.max(d), |x, d| x.max_keepdim(d)),
        ),
        (
            ["min_all", "min", "min_keepdim"],
            AS_IS,
            real,
            (|x| x.min_all(), |x, d| x.min(d), |x, d| x.min_keepdim(d)),
        ),
    ];
    let mut rows = Vec::new();
    for ([full, some, keep], dtypes, make, (f, g, h)) in functions {
        let chosen = full.starts_with('m') && !full.starts_with("mean");
        // The largest of no elements is an error.
        let on = |form: Form, shape: Sizes, empty: bool| {
            if chosen && empty { form.fails([make(shape)]) } else { form.on([make(shape)]) }
        };
        let whole_tensor =
            SHAPES.iter().fold(one("", move |x| f(&x[0])), |form, shape| on(form, shape, numel(shape) == 0));
        // Measured on PyTorch under autocast: `sum`, `prod` and `max`, and `sum_all`, `mean_all` and `prod_all`.
        let all = Row::new(full)
            .cast(dtypes, move |a, _| f(&a(&[3, 3])))
            .call(move |x, _| f(&x[0]))
            .golden(move |x, _| f(&x[0]))
            .form(match full {
                // The mean of integers is an error.
                "mean_all" => {
                    whole_tensor.fails([whole(&[8, 2])]).fails([whole(&[5])]).fails([mask(&[8, 2])])
                }
                _ => whole_tensor.each_on_meshes(whole, &[&[8, 2], &[5]]).on_meshes([mask(&[8, 2])]),
            })
            .form(one("NaN", move |x| f(&x[0])).each_on_meshes(special, &[&[8, 4], &[5]]));
        let over = |name, f: Over| {
            let row = Row::new(name)
                .cast(dtypes, move |a, _| f(&a(&[3, 3]), &[0]))
                .call(move |x, c| f(&x[0], &[c.dim]))
                .call(move |x, c| f(&x[0], &[c.dim, c.other]))
                .golden(move |x, a| f(&x[0], &a.dims()));
            OVER.iter().fold(row, |row, &(shape, dims)| {
                let form = one(format!("{dims:?}"), move |x| f(&x[0], dims));
                row.form(on(form, shape, shape == [0, 3] && dims == [0]))
            })
        };
        let other = one("other numbers", move |x| g(&x[0], &[0])).each_on_meshes(special, &[&[8, 3], &[5]]);
        let other = match some {
            "mean" => other.fails([whole(&[8, 3])]).fails([whole(&[5])]).fails([mask(&[8, 3])]),
            _ => other.each_on_meshes(whole, &[&[8, 3], &[5]]).on_meshes([mask(&[8, 3])]),
        };
        let three = [all, over(some, g).form(other.on([real(&[8, 3])])), over(keep, h)];
        let three = three.map(|row| if full == "prod_all" { zeros(row) } else { row });
        rows.extend(three.into_iter().map(|row| if chosen { row.exact() } else { row }));
    }
    rows
}

/// Adds products with zero, one and two factors equal to 0: the gradient is the product of the others.
fn zeros(row: Row) -> Row {
    let input = |shape: &[usize], zeros: &[usize]| {
        let factors = (0..4).map(|i| if zeros.contains(&i) { 0.0 } else { 1.0 }).collect();
        given(real(shape).apart(1).mul(&Tensor::from_vec(factors, [4]).unwrap()).unwrap())
    };
    [&[][..], &[1], &[0, 3]].into_iter().fold(row, |row, at: &[usize]| {
        let label = format!("zeros at {at:?}");
        let matrix = || [input(&[3, 4], at)];
        match row.name {
            "prod_all" => row.form(one(label, |x| x[0].prod_all()).on_device([input(&[4], at)])),
            "prod" => {
                let row = row.form(one(&label[..], |x| x[0].prod(1)).on_device(matrix()));
                row.form(one(label, |x| x[0].prod(0)).on_device(matrix()))
            }
            _ => row.form(one(label, |x| x[0].prod_keepdim([0, 1])).on_device(matrix())),
        }
    })
}

fn moments() -> Vec<Row> {
    let mut var = Row::new("var")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).var(0, 1.0, false))
        .call(|x, c| x[0].var(c.dim, c.other as f64, true))
        .golden(|x, a| x[0].var(&a.dims()[..], a.float("correction"), a.keepdim()))
        .form(one("-1, correction 0", |x| x[0].var(-1, 0.0, false)).each_on_device(real, &SHAPES));
    let mut std = Row::new("std")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).std(0, 1.0, false))
        .call(|x, c| x[0].std(c.dim, 0.0, c.n > 2))
        .golden(|x, a| x[0].std(&a.dims()[..], a.float("correction"), a.keepdim()));
    for (shape, dims) in OVER {
        // Of one element the variance has no derivative.
        let single = numel(shape) < 2 || dims.iter().all(|&d| shape[d.max(0) as usize] == 1);
        let on = |form: Form| if single { form.on_meshes([real(shape)]) } else { form.on([real(shape)]) };
        for (correction, keepdim) in [(0.0, false), (1.0, true), (0.5, false)] {
            let form = format!("{dims:?}, correction {correction}");
            var = var.form(on(one(&form[..], move |x| x[0].var(dims, correction, keepdim))));
            std = std.form(on(one(form, move |x| x[0].std(dims, correction, keepdim))));
        }
    }
    let all = |f: Unary| {
        SHAPES.iter().fold(one("", move |x| f(&x[0])), |form, shape| match numel(shape) > 1 {
            true => form.on([real(shape)]),
            false => form.on_meshes([real(shape)]),
        })
    };
    vec![
        Row::new("var_all")
            .cast(AS_IS, |a, _| a(&[3, 3]).var_all())
            .call(|x, _| x[0].var_all())
            .golden(|x, _| x[0].var_all())
            .form(all(|x| x.var_all())),
        Row::new("std_all")
            .cast(AS_IS, |a, _| a(&[3, 3]).std_all())
            .call(|x, _| x[0].std_all())
            .golden(|x, _| x[0].std_all())
            .form(all(|x| x.std_all())),
        var,
        std,
    ]
}

fn norms() -> Vec<Row> {
    let mut all = Row::new("norm_all")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).norm_all(2.0))
        .call(|x, c| x[0].norm_all(c.other as f64))
        .golden(|x, a| x[0].norm_all(a.float("p")));
    let mut some = Row::new("norm")
        .cast(AS_IS, |a, _| a(&[3, 3]).norm(1.0, 0, false))
        .call(|x, c| x[0].norm(c.other as f64, c.dim, false))
        .golden(|x, a| x[0].norm(a.float("p"), &a.dims()[..], a.keepdim()));
    for p in [0.0, 1.0, 2.0, 2.5, 3.0, f64::INFINITY, f64::NEG_INFINITY] {
        // The largest magnitude of no elements is an error.
        let on =
            |form: Form, shape: Sizes, empty: bool, meshes: bool| match (empty && p.is_infinite(), meshes) {
                (true, true) => form.fails([real(shape)]),
                (true, false) => form,
                (false, true) => form.on([real(shape)]),
                (false, false) => form.on_device([real(shape)]),
            };
        let form = one(p.to_string(), move |x| x[0].norm_all(p));
        all = all.form(SHAPES.iter().fold(form, |form, shape| on(form, shape, numel(shape) == 0, p != 2.5)));
        for (i, (shape, dims)) in OVER.into_iter().enumerate() {
            for keepdim in [false, true] {
                let meshes = p != 2.5 && keepdim == (i % 2 == 1);
                let form = one(format!("{p}, {dims:?}"), move |x| x[0].norm(p, dims, keepdim));
                some = some.form(on(form, shape, shape == [0, 3] && dims == [0], meshes));
            }
        }
    }
    vec![all, some]
}

/// Adds inputs along a dim: real numbers, integers, and NaN.
fn tries(form: Form, shape: Sizes) -> Form {
    let form = form.on([real(shape)]).on_meshes([whole(shape)]);
    if shape.len() == 1 { form.on_meshes([special(shape)]) } else { form }
}

fn extremes() -> Vec<Row> {
    type Along = fn(&Tensor, isize, bool) -> Result<Pair>;
    type Arg = fn(&Tensor, isize, bool) -> Result<Tensor>;
    let forms = |row: Row, f: Along| {
        ALONG.iter().fold(row, |row, &(shape, dim)| {
            [false, true].into_iter().fold(row, |row, keepdim| {
                let form =
                    several(format!("{dim}, keepdim {keepdim}"), move |x| f(&x[0], dim, keepdim).map(pair));
                row.form(tries(form, shape))
            })
        })
    };
    let arg_forms = |row: Row, f: Arg| {
        ALONG.iter().fold(row, |row, &(shape, dim)| {
            [false, true].into_iter().fold(row, |row, keepdim| {
                let form = one(format!("{dim}, keepdim {keepdim}"), move |x| f(&x[0], dim, keepdim));
                row.form(tries(form, shape))
            })
        })
    };
    let shapes: [Sizes; 4] = [&[8, 4], &[5, 3], &[2, 1, 3], &[]];
    vec![
        forms(
            Row::new("max_dim")
                .exact()
                .cast(AS_IS, |a, _| Ok(a(&[3, 3]).max_dim(0, false)?.0))
                .calls(|x, c| x[0].max_dim(c.dim, c.n > 2).map(pair))
                .goldens(|x, a| x[0].max_dim(a.dim(), a.keepdim()).map(pair)),
            |x, dim, keepdim| x.max_dim(dim, keepdim),
        ),
        forms(
            Row::new("min_dim")
                .exact()
                .cast_here(AS_IS, |a, _| Ok(a(&[3, 3]).min_dim(0, false)?.0))
                .calls(|x, c| x[0].min_dim(c.dim, c.n > 2).map(pair))
                .goldens(|x, a| x[0].min_dim(a.dim(), a.keepdim()).map(pair)),
            |x, dim, keepdim| x.min_dim(dim, keepdim),
        ),
        arg_forms(
            Row::new("argmax")
                .steps()
                .cast(INDEX, |a, _| a(&[3, 3]).argmax(0, false))
                .call(|x, c| x[0].argmax(c.dim, c.n > 2))
                .golden(|x, a| x[0].argmax(a.dim(), a.keepdim()))
                .form(one("an empty dim", |x| x[0].argmax(0, false)).fails([real(&[0, 3])])),
            |x, dim, keepdim| x.argmax(dim, keepdim),
        ),
        arg_forms(
            Row::new("argmin")
                .steps()
                .cast_here(INDEX, |a, _| a(&[3, 3]).argmin(0, false))
                .call(|x, c| x[0].argmin(c.dim, c.n > 2))
                .golden(|x, a| x[0].argmin(a.dim(), a.keepdim())),
            |x, dim, keepdim| x.argmin(dim, keepdim),
        ),
        Row::new("argmax_all")
            .steps()
            .cast_here(INDEX, |a, _| a(&[3, 3]).argmax_all())
            .call(|x, _| x[0].argmax_all())
            .golden(|x, _| x[0].argmax_all())
            .form(one("", |x| x[0].argmax_all()).each(real, &shapes))
            .form(one("NaN", |x| x[0].argmax_all()).on_meshes([special(&[8, 2])])),
        Row::new("argmin_all")
            .steps()
            .cast_here(INDEX, |a, _| a(&[3, 3]).argmin_all())
            .call(|x, _| x[0].argmin_all())
            .golden(|x, _| x[0].argmin_all())
            .form(one("", |x| x[0].argmin_all()).each(real, &shapes)),
    ]
}

fn quantiles() -> Vec<Row> {
    let mut median = Row::new("median")
        .exact()
        .cast_here(AS_IS, |a, _| Ok(a(&[3, 3]).median(0, false)?.0))
        .calls(|x, c| x[0].median(c.dim, c.n > 2).map(pair))
        .goldens(|x, a| x[0].median(a.dim(), a.keepdim()).map(pair));
    let median_all = Row::new("median_all")
        .exact()
        .cast_here(AS_IS, |a, _| a(&[3, 3]).median_all())
        .call(|x, _| x[0].median_all())
        .golden(|x, _| x[0].median_all());
    let mut quantile = Row::new("quantile")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).quantile(0.3, 0, false, Interpolation::Linear))
        .call(|x, c| x[0].quantile(c.other as f64 / 3.0, c.dim, c.n > 2, Interpolation::Linear))
        .call(|x, c| x[0].quantile([0.0, c.n as f64 / 4.0], c.dim, c.n > 2, Interpolation::Nearest))
        .golden(|x, a| x[0].quantile(a.quantiles(), a.dim(), a.keepdim(), a.interpolation()));
    let quantile_all = Row::new("quantile_all")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).quantile_all(0.3, Interpolation::Linear))
        .call(|x, c| x[0].quantile_all(c.other as f64 / 3.0, Interpolation::Midpoint))
        .golden(|x, a| x[0].quantile_all(a.quantiles(), a.interpolation()));
    let shapes: [(Sizes, isize); 7] =
        [(&[8, 4], 0), (&[8, 4], -1), (&[5, 3], 0), (&[2, 3, 4], 1), (&[1, 7], 1), (&[4], 0), (&[], 0)];
    for (i, (shape, dim)) in shapes.into_iter().enumerate() {
        let (between, keepdim) = (KINDS[i % KINDS.len()], i % 2 == 0);
        for kind in KINDS {
            let form = one(format!("three, {dim}, {kind:?}"), move |x| {
                x[0].quantile([0.35, 0.0, 0.9], dim, true, kind)
            });
            quantile = quantile.form(form.on_device([real(shape)]));
        }
        let middle = several(format!("{dim}"), move |x| x[0].median(dim, keepdim).map(pair)).exact();
        if shape.is_empty() {
            median = median.form(middle.on_device([real(shape)]));
            continue;
        }
        median = median.form(middle.on([real(shape)]).on_meshes([whole(shape)]));
        let single =
            one(format!("0.375, {dim}, {between:?}"), move |x| x[0].quantile(0.375, dim, keepdim, between));
        quantile = quantile.form(single.on([real(shape)]).on_meshes([special(shape)]));
        let many = one(format!("several, {dim}"), move |x| {
            x[0].quantile([0.0, 0.3, 1.0], dim, !keepdim, Interpolation::Linear)
        });
        quantile = quantile.form(many.on([real(shape)]));
    }
    // The quantile and the median of an empty tensor are errors.
    let shapes: [Sizes; 4] = [&[8, 4], &[5, 3], &[], &[1]];
    let every = one("0.3", |x| x[0].quantile_all(0.3, Interpolation::Linear))
        .each(real, &shapes)
        .each_on_device(real, &[&[2, 1, 3]]);
    let middle =
        one("", |x| x[0].median_all()).exact().each(real, &shapes).each_on_device(real, &[&[2, 1, 3]]);
    vec![
        quantile,
        quantile_all.form(every.fails([real(&[0, 4])])),
        median,
        median_all.form(middle.fails([real(&[0, 4])])),
    ]
}

fn along() -> Vec<Row> {
    let mut cumsum = Row::new("cumsum")
        .cast(AS_IS, |a, _| a(&[3, 3]).cumsum(0))
        .call(|x, c| x[0].cumsum(c.dim))
        .golden(|x, a| x[0].cumsum(a.dim()));
    let mut softmax = Row::new("softmax")
        .cast(AS_IS, |a, _| a(&[3, 3]).softmax(-1))
        .call(|x, c| x[0].softmax(c.dim))
        .golden(|x, a| x[0].softmax(a.dim()));
    let mut log_softmax = Row::new("log_softmax")
        .cast(AS_IS, |a, _| a(&[3, 3]).log_softmax(-1))
        .call(|x, c| x[0].log_softmax(c.dim))
        .golden(|x, a| x[0].log_softmax(a.dim()));
    let mut sort = Row::new("sort")
        .exact()
        .cast(AS_IS, |a, _| Ok(a(&[3, 3]).sort(0, false)?.0))
        .calls(|x, c| x[0].sort(c.dim, c.other > 0).map(pair))
        .goldens(|x, a| x[0].sort(a.dim(), a.flag("descending")).map(pair));
    let mut topk = Row::new("topk")
        .exact()
        .cast(AS_IS, |a, _| Ok(a(&[3, 3]).topk(2, 1, true)?.0))
        .calls(|x, c| x[0].topk(c.n, c.dim, c.other > 0).map(pair))
        .goldens(|x, a| x[0].topk(a.size("k"), a.dim(), a.flag("largest")).map(pair));
    for (shape, dim) in ALONG.into_iter().chain([(&[0, 3][..], 0), (&[2, 0], 0)]) {
        let form = format!("{dim}");
        let on = |form: Form| form.on([real(shape)]);
        softmax = softmax.form(on(one(&form[..], move |x| x[0].softmax(dim))));
        log_softmax = log_softmax.form(on(one(&form[..], move |x| x[0].log_softmax(dim))));
        cumsum = cumsum.form(tries(one(form, move |x| x[0].cumsum(dim)), shape));
        let size =
            if shape.is_empty() { 1 } else { shape[(dim + shape.len() as isize) as usize % shape.len()] };
        for largest in [false, true] {
            let form = format!("{dim}, {}", if largest { "largest first" } else { "smallest first" });
            let sorted = several(&form[..], move |x| x[0].sort(dim, largest).map(pair)).exact();
            sort = sort.form(tries(sorted, shape));
            for k in BTreeSet::from([0, 1, 2, 3, size]) {
                let top =
                    several(format!("{k}, {form}"), move |x| x[0].topk(k, dim, largest).map(pair)).exact();
                let form = match (k > size, k == 1 || k == 3) {
                    (true, true) => top.fails([real(shape)]).fails([whole(shape)]),
                    (true, false) => continue,
                    (false, true) => tries(top, shape),
                    (false, false) => top.on_device([real(shape)]),
                };
                topk = topk.form(form);
            }
        }
    }
    vec![cumsum, softmax, log_softmax, sort, topk]
}
