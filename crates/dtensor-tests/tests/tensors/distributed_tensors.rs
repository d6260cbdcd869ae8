//! Tests that distributed tensors behave like local ones: construction, printing, reading and gradients.

use dtensor::comm::{ReduceOp, World, launch, record};
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{
    BackwardOptions, DType, Device, DeviceMesh, Error, FromLocalOptions, Generator, ImplicitCommunication,
    Partial, Placement, RedistributeOptions, Reduction, Replicate, Result, Shard, StridedShard, Tensor,
    distribute_tensor, explicit_communication, grad, on_device, sharded,
};

const P: Placement = Partial(ReduceOp::Sum);

/// The layouts of a matrix on a 2 × 2 mesh that the tests iterate over.
fn layouts() -> Vec<[Placement; 2]> {
    let each = [Replicate, Shard(0), Shard(1), P];
    let strided = [StridedShard { dim: 0, split_factor: 2 }, Shard(0)];
    each.iter().flat_map(|&a| each.map(|b| [a, b])).chain([strided]).collect()
}

/// A matrix of small integers.
fn matrix(rows: usize, columns: usize) -> Result<Tensor> {
    let numbers = (0..rows * columns).map(|i| ((i * 7 + 3) % 11) as f64 - 4.0).collect();
    Tensor::from_vec::<f64>(numbers, [rows, columns])
}

#[test]
fn like_constructors_keep_the_layout() {
    let mesh = DeviceMesh::new(&World::simulated(4, 3).unwrap(), [4], "tp").unwrap();
    let x = sharded::zeros([10, 3], DType::F32, &mesh, [Shard(0)]).unwrap();
    for like in [x.ones_like().unwrap(), x.full_like(2).unwrap(), x.empty_like(Device::Cpu).unwrap()] {
        assert_eq!(like.layout(), x.layout());
        assert_eq!(like.to_local().unwrap().dims(), [1, 3]);
    }
    for random in [x.rand_like().unwrap(), x.randn_like().unwrap()] {
        assert_eq!(random.layout(), x.layout());
    }
    let meta = x.to_device(Device::Meta).unwrap();
    assert!(meta.is_meta());
    assert_eq!(meta.layout(), x.layout());
    assert_eq!(meta.redistribute([Shard(1)]).unwrap().to_local().unwrap().dims(), [10, 0]);
    // The shards of a partial tensor of ones would sum to more than one.
    let sum = sharded::zeros([2], DType::F32, &mesh, [P]).unwrap();
    assert_eq!(sum.ones_like().unwrap().placements(), [Replicate]);
}

#[test]
fn printing_shows_the_local_shard_and_gathers_nothing() {
    let mesh = DeviceMesh::new(&World::simulated(2, 1).unwrap(), [2], "tp").unwrap();
    let x = Tensor::arange(0, 4, 1, DType::F32).unwrap().view([4, 1]).unwrap();
    let x = dtensor::distribute_tensor_from(&x, &mesh, [Shard(0)], None).unwrap();
    assert_eq!(x.to_string(), "[[2.]\n [3.]]\n([4, 1] [S(0)] on DeviceMesh((tp=2), 'cpu', ranks=0..2))");
    assert_eq!(
        format!("{x:?}"),
        "DTensor(local_tensor=tensor([[2.],\n        [3.]], dtype=f32), device_mesh=DeviceMesh((tp=2), 'cpu', \
         ranks=0..2), placements=[S(0)], shape=[4, 1])"
    );
}

#[test]
fn sharded_constructors_match_the_full_tensor() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let draws = || (Generator::new(7), Generator::new(7));
        for placements in layouts() {
            for shape in [[4, 6], [5, 3], [1, 1], [0, 4]] {
                for dtype in [DType::F32, DType::F64, DType::BF16] {
                    let (mut a, mut b) = draws();
                    let pairs = [
                        (
                            Tensor::rand_with(shape, dtype, &mut a)?,
                            sharded::rand_with(shape, dtype, &mesh, placements, &mut b)?,
                        ),
                        (
                            Tensor::randn_with(shape, dtype, &mut a)?,
                            sharded::randn_with(shape, dtype, &mesh, placements, &mut b)?,
                        ),
                        (
                            Tensor::full(shape, 2.5, dtype)?,
                            sharded::full(shape, 2.5, dtype, &mesh, placements)?,
                        ),
                        (Tensor::ones(shape, dtype)?, sharded::ones(shape, dtype, &mesh, placements)?),
                    ];
                    for (whole, laid) in pairs {
                        assert_eq!(laid.placements(), placements);
                        assert_eq!(laid.full_tensor()?.to_f64_vec()?, whole.to_f64_vec()?, "{placements:?}");
                    }
                    assert_eq!(a, b);
                }
            }
        }
        for placements in [[Shard(0), Replicate], [Shard(0), Shard(0)], [Replicate, P]] {
            for n in [0, 1, 5, 9] {
                let whole = Tensor::arange(3, 3 + 2 * n, 2, DType::I64)?;
                let laid = sharded::arange(3, 3 + 2 * n, 2, DType::I64, &mesh, placements)?;
                assert_eq!(laid.full_tensor()?.to_vec::<i64>()?, whole.to_vec::<i64>()?);
                let whole = Tensor::linspace(-1.0, 2.0, n as usize, DType::F32)?;
                let laid = sharded::linspace(-1.0, 2.0, n as usize, DType::F32, &mesh, placements)?;
                assert_eq!(laid.full_tensor()?.to_vec::<f32>()?, whole.to_vec::<f32>()?);
            }
        }
        Ok(())
    });
}

#[test]
fn second_derivatives_pass_through_redistribution() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x = Tensor::from_slice(&[1f64, 2., 3.], [3])?.requires_grad_(true)?;
        let options = || BackwardOptions { create_graph: true, ..Default::default() };
        let replicated = Tensor::from_local(&x, &mesh, [Replicate])?;
        let y = replicated.redistribute([Shard(0)])?.full_tensor()?.pow(3)?.sum_all()?;
        let dx = grad(&y, &[&x], options())?.remove(0).unwrap();
        assert_eq!(dx.to_vec::<f64>()?, [3., 12., 27.]);
        let ddx = grad(&dx.sum_all()?, &[&x], options())?.remove(0).unwrap();
        assert_eq!(ddx.to_vec::<f64>()?, [6., 12., 18.]);
        Ok(())
    });
}

#[test]
fn from_local_accepts_uneven_shards_when_asked() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let rows = [2, 1, 1, 1][world.rank()];
        let part = Tensor::full([rows, 3], world.rank() as f64, DType::F32)?;
        let options = FromLocalOptions { uneven: true, ..Default::default() };
        let x = Tensor::from_local_with(&part, &mesh, [Shard(0), Shard(0)], options.clone())?;
        assert_eq!(x.dims(), [5, 3]);
        assert_eq!(x.full_tensor()?.select(1, 0)?.to_vec::<f32>()?, [0., 0., 1., 2., 3.]);
        // Shards that do not follow the chunk rule are an error on every rank, and the ranks stay in step.
        let part = Tensor::zeros([world.rank(), 3], DType::F32)?;
        let refused = Tensor::from_local_with(&part, &mesh, [Shard(0), Shard(0)], options);
        assert!(matches!(refused, Err(Error::Argument { op: "from_local", .. })));
        world.group().barrier()
    });
}

#[test]
fn accumulating_a_gradient_moves_nothing() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        for placements in [[Shard(0), Shard(1)], [Replicate, Shard(0)], [P, Shard(1)]] {
            let w = distribute_tensor(&matrix(5, 3)?.requires_grad_(true)?, &mesh, placements)?;
            let gradient = || -> Result<Option<Tensor>> {
                Ok(Some(distribute_tensor(&matrix(5, 3)?, &mesh, placements)?))
            };
            let moved = w.redistribute(placements)?;
            let options = |gradient| BackwardOptions { gradient, retain_graph: true, ..Default::default() };
            let (first, second) = (gradient()?, gradient()?);
            moved.backward_with(options(first))?;
            let (done, calls) = record(|| moved.backward_with(options(second)));
            done?;
            assert!(calls.is_empty(), "{calls:?}");
            let total = w.grad().unwrap();
            assert_eq!(total.placements(), placements);
            assert_eq!(total.full_tensor()?.to_f64_vec()?, matrix(5, 3)?.mul(2.0)?.to_f64_vec()?);
        }
        Ok(())
    });
}

#[test]
fn a_rank_outside_the_mesh_keeps_the_device_of_the_tensor() {
    spmd(3, |world| {
        let mesh = DeviceMesh::from_ranks(&world, &[0, 1], [2], ())?;
        let x = matrix(4, 2)?;
        // The default device for new tensors does not matter here.
        let y = on_device(Device::Meta, || distribute_tensor(&x, &mesh, [Shard(0)]))?;
        assert_eq!((y.device(), y.to_local()?.device()), (Device::Cpu, Device::Cpu));
        Ok(())
    });
}

#[test]
fn redistributing_gradients_of_a_leaf_is_attributed_to_backward() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x = distribute_tensor(&matrix(4, 4)?, &mesh, [Shard(0)])?;
        for placement in [Replicate, Shard(1)] {
            let w = distribute_tensor(&matrix(4, 4)?, &mesh, [placement])?.requires_grad_(true)?;
            let whole = w.redistribute([Replicate])?.detach();
            // Partial sums are added before they are reduced; the other gradients have the leaf's layout already.
            let uses = || -> Result<Tensor> {
                let (a, b) = (x.matmul(&w)?.sum_all()?, w.mul(&w)?.sum_all()?);
                a.add(&b)?.add(&x.matmul(&w.mul(2.0)?)?.sum_all()?)
            };
            let loss = uses()?;
            let line = line!() + 1;
            let back = || explicit_communication(ImplicitCommunication::Error, || loss.backward());
            let (done, calls) = record(back);
            done?;
            if placement == Replicate {
                assert_eq!(
                    calls.iter().map(|call| call.collective.name()).collect::<Vec<_>>(),
                    ["all_reduce"]
                );
                let call = &calls[0];
                assert_eq!((call.at.file.as_ref(), call.at.line, call.implicit()), (file!(), line, None));
            }
            assert!(calls.iter().all(|call| call.implicit().is_none()), "{calls:?}");
            let got = w.grad().unwrap();
            assert_eq!(got.layout(), w.layout());
            let (x, w) = (x.full_tensor()?, whole.full_tensor()?.requires_grad_(true)?);
            let loss = x.matmul(&w)?.sum_all()?.mul(3.0)?.add(&w.mul(&w)?.sum_all()?)?;
            loss.backward()?;
            assert_eq!(got.full_tensor()?.to_vec::<f64>()?, w.grad().unwrap().to_vec::<f64>()?);
        }
        Ok(())
    });
}

#[test]
fn a_pass_that_fails_while_accumulating_changes_no_gradient() {
    launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let local = Tensor::ones([2], DType::F64)?.requires_grad_(true)?;
        // Partial maxima cannot be added shard by shard, so accumulating such a gradient communicates.
        let laid = distribute_tensor(&Tensor::ones([2], DType::F64)?, &mesh, [Partial(ReduceOp::Max)])?;
        let laid = laid.requires_grad_(true)?;
        let loss = || -> Result<Tensor> {
            let a = laid.redistribute([Replicate])?.to_local()?.sum_all()?;
            // This is recorded last, so backward visits it first.
            a.add(&local.mul(2.0)?.sum_all()?)
        };
        loss()?.backward()?;
        let before = laid.grad().unwrap().to_local()?.to_vec::<f64>()?;
        let again = loss()?;
        if world.rank() == 1 {
            return Ok(());
        }
        let error = again.backward().unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
        assert_eq!(local.grad().unwrap().to_vec::<f64>()?, [2., 2.]);
        assert_eq!(laid.grad().unwrap().to_local()?.to_vec::<f64>()?, before);
        Ok(())
    })
    .unwrap();
}

/// Ranks that disagree about the shape return an error, even if every shard fits.
#[test]
fn distributing_different_shapes_is_an_error() {
    for placements in [[Shard(0), Replicate], [Replicate, Shard(0)], [Shard(1), Shard(0)], [P, Replicate]] {
        spmd_outcomes(
            4,
            move |world| {
                let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
                let rows = if world.rank() == 0 { 4 } else { 3 };
                distribute_tensor(&Tensor::ones([rows, 2], DType::F32)?, &mesh, placements).map(drop)
            },
            |rank, outcome| {
                let message = outcome.unwrap_err().to_string();
                assert!(message.contains(&format!("rank {rank}")), "{message}");
                let differ = message.contains("[4, 2]") && message.contains("[3, 2]");
                assert!(differ || message.contains("has left the world"), "{message}");
            },
        );
    }
}

/// `Shard(0)` of `[4, 2]` and of `[5, 2]` on two ranks: rank 1 has two rows in both cases.
#[test]
fn a_shard_that_fits_by_chance_is_an_error() {
    spmd_outcomes(
        2,
        |world| {
            let mesh = DeviceMesh::new(&world, [2], "tp")?;
            let x = Tensor::ones([4 + world.rank(), 2], DType::F32)?;
            distribute_tensor(&x, &mesh, [Shard(0)]).map(drop)
        },
        |_, outcome| {
            let message = outcome.unwrap_err().to_string();
            assert!(
                message.contains("a shard of [4, 2]") && message.contains("a shard of [5, 2]"),
                "{message}"
            );
        },
    );
}

/// The error shows the sizes even if they are the only difference between the ranks' descriptors.
#[test]
fn a_mismatch_error_shows_the_sizes() {
    spmd_outcomes(
        2,
        |world| {
            let x = Tensor::ones([2], DType::F32)?;
            let sizes = if world.rank() == 0 { [2, 2] } else { [1, 2] };
            world.group().all_gather_uneven(&x, 0, &sizes).map(drop)
        },
        |_, outcome| {
            let message = outcome.unwrap_err().to_string();
            assert!(message.contains("sizes [1, 2]"), "{message}");
        },
    );
}

#[test]
fn from_local_uses_the_given_shape_on_a_rank_outside_the_mesh() {
    spmd(3, |world| {
        let mesh = DeviceMesh::from_ranks(&world, &[0, 1], [2], "tp")?;
        let part = if world.rank() < 2 {
            Tensor::ones([2, 3], DType::F32)?
        } else {
            Tensor::zeros([0], DType::F32)?
        };
        let options = FromLocalOptions { shape: Some([2, 6].into()), ..FromLocalOptions::default() };
        let x = Tensor::from_local_with(&part, &mesh, [Shard(1)], options)?;
        assert_eq!((x.dims(), x.placements()), (&[2, 6][..], &[Shard(1)][..]));
        Ok(())
    });
}

#[test]
fn mixing_tensors_of_two_worlds_is_an_error() -> Result<()> {
    let old = launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        sharded::ones([4], DType::F32, &mesh, [Shard(0)])
    })?;
    launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let new = sharded::ones([4], DType::F32, &mesh, [Shard(0)])?;
        let old = &old[world.rank()];
        assert_ne!(old.mesh(), new.mesh());
        let message = new.add(old).unwrap_err().to_string();
        for word in ["add", "cross-mesh", "of one world", "of another"] {
            assert!(message.contains(word), "{message}");
        }
        let options = RedistributeOptions { mesh: Some(mesh), ..RedistributeOptions::default() };
        let message = old.redistribute_with([Replicate], options).unwrap_err().to_string();
        assert!(message.contains("of another"), "{message}");
        // Two handles of the same mesh in one world are equal.
        let twin = DeviceMesh::new(&world, [2], "tp")?;
        assert_eq!(Some(&twin), new.mesh());
        new.add(&sharded::ones([4], DType::F32, &twin, [Shard(0)])?).map(drop)
    })?;
    Ok(())
}

#[test]
fn the_error_of_a_loss_with_mixed_tensors_names_the_loss() -> Result<()> {
    let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], ())?;
    let (x, y) = (sharded::ones([4], DType::F32, &mesh, [Shard(0)])?, Tensor::ones([4], DType::F32)?);
    let message = x.mse_loss(&y, Reduction::Mean).unwrap_err().to_string();
    assert!(message.starts_with("mse_loss: got mixed local and distributed"), "{message}");
    Ok(())
}

#[test]
fn too_many_ranks_are_an_error() {
    let message = launch(2_000_000, |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("2000000 ranks") && message.contains("World::simulated"), "{message}");
}
