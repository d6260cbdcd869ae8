//! Tests parameter groups and options, including invalid ones.

use dtensor::nn::{Linear, Module, Parameter};
use dtensor::optim::{Adam, AdamOptions, AdamW, AdamWOptions, Optimizer, Sgd, SgdOptions};
use dtensor::{DType, Device, Result, Tensor, on_device};

use super::{ALL, bits, random, set_grad};
use crate::common::modules::raises;

fn parameter(values: &[f32]) -> Parameter {
    Parameter::new(&Tensor::from_slice(values, [values.len()]).unwrap()).unwrap()
}

fn values(parameter: &Parameter) -> Vec<f32> {
    parameter.get().to_vec().unwrap()
}

#[test]
fn invalid_options_are_an_error() {
    const OFF: [f64; 3] = [-1.0, f64::NAN, f64::INFINITY];
    for x in OFF {
        raises(Sgd::new([], x), &format!("sgd: invalid learning rate: {x}"));
        raises(Adam::new([], x), &format!("adam: invalid learning rate: {x}"));
        raises(AdamW::new([], x), &format!("adamw: invalid learning rate: {x}"));
        let sgd = SgdOptions::default();
        raises(Sgd::new([], SgdOptions { momentum: x, ..sgd }), &format!("invalid momentum value: {x}"));
        raises(
            Sgd::new([], SgdOptions { weight_decay: x, ..sgd }),
            &format!("invalid weight_decay value: {x}"),
        );
        let adam = AdamOptions::default();
        raises(Adam::new([], AdamOptions { eps: x, ..adam }), &format!("invalid epsilon value: {x}"));
        raises(
            Adam::new([], AdamOptions { weight_decay: x, ..adam }),
            &format!("invalid weight_decay value: {x}"),
        );
        let adamw = AdamWOptions::default();
        raises(
            AdamW::new([], AdamWOptions { weight_decay: x, ..adamw }),
            "adamw: invalid weight_decay value",
        );
    }
    for x in [-0.1, 1.0, f64::NAN] {
        let adam = AdamOptions::default();
        raises(
            Adam::new([], AdamOptions { betas: (x, 0.5), ..adam }),
            &format!("invalid beta parameter at index 0: {x}"),
        );
        raises(
            Adam::new([], AdamOptions { betas: (0.5, x), ..adam }),
            &format!("invalid beta parameter at index 1: {x}"),
        );
    }
    let sgd = SgdOptions { nesterov: true, ..Default::default() };
    let words = "nesterov momentum requires a momentum and zero dampening";
    raises(Sgd::new([], sgd), words);
    raises(Sgd::new([], SgdOptions { momentum: 0.9, dampening: 0.1, ..sgd }), words);
    raises(Sgd::new([], SgdOptions { dampening: f64::NAN, ..Default::default() }), "invalid dampening value");
    let optimizer = Sgd::new([], SgdOptions { momentum: 0.9, ..sgd }).unwrap();
    for factor in OFF {
        raises(optimizer.set_factor(factor), &format!("factor of the learning rate: {factor}"));
    }
    raises(optimizer.add_group([], -1.0), "invalid learning rate");
    raises(optimizer.set_options(0, -1.0), "invalid learning rate");
    raises(optimizer.set_options(1, 0.1), "there is no group 1: there are 1");
    raises(optimizer.options(3), "there is no group 3");
    assert_eq!((optimizer.factor(), optimizer.learning_rates()), (1.0, vec![1e-3]));
}

#[test]
fn a_parameter_belongs_to_one_group() -> Result<()> {
    let (a, b, c) = (parameter(&[1.]), parameter(&[2.]), parameter(&[3.]));
    // A parameter listed twice counts once.
    let optimizer = Sgd::new([a.clone(), b.clone(), a.clone()], 0.5)?;
    let words = "some parameters appear in more than one parameter group";
    raises(optimizer.add_group([c.clone(), a.clone()], 0.1), words);
    // The failed call added nothing.
    assert_eq!(optimizer.parameters().len(), 2);
    assert_eq!(optimizer.learning_rates(), [0.5]);
    optimizer.add_group([c.clone()], 0.25)?;
    for p in [&a, &b, &c] {
        set_grad(p, &Tensor::ones([1], DType::F32)?)?;
    }
    optimizer.step()?;
    assert_eq!([&a, &b, &c].map(values), [[0.5], [1.5], [2.75]]);
    optimizer.set_factor(0.5)?;
    optimizer.set_options(1, SgdOptions { lr: 1.0, maximize: true, ..optimizer.options(1)? })?;
    optimizer.step()?;
    assert_eq!([&a, &b, &c].map(values), [[0.25], [1.25], [3.25]]);
    optimizer.zero_grad();
    assert!([&a, &b, &c].iter().all(|p| p.grad().is_none()));
    let shown = format!("{optimizer:?}");
    assert!(
        shown.contains("2 parameters with SgdOptions { lr: 0.5") && shown.contains("maximize: true"),
        "{shown}"
    );
    Ok(())
}

#[test]
fn tied_weights_make_one_step() -> Result<()> {
    let layer = Linear::new(2, 2, false)?;
    let tied = Linear::from_parameters(layer.weight.clone(), None)?;
    let all = layer.parameters().into_iter().chain(tied.parameters());
    let optimizer = Adam::new(all, 0.5)?;
    assert_eq!(optimizer.parameters().len(), 1);
    let before = layer.weight.get().to_vec::<f32>()?;
    set_grad(&layer.weight, &Tensor::ones([2, 2], DType::F32)?)?;
    optimizer.step()?;
    for (now, before) in tied.weight.get().to_vec::<f32>()?.iter().zip(before) {
        assert!((now - (before - 0.5)).abs() < 1e-6);
    }
    Ok(())
}

#[test]
fn a_step_skips_parameters_that_are_frozen_or_have_no_gradient() -> Result<()> {
    for (name, make) in ALL {
        let (moved, still) = (parameter(&[1., 2.]), parameter(&[3.]));
        let frozen = Parameter::frozen(&Tensor::from_slice(&[4f32], [1])?);
        let whole = Parameter::frozen(&Tensor::from_slice(&[5i64], [1])?);
        let optimizer = make(vec![moved.clone(), still.clone(), frozen.clone(), whole])?;
        for step in 0..3 {
            set_grad(&moved, &random(&[2], DType::F32, &[step]))?;
            optimizer.step()?;
        }
        assert_ne!(values(&moved), [1., 2.], "{name}");
        assert_eq!((values(&still), values(&frozen)), (vec![3.], vec![4.]), "{name}");
        let state = optimizer.state_dict();
        assert!(
            !state.keys().any(|key| key.starts_with("state.1.") || key.starts_with("state.2.")),
            "{name}"
        );
        // A parameter frozen later no longer changes.
        moved.set_requires_grad(false)?;
        let before = bits(&moved.get());
        optimizer.step()?;
        assert_eq!(bits(&moved.get()), before, "{name}");
    }
    Ok(())
}

#[test]
fn the_momentum_buffer_is_created_when_first_needed() -> Result<()> {
    let weight = parameter(&[0.]);
    let one = Tensor::ones([1], DType::F32)?;
    let optimizer = Sgd::new([weight.clone()], 1.0)?;
    set_grad(&weight, &one)?;
    optimizer.step()?;
    assert!(!optimizer.state_dict().contains_key("state.0.momentum_buffer"));
    // As in PyTorch, the first gradient enters the buffer undampened and later ones are dampened.
    let options = SgdOptions { lr: 1.0, momentum: 0.5, dampening: 0.5, ..Default::default() };
    optimizer.set_options(0, options)?;
    optimizer.step()?;
    assert_eq!(values(&weight), [-2.]);
    optimizer.step()?;
    assert_eq!(values(&weight), [-3.]);
    // Steps without momentum keep the buffer.
    optimizer.set_options(0, 1.0)?;
    optimizer.step()?;
    assert_eq!(values(&weight), [-4.]);
    assert_eq!(optimizer.state_dict()["state.0.momentum_buffer"].to_vec::<f32>()?, [1.]);
    Ok(())
}

#[test]
fn steps_work_on_meta_tensors() -> Result<()> {
    for (name, make) in ALL {
        let layer = on_device(Device::Meta, || Linear::new(3, 2, true))?;
        let optimizer = make(layer.parameters())?;
        for parameter in layer.parameters() {
            set_grad(&parameter, &parameter.get().detach().zeros_like()?)?;
        }
        optimizer.step()?;
        for (key, value) in optimizer.state_dict() {
            let of_parameter = key.starts_with("state.") && !key.ends_with("step");
            assert_eq!(value.is_meta(), of_parameter, "{name}: {key}");
        }
        assert!(layer.weight.get().is_meta());
    }
    Ok(())
}

#[test]
fn a_replaced_parameter_is_an_error_until_the_state_is_reloaded() -> Result<()> {
    for (name, make) in &ALL[1..] {
        let (first, second) = (parameter(&[1.]), parameter(&[1., 2.]));
        let optimizer = make(vec![first.clone(), second.clone()])?;
        let ones = |p: &Parameter| set_grad(p, &p.get().detach().ones_like()?);
        [&first, &second].into_iter().try_for_each(ones)?;
        optimizer.step()?;
        let before = values(&first);
        second.replace(&Tensor::zeros([2], DType::F64)?)?;
        [&first, &second].into_iter().try_for_each(ones)?;
        raises(
            optimizer.step(),
            "parameter 1 is f64 [2] on no mesh now, but its state is f32 [2] on no mesh",
        );
        // The failed step changed nothing, not even the first parameter.
        assert_eq!(values(&first), before, "{name}");
        optimizer.load_state_dict(&optimizer.state_dict())?;
        optimizer.step()?;
        assert_ne!(values(&first), before);
        assert_ne!(second.get().to_vec::<f64>()?, [0., 0.]);
        second.replace(&Tensor::zeros([3], DType::F64)?)?;
        ones(&second)?;
        raises(optimizer.step(), "parameter 1 is f64 [3]");
        raises(optimizer.load_state_dict(&optimizer.state_dict()), "size mismatch for `state.1.");
    }
    Ok(())
}
