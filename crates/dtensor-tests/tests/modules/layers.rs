//! Tests the layers: values, gradients and errors.
//!
//! `golden/layers.json` contains PyTorch's results; `tools/golden_layers.py` writes and documents it.

use std::collections::BTreeMap;

use crate::common::golden;
use dtensor::comm::record;
use dtensor::models::{
    FeedForward, MLPModule, MLPStacked, ModelArgs, RMSNormPython, Transformer, TransformerBlock,
};
use dtensor::nn::{
    self, Dropout, Embedding, Identity, Layer, LayerNorm, Linear, Module, ModuleList, MultiHeadAttention,
    Parameter, Relu, RmsNorm, Sequential, Silu, deep_copy, downcast,
};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use serde::Deserialize;

fn values(x: &Tensor) -> Vec<f64> {
    x.detach().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("it is refused").to_string()
}

/// Non-zero numbers between −1 and 1.
fn wave(shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    Tensor::from_vec((0..n).map(|i| (1.0 + 0.7 * i as f64).sin()).collect(), shape).unwrap()
}

fn close(got: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    for (i, (a, b)) in values(got).into_iter().zip(values(expected)).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{what}: element {i} is {a}, not {b}");
    }
}

#[derive(Deserialize)]
struct Case {
    layer: String,
    modules: Vec<String>,
    parameters: Vec<(String, Vec<usize>)>,
    input: (Vec<usize>, Vec<f64>),
    output: (Vec<usize>, Vec<f64>),
    grads: BTreeMap<String, Vec<f64>>,
}

fn made(name: &str) -> Result<Box<dyn Layer>> {
    let args = ModelArgs {
        n_layers: 2,
        vocab_size: 5,
        max_seq_len: 6,
        dim: 8,
        n_heads: 2,
        dropout_p: 0.0,
        ..ModelArgs::default()
    };
    Ok(match name {
        "Linear" => Box::new(Linear::new(5, 3, true)?),
        "Linear without bias" => Box::new(Linear::new(3, 4, false)?),
        "Embedding" => Box::new(Embedding::new(7, 3)?),
        "Embedding with padding" => Box::new(Embedding::padded(5, 2, -2)?),
        "LayerNorm" => Box::new(LayerNorm::new(6)?),
        "LayerNorm over two dims" => Box::new(LayerNorm::new([3, 4])?.with_eps(0.1)),
        "LayerNorm without bias" => Box::new(LayerNorm::new(5)?.without_bias()),
        "LayerNorm without parameters" => Box::new(LayerNorm::new(5)?.without_parameters()),
        "RmsNorm" => Box::new(RmsNorm::new(6)?),
        "RmsNorm over two dims" => Box::new(RmsNorm::new([3, 4])?.with_eps(0.1)),
        "RmsNorm without weight" => Box::new(RmsNorm::new(5)?.without_weight()),
        "Relu" => Box::new(Relu::new()),
        "Gelu" => Box::new(nn::Gelu::default()),
        "Gelu by tanh" => Box::new(nn::Gelu::new(Gelu::Tanh)),
        "Silu" => Box::new(Silu::new()),
        "Identity" => Box::new(Identity::new()),
        "Sequential" => Box::new(
            Sequential::new()
                .push(Linear::new(4, 6, true)?)
                .push(nn::Gelu::default())
                .push(Sequential::new().push(LayerNorm::new(6)?)),
        ),
        "MultiHeadAttention" => Box::new(MultiHeadAttention::new(12, 3)?),
        "MultiHeadAttention, causal" => Box::new(MultiHeadAttention::new(8, 2)?.with_causal(true)),
        "RMSNormPython" => Box::new(RMSNormPython::new(6)?),
        "MLPModule" => Box::new(MLPModule::new(true)?),
        "MLPModule with sizes" => Box::new(MLPModule::with_sizes(3, 7, 2, false)?),
        "MLPStacked" => Box::new(MLPStacked::new(2)?),
        "FeedForward" => Box::new(FeedForward::new(4, 10, 0.0)?),
        "TransformerBlock" => Box::new(TransformerBlock::new(&args)?),
        "Transformer" => Box::new(Transformer::new(&args)?),
        "Transformer, not tied" => Box::new(Transformer::new(&ModelArgs { weight_tying: false, ..args })?),
        other => panic!("there is no layer {other}"),
    })
}

/// The number of cases, so that a lost case makes the test fail.
const CASES: usize = 27;

#[test]
fn every_layer_and_model_computes_what_pytorch_computes() -> Result<()> {
    let cases: Vec<Case> = golden::cases(include_str!("../golden/layers.json"));
    assert_eq!(cases.len(), CASES);
    for case in cases {
        let what = &case.layer;
        let layer = made(what)?;
        layer.to_dtype(DType::F64)?;
        let paths: Vec<String> = layer.named_modules().into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, case.modules, "{what}");
        let parameters = layer.named_parameters();
        let shapes: Vec<(String, Vec<usize>)> =
            parameters.iter().map(|(path, p)| (path.clone(), p.get().dims().to_vec())).collect();
        assert_eq!(shapes, case.parameters, "{what}");
        for (k, (path, parameter)) in parameters.iter().enumerate() {
            let owner = layer.get_submodule(path.rsplit_once('.').map_or("", |(owner, _)| owner))?.kind();
            let shift = if owner.contains("Norm") && path.ends_with("weight") { 1.0 } else { 0.0 };
            let shape = parameter.get().shape();
            let wave = |i: usize| 0.3 * (1.0 + k as f64 + 0.7 * i as f64).sin() + shift;
            parameter.set(&Tensor::from_vec((0..shape.numel()).map(wave).collect::<Vec<f64>>(), shape)?)?;
        }
        let (shape, data) = &case.input;
        let x = Tensor::from_slice(data, &shape[..])?;
        let looked_up = what.starts_with("Embedding") || what.starts_with("Transformer") && shape.len() == 2;
        let x = if looked_up { x.to_dtype(DType::I64)? } else { x.requires_grad_(true)? };
        let y = layer.forward(&x)?;
        // The logits of a transformer are in single precision.
        let single = y.dtype() == DType::F32;
        assert_eq!(single, what.starts_with("Transformer") && looked_up);
        let tolerance = if single { 2e-6 } else { 1e-10 };
        close(&y, &Tensor::from_slice(&case.output.1, &case.output.0[..])?, tolerance, what);
        let dy: Vec<f64> = (0..y.numel()).map(|i| (0.5 * i as f64).cos()).collect();
        let dy = Tensor::from_vec(dy, y.shape())?.to_dtype(y.dtype())?;
        y.mul(&dy)?.sum_all()?.backward()?;
        let mut grads = parameters.iter().map(|(path, p)| (path.clone(), p.grad())).collect::<Vec<_>>();
        if !looked_up {
            grads.push((String::new(), x.grad()));
        }
        assert_eq!(grads.len(), case.grads.len(), "{what}");
        for (path, grad) in grads {
            let grad = grad.unwrap_or_else(|| panic!("{what}: `{path}` has no gradient"));
            let expected = Tensor::from_slice(&case.grads[&path], grad.shape())?;
            close(&grad, &expected, tolerance, &format!("{what}: the gradient of `{path}`"));
        }
    }
    Ok(())
}

#[test]
fn layers_take_batches_and_features_of_size_zero() -> Result<()> {
    let run = |layer: &dyn Layer, x: &[usize], y: &[usize]| -> Result<()> {
        let x = Tensor::zeros(x, DType::F32)?.requires_grad_(true)?;
        let out = layer.forward(&x)?;
        assert_eq!(out.dims(), y);
        out.sum_all()?.backward()?;
        assert_eq!(x.grad().unwrap().dims(), x.dims());
        for (path, parameter) in layer.named_parameters() {
            let grad = parameter.grad().unwrap_or_else(|| panic!("`{path}` has no gradient"));
            assert!(values(&grad).iter().all(|g| g.is_finite()));
        }
        Ok(())
    };
    run(&Linear::new(3, 4, true)?, &[0, 3], &[0, 4])?;
    run(&Linear::new(0, 4, true)?, &[2, 0], &[2, 4])?;
    run(&Linear::new(3, 0, true)?, &[2, 3], &[2, 0])?;
    run(&LayerNorm::new(3)?, &[0, 3], &[0, 3])?;
    run(&LayerNorm::new(0)?, &[2, 0], &[2, 0])?;
    run(&RmsNorm::new(3)?, &[0, 3], &[0, 3])?;
    run(&RmsNorm::new([2, 0])?, &[2, 0], &[2, 0])?;
    run(&RMSNormPython::new(3)?, &[0, 3], &[0, 3])?;
    run(&Dropout::new(0.5)?, &[0, 3], &[0, 3])?;
    run(&nn::Gelu::default(), &[0], &[0])?;
    run(&Sequential::new(), &[0], &[0])?;
    let attention = MultiHeadAttention::new(8, 2)?.with_dropout(0.5)?.with_causal(true);
    run(&attention, &[0, 3, 8], &[0, 3, 8])?;
    run(&attention, &[2, 0, 8], &[2, 0, 8])?;
    // A linear layer without inputs returns its bias. The bias is 0, because its bound depends on the number of inputs.
    let empty = Linear::new(0, 2, true)?.forward(&Tensor::zeros([1, 0], DType::F32)?)?;
    assert_eq!(values(&empty), [0., 0.]);

    let ids = |shape: &[usize]| Tensor::zeros(shape, DType::I64);
    let table = Embedding::new(4, 3)?;
    assert_eq!(table.forward(&ids(&[0])?)?.dims(), [0, 3]);
    assert_eq!(table.forward(&ids(&[2, 0])?)?.dims(), [2, 0, 3]);
    assert_eq!(Embedding::new(4, 0)?.forward(&ids(&[2])?)?.dims(), [2, 0]);
    let nothing = Embedding::new(0, 3)?;
    assert_eq!(nothing.forward(&ids(&[0])?)?.dims(), [0, 3]);
    let read = nothing.forward(&ids(&[1])?).and_then(|x| x.to_f64_vec());
    assert!(message(read).contains("index 0 is out of bounds"));
    Ok(())
}

#[test]
fn layers_return_an_error_for_bad_arguments() -> Result<()> {
    let check = |error: String, parts: &[&str]| {
        parts.iter().for_each(|part| assert!(error.contains(part), "`{part}` is not in: {error}"));
    };
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32).unwrap();
    for p in [-0.1, 1.1, f64::NAN] {
        check(message(Dropout::new(p)), &["Dropout:", "probability has to be between 0 and 1"]);
    }
    check(message(MultiHeadAttention::new(8, 2)?.with_dropout(2.0)), &["between 0 and 1, but got 2"]);
    for (dim, heads) in [(8, 3), (8, 0), (0, 2)] {
        check(message(MultiHeadAttention::new(dim, heads)), &["dim must be divisible by n_heads"]);
    }
    let attention = MultiHeadAttention::new(8, 2)?;
    check(
        message(attention.forward(zeros(&[2, 8]))),
        &["queries must be [batch, length", "size 4", "[2, 8]"],
    );
    assert!(attention.forward(zeros(&[2, 3, 7])).is_err());
    check(message(Linear::new(4, 6, false)?.with_heads(4)), &["6 outputs cannot be split into 4 heads"]);
    check(message(Linear::new(4, 6, false)?.with_heads(0)), &["0 heads"]);

    for (rows, padding) in [(3, 3), (3, -4), (0, 0), (3, i64::MIN)] {
        let error = message(Embedding::padded(rows, 2, padding));
        check(error, &["Embedding", &format!("padding index {padding}"), "within the number of embeddings"]);
    }
    let table = Parameter::new(&zeros(&[3]))?;
    check(message(Embedding::from_parameter(table, None)), &["the weight must have 2 dims", "[3]"]);
    let table = Parameter::new(&zeros(&[3, 2]))?;
    assert!(Embedding::from_parameter(table.clone(), Some(3)).is_err());
    assert_eq!(Embedding::from_parameter(table, Some(-1))?.padding(), Some(2));
    check(
        message(
            Embedding::new(3, 2)?.forward(&Tensor::from_slice(&[3i64], [1])?).and_then(|x| x.to_f64_vec()),
        ),
        &["index 3 is out of bounds", "size 3"],
    );
    check(message(Embedding::new(3, 2)?.forward(zeros(&[1]))), &["i64"]);

    check(message(LayerNorm::new(())), &["normalized_shape to be at least 1-dimensional"]);
    check(message(RmsNorm::new(())), &["normalized_shape to be at least 1-dimensional"]);
    // Without parameters, only the layer itself can check the shape.
    let norms: [Box<dyn Layer>; 2] = [
        Box::new(LayerNorm::new([2, 3])?.without_parameters()),
        Box::new(RmsNorm::new([2, 3])?.without_weight()),
    ];
    for norm in norms {
        assert_eq!(norm.forward(&zeros(&[5, 2, 3]))?.dims(), [5, 2, 3]);
        for wrong in [&[3][..], &[3, 2], &[2, 3, 1], &[2, 4]] {
            check(message(norm.forward(&zeros(wrong))), &["given normalized_shape [2, 3]", "but got ["]);
        }
    }
    Ok(())
}

#[test]
fn the_padding_row_is_zero_and_gets_no_gradient() -> Result<()> {
    manual_seed(3);
    let layer = Embedding::padded(4, 3, 1)?;
    manual_seed(3);
    let plain = Embedding::new(4, 3)?;
    // The other rows are the same as without a padding index.
    let (padded, plain) = (values(&layer.weight.get()), values(&plain.weight.get()));
    assert_eq!(padded[3..6], [0.; 3]);
    assert_eq!((&padded[..3], &padded[6..]), (&plain[..3], &plain[6..]));
    layer.forward(&Tensor::from_slice(&[1i64, 1, 2], [3])?)?.sum_all()?.backward()?;
    let grad = values(&layer.weight.grad().unwrap());
    assert_eq!(grad, [0., 0., 0., 0., 0., 0., 1., 1., 1., 0., 0., 0.]);
    // A reset restores the zeros after the weight was overwritten.
    layer.weight.set(&Tensor::ones([4, 3], DType::F32)?)?;
    manual_seed(3);
    layer.reset_parameters()?;
    assert_eq!(values(&layer.weight.get()), padded);
    Ok(())
}

#[test]
fn dropout_acts_in_training_only() -> Result<()> {
    let next = || values(&Tensor::rand([4], DType::F32).unwrap());
    let x = wave(&[50, 40]).requires_grad_(true)?;
    manual_seed(9);
    let undisturbed = next();
    // The generator does not advance in evaluation mode or with `p = 0`.
    for layer in [Dropout::new(0.0)?, Dropout::new(0.5)?] {
        if layer.p() > 0.0 {
            layer.eval();
        }
        manual_seed(9);
        assert_eq!(values(&layer.forward(&x)?), values(&x));
        assert_eq!(next(), undisturbed);
    }
    let layer = Dropout::new(0.2)?;
    manual_seed(9);
    let y = layer.forward(&x)?;
    assert_ne!(next(), undisturbed);
    y.sum_all()?.backward()?;
    let (before, after, grad) = (values(&x), values(&y), values(&x.grad().unwrap()));
    for ((x, y), g) in before.iter().zip(&after).zip(&grad) {
        // Dropped elements get no gradient; the others are scaled to preserve the mean.
        assert!((*y == 0.0 && *g == 0.0) || ((y - x * 1.25).abs() < 1e-12 && *g == 1.25));
    }
    let dropped = after.iter().filter(|y| **y == 0.0).count();
    assert!((300..500).contains(&dropped), "{dropped} of 2000");
    manual_seed(9);
    assert_eq!(values(&layer.forward(&x)?), after);
    assert!(values(&Dropout::new(1.0)?.forward(&x)?).iter().all(|y| *y == 0.0));
    layer.eval();
    assert_eq!(values(&layer.forward(&x)?), before);
    layer.train();
    assert_ne!(values(&layer.forward(&x)?), before);
    Ok(())
}

#[test]
fn layers_work_in_half_precision() -> Result<()> {
    let x = wave(&[2, 5, 8]).to_dtype(DType::BF16)?;
    let model = Sequential::new()
        .push(Linear::new(8, 8, true)?)
        .push(LayerNorm::new(8)?)
        .push(RmsNorm::new(8)?)
        .push(MultiHeadAttention::new(8, 2)?.with_causal(true))
        .push(nn::Gelu::default())
        .push(Silu::new());
    model.to_dtype(DType::BF16)?;
    let y = model.forward(&x)?;
    assert_eq!((y.dtype(), y.dims()), (DType::BF16, x.dims()));
    let exact = deep_copy(&model)?;
    exact.to_dtype(DType::F64)?;
    let apart = y.to_dtype(DType::F64)?.sub(&exact.forward(&x.to_dtype(DType::F64)?)?)?.abs()?.max_all()?;
    assert!(apart.item::<f64>()? < 0.05);
    // The default `eps` is the epsilon of f32, the precision in which the mean square is computed.
    let tiny = Tensor::full([1, 2], 1e-4, DType::BF16)?;
    let norm = RmsNorm::new(2)?.without_weight();
    let (got, square) = (values(&norm.forward(&tiny)?)[0], values(&tiny)[0].powi(2));
    let expected = (square / (square + f32::EPSILON as f64)).sqrt();
    assert!((got / expected - 1.0).abs() < 0.01, "{got} instead of {expected}");
    Ok(())
}

#[test]
fn a_sequential_is_a_list_of_layers_of_any_type() -> Result<()> {
    let first = Linear::new(3, 4, true)?;
    let model =
        Sequential::new().push(first.clone()).push(Relu::new()).push(MLPModule::with_sizes(4, 2, 5, false)?);
    let paths: Vec<String> = model.named_modules().into_iter().map(|(path, _)| path).collect();
    assert_eq!(paths, ["", "0", "1", "2", "2.net1", "2.relu", "2.net2"]);
    assert_eq!((model.len(), model.is_empty(), Sequential::new().is_empty()), (3, false, true));
    let kinds: Vec<_> = model.iter().rev().map(|layer| layer.kind()).collect();
    assert_eq!(kinds, ["MLPModule", "Relu", "Linear"]);
    assert_eq!((model[1].kind(), model.get(2).map(|l| l.kind())), ("Relu", Some("MLPModule")));
    assert!(model.get(3).is_none());
    assert_eq!(format!("{model:?}"), "Sequential(Linear, Relu, MLPModule)");
    assert!(downcast::<Linear>(model.get_submodule("0")?).unwrap().weight.is(&first.weight));
    assert!(downcast::<Sequential>(model.get_submodule("")?).is_some());
    let x = wave(&[2, 3]).to_dtype(DType::F32)?;
    let by_hand = model[2].forward(&model[1].forward(&model[0].forward(&x)?)?)?;
    assert_eq!(values(&model.forward(&x)?), values(&by_hand));
    assert_eq!(values(&Sequential::new().forward(&x)?), values(&x));
    // A model may be a layer of another model.
    let nested = Sequential::new().push(Identity::new()).push(model.clone());
    assert_eq!(values(&nested.forward(&x)?), values(&by_hand));
    assert!(nested.get_parameter("1.2.net2.weight").is_ok());
    nested.eval();
    assert!(nested.named_modules().iter().all(|(_, module)| !module.is_training()));
    // A `ModuleList` holds layers but has no `forward`.
    let list: ModuleList<Box<dyn Layer>> = vec![Box::new(first), Box::new(Relu::new())];
    assert_eq!(list.kind(), "ModuleList");
    assert_eq!(list.named_children().len(), 2);
    Ok(())
}

#[test]
fn collectives_inside_a_sequential_are_attributed_to_its_caller() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let linear = Linear::new(4, 4, false)?;
        linear.weight.replace(&distribute_tensor(&linear.weight.get(), &mesh, [Shard(1)])?)?;
        let model = Sequential::new().push(Identity::new()).push(linear).push(Relu::new());
        let x = sharded::ones([2, 4], DType::F32, &mesh, [Shard(1)])?;
        // ReLU needs the reduced sums.
        let line = line!() + 1;
        let (y, calls) = record(|| model.forward(&x));
        assert_eq!(y?.dims(), [2, 4]);
        let sites: Vec<(&str, u32)> = calls.iter().map(|call| (&*call.at.file, call.at.line)).collect();
        assert_eq!(sites, [(file!(), line)]);
        Ok(())
    });
}

/// Returns an attention module on one device and a copy whose heads are sharded over the ranks.
fn spread(mesh: &DeviceMesh, heads: usize, dropout: f64) -> Result<(MultiHeadAttention, MultiHeadAttention)> {
    manual_seed(4);
    let whole = MultiHeadAttention::new(4 * heads, heads)?.with_dropout(dropout)?.with_causal(true);
    whole.to_dtype(DType::F64)?;
    let parts = deep_copy(&whole)?;
    for (path, parameter) in parts.named_parameters() {
        let along = if path.starts_with("wo") { Shard(1) } else { Shard(0) };
        parameter.replace(&distribute_tensor(&parameter.get(), mesh, [along])?)?;
    }
    Ok((whole, parts))
}

#[test]
fn attention_with_sharded_heads_needs_no_communication() {
    for ranks in [2, 4] {
        spmd(ranks, |world| {
            let mesh = DeviceMesh::new(&world, [ranks], "tp")?;
            for dropout in [0.0, 0.4] {
                let (whole, parts) = spread(&mesh, 4, dropout)?;
                // Dropout on the output needs the reduced sum, so it costs one collective.
                let x = wave(&[2, 5, 16]);
                manual_seed(6);
                let expected = whole.forward(&x)?;
                let laid = distribute_tensor(&x, &mesh, [Replicate])?;
                manual_seed(6);
                let (y, calls) = record(|| parts.forward(&laid));
                let y = y?;
                assert_eq!(calls.len(), (dropout > 0.0) as usize, "{calls:?}");
                close(&y.full_tensor()?, &expected, 1e-12, "attention");
                expected.pow(2.0)?.sum_all()?.backward()?;
                let y = y.redistribute([Replicate])?;
                let (done, calls) = record(|| y.pow(2.0)?.sum_all()?.backward());
                done?;
                assert!(calls.is_empty(), "{calls:?}");
                for (path, parameter) in parts.named_parameters() {
                    let grad = parameter.grad().unwrap();
                    assert_eq!(grad.placements(), parameter.get().placements());
                    let expected = whole.get_parameter(&path)?.grad().unwrap();
                    close(&grad.full_tensor()?, &expected, 1e-11, &path);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_rank_with_local_weights_attends_with_its_own_heads() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let (whole, parts) = spread(&mesh, 6, 0.0)?;
        let x = wave(&[3, 5, 24]);
        for (_, parameter) in parts.named_parameters() {
            let part = parameter.get().to_local()?;
            parameter.replace(&part)?;
        }
        let y = parts.forward(&x)?;
        let sum = Tensor::from_local(&y, &mesh, [Partial(dtensor::comm::ReduceOp::Sum)])?.full_tensor()?;
        close(&sum, &whole.forward(&x)?, 1e-12, "attention with 3 of 6 heads");
        Ok(())
    });
}

#[test]
fn splitting_a_head_over_ranks_is_an_error() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        let (_, parts) = spread(&mesh, 4, 0.0)?;
        let x = distribute_tensor(&wave(&[2, 5, 16]), &mesh, [Replicate])?;
        let error = message(parts.forward(&x));
        assert!(error.contains("requires redistribution"), "{error}");
        // A local weight that contains a fraction of a head is an error, too.
        let part = parts.wq.weight.get().to_local()?.narrow(0, 0, 3)?;
        parts.wq.weight.replace(&part)?;
        let error = message(parts.forward(wave(&[2, 5, 16])));
        assert!(error.contains("queries must be [batch, length, heads of size 4]"), "{error}");
        Ok(())
    });
}

/// Grouped-query attention is attention with repeated keys and values, on one device and with sharded heads.
#[test]
fn grouped_heads_share_keys_and_values() -> Result<()> {
    manual_seed(11);
    let leaf =
        |heads: usize, length: usize| Tensor::randn([2, heads, length, 4], DType::F64)?.requires_grad_(true);
    for (queries, keys) in [(4, 2), (6, 2), (4, 4), (3, 1)] {
        let (q, k, v) = (leaf(queries, 5)?, leaf(keys, 7)?, leaf(keys, 7)?);
        let mask = Tensor::randn([queries, 5, 7], DType::F64)?;
        let narrow = Tensor::randn([1, 5, 7], DType::F64)?;
        let repeated =
            Tensor::from_vec((0..queries).map(|i| (i * keys / queries) as i64).collect(), [queries])?;
        for options in [
            AttentionOptions { causal: true, ..Default::default() },
            AttentionOptions { mask: Some(&mask), ..Default::default() },
            AttentionOptions { mask: Some(&narrow), scale: Some(0.3), ..Default::default() },
        ] {
            let (k2, v2) = (k.index_select(1, &repeated)?, v.index_select(1, &repeated)?);
            let want = q.scaled_dot_product_attention(&k2, &v2, options)?;
            let grouped = AttentionOptions { enable_gqa: true, ..options };
            let got = q.scaled_dot_product_attention(&k, &v, grouped)?;
            assert_eq!(got.dims(), want.dims());
            let close =
                |a: &Tensor, b: &Tensor| values(a).iter().zip(values(b)).all(|(a, b)| (a - b).abs() < 1e-12);
            assert!(close(&got, &want));
            let (got, want) = (
                dtensor::grad(&got.pow(2)?.sum_all()?, &[&q, &k, &v], Default::default())?,
                dtensor::grad(&want.pow(2)?.sum_all()?, &[&q, &k, &v], Default::default())?,
            );
            assert!(got.iter().zip(&want).all(|(a, b)| close(a.as_ref().unwrap(), b.as_ref().unwrap())));
        }
    }
    let (q, k) = (leaf(4, 5)?, leaf(3, 5)?);
    let grouped = AttentionOptions { enable_gqa: true, ..Default::default() };
    assert!(message(q.scaled_dot_product_attention(&k, &k, grouped)).contains("must be a multiple"));
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let make = |heads: usize| sharded::randn([2, heads, 5, 4], DType::F64, &mesh, [Shard(1)]);
        let (q, k, v) = (make(8)?, make(4)?, make(4)?);
        let options = AttentionOptions { causal: true, enable_gqa: true, ..Default::default() };
        let y = q.scaled_dot_product_attention(&k, &v, options)?;
        assert_eq!(y.placements(), [Shard(1)], "heads stay where they are");
        let want =
            q.full_tensor()?.scaled_dot_product_attention(&k.full_tensor()?, &v.full_tensor()?, options)?;
        assert!(values(&y.full_tensor()?).iter().zip(values(&want)).all(|(a, b)| (a - b).abs() < 1e-12));
        Ok(())
    });
    Ok(())
}
