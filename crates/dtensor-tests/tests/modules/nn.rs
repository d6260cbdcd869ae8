//! Tests parameters, the tree of modules, and training.

use dtensor::nn::{Linear, Module, Parameter, Walk};
use dtensor::optim::Sgd;
use dtensor::prelude::*;

fn parameter(values: &[f32]) -> Parameter {
    Parameter::new(&Tensor::from_slice(values, [values.len()]).unwrap()).unwrap()
}

fn names(module: &dyn Module) -> Vec<String> {
    module.named_parameters().into_iter().map(|(name, _)| name).collect()
}

fn values(x: &Tensor) -> Vec<f32> {
    x.to_vec().unwrap()
}

#[derive(Module)]
struct Block {
    first: Linear,
    second: Linear,
    scale: Parameter,
}

/// A module with every kind of field.
#[derive(Module)]
struct Everything {
    /// Plain data, which is not part of the tree.
    label: String,
    width: usize,
    blocks: Vec<Block>,
    head: Option<Linear>,
    absent: Option<Linear>,
    boxed: Box<Linear>,
    loose: Vec<Parameter>,
    nested: Vec<Vec<Parameter>>,
    numbers: Vec<f32>,
    r#type: Parameter,
    #[module(skip)]
    activation: fn(&Tensor) -> Result<Tensor>,
    #[module(skip)]
    frozen: Tensor,
}

fn block() -> Block {
    Block {
        first: Linear::new(2, 3, true).unwrap(),
        second: Linear::new(3, 2, false).unwrap(),
        scale: parameter(&[1.]),
    }
}

fn everything() -> Everything {
    Everything {
        label: "model".into(),
        width: 3,
        blocks: vec![block(), block()],
        head: Some(Linear::new(2, 1, true).unwrap()),
        absent: None,
        boxed: Box::new(Linear::new(1, 1, false).unwrap()),
        loose: vec![parameter(&[1.]), parameter(&[2.])],
        nested: vec![vec![], vec![parameter(&[3.])]],
        numbers: vec![1., 2.],
        r#type: parameter(&[4.]),
        activation: |x| x.relu(),
        frozen: Tensor::ones([2], DType::F32).unwrap(),
    }
}

#[test]
fn derive_module_lists_fields_in_order_under_dotted_paths() {
    let model = everything();
    let want = [
        "blocks.0.first.weight",
        "blocks.0.first.bias",
        "blocks.0.second.weight",
        "blocks.0.scale",
        "blocks.1.first.weight",
        "blocks.1.first.bias",
        "blocks.1.second.weight",
        "blocks.1.scale",
        "head.weight",
        "head.bias",
        "boxed.weight",
        "loose.0",
        "loose.1",
        "nested.1.0",
        "type",
    ];
    assert_eq!(names(&model), want);
    assert_eq!(model.parameters().len(), want.len());
    // Plain data fields are untouched.
    assert_eq!((model.label.as_str(), model.width, model.numbers.len()), ("model", 3, 2));
    assert!((model.activation)(&model.frozen).is_ok() && model.absent.is_none());
}

#[test]
fn modules_may_be_generic_borrowed_or_implemented_by_hand() {
    #[derive(Module)]
    struct Residual<M: Module> {
        inner: M,
        gain: Parameter,
    }
    #[derive(Module)]
    struct Pair<A, B>
    where
        A: Module,
        B: Module,
    {
        a: A,
        b: Vec<B>,
    }
    #[derive(Module)]
    struct Tagged<'a, M: Module, const N: usize> {
        tag: &'a str,
        sizes: [usize; N],
        inner: M,
    }
    struct ByHand {
        w: Parameter,
    }
    impl Module for ByHand {
        fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
            walk.module("ByHand", self, |walk| walk.child("renamed", &self.w));
        }
    }
    let residual = || Residual { inner: Linear::new(1, 1, true).unwrap(), gain: parameter(&[1.]) };
    let model = Pair { a: residual(), b: vec![ByHand { w: parameter(&[2.]) }] };
    assert_eq!(names(&model), ["a.inner.weight", "a.inner.bias", "a.gain", "b.0.renamed"]);
    let tagged = Tagged { tag: "t", sizes: [1, 2], inner: residual() };
    assert_eq!(names(&tagged), ["inner.inner.weight", "inner.inner.bias", "inner.gain"]);
    assert_eq!((tagged.tag, tagged.sizes), ("t", [1, 2]));
    // A list may hold modules of different types.
    let list: Vec<Box<dyn Module>> = vec![Box::new(Linear::new(1, 1, false).unwrap()), Box::new(model)];
    assert_eq!(names(&list)[..2], ["0.weight", "1.a.inner.weight"]);
}

#[test]
fn a_parameter_under_two_names_is_one_parameter() -> Result<()> {
    #[derive(Module)]
    struct Tied {
        embedding: Parameter,
        head: Linear,
    }
    let shared = Parameter::new(&Tensor::ones([2, 2], DType::F32)?)?;
    let model = Tied { embedding: shared.clone(), head: Linear::from_parameters(shared.clone(), None)? };
    assert_eq!(names(&model), ["embedding"]);
    assert!(model.get_parameter("head.weight")?.is(&shared));
    let parameters = model.parameters();
    assert_eq!(parameters.len(), 1);
    assert!(parameters[0].is(&shared) && !parameters[0].is(&parameter(&[1.])));
    // One optimizer step updates it once, with the summed gradients of both uses.
    let x = model.embedding.get().add(&model.head.forward(&Tensor::ones([1, 2], DType::F32)?)?)?;
    x.sum_all()?.backward()?;
    Sgd::new(parameters, 1.0)?.step()?;
    assert_eq!(values(&shared.get()), [-2., -2., -2., -2.]);
    assert_eq!(values(&model.head.weight.get()), values(&model.embedding.get()));
    Ok(())
}

#[test]
fn setting_and_updating_replace_the_value_and_keep_the_gradient() -> Result<()> {
    let p = parameter(&[1., 2.]);
    assert!(p.get().requires_grad() && p.get().is_leaf() && p.grad().is_none());
    // `update` does nothing without a gradient.
    p.update(|_, _| panic!("not to be called"))?;
    assert_eq!(values(&p.get()), [1., 2.]);

    p.get().mul(3.0)?.sum_all()?.backward()?;
    assert_eq!(values(&p.grad().unwrap()), [3., 3.]);
    p.set(&Tensor::from_slice(&[5f32, 6.], [2])?)?;
    assert_eq!((values(&p.get()), values(&p.grad().unwrap())), (vec![5., 6.], vec![3., 3.]));
    assert!(p.get().requires_grad() && p.get().is_leaf());
    p.update(|value, grad| {
        assert!(!value.requires_grad());
        let next = value.add(grad)?;
        assert!(!next.requires_grad());
        Ok(next)
    })?;
    assert_eq!(values(&p.get()), [8., 9.]);
    // The new value accumulates into the same gradient.
    p.get().sum_all()?.backward()?;
    assert_eq!(values(&p.grad().unwrap()), [4., 4.]);
    p.zero_grad();
    assert!(p.grad().is_none());

    // A value of another shape or dtype, or a closure that fails, is an error and changes nothing.
    p.get().sum_all()?.backward()?;
    for wrong in [Tensor::ones([3], DType::F32)?, Tensor::ones([2], DType::F64)?] {
        assert!(p.set(&wrong).is_err());
        assert!(p.update(|_, _| Ok(wrong.clone())).is_err());
    }
    assert!(p.update(|_, _| Err(Error::argument("rule", "fails"))).is_err());
    assert_eq!((values(&p.get()), values(&p.grad().unwrap())), (vec![8., 9.], vec![1., 1.]));
    Ok(())
}

#[test]
fn a_parameter_does_not_take_over_the_history_of_its_value() -> Result<()> {
    let x = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
    let p = Parameter::new(&x.mul(2.0)?)?;
    p.get().sum_all()?.backward()?;
    assert!(x.grad().is_none() && p.grad().is_some());
    p.set(&x.mul(5.0)?)?;
    assert!(p.get().is_leaf());
    assert!(Parameter::new(&Tensor::ones([2], DType::I64)?).is_err());
    Ok(())
}

#[test]
fn zero_grad_of_a_module_reaches_every_parameter() -> Result<()> {
    let model = block();
    let x = Tensor::ones([1, 2], DType::F32)?;
    let y = model.second.forward(&model.first.forward(&x)?)?.mul(&model.scale.get())?;
    y.sum_all()?.backward()?;
    assert!(model.parameters().iter().all(|p| p.grad().is_some()));
    model.zero_grad();
    assert!(model.parameters().iter().all(|p| p.grad().is_none()));
    Ok(())
}

#[test]
fn a_linear_layer_starts_within_its_bound() -> Result<()> {
    manual_seed(1);
    let layer = Linear::new(16, 64, true)?;
    let (weight, bias) = (layer.weight.get(), layer.bias.as_ref().unwrap().get());
    assert_eq!((weight.dims(), bias.dims()), (&[64, 16][..], &[64][..]));
    let all = [values(&weight), values(&bias)].concat();
    assert!(all.iter().all(|v| v.abs() <= 0.25));
    assert!(all.iter().any(|v| *v > 0.24) && all.iter().any(|v| *v < -0.24));
    assert!(Linear::new(0, 3, true)?.forward(&Tensor::zeros([2, 0], DType::F32)?)?.dims() == [2, 3]);
    Ok(())
}

#[derive(Module)]
struct Mlp {
    net1: Linear,
    net2: Linear,
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.net2.forward(&self.net1.forward(x)?.relu()?)
    }
}

/// Returns the loss of each of 200 steps and the final parameters.
fn train() -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
    manual_seed(42);
    let model = Mlp { net1: Linear::new(10, 16, true)?, net2: Linear::new(16, 10, true)? };
    let x = Tensor::randn([32, 10], DType::F32)?;
    let target = x.mul(0.5)?.add(0.25)?;
    let optimizer = Sgd::new(model.parameters(), 0.5)?;
    let mut losses = Vec::new();
    for _ in 0..200 {
        optimizer.zero_grad();
        let loss = model.forward(&x)?.mse_loss(&target, Reduction::Mean)?;
        loss.backward()?;
        optimizer.step()?;
        losses.push(loss.item::<f32>()?);
    }
    Ok((losses, model.parameters().iter().map(|p| values(&p.get())).collect()))
}

#[test]
fn training_lowers_the_loss_and_is_bitwise_reproducible() -> Result<()> {
    let (losses, parameters) = train()?;
    let (first, last) = (losses[0], losses[199]);
    assert!(last * 5.0 <= first, "from {first} to {last} only");
    let bits = |all: &[f32]| all.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let (again, parameters_again) = train()?;
    assert_eq!(bits(&losses), bits(&again));
    for (a, b) in parameters.iter().zip(&parameters_again) {
        assert_eq!(bits(a), bits(b));
    }
    Ok(())
}

#[test]
fn sgd_steps_against_the_gradient_by_the_learning_rate() -> Result<()> {
    let (moved, still) = (parameter(&[1., 2.]), parameter(&[3.]));
    let optimizer = Sgd::new(vec![moved.clone(), still.clone()], 0.25)?;
    moved.get().mul(&Tensor::from_slice(&[4f32, 8.], [2])?)?.sum_all()?.backward()?;
    optimizer.step()?;
    assert_eq!((values(&moved.get()), values(&still.get())), (vec![0., 0.], vec![3.]));
    optimizer.zero_grad();
    optimizer.step()?;
    assert_eq!(values(&moved.get()), [0., 0.]);
    Ok(())
}

#[test]
fn arrays_pairs_and_shared_modules_are_modules() -> Result<()> {
    #[derive(Module)]
    struct Net {
        pair: (Linear, Linear),
        layers: [Linear; 2],
        shared: std::sync::Arc<Linear>,
    }
    let linear = || Linear::new(1, 1, false);
    let net = Net { pair: (linear()?, linear()?), layers: [linear()?, linear()?], shared: linear()?.into() };
    let names: Vec<String> = net.named_parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        ["pair.0.weight", "pair.1.weight", "layers.0.weight", "layers.1.weight", "shared.weight"]
    );
    Ok(())
}
