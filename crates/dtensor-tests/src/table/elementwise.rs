//! Rows of elementwise operators with one, two or three inputs, masks, casts, and `*_like` factories.

use dtensor::DType::{BF16, F32, F64, I64, U8};
use dtensor::{DType, Gelu, Generator, Operand, Result, Shape, Tensor, manual_seed};

use super::form::{Form, one};
use super::{AS_IS, Examples, LOGICAL, Row, SHAPES, Sizes, Unary, WIDEST, logical, some};
use crate::inputs::{Make, mask, nonzero, positive, real, special, whole};

const DRAWN: &str = "its numbers are drawn";
const FILLED: &str = "its numbers are given";

/// Pairs of equal shapes, and of shapes that broadcast.
const PAIRS: [(Sizes, Sizes); 10] = [
    (&[8, 4], &[8, 4]),
    (&[5, 3], &[5, 3]),
    (&[8, 4], &[4]),
    (&[5, 1], &[1, 6]),
    (&[2, 1, 3], &[4, 1]),
    (&[], &[4, 3]),
    (&[4, 3], &[]),
    (&[], &[]),
    (&[0, 4], &[1, 4]),
    (&[1], &[2, 3]),
];

type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

pub(crate) fn rows() -> Vec<Row> {
    let mut all = unary();
    all.extend(binary());
    all.extend(ternary());
    all.extend(comparisons());
    all.extend(masks());
    all.extend(likes());
    all
}

/// Returns a form of an operator with one input, on many shapes.
fn map(form: &str, make: Make, f: Unary) -> Form {
    one(form, move |x| f(&x[0])).each(make, &SHAPES).each_on_device(make, &[&[5], &[2, 0, 3]])
}

/// Returns a form whose other operand is the same on every rank, and not distributed.
fn constant(f: Unary) -> Form {
    one("a tensor without dims", move |x| f(&x[0])).each_on_meshes(real, &SHAPES)
}

fn specials(f: Unary) -> Form {
    one("NaN", move |x| f(&x[0])).each_on_meshes(special, &[&[8, 4], &[5]])
}

fn integers(form: &str, f: Unary) -> Form {
    one(form, move |x| f(&x[0])).each_on_meshes(whole, &[&[8, 2], &[5], &[0, 3]])
}

/// Returns a form of an operator with two inputs, on all pairs of shapes that broadcast.
fn zip(left: Make, right: Make, f: Binary) -> Form {
    let form = PAIRS
        .iter()
        .fold(one("tensors", move |x| f(&x[0], &x[1])), |form, (a, b)| form.on([left(a), right(b)]));
    form.on_device([left(&[2, 1, 0]), right(&[3, 1])]).fails([left(&[4, 3]), right(&[4])])
}

fn zip_integers(f: Binary) -> Form {
    let form = one("integers", move |x| f(&x[0], &x[1]));
    form.on_meshes([whole(&[8, 3]), whole(&[3])]).on_meshes([whole(&[5]), whole(&[5])])
}

/// Returns the row of a unary elementwise operator.
fn of_one(name: &'static str, make: Make, f: Unary) -> Row {
    Row::new(name)
        .cast(AS_IS, move |a, _| f(&a(&[3])))
        .call(move |x, _| f(&x[0]))
        .golden(move |x, _| f(&x[0]))
        .form(map("", make, f))
}

fn unary() -> Vec<Row> {
    vec![
        of_one("neg", real, |x| x.neg()).exact().form(specials(|x| x.neg())).form(integers("", |x| x.neg())),
        of_one("abs", real, |x| x.abs()).exact().form(integers("", |x| x.abs())),
        // `sign` was not measured on PyTorch under autocast.
        of_one("sign", real, |x| x.sign()).exact().form(integers("", |x| x.sign())),
        of_one("sqrt", positive, |x| x.sqrt()),
        of_one("rsqrt", positive, |x| x.rsqrt()),
        of_one("recip", nonzero, |x| x.recip()),
        of_one("exp", real, |x| x.exp()),
        of_one("log", positive, |x| x.log())
            .form(one("integers", |x| x[0].log()).fails([whole(&[8])]).fails([whole(&[5])])),
        of_one("sin", real, |x| x.sin()),
        of_one("cos", real, |x| x.cos()),
        of_one("tanh", real, |x| x.tanh()),
        of_one("sigmoid", real, |x| x.sigmoid()).form(specials(|x| x.sigmoid())),
        of_one("relu", real, |x| x.relu()).exact().form(specials(|x| x.relu())),
        of_one("silu", real, |x| x.silu()),
        of_one("erf", real, |x| x.erf()),
        Row::new("gelu")
            .cast(AS_IS, |a, _| a(&[3]).gelu(Gelu::Exact))
            .call(|x, _| x[0].gelu(Gelu::Exact))
            .call(|x, _| x[0].gelu(Gelu::Tanh))
            .golden(|x, a| x[0].gelu(if a.text("form") == "tanh" { Gelu::Tanh } else { Gelu::Exact }))
            .form(map("exact", real, |x| x.gelu(Gelu::Exact)))
            .form(map("tanh", real, |x| x.gelu(Gelu::Tanh))),
        of_one("contiguous", real, |x| x.contiguous()).exact().form(
            // The input is not contiguous.
            one("turned", |x| x[0].t()?.contiguous()).exact().each(real, &[&[8, 4], &[5, 3], &[1, 2]]),
        ),
        Row::new("rsub")
            .cast_here(AS_IS, |a, _| a(&[3]).rsub(1.5))
            .call(|x, c| x[0].rsub(c.dim as f64 / 2.0))
            .golden(|x, a| x[0].rsub(a.scalar("scalar")))
            .form(map("0.75", real, |x| x.rsub(0.75))),
        Row::new("rdiv")
            .cast_here(AS_IS, |a, _| a(&[3]).rdiv(1.5))
            .call(|x, c| x[0].rdiv(c.dim as i64))
            .golden(|x, a| x[0].rdiv(a.scalar("scalar")))
            .form(map("0.75", nonzero, |x| x.rdiv(0.75))),
        Row::new("rpow")
            .no_golden("it is `pow` with its arguments the other way round")
            .cast_here(AS_IS, |a, _| a(&[3]).rpow(2.0))
            .call(|x, c| x[0].rpow(c.dim as f64 / 2.0))
            .form(map("2", real, |x| x.rpow(2.0))),
        Row::new("clamp")
            .exact()
            .cast(AS_IS, |a, _| a(&[3]).clamp(0.0, 0.5))
            .call(|x, c| x[0].clamp(c.dim as i64, 1))
            .call(|x, c| x[0].clamp(c.dim as f64 / 2.0, c.other as f64))
            .golden(|x, a| x[0].clamp(a.scalar("lo"), a.scalar("hi")))
            .form(map("-1, 1.25", real, |x| x.clamp(-1, 1.25)))
            .form(specials(|x| x.clamp(-1, 1)))
            .form(integers("-2, 2", |x| x.clamp(-2, 2))),
        Row::new("clamp_min")
            .exact()
            .cast_here(AS_IS, |a, _| a(&[3]).clamp_min(0.5))
            .call(|x, c| x[0].clamp_min(c.dim as f64 / 2.0))
            .golden(|x, a| x[0].clamp_min(a.scalar("lo")))
            .form(map("-0.5", real, |x| x.clamp_min(-0.5))),
        Row::new("clamp_max")
            .exact()
            .cast_here(AS_IS, |a, _| a(&[3]).clamp_max(0.5))
            .call(|x, c| x[0].clamp_max(c.dim as i64))
            .golden(|x, a| x[0].clamp_max(a.scalar("hi")))
            .form(map("0.5", real, |x| x.clamp_max(0.5))),
        to_dtype(),
    ]
}

fn to_dtype() -> Row {
    let row = Row::new("to_dtype")
        .exact()
        .cast(some([F32; 9]), |a, _| a(&[3]).to_dtype(F32))
        .call(|x, c| x[0].to_dtype(c.dtypes[1]))
        .golden(|x, a| x[0].to_dtype(a.dtype()))
        // The value passes through single precision, so the difference quotient is only that accurate.
        .form(
            one("there and back", |x| x[0].to_dtype(F32)?.to_dtype(F64)?.mul(&x[0].to_dtype(F64)?))
                .tolerance(2e-4)
                .each_on_device(real, &[&[], &[5], &[3, 4], &[2, 1, 3], &[0], &[2, 0, 3]]),
        );
    let shapes: [Sizes; 4] = [&[8, 3], &[5], &[0, 2], &[]];
    let casts: [(Make, DType); 8] = [
        (real, F32),
        (real, BF16),
        (real, I64),
        (positive, U8),
        (whole, F64),
        (whole, F32),
        (mask, F64),
        (mask, I64),
    ];
    let cast = |to: DType| one(to.to_string(), move |x| x[0].to_dtype(to)).exact();
    let row = row.form(cast(F64).each(real, &shapes).each_on_device(real, &[&[2, 1, 3], &[2, 0, 3]]));
    casts.into_iter().fold(row, |row, (make, to)| row.form(cast(to).each_on_meshes(make, &shapes)))
}

fn binary() -> Vec<Row> {
    vec![
        Row::new("add")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).add(&b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| a(&[3]).add(&b(&[])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).add(1.5))
            .call(|x, _| x[0].add(&x[1]))
            .call(|x, c| x[0].add(c.dim as f64 / 2.0))
            .golden(|x, a| x[0].add(a.operand(x, "scalar")))
            .form(map("1.25", real, |x| x.add(1.25)))
            .form(constant(|x| x.add(&Tensor::scalar(1.25)?)))
            .form(zip(real, real, |a, b| a.add(b)))
            .form(specials(|x| x.add(1.5)))
            .form(integers("3", |x| x.add(3)))
            // This integer is not exact as an `f64`.
            .form(integers("2^53 + 1", |x| x.add(9_007_199_254_740_993i64)))
            .form(zip_integers(|a, b| a.add(b))),
        Row::new("sub")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).sub(&b(&[3])))
            .cast_of("both 0-d", WIDEST, |a, b| a(&[]).sub(&b(&[])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).sub(1.5))
            .call(|x, _| x[0].sub(&x[1]))
            .call(|x, c| x[0].sub(c.dim as i64))
            .golden(|x, a| x[0].sub(a.operand(x, "scalar")))
            .form(map("1.25", real, |x| x.sub(1.25)))
            .form(zip(real, real, |a, b| a.sub(b)))
            .form(zip_integers(|a, b| a.sub(b)))
            .form(
                one("overloaded", |x| &x[0] - &x[1])
                    .on([real(&[8, 4]), real(&[4])])
                    .on([real(&[5]), real(&[])]),
            ),
        Row::new("mul")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).mul(&b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| b(&[]).mul(&a(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).mul(1.5))
            .call(|x, _| x[0].mul(&x[1]))
            .call(|x, c| x[0].mul(c.dim as f64 / 2.0))
            .golden(|x, a| x[0].mul(a.operand(x, "scalar")))
            .form(map("-1.5", real, |x| x.mul(-1.5)))
            .form(constant(|x| x.mul(&Tensor::scalar(-1.5)?)))
            .form(map("itself", real, |x| x.mul(x)))
            .form(zip(real, real, |a, b| a.mul(b)))
            .form(integers("-2", |x| x.mul(-2)))
            .form(zip_integers(|a, b| a.mul(b)))
            .form(one("two dtypes", |x| x[0].mul(&x[1])).fails([real(&[8]), whole(&[8])])),
        Row::new("div")
            .cast(WIDEST, |a, b| a(&[3]).div(&b(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).div(1.5))
            .call(|x, _| x[0].div(&x[1]))
            .call(|x, c| x[0].div(c.dim as i64))
            .golden(|x, a| x[0].div(a.operand(x, "scalar")))
            .form(map("-1.5", real, |x| x.div(-1.5)))
            .form(zip(real, nonzero, |a, b| a.div(b)))
            .form(one("integers", |x| x[0].div(2)).fails([whole(&[8])]).fails([whole(&[5])])),
        Row::new("pow")
            .cast(WIDEST, |a, b| a(&[3]).pow(&b(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).pow(2))
            .call(|x, _| x[0].pow(&x[1]))
            .call(|x, c| x[0].pow(c.dim as i64))
            .golden(|x, a| x[0].pow(a.operand(x, "exponent")))
            .form(map("0", real, |x| x.pow(0)))
            .form(map("2", real, |x| x.pow(2)))
            .form(map("-2", nonzero, |x| x.pow(-2)))
            .form(map("1.5", positive, |x| x.pow(1.5)))
            .form(one("1", |x| x[0].pow(1)).each_on_device(real, &SHAPES))
            .form(one("3", |x| x[0].pow(3)).each_on_device(nonzero, &SHAPES))
            .form(zip(positive, real, |a, b| a.pow(b))),
        Row::new("maximum")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).maximum(&b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| a(&[1]).maximum(&b(&[])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).maximum(0.5))
            .call(|x, _| x[0].maximum(&x[1]))
            .call(|x, c| x[0].maximum(c.dim as f64 / 2.0))
            .golden(|x, a| x[0].maximum(a.operand(x, "scalar")))
            .form(map("0.5", real, |x| x.maximum(0.5)))
            .form(zip(real, real, |a, b| a.maximum(b)))
            .form(specials(|x| x.maximum(0.5)))
            .form(integers("1", |x| x.maximum(1))),
        Row::new("minimum")
            .exact()
            .cast(WIDEST, |a, b| a(&[3]).minimum(&b(&[3])))
            .cast_of("a number", AS_IS, |a, _| a(&[3]).minimum(0.5))
            .call(|x, _| x[0].minimum(&x[1]))
            .call(|x, c| x[0].minimum(c.dim as i64))
            .golden(|x, a| x[0].minimum(a.operand(x, "scalar")))
            .form(map("0.5", real, |x| x.minimum(0.5)))
            .form(zip(real, real, |a, b| a.minimum(b)))
            .form(zip_integers(|a, b| a.minimum(b))),
        sum_to(),
    ]
}

/// Shapes that broadcast together.
const TRIPLES: [(Sizes, Sizes, Sizes); 8] = [
    (&[8, 4], &[8, 4], &[8, 4]),
    (&[5, 3], &[5, 3], &[]),
    (&[8, 4], &[4], &[8, 1]),
    (&[4], &[8, 1], &[8, 4]),
    (&[2, 1, 3], &[4, 1], &[3]),
    (&[1], &[2, 3], &[2, 1]),
    (&[], &[], &[]),
    (&[0, 4], &[1, 4], &[4]),
];

/// Returns a form of an operator with three inputs, on all triples of shapes that broadcast.
fn zip3(f: fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>) -> Form {
    let form = TRIPLES.iter().fold(one("tensors", move |x| f(&x[0], &x[1], &x[2])), |form, (a, b, c)| {
        form.on([real(a), real(b), real(c)])
    });
    form.fails([real(&[4, 3]), real(&[3]), real(&[4])])
}

fn ternary() -> Vec<Row> {
    vec![
        Row::new("lerp")
            .cast(WIDEST, |a, b| a(&[3]).lerp(&b(&[3]), &a(&[3])))
            .cast_of("a 0-d weight", AS_IS, |a, b| a(&[3]).lerp(&a(&[3]), &b(&[])))
            .cast_of("a number", WIDEST, |a, b| a(&[3]).lerp(&b(&[3]), 0.25))
            .call(|x, _| x[0].lerp(&x[1], &x[2]))
            .call(|x, c| x[0].lerp(&x[1], c.dim as f64 / 2.0))
            .golden(|x, a| match a.has("weight") {
                true => x[0].lerp(&x[1], a.scalar("weight")),
                false => x[0].lerp(&x[1], &x[2]),
            })
            .form(zip3(|a, b, w| a.lerp(b, w)))
            .form(zip(real, real, |a, b| a.lerp(b, 0.25))),
    ]
}

fn sum_to() -> Row {
    let row = Row::new("sum_to")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).sum_to(&Shape::from(&[3][..])))
        .call(|x, c| x[0].sum_to(&Shape::from(&c.shapes[2][..])))
        .golden(|x, a| x[0].sum_to(&Shape::from(a.sizes("shape"))));
    let sums: [(Sizes, Sizes); 5] =
        [(&[8, 4], &[4]), (&[2, 5, 4], &[5, 1]), (&[8, 3], &[]), (&[5], &[5]), (&[0, 3], &[1, 3])];
    sums.into_iter().fold(row, |row, (from, to)| {
        let to = Shape::from(to);
        row.form(one(to.to_string(), move |x| x[0].sum_to(&to)).on([real(from)]))
    })
}

fn comparisons() -> Vec<Row> {
    type Compare = fn(&Tensor, Operand<'_>) -> Result<Tensor>;
    let functions: [(&'static str, Compare); 6] = [
        ("eq", |a, b| a.eq(b)),
        ("ne", |a, b| a.ne(b)),
        ("lt", |a, b| a.lt(b)),
        ("le", |a, b| a.le(b)),
        ("gt", |a, b| a.gt(b)),
        ("ge", |a, b| a.ge(b)),
    ];
    let row = |(name, f): (&'static str, Compare)| {
        let of_tensors = move |a: &Tensor, b: &Tensor| f(a, b.into());
        let of_number = move |a: &Tensor, b: f64| f(a, b.into());
        let tensors = one("tensors", move |x| of_tensors(&x[0], &x[1]));
        let tensors = PAIRS.iter().enumerate().fold(tensors, |form, (i, (a, b))| {
            let inputs = [real(a), real(b)];
            if [1, 2, 4, 8].contains(&i) { form.on(inputs) } else { form.on_device(inputs) }
        });
        // `eq` and `lt` were measured on PyTorch.
        let row = Row::new(name)
            .steps()
            .cast(LOGICAL, move |a, b| of_tensors(&a(&[3]), &b(&[3])))
            .cast_of("a 0-d tensor", LOGICAL, move |a, b| of_tensors(&a(&[3]), &b(&[])))
            .cast_of("a number", LOGICAL, move |a, _| of_number(&a(&[3]), 0.5))
            .call(move |x, _| of_tensors(&x[0], &x[1]))
            .call(move |x, c| of_number(&x[0], c.dim as f64 / 2.0))
            .golden(move |x, a| f(&x[0], a.operand(x, "scalar")))
            .form(one("0.5", move |x| of_number(&x[0], 0.5)).each(real, &SHAPES))
            .form(tensors.fails([real(&[4, 3]), real(&[4])]));
        match name {
            "lt" => row.form(integers("1", |x| x.lt(1))),
            "eq" => row.form(zip_integers(|a, b| a.eq(b))),
            _ => row,
        }
    };
    functions.into_iter().map(row).collect()
}

fn masks() -> Vec<Row> {
    let mut chosen = one("tensors", |x| x[0].where_(&x[1], &x[2]));
    for (a, b) in [PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[4], PAIRS[6], PAIRS[8]] {
        for m in [a, b] {
            chosen = chosen.on([mask(m), real(a), real(b)]);
        }
        for m in [&[][..], &[1]] {
            chosen = chosen.on_device([mask(m), real(a), real(b)]);
        }
    }
    for (a, b) in [PAIRS[3], PAIRS[5], PAIRS[7], (&[2, 1, 0], &[3, 1])] {
        for m in [&[][..], &[1], a, b] {
            chosen = chosen.on_device([mask(m), real(a), real(b)]);
        }
    }
    let fills: [(Sizes, Sizes); 6] =
        [PAIRS[0], PAIRS[1], PAIRS[2], (&[2, 3], &[2, 1]), (&[5], &[]), (&[0, 3], &[3])];
    let filled = |form: Form| fills.iter().fold(form, |form, (x, m)| form.on([mask(m), real(x)]));
    let fill = one("-7.5", |x| x[0].masked_fill(&x[1], -7.5)).on_device([real(&[]), mask(&[])]);
    let triangles: [Sizes; 6] = [&[8, 4], &[5, 3], &[4, 2, 3], &[1, 1], &[0, 3], &[2, 3, 0]];
    let triangle = |row: Row, f: fn(&Tensor, i64) -> Result<Tensor>| {
        [-1, 0, 2].into_iter().fold(row.exact(), |row, diagonal| {
            let form = one(diagonal.to_string(), move |x| f(&x[0], diagonal)).exact();
            row.form(form.each(real, &triangles))
        })
    };
    vec![
        Row::new("where_")
            .exact()
            .cast(WIDEST, |a, b| logical().where_(&a(&[3]), &b(&[3])))
            .cast_of("a 0-d tensor", AS_IS, |a, b| logical().where_(&a(&[3]), &b(&[])))
            .call(|x, _| x[0].where_(&x[1], &x[2]))
            .call(|x, c| x[0].where_(&x[1], c.dim as f64 / 2.0))
            .golden(|x, a| match (a.has("this"), a.has("other")) {
                (true, _) => x[0].where_(a.scalar("this"), &x[1]),
                (_, true) => x[0].where_(&x[1], a.scalar("other")),
                _ => x[0].where_(&x[1], &x[2]),
            })
            .form(chosen)
            .form(filled(one("tensor, 0.5", |x| x[0].where_(&x[1], 0.5))))
            .form(filled(one("0.5, tensor", |x| x[0].where_(0.5, &x[1])))),
        Row::new("masked_fill")
            .exact()
            .cast(AS_IS, |a, _| a(&[3]).masked_fill(&logical(), 1.0))
            .call(|x, c| x[0].masked_fill(&x[1], c.dim as i64))
            .golden(|x, a| x[0].masked_fill(&x[1], a.scalar("value")))
            .form(fills.iter().fold(fill, |form, (x, m)| form.on([real(x), mask(m)]))),
        triangle(
            Row::new("tril")
                .cast(AS_IS, |a, _| a(&[3, 3]).tril(0))
                .call(|x, c| x[0].tril(c.dim as i64))
                .golden(|x, a| x[0].tril(a.int("diagonal") as i64)),
            |x, diagonal| x.tril(diagonal),
        ),
        triangle(
            Row::new("triu")
                .cast_here(AS_IS, |a, _| a(&[3, 3]).triu(0))
                .call(|x, c| x[0].triu(c.other as i64))
                .golden(|x, a| x[0].triu(a.int("diagonal") as i64)),
            |x, diagonal| x.triu(diagonal),
        ),
    ]
}

/// Rows of operators whose results do not depend on the input values, or are random. Every rank has the same generator.
fn likes() -> Vec<Row> {
    let like = |name, f: Unary| {
        Row::new(name).steps().cast_here(AS_IS, move |a, _| f(&a(&[3]))).call(move |x, _| f(&x[0]))
    };
    let filled = |name, f: Unary| like(name, f).no_golden(FILLED).form(map("", real, f).exact());
    let drawn = |name, f: Unary, seeded: Unary| {
        let form = one("", move |x| seeded(&x[0])).exact().each_on_meshes(real, &SHAPES);
        like(name, f).no_golden(DRAWN).without(Examples::Local, DRAWN).form(form)
    };
    vec![
        filled("zeros_like", |x| x.zeros_like()),
        filled("ones_like", |x| x.ones_like()),
        filled("full_like", |x| x.full_like(2.5)),
        drawn(
            "rand_like",
            |x| x.rand_like(),
            |x| {
                manual_seed(3);
                x.rand_like()
            },
        ),
        drawn(
            "randn_like",
            |x| x.randn_like(),
            |x| {
                manual_seed(4);
                x.randn_like()
            },
        ),
        drawn(
            "normal_like",
            |x| x.normal_like(2.0, 0.5),
            |x| {
                manual_seed(8);
                x.normal_like(2.0, 0.5)
            },
        ),
        drawn(
            "bernoulli_each",
            |x| x.clamp(0, 1)?.bernoulli_each(),
            |x| {
                manual_seed(9);
                x.clamp(0.0, 1.0)?.bernoulli_each()
            },
        )
        .call(|x, _| x[0].bernoulli_each()),
        drawn(
            "bernoulli_each_with",
            |x| x.clamp(0, 1)?.bernoulli_each_with(&mut Generator::new(9)),
            |x| x.clamp(0.0, 1.0)?.bernoulli_each_with(&mut Generator::new(9)),
        )
        .call(|x, _| x[0].bernoulli_each_with(&mut Generator::new(9))),
        Row::new("dropout")
            .cast(AS_IS, |a, _| a(&[3]).dropout(0.5))
            .no_golden(DRAWN)
            .call(|x, _| x[0].dropout(0.5))
            .call(|x, c| x[0].dropout(c.dim as f64 / 2.0))
            .form(
                map("0.4", real, |x| {
                    manual_seed(5);
                    x.dropout(0.4)
                })
                .exact(),
            )
            .form(
                map("0.5, the second draw", real, |x| {
                    manual_seed(6);
                    x.dropout(0.5)?.dropout(0.5)
                })
                .exact(),
            )
            .form(map("1", real, |x| x.dropout(1.0)).exact())
            .form(one("0", |x| x[0].dropout(0.0)).each_on_device(real, &SHAPES)),
    ]
}
