//! A model with dropout learns as on one device: the same elements are dropped in every layout.

use dtensor::comm::World;
use dtensor::nn::{self, Dropout, Linear, Module, deep_copy, forward};
use dtensor::optim::Sgd;
use dtensor::plan;
use dtensor::prelude::*;
use dtensor::testing::spmd;

use super::bits::bits;

const STEPS: usize = 12;

/// Two layers, with dropout before each and after the last.
#[derive(Clone, Debug, Module)]
struct Mlp {
    first: Dropout,
    net1: Linear,
    gelu: nn::Gelu,
    middle: Dropout,
    net2: Linear,
    last: Dropout,
}

#[forward]
impl Mlp {
    /// Returns the outputs of all three dropouts. The last one is the result.
    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let first = self.first.forward(x)?;
        let middle = self.middle.forward(&self.gelu.forward(&self.net1.forward(&first)?)?)?;
        let last = self.last.forward(&self.net2.forward(&middle)?)?;
        Ok((first, middle, last))
    }
}

impl Mlp {
    fn new(hidden: usize) -> Result<Self> {
        Ok(Mlp {
            first: Dropout::new(0.1)?,
            net1: Linear::new(10, hidden, true)?,
            gelu: nn::Gelu::new(dtensor::Gelu::Exact),
            middle: Dropout::new(0.4)?,
            net2: Linear::new(hidden, 5, true)?,
            last: Dropout::new(0.2)?,
        })
    }
}

/// The losses of all steps, and the masks of the dropouts in each step.
struct Trace {
    losses: Vec<f32>,
    masks: Vec<Vec<u64>>,
}

fn whole(x: &Tensor) -> Result<Tensor> {
    if x.is_distributed() { x.full_tensor() } else { Ok(x.clone()) }
}

fn train(model: &Mlp, x: &Tensor, target: &Tensor) -> Result<Trace> {
    let optimizer = Sgd::new(model.parameters(), 0.5)?;
    let mut trace = Trace { losses: Vec::new(), masks: Vec::new() };
    manual_seed(21);
    for _ in 0..STEPS {
        optimizer.zero_grad();
        let (first, middle, last) = model.forward(x)?;
        let loss = last.mse_loss(target, Reduction::Mean)?;
        loss.backward()?;
        optimizer.step()?;
        trace.losses.push(whole(&loss.detach())?.item::<f32>()?);
        for dropped in [first, middle, last] {
            trace.masks.push(bits(&whole(&dropped.detach().ne(0.0)?)?)?);
        }
    }
    Ok(trace)
}

/// Trains the model on meshes in several layouts: weights replicated or sharded along outputs or inputs, data
/// replicated or sharded.
fn everywhere(world: &World, hidden: usize) -> Result<()> {
    manual_seed(20);
    let alone = Mlp::new(hidden)?;
    // Seven rows give ranks different numbers of rows.
    let x = Tensor::randn([7, 10], DType::F32)?;
    let target = x.narrow(1, 2, 5)?.contiguous()?;
    let start = deep_copy(&alone)?;
    let oracle = train(&alone, &x, &target)?;
    let third = |i: usize| oracle.losses[i * STEPS / 3..(i + 1) * STEPS / 3].iter().sum::<f32>();
    assert!(third(2) < 0.9 * third(0), "nothing was learned: {:?}", oracle.losses);
    let n = world.size();
    let mut meshes = vec![DeviceMesh::new(world, [n], "tp")?];
    if n == 4 {
        meshes.push(DeviceMesh::new(world, [2, 2], ["dp", "tp"])?);
    }
    for mesh in &meshes {
        let cut = |along_tp: Placement| {
            let mut list = vec![Replicate; mesh.ndim()];
            list[mesh.ndim() - 1] = along_tp;
            list
        };
        // Placements of weights and biases along "tp".
        for (what, parts) in [
            ("whole", [Replicate; 4]),
            ("columns and rows", [Shard(0), Shard(0), Shard(1), Replicate]),
            ("rows and columns", [Shard(1), Replicate, Shard(0), Shard(0)]),
        ] {
            for data in [Replicate, Shard(0)] {
                let model = deep_copy(&start)?;
                let [w1, b1, w2, b2] = parts;
                for (parameter, placement) in model.parameters().iter().zip([w1, b1, w2, b2]) {
                    parameter.replace(&distribute_tensor(
                        &parameter.get().detach(),
                        mesh,
                        cut(placement),
                    )?)?;
                }
                let mut list = vec![Replicate; mesh.ndim()];
                list[0] = data;
                let (x, target) =
                    (distribute_tensor(&x, mesh, &list[..])?, distribute_tensor(&target, mesh, &list[..])?);
                let trace = train(&model, &x, &target)?;
                let what = format!("{hidden} hidden units, {what}, data {data} on {mesh}");
                expect_alike(&trace, &oracle, &what);
            }
        }
    }
    styles(&start, &meshes[0], (&x, &target), &oracle)
}

/// Trains the model as parallelized by a plan.
fn styles(start: &Mlp, mesh: &DeviceMesh, (x, target): (&Tensor, &Tensor), oracle: &Trace) -> Result<()> {
    let plan = plan! {
        "net1" => ColwiseParallel::new().use_local_output(false),
        "net2" => RowwiseParallel::new().use_local_output(false),
    };
    let model = deep_copy(start)?;
    let model = parallelize_module(&model, mesh, plan)?;
    let laid = |x: &Tensor| distribute_tensor(x, mesh, [Replicate]);
    expect_alike(&train(model, &laid(x)?, &laid(target)?)?, oracle, &format!("a plan on {mesh}"));
    Ok(())
}

#[track_caller]
fn expect_alike(trace: &Trace, oracle: &Trace, what: &str) {
    assert_eq!(trace.masks, oracle.masks, "{what}: other elements were dropped");
    for (step, (a, b)) in trace.losses.iter().zip(&oracle.losses).enumerate() {
        assert!(
            (a - b).abs() <= 1e-5 * b.abs().max(1.0),
            "{what}: loss of step {step} is {a}, but {b} on one device"
        );
    }
}

/// Hidden sizes that split evenly, unevenly, and into fewer shards than ranks.
fn all_sizes(world: &World) -> Result<()> {
    [16, 7, 3].into_iter().try_for_each(|hidden| everywhere(world, hidden))
}

#[test]
fn a_model_with_dropout_learns_as_on_one_device() {
    spmd(1, |world| all_sizes(&world));
    spmd(2, |world| all_sizes(&world));
    spmd(3, |world| all_sizes(&world));
    spmd(4, |world| all_sizes(&world));
}
