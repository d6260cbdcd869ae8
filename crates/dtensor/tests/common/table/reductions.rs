//! Rows of reductions, and of scans, softmaxes and sorts along a dim.

use dtensor::{Interpolation, Result, Shape, Tensor};

use super::{AS_IS, Dtypes, INDEX, Row, SINGLE, pair};

type All = fn(&Tensor) -> Result<Tensor>;
type Over = fn(&Tensor, &[isize]) -> Result<Tensor>;

pub(super) fn rows() -> Vec<Row> {
    let mut all = dims();
    all.extend(moments());
    all.extend(extremes());
    all.extend(along());
    all
}

fn dims() -> Vec<Row> {
    let functions: [(&'static str, &'static str, &'static str, Dtypes, All, Over, Over); 5] = [
        ("sum_all", "sum", "sum_keepdim", AS_IS, |x| x.sum_all(), |x, d| x.sum(d), |x, d| x.sum_keepdim(d)),
        (
            "mean_all",
            "mean",
            "mean_keepdim",
            AS_IS,
            |x| x.mean_all(),
            |x, d| x.mean(d),
            |x, d| x.mean_keepdim(d),
        ),
        (
            "prod_all",
            "prod",
            "prod_keepdim",
            SINGLE,
            |x| x.prod_all(),
            |x, d| x.prod(d),
            |x, d| x.prod_keepdim(d),
        ),
        ("max_all", "max", "max_keepdim", AS_IS, |x| x.max_all(), |x, d| x.max(d), |x, d| x.max_keepdim(d)),
        ("min_all", "min", "min_keepdim", AS_IS, |x| x.min_all(), |x, d| x.min(d), |x, d| x.min_keepdim(d)),
    ];
    let mut rows = Vec::new();
    for (full, some, keep, dtypes, f, g, h) in functions {
        // Measured on PyTorch under autocast: `sum`, `prod` and `max`, and `sum_all`, `mean_all` and `prod_all`.
        let all = Row::new(full).cast(dtypes, move |a, _| f(&a(&[3, 3]))).call(move |x, _| f(&x[0]));
        let over = |name, f: Over| {
            Row::new(name)
                .cast(dtypes, move |a, _| f(&a(&[3, 3]), &[0]))
                .call(move |x, c| f(&x[0], &[c.dim]))
                .call(move |x, c| f(&x[0], &[c.dim, c.other]))
        };
        let three = [all, over(some, g), over(keep, h)];
        let chosen = full.starts_with('m') && !full.starts_with("mean");
        rows.extend(three.into_iter().map(|row| if chosen { row.exact() } else { row }));
    }
    rows.push(
        Row::new("sum_to")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).sum_to(&Shape::from(&[3][..])))
            .call(|x, c| x[0].sum_to(&Shape::from(&c.shapes[2][..]))),
    );
    rows
}

fn moments() -> Vec<Row> {
    vec![
        Row::new("var_all").cast(AS_IS, |a, _| a(&[3, 3]).var_all()).call(|x, _| x[0].var_all()),
        Row::new("std_all").cast(AS_IS, |a, _| a(&[3, 3]).std_all()).call(|x, _| x[0].std_all()),
        Row::new("var")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).var(0, 1.0, false))
            .call(|x, c| x[0].var(c.dim, c.other as f64, true)),
        Row::new("std")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).std(0, 1.0, false))
            .call(|x, c| x[0].std(c.dim, 0.0, c.n > 2)),
        Row::new("norm_all")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).norm_all(2.0))
            .call(|x, c| x[0].norm_all(c.other as f64)),
        Row::new("norm")
            .cast(AS_IS, |a, _| a(&[3, 3]).norm(1.0, 0, false))
            .call(|x, c| x[0].norm(c.other as f64, c.dim, false)),
    ]
}

fn extremes() -> Vec<Row> {
    vec![
        Row::new("max_dim")
            .exact()
            .cast(AS_IS, |a, _| Ok(a(&[3, 3]).max_dim(0, false)?.0))
            .calls(|x, c| x[0].max_dim(c.dim, c.n > 2).map(pair)),
        Row::new("min_dim")
            .exact()
            .cast_here(AS_IS, |a, _| Ok(a(&[3, 3]).min_dim(0, false)?.0))
            .calls(|x, c| x[0].min_dim(c.dim, c.n > 2).map(pair)),
        Row::new("argmax")
            .steps()
            .cast(INDEX, |a, _| a(&[3, 3]).argmax(0, false))
            .call(|x, c| x[0].argmax(c.dim, c.n > 2)),
        Row::new("argmin")
            .steps()
            .cast_here(INDEX, |a, _| a(&[3, 3]).argmin(0, false))
            .call(|x, c| x[0].argmin(c.dim, c.n > 2)),
        Row::new("argmax_all")
            .steps()
            .cast_here(INDEX, |a, _| a(&[3, 3]).argmax_all())
            .call(|x, _| x[0].argmax_all()),
        Row::new("argmin_all")
            .steps()
            .cast_here(INDEX, |a, _| a(&[3, 3]).argmin_all())
            .call(|x, _| x[0].argmin_all()),
        Row::new("median")
            .exact()
            .cast_here(AS_IS, |a, _| Ok(a(&[3, 3]).median(0, false)?.0))
            .calls(|x, c| x[0].median(c.dim, c.n > 2).map(pair)),
        Row::new("median_all")
            .exact()
            .cast_here(AS_IS, |a, _| a(&[3, 3]).median_all())
            .call(|x, _| x[0].median_all()),
        Row::new("quantile")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).quantile(0.3, 0, false, Interpolation::Linear))
            .call(|x, c| x[0].quantile(c.other as f64 / 3.0, c.dim, c.n > 2, Interpolation::Linear))
            .call(|x, c| x[0].quantile([0.0, c.n as f64 / 4.0], c.dim, c.n > 2, Interpolation::Nearest)),
        Row::new("quantile_all")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).quantile_all(0.3, Interpolation::Linear))
            .call(|x, c| x[0].quantile_all(c.other as f64 / 3.0, Interpolation::Midpoint)),
    ]
}

fn along() -> Vec<Row> {
    vec![
        Row::new("cumsum").cast(AS_IS, |a, _| a(&[3, 3]).cumsum(0)).call(|x, c| x[0].cumsum(c.dim)),
        Row::new("softmax").cast(AS_IS, |a, _| a(&[3, 3]).softmax(-1)).call(|x, c| x[0].softmax(c.dim)),
        Row::new("log_softmax")
            .cast(AS_IS, |a, _| a(&[3, 3]).log_softmax(-1))
            .call(|x, c| x[0].log_softmax(c.dim)),
        Row::new("sort")
            .exact()
            .cast(AS_IS, |a, _| Ok(a(&[3, 3]).sort(0, false)?.0))
            .calls(|x, c| x[0].sort(c.dim, c.other > 0).map(pair)),
        Row::new("topk")
            .exact()
            .cast(AS_IS, |a, _| Ok(a(&[3, 3]).topk(2, 1, true)?.0))
            .calls(|x, c| x[0].topk(c.n, c.dim, c.other > 0).map(pair)),
    ]
}
