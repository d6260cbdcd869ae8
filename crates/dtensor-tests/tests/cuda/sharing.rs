//! Ranks as threads that share GPUs: collectives between their streams.

use super::GPU;
use dtensor::comm::{World, launch};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{cuda, on_device};

/// Returns the GPU of a rank: one after the other, if there are several.
fn gpu_of(rank: usize) -> Device {
    Device::Cuda(rank % cuda::device_count())
}

/// Runs collectives on a rank's GPU and in main memory, and compares the results. NCCL adds in another order, so if the ranks may use it,
/// the numbers are `whole`, which any order adds exactly.
fn compare_with_the_cpu(world: &World, gpu: Device, whole: bool) -> Result<()> {
    let (group, rank) = (world.group(), world.rank());
    let same = |here: Tensor, there: Tensor| -> Result<()> {
        assert_eq!((here.device(), there.device()), (Device::Cpu, gpu));
        assert_eq!(here.to_f64_vec()?, there.to_f64_vec()?);
        Ok(())
    };
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64] {
        for n in [0, 1, 3, 5000] {
            manual_seed(7 + rank as u64);
            let here = on_device(Device::Cpu, || Tensor::randn([n, 3], DType::F32))?;
            let here = if whole { here.to_dtype(DType::I64)? } else { here.mul(4.0)? }.to_dtype(dtype)?;
            let there = here.to_device(gpu)?;
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product, ReduceOp::Avg] {
                if op == ReduceOp::Avg && (dtype == DType::I64 || whole) {
                    continue;
                }
                same(group.all_reduce(&here, op)?, group.all_reduce(&there, op)?)?;
                same(
                    group.reduce_scatter_tensor(&here, op, 1)?,
                    group.reduce_scatter_tensor(&there, op, 1)?,
                )?;
            }
            same(group.all_gather_tensor(&here, 0)?, group.all_gather_tensor(&there, 0)?)?;
            same(group.all_gather_tensor(&here, 1)?, group.all_gather_tensor(&there, 1)?)?;
            same(group.broadcast(&here, 2)?, group.broadcast(&there, 2)?)?;
        }
    }
    Ok(())
}

#[test]
fn collectives_have_the_bits_of_the_cpu() {
    spmd(3, |world| compare_with_the_cpu(&world, GPU, false));
}

#[test]
fn collectives_between_gpus_give_what_the_cpu_gives() -> Result<()> {
    launch(3, |world| compare_with_the_cpu(&world, gpu_of(world.rank()), true)).map(drop)
}

#[test]
fn arrays_that_other_ranks_still_use_are_not_overwritten() -> Result<()> {
    launch(4, |world| {
        on_device(GPU, || {
            let (group, rank) = (world.group(), world.rank());
            let mut x = Tensor::full([1 << 14], rank as f64, DType::F32)?;
            for round in 0..30 {
                // The sum reads every rank's array on another stream, while this rank frees it and allocates again.
                let sum = group.all_reduce(&x, ReduceOp::Sum)?;
                x = Tensor::full([1 << 14], (rank + round + 1) as f64, DType::F32)?;
                let want = (0..4).map(|rank| (rank + round) as f32).sum::<f32>();
                let got = sum.max_all()?.sub(&sum.min_all()?)?.add(&sum.narrow(0, 0, 1)?)?.item::<f32>()?;
                assert_eq!(got, want, "round {round}");
            }
            Ok(())
        })
    })
    .map(drop)
}

#[test]
fn ranks_on_gpus_of_their_own_train_one_model() -> Result<()> {
    launch(2, |world| {
        let gpu = gpu_of(world.rank());
        on_device(gpu, || {
            let mesh = DeviceMesh::new(&world, [2], "tp")?;
            manual_seed(1);
            let x = Tensor::randn([6, 5], DType::F64)?;
            let w = Tensor::randn([5, 4], DType::F64)?;
            let want = x.matmul(&w)?.gelu(Gelu::Exact)?.sum(0)?.to_f64_vec()?;
            let (x, w) =
                (distribute_tensor(&x, &mesh, [Replicate])?, distribute_tensor(&w, &mesh, [Shard(0)])?);
            let y = x.matmul(&w)?.gelu(Gelu::Exact)?.sum(0)?.full_tensor()?;
            assert_eq!(y.device(), gpu);
            assert!(y.to_f64_vec()?.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-12));
            Ok(())
        })
    })
    .map(drop)
}
