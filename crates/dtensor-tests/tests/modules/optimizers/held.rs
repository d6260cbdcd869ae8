//! Tests that optimizers and clipping never change a tensor that the caller still holds.

use dtensor::nn::{Linear, Module, Parameter};
use dtensor::optim::{ClipOptions, clip_grad_norm, clip_grad_value};
use dtensor::prelude::*;
use dtensor::{BackwardOptions, grad};

use super::{ALL, bits, random, set_grad};

#[test]
fn a_step_does_not_change_tensors_held_by_the_caller() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for (name, make) in ALL {
            let given = random(&[4, 3], dtype, &[1]);
            let weight = Parameter::new(&given)?;
            let optimizer = make(vec![weight.clone()])?;
            let mut held: Vec<(Tensor, Vec<u64>)> = Vec::new();
            let hold = |x: Tensor, held: &mut Vec<(Tensor, Vec<u64>)>| {
                let now = bits(&x);
                held.push((x, now));
            };
            hold(given, &mut held);
            for step in 0..4 {
                let gradient = random(&[4, 3], dtype, &[2, step]);
                set_grad(&weight, &gradient)?;
                hold(gradient, &mut held);
                hold(weight.get(), &mut held);
                hold(weight.get().detach().t()?, &mut held);
                optimizer.step()?;
                hold(weight.get().detach().narrow(0, 1, 2)?, &mut held);
                optimizer
                    .state_dict()
                    .into_values()
                    .filter(|x| x.ndim() == 2)
                    .for_each(|x| hold(x, &mut held));
                // The caller does not hold the results of this step, so the next one may overwrite them.
                set_grad(&weight, &random(&[4, 3], dtype, &[3, step]))?;
                optimizer.step()?;
            }
            for (i, (x, then)) in held.iter().enumerate() {
                assert_eq!(&bits(x), then, "{name} of {dtype}: {i}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_step_does_not_change_values_saved_in_a_graph() -> Result<()> {
    for (name, make) in ALL {
        let layer = Linear::new(3, 2, true)?;
        let x = random(&[4, 3], DType::F32, &[5]).requires_grad_(true)?;
        let optimizer = make(layer.parameters())?;
        let loss = layer.forward(&x)?.pow(2)?.sum_all()?;
        let options = || BackwardOptions { retain_graph: true, ..Default::default() };
        let before = grad(&loss, &[&x], options())?.remove(0).unwrap();
        loss.backward_with(options())?;
        optimizer.step()?;
        let after = grad(&loss, &[&x], options())?.remove(0).unwrap();
        assert_eq!(bits(&before), bits(&after), "{name}");
    }
    Ok(())
}

#[test]
fn a_gradient_that_shares_the_parameters_memory_is_read_before_the_update() -> Result<()> {
    for (name, make) in ALL {
        let (a, b) = (random(&[5], DType::F32, &[1]), random(&[5], DType::F32, &[1]));
        let (same, apart) = (Parameter::new(&a)?, Parameter::new(&a)?);
        set_grad(&same, &same.get().detach())?;
        set_grad(&apart, &b)?;
        make(vec![same.clone()])?.step()?;
        make(vec![apart.clone()])?.step()?;
        assert_eq!(bits(&same.get()), bits(&apart.get()), "{name}");
    }
    Ok(())
}

#[test]
fn clipping_does_not_change_gradients_held_by_the_caller() -> Result<()> {
    let whole = random(&[4, 3], DType::F32, &[7]);
    let weights: Vec<Parameter> =
        (0..3).map(|_| Parameter::new(&Tensor::zeros([4, 3], DType::F32)?)).collect::<Result<_>>()?;
    // The first two parameters share one gradient, and the third gradient is expanded from one element.
    set_grad(&weights[0], &whole)?;
    set_grad(&weights[1], &whole)?;
    set_grad(&weights[2], &Tensor::from_slice(&[3f32], [1, 1])?.expand([4, 3])?)?;
    let held: Vec<(Tensor, Vec<u64>)> =
        weights.iter().map(|w| w.grad().unwrap()).map(|g| (g.clone(), bits(&g))).collect();
    clip_grad_norm(&weights, 0.5, ClipOptions::default())?;
    clip_grad_value(&weights, 0.0625)?;
    for (x, then) in &held {
        assert_eq!(&bits(x), then);
    }
    assert_eq!(bits(&weights[0].grad().unwrap()), bits(&weights[1].grad().unwrap()));
    assert!(
        weights.iter().all(|w| w.grad().unwrap().to_f64_vec().unwrap().iter().all(|g| g.abs() <= 0.0625))
    );
    Ok(())
}

#[test]
fn clipping_a_recorded_gradient_detaches_it() -> Result<()> {
    let weight = Parameter::new(&Tensor::full([2], 3.0, DType::F64)?)?;
    let options = BackwardOptions { create_graph: true, ..Default::default() };
    weight.get().pow(2)?.sum_all()?.backward_with(options)?;
    assert!(weight.grad().unwrap().requires_grad());
    clip_grad_value(std::slice::from_ref(&weight), 1.0)?;
    let clipped = weight.grad().unwrap();
    assert_eq!((clipped.to_vec::<f64>()?, clipped.requires_grad()), (vec![1.0, 1.0], false));
    Ok(())
}
