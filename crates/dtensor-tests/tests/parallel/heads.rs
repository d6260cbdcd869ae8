//! A model with heads runs under every plan as it was written for one device: it names the size of a head, and its mask
//! is an attribute.

use dtensor::INFER;
use dtensor::nn::{Base, Linear};
use dtensor::prelude::*;
use dtensor::testing::spmd;

module! {
    struct Attention(width: usize, heads: usize) {
        q: Linear = Linear::new(width, width, true),
        k: Linear = Linear::new(width, width, true),
        v: Linear = Linear::new(width, width, true),
        out: Linear = Linear::new(width, width, true),
        head_size: usize = width / heads,
        base: Base = Base::new(),
    }
}

#[forward]
impl Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let heads =
            |layer: &Linear| layer.forward(x)?.unflatten(-1, [INFER, self.head_size])?.transpose(1, 2);
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let (q, k, v) = (heads(&self.q)?, heads(&self.k)?, heads(&self.v)?);
        let attended = q.scaled_dot_product_attention(&k, &v, causal)?;
        self.out.forward(attended.transpose(1, 2)?.flatten(2, 3))
    }
}

fn full(x: &Tensor) -> Result<Vec<f64>> {
    let x = x.detach();
    if x.is_distributed() { x.full_tensor()? } else { x }.to_f64_vec()
}

fn near(a: &[f64], b: &[f64], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() < 1e-5, "{what}: element {i} is {a}, but {b} on one device");
    }
}

/// Returns this rank's shard.
fn shard_of(x: &Tensor, mesh: &DeviceMesh, placement: Placement) -> Result<Tensor> {
    distribute_tensor(&x.detach(), mesh, placement)?.to_local()
}

/// Compares the output and all gradients with one device. `shard` is the placement of the input and the output.
fn check(mesh: &DeviceMesh, heads: usize, plan: &ParallelPlan, shard: Placement, what: &str) -> Result<()> {
    let size = 2;
    manual_seed(3);
    let single = Attention::new(heads * size, heads)?;
    let model = parallelize_module(deep_copy(&single)?, mesh, plan.clone())?;
    let x = Tensor::randn([2, 12, heads * size], DType::F32)?.requires_grad_(true)?;
    let seen = shard_of(&x, mesh, shard)?;
    let (expected, y) = (single.forward(&x)?, model.forward(&seen)?);
    let whole = if y.is_distributed() { y.clone() } else { Tensor::from_local(&y, mesh, shard)? };
    near(&full(&whole)?, &full(&expected)?, what);
    let weights = Tensor::rand(expected.shape(), DType::F32)?;
    (&expected * &weights)?.sum_all()?.backward()?;
    let weights = if y.is_distributed() {
        distribute_tensor(&weights, mesh, shard)?
    } else {
        shard_of(&weights, mesh, shard)?
    };
    (&y * weights)?.sum_all()?.backward()?;
    for ((name, one), (_, other)) in single.named_parameters().iter().zip(model.named_parameters()) {
        near(&full(&other.grad().unwrap())?, &full(&one.grad().unwrap())?, &format!("{what}: {name}"));
    }
    Ok(())
}

#[test]
fn a_model_with_heads_runs_under_every_plan() {
    for (ranks, heads) in [(1, 2), (2, 4), (4, 4), (3, 6), (4, 6)] {
        spmd(ranks, |world| {
            let mesh = DeviceMesh::new(&world, [ranks], "tp")?;
            let plans = |local: bool, cut: Placement| -> Result<ParallelPlan> {
                let out = RowwiseParallel::new().output_layouts(cut);
                let plan = plan! {
                    "[qkv]" => ColwiseParallel::new().use_local_output(local),
                    "out" => out.use_local_output(local),
                };
                match cut {
                    Shard(_) => Ok(plan.with("", PrepareModuleInput::new(cut, Replicate)?)),
                    _ => Ok(plan),
                }
            };
            for cut in [Replicate, Shard(1)] {
                for local in [true, false] {
                    let what = format!("{heads} heads on {ranks} ranks, {cut}, local {local}");
                    let plan = plans(local, cut)?;
                    // Six heads of size two on four ranks are three columns each: a distributed tensor is redistributed, and a
                    // local one is an error.
                    match check(&mesh, heads, &plan, cut, &what) {
                        Err(error) if local && heads % ranks != 0 => {
                            let error = error.to_string();
                            assert!(
                                error.contains("unflatten: dim 2") && error.contains("shape [3]"),
                                "{error}"
                            );
                        }
                        result => {
                            result?;
                            assert!(!local || heads % ranks == 0, "{what}");
                        }
                    }
                }
            }
            Ok(())
        });
    }
}
