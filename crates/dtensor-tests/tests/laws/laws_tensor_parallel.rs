//! A tensor-parallel model learns as on one device, and a repeated run gives the same bits. Compares losses and
//! gradients of ten steps, on meshes of one to four ranks, with uneven sizes, dropout, tied weights and recomputed
//! activations.

use dtensor::models::{MLPModule, ModelArgs, Transformer};
use dtensor::nn::deep_copy;
use dtensor::optim::Sgd;
use dtensor::parallel::{ColwiseParallel, RowwiseParallel, parallelize_module};
use dtensor::plan;
use dtensor::prelude::*;
use dtensor::testing::spmd;

const STEPS: usize = 10;

/// The losses of all steps, and the gradients of all parameters in each step.
#[derive(PartialEq)]
struct Trace {
    losses: Vec<f32>,
    grads: Vec<Vec<(String, Vec<f32>)>>,
}

/// Returns the full tensor, whether `x` is distributed or not.
fn whole(x: &Tensor) -> Result<Tensor> {
    if x.is_distributed() { x.full_tensor() } else { Ok(x.clone()) }
}

fn train(model: &dyn Module, seed: u64, loss: impl Fn(usize) -> Result<Tensor>) -> Result<Trace> {
    let optimizer = Sgd::new(model.parameters(), 0.1)?;
    let mut trace = Trace { losses: Vec::new(), grads: Vec::new() };
    manual_seed(seed);
    for step in 0..STEPS {
        optimizer.zero_grad();
        let loss = loss(step)?;
        loss.backward()?;
        trace.losses.push(whole(&loss.detach())?.item::<f32>()?);
        let grad = |(name, p): (String, dtensor::nn::Parameter)| {
            let grad = p.grad().unwrap_or_else(|| panic!("{name} has no gradient"));
            assert_eq!(grad.placements(), p.get().placements(), "{name}");
            Ok((name, whole(&grad)?.to_vec::<f32>()?))
        };
        trace.grads.push(model.named_parameters().into_iter().map(grad).collect::<Result<_>>()?);
        optimizer.step()?;
    }
    Ok(trace)
}

impl Trace {
    /// Asserts that this trace matches the one of one device, up to the order of sums.
    fn expect_near(&self, alone: &Trace, what: &str) {
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
        for (step, (a, b)) in self.losses.iter().zip(&alone.losses).enumerate() {
            assert!(near(*a, *b), "{what}: loss of step {step} is {a}, but {b} on one device");
        }
        for (step, (mine, theirs)) in self.grads.iter().zip(&alone.grads).enumerate() {
            assert_eq!(mine.len(), theirs.len(), "{what}");
            for ((name, a), (other, b)) in mine.iter().zip(theirs) {
                assert_eq!((name, a.len()), (other, b.len()), "{what}");
                let worst = a.iter().zip(b).find(|(a, b)| !near(**a, **b));
                assert!(worst.is_none(), "{what}: gradient of {name} in step {step}: {worst:?}");
            }
        }
        assert!(alone.losses[STEPS - 1] < alone.losses[0], "{what}: nothing was learned: {:?}", alone.losses);
    }

    fn expect_same_bits(&self, again: &Trace, what: &str) {
        let bits = |trace: &Trace| -> Vec<u32> {
            let grads = trace.grads.iter().flatten().flat_map(|(_, grad)| grad);
            trace.losses.iter().chain(grads).map(|x| x.to_bits()).collect()
        };
        assert!(bits(self) == bits(again), "{what}: another run gave other bits");
    }
}

fn mlp(world: &World, hidden: usize, sequence: bool) -> Result<()> {
    let mesh = DeviceMesh::new(world, [world.size()], "tp")?;
    let what =
        format!("MLP with {hidden} hidden units on {} ranks, sequence parallel: {sequence}", world.size());
    manual_seed(5);
    let alone = MLPModule::with_sizes(10, hidden, 10, true)?;
    // Seven rows give ranks different numbers of rows.
    let (x, target) = (Tensor::randn([7, 10], DType::F32)?, Tensor::randn([7, 10], DType::F32)?);
    let run = || {
        let model = deep_copy(&alone)?;
        if sequence {
            let plan = plan! {
                "net1" => ColwiseParallel::new().input_layouts(Shard(0)),
                "net2" => RowwiseParallel::new().output_layouts(Shard(0)).use_local_output(false),
            };
            let model = parallelize_module(&model, &mesh, plan)?;
            let x = distribute_tensor(&x, &mesh, [Shard(0)])?;
            let target = distribute_tensor(&target, &mesh, [Shard(0)])?;
            train(model, 1, |_| model.forward(&x)?.mse_loss(&target, Reduction::Mean))
        } else {
            let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
            let model = parallelize_module(&model, &mesh, plan)?;
            train(model, 1, |_| model.forward(&x)?.mse_loss(&target, Reduction::Mean))
        }
    };
    let (first, second) = (run()?, run()?);
    first.expect_same_bits(&second, &what);
    let oracle = train(&alone, 1, |_| alone.forward(&x)?.mse_loss(&target, Reduction::Mean))?;
    first.expect_near(&oracle, &what);
    Ok(())
}

/// Hidden sizes that split evenly, unevenly, and into fewer shards than ranks.
fn mlps(world: &World) -> Result<()> {
    for hidden in [16, 7, 2] {
        for sequence in [false, true] {
            mlp(world, hidden, sequence)?;
        }
    }
    Ok(())
}

#[test]
fn an_mlp_learns_as_on_one_device() {
    spmd(1, |world| mlps(&world));
    spmd(2, |world| mlps(&world));
    spmd(3, |world| mlps(&world));
    spmd(4, |world| mlps(&world));
}

fn transformer(world: &World, args: ModelArgs, seq: usize, sequence: bool) -> Result<()> {
    let mesh = DeviceMesh::new(world, [world.size()], "tp")?;
    let what = format!("{args:?} on {} ranks, {seq} tokens, sequence parallel: {sequence}", world.size());
    manual_seed(11);
    let alone = Transformer::new(&args)?;
    let vocab = args.vocab_size as i64;
    let tokens = Tensor::randint(0, vocab, [3, seq])?;
    let labels = Tensor::randint(0, vocab, [3 * seq])?;
    let loss = |model: &Transformer| {
        let logits = model.forward(&tokens)?;
        logits.reshape([3 * seq, args.vocab_size])?.cross_entropy(&labels, CrossEntropyOptions::default())
    };
    let run = || {
        let model = Transformer::parallelize(deep_copy(&alone)?, &mesh, sequence)?;
        train(&model, 3, |_| loss(&model))
    };
    let (first, second) = (run()?, run()?);
    first.expect_same_bits(&second, &what);
    first.expect_near(&train(&alone, 3, |_| loss(&alone))?, &what);
    Ok(())
}

fn transformers(world: &World) -> Result<()> {
    // The number of ranks must divide the number of heads.
    let heads = if world.size() == 3 { 3 } else { 4 };
    let args = ModelArgs { dim: 4 * heads, n_heads: heads, dropout_p: 0.0, ..ModelArgs::default() };
    for sequence in [false, true] {
        transformer(world, args.clone(), 8, sequence)?;
        let uneven = ModelArgs { vocab_size: 7, max_seq_len: 5, weight_tying: false, ..args.clone() };
        transformer(world, uneven, 5, sequence)?;
        let short = ModelArgs { n_layers: 1, dropout_p: 0.2, vocab_size: 3, ..args.clone() };
        transformer(world, short, 3, sequence)?;
        let again = ModelArgs { dropout_p: 0.1, checkpoint_activations: true, ..args.clone() };
        transformer(world, again, 6, sequence)?;
    }
    Ok(())
}

#[test]
fn a_transformer_learns_as_on_one_device() {
    spmd(1, |world| transformers(&world));
    spmd(2, |world| transformers(&world));
    spmd(3, |world| transformers(&world));
    spmd(4, |world| transformers(&world));
}

/// Trains in half precision. Recomputing activations gives the same bits, the losses are close to those of one device,
/// and the loss decreases.
fn mixed(world: &World, sequence: bool) -> Result<()> {
    let mesh = DeviceMesh::new(world, [world.size()], "tp")?;
    let what = format!("half precision on {} ranks, sequence parallel: {sequence}", world.size());
    let args = ModelArgs { dropout_p: 0.1, ..ModelArgs::default() };
    let tokens = Tensor::randint(0, 8, [4, 7])?;
    let labels = Tensor::randint(0, 8, [28])?;
    let run = |checkpoint_activations: bool, mesh: Option<&DeviceMesh>| -> Result<Trace> {
        manual_seed(17);
        let mut model = Transformer::new(&ModelArgs { checkpoint_activations, ..args.clone() })?;
        if let Some(mesh) = mesh {
            model = Transformer::parallelize(model, mesh, sequence)?;
        }
        let trace = train(&model, 5, |_| {
            let logits = autocast(DType::BF16, || model.forward(&tokens))?;
            assert_eq!(logits.dtype(), DType::F32);
            logits.reshape([28, 8])?.cross_entropy(&labels, CrossEntropyOptions::default())
        })?;
        assert!(model.parameters().iter().all(|p| p.get().dtype() == DType::F32));
        Ok(trace)
    };
    let (kept, again) = (run(false, Some(&mesh))?, run(true, Some(&mesh))?);
    kept.expect_same_bits(&again, &what);
    let alone = run(true, None)?;
    for (step, (a, b)) in kept.losses.iter().zip(&alone.losses).enumerate() {
        assert!((a - b).abs() <= 0.02 * b, "{what}: loss of step {step} is {a}, but {b} on one device");
    }
    assert!(kept.losses[STEPS - 1] < kept.losses[0], "{what}: nothing was learned: {:?}", kept.losses);
    Ok(())
}

#[test]
fn a_transformer_with_recomputed_layers_learns_in_half_precision() {
    spmd(2, |world| mixed(&world, false));
    spmd(4, |world| mixed(&world, true));
}
