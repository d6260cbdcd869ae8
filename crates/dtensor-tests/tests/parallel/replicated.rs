//! Tensors that are taken as replicated must be equal on all ranks. With `check_replicated`, a difference is an error on all
//! ranks that names the module, the argument, the ranks and the lines. Correct programs get no error, and no collective more.

use dtensor::comm::{Call, Cause, Failure, World, record};
use dtensor::models::MLPModule;
use dtensor::nn::{Base, Embedding, Identity, LayerNorm, Linear};
use dtensor::optim::AdamW;
use dtensor::parallel::{DataParallel, DataParallelOptions, ParallelizeOptions, parallelize_module_with};
use dtensor::prelude::*;
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{check_replicated, distribute_tensor_from};

const F: DType = DType::F32;

fn line_mesh(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], "tp")
}

/// Returns a tensor that is other on one rank.
fn differs_on(world: &World, rank: usize, shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::full(shape, if world.rank() == rank { 2.0 } else { 1.0 }, F)
}

fn is_not_replicated(error: &Error) -> bool {
    matches!(Failure::of(error), Some(Failure::Collective(fault)) if matches!(*fault.cause, Cause::NotReplicated { .. }))
}

/// Asserts that an error is of this check and contains all words.
#[track_caller]
fn expect_difference(outcome: Result<Error>, words: &[&str]) {
    let error = outcome.expect("the body itself does not fail");
    let message = error.to_string();
    assert!(is_not_replicated(&error) && message.contains("different values"), "{message}");
    words.iter().for_each(|word| assert!(message.contains(word), "no {word:?} in: {message}"));
}

fn mlp(mesh: &DeviceMesh) -> Result<MLPModule> {
    let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
    parallelize_module(MLPModule::new(true)?, mesh, plan)
}

/// Trains for two steps on batches of this seed and returns the losses and the calls.
fn train(world: &World, check: bool, seed: u64) -> Result<(Vec<f32>, Vec<Call>)> {
    let mesh = line_mesh(world)?;
    let model = mlp(&mesh)?;
    let optimizer = AdamW::new(model.parameters(), 0.01)?;
    manual_seed(seed);
    let (losses, calls) = record(|| {
        check_replicated(check, || {
            (0..2)
                .map(|_| {
                    optimizer.zero_grad();
                    let x = Tensor::rand([4, 10], F)?;
                    let loss = model.forward(&x)?.mse_loss(&x, Reduction::Mean)?;
                    loss.backward()?;
                    optimizer.step()?;
                    loss.item::<f32>()
                })
                .collect::<Result<Vec<f32>>>()
        })
    });
    Ok((losses?, calls))
}

#[test]
fn different_batches_are_an_error_that_names_module_argument_ranks_and_lines() {
    const LINE: u32 = line!() + 8;
    spmd_outcomes(
        4,
        |world| {
            let mesh = line_mesh(&world)?;
            let model = mlp(&mesh)?;
            manual_seed(world.rank() as u64);
            let x = Tensor::rand([4, 10], F)?;
            let y = check_replicated(true, || model.net1.forward(&x))?;
            Ok(model.net2.forward(&y).expect_err("the batches differ"))
        },
        |rank, outcome| {
            let error = outcome.expect("the body itself does not fail");
            let message = error.to_string();
            let Some(Failure::Collective(fault)) = Failure::of(&error) else { panic!("{message}") };
            let Cause::NotReplicated { one, other, ranks } = &*fault.cause else { panic!("{message}") };
            assert_eq!((fault.rank, one.0, other.0, &ranks[..]), (rank, 0, 1, &[1, 2, 3][..]), "{message}");
            let x = "`x` of ColwiseParallel (f32 [4, 10] with hash ";
            assert_eq!(message.matches(x).count(), 2, "{message}");
            assert_eq!(message.matches(", in module MLPModule.net1)").count(), 2, "{message}");
            assert_eq!(message.matches(&format!("replicated.rs:{LINE}, in module")).count(), 2, "{message}");
            assert!(message.contains("ranks [1, 2, 3] differ from rank 0"), "{message}");
            assert!(message.contains("check_replicated"), "{message}");
        },
    );
}

#[test]
fn each_rank_shows_its_own_line() {
    const LINE: u32 = line!() + 7;
    spmd_outcomes(
        2,
        |world| {
            let mesh = line_mesh(&world)?;
            check_replicated(true, || {
                match world.rank() {
                    0 => Tensor::from_local(&Tensor::ones([3], F)?, &mesh, [Replicate])?,
                    _ => Tensor::from_local(&Tensor::zeros([3], F)?, &mesh, [Replicate])?,
                };
                Ok(sharded::ones([4], F, &mesh, [Shard(0)])?.full_tensor().expect_err("the tensors differ"))
            })
        },
        |_, outcome| {
            let (one, other) = (format!("replicated.rs:{LINE})"), format!("replicated.rs:{})", LINE + 1));
            expect_difference(outcome, &["`local` of from_local", &one, &other]);
        },
    );
}

#[test]
fn equal_batches_train_alike_with_the_same_collectives() {
    spmd(4, |world| {
        let (losses, calls) = train(&world, true, 3)?;
        let (expected, others) = train(&world, false, 3)?;
        assert_eq!(losses, expected);
        let names = |calls: &[Call]| calls.iter().map(|call| call.to_string()).collect::<Vec<_>>();
        assert_eq!(names(&calls), names(&others));
        // The check was on in one run only.
        assert!(calls.iter().any(|call| call.replicas.is_some()));
        assert!(others.iter().all(|call| call.replicas.is_none()));
        Ok(())
    });
}

#[test]
fn different_batches_train_on_if_the_check_is_off() {
    spmd(2, |world| {
        let (losses, _) = train(&world, false, world.rank() as u64)?;
        let all = world.group().all_gather_object(&losses)?;
        assert_ne!(all[0], all[1]);
        Ok(())
    });
}

#[test]
fn the_check_is_on_by_default_in_debug_builds() {
    spmd(2, |world| {
        let mesh = line_mesh(&world)?;
        let x = sharded::ones([4], F, &mesh, [Shard(0)])?;
        let replicas = |x: &Tensor| Ok::<_, Error>(record(|| x.full_tensor()).1[0].replicas.is_some());
        assert!(!replicas(&x)?);
        Tensor::from_local(&Tensor::ones([2], F)?, &mesh, [Replicate])?;
        assert_eq!(replicas(&x)?, cfg!(debug_assertions));
        // Only tensors since the last collective are compared.
        assert!(!replicas(&x)?);
        Ok(())
    });
}

/// Takes two inputs, of which the second is optional.
#[derive(Module)]
struct Pair {
    base: Base,
}

#[forward]
impl Pair {
    fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        bias.map_or(Ok(x.clone()), |bias| x.add(bias))
    }
}

/// Every way by which a local tensor is taken as replicated.
#[test]
fn every_taker_of_replicated_tensors_compares_them() {
    type Take = fn(&DeviceMesh, &Tensor) -> Result<()>;
    let takers: [(Take, &[&str]); 13] = [
        (
            |mesh, x| {
                let layer = Linear::new(8, 4, false)?;
                parallelize_module(layer, mesh, ColwiseParallel::new())?.forward(x).map(drop)
            },
            &["`x` of ColwiseParallel", "in module Linear)"],
        ),
        (
            |mesh, x| {
                let style = RowwiseParallel::new().input_layouts(Replicate).output_layouts(Shard(0));
                parallelize_module(Linear::new(8, 4, false)?, mesh, style)?.forward(x).map(drop)
            },
            &["`x` of RowwiseParallel"],
        ),
        (
            |mesh, x| {
                let words = parallelize_module(Embedding::new(6, 4)?, mesh, RowwiseParallel::new())?;
                words.forward(&x.to_dtype(DType::I64)?).map(drop)
            },
            &["`ids` of RowwiseParallel (i64 [4, 8]"],
        ),
        (
            |mesh, x| {
                let prepare = PrepareModuleInput::new(Replicate, Shard(0))?;
                let outer = parallelize_module(Identity::new(), mesh, prepare)?;
                let style = SequenceParallel::new().sequence_dim(0);
                let norm = parallelize_module(LayerNorm::new([8])?, mesh, style)?;
                norm.forward(&outer.forward(x)?).map(drop)
            },
            &["of PrepareModuleInput", "in module Identity)"],
        ),
        (
            |mesh, x| {
                let style = PrepareModuleInput::named([("bias", Replicate)], [("bias", Replicate)])?;
                let pair = parallelize_module(Pair { base: Base::new() }, mesh, style)?;
                pair.forward(&sharded::ones([4, 8], F, mesh, [Replicate])?, Some(x)).map(drop)
            },
            &["`bias` of PrepareModuleInput", "in module Pair)"],
        ),
        (
            |mesh, x| {
                let style = PrepareModuleOutput::new(Replicate, Shard(0))?;
                parallelize_module(Identity::new(), mesh, style)?.forward(x).map(drop)
            },
            &["`output 0` of PrepareModuleOutput"],
        ),
        (
            |mesh, x| {
                let how = DistributeModule::new()
                    .input_fn(|_, inputs, mesh| Tensor::from_local(inputs.tensor(0)?, mesh, [Replicate]));
                distribute_module(Identity::new(), mesh, how)?.forward(x).map(drop)
            },
            &["`local` of from_local", "in module Identity)"],
        ),
        (
            |mesh, x| {
                let ones = sharded::ones([4, 8], F, mesh, [Shard(0)])?;
                dtensor::implicit_replication(|| ones.add(x)).map(drop)
            },
            &["`operand 1` of add"],
        ),
        (
            |mesh, x| {
                let logits = sharded::ones([4, 8], F, mesh, [Shard(1)])?;
                let target = x.narrow(1, 0, 1)?.reshape([4])?.to_dtype(DType::I64)?;
                loss_parallel(|| logits.cross_entropy(&target, CrossEntropyOptions::default())).map(drop)
            },
            &["`target` of cross_entropy"],
        ),
        (
            |mesh, x| {
                let sharded = sharded::ones([4, 8], F, mesh, [Shard(0)])?;
                let other = x.clone();
                let local = move |y: &Tensor| Ok((y.clone(), other.clone()));
                let mapped = local_map(local).out_placements((Shard(0), Replicate));
                mapped.call(&sharded).map(drop)
            },
            &["`output 1` of local_map"],
        ),
        (
            |mesh, x| {
                let layer = Linear::new(8, 4, true)?;
                layer
                    .bias
                    .as_ref()
                    .expect("it has one")
                    .set(&x.narrow(0, 0, 1)?.narrow(1, 0, 4)?.reshape([4])?)?;
                let options = ParallelizeOptions { src_data_rank: None, lenient: false };
                parallelize_module_with(layer, mesh, RowwiseParallel::new(), options).map(drop)
            },
            &["`bias` of parallelize_module"],
        ),
        (
            |mesh, x| {
                let layer = parallelize_module(Linear::new(8, 4, true)?, mesh, RowwiseParallel::new())?;
                let mut state = layer.state_dict();
                state.insert("bias".into(), x.narrow(0, 0, 1)?.narrow(1, 0, 4)?.reshape([4])?);
                layer.load_state_dict(&state, true).map(drop)
            },
            &["`bias` of load_state_dict"],
        ),
        (
            |mesh, x| {
                let norm = LayerNorm::new([8])?;
                norm.weight.as_ref().expect("it has one").set(&x.narrow(0, 0, 1)?.reshape([8])?)?;
                let options = DataParallelOptions { broadcast: false, ..Default::default() };
                DataParallel::new(&norm, mesh, options).map(drop)
            },
            &["`weight` of DataParallel"],
        ),
    ];
    for (take, words) in takers {
        // Called once per taker, with one name for all, so one run on processes tests all of them.
        spmd_outcomes(
            2,
            move |world| {
                let mesh = line_mesh(&world)?;
                let met = || mesh.group(())?.barrier();
                check_replicated(true, || {
                    take(&mesh, &Tensor::ones([4, 8], F)?)?;
                    met()
                })?;
                let x = differs_on(&world, 1, [4, 8])?;
                check_replicated(false, || {
                    take(&mesh, &x)?;
                    met()
                })?;
                let outcome = check_replicated(true, || take(&mesh, &x).and_then(|()| met()));
                Ok(outcome.expect_err("rank 1 passed another tensor"))
            },
            move |_, outcome| expect_difference(outcome, words),
        );
    }
}

#[test]
fn other_placements_are_never_compared() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        check_replicated(true, || {
            let mine = Tensor::full([2, 4], world.rank() as f64, F)?;
            for list in
                [[Shard(0), Shard(1)], [Partial(ReduceOp::Sum), Shard(0)], [Partial(ReduceOp::Max); 2]]
            {
                Tensor::from_local(&mine, &mesh, list)?.full_tensor()?;
            }
            // Replicated along "tp" only, and different along "dp".
            let batch = Tensor::full([2, 4], mesh.local_rank("dp")? as f64, F)?;
            let full = Tensor::from_local(&batch, &mesh, [Shard(0), Replicate])?.full_tensor()?;
            assert_eq!(full.to_vec::<f32>()?, [vec![0.0; 8], vec![1.0; 8]].concat());
            // Each replica has its own batch.
            let model = mlp(&mesh["tp"])?;
            let replicas = DataParallel::new(&model, &mesh["dp"], DataParallelOptions::default())?;
            manual_seed(replicas.rank() as u64);
            model.forward(&Tensor::rand([4, 10], F)?)?.sum_all()?.backward()?;
            replicas.average_gradients()?;
            // A rank on its own has nothing to compare with.
            let alone = DeviceMesh::from_ranks(&world, &[world.rank()], [1], "one")?;
            Tensor::from_local(&mine, &alone, [Replicate])?.full_tensor()?;
            mesh.group("dp")?.barrier()?;
            mesh.group("tp")?.barrier()
        })
    });
}

#[test]
fn a_difference_along_one_mesh_dim_is_found_there() {
    spmd_outcomes(
        4,
        |world| {
            let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
            check_replicated(true, || {
                let x = differs_on(&world, 3, [2, 4])?;
                Tensor::from_local(&x, &mesh, [Shard(0), Replicate])?;
                mesh.group("dp")?.barrier()?;
                Ok((mesh.group("tp")?.ranks().to_vec(), mesh.group("tp")?.barrier().err()))
            })
        },
        |_, outcome| {
            let (ranks, error) = outcome.unwrap();
            match error {
                Some(error) => {
                    assert_eq!(ranks, [2, 3]);
                    expect_difference(Ok(error), &["rank 2 passed `local`", "rank 3 passed `local`"]);
                }
                None => assert_eq!(ranks, [0, 1]),
            }
        },
    );
}

#[test]
fn a_group_over_several_mesh_dims_compares_too() {
    spmd_outcomes(
        4,
        |world| {
            let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
            let all = mesh.flatten("all")?;
            check_replicated(true, || {
                // Equal along the last mesh dim, and along the first.
                Tensor::from_local(&differs_on(&world, 3, [2])?, &mesh, [Replicate, Replicate])?;
                Ok(all.group(())?.barrier().expect_err("rank 3 passed another tensor"))
            })
        },
        |_, outcome| expect_difference(outcome, &["rank 0 passed `local`", "rank 3 passed `local`"]),
    );
}

/// Bits are compared: a NaN equals itself, and strides do not count.
#[test]
fn equal_tensors_of_every_kind_get_no_error() {
    spmd(3, |world| {
        let mesh = line_mesh(&world)?;
        check_replicated(true, || {
            let x = Tensor::from_slice(&[f32::NAN, 1.0, f32::INFINITY, -0.0, 2.0, 3.0], [2, 3])?;
            let transposed = if world.rank() == 0 { x.t()? } else { x.t()?.contiguous()? };
            let tensors = [
                x.clone(),
                transposed,
                Tensor::ones([0, 3], F)?,
                Tensor::scalar(4i64)?,
                Tensor::ones([1, 3], DType::BF16)?.expand([5, 3])?,
                Tensor::arange(0, 7, 1, DType::U8)?,
            ];
            for x in &tensors {
                let (_, calls) = record(|| {
                    Tensor::from_local(x, &mesh, [Replicate])?;
                    mesh.group(())?.barrier()
                });
                assert!(calls[0].replicas.is_some(), "{x:?}");
                mesh.group(())?.barrier()?;
            }
            // Meta tensors have no values. Their shapes are compared by the collectives on them.
            let meta = dtensor::on_device(Device::Meta, || Tensor::ones([world.rank()], F))?;
            Tensor::from_local(&meta, &mesh, [Replicate])?;
            mesh.group(())?.barrier()
        })
    });
}

#[test]
fn a_different_shape_or_dtype_is_a_difference() {
    spmd_outcomes(
        2,
        |world| {
            let mesh = line_mesh(&world)?;
            let (rows, dtype) = [(2, F), (3, DType::F64)][world.rank()];
            check_replicated(true, || {
                let x = Tensor::from_local(&Tensor::ones([rows], dtype)?, &mesh, [Replicate])?;
                Ok(x.redistribute([Partial(ReduceOp::Sum)])?.full_tensor().expect_err("the shapes differ"))
            })
        },
        |_, outcome| expect_difference(outcome, &["f32 [2]", "f64 [3]"]),
    );
}

#[test]
fn a_rank_that_takes_no_tensor_is_named() {
    spmd_outcomes(
        2,
        |world| {
            let mesh = line_mesh(&world)?;
            check_replicated(true, || {
                if world.rank() == 1 {
                    Tensor::from_local(&Tensor::ones([2], F)?, &mesh, [Replicate])?;
                }
                Ok(mesh.group(())?.barrier().expect_err("rank 0 passed no tensor"))
            })
        },
        |_, outcome| expect_difference(outcome, &["rank 0 passed only 0", "rank 1 passed `local`"]),
    );
}

#[test]
fn run_check_broadcasts_so_nothing_is_left_to_compare() {
    spmd(2, |world| {
        let mesh = line_mesh(&world)?;
        check_replicated(true, || {
            let options = FromLocalOptions { run_check: true, ..Default::default() };
            let x = Tensor::from_local_with(&differs_on(&world, 1, [2])?, &mesh, [Replicate], options)?;
            assert_eq!(x.to_local()?.to_vec::<f32>()?, [1.0, 1.0]);
            // So does a source.
            let x = distribute_tensor_from(&differs_on(&world, 1, [2])?, &mesh, [Replicate], Some(1))?;
            assert_eq!(x.to_local()?.to_vec::<f32>()?, [2.0, 2.0]);
            let (_, calls) = record(|| mesh.group(())?.barrier());
            assert!(calls[0].replicas.is_none());
            Ok(())
        })
    });
}

/// A recomputed region takes its inputs again, in the mode of the forward pass.
#[test]
fn recomputation_compares_as_the_forward_pass_did() {
    for on in [true, false] {
        spmd_outcomes(
            2,
            move |world| {
                let mesh = line_mesh(&world)?;
                let model = mlp(&mesh)?;
                let inner = model.clone();
                let x = Tensor::ones([4, 10], F)?.requires_grad_(true)?;
                let y = check_replicated(on, || checkpoint(&x, move |x| inner.forward(x)))?;
                let (result, calls) = record(|| check_replicated(!on, || y.sum_all()?.backward()));
                result?;
                assert_eq!(calls.iter().any(|call| call.replicas.is_some()), on);
                // Another batch on one rank.
                let x = differs_on(&world, 1, [4, 10])?.requires_grad_(true)?;
                let inner = model.clone();
                Ok(check_replicated(on, || checkpoint(&x, move |x| inner.forward(x)))
                    .and_then(|y| y.sum_all()?.backward()))
            },
            move |_, outcome| match outcome.unwrap() {
                Err(error) if on => expect_difference(Ok(error), &["MLPModule.net1"]),
                result => assert!(!on && result.is_ok()),
            },
        );
    }
}
