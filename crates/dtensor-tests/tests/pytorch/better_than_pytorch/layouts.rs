//! Tests how tensors are distributed, created on a mesh, filled with random numbers, and gathered.

use dtensor::nn::{Linear, Module, Parameter};
use dtensor::parallel::{ColwiseParallel, ParallelizeOptions, parallelize_module_with};
use dtensor::testing::spmd;
use dtensor::{
    DType, DeviceMesh, Replicate, Result, Shard, StridedShard, Tensor, distribute_tensor,
    distribute_tensor_from, manual_seed, plan, sharded,
};

use super::{P, line, lists, numbers, plane, refused, same, whole_or_cut};

/// PyTorch: after the user has flattened the mesh, `full_tensor` of a (6, 8) tensor sharded twice along dim 0 has its rows
/// in the wrong order, with zeros among them.
#[test]
fn item_01_flattened_mesh_gather_of_unevenly_nested_shards() {
    spmd(4, |world| {
        let mesh = plane(&world)?;
        mesh.flatten("all")?;
        for rows in 0..10 {
            let x = numbers(&[rows, 8]);
            for list in [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(1)]] {
                let laid = distribute_tensor(&x, &mesh, list)?;
                same(&laid, &x)?;
                same(&laid.redistribute([Replicate, Shard(0)])?, &x)?;
                let partial = laid.redistribute([P, P])?;
                same(&partial, &x)?;
                same(&partial.redistribute([Shard(0), Shard(0)])?, &x)?;
            }
        }
        Ok(())
    });
}

/// PyTorch: the caller's tensor is overwritten on all ranks except the source.
#[test]
fn item_10_distribute_tensor_leaves_the_callers_tensor_alone() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            let mine = Tensor::full([5, 2], world.rank() as f64, DType::F64)?;
            for list in lists(&mesh, &whole_or_cut(2)) {
                let laid = distribute_tensor(&mine, &mesh, list)?;
                same(&laid, &Tensor::zeros([5, 2], DType::F64)?)?;
                assert_eq!(mine.to_vec::<f64>()?, [world.rank() as f64; 10]);
            }
        }
        Ok(())
    });
}

/// PyTorch: a bare IndexError, or no error at all.
#[test]
fn item_11_a_wrong_number_of_placements_is_an_error() {
    spmd(4, |world| {
        let mesh = plane(&world)?;
        let x = numbers(&[4, 4]);
        let laid = distribute_tensor(&x, &mesh, [Shard(0), Replicate])?;
        for list in [&[Shard(0)][..], &[Shard(0), Replicate, Replicate]] {
            refused(Tensor::from_local(&x, &mesh, list), &["from_local", "same length", "2"]);
            refused(laid.redistribute(list), &["redistribute", "same length", "2"]);
            refused(distribute_tensor(&x, &mesh, list), &["distribute_tensor", "same length", "2"]);
        }
        // The errors have changed nothing.
        same(&laid, &x)
    });
}

/// PyTorch: an AssertionError, "must be normalized".
#[test]
fn item_12_factories_count_dims_from_the_back() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let last = [Shard(-1)];
        for columns in [8, 5, 3] {
            let shape = [2, columns];
            for laid in [
                sharded::zeros(shape, DType::F64, &mesh, last)?,
                sharded::ones(shape, DType::F64, &mesh, last)?,
                sharded::full(shape, 2.5, DType::F64, &mesh, last)?,
                sharded::rand(shape, DType::F64, &mesh, last)?,
                sharded::randn(shape, DType::F64, &mesh, last)?,
            ] {
                assert_eq!(laid.placements(), [Shard(1)]);
                assert_eq!(laid.dims(), shape);
            }
            let range = sharded::arange(0, columns as i64, 1, DType::I64, &mesh, last)?;
            same(&range, &Tensor::arange(0, columns as i64, 1, DType::I64)?)?;
        }
        Ok(())
    });
}

/// PyTorch: `src_data_rank` is ignored for the plan's entry of the root module, which gets the values of rank 0.
#[test]
fn item_13_the_root_module_gets_the_values_of_src_data_rank() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let mine = || -> Result<Linear> {
            let weight = Parameter::new(&Tensor::full([4, 3], world.rank() as f64, DType::F32)?)?;
            Linear::from_parameters(weight, None)
        };
        for source in 0..4 {
            let options = ParallelizeOptions { src_data_rank: Some(source), ..Default::default() };
            let layer =
                parallelize_module_with(mine()?, &mesh, plan! { "" => ColwiseParallel::new() }, options)?;
            assert_eq!(layer.weight.get().full_tensor()?.to_vec::<f32>()?, [source as f32; 12]);
        }
        let options = ParallelizeOptions { src_data_rank: None, ..Default::default() };
        let layer = parallelize_module_with(mine()?, &mesh, plan! { "" => ColwiseParallel::new() }, options)?;
        assert_eq!(layer.weight.get().to_local()?.to_vec::<f32>()?, [world.rank() as f32; 3]);
        Ok(())
    });
}

/// PyTorch: a bare AssertionError.
#[test]
fn item_15_strided_shards_of_uneven_sizes() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let strided = StridedShard { dim: 0, split_factor: 2 };
        // Two pieces of 5 and 4 elements, each split among four ranks.
        let nine = distribute_tensor(&Tensor::arange(0, 9, 1, DType::I64)?, &mesh, [strided])?;
        let expected: [&[i64]; 4] = [&[0, 1, 5], &[2, 3, 6], &[4, 7], &[8]];
        assert_eq!(nine.to_local()?.to_vec::<i64>()?, expected[world.rank()]);
        for rows in 0..12 {
            let x = numbers(&[rows, 2]);
            for split_factor in [1, 2, 3] {
                for source in [Some(0), Some(3), None] {
                    let strided = StridedShard { dim: 0, split_factor };
                    let laid = distribute_tensor_from(&x, &mesh, [strided], source)?;
                    same(&laid, &x)?;
                    same(&laid.redistribute([Shard(0)])?, &x)?;
                    same(&laid.redistribute([Shard(1)])?.redistribute([strided])?, &x)?;
                }
            }
        }
        Ok(())
    });
}

/// PyTorch: on a mesh of CPUs, in-place random operators give every shard the same numbers, and factories return an error.
#[test]
fn item_17_random_shards_are_slices_of_one_tensor() {
    spmd(4, |world| {
        for mesh in [line(&world)?, plane(&world)?] {
            for shape in [[8, 3], [5, 2], [3, 7]] {
                manual_seed(3);
                let uniform = Tensor::rand(shape, DType::F32)?;
                let normal = Tensor::randn(shape, DType::F32)?;
                let kept = normal.dropout(0.5)?;
                for list in lists(&mesh, &whole_or_cut(2)) {
                    manual_seed(3);
                    same(&sharded::rand(shape, DType::F32, &mesh, list.clone())?, &uniform)?;
                    let laid = sharded::randn(shape, DType::F32, &mesh, list.clone())?;
                    same(&laid, &normal)?;
                    same(&laid.dropout(0.5)?, &kept)?;
                    manual_seed(3);
                    same(&laid.rand_like()?, &uniform)?;
                }
            }
        }
        // Distributed parameters are reset in place.
        let mesh = line(&world)?;
        manual_seed(5);
        let alone = Linear::new(5, 6, true)?;
        let spread = parallelize_module_with(
            Linear::new(5, 6, true)?,
            &mesh,
            plan! { "" => ColwiseParallel::new() },
            ParallelizeOptions::default(),
        )?;
        manual_seed(5);
        spread.reset_parameters()?;
        same(&spread.weight.get(), &alone.weight.get())?;
        // The shards of ranks 0 and 1 differ; both have two rows.
        let rows = alone.weight.get().detach().to_vec2::<f32>()?;
        assert_ne!(rows[..2], rows[2..4]);
        Ok(())
    });
}

/// PyTorch: a mesh of ranks `[3, 1, 0, 2]` scatters in the order of ranks but splits in the order of coordinates, so rows are
/// permuted.
#[test]
fn item_18_a_mesh_may_have_ranks_in_any_order() {
    spmd(4, |world| {
        for ranks in [[3, 1, 0, 2], [2, 3, 0, 1], [1, 2, 3, 0]] {
            for sizes in [&[4][..], &[2, 2]] {
                let mesh = DeviceMesh::from_ranks(&world, &ranks, sizes, ())?;
                for rows in [8, 7, 3] {
                    let x = numbers(&[rows, 2]);
                    for list in lists(&mesh, &whole_or_cut(2)) {
                        let laid = distribute_tensor(&x, &mesh, list.clone())?;
                        same(&laid, &x)?;
                        let cut = distribute_tensor_from(&x, &mesh, list, None)?;
                        assert_eq!(cut.to_local()?.to_f64_vec()?, laid.to_local()?.to_f64_vec()?);
                        same(&cut, &x)?;
                    }
                }
                let rows = distribute_tensor(
                    &Tensor::arange(0, 4, 1, DType::I64)?,
                    &mesh,
                    vec![Shard(0); sizes.len()],
                )?;
                let at = ranks.iter().position(|&rank| rank == world.rank()).expect("all ranks are there");
                assert_eq!(rows.to_local()?.to_vec::<i64>()?, [at as i64]);
            }
        }
        Ok(())
    });
}
