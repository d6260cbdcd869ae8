//! Tests of data parallelism: replicas that each see a shard of the batch learn the same as a single device with the full
//! batch. All replicas have the same bits, on threads and under MPI.

use dtensor::comm::record;
use dtensor::models::{MLPModule, ModelArgs, Transformer, TransformerParallel};
use dtensor::nn::{Linear, Parameter, deep_copy};
use dtensor::optim::{AdamW, ClipOptions, clip_grad_norm};
use dtensor::parallel::{DataParallel, DataParallelOptions};
use dtensor::prelude::*;
use dtensor::testing::spmd;

use crate::common::modules::{counted, raises};

const STEPS: usize = 10;

/// Buckets smaller than most parameters here and larger than some, so that buckets are uneven.
const SMALL: DataParallelOptions = DataParallelOptions { bucket_bytes: 700, broadcast: true };

fn whole(x: &Tensor) -> Result<Tensor> {
    if x.is_distributed() { x.full_tensor() } else { Ok(x.clone()) }
}

/// Returns the rows of one replica. Some replicas may have one row more than others.
fn part(x: &Tensor, rank: usize, size: usize) -> Result<Tensor> {
    let rows = x.dims()[0];
    let (start, end) = (rank * rows / size, (rank + 1) * rows / size);
    x.narrow(0, start, end - start)
}

/// The losses of all steps, and the bits of the parameters after the last step.
#[derive(Clone, Debug, PartialEq)]
struct Trace {
    losses: Vec<f32>,
    bits: Vec<u32>,
}

/// Trains on this replica's shard of `rows`. Each step accumulates gradients over `passes` passes. `loss` returns the
/// summed losses of some rows, divided by the number of all rows.
fn train(
    model: &dyn Module,
    replicas: Option<&DataParallel>,
    passes: usize,
    rows: &[Tensor],
    loss: impl Fn(&[Tensor]) -> Result<Tensor>,
    group: Option<&Group>,
) -> Result<Trace> {
    let optimizer = AdamW::new(model.parameters(), 0.01)?;
    let (rank, size) = replicas.map_or((0, 1), |replicas| (replicas.rank(), replicas.size()));
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        optimizer.zero_grad();
        let mut total = 0.0;
        for pass in 0..passes {
            let own = |x: &Tensor| part(&part(x, rank, size)?, pass, passes);
            let loss = loss(&rows.iter().map(own).collect::<Result<Vec<_>>>()?)?.mul(size as f64)?;
            loss.backward()?;
            total += whole(&loss.detach())?.item::<f32>()?;
        }
        if let Some(replicas) = replicas {
            replicas.average_gradients()?;
        }
        clip_grad_norm(&model.parameters(), 1.0, ClipOptions::default())?;
        optimizer.step()?;
        let total = Tensor::scalar(total)?;
        losses.push(group.map_or(Ok(total.clone()), |g| g.all_reduce(&total, ReduceOp::Avg))?.item::<f32>()?);
    }
    let mut bits = Vec::new();
    for parameter in model.parameters() {
        bits.extend(whole(&parameter.get().detach())?.to_vec::<f32>()?.into_iter().map(f32::to_bits));
    }
    Ok(Trace { losses, bits })
}

impl Trace {
    #[track_caller]
    fn expect_near(&self, alone: &Trace) {
        for (step, (a, b)) in self.losses.iter().zip(&alone.losses).enumerate() {
            assert!(
                (a - b).abs() <= 1e-5 * b.abs().max(1.0),
                "loss of step {step} is {a}, but {b} on one device"
            );
        }
        assert!(alone.losses[STEPS - 1] < alone.losses[0], "nothing was learned: {:?}", alone.losses);
    }
}

fn mlp(world: &World, dp: usize, tp: usize, options: DataParallelOptions) -> Result<Trace> {
    let mesh = DeviceMesh::new(world, [dp, tp], ["dp", "tp"])?;
    manual_seed(5);
    let alone = MLPModule::with_sizes(10, 13, 10, true)?;
    // Seven rows cannot be divided evenly among the replicas.
    let (x, y) = (Tensor::rand([7, 10], DType::F32)?, Tensor::rand([7, 10], DType::F32)?);
    // With `broadcast`, the initial values of the other replicas do not matter.
    manual_seed(if options.broadcast { world.rank() as u64 / tp as u64 } else { 5 });
    let model = MLPModule::with_sizes(10, 13, 10, true)?;
    if mesh["dp"].local_rank(())? == 0 {
        model.load_state_dict(&alone.state_dict(), true)?;
    }
    let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
    let model = parallelize_module(model, &mesh["tp"], plan)?;
    let replicas = DataParallel::new(&model, &mesh["dp"], options)?;
    assert_eq!((replicas.rank(), replicas.size()), (mesh["dp"].local_rank(())?, dp));
    let loss = |model: &MLPModule, rows: &[Tensor]| {
        model.forward(&rows[0])?.mse_loss(&rows[1], Reduction::Sum)?.mul(1.0 / 70.0)
    };
    let rows = [x, y];
    let group = mesh["dp"].group(())?;
    let trace = train(&model, Some(&replicas), 1, &rows, |rows| loss(&model, rows), Some(group))?;
    let again = train(&alone, None, 1, &rows, |rows| loss(&alone, rows), None)?;
    trace.expect_near(&again);
    // All replicas have the same bits.
    for other in group.all_gather_object(&trace.bits)? {
        assert!(other == trace.bits, "replicas have come apart");
    }
    Ok(trace)
}

fn transformer(world: &World, dp: usize, tp: usize, passes: usize, loss_parallel_too: bool) -> Result<Trace> {
    let mesh = DeviceMesh::new(world, [dp, tp], ["dp", "tp"])?;
    let args = ModelArgs { dropout_p: 0.0, weight_tying: false, ..ModelArgs::default() };
    manual_seed(11);
    let alone = Transformer::new(&args)?;
    let rows = [Tensor::randint(0, 8, [7, 6])?, Tensor::randint(0, 8, [7, 6])?];
    let options = TransformerParallel { sequence_parallel: true, loss_parallel: loss_parallel_too };
    let model = Transformer::parallelize(deep_copy(&alone)?, &mesh["tp"], options)?;
    let replicas = DataParallel::new(&model, &mesh["dp"], SMALL)?;
    let loss = |model: &Transformer, rows: &[Tensor]| {
        let n = rows[0].numel();
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..CrossEntropyOptions::default() };
        let loss = || {
            let scores = model.forward(&rows[0])?.reshape([n, 8])?;
            assert_eq!(
                scores.is_distributed(),
                loss_parallel_too && model.output.weight.get().is_distributed()
            );
            scores.cross_entropy(&rows[1].flatten_all()?, options)
        };
        if loss_parallel_too { loss_parallel(loss) } else { loss() }?.mul(1.0 / 42.0)
    };
    let group = mesh["dp"].group(())?;
    let trace = train(&model, Some(&replicas), passes, &rows, |rows| loss(&model, rows), Some(group))?;
    let again = train(&alone, None, 1, &rows, |rows| loss(&alone, rows), None)?;
    trace.expect_near(&again);
    for other in group.all_gather_object(&trace.bits)? {
        assert!(other == trace.bits, "replicas have come apart");
    }
    Ok(trace)
}

#[test]
fn a_network_learns_the_same_as_on_a_single_device() {
    for (dp, tp) in [(2, 2), (3, 1), (1, 2), (4, 1)] {
        for bucket_bytes in [DataParallelOptions::default().bucket_bytes, 700, 1, 0] {
            for broadcast in [true, false] {
                let options = DataParallelOptions { bucket_bytes, broadcast };
                let here = launch(dp * tp, |world| mlp(&world, dp, tp, options)).unwrap();
                assert!(here.iter().all(|trace| *trace == here[0]));
            }
        }
    }
    let on_threads = |dp, tp| launch(dp * tp, |world| mlp(&world, dp, tp, SMALL)).unwrap();
    let two = on_threads(2, 2);
    spmd(4, |world| {
        // Ranks in processes get the same bits as ranks on threads.
        assert!(mlp(&world, 2, 2, SMALL)? == two[world.rank()]);
        Ok(())
    });
    let three = on_threads(3, 1);
    spmd(3, |world| {
        assert!(mlp(&world, 3, 1, SMALL)? == three[world.rank()]);
        Ok(())
    });
}

#[test]
fn a_transformer_learns_the_same_as_on_a_single_device() {
    for (passes, loss_parallel) in [(1, false), (2, false), (2, true)] {
        let here = launch(4, |world| transformer(&world, 2, 2, passes, loss_parallel)).unwrap();
        assert!(here.iter().all(|trace| *trace == here[0]));
    }
    let here = launch(4, |world| transformer(&world, 2, 2, 2, true)).unwrap();
    spmd(4, |world| {
        assert!(transformer(&world, 2, 2, 2, true)? == here[world.rank()]);
        Ok(())
    });
    spmd(3, |world| transformer(&world, 3, 1, 1, false).map(drop));
}

/// Each bucket needs one collective, which records the line of the caller.
#[test]
fn each_bucket_needs_one_collective() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        let model = Linear::new(10, 10, true)?;
        let ways = [(usize::MAX, "AR 1", 111 + 1), (400, "AR 2", 101 + 11), (0, "AR 2", 101 + 11)];
        for (bucket_bytes, expected, elements) in ways {
            let options = DataParallelOptions { bucket_bytes, broadcast: true };
            let (replicas, calls) = record(|| DataParallel::new(&model, &mesh, options));
            let replicas = replicas?;
            let broadcasts = calls.iter().filter(|call| call.collective.name() == "broadcast").count();
            assert_eq!(broadcasts, expected[3..].parse::<usize>().unwrap(), "{calls:?}");
            model.forward(&Tensor::ones([3, 10], DType::F32)?)?.sum_all()?.backward()?;
            let (_, count) = counted(|| replicas.average_gradients())?;
            assert_eq!(count, expected);
            let line = line!() + 1;
            let mode = CommDebugMode::record(|| replicas.average_gradients())?;
            for call in mode.collectives() {
                assert!(call.file.ends_with("data_parallel.rs") && call.line == line, "{call}");
                assert_eq!((&*call.group, call.implicit), ("dp", false));
            }
            let moved: usize = mode.collectives().iter().map(|call| call.shape.numel()).sum();
            assert_eq!(moved, elements);
        }
        Ok(())
    });
}

/// Covers parameters with gradients on some replicas, on none, without elements, and listed twice.
#[test]
fn missing_gradients_count_as_zeros() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "dp")?;
        let make = |n: usize| Parameter::new(&Tensor::ones([n], DType::F32)?);
        let [some, none, empty, half] = [make(2)?, make(3)?, make(0)?, make(1)?];
        half.replace(&Tensor::ones([4], DType::BF16)?)?;
        let frozen = Parameter::frozen(&Tensor::ones([2], DType::F32)?);
        let all = vec![some.clone(), none.clone(), empty.clone(), half.clone(), some.clone(), frozen.clone()];
        let replicas = DataParallel::new(&all, &mesh, SMALL)?;
        if world.rank() == 1 {
            some.get().mul(6.0)?.sum_all()?.backward()?;
        }
        empty.get().sum_all()?.backward()?;
        half.get().mul(world.rank() as f64)?.sum_all()?.backward()?;
        replicas.average_gradients()?;
        assert_eq!(some.grad().unwrap().to_vec::<f32>()?, [2.0; 2]);
        assert!(none.grad().is_none() && frozen.grad().is_none());
        assert_eq!(empty.grad().unwrap().dims(), [0]);
        assert_eq!(half.grad().unwrap().to_f64_vec()?, [1.0; 4]);
        // All replicas now have the average, so averaging again changes nothing.
        replicas.average_gradients()?;
        assert_eq!(some.grad().unwrap().to_vec::<f32>()?, [2.0; 2]);
        // A parameter that requires a gradient only later is averaged from then on.
        frozen.set_requires_grad(true)?;
        frozen.get().mul(world.rank() as f64)?.sum_all()?.backward()?;
        replicas.average_gradients()?;
        assert_eq!(frozen.grad().unwrap().to_vec::<f32>()?, [1.0; 2]);
        Ok(())
    });
}

#[test]
fn different_replicas_are_an_error_on_all_ranks() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        let options = DataParallelOptions::default();
        let size = 3 + world.rank();
        let bad = Linear::new(2, size, true)?;
        let error = raises(DataParallel::new(&bad, &mesh, options), "replica 1 has parameter `weight`");
        assert!(error.to_string().contains("[4, 2]") && error.to_string().contains("[3, 2]"), "{error}");
        let bad = Linear::new(2, 3, world.rank() == 0)?;
        raises(DataParallel::new(&bad, &mesh, options), "has nothing where replica 0 has parameter `bias`");
        let bad = Linear::new(2, 3, true)?;
        if world.rank() == 1 {
            bad.to_dtype(DType::F64)?;
        }
        raises(DataParallel::new(&bad, &mesh, options), "f64");
        // For parameters on the replicas' own mesh, backward already reduces the gradients.
        let bad = parallelize_module(Linear::new(2, 4, true)?, &mesh, ColwiseParallel::new())?;
        raises(DataParallel::new(&bad, &mesh, options), "several of the replicas");
        // The group still works.
        DataParallel::new(&Linear::new(2, 4, true)?, &mesh, options)?;
        Ok(())
    });
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let model = Linear::new(4, 4, false)?;
        let placement = [Shard(0), Shard(1)][mesh["dp"].local_rank(())?];
        model.register_parameter(
            "weight",
            &distribute_tensor(&model.weight.get(), &mesh["tp"], [placement])?,
        )?;
        raises(DataParallel::new(&model, &mesh["dp"], DataParallelOptions::default()), "S(1)");
        raises(DataParallel::new(&model, &mesh, DataParallelOptions::default()), "dim");
        Ok(())
    });
}
