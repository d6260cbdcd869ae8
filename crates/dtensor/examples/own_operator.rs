//! A user-defined operator: a shape rule, a sharding rule, a kernel and a gradient. The validator proves its sharding
//! rule; then it runs on a mesh like any other operator.
//!
//! `cargo run --example own_operator`

use dtensor::Array;
use dtensor::op::{Arrays, Backward, Bits, Grads, Here, Meta, Metas, Op, Rule, Saves, apply, grads};
use dtensor::prelude::*;
use dtensor::testing::validate;

/// Leaky ReLU: multiplies negative elements by `slope`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Leaky {
    slope: Bits,
}

impl Op for Leaky {
    fn name(&self) -> &'static str {
        "leaky"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let leak = |v: &f64| if *v < 0.0 { self.slope.get() * v } else { *v };
        let values = x[0].with_host_slice(|x: &[f64]| x.iter().map(leak).collect())?;
        Ok([Array::from_vec(values, x[0].dims())?].into())
    }
    fn saves(&self) -> Saves {
        Saves::INPUTS
    }
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dx = || cx.input(0)?.lt(0.0)?.where_(&cx.dy()?.mul(self.slope.get())?, &cx.dy()?);
        Ok(grads![cx.when(0, dx)?])
    }
}

pub(crate) fn main() -> Result<()> {
    let leaky = Leaky { slope: Bits::new(0.25) };
    let x = Tensor::arange(0, 15, 1, DType::F64)?.sub(7)?.view([5, 3])?.requires_grad_(true)?;
    // Runs forward and backward on every kind of shard. This needs no ranks.
    let (result, found) = validate(|| apply(leaky.clone(), &[&x])?.sum_all()?.backward());
    result?;
    assert!(found.unsound.is_empty(), "{found}");
    println!("{found}");
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let sharded = distribute_tensor(&x.detach(), &mesh, [Shard(0), Shard(1)])?.requires_grad_(true)?;
        let y = apply(leaky.clone(), &[&sharded])?;
        assert_eq!(y.placements(), [Shard(0), Shard(1)]);
        y.sum_all()?.backward()?;
        let (grad, expected) = (sharded.grad().expect("a leaf"), x.grad().expect("a leaf"));
        assert_eq!(grad.full_tensor()?.to_vec::<f64>()?, expected.to_vec::<f64>()?);
        Ok(())
    })?;
    Ok(())
}
