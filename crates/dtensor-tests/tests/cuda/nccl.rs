//! Collectives through NCCL: between ranks that have a GPU each and, with `DTENSOR_NCCL=force`, of one rank.
//!
//! The emulator has two GPUs and an NCCL for threads and processes. With one GPU, only the tests of one rank find something to do.

use std::time::{Duration, Instant};

use dtensor::comm::{Cause, Departure, Failure, Fault, Group, World, WorldKind, launch_each};
use dtensor::models::{ModelArgs, Transformer};
use dtensor::optim::AdamW;
use dtensor::parallel::{FullyShardOptions, fully_shard};
use dtensor::prelude::*;
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{Array, cuda, on_device};
use dtensor_array::cuda::nccl;

/// The longest delay that a busy machine may add.
const SLACK: Duration = Duration::from_secs(20);

/// Returns a GPU for each of `n` ranks, or `None` if there are not as many, or no NCCL.
fn gpu_each(rank: usize, n: usize) -> Option<Device> {
    let found = nccl::check_available().is_ok() && cuda::device_count() >= n;
    found.then_some(Device::Cuda(rank))
}

/// Asserts that the group has communicators, so that its collectives went through NCCL.
fn assert_used(group: &Group, device: Device) {
    let text = format!("Communicator({device} of {} ranks)", group.size());
    assert!(format!("{group:?}").contains(&text), "{text} is not in {group:?}");
}

/// Returns small integers, which any order adds exactly in every dtype.
fn numbers(shape: &[usize], dtype: DType, seed: usize) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let x: Vec<i64> = (0..n).map(|i| ((i * 7 + seed * 3 + i / 5) % 4) as i64).collect();
    on_device(Device::Cpu, || Tensor::from_vec(x, shape)?.to_dtype(dtype))
}

/// Runs a collective in main memory and on the GPU, and compares the results.
fn same(gpu: Device, x: &Tensor, run: impl Fn(&Tensor) -> Result<Vec<Tensor>>) -> Result<()> {
    let (here, there) = (run(x)?, run(&x.to_device(gpu)?)?);
    assert_eq!(here.len(), there.len());
    for (here, there) in here.iter().zip(there) {
        assert_eq!((here.device(), there.device()), (Device::Cpu, gpu));
        assert_eq!((here.dtype(), here.dims()), (there.dtype(), there.dims()));
        assert_eq!(here.to_f64_vec()?, there.to_f64_vec()?);
    }
    Ok(())
}

/// Compares every collective, on values whose sizes are even, uneven, smaller than the group, and zero.
fn every_collective(group: &Group, gpu: Device, dtype: DType) -> Result<()> {
    let (n, me) = (group.size(), group.rank());
    let one = |x: Tensor| vec![x];
    for rows in [0, 1, n, 3 * n, 1000 * n] {
        let x = numbers(&[rows, 2 * n], dtype, me)?;
        for op in ReduceOp::ALL.into_iter().filter(|&op| op != ReduceOp::Avg || !dtype.is_int()) {
            same(gpu, &x, |x| Ok(one(group.all_reduce(x, op)?)))?;
            same(gpu, &x.transpose(0, 1)?, |x| Ok(one(group.all_reduce(x, op)?)))?;
            same(gpu, &x, |x| Ok(group.reduce(x, op, n - 1)?.into_iter().collect()))?;
            same(gpu, &x, |x| Ok(one(group.reduce_scatter_tensor(x, op, 1)?)))?;
            let uneven: Vec<usize> = (0..n).map(|i| if i == 0 { rows } else { 0 }).collect();
            same(gpu, &x, |x| Ok(one(group.reduce_scatter_uneven(x, op, 0, &uneven)?)))?;
            let uneven: Vec<usize> = (0..n).map(|i| if i + 1 == n { n + 1 } else { 1 }).collect();
            same(gpu, &x, |x| Ok(one(group.reduce_scatter_uneven(x, op, 1, &uneven)?)))?;
            same(gpu, &x, |x| {
                let others = [x.clone(), x.narrow(1, 0, n)?, x.reshape([2 * n * rows])?];
                let mut all = group.all_reduce_coalesced(&others.each_ref(), op)?;
                all.extend(group.reduce_scatter_coalesced(&[&x.transpose(0, 1)?, &x.transpose(0, 1)?], op)?);
                Ok(all)
            })?;
        }
        for dim in [0, 1] {
            same(gpu, &x, |x| Ok(one(group.all_gather_tensor(x, dim)?)))?;
        }
        same(gpu, &x, |x| group.all_gather_coalesced(&[x, &x.transpose(0, 1)?, x]))?;
        for root in 0..n {
            same(gpu, &x, |x| Ok(one(group.broadcast(x, root)?)))?;
            same(gpu, &x, |x| Ok(group.gather(x, root)?.unwrap_or_default()))?;
        }
        let to: Vec<usize> = (0..n).map(|i| (i + 1) % n).collect();
        same(gpu, &x, |x| Ok(one(group.permute_tensor(x, &to)?)))?;
        let even = vec![2; n];
        same(gpu, &x, |x| Ok(one(group.all_to_all(x, 1, &even, 0, &vec![rows; n])?)))?;
        same(gpu, &x, |x| Ok(one(group.all_to_all(x, 1, &even, 1, &even)?)))?;
        // Each rank has as many rows as its number.
        let own = numbers(&[me, 3], dtype, me)?;
        let sizes: Vec<usize> = (0..n).collect();
        same(gpu, &own, |x| Ok(one(group.all_gather_uneven(x, 0, &sizes)?)))?;
        same(gpu, &own.transpose(0, 1)?, |x| Ok(one(group.all_gather_uneven(x, 1, &sizes)?)))?;
        same(gpu, &own, |x| Ok(group.gather(x, 0)?.unwrap_or_default()))?;
        let send: Vec<usize> = (0..n).map(|to| if to == me { rows } else { 0 }).collect();
        same(gpu, &x, |x| Ok(one(group.all_to_all(x, 0, &send, 0, &send)?)))?;
        // Only the source has values, so the others name no device: the result is where they used the group.
        let pieces: Vec<Tensor> =
            (0..n).map(|i| numbers(&[i, rows], dtype, i)?.to_device(gpu)).collect::<Result<_>>()?;
        let piece = group.scatter((me == 0).then_some(&pieces[..]), 0)?;
        assert_eq!((piece.device(), piece.to_f64_vec()?), (gpu, pieces[me].to_f64_vec()?));
    }
    Ok(())
}

#[test]
fn every_collective_between_gpus() {
    spmd(2, |world| {
        let (group, rank) = (world.group(), world.rank());
        let Some(gpu) = gpu_each(rank, 2) else { return Ok(()) };
        for dtype in DType::ALL {
            every_collective(group, gpu, dtype)?;
        }
        assert_used(group, gpu);
        // A group of its own communicators, in another order.
        let turned = world.new_group(&[1, 0])?.expect("both ranks are members");
        every_collective(&turned, gpu, DType::BF16)?;
        assert_used(&turned, gpu);
        // Without a check of descriptors, the first collective on GPUs decides.
        #[cfg(feature = "mpi")]
        if world.kind() == WorldKind::Mpi {
            let unchecked = World::mpi_with(dtensor::comm::MpiOptions::unchecked())?;
            every_collective(unchecked.group(), gpu, DType::F32)?;
            assert_used(unchecked.group(), gpu);
        }
        Ok(())
    });
}

#[test]
fn messages_between_gpus() {
    spmd(2, |world| {
        let (group, rank) = (world.group(), world.rank());
        let Some(gpu) = gpu_each(rank, 2) else { return Ok(()) };
        // A rank's GPU is known from its collectives.
        group.all_reduce(&numbers(&[1], DType::F32, 0)?.to_device(gpu)?, ReduceOp::Sum)?;
        let values = |tag: usize| numbers(&[tag, 5], DType::F32, tag)?.to_device(gpu)?.transpose(0, 1);
        if rank == 0 {
            for tag in [0, 1, 700] {
                group.send(&values(tag)?, 1, tag as u32)?;
            }
            return Ok(());
        }
        // In another order than they were sent.
        for tag in [700, 0, 1] {
            let x: Tensor = group.recv(0, tag as u32)?;
            assert_eq!((x.dims(), x.to_f64_vec()?), (&[5, tag][..], values(tag)?.to_f64_vec()?));
            // Over MPI, messages go through main memory, and arrive on the GPU with the sender's number.
            assert!(x.device() == gpu || world.kind() == WorldKind::Mpi);
        }
        Ok(())
    });
}

#[test]
fn values_in_main_memory_and_on_gpus_take_turns() {
    spmd(2, |world| {
        let (group, rank) = (world.group(), world.rank());
        let Some(gpu) = gpu_each(rank, 2) else { return Ok(()) };
        let x = numbers(&[5, 2], DType::F32, rank)?;
        let want = group.all_reduce(&x, ReduceOp::Sum)?.to_f64_vec()?;
        // Only one rank has its value on a GPU: it goes through main memory.
        let mixed = if rank == 0 { x.to_device(gpu)? } else { x.clone() };
        let sum = group.all_reduce(&mixed, ReduceOp::Sum)?;
        assert_eq!(sum.to_f64_vec()?, want);
        // Several in progress, waited for in another order than they were started.
        let there = x.to_device(gpu)?;
        let mut all = Vec::new();
        for i in 0..10 {
            all.push(group.all_reduce_async(if i % 3 == 1 { &x } else { &there }, ReduceOp::Sum)?);
        }
        for (i, pending) in all.into_iter().enumerate().rev() {
            let sum = pending.wait()?;
            let device = if i % 3 == 1 { Device::Cpu } else { gpu };
            assert_eq!((sum.device(), sum.to_f64_vec()?), (device, want.clone()));
        }
        assert_used(group, gpu);
        Ok(())
    });
}

/// Trains a sharded model, and returns the losses and the parameters.
fn train(world: &World, device: Device, fsdp: bool) -> Result<Vec<f64>> {
    on_device(device, || {
        let mesh = DeviceMesh::new(world, [2], "ranks")?;
        manual_seed(3);
        let args = ModelArgs::default();
        let model = Transformer::new(&args)?;
        let model = if fsdp {
            for block in &model.layers {
                fully_shard(block, &mesh, FullyShardOptions::default())?;
            }
            fully_shard(model, &mesh, FullyShardOptions::default())?
        } else {
            Transformer::parallelize(model, &mesh, true)?
        };
        let optimizer = AdamW::new(model.parameters(), 1e-3)?;
        let tokens = Tensor::randint(0, args.vocab_size as i64, [4, 9])?;
        let (now, next) = (tokens.narrow(1, 0, 8)?, tokens.narrow(1, 1, 8)?.flatten_all()?);
        let (mut losses, waits) = (Vec::new(), cuda::waits_of_this_thread());
        for _ in 0..3 {
            let logits = model.forward(&now)?.flatten(0, 1)?;
            let loss = logits.cross_entropy(&next, CrossEntropyOptions::default())?;
            loss.backward()?;
            optimizer.step()?;
            model.zero_grad();
            losses.push(loss.detach());
        }
        assert!(device == Device::Cpu || cuda::waits_of_this_thread() == waits, "a step waited for the GPU");
        let mut values = Vec::new();
        for x in losses.into_iter().chain(model.parameters().iter().map(|p| p.get())) {
            values.extend(if x.is_distributed() { x.full_tensor()? } else { x }.to_f64_vec()?);
        }
        Ok(values)
    })
}

#[test]
fn sharded_models_train_between_gpus_as_in_main_memory() {
    spmd(2, |world| {
        let Some(gpu) = gpu_each(world.rank(), 2) else { return Ok(()) };
        for fsdp in [false, true] {
            let (here, there) = (train(&world, Device::Cpu, fsdp)?, train(&world, gpu, fsdp)?);
            assert_eq!(here.len(), there.len());
            let worst = here.iter().zip(&there).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-4, "fsdp {fsdp}: {worst}");
        }
        Ok(())
    });
}

fn fault<T: std::fmt::Debug>(result: Result<T>) -> Fault {
    match result.as_ref().err().and_then(Failure::of) {
        Some(Failure::Collective(fault)) => (**fault).clone(),
        _ => panic!("a fault was expected, not {result:?}"),
    }
}

#[test]
fn a_mismatch_between_gpus_names_both_calls() {
    let lines = [line!() + 5, line!() + 6];
    let body = |world: World| {
        let Some(gpu) = gpu_each(world.rank(), 2) else { return Ok(None) };
        let (group, x) = (world.group(), numbers(&[4, 2], DType::F32, 0)?.to_device(gpu)?);
        let result = match world.rank() {
            0 => group.all_reduce(&x, ReduceOp::Sum).map(drop),
            _ => group.all_reduce(&x.narrow(0, 0, 3)?, ReduceOp::Sum).map(drop),
        };
        let later = group.barrier();
        Ok(Some((result, later)))
    };
    spmd_outcomes(2, body, |rank, outcome| {
        let Some((result, later)) = outcome.unwrap() else { return };
        let text = fault(result).to_string();
        assert!(text.starts_with(&format!("rank {rank}: all_reduce(sum)")), "{text}");
        assert!(text.contains("f32 [4, 2]") && text.contains("f32 [3, 2]"), "{text}");
        assert!(lines.iter().all(|line| text.contains(&format!("nccl.rs:{line}"))), "{text}");
        assert!(fault(later).earlier);
    });
}

#[test]
fn a_rank_that_leaves_is_an_error_on_the_others() {
    let body = |world: World| {
        let Some(gpu) = gpu_each(world.rank(), 2) else { return Ok(None) };
        let (group, x) = (world.group(), numbers(&[4], DType::F32, 0)?.to_device(gpu)?);
        group.all_reduce(&x, ReduceOp::Sum)?;
        if world.rank() == 1 {
            return Err(Error::argument("test", "this rank has had enough"));
        }
        Ok(Some(group.all_reduce(&x, ReduceOp::Sum)))
    };
    spmd_outcomes(2, body, |rank, outcome| match (rank, outcome) {
        (0, outcome) => {
            let Some(result) = outcome.unwrap() else { return };
            let Cause::Left { rank: 1, how: Departure::Failed(why), .. } = &*fault(result).cause else {
                panic!()
            };
            assert!(why.contains("had enough"), "{why}");
        }
        (_, outcome) => assert!(outcome.is_err() || cuda::device_count() < 2),
    });
}

/// On the emulator, a collective can be told to hang on the GPU.
#[cfg(feature = "cuda-emulator")]
mod hangs {
    use super::*;
    use nccl::emulator::emulate_hang;

    fn is_emulated() -> bool {
        cuda::device_name(Device::Cuda(0)).is_ok_and(|name| name.contains("emulated"))
    }

    struct Outcome {
        /// A read of the result, and the line of the collective. If NCCL finds its error at once, the collective returns it.
        read: (Result<Vec<f32>>, u32),
        /// A later collective, and its line.
        later: (Result<()>, u32),
        /// Other work, read meanwhile.
        other: Vec<f32>,
        waited: Duration,
    }

    fn hang(world: &World, count: usize, timeout: Duration) -> Result<Option<Outcome>> {
        let Some(gpu) = gpu_each(world.rank(), 2).filter(|_| is_emulated()) else { return Ok(None) };
        on_device(gpu, || {
            let group = world.group().with_timeout(timeout);
            let x = Tensor::ones([count], DType::F32)?;
            let began = Instant::now();
            let line = line!() + 1;
            let sum = group.all_reduce(&x, ReduceOp::Sum);
            // The GPU goes on with what does not need the sum.
            let other = Tensor::arange(0, 3, 1, DType::F32)?.add(1.0)?.to_vec::<f32>()?;
            let read = (sum.and_then(|sum| sum.add(&x)?.to_vec::<f32>()), line);
            let waited = began.elapsed();
            let y = Tensor::ones([2], DType::F32)?;
            let later = (group.all_reduce(&y, ReduceOp::Sum).map(drop), line!());
            Ok(Some(Outcome { read, later, other, waited }))
        })
    }

    fn check(rank: usize, outcome: Outcome, why: &str) {
        let Outcome { read: (read, line), later: (later, later_line), other, waited } = outcome;
        assert_eq!(other, [1.0, 2.0, 3.0]);
        assert!(waited < SLACK, "{waited:?}");
        let (read, later) = (fault(read), fault(later));
        assert_eq!((read.rank, later.rank, later.earlier), (rank, rank, true));
        let (read, later) = (read.to_string(), later.to_string());
        let site = format!("nccl.rs:{line}");
        // The read names the collective that hung and its line; a later collective names both.
        assert!(read.starts_with(&format!("rank {rank}: all_reduce(sum)")) && read.contains(&site), "{read}");
        assert!(read.contains(why) && later.contains(why), "{read}\n{later}");
        assert!(later.contains(&format!("nccl.rs:{later_line}")) && later.contains(&site), "{later}");
    }

    #[test]
    fn a_collective_that_hangs_is_aborted_within_the_timeout() {
        const COUNT: usize = 4567;
        emulate_hang(COUNT, None);
        let body = |world: World| hang(&world, COUNT, Duration::from_millis(300));
        spmd_outcomes(2, body, |rank, outcome| {
            if let Some(outcome) = outcome.unwrap() {
                check(rank, outcome, "NCCL did not finish it within 300ms");
            }
        });
        a_new_world_works();
    }

    #[test]
    fn an_error_that_nccl_finds_later_aborts_at_once() {
        const COUNT: usize = 4569;
        emulate_hang(COUNT, Some("remote process exited or there was a network error"));
        let body = |world: World| hang(&world, COUNT, Duration::from_secs(600));
        spmd_outcomes(2, body, |rank, outcome| {
            if let Some(outcome) = outcome.unwrap() {
                check(rank, outcome, "there was a network error");
            }
        });
        a_new_world_works();
    }

    fn a_new_world_works() {
        for (rank, result) in launch_each(2, |world| {
            let Some(gpu) = gpu_each(world.rank(), 2) else { return Ok(()) };
            every_collective(world.group(), gpu, DType::F32)
        })
        .into_iter()
        .enumerate()
        {
            result.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        }
    }
}

/// Runs a test of this program again in a process with `DTENSOR_NCCL=force`. Returns true in that process.
fn is_forced(test: &str) -> bool {
    if nccl::usage() == Ok(nccl::Usage::Force) {
        return true;
    }
    if nccl::check_available().is_err() {
        return false;
    }
    let mut command =
        std::process::Command::new(std::env::current_exe().expect("the test program has a path"));
    let test = match module_path!().split_once("::") {
        Some((_, module)) => format!("{module}::{test}"),
        None => test.to_owned(),
    };
    command.args([&test, "--exact", "--nocapture", "--include-ignored"]).env("DTENSOR_NCCL", "force");
    let output = command.output().expect("the test program runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
    false
}

#[test]
fn every_collective_of_one_rank() -> Result<()> {
    if !is_forced("every_collective_of_one_rank") {
        return Ok(());
    }
    let gpu = Device::Cuda(0);
    println!("NCCL {}", nccl::version()?);
    for world in World::threads(1)? {
        for dtype in DType::ALL {
            every_collective(world.group(), gpu, dtype)?;
        }
        assert_used(world.group(), gpu);
    }
    Ok(())
}

#[test]
fn forced_ranks_must_not_share_a_gpu() {
    if !is_forced("forced_ranks_must_not_share_a_gpu") {
        return;
    }
    for result in launch_each(2, |world| {
        let x = on_device(Device::Cuda(0), || Tensor::ones([2], DType::F32))?;
        world.group().all_reduce(&x, ReduceOp::Sum).map(drop)
    }) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("DTENSOR_NCCL=force, but ranks of the group share a GPU"), "{error}");
    }
}

/// Collectives run beside other work, and steps with them wait for nothing.
#[test]
fn a_step_of_one_rank_waits_for_nothing() -> Result<()> {
    if !is_forced("a_step_of_one_rank_waits_for_nothing") {
        return Ok(());
    }
    let world = World::threads(1)?.remove(0);
    on_device(Device::Cuda(0), || {
        let group = world.group();
        let mut x = Tensor::ones([1 << 20], DType::F32)?;
        let before = cuda::waits_of_this_thread();
        let mut sums = Vec::new();
        for _ in 0..50 {
            let sum = group.all_reduce_async(&x, ReduceOp::Sum)?;
            x = x.mul(1.0)?;
            // The memory of this one is used again while NCCL reads it.
            sums.push(sum.wait()?.add(&x)?);
        }
        assert_eq!(cuda::waits_of_this_thread(), before);
        for sum in sums {
            assert_eq!(sum.to_vec::<f32>()?, vec![2.0; 1 << 20]);
        }
        assert_used(group, Device::Cuda(0));
        Ok(())
    })
}

/// Prints how long collectives of one rank take: on the host until the call returns, and until the GPU is done.
#[test]
#[ignore = "measures"]
fn times_of_one_rank() -> Result<()> {
    if !is_forced("times_of_one_rank") {
        return Ok(());
    }
    let world = World::threads(1)?.remove(0);
    on_device(Device::Cuda(0), || {
        for bytes in [1 << 10, 1 << 20, 1 << 28] {
            let x = Tensor::ones([bytes / 4], DType::F32)?;
            let run = |n: u32| -> Result<[Duration; 2]> {
                let began = Instant::now();
                for _ in 0..n {
                    drop(world.group().all_reduce(&x, ReduceOp::Sum)?);
                }
                let queued = began.elapsed();
                cuda::synchronize(Device::Cuda(0))?;
                world.group().all_reduce(&x, ReduceOp::Sum)?.narrow(0, 0, 1)?.item::<f32>()?;
                Ok([queued / n, began.elapsed() / n])
            };
            run(20)?;
            let [queued, done] = run(200)?;
            println!("all_reduce of {bytes} bytes on one rank: call {queued:?}, with the GPU {done:?}");
        }
        Ok(())
    })
}

/// A value of an object collective is in main memory, so it never goes through NCCL.
#[test]
fn objects_and_barriers_stay_in_main_memory() {
    spmd(2, |world| {
        let Some(gpu) = gpu_each(world.rank(), 2) else { return Ok(()) };
        let group = world.group();
        assert_eq!(group.all_gather_object(&world.rank())?, [0, 1]);
        group.barrier()?;
        let x = Array::from_vec(vec![1f32], &[1])?.to_device(gpu)?;
        assert!(!format!("{group:?}").contains("Communicator("));
        assert_eq!(group.all_reduce(&x, ReduceOp::Sum)?.copy_to_host::<f32>()?, [2.0]);
        assert_used(group, gpu);
        Ok(())
    });
}
