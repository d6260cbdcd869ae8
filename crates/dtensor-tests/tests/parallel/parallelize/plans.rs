//! Tests of plans: how paths name modules, how plans and styles are written, and on which mesh they act.

use super::*;

#[test]
fn paths_name_modules_with_wildcards_level_by_level() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let (col, row) = (ColwiseParallel::new, RowwiseParallel::new);
        for (path, at) in [
            ("layers.0.net1", &["layers.0.net1"][..]),
            ("MLPStacked.layers.0.net1", &["layers.0.net1"]),
            ("layers.*.net1", &["layers.0.net1", "layers.1.net1", "layers.2.net1"]),
            ("*.*.net1", &["layers.0.net1", "layers.1.net1", "layers.2.net1"]),
            ("layers.[0-1].net?", &["layers.0.net1", "layers.0.net2", "layers.1.net1", "layers.1.net2"]),
            ("layers.[!0].n*1", &["layers.1.net1", "layers.2.net1"]),
            ("MLPStacked.layers.2.net[2-9]", &["layers.2.net2"]),
        ] {
            let model = parallelize_module(MLPStacked::new(3)?, &mesh, plan! { path => col() })?;
            let all = laid(&model);
            assert_eq!(all.iter().filter(|at| at.ends_with("S(0)")).count(), 2 * at.len(), "{path}: {all:?}");
            for at in at {
                assert!(all.contains(&format!("{at}.bias S(0)")), "{path}: {all:?}");
            }
        }
        // As in PyTorch's test of `CommDebugMode`, all paths begin with the type of the root.
        let model = parallelize_module(
            MLPStacked::new(2)?,
            &mesh,
            plan! {
                "MLPStacked.layers.0.net1" => col(),
                "MLPStacked.layers.0.net2" => row(),
                "MLPStacked.layers.1.net1" => col(),
                "MLPStacked.layers.1.net2" => row(),
            },
        )?;
        assert_eq!(model.parameters().iter().filter(|p| p.get().is_distributed()).count(), 8);
        assert_eq!(model.forward(&Tensor::ones([3, 10], DType::F32)?)?.dims(), [3, 10]);

        // The empty path and the type of the root name the model itself.
        for path in ["", "Linear"] {
            let layer = parallelize_module(Linear::new(4, 4, false)?, &mesh, plan! { path => row() })?;
            assert_eq!(laid(&layer), ["weight S(1)"]);
        }
        // A child with the same name as the root's type takes precedence.
        #[derive(Debug, Module)]
        #[allow(non_snake_case)]
        struct Outer {
            Outer: Linear,
            other: Linear,
        }
        let outer = Outer { Outer: Linear::new(2, 2, false)?, other: Linear::new(2, 2, false)? };
        let outer = parallelize_module(outer, &mesh, plan! { "Outer" => col() })?;
        assert_eq!(laid(&outer), ["Outer.weight S(0)", "other.weight -"]);
        // Some matches of a wildcard may lack the rest of the path, as long as one has it.
        #[derive(Debug, Module)]
        struct Uneven {
            a: MLPModule,
            b: Relu,
        }
        let uneven = Uneven { a: MLPModule::new(false)?, b: Relu::new() };
        let uneven = parallelize_module(uneven, &mesh, plan! { "*.net1" => col() })?;
        assert_eq!(laid(&uneven), ["a.net1.weight S(0)", "a.net2.weight -"]);
        Ok(())
    });
}

#[test]
fn a_plan_is_a_style_or_a_list_of_paths_and_styles() -> Result<()> {
    launch(2, |world| {
        let mesh = line(&world)?;
        let linear = || Linear::new(4, 4, false);
        let listed = [("0", ColwiseParallel::new()), ("1", ColwiseParallel::new())];
        let model = parallelize_module((linear()?, linear()?), &mesh, listed)?;
        assert_eq!(laid(&model), ["0.weight S(0)", "1.weight S(0)"]);
        let boxed: Vec<(String, Box<dyn ParallelStyle>)> = vec![
            ("0".to_string(), Box::new(ColwiseParallel::new())),
            ("1".to_string(), Box::new(RowwiseParallel::new())),
        ];
        let model = parallelize_module((linear()?, linear()?), &mesh, boxed)?;
        assert_eq!(laid(&model), ["0.weight S(0)", "1.weight S(1)"]);
        let shared: std::sync::Arc<dyn ParallelStyle> = std::sync::Arc::new(RowwiseParallel::new());
        let model = (linear()?, linear()?);
        for layer in [&model.0, &model.1] {
            parallelize_module(layer, &mesh, shared.clone())?;
        }
        assert_eq!(laid(&model), ["0.weight S(1)", "1.weight S(1)"]);

        let plan = mlp();
        assert_eq!((plan.len(), plan.is_empty()), (2, false));
        assert_eq!(
            format!("{plan:?}"),
            "{\"net1\": ColwiseParallel(input_layouts=(Replicate,), output_layouts=(Shard(-1),), \
             use_local_output=true), \"net2\": RowwiseParallel(input_layouts=(Shard(-1),), \
             output_layouts=(Replicate,), use_local_output=true)}"
        );
        Ok(())
    })?;
    Ok(())
}

#[test]
fn styles_show_their_layouts() -> Result<()> {
    let sequence = SequenceParallel::default();
    assert_eq!(sequence.to_string(), "SequenceParallel(sequence_dim=1, use_local_output=false)");
    let input = PrepareModuleInput::new((Shard(0), None), (Replicate, None))?
        .and_named([("mask", Shard(1))], [("mask", Replicate)])?;
    assert_eq!(
        format!("{input:?}"),
        "PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate, None), \
         input_kwarg_layouts={mask: Shard(1)}, desired_input_kwarg_layouts={mask: Replicate}, use_local_output=false)"
    );
    let output = PrepareModuleOutput::new(Replicate, Shard(-1))?;
    assert_eq!(
        output.to_string(),
        "PrepareModuleOutput(output_layouts=(Replicate,), desired_output_layouts=(Shard(-1),), use_local_output=true)"
    );
    let both = PrepareModuleInputOutput::new(PrepareModuleInput::new(Shard(0), Replicate)?, output);
    assert_eq!(
        both.to_string(),
        "PrepareModuleInputOutput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate,), \
         input_kwarg_layouts=None, desired_input_kwarg_layouts=None, use_local_input=false, \
         output_layouts=(Replicate,), desired_output_layouts=(Shard(-1),), use_local_output=true)"
    );
    Ok(())
}

#[test]
fn contradictory_layouts_are_an_error_at_construction() {
    raises(
        PrepareModuleInput::new((Shard(0), Shard(1)), Replicate),
        "input_layouts and desired_input_layouts should have same length!",
    );
    raises(PrepareModuleInput::new(Shard(0), ()), "desired module inputs should not be None!");
    raises(PrepareModuleInput::new((), Shard(0)), "should have same length!");
    raises(PrepareModuleInput::new((Shard(0), None), (Shard(0), Replicate)), "input 1: its layout is None");
    raises(
        PrepareModuleInput::named([("x", Shard(0)), ("y", Shard(0))], [("x", Replicate)]),
        "input_kwarg_layouts and desired_input_kwarg_layouts should have same length!",
    );
    raises(PrepareModuleInput::named([("x", Shard(0))], [("y", Replicate)]), "has `x`, but desired");
    raises(
        PrepareModuleInput::named([("x", Shard(0)), ("x", Shard(0))], [("x", Replicate), ("y", Replicate)]),
        "`x` is in {x: Shard(0), x: Shard(0)} twice",
    );
    raises(
        PrepareModuleOutput::new((Shard(0), None), Replicate),
        "output_layouts and desired_output_layouts should have same length!",
    );
    raises(PrepareModuleOutput::new([None], [Some(Replicate)]), "output 0: its layout is None");
}

#[test]
fn a_lenient_plan_skips_unknown_paths_and_an_empty_plan_does_nothing() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let lenient = ParallelizeOptions { lenient: true, ..ParallelizeOptions::default() };
        let plan = plan! { "net1" => ColwiseParallel::new(), "net7.*" => ColwiseParallel::new() };
        let (model, warned) =
            warnings(|| parallelize_module_with(MLPModule::new(false)?, &mesh, plan, lenient.clone()));
        assert_eq!(laid(&model?), ["net1.weight S(0)", "net2.weight -"]);
        assert_eq!(warned.len(), 1);
        for words in [
            "`net7.*` could not be resolved",
            "no submodule matching token `net7`",
            "skipping this plan entry",
        ] {
            assert!(warned[0].contains(words), "{warned:?}");
        }
        // A lenient plan still returns all other errors.
        let model = MLPModule::new(false)?;
        let plan = plan! { "relu" => ColwiseParallel::new() };
        raises(parallelize_module_with(&model, &mesh, plan, lenient), "only support");

        let before = whole_state(&model);
        let (model, warned) = warnings(|| parallelize_module(model, &mesh, ParallelPlan::new()));
        assert_eq!(whole_state(&model?), before);
        assert!(warned.len() == 1 && warned[0].contains("no parallelize_plan is provided"), "{warned:?}");
        Ok(())
    });
}

#[test]
fn a_shared_module_is_found_by_each_of_its_paths() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        for name in ["0", "1", "*"] {
            let layer = Linear::new(4, 4, true)?;
            let model =
                parallelize_module((layer.clone(), layer), &mesh, plan! { name => ColwiseParallel::new() })?;
            assert_eq!(laid(&model), ["0.weight S(0)", "0.bias S(0)"], "{name}");
            assert!(format!("{:?}", model.1.base()).contains("1 hooks before"), "{name}");
        }
        Ok(())
    });
}

#[test]
fn a_plan_acts_on_a_submesh_or_on_the_mesh_in_scope() {
    spmd(RANKS, |world| {
        let grid = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let single = MLPModule::new(true)?;
        let x = Tensor::rand([3, 10], DType::F32)?;
        let want = single.forward(&x)?;
        let given = parallelize_module(deep_copy(&single)?, &grid["tp"], mlp())?;
        let scoped = use_mesh(&grid["dp"], || parallelize_module(deep_copy(&single)?, None, mlp()))?;
        for (model, name) in [(given, "tp"), (scoped, "dp")] {
            let weight = model.net1.weight.get();
            assert_eq!((weight.mesh(), weight.to_local()?.dims()), (Some(&grid[name]), &[8, 10][..]));
            let (y, calls) = dtensor::comm::record(|| model.forward(&x));
            assert_eq!((calls.len(), &*calls[0].group), (1, name));
            // The collective of a hook records the line that called the layer.
            assert!(calls[0].at.file.ends_with("models/mlp.rs"), "{:?}", calls[0].at);
            close(&y?, &want);
        }
        // A rank outside the mesh makes the same calls, but does not communicate.
        let two = DeviceMesh::from_ranks(&world, &[2, 0], [2], "tp")?;
        let model = parallelize_module(deep_copy(&single)?, &two, mlp())?;
        let (y, counts) = counted(|| model.forward(&x))?;
        if two.coordinate().is_some() {
            close(&y, &want);
        } else {
            assert_eq!(counts, "0");
        }
        // On a mesh of one rank there is no communication.
        let alone = DeviceMesh::from_ranks(&world, &[world.rank()], [1], "tp")?;
        let (model, counts) = counted(|| parallelize_module(deep_copy(&single)?, &alone, mlp()))?;
        let (y, more) = counted(|| model.forward(&x))?;
        assert_eq!((&counts[..], &more[..]), ("0", "0"));
        close(&y, &want);
        Ok(())
    });
}
