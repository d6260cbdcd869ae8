//! Examples of elementwise operators with one, two or three inputs, masks, casts, and `*_like` factories.

use dtensor::{DType, Gelu, Generator, Shape, Tensor, manual_seed};

use super::{
    Binary, Make, Operator, SHAPES, Unary, half, mask, nonzero, on_shapes, positive, special, whole,
};

/// Pairs of equal shapes, and of shapes that broadcast.
const PAIRS: [(&[usize], &[usize]); 10] = [
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

pub(super) fn operators() -> Vec<Operator> {
    let mut all = unary();
    all.extend(binary());
    all.extend(masks());
    all.extend(casts());
    all.extend(likes());
    all
}

fn unary() -> Vec<Operator> {
    let functions: [(&'static str, &str, Make, Unary); 43] = [
        ("neg", "", half, |x| x.neg()),
        ("abs", "", half, |x| x.abs()),
        ("sign", "", half, |x| x.sign()),
        ("sqrt", "", positive, |x| x.sqrt()),
        ("rsqrt", "", positive, |x| x.rsqrt()),
        ("recip", "", nonzero, |x| x.recip()),
        ("exp", "", half, |x| x.exp()),
        ("log", "", positive, |x| x.log()),
        ("sin", "", half, |x| x.sin()),
        ("cos", "", half, |x| x.cos()),
        ("tanh", "", half, |x| x.tanh()),
        ("sigmoid", "", half, |x| x.sigmoid()),
        ("relu", "", half, |x| x.relu()),
        ("silu", "", half, |x| x.silu()),
        ("erf", "", half, |x| x.erf()),
        ("gelu", "exact", half, |x| x.gelu(Gelu::Exact)),
        ("gelu", "tanh", half, |x| x.gelu(Gelu::Tanh)),
        ("add", "1.25", half, |x| x.add(1.25)),
        ("add", "a tensor without dims", half, |x| x.add(&Tensor::scalar(1.25)?)),
        ("sub", "1.25", half, |x| x.sub(1.25)),
        ("mul", "-1.5", half, |x| x.mul(-1.5)),
        ("mul", "a tensor without dims", half, |x| x.mul(&Tensor::scalar(-1.5)?)),
        ("mul", "itself", half, |x| x.mul(x)),
        ("div", "-1.5", half, |x| x.div(-1.5)),
        ("rsub", "0.75", half, |x| x.rsub(0.75)),
        ("rdiv", "0.75", nonzero, |x| x.rdiv(0.75)),
        ("pow", "0", half, |x| x.pow(0)),
        ("pow", "2", half, |x| x.pow(2)),
        ("pow", "-2", nonzero, |x| x.pow(-2)),
        ("pow", "1.5", positive, |x| x.pow(1.5)),
        ("rpow", "2", half, |x| x.rpow(2.0)),
        ("maximum", "0.5", half, |x| x.maximum(0.5)),
        ("minimum", "0.5", half, |x| x.minimum(0.5)),
        ("clamp", "-1, 1.25", half, |x| x.clamp(-1, 1.25)),
        ("clamp_min", "-0.5", half, |x| x.clamp_min(-0.5)),
        ("clamp_max", "0.5", half, |x| x.clamp_max(0.5)),
        ("contiguous", "", half, |x| x.contiguous()),
        ("eq", "0.5", half, |x| x.eq(0.5)),
        ("ne", "0.5", half, |x| x.ne(0.5)),
        ("lt", "0.5", half, |x| x.lt(0.5)),
        ("le", "0.5", half, |x| x.le(0.5)),
        ("gt", "0.5", half, |x| x.gt(0.5)),
        ("ge", "0.5", half, |x| x.ge(0.5)),
    ];
    let form = |(name, form, make, f): (&'static str, &str, Make, Unary)| {
        on_shapes(Operator::one(name, form, move |x| f(&x[0])), make, &SHAPES)
    };
    let mut all: Vec<Operator> = functions.into_iter().map(form).collect();
    let odd: [(&'static str, &str, Unary); 6] = [
        ("neg", "NaN", |x| x.neg()),
        ("relu", "NaN", |x| x.relu()),
        ("sigmoid", "NaN", |x| x.sigmoid()),
        ("clamp", "NaN", |x| x.clamp(-1, 1)),
        ("add", "NaN", |x| x.add(1.5)),
        ("maximum", "NaN", |x| x.maximum(0.5)),
    ];
    for (name, form, f) in odd {
        all.push(on_shapes(Operator::one(name, form, move |x| f(&x[0])), special, &[&[8, 4], &[5]]));
    }
    let integers: [(&'static str, &str, Unary); 9] = [
        ("neg", "", |x| x.neg()),
        ("abs", "", |x| x.abs()),
        ("sign", "", |x| x.sign()),
        ("add", "3", |x| x.add(3)),
        // This integer is not exact as an `f64`.
        ("add", "2^53 + 1", |x| x.add(9_007_199_254_740_993i64)),
        ("mul", "-2", |x| x.mul(-2)),
        ("maximum", "1", |x| x.maximum(1)),
        ("clamp", "-2, 2", |x| x.clamp(-2, 2)),
        ("lt", "1", |x| x.lt(1)),
    ];
    for (name, form, f) in integers {
        all.push(on_shapes(Operator::one(name, form, move |x| f(&x[0])), whole, &[&[8, 2], &[5], &[0, 3]]));
    }
    // The logarithm and the quotient of integers are errors.
    for (name, f) in [("log", (|x| x.log()) as Unary), ("div", |x| x.div(2))] {
        all.push(on_shapes(Operator::one(name, "integers", move |x| f(&x[0])), whole, &[&[8], &[5]]));
    }
    // The input is not contiguous.
    let turned = Operator::one("contiguous", "turned", |x| x[0].t()?.contiguous()).exact();
    all.push(on_shapes(turned, half, &[&[8, 4], &[5, 3], &[1, 2]]));
    all
}

fn binary() -> Vec<Operator> {
    let mut all = Vec::new();
    let arithmetic: [(&'static str, Make, Make, Binary); 7] = [
        ("add", half, half, |a, b| a.add(b)),
        ("sub", half, half, |a, b| a.sub(b)),
        ("mul", half, half, |a, b| a.mul(b)),
        ("div", half, nonzero, |a, b| a.div(b)),
        ("pow", positive, half, |a, b| a.pow(b)),
        ("maximum", half, half, |a, b| a.maximum(b)),
        ("minimum", half, half, |a, b| a.minimum(b)),
    ];
    let comparisons: [(&'static str, Make, Make, Binary); 6] = [
        ("eq", half, half, |a, b| a.eq(b)),
        ("ne", half, half, |a, b| a.ne(b)),
        ("lt", half, half, |a, b| a.lt(b)),
        ("le", half, half, |a, b| a.le(b)),
        ("gt", half, half, |a, b| a.gt(b)),
        ("ge", half, half, |a, b| a.ge(b)),
    ];
    let some = [PAIRS[1], PAIRS[2], PAIRS[4], PAIRS[8]];
    let functions =
        arithmetic.iter().map(|f| (f, &PAIRS[..])).chain(comparisons.iter().map(|f| (f, &some[..])));
    for (&(name, left, right, f), pairs) in functions {
        let mut operator = Operator::one(name, "tensors", move |x| f(&x[0], &x[1]));
        for (a, b) in pairs {
            operator = operator.on([left(a, 1), right(b, 2)]);
        }
        // These shapes do not broadcast.
        all.push(operator.on([left(&[4, 3], 1), right(&[4], 2)]));
    }
    let integers: [(&'static str, Binary); 5] = [
        ("add", |a, b| a.add(b)),
        ("sub", |a, b| a.sub(b)),
        ("mul", |a, b| a.mul(b)),
        ("minimum", |a, b| a.minimum(b)),
        ("eq", |a, b| a.eq(b)),
    ];
    for (name, f) in integers {
        let operator = Operator::one(name, "integers", move |x| f(&x[0], &x[1]));
        all.push(operator.on([whole(&[8, 3], 1), whole(&[3], 2)]).on([whole(&[5], 1), whole(&[5], 2)]));
    }
    all.push(Operator::one("mul", "two dtypes", |x| x[0].mul(&x[1])).on([half(&[8], 1), whole(&[8], 2)]));
    all.push(
        Operator::one("sub", "overloaded", |x| &x[0] - &x[1])
            .on([half(&[8, 4], 1), half(&[4], 2)])
            .on([half(&[5], 1), half(&[], 2)]),
    );
    let sums: [(&[usize], &[usize]); 5] =
        [(&[8, 4], &[4]), (&[2, 5, 4], &[5, 1]), (&[8, 3], &[]), (&[5], &[5]), (&[0, 3], &[1, 3])];
    for (from, to) in sums {
        let to = Shape::from(to);
        all.push(Operator::one("sum_to", to.to_string(), move |x| x[0].sum_to(&to)).on([half(from, 1)]));
    }
    all
}

fn masks() -> Vec<Operator> {
    let mut all = Vec::new();
    let mut chosen = Operator::one("where_", "tensors", |x| x[0].where_(&x[1], &x[2]));
    for (a, b) in [PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[4], PAIRS[6], PAIRS[8]] {
        for m in [a, b] {
            chosen = chosen.on([mask(m, 1), half(a, 2), half(b, 3)]);
        }
    }
    all.push(chosen);
    let (mut yes, mut no) = (
        Operator::one("where_", "tensor, 0.5", |x| x[0].where_(&x[1], 0.5)),
        Operator::one("where_", "0.5, tensor", |x| x[0].where_(0.5, &x[1])),
    );
    let mut fill = Operator::one("masked_fill", "-7.5", |x| x[0].masked_fill(&x[1], -7.5));
    for (a, m) in [PAIRS[0], PAIRS[1], PAIRS[2], (&[2, 3], &[2, 1]), (&[5], &[]), (&[0, 3], &[3])] {
        yes = yes.on([mask(m, 1), half(a, 2)]);
        no = no.on([mask(m, 1), half(a, 2)]);
        fill = fill.on([half(a, 1), mask(m, 2)]);
    }
    all.extend([yes, no, fill]);
    for diagonal in [-1, 0, 2] {
        let shapes: [&[usize]; 6] = [&[8, 4], &[5, 3], &[4, 2, 3], &[1, 1], &[0, 3], &[2, 3, 0]];
        let lower = Operator::one("tril", diagonal.to_string(), move |x| x[0].tril(diagonal)).exact();
        let upper = Operator::one("triu", diagonal.to_string(), move |x| x[0].triu(diagonal)).exact();
        all.extend([on_shapes(lower, half, &shapes), on_shapes(upper, half, &shapes)]);
    }
    all
}

fn casts() -> Vec<Operator> {
    let shapes: [&[usize]; 4] = [&[8, 3], &[5], &[0, 2], &[]];
    let casts: [(Make, DType); 9] = [
        (half, DType::F64),
        (half, DType::F32),
        (half, DType::BF16),
        (half, DType::I64),
        (positive, DType::U8),
        (whole, DType::F64),
        (whole, DType::F32),
        (mask, DType::F64),
        (mask, DType::I64),
    ];
    let cast = |(make, dtype): (Make, DType)| {
        on_shapes(Operator::one("to_dtype", dtype.to_string(), move |x| x[0].to_dtype(dtype)), make, &shapes)
            .exact()
    };
    casts.into_iter().map(cast).collect()
}

/// Operators whose results depend only on the shapes of the inputs, and dropout. Every rank has the same generator.
fn likes() -> Vec<Operator> {
    let functions: [(&'static str, &str, Unary); 11] = [
        ("zeros_like", "", |x| x.zeros_like()),
        ("ones_like", "", |x| x.ones_like()),
        ("full_like", "2.5", |x| x.full_like(2.5)),
        ("rand_like", "", |x| {
            manual_seed(3);
            x.rand_like()
        }),
        ("randn_like", "", |x| {
            manual_seed(4);
            x.randn_like()
        }),
        ("normal_like", "2, 0.5", |x| {
            manual_seed(8);
            x.normal_like(2.0, 0.5)
        }),
        ("bernoulli_each", "", |x| {
            manual_seed(9);
            x.clamp(0.0, 1.0)?.bernoulli_each()
        }),
        ("bernoulli_each_with", "", |x| x.clamp(0.0, 1.0)?.bernoulli_each_with(&mut Generator::new(9))),
        ("dropout", "0.4", |x| {
            manual_seed(5);
            x.dropout(0.4)
        }),
        ("dropout", "0.5, the second draw", |x| {
            manual_seed(6);
            x.dropout(0.5)?.dropout(0.5)
        }),
        ("dropout", "1", |x| x.dropout(1.0)),
    ];
    let form = |(name, form, f): (&'static str, &str, Unary)| {
        on_shapes(Operator::one(name, form, move |x| f(&x[0])), half, &SHAPES).exact()
    };
    functions.into_iter().map(form).collect()
}
