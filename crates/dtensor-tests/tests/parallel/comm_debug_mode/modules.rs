//! Tests of the module that a collective counts for, if modules run twice, are shared, are not in the tree or are
//! recomputed.

use super::*;

/// A layer that all-reduces its input first.
#[derive(Clone, Module)]
struct Reducing {
    layer: Linear,
    base: Base,
}

#[forward]
impl Reducing {
    fn forward(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
        self.layer.forward(&group.all_reduce(x, ReduceOp::Sum)?)
    }
}

fn reducing() -> Result<Reducing> {
    Ok(Reducing { layer: Linear::new(2, 2, false)?, base: Base::new() })
}

#[test]
fn a_module_may_run_twice_have_two_names_or_be_outside_the_tree() -> Result<()> {
    #[derive(Module)]
    struct Model {
        a: Reducing,
        /// The same module as `a`.
        b: Reducing,
        /// Skipped, so it is not in the module tree.
        #[module(skip)]
        hidden: Hidden,
    }
    struct Hidden(Reducing);
    #[forward]
    impl Model {
        fn forward(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
            let x = self.a.forward(x, group)?;
            let x = self.b.forward(&x, group)?;
            let x = self.a.forward(&x, group)?;
            self.hidden.0.forward(&x, group)
        }
    }
    let world = World::simulated(4, 0)?;
    let a = reducing()?;
    let model = Model { b: a.clone(), a, hidden: Hidden(reducing()?) };
    let x = Tensor::ones([1, 2], DType::F32)?.requires_grad_(true)?;
    let mode = CommDebugMode::record(|| model.forward(&x, world.group())?.sum_all()?.backward())?;
    let tree: Vec<_> = mode.module_depth_dict().into_iter().collect();
    let expected = [
        ("Global", 0),
        ("Model", 1),
        ("Model.a", 2),
        ("Model.a.layer", 3),
        ("Reducing", 2),
        ("Reducing.layer", 3),
    ];
    assert_eq!(tree, expected);
    let counts = mode.comm_module_counts();
    for (path, each) in [("Global", 4), ("Model", 4), ("Model.a", 3), ("Reducing", 1), ("Model.a.layer", 0)] {
        let of = &counts[path];
        assert_eq!((of.forward["all_reduce"], of.backward["all_reduce"]), (each, each), "{path}");
    }
    assert!(counts.get("Model.b").is_none());
    Ok(())
}

#[test]
fn roots_of_one_type_are_numbered_and_submodules_find_their_root() -> Result<()> {
    let world = World::simulated(4, 0)?;
    let (one, two) = (reducing()?, reducing()?);
    let x = Tensor::ones([1, 2], DType::F32)?;
    let mode = CommDebugMode::new();
    mode.run(|| {
        one.layer.forward(&x)?;
        one.forward(&x, world.group())?;
        two.forward(&x, world.group())?;
        two.layer.forward(&x)?;
        one.forward(&x, world.group())
    })?;
    assert_eq!(
        paths(&mode),
        ["Global", "Linear", "Reducing", "Reducing.layer", "Reducing#2", "Reducing#2.layer"]
    );
    let counts = mode.comm_module_counts();
    assert_eq!((counts["Reducing"]["all_reduce"], counts["Reducing#2"]["all_reduce"]), (2, 1));
    // The numbers start over in each run.
    mode.run(|| two.forward(&x, world.group()))?;
    assert_eq!(paths(&mode), ["Global", "Reducing", "Reducing.layer"]);
    Ok(())
}

#[test]
fn a_module_called_from_two_places_is_shown_in_both() -> Result<()> {
    #[derive(Module)]
    struct Model {
        a: Calling,
        c: Calling,
    }
    /// A module whose submodule may be shared with another module.
    #[derive(Module)]
    struct Calling {
        b: Reducing,
        base: Base,
    }
    #[forward]
    impl Calling {
        fn forward(&self, x: &Tensor, group: &Group, times: usize) -> Result<Tensor> {
            (0..times).try_fold(x.clone(), |x, _| self.b.forward(&x, group))
        }
    }
    #[forward]
    impl Model {
        fn forward(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
            let x = self.c.forward(&self.a.forward(x, group, 1)?, group, 2)?;
            self.a.forward(&x, group, 1)
        }
    }
    let b = reducing()?;
    let model = Model { a: Calling { b: b.clone(), base: Base::new() }, c: Calling { b, base: Base::new() } };
    let world = World::simulated(4, 0)?;
    let x = Tensor::ones([1, 2], DType::F32)?;
    let mode = CommDebugMode::record(|| model.forward(&x, world.group()))?;
    let counts: Vec<_> =
        mode.comm_module_counts().iter().map(|(path, counts)| (*path, counts["all_reduce"])).collect();
    let expected = [
        ("Global", 4),
        ("Model", 4),
        ("Model.a", 2),
        ("Model.a.b", 4),
        ("Model.a.b.layer", 0),
        ("Model.c", 2),
    ];
    assert_eq!(counts, expected);
    // The table shows the shared module below each caller, with the counts of those calls.
    let table = mode.tracing_table(0)?;
    let shown: Vec<_> = table
        .lines()
        .filter(|line| !line.contains("FORWARD PASS"))
        .map(|line| (line.find(|c| c != ' ').unwrap() / 4, line.trim().split(" of ").next().unwrap()))
        .collect();
    let expected = [
        (0, "Global"),
        (2, "all_reduce: 4"),
        (1, "Model"),
        (3, "all_reduce: 4"),
        (2, "Model.a"),
        (4, "all_reduce: 2"),
        (3, "Model.a.b"),
        (5, "all_reduce: 2"),
        (6, "2 × sum"),
        (4, "Model.a.b.layer"),
        (2, "Model.c"),
        (4, "all_reduce: 2"),
        (3, "Model.a.b"),
        (5, "all_reduce: 2"),
        (6, "2 × sum"),
        (4, "Model.a.b.layer"),
    ];
    assert_eq!(shown, expected, "{table}");
    let json: serde_json::Value = serde_json::from_str(&mode.to_json(1)?).unwrap();
    for caller in 0..2 {
        let b = &json["children"][0]["children"][caller]["children"][0];
        let reduced = &b["collectives_forward"][0];
        assert_eq!((&b["fqn"], &reduced["count"]), (&"Model.a.b".into(), &2.into()));
        assert_eq!(reduced["calls"].as_array().unwrap().len(), 2);
        let layer = &b["children"][0];
        assert_eq!(
            (&layer["parameters"][0]["name"], &layer["fqn"]),
            (&"weight".into(), &"Model.a.b.layer".into())
        );
    }
    Ok(())
}

#[test]
fn modules_without_parameters_are_identified_by_address() -> Result<()> {
    /// A module with data but without parameters.
    #[derive(Module)]
    struct Scale {
        by: f64,
    }
    #[forward]
    impl Scale {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            x.mul(self.by)
        }
    }
    #[derive(Module)]
    struct Scales {
        first: Scale,
        more: Vec<Scale>,
    }
    #[forward]
    impl Scales {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let x = self.more[1].forward(&self.more[0].forward(&self.first.forward(x)?)?)?;
            Scale { by: 2.0 }.forward(&x)
        }
    }
    let scale = |by| Scale { by };
    let model = Scales { first: scale(2.0), more: vec![scale(3.0), scale(4.0)] };
    let x = Tensor::ones([1], DType::F32)?;
    let mode = CommDebugMode::record(|| model.forward(&x))?;
    assert_eq!(paths(&mode), ["Global", "Scales", "Scales.first", "Scales.more.0", "Scales.more.1", "Scale"]);
    assert_eq!(mode.module_helper_dict()["Scale"].parents, ["Global", "Scales"]);
    assert_eq!(mode.comm_module_operation_counts()["Scales.more.1"].len(), 1);
    assert!(mode.get_parameter_info().is_empty());
    Ok(())
}

#[test]
fn parameters_in_lists_belong_to_the_module() -> Result<()> {
    #[derive(Module)]
    struct Lists {
        gains: Vec<Parameter>,
        bias: Parameter,
        layers: Vec<Linear>,
    }
    #[forward]
    impl Lists {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.layers[0].forward(&x.mul(&self.gains[0].get())?.add(&self.bias.get())?)
        }
    }
    let parameter = || Parameter::new(&Tensor::ones([2], DType::F32)?);
    let layers = vec![Linear::new(2, 2, false)?, Linear::new(2, 2, false)?];
    let model = Lists { gains: vec![parameter()?, parameter()?], bias: parameter()?, layers };
    let mode = CommDebugMode::record(|| model.forward(&Tensor::ones([1, 2], DType::F32)?))?;
    let info = mode.get_parameter_info();
    assert_eq!(info["Lists"].keys().collect::<Vec<_>>(), ["bias", "gains.0", "gains.1"]);
    // The second layer did not run.
    assert_eq!(info.keys().copied().collect::<Vec<_>>(), ["Lists", "Lists.layers.0"]);
    Ok(())
}

#[test]
fn errors_and_panics_leave_no_module_running() -> Result<()> {
    #[derive(Module)]
    struct Failing {
        inner: Fails,
    }
    #[derive(Module)]
    struct Fails {
        how: u8,
    }
    #[forward]
    impl Fails {
        fn forward(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
            let x = group.all_reduce(x, ReduceOp::Sum)?;
            match self.how {
                0 => Ok(x),
                1 => Err(Error::argument("fails", "as it should")),
                _ => panic!("as it should"),
            }
        }
    }
    #[forward]
    impl Failing {
        fn forward(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
            self.inner.forward(x, group)
        }
    }
    let world = World::simulated(4, 0)?;
    let x = Tensor::ones([1], DType::F32)?;
    let after = || world.group().all_gather_tensor(&x, 0);
    let mode = CommDebugMode::new();
    mode.run(|| {
        for how in 1..=2 {
            let model = Failing { inner: Fails { how } };
            let outcome = catch_unwind(AssertUnwindSafe(|| model.forward(&x, world.group())));
            assert_eq!((outcome.is_ok(), how), (how == 1, how));
        }
        after()
    })?;
    assert_eq!(paths(&mode), ["Global", "Failing", "Failing.inner"]);
    let counts = mode.comm_module_counts();
    assert_eq!((counts["Failing.inner"]["all_reduce"], counts["Failing"]["all_gather"]), (2, 0));
    assert_eq!(counts["Global"]["all_gather"], 1);
    // A panic in a run ends the run. The record remains.
    let model = Failing { inner: Fails { how: 2 } };
    assert!(catch_unwind(AssertUnwindSafe(|| mode.run(|| model.forward(&x, world.group())))).is_err());
    after()?;
    assert_eq!(names(&mode.collectives()), ["all_reduce"]);
    mode.run(after)?;
    assert_eq!((mode.get_total_counts(), paths(&mode)), (1, vec!["Global"]));
    Ok(())
}

#[test]
fn collectives_of_hooks_count_for_their_module_at_the_line_that_called_it() -> Result<()> {
    let mesh = four()?;
    let layer = Linear::new(10, 4, false)?;
    lay(&layer, &mesh, "weight", Shard(1))?;
    let base = layer.base().expect("layers have one");
    base.register_forward_pre_hook(|_, mut inputs| {
        inputs[0] = inputs.tensor(0)?.redistribute([Shard(1)])?.into();
        Ok(inputs)
    });
    base.register_forward_hook(|_, _, mut outputs| {
        outputs[0] = outputs.tensor(0)?.redistribute([Replicate])?.into();
        Ok(outputs)
    });
    let x = input(&mesh, Shard(0))?;
    let mode = CommDebugMode::record(|| layer.forward(&x))?;
    let line = line!() - 1;
    let calls = mode.collectives();
    assert_eq!(names(&calls), ["all_to_all", "all_reduce"]);
    assert!(calls.iter().all(|call| call.module == "Linear" && !call.implicit && call.line == line));
    Ok(())
}

#[test]
fn gradients_count_for_the_module_that_ran_forward() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "dp")?;
        let model = Mlp::new(&mesh)?;
        // Data parallelism: the weights are replicated and the rows are sharded.
        for (name, _) in model.named_parameters() {
            let value = model.get_parameter(&name)?.get().full_tensor()?;
            model.register_parameter(&name, &distribute_tensor(&value.detach(), &mesh, [Replicate])?)?;
        }
        let x = input(&mesh, Shard(0))?;
        let (forward, backward) = (CommDebugMode::new(), CommDebugMode::new());
        let loss = forward.run(|| model.net2.forward(&model.net1.forward(&x)?)?.sum_all())?;
        backward.run(|| loss.backward())?;
        let line = line!() - 1;
        assert_eq!(forward.get_total_counts(), 0);
        // Both weight gradients are reduced together, and no module ran both layers. The bias gradients need no reduction,
        // because the gradient of a sum is replicated.
        let counts = backward.comm_module_counts();
        assert_eq!((counts["Global"].backward["all_reduce"], backward.get_total_counts()), (1, 1));
        assert!(backward.collectives().iter().all(|call| call.line == line && !call.implicit));
        assert!(backward.get_parameter_info().is_empty());
        // The gradient of a single leaf counts for its module, although another mode recorded forward.
        let loss = forward.run(|| model.net1.forward(&x)?.sum_all())?;
        backward.run(|| loss.backward())?;
        assert_eq!(backward.comm_module_counts()["Linear"].backward["all_reduce"], 1);
        // If no mode recorded forward, the gradients count only for `Global`.
        let loss = model.net1.forward(&x)?.sum_all()?;
        backward.run(|| loss.backward())?;
        assert_eq!((paths(&backward), backward.get_total_counts()), (vec!["Global"], 1));
        Ok(())
    });
}

#[test]
fn gradients_do_not_count_for_another_module_of_the_same_name() -> Result<()> {
    let mesh = four()?;
    let x = input(&mesh, Shard(0))?;
    let layer = || -> Result<Linear> {
        let layer = Linear::new(10, 4, false)?;
        lay(&layer, &mesh, "weight", Replicate)?;
        Ok(layer)
    };
    let mode = CommDebugMode::new();
    // `old` has the name `Linear` when it runs. `new` has the same type and runs while the gradients of `old` are
    // computed. `old` may have been dropped by then.
    for gone in [false, true] {
        let old = layer()?;
        let loss = mode.run(|| old.forward(&x)?.sum_all())?;
        assert_eq!(paths(&mode), ["Global", "Linear"]);
        let kept = (!gone).then_some(old);
        let new = layer()?;
        let counts = |new_first: bool| -> Result<Vec<(&str, usize, usize)>> {
            mode.run(|| {
                if new_first {
                    new.forward(&x)?.redistribute([Replicate])?;
                }
                loss.backward_with(dtensor::BackwardOptions { retain_graph: true, ..Default::default() })?;
                new.forward(&x)?;
                Result::Ok(())
            })?;
            let of = |path: &'static str| {
                let operations = &mode.comm_module_operation_counts()[path];
                let forward = operations.iter().filter(|operation| operation.phase == Phase::Forward).count();
                (path, forward, mode.comm_module_counts()[path].backward.total())
            };
            Ok(paths(&mode).into_iter().skip(1).map(of).collect())
        };
        assert_eq!(counts(true)?, [("Linear", 2, 0), ("Linear#2", 0, 1)]);
        // `old` keeps its name if no other module took it first.
        assert_eq!(counts(false)?, [("Linear", 0, 1), ("Linear#2", 1, 0)]);
        drop(kept);
    }
    // A module type named `Global` is distinguished from the `Global` that contains everything.
    #[derive(Module)]
    struct Global;
    #[forward]
    impl Global {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            x.exp()
        }
    }
    mode.run(|| Global.forward(&x))?;
    assert_eq!(paths(&mode), ["Global", "Global#2"]);
    Ok(())
}

#[test]
fn modules_that_share_a_submodule_are_distinct() -> Result<()> {
    /// It has no base, so its contents identify it.
    #[derive(Clone, Module)]
    struct Tower {
        embed: Linear,
        proj: Linear,
    }
    #[forward]
    impl Tower {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.proj.forward(&self.embed.forward(x)?)
        }
    }
    let embed = Linear::new(2, 2, false)?;
    let tower = || Result::Ok(Tower { embed: embed.clone(), proj: Linear::new(2, 2, false)? });
    let (one, two) = (tower()?, tower()?);
    let x = Tensor::ones([1, 2], DType::F32)?;
    let mode = CommDebugMode::record(|| {
        one.forward(&x)?;
        two.forward(&x)?;
        // A clone is the same module.
        one.clone().forward(&x)
    })?;
    assert_eq!(
        paths(&mode),
        ["Global", "Tower", "Tower.embed", "Tower.proj", "Tower#2", "Tower#2.proj"],
        "what they share is called by the one that ran first"
    );
    assert_eq!(mode.module_helper_dict()["Tower#2.proj"].parents, ["Global", "Tower#2"]);
    assert_eq!(mode.comm_module_operation_counts()["Tower.embed"].len(), 3);
    assert_eq!(mode.comm_module_operation_counts()["Tower.proj"].len(), 2);
    Ok(())
}

/// Returns the all-reduce counts of a module in a transformer of two checkpointed layers: forward, backward,
/// recomputation.
fn reductions(path: &str) -> [usize; 3] {
    let below = path
        .strip_prefix("Transformer.layers.")
        .map(|path| path.split_once('.').map_or("", |(_, path)| path));
    match (path, below) {
        ("Global" | "Transformer", _) => [6, 9, 4],
        ("Transformer.tok_embeddings" | "Transformer.pos_embeddings", _) => [1, 0, 0],
        ("Transformer.output", _) => [0, 1, 0],
        (_, Some("")) => [2, 4, 2],
        (_, Some("attention")) => [1, 3, 1],
        (_, Some("feed_forward")) => [1, 1, 1],
        (_, Some("attention.wo" | "feed_forward.w2")) => [1, 0, 1],
        (_, Some("attention.wq" | "attention.wk" | "attention.wv" | "feed_forward.w1")) => [0, 1, 0],
        _ => [0, 0, 0],
    }
}

/// Asserts that a mode has the counts of [`reductions`] in the phases that it has recorded.
fn check_reductions(mode: &CommDebugMode, heard: [bool; 3]) {
    let phases = [Phase::Forward, Phase::Backward, Phase::Recomputation];
    let counts = mode.comm_module_counts();
    for (path, counts) in &counts {
        let known = phases.map(|phase| counts.of(phase)["all_reduce"]);
        let mut expected = reductions(path);
        expected.iter_mut().zip(heard).for_each(|(count, heard)| *count *= usize::from(heard));
        assert_eq!(known, expected, "{path}");
        let gathers = usize::from(heard[0] && ["Global", "Transformer", "Transformer.output"].contains(path));
        assert_eq!(counts.all().total(), expected.iter().sum::<usize>() + gathers, "{path}");
    }
}

/// Checks how a mode shows the recomputation during backward of a checkpointed transformer.
fn check_recomputation(mode: &CommDebugMode) -> Result<()> {
    let again: Vec<_> =
        mode.collectives().into_iter().filter(|call| call.phase == Phase::Recomputation).collect();
    assert!(again.iter().all(|call| call.name == "all_reduce" && call.group == "tp" && call.bytes == 4096));
    let modules: Vec<_> = again.iter().map(|call| &*call.module).collect();
    let layer = |i| ["attention.wo", "feed_forward.w2"].map(|path| format!("Transformer.layers.{i}.{path}"));
    assert_eq!(modules, [layer(1), layer(0)].concat());
    // A recomputed operator has the module name that it had in forward.
    for operation in mode.operations().iter().filter(|operation| operation.phase == Phase::Recomputation) {
        assert!(operation.module.starts_with("Transformer.layers."), "{operation} in {}", operation.module);
    }
    let again = mode.comm_module_operation_counts();
    let again =
        again["Transformer.layers.1.attention.wq"].iter().filter(|op| op.phase == Phase::Recomputation);
    assert_eq!(again.filter(|operation| operation.name == "linear").count(), 1);
    // The table has the all-reduce count of each module in which something was recomputed.
    let table = mode.tracing_table(0)?;
    let mut sections = Vec::new();
    let (mut module, mut lines) = ("", table.lines().map(str::trim).peekable());
    while let Some(line) = lines.next() {
        match line {
            "ACTIVATION CHECKPOINTING" => sections.push((module, lines.next().unwrap_or_default())),
            _ if line == "Global" || line.starts_with("Transformer") => module = line,
            _ => {}
        }
    }
    sections.sort_unstable();
    let below = ["", ".attention", ".attention.wo", ".feed_forward", ".feed_forward.w2"];
    let layers = [0, 1].map(|i| below.map(|below| format!("Transformer.layers.{i}{below}"))).concat();
    let paths = [vec!["Global".to_string(), "Transformer".to_string()], layers].concat();
    let expected: Vec<_> =
        paths.iter().map(|path| (&**path, format!("all_reduce: {}", reductions(path)[2]))).collect();
    assert_eq!(sections.iter().map(|(path, line)| (*path, line.to_string())).collect::<Vec<_>>(), expected);
    // The JSON has the same counts, and lists calls only for the modules that made them.
    fn find<'j>(node: &'j serde_json::Value, path: &str) -> Option<&'j serde_json::Value> {
        if node["fqn"] == path {
            return Some(node);
        }
        node["children"].as_array()?.iter().find_map(|child| find(child, path))
    }
    let json: serde_json::Value = serde_json::from_str(&mode.to_json(2)?).unwrap();
    for path in &paths {
        let node = find(&json, path).unwrap_or_else(|| panic!("{path} in {json}"));
        let [reduced] = &node["collectives_checkpointing"].as_array().unwrap()[..] else { panic!("{node}") };
        assert_eq!(
            (&reduced["name"], &reduced["count"]),
            (&"all_reduce".into(), &reductions(path)[2].into())
        );
        let own = usize::from(path.ends_with("wo") || path.ends_with("w2"));
        assert_eq!(reduced["calls"].as_array().unwrap().len(), own, "{path}");
    }
    let wq = find(&json, "Transformer.layers.1.attention.wq").unwrap();
    assert_eq!(wq["operations_checkpointing"][0]["name"], "linear");
    assert_eq!(wq["operations_checkpointing"][0]["phase"], "recomputation");
    Ok(())
}

#[test]
fn recomputation_counts_separately_under_the_names_of_forward() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let args = ModelArgs { dropout_p: 0.1, checkpoint_activations: true, ..ModelArgs::default() };
        let model = Transformer::parallelize(Transformer::new(&args)?, &mesh, false)?;
        let tokens = Tensor::randint(0, 8, [8, 8])?;
        let mode = CommDebugMode::new();
        mode.run(|| model.forward(&tokens)?.sum_all()?.backward())?;
        check_reductions(&mode, [true; 3]);
        check_recomputation(&mode)?;

        // Forward in one run, backward in another.
        let loss = mode.run(|| model.forward(&tokens)?.sum_all())?;
        check_reductions(&mode, [true, false, false]);
        let names = paths(&mode);
        mode.run(|| loss.backward())?;
        check_reductions(&mode, [false, true, true]);
        check_recomputation(&mode)?;
        assert!(paths(&mode).iter().all(|path| names.contains(path)), "{:?}", paths(&mode));

        // Another model of the same type and a single layer of this model may run in between, or in the same run.
        let other = Transformer::parallelize(Transformer::new(&args)?, &mesh, false)?;
        let h = Tensor::ones([8, 8, 16], DType::F32)?;
        let loss = mode.run(|| model.forward(&tokens)?.sum_all())?;
        mode.run(|| {
            other.forward(&tokens)?;
            model.layers[1].forward(&h)
        })?;
        mode.run(|| {
            loss.backward()?;
            model.layers[1].forward(&h)?;
            other.forward(&tokens)
        })?;
        check_recomputation(&mode)?;
        let counts = mode.comm_module_counts();
        let of = |path: &str| [&counts[path].forward, &counts[path].recomputation].map(|of| of["all_reduce"]);
        assert_eq!(
            [of("Transformer"), of("TransformerBlock"), of("Transformer#2")],
            [[0, 4], [2, 0], [6, 0]]
        );

        // Recomputation also works after the model was dropped.
        let loss = mode.run(|| model.forward(&tokens)?.sum_all())?;
        drop(model);
        mode.run(|| loss.backward())?;
        check_reductions(&mode, [false, true, true]);
        check_recomputation(&mode)
    });
}

#[test]
fn the_gradient_of_a_leaf_of_two_modules_is_redistributed_once() -> Result<()> {
    let mesh = four()?;
    #[derive(Module)]
    struct Tied {
        first: Linear,
        second: Linear,
    }
    #[forward]
    impl Tied {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.second.forward(&self.first.forward(x)?)
        }
    }
    let first = Linear::new(10, 10, false)?;
    let model = Tied { second: Linear::from_parameters(first.weight.clone(), None)?, first };
    lay(&model, &mesh, "first.weight", Replicate)?;
    let x = input(&mesh, Shard(0))?;
    let mode = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
    let counts = mode.comm_module_counts();
    assert_eq!((mode.get_total_counts(), counts["Tied"].backward["all_reduce"]), (1, 1));
    // It counts for the module that used the leaf last, because its gradient comes first.
    assert_eq!((counts["Tied.second"]["all_reduce"], counts["Tied.first"]["all_reduce"]), (1, 0));
    assert_eq!(
        mode.get_sharding_info().keys().collect::<Vec<_>>(),
        ["Tied.first.weight", "Tied.second.weight"]
    );
    Ok(())
}

#[test]
fn a_collective_counts_for_the_module_that_starts_it() -> Result<()> {
    #[derive(Module)]
    struct Begins;
    #[forward]
    impl Begins {
        fn forward(&self, x: &Tensor, group: &Group) -> Result<dtensor::comm::Pending<Tensor>> {
            group.all_reduce_async(x, ReduceOp::Sum)
        }
    }
    let world = World::simulated(4, 0)?;
    let x = Tensor::ones([1], DType::F32)?;
    let mode = CommDebugMode::record(|| Begins.forward(&x, world.group())?.wait())?;
    assert_eq!(mode.comm_module_counts()["Begins"]["all_reduce"], 1);
    assert_eq!(mode.get_total_counts(), 1);
    Ok(())
}

#[test]
fn mesh_dims_and_meshes_are_distinguished() -> Result<()> {
    let world = World::simulated(4, 0)?;
    let grid = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
    let line = DeviceMesh::new(&world, [4], "all")?;
    let x = sharded::ones([8, 8], DType::F32, &grid, [Shard(0), Shard(1)])?;
    let y = sharded::ones([8], DType::F32, &line, [Shard(0)])?;
    let mode = CommDebugMode::record(|| {
        x.redistribute([Shard(0), Replicate])?.exp()?;
        y.exp()?.redistribute([Replicate])
    })?;
    let groups: Vec<_> = mode.collectives().into_iter().map(|call| call.group).collect();
    assert_eq!(groups, ["tp", "all"]);
    let table = mode.tracing_table(1)?;
    let at = |line: u32| format!("at {}:{line}", file!());
    let first = line!() - 7;
    for text in [
        "mesh 1: DeviceMesh((dp=2, tp=2), 'cpu', ranks=0..4)\n".to_string(),
        "mesh 2: DeviceMesh((all=4), 'cpu', ranks=0..4)\n".to_string(),
        format!("redistribute(f32 [8, 8] S(0)S(1)) -> f32 [8, 8] S(0)R on mesh 1 {}", at(first)),
        format!("exp(f32 [8]) -> f32 [8] S(0) on mesh 2 {}", at(first + 1)).replace("[8])", "[8] S(0))"),
    ] {
        assert!(table.contains(&text), "{text}\n{table}");
    }
    Ok(())
}

#[test]
fn values_are_bit_identical_with_and_without_a_mode() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(5);
        let model = Mlp::new(&mesh)?;
        let x = input(&mesh, Replicate)?.requires_grad_(true)?;
        let step = || -> Result<Vec<u32>> {
            model.zero_grad();
            let y = model.forward(&x)?;
            y.sum_all()?.backward()?;
            let grads = model
                .parameters()
                .into_iter()
                .map(|p| p.grad().unwrap().to_local())
                .collect::<Result<Vec<_>>>()?;
            let all = [vec![y.to_local()?], grads].concat();
            all.iter().try_fold(Vec::new(), |mut bits, x| {
                bits.extend(x.to_vec::<f32>()?.into_iter().map(f32::to_bits));
                Ok(bits)
            })
        };
        let before = step()?;
        let mode = CommDebugMode::new();
        assert_eq!(mode.run(step)?, before);
        assert_eq!(step()?, before);
        assert_eq!(mode.get_total_counts(), 2);
        Ok(())
    });
}

#[test]
fn a_module_can_be_shared_by_ranks_on_threads() -> Result<()> {
    // Both ranks run the same module. Each mode records only its own rank.
    let model = Arc::new(reducing()?);
    launch(2, |world| {
        let x = Tensor::ones([1, 2], DType::F32)?;
        let mode = CommDebugMode::new();
        mode.run(|| {
            for _ in 0..=world.rank() {
                model.layer.forward(&x)?;
            }
            model.forward(&x, world.group())
        })?;
        assert_eq!(mode.operations().len(), 2 + world.rank());
        assert_eq!(mode.comm_module_counts()["Reducing"]["all_reduce"], 1);
        Ok(())
    })?;
    Ok(())
}
