//! Tests `reset_parameters`: it gives the same bits as a new model, for every layout.

use dtensor::models::{MLPModule, ModelArgs, Transformer};
use dtensor::nn::{
    Embedding, LayerNorm, Linear, Module, MultiHeadAttention, Parameter, RmsNorm, Sequential, deep_copy,
};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{Device, on_device};

/// The bits of every element of every parameter.
fn bits(module: &dyn Module) -> Vec<(String, Vec<u64>)> {
    let whole = |x: Tensor| if x.is_distributed() { x.full_tensor().unwrap() } else { x };
    let bits = |x: Tensor| x.detach().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
    let bits = |p: Parameter| bits(whole(p.get())).into_iter().map(f64::to_bits).collect();
    module.named_parameters().into_iter().map(|(path, p)| (path, bits(p))).collect()
}

/// Overwrites every parameter.
fn spoil(module: &dyn Module) -> Result<()> {
    module.parameters().iter().try_for_each(|p| p.set(&p.get().detach().full_like(0.25)?))
}

/// A model with every kind of layer, with sizes that few meshes divide.
fn everything() -> Result<Sequential> {
    Ok(Sequential::new()
        .push(Linear::new(5, 7, true)?)
        .push(Sequential::new().push(Embedding::new(7, 5)?).push(Embedding::padded(5, 6, -2)?))
        .push(LayerNorm::new([3, 5])?)
        .push(Linear::new(3, 2, false)?)
        .push(RmsNorm::new(5)?)
        .push(MultiHeadAttention::new(6, 3)?))
}

#[test]
fn a_reset_gives_the_bits_of_a_new_model() -> Result<()> {
    let check = |model: &dyn Module, seed: u64| -> Result<()> {
        let first = bits(model);
        spoil(model)?;
        assert_ne!(bits(model), first);
        manual_seed(seed);
        model.reset_parameters()?;
        assert_eq!(bits(model), first);
        Ok(())
    };
    manual_seed(1);
    check(&everything()?, 1)?;
    check(&MLPModule::new(true)?, 5)?;
    for weight_tying in [true, false] {
        manual_seed(2);
        check(&Transformer::new(&ModelArgs { weight_tying, ..ModelArgs::default() })?, 2)?;
    }
    // A second reset draws other values.
    let layer = Linear::new(4, 4, false)?;
    let first = bits(&layer);
    layer.reset_parameters()?;
    assert_ne!(bits(&layer), first);
    Ok(())
}

#[test]
fn a_reset_changes_only_the_value() -> Result<()> {
    manual_seed(3);
    let layer = Linear::new(3, 2, true)?;
    let weight = layer.weight.clone();
    layer.forward(&Tensor::ones([1, 3], DType::F32)?)?.sum_all()?.backward()?;
    layer.bias.as_ref().unwrap().set_requires_grad(false)?;
    let copy = deep_copy(&layer)?;
    layer.reset_parameters()?;
    assert!(weight.is(&layer.weight));
    assert!(layer.weight.get().is_leaf() && layer.weight.requires_grad());
    assert_eq!(weight.grad().unwrap().to_vec::<f32>()?, [1.; 6]);
    assert!(!layer.bias.as_ref().unwrap().requires_grad());
    // A deep copy can be reset, too, without changing the original.
    let before = bits(&layer);
    copy.reset_parameters()?;
    assert_eq!(bits(&layer), before);
    assert_ne!(bits(&copy), before);
    // Half-precision parameters are drawn in half precision.
    layer.to_dtype(DType::BF16)?;
    spoil(&layer)?;
    manual_seed(8);
    layer.reset_parameters()?;
    assert_eq!(layer.weight.get().dtype(), DType::BF16);
    let bound = 1.0 / 3f64.sqrt();
    manual_seed(8);
    let expected = Tensor::uniform(-bound, bound, [2, 3], DType::BF16)?;
    assert_eq!(bits(&layer)[0].1, bits(&Parameter::new(&expected)?)[0].1);
    Ok(())
}

#[derive(Module)]
struct Mixed {
    first: Linear,
    scale: Parameter,
    table: Vec<Parameter>,
}

#[test]
fn a_parameter_without_an_initialiser_is_an_error_and_nothing_changes() -> Result<()> {
    let fixed = || Parameter::new(&Tensor::ones([2], DType::F32)?);
    let model = Mixed { first: Linear::new(2, 2, true)?, scale: fixed()?, table: vec![fixed()?] };
    let before = bits(&model);
    let error = model.reset_parameters().unwrap_err().to_string();
    assert!(error.contains("`scale`, `table.0`") && error.contains("Parameter::with_init"), "{error}");
    assert_eq!(bits(&model), before);
    // An initialiser that fails, or returns another shape or dtype, changes nothing either.
    let rules: [fn(&Tensor) -> Result<Tensor>; 3] = [
        |like| if like.sum_all()?.item::<f32>()? == 0.0 { like.ones_like() } else { like.narrow(0, 0, 9) },
        |like| if like.sum_all()?.item::<f32>()? == 0.0 { like.ones_like() } else { like.narrow(0, 0, 1) },
        |like| {
            if like.sum_all()?.item::<f32>()? == 0.0 { like.ones_like() } else { like.to_dtype(DType::F64) }
        },
    ];
    for rule in rules {
        let scale = Parameter::with_init([2], rule)?;
        let model = Mixed { first: Linear::new(2, 2, true)?, scale, table: vec![] };
        let before = bits(&model);
        assert!(model.reset_parameters().is_err());
        assert_eq!(bits(&model), before);
    }
    assert!(Parameter::with_init([2], |like| like.narrow(0, 0, 1)).is_err());
    // The operators inside an initialiser are not recorded.
    let source = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
    let kept = source.clone();
    let drawn = Parameter::with_init([2], move |_| kept.mul(2.0))?;
    drawn.get().sum_all()?.backward()?;
    assert!(source.grad().is_none() && drawn.grad().is_some());
    Ok(())
}

#[test]
fn a_tied_parameter_is_reset_once_by_its_own_initialiser() -> Result<()> {
    #[derive(Module)]
    struct Tied {
        table: Embedding,
        output: Linear,
        last: Linear,
    }
    let table = Embedding::new(50, 4)?;
    let bias = Linear::new(4, 50, true)?.bias;
    let output = Linear::from_parameters(table.weight.clone(), bias)?;
    let model = Tied { table, output, last: Linear::new(2, 2, false)? };
    manual_seed(4);
    model.reset_parameters()?;
    manual_seed(4);
    let table = Embedding::new(50, 4)?;
    let bias = Tensor::rand([50], DType::F32)?.sub(0.5)?;
    let last = Linear::new(2, 2, false)?;
    assert_eq!(bits(&model)[0].1, bits(&table)[0].1);
    assert_eq!(bits(&model)[1].1, bits(&Parameter::new(&bias)?)[0].1);
    assert_eq!(bits(&model)[2].1, bits(&last)[0].1);
    Ok(())
}

/// Placements for a parameter of `rank` dims on a mesh of one or two dims.
fn layouts(mesh: &DeviceMesh, rank: usize) -> Vec<Vec<Placement>> {
    let sum = Partial(dtensor::comm::ReduceOp::Sum);
    let mut each = vec![Replicate, sum];
    each.extend((0..rank as isize).map(Shard));
    match mesh.ndim() {
        1 => each.into_iter().map(|p| vec![p]).collect(),
        _ => each.iter().flat_map(|&a| each.iter().map(move |&b| vec![a, b])).collect(),
    }
}

#[test]
fn every_rank_draws_its_shard_of_the_single_device_values() {
    for ranks in [2, 3, 4] {
        spmd(ranks, |world| {
            let mut meshes = vec![DeviceMesh::new(&world, [ranks], "tp")?];
            if ranks == 4 {
                meshes.push(DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?);
            }
            for mesh in &meshes {
                for dtype in [DType::F32, DType::BF16] {
                    let whole = everything()?;
                    whole.to_dtype(dtype)?;
                    manual_seed(11);
                    whole.reset_parameters()?;
                    let expected = bits(&whole);
                    // The next draw shows that a reset advances the generator equally on one device and on a mesh.
                    let next = Tensor::rand([1], DType::F32)?.item::<f32>()?;
                    for turn in 0..layouts(mesh, 2).len() {
                        let model = deep_copy(&whole)?;
                        for parameter in model.parameters() {
                            let lists = layouts(mesh, parameter.get().ndim());
                            let placements = lists[turn % lists.len()].clone();
                            let laid = distribute_tensor(&parameter.get().detach(), mesh, placements)?;
                            parameter.replace(&laid)?;
                        }
                        spoil(&model)?;
                        let before: Vec<_> =
                            model.parameters().iter().map(|p| p.get().layout().cloned()).collect();
                        manual_seed(11);
                        model.reset_parameters()?;
                        assert_eq!(Tensor::rand([1], DType::F32)?.item::<f32>()?, next);
                        assert_eq!(bits(&model), expected, "turn {turn} on {mesh}");
                        let after: Vec<_> =
                            model.parameters().iter().map(|p| p.get().layout().cloned()).collect();
                        assert_eq!(before, after);
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_meta_model_can_be_sharded_and_then_initialised() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        for weight_tying in [true, false] {
            let args = ModelArgs { weight_tying, vocab_size: 10, ..ModelArgs::default() };
            manual_seed(12);
            let whole = Transformer::new(&args)?;
            manual_seed(99);
            let model = on_device(Device::Meta, || Transformer::new(&args))?;
            assert!(model.parameters().iter().all(|p| p.get().is_meta()));
            let (result, calls) = dtensor::comm::record(|| {
                for (path, parameter) in model.named_parameters() {
                    let along =
                        if path.ends_with("bias") || path.contains("norm") { Replicate } else { Shard(0) };
                    parameter.replace(&distribute_tensor(&parameter.get().detach(), &mesh, [along])?)?;
                }
                // A reset of meta parameters draws nothing but advances the generator.
                manual_seed(12);
                model.reset_parameters()?;
                assert!(model.parameters().iter().all(|p| p.get().is_meta() && p.get().is_distributed()));
                let next = Tensor::rand([1], DType::F32)?.item::<f32>()?;
                model.to_empty(Device::Cpu)?;
                manual_seed(12);
                model.reset_parameters()?;
                assert_eq!(Tensor::rand([1], DType::F32)?.item::<f32>()?, next);
                Result::Ok(())
            });
            result?;
            // Sharding and initialising a meta model needs no communication.
            assert!(calls.is_empty(), "{calls:?}");
            assert_eq!(bits(&model), bits(&whole));
            assert!(model.parameters().iter().all(|p| p.get().is_distributed() && p.requires_grad()));
            assert_eq!(model.output.weight.is(&model.tok_embeddings.weight), weight_tying);
        }
        Ok(())
    });
}
