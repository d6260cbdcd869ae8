//! Rows of elementwise operators with one, two or three inputs, masks, casts, and `*_like` factories.

use dtensor::DType::F32;
use dtensor::{Gelu, Generator, Result, Tensor};

use super::{AS_IS, Examples, LOGICAL, Row, WIDEST, logical, some};

const DRAWN: &str = "its numbers are drawn";
const FILLED: &str = "its numbers are given";

pub(super) fn rows() -> Vec<Row> {
    let mut all = unary();
    all.extend(binary());
    all.extend(comparisons());
    all.extend(masks());
    all.extend(likes());
    all
}

/// Returns the row of a unary elementwise operator.
fn of_one(name: &'static str, f: fn(&Tensor) -> Result<Tensor>) -> Row {
    Row::new(name).cast(AS_IS, move |a, _| f(&a(&[3]))).call(move |x, _| f(&x[0]))
}

/// Like [`of_one`], for an operator that was not measured on PyTorch under autocast.
fn of_one_here(name: &'static str, f: fn(&Tensor) -> Result<Tensor>) -> Row {
    Row::new(name).cast_here(AS_IS, move |a, _| f(&a(&[3]))).call(move |x, _| f(&x[0]))
}

fn unary() -> Vec<Row> {
    vec![
        of_one("neg", |x| x.neg()).exact(),
        of_one("abs", |x| x.abs()).exact(),
        of_one_here("sign", |x| x.sign()).exact(),
        of_one("sqrt", |x| x.sqrt()),
        of_one("rsqrt", |x| x.rsqrt()),
        of_one("recip", |x| x.recip()),
        of_one("exp", |x| x.exp()),
        of_one("log", |x| x.log()),
        of_one("sin", |x| x.sin()),
        of_one("cos", |x| x.cos()),
        of_one("tanh", |x| x.tanh()),
        of_one("sigmoid", |x| x.sigmoid()),
        of_one("relu", |x| x.relu()).exact(),
        of_one("silu", |x| x.silu()),
        of_one("erf", |x| x.erf()),
        of_one("gelu", |x| x.gelu(Gelu::Exact)).call(|x, _| x[0].gelu(Gelu::Tanh)),
        of_one_here("contiguous", |x| x.contiguous()).exact(),
        Row::new("rsub")
            .cast_here(AS_IS, |a, _| a(&[3]).rsub(1.5))
            .call(|x, c| x[0].rsub(c.dim as f64 / 2.0)),
        Row::new("rdiv").cast_here(AS_IS, |a, _| a(&[3]).rdiv(1.5)).call(|x, c| x[0].rdiv(c.dim as i64)),
        Row::new("rpow")
            .no_golden("it is `pow` with its arguments the other way round")
            .cast_here(AS_IS, |a, _| a(&[3]).rpow(2.0))
            .call(|x, c| x[0].rpow(c.dim as f64 / 2.0)),
        Row::new("clamp")
            .exact()
            .cast(AS_IS, |a, _| a(&[3]).clamp(0.0, 0.5))
            .call(|x, c| x[0].clamp(c.dim as i64, 1))
            .call(|x, c| x[0].clamp(c.dim as f64 / 2.0, c.other as f64)),
        Row::new("clamp_min")
            .exact()
            .cast_here(AS_IS, |a, _| a(&[3]).clamp_min(0.5))
            .call(|x, c| x[0].clamp_min(c.dim as f64 / 2.0)),
        Row::new("clamp_max")
            .exact()
            .cast_here(AS_IS, |a, _| a(&[3]).clamp_max(0.5))
            .call(|x, c| x[0].clamp_max(c.dim as i64)),
        Row::new("to_dtype")
            .exact()
            .cast(some([F32; 9]), |a, _| a(&[3]).to_dtype(F32))
            .call(|x, c| x[0].to_dtype(c.dtypes[1])),
    ]
}

fn binary() -> Vec<Row> {
    vec![
        Row::new("add")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).add(&b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| a(&[3]).add(&b(&[])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).add(1.5))
            .call(|x, _| x[0].add(&x[1]))
            .call(|x, c| x[0].add(c.dim as f64 / 2.0)),
        Row::new("sub")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).sub(&b(&[3])))
            .cast_of("both 0-d", WIDEST, |a, b| a(&[]).sub(&b(&[])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).sub(1.5))
            .call(|x, _| x[0].sub(&x[1]))
            .call(|x, c| x[0].sub(c.dim as i64)),
        Row::new("mul")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).mul(&b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| b(&[]).mul(&a(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).mul(1.5))
            .call(|x, _| x[0].mul(&x[1]))
            .call(|x, c| x[0].mul(c.dim as f64 / 2.0)),
        Row::new("div")
            .cast(WIDEST, |a, b| a(&[3]).div(&b(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).div(1.5))
            .call(|x, _| x[0].div(&x[1]))
            .call(|x, c| x[0].div(c.dim as i64)),
        Row::new("pow")
            .cast(WIDEST, |a, b| a(&[3]).pow(&b(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).pow(2))
            .call(|x, _| x[0].pow(&x[1]))
            .call(|x, c| x[0].pow(c.dim as i64)),
        Row::new("maximum")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).maximum(&b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| a(&[1]).maximum(&b(&[])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).maximum(0.5))
            .call(|x, _| x[0].maximum(&x[1]))
            .call(|x, c| x[0].maximum(c.dim as f64 / 2.0)),
        Row::new("minimum")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).minimum(&b(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).minimum(0.5))
            .call(|x, _| x[0].minimum(&x[1]))
            .call(|x, c| x[0].minimum(c.dim as i64)),
    ]
}

fn comparisons() -> Vec<Row> {
    type Compare = (&'static str, fn(&Tensor, &Tensor) -> Result<Tensor>, fn(&Tensor, f64) -> Result<Tensor>);
    let functions: [Compare; 6] = [
        ("eq", |a, b| a.eq(b), |a, b| a.eq(b)),
        ("ne", |a, b| a.ne(b), |a, b| a.ne(b)),
        ("lt", |a, b| a.lt(b), |a, b| a.lt(b)),
        ("le", |a, b| a.le(b), |a, b| a.le(b)),
        ("gt", |a, b| a.gt(b), |a, b| a.gt(b)),
        ("ge", |a, b| a.ge(b), |a, b| a.ge(b)),
    ];
    let row = |(name, of_tensors, of_number): Compare| {
        // `eq` and `lt` were measured on PyTorch.
        Row::new(name)
            .steps()
            .cast(LOGICAL, move |a, b| of_tensors(&a(&[3]), &b(&[3])))
            .cast_of("a 0-d tensor", LOGICAL, move |a, b| of_tensors(&a(&[3]), &b(&[])))
            .cast_of("a number", LOGICAL, move |a, _| of_number(&a(&[3]), 0.5))
            .call(move |x, _| of_tensors(&x[0], &x[1]))
            .call(move |x, c| of_number(&x[0], c.dim as f64 / 2.0))
    };
    functions.into_iter().map(row).collect()
}

fn masks() -> Vec<Row> {
    vec![
        Row::new("where_")
            .exact()
            .cast(WIDEST, |a, b| logical().where_(&a(&[3]), &b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| logical().where_(&a(&[3]), &b(&[])))
            .call(|x, _| x[0].where_(&x[1], &x[2]))
            .call(|x, c| x[0].where_(&x[1], c.dim as f64 / 2.0)),
        Row::new("masked_fill")
            .exact()
            .cast(AS_IS, |a, _| a(&[3]).masked_fill(&logical(), 1.0))
            .call(|x, c| x[0].masked_fill(&x[1], c.dim as i64)),
        Row::new("tril").exact().cast(AS_IS, |a, _| a(&[3, 3]).tril(0)).call(|x, c| x[0].tril(c.dim as i64)),
        Row::new("triu")
            .exact()
            .cast_here(AS_IS, |a, _| a(&[3, 3]).triu(0))
            .call(|x, c| x[0].triu(c.other as i64)),
    ]
}

/// Rows of operators whose results do not depend on the input values, or are random.
fn likes() -> Vec<Row> {
    let drawn = |name, f| of_one_here(name, f).steps().no_golden(DRAWN).without(Examples::Local, DRAWN);
    vec![
        of_one_here("zeros_like", |x| x.zeros_like()).steps().no_golden(FILLED),
        of_one_here("ones_like", |x| x.ones_like()).steps().no_golden(FILLED),
        of_one_here("full_like", |x| x.full_like(2.5)).steps().no_golden(FILLED),
        drawn("rand_like", |x| x.rand_like()),
        drawn("randn_like", |x| x.randn_like()),
        drawn("normal_like", |x| x.normal_like(2.0, 0.5)),
        drawn("bernoulli_each", |x| x.clamp(0, 1)?.bernoulli_each()).call(|x, _| x[0].bernoulli_each()),
        drawn("bernoulli_each_with", |x| x.clamp(0, 1)?.bernoulli_each_with(&mut Generator::new(9)))
            .call(|x, _| x[0].bernoulli_each_with(&mut Generator::new(9))),
        of_one("dropout", |x| x.dropout(0.5)).no_golden(DRAWN).call(|x, c| x[0].dropout(c.dim as f64 / 2.0)),
    ]
}
