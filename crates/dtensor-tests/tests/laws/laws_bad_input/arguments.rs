//! Dims, indices and numbers out of range.

use dtensor::optim::Sgd;
use dtensor::{AttentionOptions, CrossEntropyOptions, DType, Reduction, Result, Tensor};

use super::{Unary, ints, zeros};
use crate::common::refused::refused;

fn ids(values: &[i64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape).unwrap()
}

#[test]
fn dims_out_of_range_are_an_error_that_names_the_range() -> Result<()> {
    type Along = fn(&Tensor, isize) -> Result<()>;
    let functions: [(&str, Along); 36] = [
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
        ("unflatten", |x, d| x.unflatten(d, [-1, 1]).map(drop)),
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
    // `unsqueeze` and `stack` accept one dim more than the tensor has.
    refused(zeros([2, 3]).unsqueeze(3), &["unsqueeze", "[-3, 2]", "got 3"]);
    refused(zeros([2, 3]).unsqueeze(-4), &["unsqueeze", "[-3, 2]", "got -4"]);
    refused(Tensor::stack(&[&zeros([2])], 2), &["stack", "[-2, 1]", "got 2"]);
    refused(zeros(()).size(0), &["size", "dim"]);
    // `usize::MAX` must not wrap around to dim -1.
    refused(zeros([2, 3]).sum(usize::MAX), &["sum", "out of range"]);
    refused(zeros([2, 3]).softmax(usize::MAX), &["softmax", "out of range"]);

    refused(zeros([2, 3]).sum([0, 0]), &["sum", "dim 0", "multiple times"]);
    refused(zeros([2, 3]).mean([1, -1]), &["mean", "dim 1", "multiple times"]);
    refused(zeros([2, 3]).norm(2.0, [0, -2], true), &["norm", "dim 0", "multiple times"]);
    refused(zeros([2, 3]).permute([1, 1]), &["permute", "dim 1", "multiple times"]);
    refused(zeros([2, 3]).permute([0]), &["permute", "1 dims", "of 2"]);
    refused(zeros([2, 3, 4]).flatten(2, 1), &["flatten", "start dim 2", "end dim 1"]);
    refused(zeros([2, 6]).unflatten(1, [-1, 4]), &["unflatten", "dim 1", "[-1, 4]", "shape [6]"]);
    refused(zeros([2, 6]).unflatten(1, [-1, -1]), &["unflatten", "dim 1", "[-1, -1]"]);
    refused(Tensor::scalar(1f32)?.unflatten(0, [1, 1]), &["unflatten", "scalar"]);
    Ok(())
}

#[test]
fn indices_out_of_bounds_are_an_error_that_names_index_and_size() -> Result<()> {
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
        refused(x.cross_entropy(&target, CrossEntropyOptions::default()), &["cross_entropy", &said, "4"]);
        refused(x.nll_loss(&target, CrossEntropyOptions::default()), &["nll_loss", &said, "4"]);
        // A target that equals `ignore_index` is not an error.
        let ignored = CrossEntropyOptions { ignore_index: bad, ..Default::default() };
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
        refused(f(&zeros(())), &["0-d"]);
    }
    refused(x.slice(0, 0, 2, 0), &["slice", "step", "greater than zero"]);
    // As in Python, a slice is clipped to the size of the dim.
    assert_eq!(x.slice(0, -100, 100, 1)?.dims(), [3, 4]);
    assert_eq!(x.slice(0, 2, 1, 1)?.dims(), [0, 4]);
    assert_eq!(x.slice(0, isize::MIN, isize::MAX, usize::MAX)?.dims(), [1, 4]);
    refused(x.topk(4, 0, true), &["topk", "k (4)", "dim 0", "size 3"]);
    refused(x.topk(usize::MAX, 1, false), &["topk", "dim 1", "size 4"]);
    refused(zeros(()).topk(2, 0, true), &["topk", "k (2)", "size 1"]);
    Ok(())
}

#[test]
fn options_out_of_range_are_an_error() -> Result<()> {
    let x = zeros([2, 3]);
    let target = ints([2]);
    for p in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        refused(x.dropout(p), &["dropout", "between 0 and 1", &p.to_string()]);
        refused(Tensor::bernoulli(p, [2], DType::F32), &["bernoulli", "between 0 and 1", &p.to_string()]);
        let options = AttentionOptions { dropout: p, ..Default::default() };
        refused(
            x.scaled_dot_product_attention(&x, &x, options),
            &["scaled_dot_product_attention", "between 0 and 1"],
        );
        let options = CrossEntropyOptions { label_smoothing: p, ..Default::default() };
        refused(
            x.cross_entropy(&target, options),
            &["cross_entropy", "label_smoothing", "between 0.0 and 1.0"],
        );
    }
    let options = CrossEntropyOptions { label_smoothing: 0.1, ..Default::default() };
    refused(x.nll_loss(&target, options), &["nll_loss", "label_smoothing"]);
    let weight = zeros([3]).requires_grad_(true)?;
    let options = CrossEntropyOptions { weight: Some(&weight), ..Default::default() };
    refused(x.cross_entropy(&target, options), &["cross_entropy", "weight", "detach"]);
    let float_mask = zeros([2, 2]).requires_grad_(true)?;
    let options = AttentionOptions { mask: Some(&float_mask), ..Default::default() };
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
fn numbers_that_overflow_an_integer_dtype_are_an_error() -> Result<()> {
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
fn empty_tensors_give_an_error_or_a_defined_result() -> Result<()> {
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
        refused(f(&none), &["[0]", "non-zero size"]);
        refused(f(&zeros([0, 2]).select(1, 0)?), &["non-zero size"]);
    }
    refused(none.norm_all(f64::INFINITY), &["norm", "zero elements"]);
    refused(Tensor::cat(&[], 0), &["cat", "non-empty"]);
    refused(Tensor::stack(&[], 0), &["stack", "non-empty"]);
    refused(none.item::<f32>(), &["item", "0 elements"]);

    // Without rows, the result is empty. Only empty rows are an error.
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
    let loss = zeros([0, 3]).cross_entropy(&ints([0]), CrossEntropyOptions::default())?;
    assert!(loss.item::<f32>()?.is_nan());
    let (q, keys) = (zeros([2, 3]), zeros([0, 3]));
    let out = q.scaled_dot_product_attention(&keys, &keys, AttentionOptions::default())?;
    assert_eq!(out.to_vec::<f32>()?, [0.; 6]);
    Ok(())
}
