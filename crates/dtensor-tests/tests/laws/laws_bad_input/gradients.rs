//! Impossible gradients, and operators that break their own rules.

use dtensor::nn::{Linear, Parameter};
use dtensor::op::{Arrays, Aside, Backward, Grads, Here, Meta, Metas, Op, Rule, apply};
use dtensor::{Array, BackwardOptions, DType, Error, Result, Tensor, grad};

use super::{ints, meta, zeros};
use crate::common::refused::refused;

#[test]
fn impossible_gradients_are_an_error_and_change_nothing() -> Result<()> {
    let x = Tensor::ones([2, 3], DType::F64)?.requires_grad_(true)?;
    let y = x.mul(2.0)?;
    refused(y.backward(), &["grad can be implicitly created only for scalar outputs", "[2, 3]"]);
    refused(zeros([1]).backward(), &["does not require grad"]);
    refused(x.detach().sum_all()?.backward(), &["does not require grad"]);
    let with = |gradient| BackwardOptions { gradient: Some(gradient), ..Default::default() };
    let wrong = Tensor::ones([3, 2], DType::F64)?;
    refused(y.backward_with(with(wrong)), &["backward", "[2, 3]", "[3, 2]"]);
    refused(y.backward_with(with(zeros([2, 3]))), &["backward", "f64", "f32"]);
    refused(y.backward_with(with(Tensor::meta_of([2, 3], DType::F64)?)), &["device", "cpu", "meta"]);
    refused(
        grad(&y.sum_all()?, &[&zeros([1])], Default::default()),
        &["grad", "input 0", "not require grad"],
    );
    assert!(x.grad().is_none());
    // None of these errors has freed the graph.
    y.backward_with(with(Tensor::ones([2, 3], DType::F64)?))?;
    assert_eq!(x.grad().unwrap().to_vec::<f64>()?, [2.; 6]);

    let z = x.exp()?.sum_all()?;
    z.backward()?;
    let before = x.grad().unwrap().to_vec::<f64>()?;
    refused(z.backward(), &["second time", "retain"]);
    assert_eq!(x.grad().unwrap().to_vec::<f64>()?, before);

    refused(ints([2]).requires_grad_(true), &["requires_grad_", "i64", "floating point"]);
    refused(y.requires_grad_(false), &["requires_grad_", "leaf", "detach"]);
    refused(x.set_grad(Some(zeros([2]))), &["set_grad", "[2, 3]", "[2]"]);
    refused(x.set_grad(Some(zeros([2, 3]))), &["set_grad", "f64", "f32"]);
    refused(x.set_grad(Some(Tensor::meta_of([2, 3], DType::F64)?)), &["set_grad", "device", "cpu", "meta"]);
    refused(y.set_grad(None), &["set_grad", "leaf"]);
    refused(zeros([1]).set_grad(None), &["set_grad", "leaf"]);
    assert_eq!(x.grad().unwrap().to_vec::<f64>()?, before);

    let p = Parameter::new(&zeros([2]))?;
    refused(p.set(&zeros([3])), &["set", "[2]", "[3]"]);
    refused(p.set(&ints([2])), &["set", "f32", "i64"]);
    refused(p.set(&meta([2])), &["set", "device", "cpu", "meta"]);
    assert_eq!(p.get().to_vec::<f32>()?, [0., 0.]);
    refused(Parameter::new(&ints([2])), &["requires_grad_", "i64"]);
    refused(Linear::new(3, 2, true)?.forward(zeros([2, 4])), &["linear", "[2, 4]", "[2, 3]"]);
    Ok(())
}

/// An operator whose gradient rule is wrong; each variant is wrong in another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wrong {
    Shape,
    DType,
    TooMany,
    None,
    Unsaved,
    NoRule,
}

impl Op for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok([x[0].clone()].into())
    }
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        Ok(match self {
            Wrong::Shape => vec![Some(dy.sum_all()?)],
            Wrong::DType => vec![Some(dy.to_dtype(DType::F64)?)],
            Wrong::TooMany => vec![Some(dy.clone()), Some(dy)],
            Wrong::None => vec![],
            Wrong::Unsaved => vec![Some(cx.input(0)?)],
            Wrong::NoRule => {
                return Err(Error::Argument { op: "wrong", message: "no gradient rule".into() });
            }
        }
        .into_iter()
        .collect())
    }
}

#[test]
fn a_wrong_gradient_rule_is_an_error_that_names_the_operator() -> Result<()> {
    for (op, words) in [
        (Wrong::Shape, &["f32 []", "input 0", "f32 [2]"][..]),
        (Wrong::DType, &["f64 [2]", "input 0", "f32 [2]"]),
        (Wrong::TooMany, &["2 gradients", "1 inputs"]),
        (Wrong::None, &["0 gradients", "1 inputs"]),
        (Wrong::Unsaved, &["input 0", "not saved"]),
        (Wrong::NoRule, &["no gradient rule"]),
    ] {
        let x = zeros([2]).requires_grad_(true)?;
        let y = apply(op, &[&x])?.sum_all()?;
        refused(y.backward(), &[&["wrong"], words].concat());
        assert!(x.grad().is_none());
    }
    Ok(())
}

type Lie = fn(&Array) -> Result<Vec<Array>>;

/// An operator whose kernel does not return what its shape rule promises.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Liar(Aside<Lie>);

impl Op for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok((self.0.0)(x[0])?.into_iter().collect())
    }
}

#[test]
fn a_kernel_that_contradicts_its_shape_rule_is_an_error() -> Result<()> {
    let x = zeros([2]);
    refused(
        apply(Liar(Aside(|_| Ok(vec![Array::from_vec(vec![0f32; 3], &[3])?]))), &[&x]),
        &["liar", "[2]", "[3]"],
    );
    refused(
        apply(Liar(Aside(|_| Ok(vec![Array::from_vec(vec![0f64; 2], &[2])?]))), &[&x]),
        &["liar", "f32", "f64"],
    );
    refused(apply(Liar(Aside(|_| Ok(vec![]))), &[&x]), &["liar", "1", "0"]);
    refused(apply(Liar(Aside(|x| Ok(vec![x.clone(), x.clone()]))), &[&x]), &["liar", "1", "2"]);
    assert!(apply(Liar(Aside(|x| Ok(vec![x.clone()]))), &[&x]).is_ok());
    Ok(())
}
