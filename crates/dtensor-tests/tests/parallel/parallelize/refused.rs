//! Tests of errors: each one comes before anything changes, or all changes are undone.

use super::*;

/// A style that calls the given functions.
#[derive(Debug)]
struct ShardInfo {
    partition: fn(&dyn Module) -> Result<Option<Partition>>,
    apply: fn(&dyn Module) -> Result<()>,
}

impl Default for ShardInfo {
    fn default() -> Self {
        ShardInfo { partition: |_| Ok(None), apply: |_| Ok(()) }
    }
}

impl ParallelStyle for ShardInfo {
    fn partition(&self, module: &dyn Module, _: &DeviceMesh) -> Result<Option<Partition>> {
        (self.partition)(module)
    }

    fn apply(&self, module: &dyn Module, _: &DeviceMesh) -> Result<()> {
        (self.apply)(module)
    }
}

/// A style whose collective fails, because each rank passes a different shape.
#[derive(Debug)]
struct Disagreeing;

impl ParallelStyle for Disagreeing {
    fn partition(&self, _: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
        let group = mesh.group(0)?;
        group.all_reduce(&Tensor::ones([1 + group.rank()], DType::F32)?, ReduceOp::Sum)?;
        Ok(None)
    }

    fn apply(&self, _: &dyn Module, _: &DeviceMesh) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_failed_collective_in_a_style_keeps_its_error() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let error =
            parallelize_module(MLPModule::new(true)?, &mesh, plan! { "net1" => Disagreeing }).unwrap_err();
        let Some(dtensor::comm::Failure::Collective(fault)) = dtensor::comm::Failure::of(&error) else {
            panic!("not a fault: {error}")
        };
        assert_eq!(fault.call.collective.name(), "all_reduce");
        Ok(())
    });
}

#[test]
fn an_invalid_plan_is_an_error_and_changes_nothing() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let model = MLPStacked::new(2)?;
        let (col, row) = (ColwiseParallel::new, RowwiseParallel::new);
        // Bad paths. The entries before a bad one are not applied either.
        let first = || plan! { "layers.*.net1" => col() };
        for (path, words) in [
            (
                "layers.9.net1",
                "`layers.9.net1` could not be resolved: no submodule matching token `9` at level 1, in `layers` \
                 (ModuleList), whose submodules are `0`, `1`",
            ),
            ("nets.0", "no submodule matching token `nets` at level 0, in `MLPStacked` itself"),
            (
                "layers.*.net3",
                "token `net3` at level 2, in `layers.0` (MLPModule), whose submodules are `net1`, `relu`",
            ),
            (
                "layers.0.net1.weight",
                "no submodule matching token `weight` at level 3, in `layers.0.net1` (Linear), which has no",
            ),
            ("layers.", "no submodule matching token ``"),
            ("layers..0", "no submodule matching token ``"),
            ("MLPModule.layers.0.net1", "no submodule matching token `MLPModule`"),
            ("MLPStacked.MLPStacked", "no submodule matching token `MLPStacked`"),
        ] {
            refused(&model, &mesh, first().with(path, col()), &["parallelize_module: ", words]);
        }
        // Unsupported module types.
        refused(
            &model,
            &mesh,
            first().with("layers.1.relu", col()),
            &[
                "`layers.1.relu` (Relu): ColwiseParallel",
                "currently only support nn.Linear and nn.Embedding!",
            ],
        );
        refused(&model, &mesh, first().with("", row()), &["`MLPStacked`: RowwiseParallel", "only support"]);
        // Two styles for one module, in one plan or in two.
        let once = "distribute_module should only be called once on a module";
        refused(
            &model,
            &mesh,
            first().with("layers.0.net1", row()),
            &["`layers.0.net1` (Linear)", once, "already placed by ColwiseParallel(", "and RowwiseParallel("],
        );
        let done = parallelize_module(MLPModule::new(true)?, &mesh, mlp())?;
        refused(&done, &mesh, plan! { "net1" => col() }, &["`net1` (Linear)", once, "by ColwiseParallel("]);
        refused(
            &done,
            &mesh,
            plan! { "net2" => SequenceParallel::new() },
            &[once, "by RowwiseParallel(", "and SequenceParallel("],
        );
        // A module that is already distributed, and one whose parameters already have another layout.
        let whole = distribute_module(Linear::new(4, 4, true)?, &mesh, ())?;
        refused(&whole, &mesh, col(), &[once, "by distribute_module"]);
        let model2 = distribute_module(MLPModule::new(true)?, &mesh, ())?;
        refused(
            &model2,
            &mesh,
            mlp(),
            &["`net1.weight` already has the layout [16, 10] [R] on DeviceMesh", "needs [16, 10] [S(0)]"],
        );
        // A module without a `Base` has no place for hooks.
        #[derive(Debug, Module)]
        struct Bare {
            inner: Linear,
        }
        let bare = Bare { inner: Linear::new(2, 2, true)? };
        for style in [
            Box::new(SequenceParallel::new()) as Box<dyn ParallelStyle>,
            Box::new(PrepareModuleInput::new(Shard(0), Replicate)?),
            Box::new(PrepareModuleOutput::new(Shard(0), Replicate)?),
            Box::new(ShardInfo { partition: |_| Ok(Some(Partition::new())), ..ShardInfo::default() }),
        ] {
            let plan = plan! { "inner" => col(), "" => style };
            refused(
                &bare,
                &mesh,
                plan,
                &["`Bare`: ", "`Bare` has no place for hooks: add a field `base: Base`"],
            );
        }
        // User styles that name a missing parameter or dim, or return an error of their own.
        let told = |partition| ShardInfo { partition, ..ShardInfo::default() };
        let plan = first().with("layers.1.net2", told(|_| Ok(Some(vec![("wait".into(), Shard(0))]))));
        refused(&model, &mesh, plan, &["`layers.1.net2` (Linear)", "there is no parameter `wait`"]);
        let plan = first().with("layers.1.net2", told(|_| Ok(Some(vec![("bias".into(), Shard(1))]))));
        refused(&model, &mesh, plan, &["`layers.1.net2.bias`", "sharding dim 1 is equal to or greater"]);
        let plan = first().with("layers.1.net2", told(|_| Err(Error::argument("Told", "not today"))));
        refused(&model, &mesh, plan, &["`layers.1.net2` (Linear): Told: not today"]);
        // Invalid meshes and source ranks.
        let grid = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        refused(
            &model,
            &grid,
            first(),
            &["a 1-d mesh is needed", "(dp=2, tp=2)", "pass a sub-mesh, such as `&mesh[\"tp\"]`"],
        );
        let options = ParallelizeOptions { src_data_rank: Some(4), ..ParallelizeOptions::default() };
        raises(parallelize_module_with(&model, &mesh, first(), options), "src_data_rank: there is no rank 4");
        raises(parallelize_module(&model, None, first()), "no device mesh is currently active");
        assert!(laid(&model).iter().all(|at| at.ends_with(" -")));

        // A valid plan for the same model.
        parallelize_module(&model, &mesh, first().with("layers.*.net2", row()))?;
        assert!(laid(&model).iter().all(|at| !at.ends_with(" -")));
        Ok(())
    });
}

#[test]
fn a_plan_that_fails_half_way_is_undone() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = MLPModule::new(true)?;
        let hook = model.net2.base().unwrap().register_forward_hook(|_, _, outputs| Ok(outputs));
        model.forward(&Tensor::ones([1, 10], DType::F32)?)?.sum_all()?.backward()?;
        let before = whole_state(&model);
        let fails = ShardInfo {
            apply: |module| {
                module.base().unwrap().register_forward_hook(|_, _, outputs| Ok(outputs));
                Err(Error::argument("Told", "too late"))
            },
            ..ShardInfo::default()
        };
        raises(
            parallelize_module(&model, &mesh, mlp().with("", fails)),
            "parallelize_module: `MLPModule`: Told: too late",
        );
        assert_eq!(whole_state(&model), before);
        assert!(model.net1.weight.grad().is_some());
        // The module is not marked as distributed either, so a second plan works.
        hook.remove();
        parallelize_module(&model, &mesh, mlp())?;
        Ok(())
    });
}

#[test]
fn attention_heads_are_not_split() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let layer = Linear::new(4, 24, true)?.with_heads(6)?;
        let words = ["its 6 heads", "4 ranks", "a mesh of size 1, 2, 3, 6"];
        refused(&layer, &mesh, ColwiseParallel::new(), &words);
        refused(
            &(layer.clone(), Relu::new()),
            &mesh,
            plan! { "*" => ColwiseParallel::new() },
            &["`0` (Linear)"],
        );
        let pair = &DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?["tp"];
        parallelize_module(&layer, pair, ColwiseParallel::new())?;
        let even = Linear::new(4, 24, true)?.with_heads(8)?;
        parallelize_module(&even, &mesh, ColwiseParallel::new())?;
        // Without heads, any number of outputs can be sharded.
        parallelize_module(Linear::new(4, 6, true)?, &mesh, ColwiseParallel::new())?;
        Ok(())
    });
}

#[test]
fn mismatched_shards_are_an_error_on_all_ranks() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        // A linear layer knows its number of inputs, so it can check the size of a shard.
        let layer = parallelize_module(Linear::new(7, 2, true)?, &mesh, RowwiseParallel::new())?;
        let x = Tensor::ones([2, 7], DType::F32)?;
        raises(layer.forward(&x), "but the one given has shape [2, 7]");
        let own = [3, 3, 1][world.rank()];
        assert_eq!(layer.forward(&x.narrow(1, 0, own)?)?.dims(), [2, 2]);
        let style = ColwiseParallel::new().input_layouts(Shard(-1)).output_layouts(Replicate);
        let column = parallelize_module(Linear::new(7, 2, true)?, &mesh, style)?;
        assert_eq!(column.forward(&x.narrow(1, 0, own)?)?.dims(), [2, 2]);

        // For other dims, each rank assumes that all ranks have a shard of its own size. With different sizes, the ranks
        // compute different global shapes.
        let style = ColwiseParallel::new().input_layouts(Shard(0));
        let column = parallelize_module(Linear::new(4, 3, true)?, &mesh, style)?;
        let x = Tensor::ones([if world.rank() == 2 { 1 } else { 2 }, 4], DType::F32)?;
        raises(column.forward(&x), "does not match");
        Ok(())
    });
}

#[test]
fn inputs_are_checked_when_the_module_is_called() {
    #[derive(Clone, Debug, Module)]
    struct Takes {
        base: Base,
    }
    #[forward]
    impl Takes {
        fn forward(&self, x: &Tensor, y: Option<&Tensor>, n: usize, flag: bool) -> Result<Tensor> {
            let y = y.map_or(Ok(x.clone()), |y| x.add(y))?;
            if flag { y.mul(n as f64) } else { Ok(y) }
        }
    }
    #[derive(Clone, Debug, Module)]
    struct Two {
        base: Base,
    }
    #[forward]
    impl Two {
        fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>, f64)> {
            Ok((x.clone(), None, 1.0))
        }
    }
    spmd(2, |world| {
        let mesh = line(&world)?;
        let takes = |style: PrepareModuleInput| parallelize_module(Takes { base: Base::new() }, &mesh, style);
        let (part, whole) = (Tensor::ones([2, 3], DType::F32)?, Tensor::ones([4, 3], DType::F32)?);

        // Trailing inputs that are numbers, flags or `None` need no layout.
        let one = takes(PrepareModuleInput::new(Shard(0), Replicate)?)?;
        assert_eq!(one.forward(&part, None, 2, true)?.dims(), [4, 3]);
        let error = raises(
            one.forward(&part, Some(&part), 2, true),
            "module inputs and input_layouts should have same length!",
        );
        assert!(
            error.to_string().contains("`Takes` are (x: a tensor, y: a tensor, n: a number, flag: a flag)")
        );
        let two = takes(PrepareModuleInput::new((Shard(0), Replicate), (Replicate, Replicate))?)?;
        assert_eq!(two.forward(&part, Some(&whole), 2, false)?.dims(), [4, 3]);
        // If the input is `None`, its layouts are ignored.
        assert_eq!(two.forward(&part, None, 2, false)?.dims(), [4, 3]);
        let all =
            PrepareModuleInput::new((Shard(0), Replicate, None, None), (Replicate, Replicate, None, None))?;
        assert_eq!(takes(all)?.forward(&part, Some(&whole), 2, false)?.dims(), [4, 3]);
        let many = PrepareModuleInput::new([None; 5], [None; 5])?;
        raises(takes(many)?.forward(&part, None, 2, false), "should have same length!");
        let three = PrepareModuleInput::new((Shard(0), None, Shard(0)), (Replicate, None, Replicate))?;
        let three = takes(three)?;
        let (answer, calls) = record(|| three.forward(&part, None, 2, false));
        raises(
            answer,
            "expecting input to be a tensor, but `n` of (x: a tensor, y: nothing, n: a number, flag: a flag) is not",
        );
        // The error comes before the first input is redistributed.
        assert_eq!(calls.len(), 0);
        // Layouts are given by name for some inputs, and in order for the rest.
        let mixed = PrepareModuleInput::new(Replicate, Replicate)?
            .and_named([("x", Shard(0))], [("x", Replicate)])?;
        assert_eq!(takes(mixed)?.forward(&part, Some(&whole), 2, false)?.dims(), [4, 3]);
        let wrong = PrepareModuleInput::named([("z", Shard(0))], [("z", Replicate)])?;
        raises(
            takes(wrong)?.forward(&part, None, 2, false),
            "has `z`, but the inputs of `Takes` are (x: a tensor",
        );

        // A distributed input is redistributed from its own layout. Its `input_layouts` entry is ignored.
        let x = distribute_tensor(&whole, &mesh, [Shard(1)])?;
        let said = takes(PrepareModuleInput::new(Replicate, Replicate)?)?;
        let (y, counts) = counted(|| said.forward(&x, None, 1, false))?;
        assert_eq!((y.placements(), &counts[..]), (&[Replicate][..], "AG 1"));
        let said = takes(PrepareModuleInput::new(Shard(0), Shard(-1))?)?;
        let (y, counts) = counted(|| said.forward(&x, None, 1, false))?;
        assert_eq!((y.placements(), &counts[..]), (&[Shard(1)][..], "0"));
        // Without a desired layout, the input is not redistributed.
        let said = takes(PrepareModuleInput::new(Shard(0), [None])?)?;
        assert_eq!(said.forward(&part, None, 1, false)?.placements(), [Shard(0)]);
        // An input on another mesh is an error.
        let other = DeviceMesh::from_ranks(&world, &[1, 0], [2], "tp")?;
        let x = distribute_tensor(&whole, &other, [Shard(1)])?;
        raises(said.forward(&x, None, 1, false).and_then(|y| y.add(&part)), "mixed");
        let said = takes(PrepareModuleInput::new(Shard(0), Replicate)?)?;
        raises(said.forward(&x, None, 1, false), "cross device mesh comm not supported yet");

        // The same checks for outputs.
        let two = |style: PrepareModuleOutput| parallelize_module(Two { base: Base::new() }, &mesh, style);
        let (y, none, number) =
            two(PrepareModuleOutput::new((Shard(0), Shard(0), None), (Replicate, Replicate, None))?)?
                .forward(&part)?;
        assert_eq!((y.dims(), none.is_none(), number), (&[4, 3][..], true, 1.0));
        raises(
            two(PrepareModuleOutput::new(Shard(0), Replicate)?)?.forward(&part),
            "module outputs and output_layouts should have same length!, but `Two` has 3 outputs",
        );
        let all = two(PrepareModuleOutput::new([Shard(0); 3], [Replicate; 3])?)?;
        let (answer, calls) = record(|| all.forward(&part));
        raises(answer, "expecting output to be a tensor, but output 2 of `Two` is a number");
        assert_eq!(calls.len(), 0);

        // A first input that is not a tensor.
        #[derive(Clone, Debug, Module)]
        struct Odd {
            base: Base,
        }
        #[forward]
        impl Odd {
            fn forward(&self, n: usize) -> Result<Tensor> {
                Tensor::zeros([n], DType::F32)
            }
        }
        let odd = parallelize_module(Odd { base: Base::new() }, &mesh, SequenceParallel::new())?;
        raises(
            odd.forward(3),
            "expecting input of `Odd` to be a tensor (plain or distributed), but got a number",
        );
        // A sequence dim that the input does not have.
        let identity = parallelize_module(Identity::new(), &mesh, SequenceParallel::new())?;
        raises(identity.forward(&Tensor::ones([4], DType::F32)?), "sharding dim 1");
        Ok(())
    });
}

#[test]
fn hooks_are_an_error_if_forward_does_not_run_them() {
    spmd(2, |world| {
        /// Its `forward` lacks `#[forward]`, so it does not run hooks.
        #[derive(Module)]
        struct Forgetful {
            inner: Linear,
            base: Base,
        }
        impl Forgetful {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.inner.forward(x)
            }
        }
        let mesh = line(&world)?;
        let model = Forgetful { inner: Linear::new(2, 2, true)?, base: Base::new() };
        assert_eq!(model.forward(&Tensor::ones([1, 2], DType::F32)?)?.dims(), [1, 2]);
        let words = ["`Forgetful` does not run its hooks", "#[forward]"];
        refused(&model, &mesh, PrepareModuleInput::new(Shard(0), Replicate)?, &words);
        refused(&model, &mesh, PrepareModuleOutput::new(Shard(0), Replicate)?, &words);
        refused(&model, &mesh, SequenceParallel::new(), &words);
        let functions = DistributeModule::new().output_fn(|_, outputs, _| Ok(outputs));
        raises(distribute_module(&model, &mesh, functions), "does not run its hooks");
        // Without functions there are no hooks, so this is no error.
        distribute_module(&model, &mesh, ())?;
        assert_eq!(laid(&model), ["inner.weight R", "inner.bias R"]);
        Ok(())
    });
}

#[test]
fn a_transformer_whose_heads_cannot_be_split_evenly_is_unchanged() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let model = Transformer::new(&ModelArgs::default())?;
        let before = whole_state(&model);
        for sequence in [false, true] {
            let error =
                raises(Transformer::parallelize(model.clone(), &mesh, sequence), "4 heads").to_string();
            assert!(error.contains("layers.0.attention.w") && error.contains("1, 2, 4"), "{error}");
            assert_eq!(whole_state(&model), before);
        }
        Ok(())
    });
}
