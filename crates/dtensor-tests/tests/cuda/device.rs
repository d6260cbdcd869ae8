//! Where tensors are, and how they move.

use super::GPU;
use crate::common::modules::raises;
use dtensor::nn::{Dropout, Linear, Sequential};
use dtensor::op::{Arrays, Here, Metas, Op, apply};
use dtensor::optim::{AdamW, Sgd};
use dtensor::prelude::*;
use dtensor::{Array, cuda, on_device};

#[test]
fn this_program_runs_on_a_gpu() {
    assert!(cuda::is_available());
    let default = Tensor::zeros([1], DType::F32).unwrap().device();
    assert_eq!(default, GPU, "run it with DTENSOR_DEVICE=cuda");
}

#[test]
fn tensors_and_their_gradients_move() -> Result<()> {
    let x = on_device(Device::Cpu, || Tensor::arange(0, 6, 1, DType::F32))?
        .reshape([2, 3])?
        .requires_grad_(true)?;
    let y = x.transpose(0, 1)?.to_device(GPU)?;
    assert_eq!((y.device(), y.dims(), y.to_vec::<f32>()?), (GPU, &[3, 2][..], vec![0., 3., 1., 4., 2., 5.]));
    y.mul(&y)?.sum_all()?.backward()?;
    let grad = x.grad().unwrap();
    assert_eq!((grad.device(), grad.to_vec::<f32>()?), (Device::Cpu, vec![0., 2., 4., 6., 8., 10.]));
    let back = y.to_device(Device::Cpu)?;
    assert_eq!((back.device(), back.mean_all()?.item::<f32>()?), (Device::Cpu, 2.5));
    for dtype in [DType::U8, DType::I64, DType::F16, DType::BF16, DType::F64] {
        for shape in [&[0][..], &[], &[3, 0], &[5, 7]] {
            let x = on_device(Device::Cpu, || Tensor::full(shape, 3, dtype))?;
            let there = x.to_device(GPU)?;
            assert_eq!(
                (there.dims(), there.dtype(), there.to_f64_vec()?),
                (x.dims(), dtype, x.to_f64_vec()?)
            );
        }
    }
    assert_eq!(y.to_device(Device::Meta)?.device(), Device::Meta);
    raises(y.to_device(Device::Cuda(99)), "cuda:99 is not available");
    Ok(())
}

#[test]
fn a_tensor_prints_its_values() -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 2.5], [2])?;
    let there = x.to_device(Device::Cpu)?;
    assert_eq!(x.to_string(), there.to_string());
    Ok(())
}

#[test]
fn operands_on_different_devices_are_an_error_but_scalars_move() -> Result<()> {
    let (here, there) = (
        on_device(Device::Cpu, || Tensor::ones([2], DType::F32))?,
        on_device(GPU, || Tensor::ones([2], DType::F32))?,
    );
    raises(here.add(&there), "same device");
    let two = on_device(Device::Cpu, || Tensor::scalar(2f32))?.requires_grad_(true)?;
    let product = there.mul(&two)?;
    assert_eq!((product.device(), product.to_vec::<f32>()?), (GPU, vec![2., 2.]));
    product.sum_all()?.backward()?;
    let grad = two.grad().unwrap();
    assert_eq!((grad.device(), grad.item::<f32>()?), (Device::Cpu, 2.0));
    Ok(())
}

#[test]
fn modules_move_with_their_gradients() -> Result<()> {
    manual_seed(3);
    let model = on_device(Device::Cpu, || {
        Ok::<_, Error>(Sequential::new().push(Linear::new(3, 4, true)?).push(Dropout::new(0.5)?))
    })?;
    model.eval();
    let x = on_device(Device::Cpu, || Tensor::ones([2, 3], DType::F32))?;
    let want = model.forward(&x)?.to_vec::<f32>()?;
    model.forward(&x)?.sum_all()?.backward()?;
    let grads =
        |model: &Sequential| -> Vec<Tensor> { model.parameters().iter().filter_map(|p| p.grad()).collect() };
    let before: Vec<Vec<f64>> = grads(&model).iter().map(|g| g.to_f64_vec()).collect::<Result<_>>()?;
    model.to_device(GPU)?;
    assert!(model.parameters().iter().all(|p| p.get().device() == GPU && p.requires_grad()));
    let moved = grads(&model);
    assert!(moved.iter().all(|g| g.device() == GPU));
    assert_eq!(moved.iter().map(|g| g.to_f64_vec()).collect::<Result<Vec<_>>>()?, before);
    let got = model.forward(&x.to_device(GPU)?)?.to_vec::<f32>()?;
    assert!(want.iter().zip(&got).all(|(a, b)| (a - b).abs() < 1e-6), "{want:?} {got:?}");
    raises(model.forward(&x), "same device");
    // A state dict of another device is copied to the parameters' one.
    let twin = on_device(Device::Cpu, || {
        Ok::<_, Error>(Sequential::new().push(Linear::new(3, 4, true)?).push(Dropout::new(0.5)?))
    })?;
    twin.load_state_dict(&model.state_dict(), true)?;
    assert!(twin.parameters().iter().all(|p| p.get().device() == Device::Cpu));
    twin.eval();
    assert_eq!(twin.forward(&x)?.to_vec::<f32>()?, want);
    Ok(())
}

#[test]
fn optimizer_state_is_where_the_parameter_is_and_loads_from_elsewhere() -> Result<()> {
    let step = |device: Device| -> Result<(Linear, AdamW)> {
        manual_seed(5);
        let layer = on_device(device, || Linear::new(3, 2, true))?;
        let optimizer = AdamW::new(layer.parameters(), 0.1)?;
        for _ in 0..3 {
            let x = on_device(device, || Tensor::ones([4, 3], DType::F32))?;
            layer.forward(&x)?.sum_all()?.backward()?;
            optimizer.step()?;
            layer.zero_grad();
        }
        Ok((layer, optimizer))
    };
    let ((here, at_home), (there, away)) = (step(Device::Cpu)?, step(GPU)?);
    let state = away.state_dict();
    assert!(state.iter().any(|(key, x)| key.contains("exp_avg") && x.device() == GPU));
    let close = |a: &Linear, b: &Linear| -> Result<()> {
        let (a, b) = (a.weight.get().to_f64_vec()?, b.weight.get().to_f64_vec()?);
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-6), "{a:?} {b:?}");
        Ok(())
    };
    close(&here, &there)?;
    at_home.load_state_dict(&state)?;
    assert!(
        at_home.state_dict().iter().all(|(key, x)| !key.contains("exp_avg") || x.device() == Device::Cpu)
    );
    Ok(())
}

#[test]
fn moving_a_model_after_steps_asks_for_the_state_to_be_moved() -> Result<()> {
    let layer = on_device(Device::Cpu, || Linear::new(2, 2, false))?;
    let optimizer = Sgd::new(
        layer.parameters(),
        dtensor::optim::SgdOptions { momentum: 0.9, lr: 0.1, ..Default::default() },
    )?;
    let run = |device: Device| {
        layer.forward(&on_device(device, || Tensor::ones([1, 2], DType::F32))?)?.sum_all()?.backward()
    };
    run(Device::Cpu)?;
    optimizer.step()?;
    layer.to_device(GPU)?;
    layer.zero_grad();
    run(GPU)?;
    raises(optimizer.step(), "optimizer.load_state_dict(&optimizer.state_dict())");
    optimizer.load_state_dict(&optimizer.state_dict())?;
    optimizer.step()
}

/// An operator of a user, whose kernel runs in main memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OnHost {
    returns_there: bool,
}

impl Op for OnHost {
    fn name(&self) -> &'static str {
        "on_host"
    }
    fn shape(&self, x: &[dtensor::op::Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[dtensor::op::Meta], out: &[dtensor::op::Meta]) -> Result<dtensor::op::Rule> {
        dtensor::op::Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let doubled = x[0].with_host_slice(|x: &[f32]| x.iter().map(|v| 2.0 * v).collect())?;
        let doubled = Array::from_vec(doubled, x[0].dims())?;
        Ok([if self.returns_there { doubled.to_device(x[0].device())? } else { doubled }].into())
    }
    fn differentiable(&self) -> bool {
        false
    }
}

#[test]
fn a_kernel_must_return_arrays_on_the_device_of_its_inputs() -> Result<()> {
    let x = on_device(GPU, || Tensor::ones([2], DType::F32))?;
    assert_eq!(apply(OnHost { returns_there: true }, &[&x])?.to_vec::<f32>()?, [2., 2.]);
    raises(
        apply(OnHost { returns_there: false }, &[&x]),
        "(f32 [2] on cuda:0), but the kernel returned 1 (f32 [2])",
    );
    Ok(())
}

#[test]
fn memory_is_counted_by_purpose() -> Result<()> {
    let before = cuda::memory_stats(GPU)?;
    let layer = on_device(GPU, || Linear::new(1000, 1000, false))?;
    layer.forward(&on_device(GPU, || Tensor::ones([10, 1000], DType::F32))?)?.sum_all()?.backward()?;
    let after = cuda::memory_stats(GPU)?;
    // Other tests run at the same time, so these are lower bounds.
    assert!(after.parameters >= 4_000_000 && after.gradients >= 4_000_000, "{after:?}");
    assert!(after.peak_allocated >= before.allocated, "{before:?} {after:?}");
    let error = raises(
        on_device(GPU, || Tensor::zeros([1 << 44], DType::F32)),
        "out of memory: asked for 65536.0 GiB",
    );
    assert!(error.to_string().contains("parameters"), "{error}");
    Ok(())
}
