//! Invalid values are found by kernels, and reported at the next read or collective with operator and line.

use super::GPU;
use crate::common::modules::raises;
use dtensor::comm::launch_each;
use dtensor::prelude::*;
use dtensor::{cuda, on_device};

#[test]
fn a_read_reports_an_index_out_of_bounds_with_its_line() -> Result<()> {
    on_device(GPU, || {
        let table = Tensor::ones([3, 2], DType::F32)?;
        let bad = Tensor::from_slice(&[0i64, 7], [2])?;
        let line = line!() + 1;
        let rows = table.index_select(0, &bad)?;
        let error = raises(
            rows.to_vec::<f32>(),
            "index_select: index 7 is out of bounds for dimension 0 with size 3",
        );
        assert!(error.to_string().contains(&format!("faults.rs:{line}")), "{error}");
        // It is reported once, and nothing is broken.
        assert_eq!(table.sum_all()?.item::<f32>()?, 6.0);
        let negative = Tensor::from_slice(&[-1i64], [1, 1])?;
        let column = table.gather(0, &negative)?;
        raises(column.to_vec::<f32>(), "gather: index -1 is out of bounds");
        table.index_select(0, &bad)?;
        raises(cuda::synchronize(GPU), "index 7 is out of bounds");
        cuda::synchronize(GPU)
    })
}

#[test]
fn losses_and_embeddings_check_their_targets() -> Result<()> {
    on_device(GPU, || {
        let logits = Tensor::zeros([2, 3], DType::F32)?.requires_grad_(true)?;
        let target = Tensor::from_slice(&[1i64, 3], [2])?;
        let loss = logits.cross_entropy(&target, CrossEntropyOptions::default())?;
        raises(loss.item::<f32>(), "cross_entropy: index 3 is out of bounds for dimension 1 with size 3");
        let table = dtensor::nn::Embedding::new(5, 2)?;
        let rows = table.forward(&Tensor::from_slice(&[5i64], [1])?)?;
        raises(rows.to_vec::<f32>(), "index 5 is out of bounds");
        let p = Tensor::from_slice(&[0.5f32, 1.5], [2])?;
        raises(p.bernoulli_each()?.to_vec::<f32>(), "every probability must be between 0 and 1, but got 1.5");
        let x = Tensor::zeros([4], DType::F32)?;
        let twice = Tensor::from_slice(&[1i64, 1], [2])?;
        let written = x.index_copy(0, &twice, &Tensor::ones([2], DType::F32)?)?;
        raises(written.to_vec::<f32>(), "index 1 appears more than once");
        Ok(())
    })
}

#[test]
fn a_fault_of_one_rank_is_an_error_on_all() {
    let results = launch_each(3, |world| {
        on_device(GPU, || {
            let table = Tensor::ones([3, 2], DType::F32)?;
            let id = if world.rank() == 1 { 9 } else { 2 };
            let rows = table.index_select(0, &Tensor::from_slice(&[id as i64], [1])?)?;
            // The kernel has ended when a collective begins, or the read after it finds the fault.
            let sum = world.group().all_reduce(&rows, ReduceOp::Sum)?.to_vec::<f32>()?;
            world.group().barrier()?;
            Ok(sum)
        })
    });
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.expect_err("one rank has an invalid index").to_string();
        assert!(error.contains("index 9 is out of bounds") || rank != 1, "rank {rank}: {error}");
        assert!(error.contains("rank 1") || rank == 1, "rank {rank}: {error}");
    }
}

#[test]
fn an_invalid_target_of_a_sharded_loss_is_an_error_on_all_ranks() {
    let results = launch_each(3, |world| {
        on_device(GPU, || {
            let mesh = DeviceMesh::new(&world, [3], "tp")?;
            let logits = sharded::zeros([2, 7], DType::F32, &mesh, [Shard(1)])?;
            let target = distribute_tensor(&Tensor::from_slice(&[0i64, 9], [2])?, &mesh, [Replicate])?;
            let loss =
                logits.cross_entropy(&target, CrossEntropyOptions::default())?.to_local()?.item::<f32>()?;
            world.group().barrier()?;
            Ok(loss)
        })
    });
    let errors: Vec<String> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
    assert!(errors.iter().any(|error| error.contains("index 9 is out of bounds")), "{errors:?}");
}
