//! Tests the small models: structure, training, and equality with one device on a mesh.

use dtensor::models::{MLPModule, MLPStacked, ModelArgs, RMSNormPython, Transformer, TransformerBlock};
use dtensor::nn::{Module, RmsNorm, deep_copy};
use dtensor::optim::Sgd;
use dtensor::prelude::*;
use dtensor::testing::spmd;

fn values(x: &Tensor) -> Vec<f64> {
    x.detach().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("it is refused").to_string()
}

/// Sequences in which each token determines the next one.
fn tokens(batch: usize, length: usize) -> Tensor {
    let token = |i: usize| (i / length + 3 * (i % length)) as i64 % 8;
    Tensor::from_vec((0..batch * length).map(token).collect(), [batch, length]).unwrap()
}

/// The cross entropy of the model's next-token logits.
fn loss(model: &Transformer, tokens: &Tensor) -> Result<Tensor> {
    let length = tokens.size(1)? - 1;
    let logits = model.forward(&tokens.narrow(1, 0, length)?)?;
    logits
        .flatten(0, 1)?
        .cross_entropy(&tokens.narrow(1, 1, length)?.flatten(0, 1)?, CrossEntropyOptions::default())
}

#[test]
fn the_transformer_matches_pytorchs_test_model() -> Result<()> {
    let args = ModelArgs::default();
    let sizes = (args.n_layers, args.vocab_size, args.max_seq_len, args.dim, args.n_heads);
    assert_eq!(sizes, (2, 8, 16, 16, 4));
    assert_eq!((args.dropout_p, args.head_dim()), (0.1, 4));
    assert!(args.use_attn_mask && args.weight_tying && !args.checkpoint_activations);
    let model = Transformer::new(&args)?;
    let logits = model.forward(tokens(3, 16))?;
    assert_eq!((logits.dims(), logits.dtype()), (&[3, 16, 8][..], DType::F32));
    let numbers = |model: &Transformer| model.parameters().iter().map(|p| p.get().numel()).sum::<usize>();
    let block = 4 * 16 + 4 * 16 * 16 + (64 * 16 + 64) + (16 * 64 + 16);
    assert_eq!(numbers(&model), 8 * 16 + 16 * 16 + 2 * block + 2 * 16);
    let untied = Transformer::new(&ModelArgs { weight_tying: false, ..args.clone() })?;
    assert_eq!(numbers(&untied), numbers(&model) + 8 * 16);
    assert_eq!((model.args(), model.layers[0].attention.n_heads()), (&args, 4));
    // Zero blocks and zero tokens work.
    let none = Transformer::new(&ModelArgs { n_layers: 0, ..args })?;
    assert_eq!(none.forward(tokens(1, 2))?.dims(), [1, 2, 8]);
    for shape in [[0, 4], [2, 0]] {
        assert_eq!(model.forward(&Tensor::zeros(shape, DType::I64)?)?.dims(), [shape[0], shape[1], 8]);
    }
    Ok(())
}

#[test]
fn impossible_model_arguments_are_an_error() -> Result<()> {
    let good = ModelArgs::default();
    let wrong: [(ModelArgs, &str); 8] = [
        (ModelArgs { n_heads: 3, ..good.clone() }, "dim must be divisible by n_heads, but got 16 and 3"),
        (ModelArgs { n_heads: 0, ..good.clone() }, "dim must be divisible by n_heads"),
        (ModelArgs { dim: 0, ..good.clone() }, "dim must be positive"),
        (ModelArgs { vocab_size: 0, ..good.clone() }, "vocab_size must be positive"),
        (ModelArgs { max_seq_len: 0, ..good.clone() }, "max_seq_len must be positive"),
        (ModelArgs { dropout_p: -0.5, ..good.clone() }, "between 0 and 1, but got -0.5"),
        (ModelArgs { dropout_p: 1.5, ..good.clone() }, "between 0 and 1, but got 1.5"),
        (ModelArgs { dropout_p: f64::NAN, ..good.clone() }, "between 0 and 1"),
    ];
    for (args, expected) in wrong {
        for error in [
            message(Transformer::new(&args)),
            message(TransformerBlock::new(&args)),
            message(args.attention()),
        ] {
            assert!(
                error.contains("ModelArgs") && error.contains(expected),
                "`{expected}` is not in: {error}"
            );
        }
    }
    let model = Transformer::new(&good)?;
    for shape in [&[2, 17][..], &[4], &[1, 2, 3]] {
        let error = message(model.forward(&Tensor::zeros(shape, DType::I64)?));
        assert!(error.contains("max_seq_len, 16") && error.contains("their shape is"), "{error}");
    }
    assert!(message(model.forward(&tokens(1, 4).add(8)?)).contains("out of bounds"));
    Ok(())
}

#[test]
fn the_transformer_learns() -> Result<()> {
    for weight_tying in [true, false] {
        manual_seed(1);
        let model = Transformer::new(&ModelArgs { weight_tying, ..ModelArgs::default() })?;
        let (optimizer, data) = (Sgd::new(model.parameters(), 0.1)?, tokens(8, 9));
        model.eval();
        let before = loss(&model, &data)?.item::<f32>()?;
        model.train();
        for _ in 0..60 {
            optimizer.zero_grad();
            loss(&model, &data)?.backward()?;
            optimizer.step()?;
        }
        model.eval();
        let after = loss(&model, &data)?.item::<f32>()?;
        assert!(after < 0.2 && before > 1.5, "from {before} to {after}");
    }
    Ok(())
}

#[test]
fn dropout_follows_the_seed_and_is_off_in_evaluation() -> Result<()> {
    let model = Transformer::new(&ModelArgs::default())?;
    let run = |seed: u64| -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
        manual_seed(seed);
        model.zero_grad();
        let logits = model.forward(tokens(4, 8))?;
        logits.pow(2.0)?.sum_all()?.backward()?;
        Ok((values(&logits), model.parameters().iter().map(|p| values(&p.grad().unwrap())).collect()))
    };
    assert_eq!(run(3)?, run(3)?);
    assert_ne!(run(3)?.0, run(4)?.0);
    model.eval();
    let evaluated = run(3)?;
    assert_eq!(evaluated, run(4)?);
    assert_ne!(
        evaluated.0,
        {
            model.train();
            run(3)?
        }
        .0
    );
    // Zero dropout is the same as evaluation mode.
    let without = Transformer::new(&ModelArgs { dropout_p: 0.0, ..ModelArgs::default() })?;
    without.load_state_dict(&model.state_dict(), true)?;
    assert_eq!(values(&without.forward(tokens(4, 8))?), evaluated.0);
    Ok(())
}

#[test]
fn the_causal_mask_hides_later_positions() -> Result<()> {
    for use_attn_mask in [true, false] {
        let args = ModelArgs { use_attn_mask, dropout_p: 0.0, ..ModelArgs::default() };
        let model = Transformer::new(&args)?;
        let before = tokens(1, 6);
        let mut ids = before.to_vec::<i64>()?;
        ids[4] = (ids[4] + 1) % 8;
        let after = model.forward(&Tensor::from_vec(ids, [1, 6])?)?;
        let (before, after) = (values(&model.forward(&before)?), values(&after));
        assert_eq!(before[..4 * 8] == after[..4 * 8], use_attn_mask);
        assert_ne!(before[4 * 8..5 * 8], after[4 * 8..5 * 8]);
        assert_ne!(before[5 * 8..], after[5 * 8..]);
    }
    Ok(())
}

#[test]
fn a_tied_weight_accumulates_the_gradients_of_both_uses() -> Result<()> {
    let args = ModelArgs { dropout_p: 0.0, ..ModelArgs::default() };
    let tied = Transformer::new(&args)?;
    let untied = Transformer::new(&ModelArgs { weight_tying: false, ..args })?;
    untied.load_state_dict(&tied.state_dict(), true)?;
    for model in [&tied, &untied] {
        model.to_dtype(DType::F64)?;
        loss(model, &tokens(4, 9))?.backward()?;
    }
    let grad = |p: &dtensor::nn::Parameter| p.grad().unwrap();
    let sum = grad(&untied.tok_embeddings.weight).add(&grad(&untied.output.weight))?;
    let apart = sum.sub(&grad(&tied.tok_embeddings.weight))?.abs()?.max_all()?.item::<f64>()?;
    assert!(apart < 1e-12 && grad(&tied.output.weight).abs()?.max_all()?.item::<f64>()? > 1e-3);
    Ok(())
}

#[test]
fn the_small_models_match_pytorchs_test_models() -> Result<()> {
    manual_seed(7);
    let model = MLPModule::new(true)?;
    let after = Tensor::rand([1], DType::F32)?.item::<f32>()?;
    manual_seed(5);
    let first = Tensor::rand([16, 10], DType::F32)?.sub(0.5)?.mul(2.0 / 10f64.sqrt())?;
    let apart = first.sub(&model.net1.weight.get())?.abs()?.max_all()?.item::<f32>()?;
    assert!(apart < 1e-6, "it is drawn from seed 5");
    MLPModule::new(true)?;
    assert_eq!(Tensor::rand([1], DType::F32)?.item::<f32>()?, after);
    assert!(MLPModule::new(false)?.net1.bias.is_none());
    let sized = MLPModule::with_sizes(3, 5, 2, true)?;
    assert_eq!(sized.forward(&Tensor::ones([4, 3], DType::F32)?)?.dims(), [4, 2]);
    // The modules of a stack have equal values but separate parameters.
    let stacked = MLPStacked::new(2)?;
    let [a, b] = [&stacked.layers[0], &stacked.layers[1]];
    assert_eq!(values(&a.net2.weight.get()), values(&b.net2.weight.get()));
    assert!(!a.net2.weight.is(&b.net2.weight));
    let x = Tensor::randn([2, 10], DType::F32)?;
    assert_eq!(values(&stacked.forward(&x)?), values(&b.forward(&a.forward(&x)?)?));

    let x = Tensor::randn([3, 6], DType::F32)?;
    let (by_hand, fused) = (RMSNormPython::new(6)?.with_eps(0.01), RmsNorm::new(6)?.with_eps(0.01));
    let apart = by_hand.forward(&x)?.sub(&fused.forward(&x)?)?.abs()?.max_all()?.item::<f32>()?;
    assert!(apart < 1e-6);
    assert!(RMSNormPython::new(6)?.forward(&Tensor::ones([3, 5], DType::F32)?).is_err());
    Ok(())
}

/// The placement of each parameter under tensor parallelism, which shards heads and hidden sizes.
fn cut(path: &str) -> Placement {
    let tail = path.strip_suffix(".weight").or(path.strip_suffix(".bias")).unwrap_or(path);
    match tail.rsplit('.').next() {
        Some("wo" | "w2") if path.ends_with("weight") => Shard(1),
        Some("wq" | "wk" | "wv" | "w1" | "tok_embeddings" | "pos_embeddings" | "output") => Shard(0),
        _ => Replicate,
    }
}

#[test]
fn a_transformer_on_a_mesh_matches_one_device() {
    type Lay = fn(&str) -> Placement;
    let ways: [(Placement, Lay); 3] = [(Replicate, cut), (Shard(0), |_| Replicate), (Shard(1), |_| Shard(0))];
    for ranks in [2, 4] {
        spmd(ranks, |world| {
            let mesh = DeviceMesh::new(&world, [ranks], "mesh")?;
            for weight_tying in [true, false] {
                manual_seed(2);
                let whole =
                    Transformer::new(&ModelArgs { weight_tying, vocab_size: 9, ..ModelArgs::default() })?;
                whole.to_dtype(DType::F64)?;
                let data = tokens(5, 7);
                manual_seed(3);
                let expected = whole.forward(&data)?;
                expected.pow(2.0)?.mean_all()?.backward()?;
                for (placement, lay) in ways {
                    let model = deep_copy(&whole)?;
                    model.zero_grad();
                    for (path, parameter) in model.named_parameters() {
                        parameter.replace(&distribute_tensor(
                            &parameter.get().detach(),
                            &mesh,
                            [lay(&path)],
                        )?)?;
                    }
                    // The positions get the layout of the tokens, and dropout drops the same elements in every layout.
                    manual_seed(3);
                    let logits = model.forward(&distribute_tensor(&data, &mesh, [placement])?)?;
                    assert_eq!(logits.dims(), [5, 7, 9]);
                    let near = |a: &Tensor, b: &Tensor, what: &str| {
                        let apart =
                            values(a).iter().zip(values(b)).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
                        assert!(apart < 1e-5, "{what} is {apart} off with tokens {placement}");
                    };
                    near(&logits.full_tensor()?, &expected, "the result");
                    logits.pow(2.0)?.mean_all()?.backward()?;
                    for (path, parameter) in model.named_parameters() {
                        let grad = parameter.grad().unwrap();
                        assert_eq!(grad.placements(), parameter.get().placements());
                        near(&grad.full_tensor()?, &whole.get_parameter(&path)?.grad().unwrap(), &path);
                    }
                }
            }
            Ok(())
        });
    }
}
