//! What cannot be computed is refused with a message that says what and why; nothing panics and nothing changes.
//! What is not known of a value is known of its shape: meta tensors go through every operator as real ones do.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{cases, ids, mask};
use dtensor::nn::{Linear, Parameter};
use dtensor::optim::Sgd;
use dtensor::{
    Aside, Attention, Backward, BackwardOptions, CrossEntropy, DType, Device, Error, Gelu, Grads, Here,
    INFER, Local, Locals, Meta, Metas, Op, Reduction, Result, Rule, Shape, Tensor, apply, grad,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

/// Asserts that a result is an error whose message has all of these words.
#[track_caller]
fn refused<T>(result: Result<T>, words: &[&str]) {
    let Err(error) = result else { panic!("accepted, but expected an error with {words:?}") };
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

fn zeros(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::F32).unwrap()
}

fn ints(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::I64).unwrap()
}

fn bytes(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::U8).unwrap()
}

fn meta(shape: impl Into<Shape>) -> Tensor {
    Tensor::meta_of(shape, DType::F32).unwrap()
}

type Unary = fn(&Tensor) -> Result<Tensor>;
type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

const ELEMENTWISE: [(&str, Binary); 13] = [
    ("add", |a, b| a.add(b)),
    ("sub", |a, b| a.sub(b)),
    ("mul", |a, b| a.mul(b)),
    ("div", |a, b| a.div(b)),
    ("pow", |a, b| a.pow(b)),
    ("maximum", |a, b| a.maximum(b)),
    ("minimum", |a, b| a.minimum(b)),
    ("eq", |a, b| a.eq(b)),
    ("ne", |a, b| a.ne(b)),
    ("lt", |a, b| a.lt(b)),
    ("le", |a, b| a.le(b)),
    ("gt", |a, b| a.gt(b)),
    ("ge", |a, b| a.ge(b)),
];

#[test]
fn shapes_that_do_not_fit_are_named() -> Result<()> {
    let shapes = ["[2, 3]", "[4]"];
    let (a, b) = (zeros([2, 3]), zeros([4]));
    for (name, f) in ELEMENTWISE {
        refused(f(&a, &b), &[&format!("{name}: "), "broadcast", shapes[0], shapes[1]]);
        refused(f(&zeros([0]), &zeros([2])), &[name, "[0]", "[2]"]);
    }
    refused(mask(&[2, 3], 1).where_(&a, &b), &["where", "broadcast", "[2, 3]", "[4]"]);
    refused(bytes([5]).where_(&a, &a), &["where", "broadcast", "[2, 3]", "[5]"]);
    refused(a.masked_fill(&bytes([4]), 0.0), &["masked_fill", "[2, 3]", "[4]"]);
    refused(b.masked_fill(&bytes([2, 4]), 0.0), &["masked_fill", "[4]", "[2, 4]"]);
    refused(a.sum_to(&Shape::from([4])), &["sum_to", "[2, 3]", "[4]"]);
    refused(b.sum_to(&Shape::from([2, 4])), &["sum_to", "[4]", "[2, 4]"]);
    refused(a.expand([2, 4]), &["expand", "[2, 3]", "[2, 4]"]);
    refused(a.expand([3]), &["expand", "[2, 3]", "[3]"]);
    refused(a.mse_loss(&b, Reduction::Mean), &["mse_loss", "[2, 3]", "[4]"]);

    refused(a.matmul(&a), &["matmul", "cannot be multiplied", "[2, 3]"]);
    refused(a.matmul(&b), &["matmul", "[2, 3]", "[4, 1]"]);
    refused(b.matmul(&a), &["matmul", "[1, 4]", "[2, 3]"]);
    refused(zeros([2, 2, 3]).matmul(&zeros([5, 3, 2])), &["matmul", "broadcast", "[2]", "[5]"]);
    refused(zeros(()).matmul(&a), &["matmul", "1-D"]);
    refused(a.mm(&b), &["mm", "right operand", "2 dims", "[4]"]);
    refused(zeros([1, 2, 3]).mm(&a), &["mm", "left operand", "[1, 2, 3]"]);
    refused(a.mm(&a), &["mm", "[2, 3]"]);
    refused(a.bmm(&a), &["bmm", "3 dims", "[2, 3]"]);
    refused(zeros([1, 2, 3]).bmm(&zeros([4, 3, 2])), &["bmm", "batch", "[1, 2, 3]", "[4, 3, 2]"]);
    refused(zeros([2, 2]).addmm(&a, &b), &["addmm", "mat2", "[4]"]);
    refused(zeros([5]).addmm(&a, &zeros([3, 4])), &["addmm", "[5]", "[2, 4]"]);
    refused(a.linear(&zeros([2, 4]), None), &["linear", "[2, 3]", "[2, 4]"]);
    refused(a.linear(&zeros([4, 3]), Some(&zeros([3]))), &["linear", "bias", "[3]", "[4, 3]"]);
    refused(a.linear(&zeros([3]), None), &["linear", "weight", "2 dims", "[3]"]);
    refused(zeros(()).linear(&zeros([4, 3]), None), &["linear", "1 dim"]);

    refused(a.layer_norm(1, Some(&b), None, 1e-5), &["layer_norm", "weight", "[3]", "[4]"]);
    refused(a.layer_norm(1, None, Some(&b), 1e-5), &["layer_norm", "bias", "[3]", "[4]"]);
    refused(a.layer_norm(3, None, None, 1e-5), &["layer_norm", "[2, 3]", "3 dims"]);
    refused(a.layer_norm(0, None, None, 1e-5), &["layer_norm", "[2, 3]", "0 dims"]);
    refused(a.rms_norm(2, Some(&b), 1e-5), &["rms_norm", "[2, 3]", "[4]"]);

    refused(a.index_select(0, &ints([2, 2])), &["index_select", "index", "1 dims", "[2, 2]"]);
    refused(zeros(()).index_select(0, &ints([1])), &["index_select", "without dims"]);
    refused(ints([2]).embedding(&b, None), &["embedding", "weight", "2 dims", "[4]"]);
    refused(a.gather(0, &ints([2])), &["gather", "index", "2 dims", "[2]"]);
    refused(a.gather(0, &ints([2, 4])), &["gather", "[2, 3]", "[2, 4]"]);
    refused(a.scatter_add(0, &ints([2, 4]), &zeros([2, 4])), &["scatter_add", "[2, 3]", "[2, 4]"]);
    refused(a.scatter_add(0, &ints([2, 3]), &zeros([2, 2])), &["scatter_add", "[2, 3]", "[2, 2]"]);
    refused(a.scatter_add(0, &ints([2, 3]), &b), &["scatter_add", "source", "[4]"]);

    refused(Tensor::cat(&[&a, &zeros([2, 4])], 0), &["cat", "[2, 3]", "[2, 4]"]);
    refused(Tensor::cat(&[&a, &b], 0), &["cat", "[2, 3]", "[4]"]);
    refused(Tensor::cat(&[&zeros(()), &zeros(())], 0), &["cat", "without dims"]);
    refused(Tensor::stack(&[&a, &b], 0), &["stack", "equal size", "[2, 3]", "[4]"]);
    refused(a.split(&[1, 1], 1), &["split", "[1, 1]", "dim 1", "[2, 3]"]);
    refused(a.split(&[usize::MAX, 4], 1), &["split", "[2, 3]"]);
    refused(zeros(()).split(&[1], 0), &["split", "[]"]);
    refused(a.chunk(0, 0), &["chunk", "greater than 0"]);
    refused(zeros([0]).chunk(usize::MAX, 0), &["chunk"]);
    refused(zeros(()).chunk(1, 0), &["chunk", "without dims"]);
    refused(zeros(()).unbind(0), &["unbind", "without dims"]);
    refused(zeros([2, 3, 4]).t(), &["t: ", "at most 2", "3"]);
    refused(b.tril(0), &["tril", "2 dims", "[4]"]);
    refused(zeros(()).triu(0), &["triu", "2 dims", "[]"]);

    let logits = zeros([2, 3]);
    let plain = CrossEntropy::default();
    refused(logits.cross_entropy(&ints([3]), plain), &["cross_entropy", "[2, 3]", "[3]"]);
    refused(logits.cross_entropy(&ints([2, 1]), plain), &["cross_entropy", "[2, 3]", "[2, 1]"]);
    refused(zeros(()).cross_entropy(&ints(()), plain), &["cross_entropy", "class dim"]);
    refused(logits.nll_loss(&ints([3]), plain), &["nll_loss", "[2, 3]", "[3]"]);
    let weighted = CrossEntropy { weight: Some(&b), ..plain };
    refused(logits.cross_entropy(&ints([2]), weighted), &["cross_entropy", "weight", "3 classes", "[4]"]);
    refused(logits.nll_loss(&ints([2]), weighted), &["nll_loss", "weight", "3 classes", "[4]"]);

    const SDPA: &str = "scaled_dot_product_attention";
    let attend = |q: &[usize], k: &[usize], v: &[usize], options: Attention<'_>| {
        zeros(q).scaled_dot_product_attention(&zeros(k), &zeros(v), options)
    };
    let default = Attention::default();
    refused(attend(&[3], &[3], &[3], default), &[SDPA, "at least 2", "[3]"]);
    refused(attend(&[2, 3], &[1, 2, 3], &[2, 3], default), &[SDPA, "[2, 3]", "[1, 2, 3]"]);
    refused(attend(&[2, 3], &[2, 3], &[1, 2, 3], default), &[SDPA, "[2, 3]", "[1, 2, 3]"]);
    refused(attend(&[2, 3], &[2, 4], &[2, 3], default), &[SDPA, "[2, 3]", "[2, 4]"]);
    refused(attend(&[2, 2, 3], &[1, 2, 3], &[1, 2, 3], default), &[SDPA, "[2, 2, 3]", "[1, 2, 3]"]);
    refused(attend(&[2, 3], &[2, 3], &[4, 3], default), &[SDPA, "[2, 3]", "[4, 3]"]);
    let wrong = bytes([3, 3]);
    let masked = Attention { mask: Some(&wrong), ..default };
    refused(attend(&[2, 3], &[2, 3], &[2, 3], masked), &[SDPA, "mask", "[3, 3]", "[2, 2]"]);
    Ok(())
}

#[test]
fn dims_out_of_range_are_refused_with_the_range() -> Result<()> {
    type Along = fn(&Tensor, isize) -> Result<()>;
    let functions: [(&str, Along); 35] = [
        ("size", |x, d| x.size(d).map(drop)),
        ("sum", |x, d| x.sum(d).map(drop)),
        ("sum", |x, d| x.sum([0, d]).map(drop)),
        ("sum", |x, d| x.sum_keepdim(d).map(drop)),
        ("mean", |x, d| x.mean(d).map(drop)),
        ("max", |x, d| x.max(d).map(drop)),
        ("min", |x, d| x.min_keepdim(d).map(drop)),
        ("prod", |x, d| x.prod(d).map(drop)),
        ("var", |x, d| x.var(d, 1.0, false).map(drop)),
        ("std", |x, d| x.std(d, 1.0, false).map(drop)),
        ("norm", |x, d| x.norm(2.0, d, false).map(drop)),
        ("max_dim", |x, d| x.max_dim(d, false).map(drop)),
        ("min_dim", |x, d| x.min_dim(d, false).map(drop)),
        ("argmax", |x, d| x.argmax(d, false).map(drop)),
        ("argmin", |x, d| x.argmin(d, false).map(drop)),
        ("cumsum", |x, d| x.cumsum(d).map(drop)),
        ("softmax", |x, d| x.softmax(d).map(drop)),
        ("log_softmax", |x, d| x.log_softmax(d).map(drop)),
        ("sort", |x, d| x.sort(d, false).map(drop)),
        ("topk", |x, d| x.topk(1, d, true).map(drop)),
        ("index_select", |x, d| x.index_select(d, &ints([1])).map(drop)),
        ("gather", |x, d| x.gather(d, &ints(x.shape())).map(drop)),
        ("scatter_add", |x, d| x.scatter_add(d, &ints(x.shape()), x).map(drop)),
        ("split", |x, d| x.split(&[1], d).map(drop)),
        ("chunk", |x, d| x.chunk(1, d).map(drop)),
        ("unbind", |x, d| x.unbind(d).map(drop)),
        ("transpose", |x, d| x.transpose(d, 0).map(drop)),
        ("transpose", |x, d| x.transpose(0, d).map(drop)),
        ("squeeze", |x, d| x.squeeze(d).map(drop)),
        ("flatten", |x, d| x.flatten(d, 0).map(drop)),
        ("flatten", |x, d| x.flatten(0, d).map(drop)),
        ("narrow", |x, d| x.narrow(d, 0, 1).map(drop)),
        ("slice", |x, d| x.slice(d, 0, 1, 1).map(drop)),
        ("select", |x, d| x.select(d, 0).map(drop)),
        ("permute", |x, d| x.permute([0, d]).map(drop)),
    ];
    for (name, f) in functions {
        let x = zeros([2, 3]);
        for dim in [2, -3, isize::MAX, isize::MIN] {
            let got = format!("got {dim}");
            refused(f(&x, dim), &[&format!("{name}: "), "out of range", "[-2, 1]", &got]);
        }
        for dim in [1, -2] {
            refused(f(&zeros(()), dim), &[name, "out of range", "[-1, 0]", &format!("got {dim}")]);
        }
    }
    refused(Tensor::cat(&[&zeros([2, 3])], 2), &["cat", "[-2, 1]", "got 2"]);
    // One place more than there are dims.
    refused(zeros([2, 3]).unsqueeze(3), &["unsqueeze", "[-3, 2]", "got 3"]);
    refused(zeros([2, 3]).unsqueeze(-4), &["unsqueeze", "[-3, 2]", "got -4"]);
    refused(Tensor::stack(&[&zeros([2])], 2), &["stack", "[-2, 1]", "got 2"]);
    refused(zeros(()).size(0), &["size", "dim"]);
    // A size that is no dim is not taken for a negative one.
    refused(zeros([2, 3]).sum(usize::MAX), &["sum", "out of range"]);
    refused(zeros([2, 3]).softmax(usize::MAX), &["softmax", "out of range"]);

    refused(zeros([2, 3]).sum([0, 0]), &["sum", "dim 0", "multiple times"]);
    refused(zeros([2, 3]).mean([1, -1]), &["mean", "dim 1", "multiple times"]);
    refused(zeros([2, 3]).norm(2.0, [0, -2], true), &["norm", "dim 0", "multiple times"]);
    refused(zeros([2, 3]).permute([1, 1]), &["permute", "dim 1", "multiple times"]);
    refused(zeros([2, 3]).permute([0]), &["permute", "1 dims", "of 2"]);
    refused(zeros([2, 3, 4]).flatten(2, 1), &["flatten", "start dim 2", "end dim 1"]);
    Ok(())
}

#[test]
fn dtypes_that_have_no_such_operator_are_named() -> Result<()> {
    let (f, i, u) = (zeros([2, 2]), ints([2, 2]), bytes([2, 2]));
    let float_only: [(&str, Unary); 30] = [
        ("exp", |x| x.exp()),
        ("log", |x| x.log()),
        ("sqrt", |x| x.sqrt()),
        ("rsqrt", |x| x.rsqrt()),
        ("recip", |x| x.recip()),
        ("sin", |x| x.sin()),
        ("cos", |x| x.cos()),
        ("tanh", |x| x.tanh()),
        ("sigmoid", |x| x.sigmoid()),
        ("silu", |x| x.silu()),
        ("erf", |x| x.erf()),
        ("gelu", |x| x.gelu(Gelu::Exact)),
        ("gelu", |x| x.gelu(Gelu::Tanh)),
        ("div", |x| x.div(x)),
        ("div", |x| x.div(2)),
        ("mean", |x| x.mean_all()),
        ("mean", |x| x.mean(0)),
        ("var", |x| x.var_all()),
        ("std", |x| x.std(0, 1.0, false)),
        ("norm", |x| x.norm_all(2.0)),
        ("softmax", |x| x.softmax(0)),
        ("log_softmax", |x| x.log_softmax(0)),
        ("layer_norm", |x| x.layer_norm(1, None, None, 1e-5)),
        ("rms_norm", |x| x.rms_norm(1, None, 1e-5)),
        ("dropout", |x| x.dropout(0.5)),
        ("scaled_dot_product_attention", |x| x.scaled_dot_product_attention(x, x, Attention::default())),
        ("cross_entropy", |x| x.cross_entropy(&ints([2]), CrossEntropy::default())),
        ("nll_loss", |x| x.nll_loss(&ints([2]), CrossEntropy::default())),
        ("requires_grad_", |x| x.requires_grad_(true)),
        ("mse_loss", |x| x.mse_loss(x, Reduction::Mean)),
    ];
    for (name, op) in float_only {
        let name = if name == "mse_loss" { "mean" } else { name };
        refused(op(&i), &[name, "i64", "float"]);
        refused(op(&u), &[name, "u8", "float"]);
        assert!(op(&f).is_ok(), "{name}");
    }
    for (name, product) in [
        ("matmul", (|a, b| a.matmul(b)) as Binary),
        ("mm", |a, b| a.mm(b)),
        ("linear", |a, b| a.linear(b, None)),
        ("addmm", |a, b| a.addmm(a, b)),
    ] {
        refused(product(&u, &u), &[name, "u8"]);
        refused(product(&f, &i), &[name, "f32", "i64"]);
    }
    let d = f.to_dtype(DType::F64)?;
    for (name, op) in ELEMENTWISE {
        refused(op(&f, &d), &[name, "f32", "f64", "to_dtype"]);
        refused(op(&i, &u), &[name, "i64", "u8"]);
    }
    refused(u.where_(&f, &d), &["where", "f32", "f64"]);
    refused(Tensor::cat(&[&f, &d], 0), &["cat", "f32", "f64"]);
    refused(Tensor::stack(&[&f, &i], 0), &["f32", "i64"]);
    refused(f.mse_loss(&d, Reduction::Sum), &["f32", "f64"]);
    refused(f.layer_norm(1, Some(&d.select(0, 0)?), None, 1e-5), &["layer_norm", "f32", "f64"]);
    refused(f.linear(&f, Some(&d.select(0, 0)?)), &["linear", "f32", "f64"]);
    refused(
        f.scaled_dot_product_attention(&d, &f, Attention::default()),
        &["scaled_dot_product_attention", "f32", "f64"],
    );
    refused(f.scatter_add(0, &i, &d), &["scatter_add", "f32", "f64"]);

    // Indices are i64 and masks are u8.
    let index = zeros([2]);
    refused(f.index_select(0, &index), &["index_select", "index", "i64", "f32"]);
    refused(index.embedding(&f, None), &["embedding", "index", "i64", "f32"]);
    refused(f.gather(0, &f), &["gather", "index", "i64", "f32"]);
    refused(f.scatter_add(0, &u, &f), &["scatter_add", "index", "i64", "u8"]);
    refused(f.cross_entropy(&index, CrossEntropy::default()), &["cross_entropy", "target", "i64", "f32"]);
    refused(f.nll_loss(&index, CrossEntropy::default()), &["nll_loss", "target", "i64", "f32"]);
    refused(f.where_(&f, &f), &["where", "condition", "u8", "f32"]);
    refused(f.masked_fill(&f, 0.0), &["masked_fill", "mask", "u8", "f32"]);
    refused(f.masked_fill(&i, 0.0), &["masked_fill", "mask", "u8", "i64"]);
    let options = Attention { mask: Some(&i), ..Default::default() };
    refused(f.scaled_dot_product_attention(&f, &f, options), &["mask", "u8", "f32", "i64"]);
    let weight = zeros([2]).to_dtype(DType::F64)?;
    let options = CrossEntropy { weight: Some(&weight), ..Default::default() };
    refused(f.cross_entropy(&ints([2]), options), &["cross_entropy", "weight", "f32", "f64"]);

    // A number must be one of the tensor's dtype.
    for x in [&i, &u] {
        let dtype = x.dtype().name();
        for (name, result) in [
            ("add", x.add(0.5)),
            ("sub", x.sub(0.5)),
            ("mul", x.mul(0.5)),
            ("rsub", x.rsub(0.5)),
            ("maximum", x.maximum(0.5)),
            ("eq", x.eq(0.5)),
            ("lt", x.lt(f64::NAN)),
            ("add", x.add(f64::INFINITY)),
            ("clamp", x.clamp(0.5, 1.5)),
            ("clamp", x.clamp_min(0.5)),
            ("masked_fill", x.masked_fill(&u, 0.5)),
            ("where", u.where_(x, 0.5)),
            ("full", x.full_like(0.5)),
            ("full", Tensor::full([2], f64::NAN, x.dtype())),
            ("arange", Tensor::arange(0, 2, 0.5, x.dtype())),
        ] {
            refused(result, &[name, "not a whole number", dtype]);
        }
        refused(x.pow(0.5), &["pow", "0.5"]);
        refused(x.pow(-1), &["pow", "-1"]);
    }
    refused(u.where_(1.0, 2.0), &["where", "tensor"]);
    for dtype in [DType::I64, DType::U8] {
        refused(Tensor::rand([2], dtype), &["rand", dtype.name(), "float"]);
        refused(Tensor::randn([2], dtype), &["randn", dtype.name(), "float"]);
    }
    Ok(())
}

#[test]
fn indices_out_of_bounds_are_refused_with_index_and_size() -> Result<()> {
    let x = zeros([3, 4]);
    for bad in [3, -1, i64::MAX, i64::MIN] {
        let index = ids(&[0, bad], &[2]);
        let (said, out) = (format!("index {bad} "), "out of bounds");
        refused(x.index_select(0, &index), &["index_select", &said, out, "dimension 0", "size 3"]);
        refused(index.embedding(&x, None), &["embedding", &said, out, "size 3"]);
        refused(index.embedding(&x, Some(0)), &["embedding", &said, out, "size 3"]);
        let row = ids(&[0, 0, 0, bad], &[1, 4]);
        refused(x.gather(0, &row), &["gather", &said, out, "dimension 0", "size 3"]);
        refused(
            x.scatter_add(0, &row, &zeros([1, 4])),
            &["scatter_add", &said, out, "dimension 0", "size 3"],
        );
    }
    refused(x.gather(1, &ids(&[4], &[1, 1])), &["gather", "index 4", "dimension 1", "size 4"]);
    refused(x.index_select(1, &ids(&[4], &[1])), &["index_select", "index 4", "dimension 1", "size 4"]);
    refused(zeros(()).gather(0, &ids(&[1], &[])), &["gather", "index 1", "size 1"]);
    refused(zeros([0, 2]).index_select(0, &ids(&[0], &[1])), &["index_select", "index 0", "size 0"]);
    refused(ids(&[0], &[1]).embedding(&zeros([0, 2]), None), &["embedding", "index 0", "size 0"]);
    for padding in [3, -4] {
        let said = format!("padding index {padding} must be within the number of embeddings, 3");
        refused(ids(&[0], &[1]).embedding(&x, Some(padding)), &["embedding", &said]);
    }

    for bad in [4, -1, i64::MAX] {
        let target = ids(&[0, bad, 1], &[3]);
        let said = bad.to_string();
        refused(x.cross_entropy(&target, CrossEntropy::default()), &["cross_entropy", &said, "4"]);
        refused(x.nll_loss(&target, CrossEntropy::default()), &["nll_loss", &said, "4"]);
        // It is no error if it is the one to be ignored.
        let ignored = CrossEntropy { ignore_index: bad, ..Default::default() };
        assert!(x.cross_entropy(&target, ignored)?.item::<f32>()?.is_finite());
        assert!(x.nll_loss(&target, ignored)?.item::<f32>()?.is_finite());
    }

    for bad in [3, -4, isize::MAX, isize::MIN] {
        refused(x.select(0, bad), &["select", &format!("index {bad} "), "dimension 0", "size 3"]);
    }
    for (start, len) in [(0, 5), (4, 1), (5, 0), (usize::MAX, 1), (1, usize::MAX)] {
        let (start_said, len_said) = (format!("start ({start})"), format!("length ({len})"));
        refused(x.narrow(1, start, len), &["narrow", &start_said, &len_said, "size (4)", "dim 1"]);
    }
    for f in [
        (|x| x.narrow(0, 0, 0)) as Unary,
        |x| x.slice(0, 0, 1, 1),
        |x| x.select(0, 0),
        |x| x.index_select(0, &ints([1])),
    ] {
        refused(f(&zeros(())), &["without dims"]);
    }
    refused(x.slice(0, 0, 2, 0), &["slice", "step", "greater than zero"]);
    // As in Python, a slice is clipped to what is there.
    assert_eq!(x.slice(0, -100, 100, 1)?.dims(), [3, 4]);
    assert_eq!(x.slice(0, 2, 1, 1)?.dims(), [0, 4]);
    assert_eq!(x.slice(0, isize::MIN, isize::MAX, usize::MAX)?.dims(), [1, 4]);
    refused(x.topk(4, 0, true), &["topk", "k (4)", "dim 0", "size 3"]);
    refused(x.topk(usize::MAX, 1, false), &["topk", "dim 1", "size 4"]);
    refused(zeros(()).topk(2, 0, true), &["topk", "k (2)", "size 1"]);
    Ok(())
}

#[test]
fn nothing_gives_what_there_is_to_give() -> Result<()> {
    let none = zeros([0]);
    for f in [
        (|x| x.max_all()) as Unary,
        |x| x.min_all(),
        |x| x.max(0),
        |x| x.min_keepdim(0),
        |x| x.argmax(0, false),
        |x| x.argmin_all(),
        |x| Ok(x.max_dim(0, false)?.0),
        |x| Ok(x.min_dim(0, true)?.0),
    ] {
        refused(f(&none), &["[0]", "nothing to choose from"]);
        refused(f(&zeros([0, 2]).select(1, 0)?), &["nothing to choose from"]);
    }
    refused(none.norm_all(f64::INFINITY), &["norm", "nothing"]);
    refused(Tensor::cat(&[], 0), &["cat", "non-empty"]);
    refused(Tensor::stack(&[], 0), &["stack", "non-empty"]);
    refused(none.item::<f32>(), &["item", "0 elements"]);

    // No rows to choose in is another matter than nothing in a row.
    assert_eq!(zeros([0, 3]).max(1)?.dims(), [0]);
    assert_eq!(zeros([0, 3]).argmax(1, true)?.dims(), [0, 1]);
    refused(zeros([3, 0]).max(1), &["max", "[3, 0]"]);

    assert_eq!(none.sum_all()?.item::<f32>()?, 0.0);
    assert_eq!(none.prod_all()?.item::<f32>()?, 1.0);
    assert!(none.mean_all()?.item::<f32>()?.is_nan());
    assert_eq!(zeros([2, 0]).mean(1)?.to_vec::<f32>()?.iter().filter(|x| x.is_nan()).count(), 2);
    assert!(none.var_all()?.item::<f32>()?.is_nan());
    assert_eq!(none.norm_all(2.0)?.item::<f32>()?, 0.0);
    assert_eq!(none.softmax(0)?.dims(), [0]);
    assert_eq!(zeros([2, 0]).log_softmax(-1)?.dims(), [2, 0]);
    assert_eq!(zeros([2, 0]).layer_norm(1, None, None, 1e-5)?.dims(), [2, 0]);
    assert_eq!(none.cumsum(0)?.dims(), [0]);
    assert_eq!(none.sort(0, true)?.1.dims(), [0]);
    assert_eq!(zeros([2, 0]).matmul(&zeros([0, 3]))?.to_vec::<f32>()?, [0.; 6]);
    assert!(none.mse_loss(&none, Reduction::Mean)?.item::<f32>()?.is_nan());
    let loss = zeros([0, 3]).cross_entropy(&ints([0]), CrossEntropy::default())?;
    assert!(loss.item::<f32>()?.is_nan());
    let (q, keys) = (zeros([2, 3]), zeros([0, 3]));
    let out = q.scaled_dot_product_attention(&keys, &keys, Attention::default())?;
    assert_eq!(out.to_vec::<f32>()?, [0.; 6]);
    Ok(())
}

#[test]
fn shapes_too_large_to_address_are_refused() -> Result<()> {
    let too_many: [&[usize]; 6] = [
        &[usize::MAX],
        &[usize::MAX, 2],
        &[1 << 32, 1 << 32],
        &[1 << 21, 1 << 21, 1 << 21],
        &[0, usize::MAX, usize::MAX],
        &[usize::MAX, usize::MAX, 0],
    ];
    for shape in too_many {
        let said = Shape::from(shape).to_string();
        refused(Tensor::zeros(shape, DType::U8), &["too many elements", &said]);
        refused(Tensor::ones(shape, DType::F64), &["too many elements", &said]);
        refused(Tensor::full(shape, 2, DType::F32), &["full", "too many elements", &said]);
        refused(Tensor::meta_of(shape, DType::F32), &["meta_of", "too many elements", &said]);
        refused(Tensor::from_vec::<f32>(vec![], shape), &["from_vec", "too many elements", &said]);
        refused(Tensor::rand(shape, DType::F32), &["rand", "too many elements"]);
        refused(Tensor::randn(shape, DType::F32), &["randn", "too many elements"]);
        refused(Tensor::randint(0, 2, shape), &["randint", "too many elements"]);
        refused(Tensor::bernoulli(0.5, shape, DType::U8), &["bernoulli", "too many elements"]);
        refused(zeros(()).expand(shape), &["expand", "too many elements", &said]);
    }
    refused(Tensor::eye(1 << 32, DType::F32), &["eye", "too many elements"]);
    refused(Tensor::linspace(0.0, 1.0, usize::MAX, DType::F32), &["linspace", "too many elements"]);
    refused(Tensor::arange(0.0, 1e300, 1.0, DType::F64), &["arange", "too many elements"]);
    refused(Tensor::arange(0, i64::MAX, 1, DType::I64), &["arange", "too many elements"]);
    // What could be addressed but is more than there is.
    refused(Tensor::zeros([1 << 50], DType::F32), &["full", "memory"]);
    refused(Tensor::ones([1 << 25, 1 << 25], DType::F64), &["full", "memory"]);
    refused(Tensor::randn([1 << 50], DType::F32), &["randn", "memory"]);
    refused(Tensor::eye(1 << 25, DType::F64), &["eye", "memory"]);
    refused(Tensor::arange(0, 1i64 << 50, 1, DType::I64), &["arange", "memory"]);
    refused(Tensor::linspace(0.0, 1.0, 1 << 50, DType::F64), &["linspace", "memory"]);

    // A result that is too large, of inputs that are not.
    let long = zeros([1]).expand([1 << 40])?;
    let (column, row) = (long.unsqueeze(1)?, long.unsqueeze(0)?);
    for (name, f) in ELEMENTWISE {
        refused(f(&column, &row), &[name, "too many elements"]);
    }
    refused(column.matmul(&row), &["matmul", "too many elements"]);
    let (column, row) = (meta([1 << 40, 1]), meta([1, 1 << 40]));
    refused(column.add(&row), &["add", "too many elements"]);
    refused(column.matmul(&row), &["matmul", "too many elements"]);
    let huge = meta([1 << 59]);
    refused(Tensor::cat(&[&huge; 64], 0), &["cat", "too many elements"]);
    refused(Tensor::stack(&[&huge; 64], 0), &["too many elements"]);
    Ok(())
}

#[test]
fn reshapes_that_do_not_come_out_are_refused() -> Result<()> {
    let x = zeros([2, 3]);
    for (result, said) in [
        (x.reshape([4]), "[4]"),
        (x.reshape([2, 4]), "[2, 4]"),
        (x.reshape([-1, 4]), "[-1, 4]"),
        (x.reshape([-1, -1]), "[-1, -1]"),
        (x.reshape([-1, 0]), "[-1, 0]"),
        (x.reshape([INFER, INFER]), "[-1, -1]"),
        (x.reshape([1usize << 63, 2]), "2]"),
        (x.reshape(Shape::scalar()), "[]"),
    ] {
        refused(result, &["reshape", said, "[2, 3]", "6 elements"]);
    }
    refused(x.view([7]), &["view", "[7]", "[2, 3]"]);
    refused(zeros([0]).reshape([-1, 0]), &["reshape", "[-1, 0]"]);
    assert_eq!(zeros([0]).reshape([-1, 3])?.dims(), [0, 3]);
    refused(Tensor::from_vec(vec![1f32; 5], [2, 3]), &["from_vec", "[2, 3]", "6", "5"]);
    Ok(())
}

#[test]
fn numbers_out_of_their_range_are_refused() -> Result<()> {
    let x = zeros([2, 3]);
    let target = ints([2]);
    for p in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        refused(x.dropout(p), &["dropout", "between 0 and 1", &p.to_string()]);
        refused(Tensor::bernoulli(p, [2], DType::F32), &["bernoulli", "between 0 and 1", &p.to_string()]);
        let options = Attention { dropout: p, ..Default::default() };
        refused(
            x.scaled_dot_product_attention(&x, &x, options),
            &["scaled_dot_product_attention", "between 0 and 1"],
        );
        let options = CrossEntropy { label_smoothing: p, ..Default::default() };
        refused(
            x.cross_entropy(&target, options),
            &["cross_entropy", "label_smoothing", "between 0.0 and 1.0"],
        );
    }
    let options = CrossEntropy { label_smoothing: 0.1, ..Default::default() };
    refused(x.nll_loss(&target, options), &["nll_loss", "label_smoothing"]);
    let weight = zeros([3]).requires_grad_(true)?;
    let options = CrossEntropy { weight: Some(&weight), ..Default::default() };
    refused(x.cross_entropy(&target, options), &["cross_entropy", "weight", "detach"]);
    let float_mask = zeros([2, 2]).requires_grad_(true)?;
    let options = Attention { mask: Some(&float_mask), ..Default::default() };
    refused(x.scaled_dot_product_attention(&x, &x, options), &["mask", "detach"]);
    for step in [0.0, f64::NAN, f64::INFINITY] {
        refused(Tensor::arange(0.0, 1.0, step, DType::F32), &["arange", "step"]);
    }
    refused(Tensor::arange(0.0, 1.0, -0.5, DType::F32), &["arange", "inconsistent with step sign"]);
    refused(Tensor::arange(0.0, f64::NAN, 1.0, DType::F32), &["arange", "finite"]);
    for (low, high) in [(2, 2), (3, 2), (i64::MAX, i64::MIN)] {
        refused(Tensor::randint(low, high, [2]), &["randint", &low.to_string(), &high.to_string()]);
    }
    for rate in [f64::NAN, f64::INFINITY, -1.0] {
        refused(Sgd::new(vec![], rate), &["Sgd", "learning rate", &rate.to_string()]);
    }
    Ok(())
}

#[test]
fn values_are_read_only_where_and_as_what_they_are() -> Result<()> {
    let x = zeros([2, 3]);
    refused(x.item::<f32>(), &["item", "6 elements", "scalar"]);
    refused(x.item_f64(), &["item", "6 elements"]);
    refused(x.to_vec::<f64>(), &["to_vec", "f32", "f64"]);
    refused(x.to_vec::<i64>(), &["to_vec", "f32", "i64"]);
    refused(x.select(0, 0)?.to_vec2::<f32>(), &["to_vec2", "2 dims", "[3]"]);
    refused(zeros(()).item::<u8>(), &["f32", "u8"]);

    let ghost = meta([2, 3]);
    for message in [
        ghost.to_vec::<f32>().unwrap_err().to_string(),
        ghost.to_vec2::<f32>().unwrap_err().to_string(),
        ghost.to_f64_vec().unwrap_err().to_string(),
        ghost.sum_all()?.item::<f32>().unwrap_err().to_string(),
        ghost.sum_all()?.item_f64().unwrap_err().to_string(),
        ghost.to_device(Device::Cpu).unwrap_err().to_string(),
        candle_core::Tensor::try_from(&ghost).unwrap_err().to_string(),
    ] {
        assert!(message.contains("meta tensor") && message.contains("no value"), "{message}");
    }
    for (name, f) in ELEMENTWISE {
        refused(f(&x, &ghost), &[name, "same device", "cpu", "meta"]);
        refused(f(&ghost, &x), &[name, "same device", "meta", "cpu"]);
    }
    refused(x.matmul(&meta([3, 2])), &["matmul", "same device"]);
    refused(Tensor::cat(&[&ghost, &x], 0), &["cat", "same device"]);
    refused(ghost.index_select(0, &ints([1])), &["index_select", "same device"]);
    refused(bytes([3]).where_(&ghost, &ghost), &["where", "same device"]);
    refused(ghost.cross_entropy(&ints([2]), CrossEntropy::default()), &["cross_entropy", "same device"]);
    Ok(())
}

#[test]
fn gradients_that_cannot_be_are_refused_and_change_nothing() -> Result<()> {
    let x = Tensor::ones([2, 3], DType::F64)?.requires_grad_(true)?;
    let y = x.mul(2.0)?;
    refused(y.backward(), &["grad can be implicitly created only for scalar outputs", "[2, 3]"]);
    refused(zeros([1]).backward(), &["does not require grad"]);
    refused(x.detach().sum_all()?.backward(), &["does not require grad"]);
    let with = |gradient| BackwardOptions { gradient: Some(gradient), ..Default::default() };
    let wrong = Tensor::ones([3, 2], DType::F64)?;
    refused(y.backward_with(with(wrong)), &["backward", "[2, 3]", "[3, 2]"]);
    refused(y.backward_with(with(zeros([2, 3]))), &["backward", "f64", "f32"]);
    refused(y.backward_with(with(Tensor::meta_of([2, 3], DType::F64)?)), &["device", "cpu", "meta"]);
    refused(
        grad(&y.sum_all()?, &[&zeros([1])], Default::default()),
        &["grad", "input 0", "not require grad"],
    );
    assert!(x.grad().is_none());
    // None of that has used the graph up.
    y.backward_with(with(Tensor::ones([2, 3], DType::F64)?))?;
    assert_eq!(x.grad().unwrap().to_vec::<f64>()?, [2.; 6]);

    let z = x.exp()?.sum_all()?;
    z.backward()?;
    let before = x.grad().unwrap().to_vec::<f64>()?;
    refused(z.backward(), &["second time", "retain"]);
    assert_eq!(x.grad().unwrap().to_vec::<f64>()?, before);

    refused(ints([2]).requires_grad_(true), &["requires_grad_", "i64", "floating point"]);
    refused(y.requires_grad_(false), &["requires_grad_", "leaf", "detach"]);
    refused(x.set_grad(Some(zeros([2]))), &["set_grad", "[2, 3]", "[2]"]);
    refused(x.set_grad(Some(zeros([2, 3]))), &["set_grad", "f64", "f32"]);
    refused(x.set_grad(Some(Tensor::meta_of([2, 3], DType::F64)?)), &["set_grad", "device", "cpu", "meta"]);
    refused(y.set_grad(None), &["set_grad", "leaf"]);
    refused(zeros([1]).set_grad(None), &["set_grad", "leaf"]);
    assert_eq!(x.grad().unwrap().to_vec::<f64>()?, before);

    let p = Parameter::new(&zeros([2]))?;
    refused(p.set(&zeros([3])), &["set", "[2]", "[3]"]);
    refused(p.set(&ints([2])), &["set", "f32", "i64"]);
    refused(p.set(&meta([2])), &["set", "device", "cpu", "meta"]);
    assert_eq!(p.get().to_vec::<f32>()?, [0., 0.]);
    refused(Parameter::new(&ints([2])), &["requires_grad_", "i64"]);
    refused(Linear::new(3, 2, true)?.forward(&zeros([2, 4])), &["linear", "[2, 4]", "[2, 3]"]);
    Ok(())
}

/// An operator whose gradient rule is wrong in one way or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wrong {
    Shape,
    DType,
    TooMany,
    None,
    Unsaved,
    NoRule,
}

impl Op for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into_iter().collect())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Local], _: &Here<'_>) -> Result<Locals> {
        Ok([x[0].clone()].into_iter().collect())
    }
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        Ok(match self {
            Wrong::Shape => vec![Some(dy.sum_all()?)],
            Wrong::DType => vec![Some(dy.to_dtype(DType::F64)?)],
            Wrong::TooMany => vec![Some(dy.clone()), Some(dy)],
            Wrong::None => vec![],
            Wrong::Unsaved => vec![Some(cx.input(0)?)],
            Wrong::NoRule => {
                return Err(Error::Autograd { op: "wrong", message: "no gradient rule".into() });
            }
        }
        .into_iter()
        .collect())
    }
}

#[test]
fn a_wrong_gradient_rule_is_found_where_it_is_wrong() -> Result<()> {
    for (op, words) in [
        (Wrong::Shape, &["f32 []", "input 0", "f32 [2]"][..]),
        (Wrong::DType, &["f64 [2]", "input 0", "f32 [2]"]),
        (Wrong::TooMany, &["2 gradients", "1 inputs"]),
        (Wrong::None, &["0 gradients", "1 inputs"]),
        (Wrong::Unsaved, &["input 0", "not saved"]),
        (Wrong::NoRule, &["no gradient rule"]),
    ] {
        let x = zeros([2]).requires_grad_(true)?;
        let y = apply(op, &[&x])?.sum_all()?;
        refused(y.backward(), &[&["wrong"], words].concat());
        assert!(x.grad().is_none());
    }
    Ok(())
}

type Lie = fn(&Local) -> Result<Vec<Local>>;

/// An operator whose kernel does not keep what its shape rule promised.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Liar(Aside<Lie>);

impl Op for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into_iter().collect())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Local], _: &Here<'_>) -> Result<Locals> {
        Ok((self.0.0)(x[0])?.into_iter().collect())
    }
}

#[test]
fn a_kernel_that_breaks_its_promise_is_found_out() -> Result<()> {
    let x = zeros([2]);
    refused(
        apply(Liar(Aside(|_| Ok(vec![Local::from_vec(vec![0f32; 3], &[3])?]))), &[&x]),
        &["liar", "[2]", "[3]"],
    );
    refused(
        apply(Liar(Aside(|_| Ok(vec![Local::from_vec(vec![0f64; 2], &[2])?]))), &[&x]),
        &["liar", "f32", "f64"],
    );
    refused(apply(Liar(Aside(|_| Ok(vec![]))), &[&x]), &["liar", "1", "0"]);
    refused(apply(Liar(Aside(|x| Ok(vec![x.clone(), x.clone()]))), &[&x]), &["liar", "1", "2"]);
    assert!(apply(Liar(Aside(|x| Ok(vec![x.clone()]))), &[&x]).is_ok());
    Ok(())
}

#[test]
fn meta_tensors_go_through_every_operator_as_real_ones_do() -> Result<()> {
    for case in cases() {
        let real = (case.f)(&case.inputs)?;
        let ghosts: Vec<Tensor> = case
            .inputs
            .iter()
            .enumerate()
            .map(|(i, x)| {
                let ghost = x.to_device(Device::Meta)?;
                if case.wrt.contains(&i) { ghost.requires_grad_(true) } else { Ok(ghost) }
            })
            .collect::<Result<_>>()?;
        let label = case.label();
        let outputs = (case.f)(&ghosts).unwrap_or_else(|error| panic!("{label}: {error}"));
        assert_eq!(real.len(), outputs.len(), "{label}");
        let mut total = Tensor::meta_of((), DType::F64)?;
        for (real, ghost) in real.iter().zip(&outputs) {
            assert_eq!((real.dims(), real.dtype()), (ghost.dims(), ghost.dtype()), "{label}");
            assert!(ghost.is_meta() && matches!(ghost.to_f64_vec(), Err(Error::NoValue { .. })), "{label}");
            if ghost.requires_grad() {
                total = total.add(&ghost.sum_all()?)?;
            }
        }
        // And back.
        if total.requires_grad() {
            let wanted: Vec<&Tensor> = case.wrt.iter().map(|&i| &ghosts[i]).collect();
            let grads = grad(&total, &wanted, BackwardOptions::default());
            for (x, g) in wanted.iter().zip(grads.unwrap_or_else(|error| panic!("{label}: {error}"))) {
                assert_eq!(g.map(|g| g.meta()), Some(x.meta()), "{label}");
            }
        }
    }
    Ok(())
}

/// One call of an operator, with arguments that may or may not make sense.
#[derive(Clone, Debug)]
struct Call {
    op: usize,
    shapes: [Vec<usize>; 3],
    dtypes: [DType; 3],
    dim: isize,
    other: isize,
    n: usize,
    strided: bool,
}

fn calls() -> impl Strategy<Value = Call> {
    // Often the same shape and dtype, or nothing but errors would be seen.
    let size = prop_oneof![4 => 1usize..4, 1 => Just(0usize)];
    let shape = prop::collection::vec(size, 0..4);
    let dtype = prop::sample::select(DType::ALL.to_vec());
    let shapes = (shape.clone(), shape.clone(), shape, 0u8..8).prop_map(|(a, b, c, same)| {
        [a.clone(), if same & 1 == 0 { a.clone() } else { b }, if same & 2 == 0 { a } else { c }]
    });
    let dtypes = (dtype.clone(), dtype.clone(), dtype, 0u8..8).prop_map(|(a, b, c, same)| {
        [a, if same & 1 == 0 { a } else { b }, if same & 2 == 0 { a } else { c }]
    });
    (0..OPERATORS.len(), shapes, dtypes, -4isize..4, -4isize..4, 0usize..5, any::<bool>()).prop_map(
        |(op, shapes, dtypes, dim, other, n, strided)| Call { op, shapes, dtypes, dim, other, n, strided },
    )
}

/// Numbers that are small, so that they are often valid indices, and not all equal.
fn content(shape: &[usize], dtype: DType, strided: bool) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| (i % 3) as f64).collect();
    let x = Tensor::from_vec(values, shape)?.to_dtype(dtype)?;
    if strided && x.rank() > 1 { x.transpose(0, 1)?.contiguous()?.transpose(0, 1) } else { Ok(x) }
}

type Fuzzed = fn(&[Tensor; 3], &Call) -> Result<Vec<Tensor>>;

fn pair((a, b): (Tensor, Tensor)) -> Vec<Tensor> {
    vec![a, b]
}

const OPERATORS: [Fuzzed; 51] = [
    |x, _| Ok(vec![x[0].add(&x[1])?]),
    |x, _| Ok(vec![x[0].div(&x[1])?]),
    |x, _| Ok(vec![x[0].pow(&x[1])?]),
    |x, c| Ok(vec![x[0].pow(c.dim as i64)?]),
    |x, c| Ok(vec![x[0].mul(c.dim as f64 / 2.0)?]),
    |x, _| Ok(vec![x[0].maximum(&x[1])?]),
    |x, _| Ok(vec![x[0].le(&x[1])?]),
    |x, _| Ok(vec![x[0].where_(&x[1], &x[2])?]),
    |x, c| Ok(vec![x[0].masked_fill(&x[1], c.dim as i64)?]),
    |x, _| Ok(vec![x[0].matmul(&x[1])?]),
    |x, _| Ok(vec![x[0].mm(&x[1])?, x[0].addmm(&x[1], &x[2])?]),
    |x, _| Ok(vec![x[0].bmm(&x[1])?]),
    |x, _| Ok(vec![x[0].addmm(&x[1], &x[2])?]),
    |x, _| Ok(vec![x[0].linear(&x[1], Some(&x[2]))?]),
    |x, _| Ok(vec![x[0].linear(&x[1], None)?]),
    |x, c| Ok(vec![x[0].sum([c.dim, c.other])?, x[0].sum_keepdim(c.dim)?]),
    |x, c| Ok(vec![x[0].mean(c.dim)?]),
    |x, c| Ok(vec![x[0].max(c.dim)?, x[0].min_keepdim([c.dim, c.other])?]),
    |x, c| Ok(vec![x[0].prod(c.dim)?, x[0].prod_all()?]),
    |x, c| Ok(vec![x[0].var(c.dim, c.other as f64, true)?, x[0].std(c.dim, 0.0, false)?]),
    |x, c| Ok(vec![x[0].norm(c.other as f64, c.dim, false)?]),
    |x, c| x[0].max_dim(c.dim, c.n > 2).map(pair),
    |x, c| Ok(vec![x[0].argmin(c.dim, c.n > 2)?, x[0].argmax_all()?]),
    |x, c| Ok(vec![x[0].cumsum(c.dim)?]),
    |x, c| Ok(vec![x[0].softmax(c.dim)?, x[0].log_softmax(c.dim)?]),
    |x, c| Ok(vec![x[0].layer_norm(c.n, Some(&x[1]), Some(&x[2]), 1e-5)?]),
    |x, c| Ok(vec![x[0].layer_norm(c.n, None, None, 0.0)?, x[0].rms_norm(c.n, None, 0.0)?]),
    |x, c| Ok(vec![x[0].index_select(c.dim, &x[1])?]),
    |x, c| Ok(vec![x[0].embedding(&x[1], (c.n > 2).then_some(c.dim as i64))?]),
    |x, c| Ok(vec![x[0].gather(c.dim, &x[1])?]),
    |x, c| Ok(vec![x[0].scatter_add(c.dim, &x[1], &x[2])?]),
    |x, c| Ok(vec![Tensor::cat(&[&x[0], &x[1], &x[2]], c.dim)?]),
    |x, c| Ok(vec![Tensor::stack(&[&x[0], &x[1]], c.dim)?]),
    |x, c| x[0].split(&[c.n, 1, 0], c.dim),
    |x, c| x[0].chunk(c.n, c.dim),
    |x, c| x[0].unbind(c.dim),
    |x, c| Ok(vec![x[0].reshape([c.dim as i32, c.other as i32])?]),
    |x, c| Ok(vec![x[0].transpose(c.dim, c.other)?, x[0].t()?]),
    |x, c| Ok(vec![x[0].permute([c.dim, c.other, 0])?]),
    |x, c| Ok(vec![x[0].permute([c.dim, c.other])?]),
    |x, c| Ok(vec![x[0].squeeze(c.dim)?, x[0].unsqueeze(c.other)?, x[0].squeeze_all()?]),
    |x, c| Ok(vec![x[0].flatten(c.dim, c.other)?]),
    |x, c| Ok(vec![x[0].expand(c.shapes[1].clone())?, x[0].sum_to(&Shape::from(&c.shapes[2][..]))?]),
    |x, c| Ok(vec![x[0].narrow(c.dim, c.n, 1)?]),
    |x, c| Ok(vec![x[0].slice(c.dim, c.other, -c.dim, c.n)?]),
    |x, c| Ok(vec![x[0].select(c.dim, c.other)?]),
    |x, c| x[0].topk(c.n, c.dim, c.other > 0).map(pair),
    |x, c| x[0].sort(c.dim, c.other > 0).map(pair),
    |x, c| Ok(vec![x[0].tril(c.dim as i64)?, x[0].triu(c.other as i64)?, x[0].clamp(c.dim as i64, 1)?]),
    |x, c| {
        let options = Attention {
            mask: (c.other > 0).then_some(&x[2]),
            causal: c.dim > 0,
            dropout: if c.n == 4 { 0.5 } else { 0.0 },
            scale: None,
        };
        let other = if c.n == 3 { &x[2] } else { &x[1] };
        Ok(vec![x[0].scaled_dot_product_attention(&x[1], other, options)?])
    },
    |x, c| {
        let reduction = [Reduction::Mean, Reduction::Sum, Reduction::None][c.n % 3];
        let weight = (c.other > 2).then_some(&x[2]);
        let options = CrossEntropy { reduction, weight, ignore_index: c.dim as i64, label_smoothing: 0.0 };
        let smooth = CrossEntropy { label_smoothing: 0.1, ..options };
        Ok(vec![x[0].nll_loss(&x[1], options)?, x[0].cross_entropy(&x[1], smooth)?])
    },
];

fn fuzz(call: &Call) -> TestCaseResult {
    let inputs: [Tensor; 3] =
        std::array::from_fn(|i| content(&call.shapes[i], call.dtypes[i], call.strided).unwrap());
    let leaves: [Tensor; 3] = std::array::from_fn(|i| {
        if inputs[i].dtype().is_float() { inputs[i].requires_grad_(true).unwrap() } else { inputs[i].clone() }
    });
    let run = |x: &[Tensor; 3]| OPERATORS[call.op](x, call);
    let outcome = catch_unwind(AssertUnwindSafe(|| run(&inputs)));
    let outcome = outcome.map_err(|_| TestCaseError::fail("panicked"))?;
    if let Ok(outputs) = &outcome {
        for y in outputs {
            prop_assert_eq!(y.to_f64_vec().unwrap().len(), y.shape().numel());
        }
        // The shape rule alone says the same.
        let ghosts = std::array::from_fn(|i| inputs[i].to_device(Device::Meta).unwrap());
        let promised: Vec<Meta> = run(&ghosts).unwrap().iter().map(|y| y.meta()).collect();
        let kept: Vec<Meta> = outputs.iter().map(|y| Meta { device: Device::Meta, ..y.meta() }).collect();
        prop_assert_eq!(promised, kept);
    }
    // And back, as far as the mask and the class weights let it.
    let back = catch_unwind(AssertUnwindSafe(|| -> Result<()> {
        for y in run(&leaves)? {
            if y.requires_grad() {
                y.sum_all()?.backward()?;
            }
        }
        Ok(())
    }));
    match back {
        Err(_) => return Err(TestCaseError::fail("panicked on the way back")),
        Ok(Err(error)) if outcome.is_ok() => {
            let excused = error.to_string().contains("detach");
            prop_assert!(excused, "forward works, but backward does not: {}", error);
        }
        Ok(_) => {}
    }
    for (x, leaf) in inputs.iter().zip(&leaves) {
        if let Some(g) = leaf.grad() {
            prop_assert_eq!(g.meta(), x.meta());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4000,
        failure_persistence: None,
        rng_seed: proptest::test_runner::RngSeed::Fixed(20),
        ..Default::default()
    })]

    #[test]
    fn no_argument_makes_an_operator_panic(call in calls()) {
        fuzz(&call)?;
    }
}

#[test]
fn numbers_that_an_integer_dtype_does_not_hold_are_refused() -> Result<()> {
    let x = Tensor::from_slice(&[1u8, 44, 255], [3])?;
    for refused in [
        x.lt(300),
        x.eq(-1),
        x.maximum(256),
        x.masked_fill(&x, 256),
        x.clamp(0, 300),
        Tensor::full([2], 256, DType::U8),
        Tensor::full([2], -1, DType::U8),
        Tensor::full([2], 1e30, DType::I64),
    ] {
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("out of range"), "{message}");
    }
    // Arithmetic wraps, as it does between tensors.
    assert_eq!(x.add(300)?.to_vec::<u8>()?, [45, 88, 43]);
    assert_eq!(x.sub(2)?.to_vec::<u8>()?, [255, 42, 253]);
    Ok(())
}

#[test]
fn results_larger_than_memory_are_errors() -> Result<()> {
    // More than any address space holds, so that no machine promises the memory and fails later.
    let huge = Tensor::ones([1], DType::F32)?.expand([1 << 46])?;
    for refused in [huge.exp(), huge.add(&huge), huge.softmax(0), huge.relu()] {
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("memory"), "{message}");
    }
    let (column, row) = (Tensor::ones([1 << 23, 1], DType::F32)?, Tensor::ones([1, 1 << 23], DType::F32)?);
    assert!(column.add(&row).unwrap_err().to_string().contains("memory"));
    Ok(())
}

#[test]
fn a_value_that_does_not_fill_its_shape_is_refused() {
    assert!(dtensor::Local::from_vec(vec![1f32], &[64, 64]).is_err());
    assert!(dtensor::Local::from_vec(vec![1f32], &[]).is_ok());
    assert!(dtensor::Local::from_vec(Vec::<f32>::new(), &[usize::MAX, 2]).is_err());
}
