//! Tests clipping of distributed gradients: the norm of the full tensors, with one all-reduce per mesh.

use std::slice::from_ref;

use dtensor::comm::record;
use dtensor::nn::Parameter;
use dtensor::optim::{ClipOptions, clip_grad_norm, clip_grad_value, grad_norm};
use dtensor::prelude::*;
use dtensor::testing::spmd;

use super::{bits, random, set_grad};
use crate::common::layouts::strided;
use crate::common::modules::{counted, raises};

/// Returns a zero parameter with this gradient.
fn with_grad(grad: &Tensor) -> Result<Parameter> {
    let parameter = Parameter::new(&grad.zeros_like()?)?;
    set_grad(&parameter, grad)?;
    Ok(parameter)
}

/// The layout of a gradient: `None` for a local tensor, or a mesh and placements.
type Place<'a> = Option<(&'a DeviceMesh, Vec<Placement>)>;

/// Clips the same gradients distributed and on one device, for every norm type, and compares. Returns the collectives
/// of one call.
fn compared(world: &World, shapes: &[&[usize]], places: &[Place<'_>], dtype: DType) -> Result<String> {
    let wholes: Vec<Tensor> = shapes.iter().enumerate().map(|(i, s)| random(s, dtype, &[i as u64])).collect();
    let mut found = Vec::new();
    for norm_type in [2.0, 1.0, 3.0, 0.5, 0.0, f64::INFINITY, f64::NEG_INFINITY] {
        let options = ClipOptions { norm_type, ..Default::default() };
        let alone: Vec<Parameter> = wholes.iter().map(with_grad).collect::<Result<_>>()?;
        let expected = clip_grad_norm(&alone, 0.25, options)?.item_f64()?;
        let lay = |(whole, place): (&Tensor, &Place<'_>)| match place {
            None => with_grad(whole),
            Some((mesh, placements)) => with_grad(&distribute_tensor(whole, *mesh, placements.clone())?),
        };
        let laid: Vec<Parameter> = wholes.iter().zip(places).map(lay).collect::<Result<_>>()?;
        let (norm, calls) = counted(|| clip_grad_norm(&laid, 0.25, options))?;
        found.push(calls);
        let norm = norm.item_f64()?;
        let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-6 };
        assert!(
            (norm - expected).abs() <= tolerance * expected.abs(),
            "{norm_type}: {norm} is not {expected}"
        );
        // Every rank computed the same bits.
        let mine = Tensor::from_slice(&[norm], [1])?;
        let all = world.group().all_gather_tensor(&mine, 0)?.to_vec::<f64>()?;
        assert!(all.iter().all(|x| x.to_bits() == norm.to_bits()), "{norm_type}: {all:?}");
        for (a, b) in laid.iter().zip(&alone) {
            let (a, b) = (a.grad().unwrap(), b.grad().unwrap());
            assert_eq!(a.placements().len(), a.mesh().map_or(0, DeviceMesh::ndim));
            let a = if a.is_distributed() { a.full_tensor()? } else { a };
            for (a, b) in a.to_f64_vec()?.iter().zip(b.to_f64_vec()?) {
                assert!((a - b).abs() <= tolerance * b.abs(), "{norm_type}: {a} is not {b}");
            }
        }
    }
    assert!(found.iter().all(|calls| *calls == found[0]), "{found:?}");
    Ok(found.swap_remove(0))
}

/// Shapes with even, uneven, too small and empty shards.
const SHAPES: [&[usize]; 5] = [&[8, 3], &[5, 7], &[3], &[1, 2], &[0, 3]];

#[test]
fn one_all_reduce_covers_all_parameters_of_a_mesh() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let on = |placement: Placement| Some((&mesh, vec![placement]));
        for dtype in [DType::F32, DType::F64] {
            assert_eq!(
                compared(
                    &world,
                    &SHAPES,
                    &[on(Shard(0)), on(Shard(1)), on(Shard(0)), on(Shard(0)), on(Shard(0))],
                    dtype
                )?,
                "AR 1"
            );
            let mixed = [on(Shard(1)), None, on(Replicate), on(strided(0, 2)), on(Shard(1))];
            assert_eq!(compared(&world, &SHAPES, &mixed, dtype)?, "AR 1");
            // Every gradient is replicated, so no rank needs the others.
            assert_eq!(
                compared(&world, &SHAPES, &[on(Replicate), on(Replicate), None, None, on(Replicate)], dtype)?,
                "0"
            );
        }
        Ok(())
    });
}

#[test]
fn the_all_reduce_spans_only_mesh_dims_with_sharded_gradients() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let on = |a: Placement, b: Placement| Some((&mesh, vec![a, b]));
        let (r, s0, s1) = (Replicate, Shard(0), Shard(1));
        let cases = [
            ("AR 1", 2, [on(r, s0), on(r, r), on(r, s0), on(r, s1), None]),
            ("AR 1", 2, [on(s1, r), on(s0, r), on(r, r), on(r, r), on(s0, r)]),
            // Some gradients are replicated along one of the dims.
            ("AR 1", 4, [on(r, s0), on(s0, r), on(r, r), on(s0, s1), None]),
            ("AR 1", 4, [on(s0, s0), on(strided(0, 2), s0), on(s0, s0), on(s1, s0), on(s0, s1)]),
            ("0", 0, [on(r, r), None, on(r, r), on(r, r), on(r, r)]),
        ];
        for (expected, members, places) in cases {
            assert_eq!(compared(&world, &SHAPES, &places, DType::F32)?, expected);
            let Some((mesh, placements)) = &places[0] else { unreachable!() };
            let grad = distribute_tensor(&random(SHAPES[0], DType::F32, &[0]), *mesh, placements.clone())?;
            let mut all = vec![with_grad(&grad)?];
            if let Some((mesh, placements)) = &places[1] {
                let grad =
                    distribute_tensor(&random(SHAPES[1], DType::F32, &[1]), *mesh, placements.clone())?;
                all.push(with_grad(&grad)?);
            }
            let (norm, calls) = record(|| clip_grad_norm(&all, 1.0, ClipOptions::default()));
            norm?;
            let line = line!() - 2;
            for call in &calls {
                // The call reduces one scalar and is attributed to the line of `clip_grad_norm`.
                assert_eq!((call.meta.shape.ndim(), call.meta.dtype), (0, DType::F64));
                assert!(call.at.file.ends_with("clip_mesh.rs") && call.at.line == line, "{}", call.at);
                assert_eq!(call.group.contains('×'), members == 4, "{}", call.group);
            }
        }
        Ok(())
    });
}

#[test]
fn each_mesh_of_a_model_takes_one_all_reduce() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let (dp, tp) = (mesh.slice("dp")?, mesh.slice("tp")?);
        // Another handle of the same mesh counts as the same mesh.
        let again = mesh.slice("tp")?;
        let shapes: [&[usize]; 8] = [&[8, 3], &[5, 7], &[3], &[1, 2], &[0, 3], &[6], &[2, 2], &[4]];
        let places = [
            Some((&tp, vec![Shard(0)])),
            Some((&mesh, vec![Shard(0), Shard(1)])),
            None,
            Some((&again, vec![Shard(0)])),
            Some((&mesh, vec![Replicate, Shard(1)])),
            Some((&dp, vec![Replicate])),
            Some((&tp, vec![Replicate])),
            Some((&mesh, vec![Shard(0), Replicate])),
        ];
        assert_eq!(compared(&world, &shapes, &places, DType::F32)?, "AR 2");
        let mut cut = places.clone();
        cut[5] = Some((&dp, vec![Shard(0)]));
        assert_eq!(compared(&world, &shapes, &cut, DType::F64)?, "AR 3");
        Ok(())
    });
}

#[test]
fn clipping_works_on_meshes_of_every_size() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        let places: Vec<Place<'_>> = vec![Some((&mesh, vec![Shard(0)])); SHAPES.len()];
        assert_eq!(compared(&world, &SHAPES, &places, DType::F32)?, "AR 1");
        // Sharding over a mesh dim of size 1 splits nothing.
        let mesh = DeviceMesh::new(&world, [3, 1], ["dp", "tp"])?;
        let places: Vec<Place<'_>> = vec![Some((&mesh, vec![Replicate, Shard(0)])); SHAPES.len()];
        assert_eq!(compared(&world, &SHAPES, &places, DType::F32)?, "0");
        Ok(())
    });
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let places: Vec<Place<'_>> = vec![Some((&mesh, vec![Shard(0)])); SHAPES.len()];
        assert_eq!(compared(&world, &SHAPES, &places, DType::F64)?, "AR 1");
        Ok(())
    });
    spmd(1, |world| {
        let mesh = DeviceMesh::new(&world, [1], "tp")?;
        let places: Vec<Place<'_>> = vec![Some((&mesh, vec![Shard(0)])); SHAPES.len()];
        assert_eq!(compared(&world, &SHAPES, &places, DType::F32)?, "0");
        Ok(())
    });
}

#[test]
fn a_non_finite_gradient_on_one_rank_is_an_error_on_all() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let whole = Tensor::from_slice(&[1.0, 2.0, 3.0, bad], [4])?;
            let parameter = with_grad(&distribute_tensor(&whole, &mesh, [Shard(0)])?)?;
            let before = bits(&parameter.grad().unwrap());
            for norm_type in [2.0, f64::INFINITY] {
                let options = ClipOptions { norm_type, error_if_nonfinite: true };
                raises(clip_grad_norm(from_ref(&parameter), 1.0, options), "for gradients is non-finite");
            }
            assert_eq!(bits(&parameter.grad().unwrap()), before);
            let norm = grad_norm(&[parameter], 2.0)?.item::<f32>()?;
            assert!(if bad.is_nan() { norm.is_nan() } else { norm == f32::INFINITY });
        }
        Ok(())
    });
}

#[test]
fn partial_gradients_are_an_error_before_anything_moves() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        let whole = Tensor::ones([4], DType::F32)?;
        let cut = with_grad(&distribute_tensor(&whole, &mesh, [Shard(0)])?)?;
        let sum = Tensor::from_local(&whole, &mesh, [Partial(ReduceOp::Sum)])?;
        let partial = Parameter::new(&sum)?;
        set_grad(&partial, &sum)?;
        let both = [cut.clone(), partial];
        let ((), calls) = counted(|| {
            raises(
                clip_grad_norm(&both, 1.0, ClipOptions::default()),
                "clip_grad_norm: a parameter or gradient is partial",
            );
            raises(clip_grad_value(&both, 1.0), "clip_grad_value: a parameter or gradient is partial");
            raises(grad_norm(&both, f64::NAN), "grad_norm");
            Ok(())
        })?;
        assert_eq!(calls, "0");
        assert_eq!(cut.grad().unwrap().full_tensor()?.to_vec::<f32>()?, [1.; 4]);

        // A rank outside the mesh cannot know the norm.
        let some = DeviceMesh::from_ranks(&world, &[0, 2], [2], "tp")?;
        let laid = with_grad(&distribute_tensor(&whole, &some, [Shard(0)])?)?;
        let norm = grad_norm(&[laid], 1.0);
        if world.rank() == 1 {
            raises(norm, "rank 1 is not in the mesh");
        } else {
            assert_eq!(norm?.item::<f32>()?, 4.0);
        }
        Ok(())
    });
}

#[test]
fn clip_grad_value_clips_each_shard_locally() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        for shape in SHAPES {
            let whole = random(shape, DType::F32, &[9]);
            for placements in [[Shard(0), Replicate], [Replicate, Shard(0)], [Shard(0), Shard(0)]] {
                let parameter = with_grad(&distribute_tensor(&whole, &mesh, placements)?)?;
                let ((), calls) = counted(|| clip_grad_value(from_ref(&parameter), 0.75))?;
                assert_eq!(calls, "0");
                let grad = parameter.grad().unwrap();
                assert_eq!(grad.placements(), placements);
                assert_eq!(bits(&grad.full_tensor()?), bits(&whole.clamp(-0.75, 0.75)?));
            }
        }
        Ok(())
    });
}
