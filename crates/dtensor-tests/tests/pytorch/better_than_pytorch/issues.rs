//! Tests defects that users of PyTorch have reported, by issue number.

use dtensor::comm::record;
use dtensor::nn::{LayerNorm, Linear, Module, Parameter};
use dtensor::optim::{Optimizer, Sgd};
use dtensor::parallel::SequenceParallel;
use dtensor::testing::spmd;
use dtensor::{
    DType, FromLocalOptions, Replicate, Shard, StridedShard, Tensor, distribute_tensor, manual_seed,
    parallel, plan,
};

use super::{P, line, lists, numbers, plane, refused, same, same_everywhere, whole_or_cut};

/// PyTorch: the mean of uneven shards was the mean of their means; now the tensor is gathered first.
#[test]
fn issue_163241_mean_of_uneven_shards() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            for shape in [[8, 4], [5, 3], [2, 6], [9, 1]] {
                let x = numbers(&shape);
                for list in lists(&mesh, &whole_or_cut(2)) {
                    let laid = distribute_tensor(&x, &mesh, list)?;
                    let (means, calls) = record(|| [laid.mean_all(), laid.mean(0), laid.mean_keepdim(1)]);
                    assert!(calls.is_empty(), "{calls:?}");
                    let alone = [x.mean_all()?, x.mean(0)?, x.mean_keepdim(1)?];
                    for (got, expected) in means.into_iter().zip(alone) {
                        let (got, expected) = (got?.full_tensor()?.to_f64_vec()?, expected.to_f64_vec()?);
                        assert!(
                            got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-14),
                            "{got:?} {expected:?}"
                        );
                    }
                }
            }
        }
        Ok(())
    });
}

/// PyTorch: uneven strided shards were gathered in the wrong order.
#[test]
fn issue_168134_uneven_strided_shards_are_gathered_in_order() {
    spmd(4, |world| {
        let mesh = plane(&world)?;
        let strided = StridedShard { dim: 0, split_factor: 2 };
        for rows in 0..12 {
            let x = numbers(&[rows, 3]);
            for list in [[strided, Shard(0)], [strided, Replicate], [Shard(0), strided], [strided, Shard(1)]]
            {
                let laid = distribute_tensor(&x, &mesh, list)?;
                same(&laid, &x)?;
                same(&laid.add(&laid)?, &x.add(&x)?)?;
                same(&laid.sum(0)?, &x.sum(0)?)?;
            }
        }
        Ok(())
    });
}

/// PyTorch: the global strides are inferred from those of the local tensor, and are wrong if it has another memory layout.
#[test]
fn issue_118836_local_tensors_may_have_any_memory_layout() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        for shape in [[8, 6], [5, 3], [3, 7]] {
            let turned = numbers(&[shape[1], shape[0]]).t()?;
            let plain = turned.contiguous()?;
            for list in lists(&mesh, &whole_or_cut(2)) {
                let laid = distribute_tensor(&turned, &mesh, list.clone())?;
                same(&laid, &plain)?;
                // A local tensor whose strides alone are changed.
                let part = laid.to_local()?.t()?.contiguous()?.t()?;
                let options = FromLocalOptions { shape: Some(shape.into()), ..Default::default() };
                let joined = Tensor::from_local_with(&part, &mesh, list, options)?;
                same(&joined, &plain)?;
                same(&joined.flatten_all()?, &plain.flatten_all()?)?;
                same(
                    &joined.t()?.reshape([shape[0], shape[1]])?,
                    &plain.t()?.reshape([shape[0], shape[1]])?,
                )?;
            }
        }
        Ok(())
    });
}

/// PyTorch: shards split by another rule are accepted, and `full_tensor` is scrambled.
#[test]
fn issue_144109_shards_split_by_another_rule_are_an_error() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        // 10 rows split into 3, 3, 2 and 2; the library splits them into 3, 3, 3 and 1.
        let part = numbers(&[[3, 3, 2, 2][world.rank()], 2]);
        let asked = FromLocalOptions { uneven: true, ..Default::default() };
        refused(Tensor::from_local_with(&part, &mesh, [Shard(0)], asked.clone()), &["from_local"]);
        let part = numbers(&[[3, 3, 3, 1][world.rank()], 2]);
        assert_eq!(Tensor::from_local_with(&part, &mesh, [Shard(0)], asked)?.dims(), [10, 2]);
        Ok(())
    });
}

/// PyTorch: every optimizer step issues an all-reduce for every parameter of a norm, and three with Adam.
#[test]
fn issue_121669_an_optimizer_step_does_not_communicate() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let norm =
            parallel::parallelize_module(LayerNorm::new(6)?, &mesh, plan! { "" => SequenceParallel::new() })?;
        let x = numbers(&[2, 8, 6]).to_dtype(DType::F32)?;
        let laid = distribute_tensor(&x, &mesh, [Shard(1)])?;
        norm.forward(&laid)?.mul(&laid)?.sum_all()?.backward()?;
        let optimizer = Sgd::new(norm.parameters(), 0.5)?;
        let (done, calls) = record(|| optimizer.step());
        done?;
        assert!(calls.is_empty(), "{calls:?}");
        // The parameters match one device.
        let alone = LayerNorm::new(6)?;
        alone.forward(&x)?.mul(&x)?.sum_all()?.backward()?;
        Sgd::new(alone.parameters(), 0.5)?.step()?;
        for (a, b) in norm.parameters().iter().zip(alone.parameters()) {
            let (a, b) = (a.get().full_tensor()?.to_f64_vec()?, b.get().to_f64_vec()?);
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} {b:?}");
        }
        Ok(())
    });
}

/// PyTorch: the error "got mixed torch.Tensor and DTensor" if only some parameters are distributed.
#[test]
fn issue_121020_one_optimizer_takes_distributed_and_plain_parameters() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let (x, y) = (numbers(&[5, 3]), numbers(&[4]));
        let parameters = vec![
            Parameter::new(&distribute_tensor(&x, &mesh, [Shard(0)])?)?,
            Parameter::new(&y)?,
            Parameter::new(&distribute_tensor(&y, &mesh, [Replicate])?)?,
        ];
        for parameter in &parameters {
            parameter.get().pow(2)?.sum_all()?.backward()?;
        }
        Sgd::new(parameters.clone(), 0.25)?.step()?;
        for (parameter, before) in parameters.iter().zip([&x, &y, &y]) {
            same(&parameter.get(), &before.mul(0.5)?)?;
        }
        Ok(())
    });
}

/// PyTorch: a cached sharding decision for partial tensors was reused for other tensors.
#[test]
fn issue_147180_decisions_for_partial_tensors_are_cached_separately() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let x = numbers(&[4, 4]);
        let partial = Tensor::from_local(&x, &mesh, [P])?;
        let whole = distribute_tensor(&x, &mesh, [Replicate])?;
        for _ in 0..2 {
            same(&partial.mul(&whole)?, &x.mul(4.0)?.mul(&x)?)?;
            same(&whole.mul(&whole)?, &x.mul(&x)?)?;
            same(&partial.relu()?, &x.mul(4.0)?.relu()?)?;
            same(&whole.relu()?, &x.relu()?)?;
        }
        Ok(())
    });
}

/// PyTorch: the same seed gives other numbers than on one device unless all tensors are replicated.
#[test]
fn issue_168375_a_seed_gives_the_numbers_of_one_device() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            manual_seed(11);
            let alone = Linear::new(5, 7, true)?;
            for list in lists(&mesh, &whole_or_cut(2)) {
                let bound = 1.0 / 5f64.sqrt();
                let weight = Parameter::with_init([7, 5], move |like| like.uniform_like(-bound, bound))?;
                weight.replace(&distribute_tensor(&weight.get().detach(), &mesh, list)?)?;
                manual_seed(11);
                weight.reset_parameters()?;
                same(&weight.get(), &alone.weight.get())?;
            }
        }
        Ok(())
    });
}

/// PyTorch: views of sharded tensors had wrong values, or were an error although no data needs to move.
#[test]
fn issue_179502_views_have_the_values_of_one_device() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            let shapes: [(&[usize], &'static [usize]); 5] = [
                (&[8, 4], &[32]),
                (&[5, 4], &[20]),
                (&[4, 6], &[2, 2, 6]),
                (&[6, 4], &[4, 6]),
                (&[3, 5], &[5, 3]),
            ];
            for (from, to) in shapes {
                for list in lists(&mesh, &whole_or_cut(2)) {
                    same_everywhere(&mesh, &[numbers(from)], &[list], |x| x[0].reshape(to))?;
                }
            }
        }
        Ok(())
    });
}
