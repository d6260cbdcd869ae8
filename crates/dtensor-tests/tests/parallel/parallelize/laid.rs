//! Tests of the layouts and values that a plan gives to parameters and buffers.

use super::*;

/// A model from tokens to logits. Its embedding table is also the weight of the output layer.
#[derive(Clone, Debug, Module)]
struct Tied {
    words: Embedding,
    norm: LayerNorm,
    output: Linear,
    base: Base,
}

#[forward]
impl Tied {
    fn new() -> Result<Self> {
        let words = Embedding::new(6, 4)?;
        let output = Linear::from_parameters(words.weight.clone(), None)?;
        Ok(Tied { words, norm: LayerNorm::new(4)?, output, base: Base::new() })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.norm.forward(&self.words.forward(ids)?)?)
    }
}

#[test]
fn a_shared_parameter_has_one_layout() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let words = || RowwiseParallel::new().input_layouts(Replicate);
        let output = || ColwiseParallel::new().output_layouts(Replicate);
        manual_seed(4);
        let single = Tied::new()?;
        let ids = Tensor::randint(0, 6, [3, 5])?;
        let weights = Tensor::rand([3, 5, 6], DType::F32)?;
        let want = single.forward(&ids)?;
        want.mul(&weights)?.sum_all()?.backward()?;
        // Both styles shard the weight along the vocabulary, in one plan or in two.
        for together in [true, false] {
            let model = deep_copy(&single)?;
            model.zero_grad();
            if together {
                parallelize_module(&model, &mesh, plan! { "words" => words(), "output" => output() })?;
            } else {
                parallelize_module(&model, &mesh, plan! { "words" => words() })?;
                parallelize_module(&model, &mesh, plan! { "output" => output() })?;
            }
            assert!(model.words.weight.is(&model.output.weight));
            assert_eq!(model.words.weight.get().placements(), [Shard(0)]);
            let y = model.forward(&ids)?;
            close(&y, &want);
            y.mul(&weights)?.sum_all()?.backward()?;
            close(&model.words.weight.grad().unwrap(), &single.words.weight.grad().unwrap());
        }
        // The two styles need different layouts.
        let model = deep_copy(&single)?;
        let plan = plan! { "words" => ColwiseParallel::new(), "output" => output() };
        refused(
            &model,
            &mesh,
            plan,
            &[
                "`output.weight` gets the placement S(1) as `words.weight` in ColwiseParallel(",
                "but ColwiseParallel(",
                "needs [6, 4] [S(0)]: a parameter can have only one layout",
            ],
        );
        parallelize_module(&model, &mesh, plan! { "words" => ColwiseParallel::new() })?;
        refused(
            &model,
            &mesh,
            plan! { "output" => output() },
            &[
                "`output.weight` already has the layout [6, 4] [S(1)] on DeviceMesh",
                "but ColwiseParallel(",
                "needs [6, 4] [S(0)]",
            ],
        );
        // A module in two places is distributed once.
        let layer = Linear::new(4, 4, true)?;
        let twice =
            parallelize_module((layer.clone(), layer), &mesh, plan! { "*" => ColwiseParallel::new() })?;
        assert_eq!(twice.0.forward(&Tensor::ones([2, 4], DType::F32)?)?.dims(), [2, 1]);
        assert_eq!(format!("{:?}", twice.1.base().unwrap()), "Base(training, 1 hooks before and 1 after)");
        Ok(())
    });
}

#[test]
fn values_come_from_the_source_rank() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let rank = world.rank() as f64;
        // Every rank has different values.
        let make = || -> Result<(Linear, LayerNorm)> {
            let linear = Linear::from_parameters(
                Parameter::new(&Tensor::full([4, 3], rank, DType::F32)?)?,
                Some(Parameter::new(&Tensor::full([4], rank, DType::F32)?)?),
            )?;
            let norm = LayerNorm::new(3)?;
            norm.weight.as_ref().unwrap().set(&Tensor::full([3], rank, DType::F32)?)?;
            Ok((linear, norm))
        };
        let plan = || plan! { "0" => ColwiseParallel::new(), "1" => SequenceParallel::new() };
        for source in 0..RANKS {
            let options = ParallelizeOptions { src_data_rank: Some(source), ..ParallelizeOptions::default() };
            let ((linear, norm), counts) =
                counted(|| parallelize_module_with(make()?, &mesh, plan(), options))?;
            assert_eq!(counts, "B 2 + S 2");
            let weight = linear.weight.get().full_tensor()?;
            assert_eq!(weight.to_vec::<f32>()?, [source as f32; 12]);
            assert_eq!(norm.weight.as_ref().unwrap().get().to_local()?.to_vec::<f32>()?, [source as f32; 3]);
        }
        let own = ParallelizeOptions { src_data_rank: None, ..ParallelizeOptions::default() };
        // The values must be equal then. Here they differ on purpose, to see that each rank takes its own.
        let take =
            || dtensor::check_replicated(false, || parallelize_module_with(make()?, &mesh, plan(), own));
        let ((linear, norm), counts) = counted(take)?;
        assert_eq!(counts, "0");
        assert_eq!(linear.weight.get().to_local()?.to_vec::<f32>()?, [rank as f32; 3]);
        assert_eq!(norm.weight.as_ref().unwrap().get().to_local()?.to_vec::<f32>()?, [rank as f32; 3]);
        // The collectives record the line of the caller.
        let (model, calls) = dtensor::comm::record(|| parallelize_module(make()?, &mesh, plan()));
        model?;
        assert!(calls.iter().all(|call| call.at.file == file!()), "{calls:?}");
        Ok(())
    });
}

#[test]
fn frozen_parameters_stay_frozen_and_buffers_are_replicated() {
    #[derive(Clone, Debug, Module)]
    struct Stats {
        scale: Parameter,
        inner: LayerNorm,
        seen: Buffer,
        base: Base,
    }
    #[forward]
    impl Stats {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.inner.forward(x)?.mul(&self.scale.get())?.add(&self.seen.get())
        }
    }
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = MLPModule::new(true)?;
        model.net1.weight.set_requires_grad(false)?;
        model.net2.set_requires_grad(false)?;
        let model = parallelize_module(model, &mesh, mlp())?;
        let wanted: Vec<bool> = model.parameters().iter().map(Parameter::requires_grad).collect();
        assert_eq!(wanted, [false, true, false, false]);
        model.forward(&Tensor::ones([2, 10], DType::F32)?)?.sum_all()?.backward()?;
        let had: Vec<bool> = model.parameters().iter().map(|p| p.grad().is_some()).collect();
        assert_eq!(had, wanted);

        let seen = Buffer::new(&Tensor::full([4], world.rank() as f64 + 1.0, DType::F32)?);
        let scale = Parameter::frozen(&Tensor::ones([4], DType::F32)?);
        let stats = Stats { scale, inner: LayerNorm::new(4)?, seen, base: Base::new() };
        let stats = parallelize_module(stats, &mesh, SequenceParallel::new())?;
        assert_eq!(laid(&stats), ["scale R", "inner.weight R", "inner.bias R", "seen R"]);
        assert!(!stats.scale.requires_grad());
        assert_eq!(stats.seen.get().to_local()?.to_vec::<f32>()?, [1.; 4]);
        assert_eq!(stats.forward(&Tensor::ones([1, 2, 4], DType::F32)?)?.dims(), [1, 4, 4]);
        Ok(())
    });
}

#[test]
fn meta_models_get_their_values_on_the_mesh() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(5);
        let single = MLPModule::with_sizes(6, 10, 3, true)?;
        let model = on_device(Device::Meta, || MLPModule::with_sizes(6, 10, 3, true))?;
        let (model, counts) = counted(|| parallelize_module(model, &mesh, mlp()))?;
        assert_eq!(counts, "0");
        assert!(model.parameters().iter().all(|p| p.get().is_meta() && p.get().is_distributed()));
        assert_eq!(model.forward(&Tensor::meta_of([2, 6], DType::F32)?)?.dims(), [2, 3]);
        model.to_empty(Device::Cpu)?;
        manual_seed(5);
        model.reset_parameters()?;
        // The random values are the same as on a single device.
        for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
            assert_eq!(ours.get().full_tensor()?.to_vec::<f32>()?, theirs.get().to_vec::<f32>()?);
        }
        let x = Tensor::rand([2, 6], DType::F32)?;
        close(&model.forward(&x)?, &single.forward(&x)?);
        Ok(())
    });
}

#[test]
fn copies_of_a_parallelized_model_are_parallelized() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = parallelize_module(MLPModule::new(true)?, &mesh, mlp())?;
        let (same, copy) = (model.clone(), deep_copy(&model)?);
        let x = Tensor::ones([2, 10], DType::F32)?;
        let before = model.forward(&x)?;
        close(&copy.forward(&x)?, &before);
        let zero = Tensor::zeros([10, 16], DType::F32)?;
        model.net2.weight.set(&distribute_tensor(&zero, &mesh, [Shard(1)])?)?;
        close(&same.forward(&x)?, &model.forward(&x)?);
        close(&copy.forward(&x)?, &before);
        raises(parallelize_module(&copy, &mesh, mlp()), "should only be called once");

        // Full tensors are sharded when they are loaded.
        let single = MLPModule::new(true)?;
        let state: StateDict = single.state_dict();
        model.load_state_dict(&state, true)?;
        assert_eq!(model.net2.weight.get().placements(), [Shard(1)]);
        close(&model.forward(&x)?, &single.forward(&x)?);
        Ok(())
    });
}

#[test]
fn a_user_style_shards_what_it_names_and_replicates_the_rest() {
    /// A layer that multiplies by a matrix from the left. `Rows` shards the matrix along its rows.
    #[derive(Clone, Debug, Module)]
    struct Left {
        matrix: Parameter,
        shift: Parameter,
        base: Base,
    }
    #[forward]
    impl Left {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.matrix.get().matmul(x)?.add(&self.shift.get())
        }
    }
    #[derive(Debug)]
    struct Rows;
    impl ParallelStyle for Rows {
        fn partition(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
            let rows = module.get_parameter("matrix")?.get().dims()[0];
            if rows < mesh.size() {
                return Err(Error::argument(
                    "Rows",
                    format!("{rows} rows are too few for {} ranks", mesh.size()),
                ));
            }
            Ok(Some(vec![("matrix".into(), Shard(-2))]))
        }

        fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
            assert_eq!(module.get_parameter("matrix")?.get().placements(), [Shard(0)]);
            let mesh = mesh.clone();
            let base = module.base().expect("checked before");
            base.register_forward_pre_hook(move |_, mut inputs| {
                inputs["x"] = distribute_tensor_from(inputs.tensor("x")?, &mesh, [Replicate], None)?.into();
                Ok(inputs)
            });
            base.register_forward_hook(|_, _, outputs| Ok(outputs.tensor(0)?.full_tensor()?.into()));
            Ok(())
        }
    }
    spmd(3, |world| {
        let mesh = line(&world)?;
        let left = |rows: usize| -> Result<Left> {
            Ok(Left {
                matrix: Parameter::new(
                    &Tensor::arange(0, 4 * rows as i64, 1, DType::F32)?.reshape([rows, 4])?,
                )?,
                shift: Parameter::new(&Tensor::ones([1], DType::F32)?)?,
                base: Base::new(),
            })
        };
        refused(&left(2)?, &mesh, Rows, &["`Left`: Rows: 2 rows are too few for 3 ranks"]);
        let x = Tensor::ones([4, 2], DType::F32)?;
        let (single, laid_out) = (left(5)?, parallelize_module(left(5)?, &mesh, Rows)?);
        assert_eq!(laid(&laid_out), ["matrix S(0)", "shift R"]);
        let (want, got) = (single.forward(&x)?, laid_out.forward(&x)?);
        close(&got, &want);
        want.sum_all()?.backward()?;
        got.sum_all()?.backward()?;
        close(&laid_out.matrix.grad().unwrap(), &single.matrix.grad().unwrap());
        close(&laid_out.shift.grad().unwrap(), &single.shift.grad().unwrap());
        refused(&laid_out, &mesh, Rows, &["already placed by Rows, and Rows would place them again"]);
        Ok(())
    });
}

#[test]
fn distribute_module_replicates_the_rest_of_a_model_without_a_base() {
    spmd(2, |world| {
        #[derive(Module)]
        struct Baseless {
            net1: Linear,
            net2: Linear,
            seen: Buffer,
        }
        let mesh = line(&world)?;
        let seen = Buffer::new(&Tensor::ones([2], DType::F32)?);
        let model = Baseless { net1: Linear::new(4, 4, false)?, net2: Linear::new(4, 4, false)?, seen };
        parallelize_module(&model, &mesh, mlp())?;
        assert_eq!(laid(&model), ["net1.weight S(0)", "net2.weight S(1)", "seen -"]);
        distribute_module(&model, &mesh, ())?;
        assert_eq!(laid(&model), ["net1.weight S(0)", "net2.weight S(1)", "seen R"]);
        distribute_module(&model, &mesh, ())?;
        let partition = DistributeModule::new().partition_fn(|_, _, _| Ok(()));
        raises(distribute_module(&model, &mesh, partition), "only be called once");
        Ok(())
    });
}

/// A column-wise embedding and a row-wise layer share one weight. Its gradient is the sum over both uses.
#[test]
fn a_tied_weight_has_one_gradient() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(3);
        let words = Embedding::new(6, 10)?;
        let output = Linear::from_parameters(words.weight.clone(), None)?;
        let single = (words, output);
        let model = parallelize_module(
            deep_copy(&single)?,
            &mesh,
            plan! { "0" => ColwiseParallel::new(), "1" => RowwiseParallel::new() },
        )?;
        assert_eq!(laid(&model), ["0.weight S(1)"]);
        assert!(model.0.weight.is(&model.1.weight));
        let ids = Tensor::from_slice(&[0i64, 5, 5, 2, 1], [5])?;
        let run = |model: &(Embedding, Linear)| {
            let y = model.1.forward(&model.0.forward(&ids)?)?;
            y.pow(2.0)?.sum_all()?.backward()?;
            Ok::<_, Error>((y.detach(), model.0.weight.grad().unwrap()))
        };
        let (((y, grad), counts), (want, want_grad)) = (counted(|| run(&model))?, run(&single)?);
        assert_eq!(counts, "AR 1");
        assert_eq!(grad.placements(), [Shard(1)]);
        close(&y, &want);
        close(&grad, &want_grad);
        Ok(())
    });
}
