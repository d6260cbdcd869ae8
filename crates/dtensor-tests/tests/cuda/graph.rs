//! A recorded step leaves the bits of one that is not recorded.

use std::cell::{Cell, RefCell};

use super::GPU;
use dtensor::comm::{World, launch};
use dtensor::models::{ModelArgs, Transformer};
use dtensor::nn::{Buffer, Linear, Parameter};
use dtensor::optim::{
    Adam, AdamOptions, AdamW, ClipOptions, Schedule, Sgd, SgdOptions, clip_grad_norm, clip_grad_value,
};
use dtensor::parallel::{DataParallel, DataParallelOptions, FullyShardOptions, MixedPrecision, fully_shard};
use dtensor::prelude::*;
use dtensor::{Error, Generator, autocast, cuda, on_device, rng_state, with_generator};

/// A step over inputs.
type StepFn<'a> = dyn FnMut(&[Tensor]) -> Result<Vec<Tensor>> + 'a;

/// What a step may change: all values of a model and its optimizer, gradients, and the generator.
fn state(model: &impl Module, optimizer: &dyn Optimizer) -> Result<Vec<(String, Vec<f64>)>> {
    let mut all = Vec::new();
    for (name, x) in model.state_dict().iter().chain(optimizer.state_dict().iter()) {
        all.push((name.clone(), x.full_tensor().unwrap_or(x.clone()).to_f64_vec()?));
    }
    for (i, parameter) in optimizer.parameters().iter().enumerate() {
        let grad = parameter.grad().map(|grad| grad.full_tensor().unwrap_or(grad).to_f64_vec());
        all.push((format!("grad.{i}"), grad.transpose()?.unwrap_or_default()));
    }
    all.push(("rng".into(), vec![rng_state().seed as f64, rng_state().draws as f64]));
    Ok(all)
}

fn args(dropout_p: f64) -> ModelArgs {
    ModelArgs { dropout_p, ..ModelArgs::default() }
}

fn loss_of(model: &impl Fn(&Tensor) -> Result<Tensor>, tokens: &Tensor) -> Result<Tensor> {
    let n = tokens.dims()[1] - 1;
    let (now, next) = (tokens.narrow(1, 0, n)?, tokens.narrow(1, 1, n)?);
    model(&now)?.flatten(0, 1)?.cross_entropy(&next.flatten_all()?, CrossEntropyOptions::default())
}

/// Runs steps as they are, and through a graph. `train` builds a model and passes its step to the function that it gets, which runs it.
/// Compares what that returns.
fn compare<T: PartialEq + std::fmt::Debug>(
    train: impl Fn(&mut dyn FnMut(&mut StepFn<'_>, &[Vec<Tensor>]) -> Result<Vec<Vec<f64>>>) -> Result<T>,
    replays: usize,
) -> Result<()> {
    let values = |outputs: &[Tensor]| -> Result<Vec<f64>> {
        let lists = outputs.iter().map(|x| x.full_tensor().unwrap_or(x.clone()).to_f64_vec());
        Ok(lists.collect::<Result<Vec<_>>>()?.concat())
    };
    let mut eager = |step: &mut StepFn<'_>, inputs: &[Vec<Tensor>]| -> Result<Vec<Vec<f64>>> {
        inputs.iter().map(|inputs| values(&step(inputs)?)).collect()
    };
    let want = on_device(GPU, || train(&mut eager))?;
    let mut replayed = 0;
    let mut recorded = |step: &mut StepFn<'_>, inputs: &[Vec<Tensor>]| -> Result<Vec<Vec<f64>>> {
        let mut graph = cuda::graph(step);
        let outputs = inputs.iter().map(|inputs| graph.run(inputs)).collect::<Result<Vec<_>>>()?;
        replayed += graph.replayed();
        // Outputs are values: later replays have not changed them.
        outputs.iter().map(|outputs| values(outputs)).collect()
    };
    let got = on_device(GPU, || train(&mut recorded))?;
    assert_eq!(got, want);
    assert!(replayed >= replays, "only {replayed} replays");
    Ok(())
}

/// Returns `count` batches of tokens.
fn batches(count: usize, rows: usize) -> Result<Vec<Vec<Tensor>>> {
    let vocabulary = ModelArgs::default().vocab_size as i64;
    let mut generator = Generator::new(11);
    (0..count).map(|_| Ok(vec![Tensor::randint_with(0, vocabulary, [rows, 9], &mut generator)?])).collect()
}

#[test]
fn a_transformer_trains_with_the_same_bits() -> Result<()> {
    // Dropout; gradients that are cleared before or after the step; half precision; activation checkpoints.
    for (dropout_p, clears_first, is_half) in [(0.0, false, false), (0.2, true, false), (0.2, false, true)] {
        compare(
            |run| {
                manual_seed(3);
                let model = Transformer::new(&args(dropout_p))?;
                let optimizer = AdamW::new(model.parameters(), 1e-3)?;
                let mut step = |inputs: &[Tensor]| {
                    if clears_first {
                        optimizer.zero_grad();
                    }
                    let forward = |x: &Tensor| model.forward(x);
                    let loss = match is_half {
                        true => autocast(DType::BF16, || loss_of(&forward, &inputs[0]))?,
                        false => loss_of(&forward, &inputs[0])?,
                    };
                    loss.backward()?;
                    let norm = clip_grad_norm(&model.parameters(), 1.0, ClipOptions::default())?;
                    optimizer.step()?;
                    if !clears_first {
                        optimizer.zero_grad();
                    }
                    Ok(vec![loss, norm])
                };
                let losses = run(&mut step, &batches(6, 4)?)?;
                Ok((losses, state(&model, &optimizer)?))
            },
            4,
        )?;
    }
    Ok(())
}

#[test]
fn a_checkpoint_draws_its_numbers_again() -> Result<()> {
    compare(
        |run| {
            manual_seed(3);
            let layer = Linear::new(6, 6, true)?;
            let optimizer = Sgd::new(layer.parameters(), 0.1)?;
            let mut step = |inputs: &[Tensor]| {
                let inner = layer.clone();
                let y = dtensor::checkpoint(&inputs[0], move |x| {
                    inner.forward(x)?.dropout(0.5)?.tanh()?.dropout(0.3)
                })?;
                let loss = y.add(&Tensor::randn([6], DType::F32)?)?.pow(2)?.mean_all()?;
                loss.backward()?;
                optimizer.step()?;
                optimizer.zero_grad();
                Ok(vec![loss])
            };
            let mut inputs = Vec::new();
            for _ in 0..5 {
                inputs.push(vec![Tensor::randn([3, 6], DType::F32)?]);
            }
            Ok((run(&mut step, &inputs)?, state(&layer, &optimizer)?))
        },
        3,
    )
}

#[test]
fn every_optimizer_counts_its_steps() -> Result<()> {
    type Make = fn(Vec<Parameter>) -> Result<Box<dyn Optimizer>>;
    let all: [Make; 4] = [
        |parameters| {
            let options = SgdOptions {
                lr: 0.1,
                momentum: 0.9,
                dampening: 0.5,
                weight_decay: 0.1,
                ..Default::default()
            };
            Ok(Box::new(Sgd::new(parameters, options)?))
        },
        |parameters| {
            let options = SgdOptions { lr: 0.1, momentum: 0.9, nesterov: true, ..Default::default() };
            Ok(Box::new(Sgd::new(parameters, options)?))
        },
        |parameters| {
            let options = AdamOptions { amsgrad: true, weight_decay: 0.1, ..AdamOptions::from(0.1) };
            Ok(Box::new(Adam::new(parameters, options)?))
        },
        |parameters| {
            // The second group has options of its own.
            let (first, rest) = parameters.split_at(1);
            let optimizer = AdamW::new(first.to_vec(), 0.1)?;
            optimizer.add_group(rest.to_vec(), 0.01)?;
            Ok(Box::new(optimizer))
        },
    ];
    for make in all {
        compare(
            |run| {
                manual_seed(5);
                let layer = Linear::new(4, 3, true)?;
                let optimizer = make(layer.parameters())?;
                let schedule = Schedule::linear_warmup(3).then(Schedule::cosine(4, 0.1));
                let inputs = [vec![Tensor::randn([2, 4], DType::F32)?]];
                let step = |inputs: &[Tensor]| {
                    let loss = layer.forward(&inputs[0])?.pow(2)?.sum_all()?;
                    loss.backward()?;
                    clip_grad_value(&layer.parameters(), 0.5)?;
                    optimizer.step()?;
                    optimizer.zero_grad();
                    Ok(vec![loss])
                };
                // A call of `run` has one graph, and one learning rate.
                let mut losses = Vec::new();
                let count = Cell::new(0);
                for _ in 0..2 {
                    schedule.apply(&*optimizer, count.get())?;
                    count.set(count.get() + 1);
                    losses.extend(run(&mut |inputs| step(inputs), &vec![inputs[0].clone(); 4])?);
                }
                Ok((losses, state(&layer, &*optimizer)?))
            },
            4,
        )?;
    }
    Ok(())
}

/// Returns a layer, an optimizer, and the inputs of a step.
fn small(lr: f64) -> Result<(Linear, AdamW, Tensor)> {
    manual_seed(6);
    let layer = Linear::new(4, 3, true)?;
    let optimizer = AdamW::new(layer.parameters(), lr)?;
    Ok((layer, optimizer, Tensor::randn([2, 4], DType::F32)?))
}

/// Forward, backward and the optimizer.
fn small_step(layer: &Linear, optimizer: &AdamW, x: &Tensor) -> Result<Vec<Tensor>> {
    let loss = layer.forward(x)?.pow(2)?.sum_all()?;
    loss.backward()?;
    optimizer.step()?;
    optimizer.zero_grad();
    Ok(vec![loss])
}

/// Trains a layer for ten steps, with and without a graph. `between` runs before each step. Compares the states, and returns how often
/// the graph was recorded and replayed.
fn with_changes(
    between: impl Fn(usize, &Linear, &AdamW) -> Result<Box<dyn std::any::Any>>,
) -> Result<(usize, usize)> {
    let mut states = Vec::new();
    let mut counts = (0, 0);
    for records in [false, true] {
        on_device(GPU, || {
            let (layer, optimizer, x) = small(0.1)?;
            let mut graph = cuda::graph(|inputs: &[Tensor]| small_step(&layer, &optimizer, &inputs[0]));
            let mut held = Vec::new();
            for i in 0..10 {
                held.push(between(i, &layer, &optimizer)?);
                match records {
                    true => drop(graph.run(std::slice::from_ref(&x))?),
                    false => drop(small_step(&layer, &optimizer, &x)?),
                }
            }
            counts = (graph.recorded(), graph.replayed());
            states.push(state(&layer, &optimizer)?);
            Ok::<_, Error>(())
        })?;
    }
    assert_eq!(states[0], states[1]);
    Ok(counts)
}

#[test]
fn changes_between_steps_take_effect() -> Result<()> {
    let nothing = || -> Result<Box<dyn std::any::Any>> { Ok(Box::new(())) };
    assert_eq!(with_changes(|_, _, _| nothing())?, (1, 8));
    // A schedule, and other options.
    let counts = with_changes(|i, _, optimizer| {
        Schedule::linear_warmup(20).apply(optimizer, i as u64)?;
        if i == 7 {
            optimizer.set_options(0, 0.03)?;
        }
        nothing()
    })?;
    assert_eq!(counts, (1, 8));
    // A value that is replaced, loaded, or held by somebody.
    let counts = with_changes(|i, layer, _| {
        if i == 5 {
            layer.weight.set(&layer.weight.get().detach().mul(0.5)?)?;
        }
        nothing()
    })?;
    assert_eq!(counts, (2, 7));
    let counts = with_changes(|i, layer, optimizer| {
        if i == 5 {
            let (model, state) = (layer.state_dict(), optimizer.state_dict());
            let copy = |(name, x): (&String, &Tensor)| Ok((name.clone(), x.mul(0.5)?.to_dtype(x.dtype())?));
            layer.load_state_dict(&model.iter().map(copy).collect::<Result<_>>()?, true)?;
            optimizer.load_state_dict(&state)?;
        }
        nothing()
    })?;
    assert_eq!(counts.0 + counts.1, 9);
    let counts = with_changes(|i, layer, _| {
        let held = (i == 5).then(|| (layer.weight.get(), layer.weight.get().detach()));
        Ok(Box::new(held))
    })?;
    assert!(counts.0 >= 2 && counts.0 + counts.1 == 9, "{counts:?}");
    let counts = with_changes(|i, _, optimizer| Ok(Box::new((i == 4).then(|| optimizer.state_dict()))))?;
    assert!(counts.0 >= 2 && counts.0 + counts.1 == 9, "{counts:?}");
    // A gradient that was there before the step.
    let counts = with_changes(|i, layer, _| {
        if i % 4 == 3 {
            layer.weight.get().set_grad(Some(Tensor::ones([3, 4], DType::F32)?))?;
        }
        nothing()
    })?;
    assert_eq!(counts.0 + counts.1, 9);
    // Random draws.
    let counts = with_changes(|i, _, _| {
        if i == 6 {
            manual_seed(77);
        }
        Tensor::randn([3], DType::F32)?;
        nothing()
    })?;
    assert_eq!(counts, (1, 8));
    Ok(())
}

#[test]
fn held_values_do_not_change() -> Result<()> {
    on_device(GPU, || {
        let (layer, optimizer, x) = small(0.1)?;
        let mut graph = cuda::graph(|inputs: &[Tensor]| {
            optimizer.zero_grad();
            let loss = layer.forward(&inputs[0])?.pow(2)?.sum_all()?;
            loss.backward()?;
            optimizer.step()?;
            Ok(vec![loss, layer.weight.get(), layer.weight.grad().unwrap()])
        });
        let mut seen = Vec::new();
        for i in 0..12 {
            let outputs = graph.run(std::slice::from_ref(&x))?;
            let mut held = outputs.clone();
            if i % 3 == 0 {
                held.extend([
                    layer.weight.get().detach(),
                    layer.weight.grad().unwrap(),
                    layer.bias().detach(),
                ]);
            }
            let values = held.iter().map(|x| x.to_f64_vec()).collect::<Result<Vec<_>>>()?;
            seen.push((held, values));
        }
        for (held, values) in seen {
            for (x, values) in held.iter().zip(values) {
                assert_eq!(x.to_f64_vec()?, values);
            }
        }
        assert!(graph.replayed() > 0, "{graph:?}");
        Ok(())
    })
}

trait Bias {
    fn bias(&self) -> Tensor;
}
impl Bias for Linear {
    fn bias(&self) -> Tensor {
        self.bias.as_ref().map(Parameter::get).expect("the layer has a bias")
    }
}

#[test]
fn gradients_accumulate_over_replays() -> Result<()> {
    let mut states = Vec::new();
    for records in [false, true] {
        on_device(GPU, || {
            let (layer, optimizer, x) = small(0.1)?;
            let backward = |inputs: &[Tensor]| {
                let loss = layer.forward(&inputs[0])?.pow(2)?.sum_all()?;
                loss.backward()?;
                Ok(vec![loss])
            };
            let mut graph = cuda::graph(backward);
            for i in 0..24 {
                let x = x.add(f64::from(i))?;
                match records {
                    true => drop(graph.run(&[x])?),
                    false => drop(backward(&[x])?),
                }
                if i % 4 == 3 {
                    optimizer.step()?;
                    if i % 8 == 7 {
                        optimizer.zero_grad();
                    }
                }
            }
            assert!(!records || (graph.recorded() <= 6 && graph.replayed() >= 17), "{graph:?}");
            states.push(state(&layer, &optimizer)?);
            Ok::<_, Error>(())
        })?;
    }
    assert_eq!(states[0], states[1]);
    Ok(())
}

#[test]
fn buffers_and_parameters_that_are_replaced_stay_in_place() -> Result<()> {
    on_device(GPU, || {
        let run = |records: bool| -> Result<(Vec<f64>, Vec<f64>, usize)> {
            let mean = Buffer::new(&Tensor::zeros([3], DType::F32)?);
            let weight = Parameter::new(&Tensor::ones([3], DType::F32)?)?;
            let step = |inputs: &[Tensor]| {
                mean.set(&mean.get().mul(0.9)?.add(&inputs[0].mul(0.1)?)?)?;
                weight.get().mul(&mean.get())?.sum_all()?.backward()?;
                weight.update(|value, grad| value.sub(&grad.mul(0.5)?))?;
                weight.zero_grad();
                Ok(vec![])
            };
            let mut graph = cuda::graph(step);
            for i in 0..8 {
                let x = Tensor::full([3], f64::from(i), DType::F32)?;
                match records {
                    true => graph.run(&[x])?,
                    false => step(&[x])?,
                };
            }
            Ok((mean.get().to_f64_vec()?, weight.get().to_f64_vec()?, graph.replayed()))
        };
        let (want, got) = (run(false)?, run(true)?);
        assert_eq!((want.0, want.1, 6), got);
        Ok(())
    })
}

#[test]
fn inputs_of_other_shapes_are_recorded_too() -> Result<()> {
    on_device(GPU, || {
        let (layer, optimizer, _) = small(0.1)?;
        let (same, same_optimizer, _) = small(0.1)?;
        let mut graph = cuda::graph(|inputs: &[Tensor]| small_step(&layer, &optimizer, &inputs[0]));
        for i in 0..12 {
            // Also of no rows, and of one.
            let x = Tensor::full([[2, 5, 0, 1][i % 4], 4], i as f64, DType::F32)?;
            let want = small_step(&same, &same_optimizer, &x)?[0].item::<f32>()?;
            assert_eq!(graph.run(&[x])?[0].item::<f32>()?, want);
        }
        assert_eq!((graph.recorded(), graph.replayed()), (4, 4));
        assert_eq!(state(&layer, &optimizer)?, state(&same, &same_optimizer)?);
        let error = graph.run(&[layer.weight.get(), Tensor::zeros([1], DType::F32)?.to_device(Device::Cpu)?]);
        assert!(error.unwrap_err().to_string().contains("input 1 is on cpu"));
        Ok(())
    })
}

/// Runs a step that cannot be recorded, and asserts that nothing has changed.
fn cannot_record(what: &str, step: impl Fn(&Tensor, &AdamW, &Tensor) -> Result<Tensor>) -> Result<()> {
    on_device(GPU, || {
        let (layer, optimizer, x) = small(0.1)?;
        let mut graph = cuda::graph(|inputs: &[Tensor]| {
            let y = layer.forward(&inputs[0])?.dropout(0.5)?.pow(2)?;
            y.sum_all()?.backward()?;
            clip_grad_norm(&layer.parameters(), 1.0, ClipOptions::default())?;
            optimizer.step()?;
            Ok(vec![step(&y, &optimizer, &inputs[0])?])
        });
        graph.run(std::slice::from_ref(&x))?;
        let before = state(&layer, &optimizer)?;
        for _ in 0..2 {
            let error = graph.run(std::slice::from_ref(&x)).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
            assert_eq!(state(&layer, &optimizer)?, before, "{what}");
        }
        assert_eq!((graph.recorded(), graph.replayed()), (0, 0));
        drop(graph);
        small_step(&layer, &optimizer, &x)?[0].item::<f32>().map(drop)
    })
}

#[test]
fn what_cannot_be_recorded_changes_nothing() -> Result<()> {
    cannot_record("reading a value cannot be recorded", |y, _, _| {
        let n = y.sum_all()?.item::<f32>()?;
        y.mul(n)
    })?;
    // The line that asked for it is named.
    let line = line!() + 1;
    cannot_record(&format!("graph.rs:{line}"), |y, _, _| y.mul(y.sum_all()?.item::<f32>()?))?;
    cannot_record("copying values to the GPU cannot be recorded", |y, _, _| {
        let values = Tensor::from_slice(&[1f32, 2.0, 3.0], [3])?;
        y.add(&values)
    })?;
    cannot_record("waiting for the GPU cannot be recorded", |y, _, _| {
        cuda::synchronize(GPU)?;
        Ok(y.clone())
    })?;
    cannot_record("setting the state of the generator cannot be recorded", |y, _, _| {
        dtensor::set_rng_state(rng_state());
        Ok(y.clone())
    })?;
    cannot_record("drawing from another generator", |y, _, _| {
        with_generator(&mut Generator::new(1), || y.dropout(0.5))
    })?;
    cannot_record("changing the options or the state of an optimizer", |y, optimizer, _| {
        optimizer.set_factor(0.5)?;
        Ok(y.clone())
    })?;
    cannot_record("returning a tensor on the CPU", |_, _, _| {
        on_device(Device::Cpu, || Tensor::zeros([1], DType::F32))
    })?;
    let kept = RefCell::new(Vec::new());
    cannot_record("live on after it", |y, _, x| {
        kept.borrow_mut().push(y.detach());
        x.add(1)
    })?;
    // Another error of the step, and a panic.
    cannot_record("the contracted sizes differ", |y, _, x| {
        if cuda_is_recording() { y.matmul(x) } else { Ok(y.clone()) }
    })?;
    let (layer, optimizer, x) = on_device(GPU, || small(0.1))?;
    let mut graph = cuda::graph(|inputs: &[Tensor]| {
        let out = small_step(&layer, &optimizer, &inputs[0])?;
        assert!(!cuda_is_recording(), "a panic");
        Ok(out)
    });
    graph.run(std::slice::from_ref(&x))?;
    let before = state(&layer, &optimizer)?;
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        graph.run(std::slice::from_ref(&x)).map(drop)
    }));
    assert!(result.is_err());
    assert_eq!(state(&layer, &optimizer)?, before);
    Ok(())
}

fn cuda_is_recording() -> bool {
    dtensor_array::cuda::is_recording()
}

#[test]
fn faults_name_operator_and_line() -> Result<()> {
    on_device(GPU, || {
        let table = Tensor::randn([5, 3], DType::F32)?;
        let line = line!() + 1;
        let mut graph = cuda::graph(|inputs: &[Tensor]| Ok(vec![inputs[0].embedding(&table, None)?]));
        let good = Tensor::from_slice(&[1i64, 4], [2])?;
        for _ in 0..3 {
            graph.run(std::slice::from_ref(&good))?[0].to_vec::<f32>()?;
        }
        let bad = graph.run(&[Tensor::from_slice(&[1i64, 5], [2])?])?;
        let error = bad[0].to_vec::<f32>().unwrap_err().to_string();
        assert!(error.contains("index 5 is out of bounds") || error.contains("out of"), "{error}");
        assert!(error.contains(&format!("graph.rs:{line}")), "{error}");
        graph.run(&[good])?[0].to_vec::<f32>()?;
        assert_eq!(graph.replayed(), 3);
        Ok(())
    })
}

#[test]
fn a_mesh_of_one_rank() -> Result<()> {
    let half = MixedPrecision { param_dtype: Some(DType::BF16), ..Default::default() };
    for kind in 0..4 {
        compare(
            |run| {
                manual_seed(3);
                let mesh = DeviceMesh::new(&World::threads(1)?.remove(0), [1, 1], ["dp", "tp"])?;
                let model = Transformer::new(&args(0.1))?;
                let model = match kind {
                    0 | 1 => Transformer::parallelize(model, &mesh["tp"], kind == 1)?,
                    2 => {
                        let options = FullyShardOptions { mixed_precision: half, ..Default::default() };
                        for block in &model.layers {
                            fully_shard(block, &mesh["dp"], options.clone())?;
                        }
                        fully_shard(model, &mesh["dp"], options)?
                    }
                    _ => model,
                };
                let optimizer = AdamW::new(model.parameters(), 1e-3)?;
                let replicas = match kind {
                    3 => Some(DataParallel::new(&model, &mesh["dp"], DataParallelOptions::default())?),
                    _ => None,
                };
                let mut step = |inputs: &[Tensor]| {
                    let loss = loss_of(&|x: &Tensor| model.forward(x), &inputs[0])?;
                    loss.backward()?;
                    replicas.as_ref().map_or(Ok(()), DataParallel::average_gradients)?;
                    clip_grad_norm(&model.parameters(), 1.0, ClipOptions::default())?;
                    optimizer.step()?;
                    optimizer.zero_grad();
                    Ok(vec![loss])
                };
                let losses = run(&mut step, &batches(5, 4)?)?;
                Ok((losses, state(&model, &optimizer)?))
            },
            3,
        )?;
    }
    Ok(())
}

#[test]
fn ranks_that_are_threads_cannot_be_recorded() -> Result<()> {
    launch(2, |world| {
        on_device(GPU, || {
            let mesh = DeviceMesh::new(&world, [2], "tp")?;
            manual_seed(3);
            let model = Transformer::parallelize(Transformer::new(&args(0.1))?, &mesh, true)?;
            let optimizer = AdamW::new(model.parameters(), 1e-3)?;
            let tokens = batches(1, 4)?.remove(0);
            let mut graph = cuda::graph(|inputs: &[Tensor]| {
                let loss = loss_of(&|x: &Tensor| model.forward(x), &inputs[0])?;
                loss.backward()?;
                optimizer.step()?;
                optimizer.zero_grad();
                Ok(vec![loss])
            });
            graph.run(&tokens)?;
            let before = state(&model, &optimizer)?;
            let error = graph.run(&tokens).unwrap_err().to_string();
            assert!(
                error.contains("a collective between ranks that are threads cannot be recorded"),
                "{error}"
            );
            assert_eq!(state(&model, &optimizer)?, before);
            // The ranks go on without a graph.
            let loss = loss_of(&|x: &Tensor| model.forward(x), &tokens[0])?;
            loss.backward()?;
            optimizer.step()?;
            state(&model, &optimizer).map(drop)
        })
    })
    .map(drop)
}

#[test]
fn other_devices_call_the_step() -> Result<()> {
    on_device(Device::Cpu, || {
        let calls = Cell::new(0);
        let mut graph = cuda::graph(|inputs: &[Tensor]| {
            calls.set(calls.get() + 1);
            Ok(vec![inputs[0].add(1.0)?])
        });
        for i in 0..4 {
            let x = Tensor::full([2], f64::from(i), DType::F32)?;
            assert_eq!(graph.run(&[x])?[0].to_f64_vec()?, [f64::from(i) + 1.0; 2]);
        }
        assert_eq!((calls.get(), graph.recorded()), (4, 0));
        Ok(())
    })
}
