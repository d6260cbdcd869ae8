//! Initialisers: the bits of one device in every layout, and PyTorch's fans, gains and errors.

use dtensor::comm::{World, record};
use dtensor::nn::init::{self, Fan, Init, Nonlinearity, calculate_fans, calculate_gain};
use dtensor::nn::{Embedding, Linear, Module, Parameter};
use dtensor::testing::spmd;
use dtensor::{
    DType, Device, DeviceMesh, Error, Placement, Result, Shard, Tensor, manual_seed, on_device, rng_state,
    sharded,
};

use super::bits::{FLOATS, Field, bits};
use super::statistics::{expect_even, expect_moments, normal_cdf};
use crate::common::layouts::P;

/// All initialisers.
fn rules() -> Vec<(&'static str, Init)> {
    vec![
        ("zeros", init::zeros()),
        ("ones", init::ones()),
        ("constant", init::constant(0.3)),
        ("eye", init::eye()),
        ("uniform", init::uniform(-0.1, 0.2)),
        ("normal", init::normal(1.0, 0.5)),
        ("trunc_normal", init::trunc_normal(0.0, 0.02, -0.04, 0.04)),
        ("xavier_uniform", init::xavier_uniform(1.0)),
        ("xavier_normal", init::xavier_normal(calculate_gain(Nonlinearity::Tanh))),
        ("kaiming_uniform", init::kaiming_uniform(Fan::In, Nonlinearity::LeakyRelu(0.2))),
        ("kaiming_normal", init::kaiming_normal(Fan::Out, Nonlinearity::Relu)),
    ]
}

fn everywhere(world: &World) -> Result<()> {
    for field in Field::all(world)? {
        for (name, rule) in rules() {
            for shape in [&[5, 3][..], &[2, 2], &[0, 3], &[2, 3, 5], &[7], &[]] {
                // Fans need at least two dims, and `eye` exactly two.
                let refused = match name {
                    "eye" => shape.len() != 2,
                    "xavier_uniform" | "xavier_normal" | "kaiming_uniform" | "kaiming_normal" => {
                        shape.len() < 2
                    }
                    _ => false,
                };
                if refused {
                    let error = rule.tensor(shape, DType::F32).expect_err(name).to_string();
                    assert!(error.contains(name), "{error}");
                    continue;
                }
                for dtype in FLOATS {
                    manual_seed(6);
                    let whole = rule.tensor(shape, dtype)?;
                    let next = rng_state();
                    for list in field.lists(shape.len()) {
                        one_layout(&field, (name, rule), &whole, &list, next)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn one_layout(
    field: &Field,
    (name, rule): (&str, Init),
    whole: &Tensor,
    list: &[Placement],
    next: dtensor::GeneratorState,
) -> Result<()> {
    let (shape, dtype) = (whole.shape(), whole.dtype());
    let there = sharded::full(&shape, 9, dtype, &field.mesh, list)?;
    let without = on_device(Device::Meta, || sharded::zeros(&shape, dtype, &field.mesh, list))?;
    assert!(without.is_meta());
    for before in [there, without] {
        let parameter = Parameter::new(&before)?;
        manual_seed(6);
        let (done, calls) = record(|| rule.apply(&parameter));
        done?;
        assert!(calls.is_empty(), "{name}: {calls:?}");
        assert_eq!(rng_state(), next, "{name}");
        let after = parameter.get();
        assert!(!after.is_meta() && after.requires_grad() && after.is_leaf(), "{name}");
        field.expect(&after.detach(), list, whole, name)?;
    }
    Ok(())
}

#[test]
fn every_initialiser_has_the_bits_of_one_device() {
    spmd(1, |world| everywhere(&world));
    spmd(2, |world| everywhere(&world));
    spmd(3, |world| everywhere(&world));
    spmd(4, |world| everywhere(&world));
}

#[test]
fn an_initialiser_changes_only_the_value() -> Result<()> {
    let layer = Linear::new(3, 2, true)?;
    let tied = layer.weight.clone();
    layer.forward(&Tensor::ones([1, 3], DType::F32)?)?.sum_all()?.backward()?;
    let bias = layer.bias.as_ref().unwrap();
    bias.set_requires_grad(false)?;
    let seen = layer.weight.get();
    init::constant(0.5).apply(&layer.weight)?;
    init::ones().apply(bias)?;
    assert!(tied.is(&layer.weight));
    assert_eq!(tied.get().to_vec::<f32>()?, [0.5; 6]);
    // As in PyTorch, the gradient stays.
    assert_eq!(layer.weight.grad().unwrap().to_vec::<f32>()?, [1.; 6]);
    assert!(layer.weight.requires_grad() && !bias.requires_grad());
    // A tensor taken from the parameter before keeps its values.
    assert_ne!(seen.to_vec::<f32>()?, [0.5; 6]);
    // New gradients add to the parameter's gradient.
    layer.forward(&Tensor::ones([1, 3], DType::F32)?)?.sum_all()?.backward()?;
    assert_eq!(layer.weight.grad().unwrap().to_vec::<f32>()?, [2.; 6]);
    // `reset_parameters` draws by the rule that the parameter was made with.
    let rule = init::normal(0.0, 0.02);
    let weight = Parameter::with_init([4, 4], move |like| rule.like(like))?;
    manual_seed(5);
    weight.reset_parameters()?;
    manual_seed(5);
    assert_eq!(bits(&weight.get().detach())?, bits(&Tensor::normal(0.0, 0.02, [4, 4], DType::F32)?)?);
    Ok(())
}

#[test]
fn a_meta_parameter_gets_a_value_except_in_a_meta_scope() -> Result<()> {
    let layer = on_device(Device::Meta, || {
        let layer = Linear::new(3, 2, true)?;
        manual_seed(1);
        init::xavier_normal(1.0).apply(&layer.weight)?;
        // The weight stays a meta tensor but uses up a draw, as in a model made with values.
        assert!(layer.weight.get().is_meta());
        assert_eq!(rng_state().draws, 1);
        Result::Ok(layer)
    })?;
    layer.weight.set_requires_grad(false)?;
    let tied = layer.weight.clone();
    manual_seed(1);
    init::xavier_normal(1.0).apply(&layer.weight)?;
    init::zeros().apply(layer.bias.as_ref().unwrap())?;
    manual_seed(1);
    let expected = init::xavier_normal(1.0).tensor([2, 3], DType::F32)?;
    assert_eq!(bits(&tied.get())?, bits(&expected)?);
    assert!(!tied.requires_grad() && layer.bias.as_ref().unwrap().requires_grad());
    assert_eq!(layer.forward(&Tensor::zeros([1, 3], DType::F32)?)?.to_vec::<f32>()?, [0., 0.]);
    // A parameter with a value still has one after a meta scope.
    on_device(Device::Meta, || init::ones().apply(&layer.weight))?;
    assert_eq!(layer.weight.get().to_vec::<f32>()?, [1.; 6]);
    // A tensor like a meta tensor, or made in a meta scope, is a meta tensor.
    assert!(init::normal(0.0, 1.0).like(&Tensor::meta_of([2], DType::F32)?)?.is_meta());
    assert!(init::zeros().like(&Tensor::meta_of([2], DType::F32)?)?.is_meta());
    assert!(on_device(Device::Meta, || init::normal(0.0, 1.0).tensor([2], DType::F32))?.is_meta());
    Ok(())
}

#[test]
fn variances_follow_from_the_fans() -> Result<()> {
    let shape = [300, 200];
    let uniform = |rule: Init, bound: f64, what: &str| -> Result<()> {
        let x = rule.tensor(shape, DType::F64)?.to_f64_vec()?;
        let unit: Vec<f64> = x.iter().map(|x| (x + bound) / (2.0 * bound)).collect();
        expect_even(&unit, 64, what);
        expect_moments(&x, 0.0, bound.powi(2) / 3.0, bound.powi(4) / 5.0, what);
        Ok(())
    };
    let normal = |rule: Init, std: f64, what: &str| -> Result<()> {
        let x = rule.tensor(shape, DType::F64)?.to_f64_vec()?;
        expect_even(&x.iter().map(|x| normal_cdf(x / std)).collect::<Vec<_>>(), 64, what);
        expect_moments(&x, 0.0, std.powi(2), 3.0 * std.powi(4), what);
        Ok(())
    };
    manual_seed(12);
    uniform(init::xavier_uniform(2.0), 2.0 * (6.0f64 / 500.0).sqrt(), "xavier_uniform")?;
    normal(init::xavier_normal(0.5), 0.5 * (2.0f64 / 500.0).sqrt(), "xavier_normal")?;
    let slope = Nonlinearity::LeakyRelu(5f64.sqrt());
    // With this slope, a linear layer's bound in PyTorch is 1 / √inputs.
    uniform(init::kaiming_uniform(Fan::In, slope), 1.0 / 200f64.sqrt(), "kaiming_uniform in")?;
    uniform(
        init::kaiming_uniform(Fan::Out, Nonlinearity::Linear),
        (3.0f64 / 300.0).sqrt(),
        "kaiming_uniform out",
    )?;
    normal(init::kaiming_normal(Fan::In, Nonlinearity::Relu), (2.0f64 / 200.0).sqrt(), "kaiming_normal in")?;
    normal(init::kaiming_normal(Fan::Out, Nonlinearity::Selu), 0.75 / 300f64.sqrt(), "kaiming_normal out")?;
    Ok(())
}

#[test]
fn gains_and_fans_match_pytorch() -> Result<()> {
    for (nonlinearity, gain) in [
        (Nonlinearity::Linear, 1.0),
        (Nonlinearity::Sigmoid, 1.0),
        (Nonlinearity::Tanh, 5.0 / 3.0),
        (Nonlinearity::Relu, std::f64::consts::SQRT_2),
        (Nonlinearity::LeakyRelu(0.01), 1.414_142_851_106_146_2),
        (Nonlinearity::LeakyRelu(0.2), 1.386_750_490_563_072_7),
        (Nonlinearity::Selu, 0.75),
    ] {
        assert!((calculate_gain(nonlinearity) - gain).abs() < 1e-8, "{nonlinearity:?}");
    }
    assert_eq!(calculate_fans([4, 3])?, (3, 4));
    assert_eq!(calculate_fans([4, 3, 5, 7])?, (105, 140));
    assert_eq!(calculate_fans([0, 3])?, (3, 0));
    Ok(())
}

#[test]
fn invalid_initialisers_are_an_error_and_change_nothing() -> Result<()> {
    let vector = Parameter::new(&Tensor::ones([3], DType::F32)?)?;
    let matrix = Parameter::new(&Tensor::ones([3, 3], DType::F32)?)?;
    let cube = Parameter::new(&Tensor::ones([3, 3, 3], DType::F32)?)?;
    let whole = Parameter::frozen(&Tensor::ones([3, 3], DType::I64)?);
    let before = rng_state();
    let fans = "fewer than 2 dimensions";
    for (rule, parameter, words) in [
        (init::xavier_uniform(1.0), &vector, &["xavier_uniform", fans, "[3]"][..]),
        (init::xavier_normal(1.0), &vector, &["xavier_normal", fans]),
        (init::kaiming_uniform(Fan::In, Nonlinearity::Relu), &vector, &["kaiming_uniform", fans]),
        (init::kaiming_normal(Fan::Out, Nonlinearity::Relu), &vector, &["kaiming_normal", fans]),
        (init::eye(), &vector, &["eye", "only tensors with 2 dimensions"]),
        (init::eye(), &cube, &["eye", "[3, 3, 3]"]),
        (init::xavier_uniform(-1.0), &matrix, &["xavier_uniform", "gain"]),
        (
            init::kaiming_normal(Fan::In, Nonlinearity::LeakyRelu(f64::NAN)),
            &matrix,
            &["kaiming_normal", "gain"],
        ),
        (init::normal(0.0, -1.0), &matrix, &["normal", "std >= 0"]),
        (init::trunc_normal(0.0, 1.0, 2.0, 1.0), &matrix, &["trunc_normal", "a <= b"]),
        (init::trunc_normal(0.0, -1.0, 1.0, 2.0), &matrix, &["trunc_normal", "std >= 0"]),
        (init::uniform(1.0, 0.0), &matrix, &["uniform", "low <= high"]),
        (init::normal(0.0, 1.0), &whole, &["normal", "i64", "floating-point"]),
        (init::xavier_uniform(1.0), &whole, &["xavier_uniform", "i64", "floating-point"]),
        (init::kaiming_normal(Fan::In, Nonlinearity::Relu), &whole, &["kaiming_normal", "floating-point"]),
        (init::constant(0.5), &whole, &["0.5", "not an integer"]),
    ] {
        let error = rule.apply(parameter).expect_err("it cannot be").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert!(!error.contains("_like"), "{error}");
    }
    assert!(matches!(calculate_fans([]), Err(Error::Argument { .. })));
    assert_eq!(rng_state(), before);
    for parameter in [&vector, &matrix, &cube] {
        assert!(parameter.get().to_vec::<f32>()?.iter().all(|&x| x == 1.0));
    }
    Ok(())
}

/// Each rank makes only its shard: the full matrix would take 4 TiB.
#[test]
fn eye_makes_only_the_shard_of_each_rank() -> Result<()> {
    let (n, at) = (1usize << 20, 1usize << 12);
    let mesh = DeviceMesh::new(&World::simulated(1 << 18, at)?, [1 << 18], "tp")?;
    let parameter =
        Parameter::new(&on_device(Device::Meta, || sharded::zeros([n, n], DType::F32, &mesh, [Shard(0)]))?)?;
    init::eye().apply(&parameter)?;
    let part = parameter.get().detach().to_local()?;
    assert_eq!(part.dims(), [4, n]);
    let part = part.to_vec::<f32>()?;
    for row in 0..4 {
        let one = row * n + 4 * at + row;
        assert_eq!(part[one], 1.0);
    }
    assert_eq!(part.iter().filter(|&&x| x != 0.0).count(), 4);
    Ok(())
}

/// A model is made without values and distributed on a mesh; then every parameter gets its values.
#[test]
fn a_meta_model_is_initialised_on_a_mesh() {
    #[derive(Module)]
    struct Model {
        table: Embedding,
        output: Linear,
    }
    fn made() -> Result<Model> {
        let table = Embedding::new(10, 6)?;
        let output = Linear::from_parameters(table.weight.clone(), None)?;
        Ok(Model { table, output })
    }
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let rule = init::trunc_normal(0.0, 0.02, -0.06, 0.06);
        manual_seed(3);
        let whole = rule.tensor([10, 6], DType::F32)?;
        for list in [[Shard(0), Shard(1)], [P, Shard(0)], [Shard(0), Shard(0)]] {
            let model = on_device(Device::Meta, made)?;
            let weight = &model.table.weight;
            weight.replace(&dtensor::distribute_tensor(&weight.get().detach(), &mesh, list)?)?;
            manual_seed(3);
            for parameter in model.parameters() {
                rule.apply(&parameter)?;
            }
            // The two names share one parameter, so it is drawn once.
            assert_eq!(rng_state().draws, 1);
            assert!(model.output.weight.is(weight));
            assert_eq!(weight.get().placements(), list);
            assert_eq!(bits(&model.output.weight.get().full_tensor()?.detach())?, bits(&whole)?);
        }
        Ok(())
    });
}
