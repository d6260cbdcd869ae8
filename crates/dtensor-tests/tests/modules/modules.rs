//! Tests the module tree: hooks, copies, state dicts, and operations on a whole model.

use std::sync::{Arc, Mutex};

use dtensor::models::{MLPModule, MLPStacked, ModelArgs, Transformer};
use dtensor::nn::{
    Argument, Base, Buffer, Dropout, Inputs, Linear, Module, Outputs, Parameter, Relu, Sequential, deep_copy,
    downcast,
};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{Device, inputs, on_device};

fn values(x: &Tensor) -> Vec<f64> {
    x.detach().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("it is refused").to_string()
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32).unwrap()
}

fn small() -> ModelArgs {
    ModelArgs { n_layers: 1, dim: 8, n_heads: 2, dropout_p: 0.0, ..ModelArgs::default() }
}

/// A module whose `forward` takes and returns every kind of argument.
#[derive(Clone, Debug, Module)]
struct Mix {
    scale: Parameter,
    base: Base,
}

#[forward]
impl Mix {
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        x: &Tensor,
        y: Option<&Tensor>,
        many: &[Tensor],
        times: usize,
        shift: f64,
        negate: bool,
        label: &str,
    ) -> Result<(Tensor, Option<Tensor>)> {
        assert_eq!(label, "untouched");
        let mut out = x.mul(&self.scale.get())?.mul(times as f64)?.add(shift)?;
        for other in many {
            out = out.add(other)?;
        }
        let out = if negate { out.neg()? } else { out };
        let second = y.map(|y| y.add(&out)).transpose()?;
        Ok((out, second))
    }
}

fn mix() -> Mix {
    Mix { scale: Parameter::new(&ones(&[1])).unwrap(), base: Base::new() }
}

fn run(model: &Mix, y: Option<&Tensor>) -> Result<(f64, Option<f64>)> {
    let (a, b) = model.forward(ones(&[1]), y, &[ones(&[1])], 3, 0.5, false, "untouched")?;
    Ok((values(&a)[0], b.map(|b| values(&b)[0])))
}

#[test]
fn hooks_see_and_change_every_kind_of_input() -> Result<()> {
    let model = mix();
    assert_eq!(run(&model, None)?, (4.5, None));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let into = seen.clone();
    let look = model.base.register_forward_pre_hook(move |module, inputs| {
        assert!(downcast::<Mix>(module).is_some());
        into.lock().unwrap().push(inputs.clone());
        Ok(inputs)
    });
    assert_eq!(run(&model, Some(&ones(&[1])))?, (4.5, Some(5.5)));
    assert_eq!(run(&model, None)?, (4.5, None));
    look.remove();
    run(&model, None)?;
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 2);
    let names: Vec<_> = seen[0].names().collect();
    assert_eq!(names, ["x", "y", "many", "times", "shift", "negate", "label"]);
    assert!(matches!(seen[0]["y"], Argument::Tensor(_)) && matches!(seen[1]["y"], Argument::Nothing));
    assert!(matches!(&seen[0]["many"], Argument::Tensors(many) if many.len() == 1));
    assert!(matches!(seen[0]["negate"], Argument::Flag(false)) && matches!(seen[0][6], Argument::Other));

    // A hook changes inputs by index or by name, and can set an optional input that the caller left out.
    type Change = fn(&mut Inputs);
    let changes: [(Change, (f64, Option<f64>)); 7] = [
        (|i| i[0] = ones(&[1]).mul(2.0).unwrap().into(), (7.5, None)),
        (|i| i["x"] = ones(&[1]).mul(3.0).unwrap().into(), (10.5, None)),
        (|i| i["y"] = ones(&[1]).into(), (4.5, Some(5.5))),
        (|i| i["many"] = vec![ones(&[1]), ones(&[1])].into(), (5.5, None)),
        (|i| i["times"] = 0usize.into(), (1.5, None)),
        (|i| i["shift"] = 7i64.into(), (11.0, None)),
        (|i| i["negate"] = true.into(), (-4.5, None)),
    ];
    for (change, expected) in changes {
        let hook = model.base.register_forward_pre_hook(move |_, mut inputs| {
            change(&mut inputs);
            Ok(inputs)
        });
        assert_eq!(run(&model, None)?, expected);
        hook.remove();
    }
    assert_eq!(run(&model, None)?, (4.5, None));
    Ok(())
}

#[test]
fn hooks_that_return_other_values_are_an_error() -> Result<()> {
    let model = mix();
    type Change = fn(Inputs) -> Inputs;
    let changes: [(Change, &str); 6] = [
        (|_| Inputs::new(), "returned 0 inputs, but forward of `Mix` takes 7"),
        (
            |mut i| {
                i.push("more", true);
                i
            },
            "returned 8 inputs",
        ),
        (
            |mut i| {
                i["x"] = true.into();
                i
            },
            "a value for input `x` that is not a",
        ),
        (
            |mut i| {
                i["x"] = Argument::Nothing;
                i
            },
            "a value for input `x` that is not a",
        ),
        (
            |mut i| {
                i["times"] = (-1i64).into();
                i
            },
            "a value for input `times` that is not a",
        ),
        (
            |i| {
                let mut renamed = Inputs::new();
                i.iter().for_each(|(_, argument)| renamed.push("other", argument.clone()));
                renamed
            },
            "a value for input `x` that is not a",
        ),
    ];
    for (change, expected) in changes {
        let hook = model.base.register_forward_pre_hook(move |_, inputs| Ok(change(inputs)));
        let error = message(run(&model, None));
        assert!(error.contains(expected), "`{expected}` is not in: {error}");
        hook.remove();
    }
    let outputs: [fn(Outputs) -> Outputs; 3] = [
        |_| Outputs::default(),
        |o| o.iter().take(1).cloned().collect(),
        |o| o.iter().map(|_| Argument::Flag(true)).collect(),
    ];
    for change in outputs {
        let hook = model.base.register_forward_hook(move |_, _, outputs| Ok(change(outputs)));
        let error = message(run(&model, None));
        assert!(
            error.contains("forward hook of `Mix` returned outputs that do not match its return type"),
            "{error}"
        );
        hook.remove();
    }
    // The caller gets a hook's error.
    let hook = model.base.register_forward_pre_hook(|_, _| Err(Error::argument("hook", "not today")));
    assert!(message(run(&model, None)).contains("not today"));
    hook.remove();
    assert_eq!(run(&model, None)?, (4.5, None));
    let tensor = inputs![x = &ones(&[1]), n = 2usize];
    assert!(message(tensor.tensor("n")).contains("expecting input n to be a tensor; the inputs are (x, n)"));
    assert!(message(tensor.tensor(2)).contains("input 2"));
    Ok(())
}

#[test]
fn hooks_run_in_order_and_forward_hooks_see_the_inputs() -> Result<()> {
    let model = mix();
    let log = Arc::new(Mutex::new(Vec::<String>::new()));
    let before = |name: &'static str, by: f64| {
        let log = log.clone();
        model.base.register_forward_pre_hook(move |_, mut inputs| {
            log.lock().unwrap().push(format!("{name} {}", values(inputs.tensor("x")?)[0]));
            inputs["x"] = inputs.tensor("x")?.mul(by)?.into();
            Ok(inputs)
        })
    };
    let after = |name: &'static str, by: f64| {
        let log = log.clone();
        model.base.register_forward_hook(move |_, inputs, mut outputs| {
            let (x, y) = (values(inputs.tensor("x")?)[0], values(outputs.tensor(0)?)[0]);
            log.lock().unwrap().push(format!("{name} {x} {y} of {}", outputs.len()));
            outputs[0] = outputs.tensor(0)?.add(by)?.into();
            outputs[1] = ones(&[1]).into();
            Ok(outputs)
        })
    };
    let (_c, a, _d, _b) = (after("c", 100.0), before("a", 2.0), after("d", 200.0), before("b", 10.0));
    // 20 · 3 + 0.5 + 1
    assert_eq!(run(&model, None)?, (361.5, Some(1.0)));
    let expected = ["a 1", "b 2", "c 20 61.5 of 2", "d 20 161.5 of 2"];
    assert_eq!(*std::mem::take(&mut *log.lock().unwrap()), expected);
    a.remove();
    run(&model, None)?;
    assert_eq!(*std::mem::take(&mut *log.lock().unwrap()), ["b 1", "c 10 31.5 of 2", "d 10 131.5 of 2"]);
    // Operators inside hooks are recorded, so gradients flow through them.
    let x = ones(&[1]).requires_grad_(true)?;
    let (y, _) = model.forward(&x, None, &[], 1, 0.0, true, "untouched")?;
    y.sum_all()?.backward()?;
    assert_eq!(values(&x.grad().unwrap()), [-10.0]);
    Ok(())
}

#[test]
fn a_hook_can_be_on_any_module_of_the_tree() -> Result<()> {
    let model = MLPStacked::new(2)?;
    let entered = Arc::new(Mutex::new(Vec::new()));
    let mut handles = Vec::new();
    for (path, module) in model.named_modules() {
        let Some(base) = module.base() else {
            assert_eq!(path, "layers", "only the list has no place for hooks");
            continue;
        };
        let log = entered.clone();
        handles.push(base.register_forward_pre_hook(move |module, inputs| {
            log.lock().unwrap().push(format!("{path}: {}", module.kind()));
            Ok(inputs)
        }));
    }
    model.forward(ones(&[1, 10]))?;
    let expected = [
        ": MLPStacked",
        "layers.0: MLPModule",
        "layers.0.net1: Linear",
        "layers.0.relu: Relu",
        "layers.0.net2: Linear",
        "layers.1: MLPModule",
        "layers.1.net1: Linear",
        "layers.1.relu: Relu",
        "layers.1.net2: Linear",
    ];
    assert_eq!(*std::mem::take(&mut *entered.lock().unwrap()), expected);
    handles.into_iter().for_each(|handle| handle.remove());
    model.forward(ones(&[1, 10]))?;
    assert!(entered.lock().unwrap().is_empty());

    // A clone is the same module, so both share hooks.
    let net2 = model.layers[1].net2.clone();
    let hook = net2.base().unwrap().register_forward_hook(|_, _, mut outputs| {
        outputs[0] = outputs.tensor(0)?.zeros_like()?.into();
        Ok(outputs)
    });
    assert_eq!(values(&model.forward(ones(&[1, 10]))?), [0.; 10]);
    hook.remove();
    assert_ne!(values(&model.forward(ones(&[1, 10]))?), [0.; 10]);
    Ok(())
}

#[test]
fn a_running_hook_may_remove_itself_and_register_others() -> Result<()> {
    let layer = Relu::new();
    let base = layer.base().unwrap().clone();
    let handle = Arc::new(Mutex::new(None::<dtensor::nn::HookHandle>));
    let mine = handle.clone();
    *handle.lock().unwrap() = Some(layer.base().unwrap().register_forward_hook(move |_, _, mut outputs| {
        if let Some(handle) = mine.lock().unwrap().take() {
            handle.remove();
        }
        base.register_forward_hook(|_, _, mut outputs| {
            outputs[0] = outputs.tensor(0)?.add(10.0)?.into();
            Ok(outputs)
        });
        outputs[0] = outputs.tensor(0)?.add(1.0)?.into();
        Ok(outputs)
    }));
    let run = || values(&layer.forward(ones(&[1])).unwrap());
    assert_eq!((run(), run(), run()), (vec![2.], vec![11.], vec![11.]));
    Ok(())
}

#[test]
fn a_deep_copy_shares_nothing_and_keeps_ties() -> Result<()> {
    let model = Transformer::new(&small())?;
    let tokens = Tensor::from_slice(&[1i64, 2, 3, 0], [1, 4])?;
    model.forward(&tokens)?.sum_all()?.backward()?;
    model.pos_embeddings.weight.set_requires_grad(false)?;
    model.dropout.eval();
    let hook = model.norm.base().unwrap().register_forward_hook(|_, _, mut outputs| {
        outputs[0] = outputs.tensor(0)?.mul(2.0)?.into();
        Ok(outputs)
    });
    let copy = deep_copy(&model)?;
    let (a, b) = (model.named_parameters(), copy.named_parameters());
    assert_eq!(a.len(), b.len());
    for ((path, p), (other, q)) in a.iter().zip(&b) {
        assert_eq!(path, other);
        assert!(!p.is(q));
        assert_eq!(values(&p.get()), values(&q.get()));
        assert_eq!(p.requires_grad(), q.requires_grad());
        assert_eq!(p.grad().map(|g| values(&g)), q.grad().map(|g| values(&g)));
    }
    assert!(copy.output.weight.is(&copy.tok_embeddings.weight));
    assert!(!copy.dropout.is_training() && copy.is_training() && copy.norm.is_training());
    assert_eq!(copy.args(), model.args());
    // The copy has its own hooks: removing one from the original does not affect it.
    let out = values(&model.forward(&tokens)?);
    assert_eq!(values(&copy.forward(&tokens)?), out);
    hook.remove();
    assert_ne!(values(&model.forward(&tokens)?), out);
    assert_eq!(values(&copy.forward(&tokens)?), out);
    // Changes to the original do not reach the copy.
    let before = values(&copy.tok_embeddings.weight.get());
    model.zero_grad();
    model.tok_embeddings.weight.set(&Tensor::zeros([8, 8], DType::F32)?)?;
    assert_eq!(values(&copy.output.weight.get()), before);
    assert!(copy.tok_embeddings.weight.grad().is_some());
    model.eval();
    assert!(copy.norm.is_training());
    // A clone, in contrast, shares its parameters.
    assert!(model.clone().output.weight.is(&model.tok_embeddings.weight));
    Ok(())
}

#[test]
fn deep_copy_copies_a_sequential_layer_by_layer() -> Result<()> {
    let shared = Linear::new(3, 3, true)?;
    let model = Sequential::new()
        .push(shared.clone())
        .push(Sequential::new().push(Relu::new()).push(shared.clone()))
        .push(Linear::from_parameters(shared.weight.clone(), None)?);
    let same = model.clone();
    assert!(same.get_parameter("1.1.weight")?.is(&shared.weight));
    let copy = deep_copy(&model)?;
    let weight = copy.get_parameter("0.weight")?;
    assert!(!weight.is(&shared.weight));
    assert!(weight.is(&copy.get_parameter("1.1.weight")?) && weight.is(&copy.get_parameter("2.weight")?));
    assert!(copy.get_parameter("0.bias")?.is(&copy.get_parameter("1.1.bias")?));
    assert_eq!(copy.named_parameters().len(), 2);
    let bases = |model: &Sequential, path: &str| model.get_submodule(path).unwrap().base().unwrap().clone();
    assert!(bases(&copy, "0").is(&bases(&copy, "1.1")) && !bases(&copy, "0").is(&bases(&model, "0")));
    assert!(!bases(&copy, "").is(&bases(&model, "")) && bases(&same, "").is(&bases(&model, "")));
    shared.weight.set(&Tensor::zeros([3, 3], DType::F32)?)?;
    assert_eq!(values(&same.get_parameter("2.weight")?.get()), [0.; 9]);
    assert_ne!(values(&weight.get()), [0.; 9]);
    assert_eq!(copy.forward(ones(&[2, 3]))?.dims(), [2, 3]);
    // `deep_copy` cannot copy a module inside an `Arc`.
    #[derive(Clone, Module)]
    struct Behind {
        inner: Arc<Linear>,
    }
    let error = message(deep_copy(&Behind { inner: Arc::new(shared) }));
    assert!(error.contains("`inner.weight` would be shared") && error.contains("Arc"), "{error}");
    Ok(())
}

/// Modules without `Clone`: fields of every kind, a field that is skipped, a type parameter, and a tree.
#[test]
fn deep_copy_needs_no_clone() -> Result<()> {
    #[derive(Module)]
    struct Tree {
        value: Parameter,
        children: Vec<Tree>,
    }
    #[derive(Module)]
    struct Wrapper<M> {
        inner: M,
    }
    #[derive(Module)]
    struct Model<'a> {
        tied: Linear,
        pair: (Wrapper<Linear>, [Buffer; 1]),
        tree: Box<Tree>,
        map: std::collections::BTreeMap<String, Parameter>,
        hashed: std::collections::HashMap<String, Relu>,
        none: Option<Wrapper<Tree>>,
        label: &'a str,
        sizes: Vec<usize>,
        #[module(skip)]
        args: ModelArgs,
        #[module(skip)]
        unseen: Parameter,
        base: Base,
    }
    let tied = Linear::new(2, 2, false)?;
    let leaf = || Tree { value: Parameter::new(&ones(&[1])).unwrap(), children: Vec::new() };
    let model = Model {
        pair: (Wrapper { inner: tied.clone() }, [Buffer::new(&ones(&[1]))]),
        tree: Box::new(Tree { value: Parameter::new(&ones(&[3]))?, children: vec![leaf(), leaf()] }),
        map: [("m".to_string(), tied.weight.clone())].into(),
        hashed: [("h".to_string(), Relu::new())].into(),
        none: None,
        label: "label",
        sizes: vec![1, 2],
        args: small(),
        unseen: tied.weight.clone(),
        base: Base::new(),
        tied,
    };
    let hook = model.base.register_forward_pre_hook(|_, inputs| Ok(inputs));
    let copy = deep_copy(&model)?;
    let (mine, theirs) = (copy.named_parameters(), model.named_parameters());
    assert_eq!(mine.len(), 4);
    for ((name, p), (other, q)) in mine.iter().zip(&theirs) {
        assert_eq!((name, values(&p.get())), (other, values(&q.get())));
        assert!(!p.is(q), "{name}");
    }
    // What was one cell is one cell in the copy, also where a walk does not come.
    let weight = &copy.tied.weight;
    assert!(copy.pair.0.inner.weight.is(weight) && copy.map["m"].is(weight) && copy.unseen.is(weight));
    assert!(!copy.pair.1[0].is(&model.pair.1[0]) && !copy.base.is(&model.base));
    assert!(!copy.hashed["h"].base().unwrap().is(model.hashed["h"].base().unwrap()));
    assert_eq!(
        (copy.label, &copy.sizes, copy.args, copy.none.is_none()),
        ("label", &model.sizes, small(), true)
    );
    hook.remove();
    assert_eq!(format!("{:?}", copy.base), "Base(training, 1 hooks before and 0 after)");
    assert_eq!(format!("{:?}", model.base), "Base(training, 0 hooks before and 0 after)");
    Ok(())
}

#[test]
fn a_state_dict_round_trips_with_tied_names() -> Result<()> {
    let (a, b) = (Transformer::new(&small())?, Transformer::new(&small())?);
    let state = a.state_dict();
    let mut names: Vec<String> = a.named_parameters().into_iter().map(|(name, _)| name).collect();
    names.push("output.weight".into());
    names.sort();
    assert_eq!(state.keys().cloned().collect::<Vec<_>>(), names);
    assert!(state.values().all(|value| !value.requires_grad()));
    let tokens = Tensor::from_slice(&[1i64, 2, 3, 0], [1, 4])?;
    let expected = values(&a.forward(&tokens)?);
    assert_ne!(values(&b.forward(&tokens)?), expected);
    b.load_state_dict(&state, true)?;
    assert_eq!(values(&b.forward(&tokens)?), expected);
    assert!(b.output.weight.is(&b.tok_embeddings.weight));
    assert!(b.parameters().iter().all(|p| p.requires_grad() && p.get().is_leaf()));
    // Later changes to the model do not reach the state dict.
    a.norm.weight.as_ref().unwrap().set(&Tensor::zeros([8], DType::F32)?)?;
    assert_eq!(values(&state["norm.weight"]), [1.; 8]);
    // Loading casts to the dtype of the model.
    b.to_dtype(DType::BF16)?;
    b.load_state_dict(&state, true)?;
    assert_eq!(b.norm.weight.as_ref().unwrap().get().dtype(), DType::BF16);
    // Tied and untied models load each other's state dicts. For a tied parameter the last name wins.
    let untied = Transformer::new(&ModelArgs { weight_tying: false, ..small() })?;
    untied.load_state_dict(&state, true)?;
    assert_eq!(values(&untied.output.weight.get()), values(&untied.tok_embeddings.weight.get()));
    assert!(!untied.output.weight.is(&untied.tok_embeddings.weight));
    untied.output.weight.set(&Tensor::full([8, 8], 2.0, DType::F32)?)?;
    a.load_state_dict(&untied.state_dict(), true)?;
    assert_eq!(values(&a.tok_embeddings.weight.get()), [2.; 64]);
    Ok(())
}

#[test]
fn an_error_lists_everything_wrong_with_a_state_dict_and_changes_nothing() -> Result<()> {
    let model = MLPModule::new(true)?;
    let mut state = MLPModule::with_sizes(10, 16, 10, true)?.state_dict();
    state.values_mut().for_each(|value| *value = value.add(1.0).unwrap());
    let good = state.clone();
    state.remove("net1.bias");
    state.remove("net2.bias");
    state.insert("net3.weight".into(), ones(&[1]));
    state.insert("net1.weight".into(), ones(&[16, 9]));
    let before = model.state_dict();
    let unchanged = |model: &MLPModule| {
        let now = model.state_dict();
        now.iter().all(|(path, value)| values(value) == values(&before[path]))
    };
    let error = message(model.load_state_dict(&state, true));
    for part in [
        "error(s) in loading state_dict for `MLPModule`",
        "missing key(s): `net1.bias`, `net2.bias`",
        "unexpected key(s): `net3.weight`",
        "size mismatch for `net1.weight`: [16, 9] in the state, [16, 10] in the model",
    ] {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
    assert!(unchanged(&model));
    // Without `strict`, names may differ, but sizes may not.
    let error = message(model.load_state_dict(&state, false));
    assert!(error.contains("size mismatch") && !error.contains("key(s)"), "{error}");
    assert!(unchanged(&model));
    state.remove("net1.weight");
    model.load_state_dict(&state, false)?;
    assert_eq!(values(&model.net2.weight.get()), values(&good["net2.weight"]));
    assert_eq!(values(&model.net1.weight.get()), values(&before["net1.weight"]));
    // Loading between a meta model and one with values is an error in both directions.
    let meta = on_device(Device::Meta, || MLPModule::new(true))?;
    assert!(
        message(meta.load_state_dict(&good, true)).contains("is on cpu in the state, on meta in the model")
    );
    assert!(message(model.load_state_dict(&meta.state_dict(), true)).contains("is on meta in the state"));
    Ok(())
}

#[test]
fn a_state_dict_loads_into_another_layout() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let lay = |model: &MLPModule, along: Placement| -> Result<()> {
            for parameter in model.parameters() {
                parameter.replace(&distribute_tensor(&parameter.get().detach(), &mesh, [along])?)?;
            }
            Ok(())
        };
        let (plain, rows, whole) = (MLPModule::new(true)?, MLPModule::new(true)?, MLPModule::new(true)?);
        plain.net1.weight.set(&Tensor::full([16, 10], 3.0, DType::F32)?)?;
        lay(&rows, Shard(0))?;
        lay(&whole, Replicate)?;
        rows.load_state_dict(&plain.state_dict(), true)?;
        assert_eq!(rows.net1.weight.get().placements(), [Shard(0)]);
        whole.load_state_dict(&rows.state_dict(), true)?;
        assert_eq!(whole.net1.weight.get().placements(), [Replicate]);
        assert_eq!(values(&whole.net1.weight.get().to_local()?), [3.; 160]);
        // A local model does not load a distributed tensor.
        let error = message(plain.load_state_dict(&rows.state_dict(), true));
        assert!(error.contains("on no mesh in the model"), "{error}");
        Ok(())
    });
}

#[test]
fn to_dtype_casts_every_parameter_and_keeps_ties() -> Result<()> {
    let model = Transformer::new(&small())?;
    let tokens = Tensor::from_slice(&[1i64, 2, 3, 0], [1, 4])?;
    let logits = model.forward(&tokens)?;
    logits.pow(2.0)?.sum_all()?.backward()?;
    let weight = model.tok_embeddings.weight.clone();
    model.pos_embeddings.weight.set_requires_grad(false)?;
    model.to_dtype(DType::BF16)?;
    assert!(model.parameters().iter().all(|p| p.get().dtype() == DType::BF16 && p.get().is_leaf()));
    assert!(model.output.weight.is(&weight) && model.tok_embeddings.weight.is(&weight));
    assert!(weight.requires_grad() && !model.pos_embeddings.weight.requires_grad());
    assert_eq!(weight.grad().unwrap().dtype(), DType::BF16);
    // The logits are still in single precision, and close to those before the cast.
    let cast = model.forward(&tokens)?;
    assert_eq!(cast.dtype(), DType::F32);
    let (a, b) = (values(&cast), values(&logits));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 0.05 * (1.0 + b.abs())));
    cast.sum_all()?.backward()?;
    for dtype in [DType::I64, DType::U8] {
        assert!(message(model.to_dtype(dtype)).contains("floating-point dtypes only"));
    }
    assert_eq!(weight.get().dtype(), DType::BF16);

    #[derive(Module)]
    struct Counted {
        mean: Buffer,
        steps: Buffer,
        layer: Linear,
    }
    let counted = Counted {
        mean: Buffer::new(&ones(&[2])),
        steps: Buffer::new(&Tensor::zeros([1], DType::I64)?),
        layer: Linear::new(2, 2, false)?,
    };
    counted.to_dtype(DType::F16)?;
    assert_eq!((counted.mean.get().dtype(), counted.steps.get().dtype()), (DType::F16, DType::I64));
    assert_eq!(counted.named_buffers().len(), 2);
    assert_eq!(counted.own_buffers().len(), 2);
    assert!(counted.own_parameters().is_empty());
    Ok(())
}

#[test]
fn to_empty_keeps_shapes_dtypes_and_ties() -> Result<()> {
    let model = on_device(Device::Meta, || Transformer::new(&small()))?;
    model.to_dtype(DType::BF16)?;
    model.norm.weight.as_ref().unwrap().set_requires_grad(false)?;
    let logits = model.forward(&on_device(Device::Meta, || Tensor::zeros([2, 5], DType::I64))?)?;
    assert!(logits.is_meta() && logits.dims() == [2, 5, 8]);
    let shapes = |model: &Transformer| -> Vec<_> {
        model.named_parameters().iter().map(|(path, p)| (path.clone(), p.get().shape())).collect()
    };
    let before = shapes(&model);
    model.to_empty(Device::Cpu)?;
    assert_eq!(shapes(&model), before);
    for (path, parameter) in model.named_parameters() {
        let value = parameter.get();
        assert!(!value.is_meta() && value.dtype() == DType::BF16 && value.is_leaf());
        assert!(values(&value).iter().all(|v| *v == 0.0));
        assert_eq!(value.requires_grad(), path != "norm.weight");
    }
    assert!(model.output.weight.is(&model.tok_embeddings.weight));
    model.reset_parameters()?;
    model.to_empty(Device::Meta)?;
    assert!(model.parameters().iter().all(|p| p.get().is_meta()));
    Ok(())
}

#[test]
fn set_training_and_set_requires_grad_apply_to_the_whole_tree() -> Result<()> {
    let model = Transformer::new(&ModelArgs::default())?;
    let training = |model: &Transformer| {
        model.named_modules().iter().map(|(_, module)| module.is_training()).collect::<Vec<_>>()
    };
    assert!(training(&model).iter().all(|t| *t));
    model.eval();
    let lists = model.named_modules().iter().filter(|(_, module)| module.base().is_none()).count();
    // A `ModuleList` has no training flag.
    assert_eq!(training(&model).iter().filter(|t| **t).count(), lists);
    model.layers[0].train();
    assert!(
        model.layers[0].attention.is_training() && model.layers[0].feed_forward.resid_dropout.is_training()
    );
    assert!(!model.layers[1].attention.is_training() && !model.is_training());
    model.set_training(true);
    assert!(training(&model).iter().all(|t| *t));

    model.layers[0].set_requires_grad(false)?;
    let frozen: Vec<String> = model
        .named_parameters()
        .into_iter()
        .filter_map(|(path, p)| (!p.requires_grad()).then_some(path))
        .collect();
    assert_eq!(frozen.len(), model.layers[0].parameters().len());
    assert!(frozen.iter().all(|path| path.starts_with("layers.0.")));
    model.forward(&Tensor::zeros([2, 3], DType::I64)?)?.sum_all()?.backward()?;
    for (path, parameter) in model.named_parameters() {
        assert_eq!(parameter.grad().is_some(), !frozen.contains(&path), "{path}");
    }
    model.set_requires_grad(true)?;
    assert!(model.parameters().iter().all(Parameter::requires_grad));
    model.zero_grad();
    assert!(model.parameters().iter().all(|p| p.grad().is_none()));
    Ok(())
}

#[test]
fn register_parameter_replaces_a_tied_parameter_under_all_its_names() -> Result<()> {
    let model = Transformer::new(&small())?;
    let place = model.tok_embeddings.weight.clone();
    model.register_parameter("output.weight", &Tensor::zeros([11, 8], DType::F64)?)?;
    assert!(place.is(&model.output.weight) && place.is(&model.tok_embeddings.weight));
    assert_eq!((place.get().dims(), place.get().dtype()), (&[11, 8][..], DType::F64));
    assert!(place.requires_grad() && place.get().is_leaf());
    model.norm.set_requires_grad(false)?;
    model.register_parameter("norm.weight", &ones(&[8]))?;
    assert!(!model.norm.weight.as_ref().unwrap().requires_grad());

    let error = message(model.register_parameter("norm.scale", &ones(&[8])));
    assert!(error.contains("there is no parameter `norm.scale`"), "{error}");
    assert!(error.contains("`norm.weight`, `norm.bias`, `output.weight`"), "{error}");
    // Integers have no gradient.
    model.norm.set_requires_grad(true)?;
    let error = message(model.register_parameter("norm.bias", &Tensor::zeros([8], DType::I64)?));
    assert!(error.contains("floating point"), "{error}");
    let error = message(model.get_parameter("norm"));
    assert!(error.contains("there is no parameter `norm`"), "{error}");
    let error = message(model.get_submodule("layers.1").map(|_| ()));
    assert!(error.contains("there is no submodule `layers.1`") && error.contains("`layers.0`"), "{error}");
    assert!(message(Relu::new().get_parameter("weight")).contains("there are none"));
    assert_eq!(model.get_submodule("layers.0.attention.wq")?.kind(), "Linear");
    assert_eq!(model.get_submodule("")?.kind(), "Transformer");
    Ok(())
}

#[test]
fn named_children_lists_one_level_and_named_modules_all() -> Result<()> {
    let model = Transformer::new(&small())?;
    let children: Vec<String> = model.named_children().into_iter().map(|(name, _)| name).collect();
    assert_eq!(children, ["tok_embeddings", "pos_embeddings", "dropout", "layers", "norm", "output"]);
    let kinds: Vec<_> = model.layers[0].named_children().into_iter().map(|(_, m)| m.kind()).collect();
    assert_eq!(kinds, ["LayerNorm", "MultiHeadAttention", "LayerNorm", "FeedForward"]);
    let attention: Vec<String> =
        model.layers[0].attention.named_children().into_iter().map(|(name, _)| name).collect();
    assert_eq!(attention, ["resid_dropout", "wq", "wk", "wv", "wo"]);
    // A shared module is listed under its first name, and found under both.
    let shared = Dropout::new(0.1)?;
    let model =
        Sequential::new().push(shared.clone()).push(Sequential::new().push(shared)).push(Dropout::new(0.1)?);
    let paths: Vec<String> = model.named_modules().into_iter().map(|(path, _)| path).collect();
    assert_eq!(paths, ["", "0", "1", "2"]);
    assert_eq!(model.get_submodule("1.0")?.kind(), "Dropout");
    Ok(())
}

#[test]
fn integer_parameters_keep_their_dtype() -> Result<()> {
    #[derive(Clone, Module)]
    struct Quantized {
        codes: Parameter,
        scale: Parameter,
    }
    let codes = Parameter::frozen(&Tensor::from_slice(&[1i64, 2], [2])?);
    let model = Quantized { codes, scale: Parameter::new(&ones(&[1]))? };
    model.to_dtype(DType::BF16)?;
    assert_eq!((model.codes.get().dtype(), model.scale.get().dtype()), (DType::I64, DType::BF16));
    model.set_requires_grad(false)?;
    let error = message(model.set_requires_grad(true));
    assert!(error.contains("`codes` is i64") && error.contains("floating point"), "{error}");
    assert!(!model.scale.requires_grad());
    let copy = deep_copy(&model)?;
    assert!(!copy.codes.is(&model.codes));
    assert_eq!(copy.codes.get().to_vec::<i64>()?, [1, 2]);
    assert!(model.codes.replace(&ones(&[3])).is_ok() && model.codes.get().dtype() == DType::F32);
    Ok(())
}

#[test]
fn a_cast_to_the_same_dtype_changes_nothing() -> Result<()> {
    let layer = Linear::new(2, 2, true)?;
    let y = layer.forward(&Tensor::ones([1, 2], DType::F32)?)?;
    layer.to_dtype(DType::F32)?;
    y.sum_all()?.backward()?;
    assert!(layer.weight.grad().is_some());
    Ok(())
}

#[test]
fn a_deep_copy_has_its_own_buffers() -> Result<()> {
    #[derive(Clone, Module)]
    struct Counters {
        one: Buffer,
        same: Buffer,
        scratch: Buffer,
    }
    let zero = Tensor::zeros([1], DType::I64)?;
    let one = Buffer::new(&zero);
    let model = Counters { same: one.clone(), one, scratch: Buffer::transient(&zero) };
    let copy = dtensor::nn::deep_copy(&model)?;
    copy.one.set(&copy.one.get().add(1)?)?;
    assert_eq!(copy.same.get().to_vec::<i64>()?, [1]);
    assert_eq!(model.one.get().to_vec::<i64>()?, [0]);
    assert!(copy.one.is(&copy.same) && !copy.scratch.is(&model.scratch) && !copy.scratch.is_persistent());
    Ok(())
}

/// Loading into another layout redistributes. The collectives are attributed to the line that loads.
#[test]
fn collectives_of_loading_are_attributed_to_its_caller() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let layer = Linear::new(4, 4, false)?;
        let rows = distribute_tensor(&layer.weight.get().detach(), &mesh, [Shard(0)])?;
        layer.register_parameter(
            "weight",
            &distribute_tensor(&layer.weight.get().detach(), &mesh, [Shard(1)])?,
        )?;
        let state = [("weight".to_string(), rows)].into();
        let (result, calls) = dtensor::comm::record(|| layer.load_state_dict(&state, true));
        result?;
        assert_eq!(calls[0].collective.name(), "all_to_all");
        assert!(calls[0].at.file.ends_with("modules/modules.rs"), "{}", calls[0].at);
        Ok(())
    });
}
