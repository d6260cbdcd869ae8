//! Tests autocast: the dtype each operator runs in, and the dtypes of gradients.

use dtensor::comm::record;
use dtensor::nn::{Linear, Module, Parameter};
use dtensor::optim::Sgd;
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{BackwardOptions, Placement, autocast_dtype, autocast_off, grad};

use crate::common::table::{Cast, Examples, assert_complete, table};
use DType::{BF16, F16, F32, F64, I64, U8};

fn rand(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::rand(shape, dtype)
}

fn close(a: &Tensor, b: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (a.to_f64_vec()?, b.to_f64_vec()?);
    let scale = b.iter().fold(0f64, |most, x| most.max(x.abs())).max(1e-6);
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() <= tolerance * scale, "{a} and {b}, of {scale}");
    }
    Ok(())
}

#[test]
fn every_operator_runs_in_the_dtype_pytorch_uses() -> Result<()> {
    assert_complete(Examples::Casts);
    let dtypes = [F32, BF16, F64];
    let of = |dtype: DType| move |shape: &[usize]| rand(shape, dtype).unwrap();
    let mut wrong = Vec::new();
    for row in table() {
        let name = row.name;
        for Cast { form, dtypes: want, run } in &row.casts {
            let mut got = Vec::new();
            for a in dtypes {
                for b in dtypes {
                    got.push(autocast(BF16, || run(&of(a), &of(b))).map(|y| y.dtype()).ok());
                }
            }
            if got != *want {
                wrong.push(format!("{name}({form}): {got:?} instead of {want:?}"));
            }
            // Nothing is cast outside a scope or inside `autocast_off`.
            for dtype in dtypes {
                let run = || run(&of(dtype), &of(dtype));
                let want = match want[0] {
                    Some(index) if index.is_int() => index,
                    _ if name == "to_dtype" => F32,
                    _ => dtype,
                };
                for (how, got) in [("outside", run()), ("off", autocast(BF16, || autocast_off(run)))] {
                    match got {
                        Ok(y) if y.dtype() == want => {}
                        Ok(y) => {
                            wrong.push(format!("{name}({form}), {how}: {} instead of {want}", y.dtype()))
                        }
                        Err(error) => wrong.push(format!("{name}({form}), {how}: {error}")),
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn cross_entropy_of_half_precision_logits_is_that_of_the_cast_logits() -> Result<()> {
    let target = Tensor::from_slice(&[1i64, 6, -100, 0], [4])?;
    for dtype in [BF16, F16] {
        for label_smoothing in [0.0, 0.1] {
            let options = || CrossEntropyOptions { label_smoothing, ..Default::default() };
            let logits = rand(&[4, 7], F32)?.mul(5.0)?.to_dtype(dtype)?;
            let [low, wide] = [logits.clone(), logits.to_dtype(F32)?].map(|x| x.requires_grad_(true));
            let (low, wide) = (low?, wide?);
            let loss = autocast(dtype, || low.cross_entropy(&target, options()))?;
            let want = wide.cross_entropy(&target, options())?;
            assert_eq!(loss.dtype(), F32);
            close(&loss, &want, 1e-6)?;
            loss.backward()?;
            want.backward()?;
            let (grad, want) = (low.grad().unwrap(), wide.grad().unwrap());
            assert_eq!(grad.dtype(), dtype);
            close(&grad, &want, if dtype == BF16 { 4e-3 } else { 1e-3 })?;
        }
    }
    Ok(())
}

/// Computes the gradients of two residual blocks with norms, by a pass that is recorded or not.
fn gradients_of_blocks(leaves: &[Tensor], scope: Option<DType>, create_graph: bool) -> Result<Vec<Tensor>> {
    let leaves: Vec<Tensor> =
        leaves.iter().map(|x| x.detach().requires_grad_(true)).collect::<Result<_>>()?;
    let [x, gain, shift, up, bias, scale, down] = &leaves[..] else { unreachable!() };
    let run = || {
        let x = x.mul(1.5)?;
        let x = (&x + x.layer_norm(1, Some(gain), Some(shift), 1e-5)?.linear(up, Some(bias)))?;
        let x = (&x + x.rms_norm(1, Some(scale), 1e-5)?.linear(down, None))?;
        x.mul(&x)?.sum_all()
    };
    let loss = scope.map_or_else(run, |low| autocast(low, run))?;
    loss.backward_with(BackwardOptions { create_graph, ..Default::default() })?;
    let grads = leaves.iter().map(|leaf| leaf.grad().expect("a gradient").detach());
    let grads = grads.map(|grad| if grad.is_distributed() { grad.full_tensor() } else { Ok(grad) });
    grads.collect()
}

#[test]
fn a_pass_that_is_not_recorded_computes_the_same_with_fewer_casts_and_sums() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "ranks")?;
        manual_seed(3);
        let shapes: [&[usize]; 7] = [&[3, 4, 8], &[8], &[8], &[8, 8], &[8], &[8], &[8, 8]];
        let local: Vec<Tensor> = shapes.iter().map(|shape| rand(shape, F32)).collect::<Result<_>>()?;
        for scope in [None, Some(BF16), Some(F16)] {
            let want = gradients_of_blocks(&local, scope, true)?;
            for placement in [None, Some(Shard(0)), Some(Shard(1)), Some(Replicate)] {
                let leaves: Vec<Tensor> = match placement {
                    None => local.clone(),
                    Some(placement) => (local.iter().enumerate())
                        .map(|(i, x)| distribute_tensor(x, &mesh, if i == 0 { placement } else { Replicate }))
                        .collect::<Result<_>>()?,
                };
                for (got, want) in gradients_of_blocks(&leaves, scope, false)?.iter().zip(&want) {
                    assert_eq!(got.dtype(), F32);
                    match (scope, placement) {
                        // The same sums in the same order.
                        (None, None) => assert_eq!(got.to_vec::<f32>()?, want.to_vec::<f32>()?),
                        (None, _) => close(got, want, 1e-5)?,
                        _ => close(got, want, 3e-2)?,
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn norm_parameters_are_not_rounded_and_get_exact_gradients() -> Result<()> {
    // In half precision, 1 + 2⁻¹² rounds to 1, and 1000 ones plus 2⁻⁸ sum to 1000.
    let above = 1.0 + 2f64.powi(-12);
    let x = Tensor::from_slice(&[-4096f32, 4096.], [1, 2])?.expand([1000, 2])?.to_dtype(BF16)?;
    let weight = Tensor::full([2], above, F32)?.requires_grad_(true)?;
    let bias = Tensor::full([2], 2f64.powi(-14), F32)?.requires_grad_(true)?;
    for scope in [Some(BF16), None] {
        for layer in [true, false] {
            let run = || {
                let y = match layer {
                    true => x.layer_norm(1, Some(&weight), Some(&bias), 0.0)?,
                    false => x.rms_norm(1, Some(&weight), 0.0)?,
                };
                assert_eq!(y.dtype(), BF16);
                let shares: Vec<f32> = (0..2000).map(|i| if i < 2 { 1.0 / 256. } else { 1.0 }).collect();
                let gradient = Some(Tensor::from_slice(&shares, [1000, 2])?.to_dtype(BF16)?);
                y.backward_with(BackwardOptions { gradient, ..Default::default() })
            };
            match scope {
                Some(dtype) => autocast(dtype, run)?,
                None => run()?,
            }
            let sum = 999. + 1. / 256.;
            let grad = weight.grad().unwrap();
            assert_eq!((grad.dtype(), grad.to_vec::<f32>()?), (F32, vec![-sum, sum]));
            if layer {
                let grad = bias.grad().unwrap();
                assert_eq!((grad.dtype(), grad.to_vec::<f32>()?), (F32, vec![sum, sum]));
            }
            weight.zero_grad();
            bias.zero_grad();
        }
    }
    // The result lies between 1 and the next bf16 value, 1 + 2⁻⁷. It is above the middle only if the weight is not
    // rounded down.
    let x = Tensor::from_slice(&[-1f32, 1.], [1, 2])?.to_dtype(BF16)?;
    let bias = Tensor::full([2], 3. * 2f64.powi(-10), F32)?;
    let last = |dtype: DType| -> Result<f64> {
        let weight = Tensor::full([2], 1.0 + 2f64.powi(-9), F32)?.to_dtype(dtype)?;
        Ok(autocast(BF16, || x.layer_norm(1, Some(&weight), Some(&bias), 0.0))?.to_f64_vec()?[1])
    };
    assert_eq!((last(F32)?, last(BF16)?), (1.0 + 2f64.powi(-7), 1.0));
    Ok(())
}

#[test]
fn bad_operands_are_an_error_before_anything_is_cast() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let ones = |placement| distribute_tensor(&Tensor::ones([4, 4], F32)?, &mesh, [placement]);
        // A cast to bf16 would have to reduce this partial sum first.
        let sums = ones(Shard(1))?.matmul(&ones(Shard(0))?)?;
        assert_eq!(sums.placements(), [Partial(ReduceOp::Sum)]);
        let wrong = distribute_tensor(&Tensor::ones([3, 3], F32)?, &mesh, [Replicate])?;
        let (failed, calls) = record(|| autocast(BF16, || sums.matmul(&wrong)));
        let error = failed.unwrap_err().to_string();
        assert!(error.contains("matmul") && error.contains("[3, 3]"), "{error}");
        assert_eq!(calls, []);
        // Autocast does not cast f64, so mixing it with another dtype is an error, and the sharded image is not
        // gathered first.
        let image = |dtype| distribute_tensor(&Tensor::ones([1, 2, 3, 5], dtype)?, &mesh, [Shard(3)]);
        let weight = |dtype| distribute_tensor(&Tensor::ones([2, 2, 2, 2], dtype)?, &mesh, [Replicate]);
        for (x, w) in [(F64, F32), (F32, F64), (F64, BF16)] {
            let (x, w) = (image(x)?, weight(w)?);
            let (failed, calls) = record(|| autocast(BF16, || x.conv2d(&w, None, Default::default())));
            let error = failed.unwrap_err().to_string();
            assert!(error.contains("conv2d") && error.contains("f64"), "{error}");
            assert_eq!(calls, []);
        }
        let (x, w) = (image(F32)?, weight(F16)?);
        assert_eq!(autocast(BF16, || x.conv2d(&w, None, Default::default()))?.dtype(), BF16);
        Ok(())
    });
}

#[test]
fn autocast_to_f16_casts_bf16_operands() -> Result<()> {
    let (a, b) = (rand(&[2, 2], BF16)?, rand(&[2, 2], F16)?);
    autocast(F16, || {
        assert_eq!(a.matmul(&b)?.dtype(), F16);
        assert_eq!(a.add(&b)?.dtype(), F32);
        assert_eq!(a.mse_loss(&b, Reduction::Sum)?.dtype(), F32);
        Ok(())
    })
}

#[test]
fn scopes_nest_and_end_on_errors_and_panics() -> Result<()> {
    let x = rand(&[2, 2], F32)?;
    let now = || Ok::<_, Error>((autocast_dtype(), x.matmul(&x)?.dtype()));
    assert_eq!(now()?, (None, F32));
    autocast(BF16, || -> Result<()> {
        assert_eq!(now()?, (Some(BF16), BF16));
        autocast(F16, || assert_eq!(now().unwrap(), (Some(F16), F16)));
        autocast_off(|| {
            assert_eq!(now().unwrap(), (None, F32));
            autocast(F16, || assert_eq!(now().unwrap(), (Some(F16), F16)));
            assert_eq!(now().unwrap(), (None, F32));
        });
        // For a dtype that is not half precision nothing is cast, as in PyTorch.
        for dtype in [F32, F64, I64, U8] {
            autocast(dtype, || assert_eq!(now().unwrap(), (None, F32)));
        }
        assert_eq!(now()?, (Some(BF16), BF16));
        // The mode is thread-local.
        std::thread::scope(|s| s.spawn(|| assert_eq!(now().unwrap(), (None, F32))).join().unwrap());
        Ok(())
    })?;
    assert_eq!(now()?, (None, F32));
    let failed = autocast(BF16, || x.matmul(&rand(&[3, 3], F32)?));
    assert!(failed.is_err());
    assert_eq!(now()?, (None, F32));
    let outcome = std::panic::catch_unwind(|| autocast(BF16, || autocast_off(|| panic!("on the way out"))));
    assert!(outcome.is_err());
    assert_eq!(now()?, (None, F32));
    Ok(())
}

/// Two linear layers with a residual connection, a norm and a loss.
fn loss(net: &[Linear; 2], scale: &Parameter, x: &Tensor, target: &Tensor) -> Result<Tensor> {
    let hidden = net[0].forward(x)?.gelu(Gelu::Tanh)?;
    let y = net[1].forward(&hidden)?.add(x)?;
    y.layer_norm(1, Some(&scale.get()), None, 1e-5)?.cross_entropy(target, CrossEntropyOptions::default())
}

fn model(size: usize) -> Result<([Linear; 2], Parameter)> {
    let net = [Linear::new(size, 2 * size, true)?, Linear::new(2 * size, size, true)?];
    Ok((net, Parameter::new(&Tensor::ones([size], F32)?)?))
}

fn parameters(net: &[Linear; 2], scale: &Parameter) -> Vec<Parameter> {
    net.iter().flat_map(Module::parameters).chain([scale.clone()]).collect()
}

#[test]
fn gradients_have_the_dtype_of_the_parameter_and_are_close_to_exact() -> Result<()> {
    manual_seed(3);
    let (net, scale) = model(16)?;
    let x = Tensor::randn([8, 16], F32)?.requires_grad_(true)?;
    let target = Tensor::randint(0, 16, [8])?;
    loss(&net, &scale, &x, &target)?.backward()?;
    let leaves: Vec<Tensor> =
        parameters(&net, &scale).iter().map(Parameter::get).chain([x.clone()]).collect();
    let exact: Vec<Tensor> = leaves.iter().map(|leaf| leaf.grad().unwrap()).collect();
    for dtype in [BF16, F16] {
        for inside in [false, true] {
            leaves.iter().for_each(Tensor::zero_grad);
            let value = autocast(dtype, || {
                let value = loss(&net, &scale, &x, &target)?;
                // Backward gives the same result inside and outside the scope.
                if inside {
                    value.backward()?;
                }
                Ok::<_, Error>(value)
            })?;
            assert_eq!(value.dtype(), F32);
            if !inside {
                value.backward()?;
            }
            for (leaf, exact) in leaves.iter().zip(&exact) {
                let grad = leaf.grad().expect("a gradient");
                assert_eq!(grad.dtype(), F32);
                close(&grad, exact, if dtype == BF16 { 0.05 } else { 0.01 })?;
                assert_ne!(grad.to_vec::<f32>()?, exact.to_vec::<f32>()?, "it was run in half precision");
            }
        }
    }
    Ok(())
}

#[test]
fn backward_runs_in_the_dtypes_of_forward() -> Result<()> {
    // In single precision, 1 + 2⁻²⁰ differs from 1.
    let w = Tensor::full([1, 1], 1.0 + 2f64.powi(-20), F32)?.requires_grad_(true)?;
    let x = Tensor::full([1, 1], 3.0, F32)?.requires_grad_(true)?;
    let y = x.matmul(&w)?.sum_all()?;
    autocast(BF16, || y.backward())?;
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, w.to_vec::<f32>()?);
    // The same holds for second derivatives.
    let y = x.matmul(&w)?.pow(2)?.sum_all()?;
    let options = BackwardOptions { create_graph: true, ..Default::default() };
    let dx = autocast(BF16, || grad(&y, &[&x], options))?.remove(0).unwrap();
    assert_eq!(dx.dtype(), F32);
    let ddx = autocast(BF16, || grad(&dx, &[&x], BackwardOptions::default()))?.remove(0).unwrap();
    let w = f64::from(w.to_vec::<f32>()?[0]);
    assert!((ddx.to_f64_vec()?[0] - 2. * w * w).abs() < 1e-6);
    Ok(())
}

#[test]
fn training_in_half_precision_lowers_the_loss() -> Result<()> {
    manual_seed(5);
    let (net, scale) = model(8)?;
    let x = Tensor::randn([32, 8], F32)?;
    let target = x.argmax(1, false)?;
    let sgd = Sgd::new(parameters(&net, &scale), 0.5)?;
    let mut losses = Vec::new();
    for _ in 0..30 {
        sgd.zero_grad();
        let value = autocast(BF16, || loss(&net, &scale, &x, &target))?;
        value.backward()?;
        sgd.step()?;
        losses.push(value.item::<f32>()?);
    }
    assert!(losses[29] < 0.5 * losses[0], "{losses:?}");
    assert!(parameters(&net, &scale).iter().all(|parameter| parameter.get().dtype() == F32));
    Ok(())
}

#[test]
fn a_checkpoint_recomputes_in_its_original_scope() -> Result<()> {
    manual_seed(7);
    let (net, scale) = model(8)?;
    let x = Tensor::randn([4, 8], F32)?.requires_grad_(true)?;
    let target = Tensor::randint(0, 8, [4])?;
    let leaves: Vec<Tensor> =
        parameters(&net, &scale).iter().map(Parameter::get).chain([x.clone()]).collect();
    let mut found = Vec::new();
    for checkpointed in [false, true] {
        let body = {
            let (net, scale, target) = (net.clone(), scale.clone(), target.clone());
            // Both the checkpointed and the plain body use the weights.
            move |x: &Tensor| loss(&net, &scale, x, &target)
        };
        let run = || body(&x)?.add(&if checkpointed { checkpoint(&x, body.clone())? } else { body(&x)? });
        autocast(BF16, run)?.backward()?;
        found.push(
            leaves.iter().map(|leaf| leaf.grad().unwrap().to_vec::<f32>()).collect::<Result<Vec<_>>>()?,
        );
        leaves.iter().for_each(Tensor::zero_grad);
    }
    assert_eq!(found[0], found[1]);
    // `autocast_off` inside the body still holds when it is recomputed, and backward may run in another scope.
    let body = |x: &Tensor| autocast_off(|| x.matmul(&x.t()?))?.matmul(x);
    let y = autocast(BF16, || checkpoint(&x, body))?;
    assert_eq!(y.dtype(), BF16);
    autocast(F16, || y.to_dtype(F32)?.sum_all()?.backward())?;
    assert_eq!(x.grad().unwrap().dtype(), F32);
    Ok(())
}

#[test]
fn meta_tensors_are_cast_too() -> Result<()> {
    let x = Tensor::meta_of([4, 1 << 40], F32)?;
    let weight = Tensor::meta_of([8, 1 << 40], F32)?.requires_grad_(true)?;
    let y = autocast(BF16, || x.linear(&weight, None))?;
    assert_eq!((y.dims(), y.dtype()), (&[4, 8][..], BF16));
    y.backward_with(BackwardOptions { gradient: Some(y.detach()), ..Default::default() })?;
    assert_eq!(weight.grad().unwrap().dtype(), F32);
    Ok(())
}

fn lay(linear: &Linear, mesh: &DeviceMesh, weight: Placement, bias: Placement) -> Result<()> {
    linear.weight.replace(&distribute_tensor(&linear.weight.get().detach(), mesh, [weight])?)?;
    let own = linear.bias.as_ref().expect("a bias");
    own.replace(&distribute_tensor(&own.get().detach(), mesh, [bias])?)
}

#[test]
fn layers_on_a_mesh_run_in_half_precision() {
    // Like `test_distribute_module_casting` of PyTorch's `test_api.py`, plus sharded weights.
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        for (weight, bias) in [(Replicate, Replicate), (Shard(0), Shard(0)), (Shard(1), Replicate)] {
            for size in [8, 10, 3] {
                manual_seed(9);
                let layer = Linear::new(size, size, true)?;
                let x = Tensor::randn([2, size], F32)?;
                let exact = layer.forward(&x)?;
                exact.pow(2)?.sum_all()?.backward()?;
                let wanted = layer.weight.grad().unwrap();
                lay(&layer, &mesh, weight, bias)?;
                let x = distribute_tensor(&x, &mesh, [Replicate])?;
                let y = autocast(BF16, || layer.forward(&x))?;
                assert_eq!((y.dtype(), y.to_local()?.dtype()), (BF16, BF16));
                close(&y.full_tensor()?, &exact, 0.02)?;
                y.to_dtype(F32)?.pow(2)?.sum_all()?.backward()?;
                let parameter = layer.weight.get();
                let grad = parameter.grad().unwrap();
                assert_eq!((grad.dtype(), grad.layout()), (F32, parameter.layout()));
                close(&grad.full_tensor()?, &wanted, 0.05)?;
            }
        }
        Ok(())
    });
}

#[test]
fn casts_on_a_mesh_reduce_only_partial_sums_that_they_narrow() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let ones = |placement| distribute_tensor(&Tensor::ones([4, 4], F32)?, &mesh, [placement]);
        let (rows, columns, whole) = (ones(Shard(0))?, ones(Shard(1))?, ones(Replicate)?);
        let count = |run: &dyn Fn() -> Result<Tensor>| -> Result<(Tensor, Vec<DType>)> {
            let (y, calls) = record(|| autocast(BF16, run));
            Ok((y?, calls.iter().map(|call| call.meta.dtype).collect()))
        };
        let (y, calls) = count(&|| rows.matmul(&whole))?;
        assert_eq!((y.placements(), y.dtype(), calls), (&[Shard(0)][..], BF16, vec![]));
        let (partial, calls) = count(&|| columns.matmul(&rows))?;
        assert_eq!((partial.dtype(), calls), (BF16, vec![]));
        assert_eq!(partial.placements(), [Partial(ReduceOp::Sum)]);
        // Partial sums are widened without a reduction.
        let (y, calls) = count(&|| partial.add(&columns.sum(1)?))?;
        assert_eq!((y.dtype(), calls.len()), (F32, 0));
        // Partial f32 sums are reduced in f32 before they are narrowed.
        let sums = columns.matmul(&rows)?;
        let line = line!() + 1;
        let (y, calls) = record(|| autocast(BF16, || sums.matmul(&whole)));
        assert_eq!((y?.dtype(), calls.len()), (BF16, 1));
        assert_eq!(
            (calls[0].meta.dtype, calls[0].at.line, calls[0].implicit()),
            (F32, line, Some("to_dtype"))
        );
        Ok(())
    });
}
