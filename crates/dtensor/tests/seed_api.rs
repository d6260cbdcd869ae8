//! PyTorch's `test_api.py`, as far as it is about tensors.
//!
//! | test of PyTorch's | here |
//! | --- | --- |
//! | `test_distribute_tensor` | [`distribute_tensor_shards_and_keeps_leaves`] |
//! | `test_distribute_tensor_errors` | [`distribute_tensor_errors`] |
//! | `test_distribute_tensor_uneven_sharding` | [`distribute_tensor_uneven_sharding`] |
//! | `test_distribute_module_casting` | [`casting`]: the tensors of it |
//! | `test_distribute_module_meta` | [`meta_tensors_get_a_device`]: the tensors of it |
//!
//! `test_distribute_module_input_fn_output_fn` and `test_distribute_module_input_fn_output_fn_warning` are about modules
//! alone. The rest of this file is about `DTensorConverter`, which PyTorch's tests share.

use dtensor::comm::{ReduceOp, World};
use dtensor::nn::Parameter;
use dtensor::testing::{DTensorConverter, spmd};
use dtensor::{
    DType, Device, DeviceMesh, Error, FromLocal, Partial, Placement, Replicate, Result, Shard, Tensor,
    distribute_tensor,
};

const RANKS: usize = 4;

fn line(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [RANKS], ())
}

/// Numbers in a row, other ones on every rank.
fn own(world: &World, shape: impl Into<dtensor::Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let first = 1000 * world.rank();
    Tensor::arange(first as i64, (first + shape.numel()) as i64, 1, DType::F32)?.reshape(&shape)
}

/// The same numbers in a row on every rank.
fn same(shape: impl Into<dtensor::Shape>) -> Result<Tensor> {
    let shape = shape.into();
    Tensor::arange(0, shape.numel() as i64, 1, DType::F32)?.reshape(&shape)
}

/// Asserts that a result is an error with these words, whatever their case.
#[track_caller]
fn raises<T>(result: Result<T>, words: &str) -> Error {
    let Err(error) = result else { panic!("accepted, but expected {words:?}") };
    assert!(error.to_string().to_lowercase().contains(&words.to_lowercase()), "{error}");
    error
}

#[test]
fn distribute_tensor_shards_and_keeps_leaves() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        for requires_grad in [true, false] {
            let tensor = own(&world, [3 * RANKS, 3])?.requires_grad_(requires_grad)?;
            let dist = distribute_tensor(&tensor, &mesh, [Shard(0)])?;
            assert_eq!(dist.dims(), [3 * RANKS, 3]);
            let local = dist.to_local()?;
            assert_eq!(local.dims(), [3, 3]);
            // Those of the first rank.
            let first: Vec<f32> = (0..9).map(|i| (9 * world.rank() + i) as f32).collect();
            assert_eq!(local.to_vec::<f32>()?, first);
            assert_eq!(dist.requires_grad(), requires_grad);
            assert!(dist.is_leaf());
            // The tensor given is what it was.
            assert!(tensor.to_vec::<f32>()?.starts_with(&[1000.0 * world.rank() as f32]));
        }
        let dist = distribute_tensor(&own(&world, [3, 3 * RANKS])?, &mesh, [Shard(-1)])?;
        assert_eq!(dist.placements()[0].dim(), Some(1));
        Ok(())
    });
}

#[test]
fn distribute_tensor_errors() {
    spmd(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ())?;
        let shape = [3 * RANKS, 3 * RANKS];
        let tensor = same(shape)?;
        raises(distribute_tensor(&tensor, &mesh, [Shard(0)]), "must have the same length");

        let result = same(shape)?.requires_grad_(true)?.add(2)?;
        raises(distribute_tensor(&result, &mesh, [Shard(0)]), "distribute leaf tensor");

        let dtensor = distribute_tensor(&tensor, &mesh, [Shard(0), Shard(1)])?;
        raises(distribute_tensor(&dtensor, &line(&world)?, [Shard(0)]), "to a different device mesh");
        raises(distribute_tensor(&dtensor, &mesh, [Shard(0), Replicate]), "to a different placements");
        // Where it lies already, it may stay.
        let again = distribute_tensor(&dtensor, &mesh, [Shard(0), Shard(-1)])?;
        assert_eq!(again.full_tensor()?.to_vec::<f32>()?, tensor.to_vec::<f32>()?);
        Ok(())
    });
}

#[test]
fn distribute_tensor_uneven_sharding() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let (more, most) = (RANKS * 3 + 1, RANKS * 3 + 2);
        for (shape, dim) in [
            ([more, 3, 3], 0),
            ([most, 3, 3], 0),
            ([3, more, 3], 1),
            ([3, most, 3], 1),
            ([3, 3, more], 2),
            ([3, 3, most], 2),
        ] {
            let tensor = same(shape)?;
            let split = tensor.chunk(RANKS, dim)?;
            let dist = distribute_tensor(&tensor, &mesh, [Shard(dim as isize)])?;
            assert_eq!(dist.dims(), shape);
            let local = dist.to_local()?;
            assert_eq!(local.dims(), split[world.rank()].dims());
            assert_eq!(local.to_vec::<f32>()?, split[world.rank()].to_vec::<f32>()?);
        }
        Ok(())
    });
}

#[test]
fn casting() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let values = Tensor::linspace(0.0, 1.0, 10, DType::F32)?;
        let rounded = values.to_dtype(DType::BF16)?.to_f64_vec()?;
        for placement in [Replicate, Shard(0), Partial(ReduceOp::Sum)] {
            let part = distribute_tensor(&values, &mesh, [placement])?.to_local()?;
            let options = FromLocal { shape: Some([10].into()), ..Default::default() };
            for dt in [
                Tensor::from_local_with(&part, &mesh, [placement], options)?,
                distribute_tensor(&values, &mesh, [placement])?,
            ] {
                let cast = dt.to_dtype(DType::BF16)?;
                assert_eq!(cast.dtype(), DType::BF16);
                assert_eq!(cast.to_local()?.dtype(), DType::BF16);
                if placement == Replicate {
                    assert_eq!(cast.placements(), [Replicate]);
                }
                assert_eq!(cast.full_tensor()?.to_f64_vec()?, rounded);
                assert_eq!(dt.dtype(), DType::F32);
            }
        }
        Ok(())
    });
}

#[test]
fn meta_tensors_get_a_device() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        // The weights and biases of the model of that test.
        for shape in [&[5 * RANKS, 5 * RANKS][..], &[20, 5 * RANKS], &[20]] {
            let parameter = Tensor::meta_of(shape, DType::F32)?.requires_grad_(true)?;
            let dist = distribute_tensor(&parameter, &mesh, [Shard(0)])?;
            assert!(dist.is_meta() && dist.requires_grad() && dist.is_leaf());
            let dist = Parameter::new(&dist.empty_like(Device::Cpu)?)?.get();
            assert!(dist.is_distributed() && !dist.is_meta());
            assert_eq!(dist.device(), Device::Cpu);
            assert_eq!((dist.dims(), dist.placements()), (shape, &[Shard(0)][..]));
            assert_eq!(dist.mesh(), Some(&mesh));
            let local = dist.to_local()?;
            assert_eq!((local.device(), local.dims()[0]), (Device::Cpu, shape[0] / RANKS));
            // It is a parameter like any other.
            dist.mul(2.0)?.sum_all()?.backward()?;
            let grad = dist.grad().expect("a leaf that was used");
            assert_eq!(grad.placements(), [Shard(0)]);
            assert!(grad.full_tensor()?.to_vec::<f32>()?.iter().all(|&g| g == 2.0));
        }
        Ok(())
    });
}

#[test]
fn the_converter_goes_through_all_even_placements() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let (x, y, z) = (same([8, 3, 4])?, same([1, 12])?, same(())?);
        let mut converter = DTensorConverter::new(&mesh, &[&x, &y, &z]);
        let mut seen: Vec<Vec<Placement>> = Vec::new();
        for tensors in &mut converter {
            let tensors = tensors?;
            seen.push(tensors.iter().map(|x| x.placements()[0]).collect());
            for (laid, plain) in tensors.iter().zip([&x, &y, &z]) {
                assert_eq!(laid.dims(), plain.dims());
                assert_eq!(laid.full_tensor()?.to_vec::<f32>()?, plain.to_vec::<f32>()?);
            }
        }
        // The dim of size 3 is uneven, and that of size 1 is not worth cutting.
        let expected = [
            [Replicate, Replicate, Replicate],
            [Replicate, Shard(1), Replicate],
            [Shard(0), Replicate, Replicate],
            [Shard(0), Shard(1), Replicate],
            [Shard(2), Replicate, Replicate],
            [Shard(2), Shard(1), Replicate],
        ];
        assert_eq!(seen, expected);
        assert_eq!((converter.hit(), converter.miss()), (18, 0));
        assert!(converter.successful());
        assert!(converter.next().is_none());
        Ok(())
    });
}

#[test]
fn the_converter_cuts_along_every_mesh_dim() {
    spmd(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let x = same([4, 2])?;
        let mut converter = DTensorConverter::new(&mesh, &[&x]);
        let mut seen = Vec::new();
        for tensors in &mut converter {
            let [x] = &tensors?[..] else { panic!("one tensor in, one out") };
            seen.push([x.placements()[0], x.placements()[1]]);
        }
        // Two ranks would divide the second dim, but not all four.
        let all =
            [[Replicate, Replicate], [Replicate, Shard(0)], [Shard(0), Replicate], [Shard(0), Shard(0)]];
        assert_eq!(seen, all);
        Ok(())
    });
}

#[test]
fn the_converter_keeps_leaves_and_dtypes() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let weight = Parameter::new(&same([4, 4])?)?.get();
        let logical = Tensor::from_slice(&[1u8, 0, 0, 1], [4])?;
        let mut converter = DTensorConverter::new(&mesh, &[&weight, &logical]);
        for tensors in &mut converter {
            let [weight, logical] = &tensors?[..] else { panic!("two tensors in, two out") };
            assert!(weight.requires_grad() && weight.is_leaf());
            assert!(!logical.requires_grad());
            assert_eq!(logical.full_tensor()?.to_vec::<u8>()?, [1, 0, 0, 1]);
            weight.mul(3.0)?.sum_all()?.backward()?;
            let grad = weight.grad().expect("a leaf that was used").full_tensor()?;
            assert_eq!(grad.to_vec::<f32>()?, [3.0; 16]);
        }
        assert_eq!((converter.hit(), converter.successful()), (3 * 2 * 2, true));
        // A gradient of what was laid on the mesh is none of what it was made of.
        assert!(weight.grad().is_none());
        Ok(())
    });
}

#[test]
fn the_converter_says_what_it_did_not_convert() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let (meta, x) = (Tensor::meta_of([4], DType::F32)?, same([4])?);
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        for odd in [&meta, &laid] {
            let mut converter = DTensorConverter::new(&mesh, &[odd, &x]);
            for tensors in &mut converter {
                let tensors = tensors?;
                assert_eq!(
                    (tensors[0].is_meta(), tensors[0].placements()),
                    (odd.is_meta(), odd.placements())
                );
                assert!(tensors[1].is_distributed());
            }
            assert_eq!((converter.hit(), converter.miss(), converter.successful()), (4, 4, false));
        }
        // Without tensors there is nothing to succeed with.
        let mut converter = DTensorConverter::new(&mesh, &[]);
        assert!(converter.next().is_some_and(|tensors| tensors.is_ok_and(|tensors| tensors.is_empty())));
        assert!(converter.next().is_none() && !converter.successful());

        let result = x.requires_grad_(true)?.add(2)?;
        let mut converter = DTensorConverter::new(&mesh, &[&result]);
        raises(converter.next().expect("a first combination"), "distribute leaf tensor");
        Ok(())
    });
}
