//! What `CommDebugMode` hears, whom it counts it for, and how it shows it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use dtensor::debug::{CollectiveRecord, Phase};
use dtensor::models::{ModelArgs, Transformer};
use dtensor::nn::{Base, Linear, Module, Parameter, forward};
use dtensor::prelude::*;
use dtensor::testing::spmd;

/// The first layer cut by its outputs, the second by its inputs.
#[derive(Module)]
struct Mlp {
    net1: Linear,
    relu: Relu,
    net2: Linear,
}

/// Nothing tells one of these from another but its place.
#[derive(Module)]
struct Relu;

#[forward]
impl Relu {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.relu()
    }
}

/// The lines of what happens in an [`Mlp`].
const NET1: u32 = line!() + 7;
const RELU: u32 = NET1 + 1;
const NET2: u32 = NET1 + 2;

#[forward]
impl Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.net1.forward(x)?;
        let x = self.relu.forward(&x)?;
        self.net2.forward(&x)?.redistribute([Replicate])
    }
}

impl Mlp {
    fn new(mesh: &DeviceMesh) -> Result<Self> {
        let model = Mlp { net1: Linear::new(10, 16, true)?, relu: Relu, net2: Linear::new(16, 10, true)? };
        lay(&model, mesh, "net1.weight", Shard(0))?;
        lay(&model, mesh, "net1.bias", Shard(0))?;
        lay(&model, mesh, "net2.weight", Shard(1))?;
        lay(&model, mesh, "net2.bias", Replicate)?;
        Ok(model)
    }
}

fn lay(model: &dyn Module, mesh: &DeviceMesh, name: &str, placement: Placement) -> Result<()> {
    let value = distribute_tensor(&model.get_parameter(name)?.get(), mesh, [placement])?;
    model.register_parameter(name, &value)
}

/// One rank of four that are not there.
fn four() -> Result<DeviceMesh> {
    DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")
}

fn input(mesh: &DeviceMesh, placement: Placement) -> Result<Tensor> {
    distribute_tensor(&Tensor::ones([8, 10], DType::F32)?, mesh, [placement])
}

fn paths(mode: &CommDebugMode) -> Vec<&'static str> {
    mode.module_depth_dict().into_keys().collect()
}

fn names(calls: &[CollectiveRecord]) -> Vec<&str> {
    calls.iter().map(|call| &*call.name).collect()
}

#[test]
fn collectives_count_for_the_module_all_it_runs_in_and_everything() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let model = Mlp::new(&mesh)?;
        let x = input(&mesh, Replicate)?.requires_grad_(true)?;
        let mode = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
        // The sum of net2's parts, and that of the gradients which the parts of net1 find for the input.
        assert_eq!((mode.get_total_counts(), mode.get_comm_counts()["all_reduce"]), (2, 2));
        let counts = mode.comm_module_counts();
        assert_eq!(counts, mode.get_comm_module_counts());
        for (path, forward, backward) in
            [("Global", 1, 1), ("Mlp", 1, 1), ("Mlp.net1", 0, 1), ("Mlp.relu", 0, 0), ("Mlp.net2", 0, 0)]
        {
            let of = &counts[path];
            assert_eq!(of["all_reduce"], forward + backward, "{path}");
            assert_eq!((of.forward["all_reduce"], of.backward["all_reduce"]), (forward, backward), "{path}");
            assert_eq!(of.all().total(), forward + backward);
            assert!(of.recomputation.is_empty() && of.of(Phase::Recomputation).is_empty());
        }
        assert_eq!(counts.len(), 5);
        Ok(())
    });
}

#[test]
fn modules_come_in_the_order_in_which_they_run_with_what_they_have() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let model = Mlp::new(&mesh)?;
        let x = input(&mesh, Replicate)?;
        let mode = CommDebugMode::new();
        mode.run(|| model.forward(&x))?;
        let depths: Vec<_> = mode.module_depth_dict().into_iter().collect();
        assert_eq!(depths, [("Global", 0), ("Mlp", 1), ("Mlp.net1", 2), ("Mlp.relu", 2), ("Mlp.net2", 2)]);
        let helper = mode.module_helper_dict();
        assert_eq!((helper["Mlp.net2"].kind, helper["Mlp"].kind), ("Linear", "Mlp"));
        assert_eq!(helper["Mlp.net2"].parents, ["Global", "Mlp"]);
        assert!(helper["Global"].parents.is_empty());
        let parameters = mode.get_parameter_info();
        assert_eq!(parameters.keys().collect::<Vec<_>>(), [&"Mlp.net1", &"Mlp.net2"]);
        assert_eq!(parameters["Mlp.net1"].keys().collect::<Vec<_>>(), ["weight", "bias"]);
        assert_eq!(parameters["Mlp.net2"]["weight"].placements(), [Shard(1)]);
        let sharding: Vec<_> = mode.get_sharding_info().into_iter().collect();
        let expected = [
            ("Mlp.net1.weight", Shard(0)),
            ("Mlp.net1.bias", Shard(0)),
            ("Mlp.net2.weight", Shard(1)),
            ("Mlp.net2.bias", Replicate),
        ];
        assert_eq!(sharding, expected.map(|(name, placement)| (name.to_string(), vec![placement])));
        Ok(())
    });
}

/// Four ranks, the input cut by rows though the first layer wants it whole, and a gradient for it.
fn heard() -> Result<(CommDebugMode, u32)> {
    let mesh = four()?;
    let model = Mlp::new(&mesh)?;
    let x = input(&mesh, Shard(0))?.requires_grad_(true)?;
    let mode = CommDebugMode::new();
    mode.run(|| model.forward(&x)?.to_local()?.t()?.sum_all()?.backward())?;
    Ok((mode, line!() - 1))
}

/// The table of what is [`heard`]. Each line begins with the lowest level it is shown at.
const TABLE: &str = "
1on DeviceMesh((tp=4), 'cpu', ranks=0..4)
0Global
0    FORWARD PASS
0        all_gather: 1
0        all_reduce: 1
3        to_local(f32 [8, 10] R) -> f32 [8, 10] at CALL
3        t(f32 [8, 10]) -> f32 [10, 8] at CALL
2        sum(f32 [10, 8]) -> f32 [] at CALL
0    BACKWARD PASS
0        reduce_scatter: 1
3        reshape(f32 []) -> f32 [1, 1] at CALL
3        expand(f32 [1, 1]) -> f32 [10, 8] at CALL
3        t(f32 [10, 8]) -> f32 [8, 10] at CALL
3        from_local(f32 [8, 10]) -> f32 [8, 10] R at CALL
0    Mlp
1        type: Mlp
0        FORWARD PASS
0            all_gather: 1
0            all_reduce: 1
0                1 × sum of f32 [8, 10], 320 B, on `tp`, explicit, at NET2
1            redistribute(f32 [8, 10] P(sum)) -> f32 [8, 10] R at NET2
0        BACKWARD PASS
0            reduce_scatter: 1
3            redistribute(f32 [8, 10] R) -> f32 [8, 10] R at NET2
0        Mlp.net1
1            type: Linear
1            parameters:
1                weight: f32 [16, 10] S(0)
1                bias: f32 [16] S(0)
0            FORWARD PASS
0                all_gather: 1
0                    1 × f32 [2, 10], 80 B, on `tp`, implicit in linear, at NET1
1                linear(f32 [8, 10] S(0) => R, f32 [16, 10] S(0), f32 [16] S(0)) -> f32 [8, 16] S(1) at NET1
0            BACKWARD PASS
0                reduce_scatter: 1
0                    1 × sum of f32 [8, 10], 320 B, on `tp`, explicit, at CALL
1                matmul(f32 [8, 16] S(1), f32 [16, 10] S(0)) -> f32 [8, 10] P(sum) at NET1
1                folded_matmul(f32 [8, 16] S(1), f32 [8, 10] R) -> f32 [16, 10] S(0) at NET1
1                sum(f32 [8, 16] S(1)) -> f32 [1, 16] S(1) at NET1
3                reshape(f32 [1, 16] S(1)) -> f32 [16] S(0) at NET1
1                redistribute(f32 [8, 10] P(sum)) -> f32 [8, 10] S(0) at CALL
0        Mlp.relu
1            type: Relu
1            FORWARD PASS
1                relu(f32 [8, 16] S(1)) -> f32 [8, 16] S(1) at RELU
1            BACKWARD PASS
1                relu(f32 [8, 16] S(1), f32 [8, 16] S(1)) -> f32 [8, 16] S(1) at RELU
0        Mlp.net2
1            type: Linear
1            parameters:
1                weight: f32 [10, 16] S(1)
1                bias: f32 [10] R
1            FORWARD PASS
1                linear(f32 [8, 16] S(1), f32 [10, 16] S(1), f32 [10] R => P(sum)) -> f32 [8, 10] P(sum) at NET2
1            BACKWARD PASS
1                matmul(f32 [8, 10] R, f32 [10, 16] S(1)) -> f32 [8, 16] S(1) at NET2
1                folded_matmul(f32 [8, 10] R, f32 [8, 16] S(1)) -> f32 [10, 16] S(1) at NET2
1                sum(f32 [8, 10] R) -> f32 [1, 10] R at NET2
3                reshape(f32 [1, 10] R) -> f32 [10] R at NET2
";

#[test]
fn the_table_shows_what_its_level_says() -> Result<()> {
    let (mode, called) = heard()?;
    for level in 0..=3 {
        let shown = TABLE.trim().lines().filter(|line| line[..1].parse::<u8>().unwrap() <= level);
        let text: String = shown.map(|line| format!("{}\n", &line[1..])).collect();
        let mut text = text.trim_end().to_string();
        for (name, line) in [("CALL", called), ("NET1", NET1), ("NET2", NET2), ("RELU", RELU)] {
            text = text.replace(name, &format!("{}:{line}", file!()));
        }
        assert_eq!(mode.tracing_table(level)?, text, "at level {level}");
    }
    Ok(())
}

/// Text without the escapes that colour it.
fn without_escapes(text: &str) -> String {
    let mut pieces = text.split('\x1b');
    let first = pieces.next().unwrap_or_default().to_string();
    pieces.fold(first, |text, piece| text + piece.split_once('m').unwrap().1)
}

#[test]
fn colours_are_escapes_and_nothing_else() -> Result<()> {
    let (mode, _) = heard()?;
    for level in 0..=3 {
        let coloured = mode.generate_comm_debug_tracing_table(level)?;
        assert_eq!(without_escapes(&coloured), mode.tracing_table(level)?);
        assert!(coloured.contains("\x1b[1;33mMlp.net2\x1b[0m"), "{coloured}");
        assert!(
            coloured.contains("\x1b[31mall_gather: 1\x1b[0m")
                && coloured.contains("\x1b[1;35mimplicit in linear")
        );
        assert_eq!(coloured.matches("\x1b[0m").count() * 2, coloured.matches('\x1b').count());
    }
    assert_eq!(mode.generate_module_tracing_table(), mode.generate_comm_debug_tracing_table(0)?);
    Ok(())
}

/// A place for a file of this test.
fn file(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("dtensor-comm-mode-{}-{name}", std::process::id()))
}

#[test]
fn files_have_the_table_without_escapes() -> Result<()> {
    let (mode, _) = heard()?;
    let path = file("table.txt");
    for level in 0..=3 {
        mode.log_comm_debug_tracing_table_to_file(&path, level)?;
        assert_eq!(std::fs::read_to_string(&path).unwrap(), mode.tracing_table(level)? + "\n");
    }
    mode.log_module_tracing_table_to_file(&path)?;
    assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{mode}\n"));
    std::fs::remove_file(path).unwrap();
    Ok(())
}

#[test]
fn levels_that_do_not_exist_and_places_that_cannot_be_written_are_errors() -> Result<()> {
    let (mode, _) = heard()?;
    let path = file("never");
    let level = [
        mode.tracing_table(4).map(drop),
        mode.generate_comm_debug_tracing_table(4).map(drop),
        mode.to_json(255).map(drop),
        mode.log_comm_debug_tracing_table_to_file(&path, 4),
        mode.generate_json_dump(&path, 4),
    ];
    for error in level.map(|result| result.unwrap_err().to_string()) {
        assert!(error.contains("noise_level must be 0, 1, 2 or 3"), "{error}");
    }
    assert!(!path.exists());
    let nowhere = path.join("below").join("nothing");
    for error in [
        mode.log_comm_debug_tracing_table_to_file(&nowhere, 0).unwrap_err(),
        mode.log_module_tracing_table_to_file(&nowhere).unwrap_err(),
        mode.generate_json_dump(&nowhere, 0).unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(error.contains(&format!("path: `{}` cannot be written", nowhere.display())), "{error}");
    }
    Ok(())
}

#[test]
fn json_is_the_same_tree() -> Result<()> {
    let (mode, called) = heard()?;
    let path = file("dump.json");
    mode.generate_json_dump(&path, 1)?;
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let root: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&mode.to_json(1)?).unwrap(), root);
    let keys = [
        "children",
        "collectives_backward",
        "collectives_checkpointing",
        "collectives_forward",
        "fqn",
        "module_type",
        "operations_backward",
        "operations_checkpointing",
        "operations_forward",
        "parameters",
    ];
    assert_eq!(root.as_object().unwrap().keys().map(String::as_str).collect::<Vec<_>>(), keys);
    let model = &root["children"][0];
    assert_eq!(
        (&root["fqn"], &model["fqn"], &model["module_type"]),
        (&"Global".into(), &"Mlp".into(), &"Mlp".into())
    );
    let children: Vec<_> =
        model["children"].as_array().unwrap().iter().map(|child| child["fqn"].as_str().unwrap()).collect();
    assert_eq!(children, ["Mlp.net1", "Mlp.relu", "Mlp.net2"]);
    let net1 = &model["children"][0];
    assert_eq!(
        net1["parameters"][1],
        serde_json::json!({ "name": "bias", "shape": [16], "dtype": "F32", "placements": ["S(0)"] })
    );
    // What happened below counts above, but its calls are listed where they happened.
    assert_eq!(root["collectives_backward"][0]["count"], 1);
    assert_eq!(root["collectives_backward"][0]["calls"], serde_json::json!([]));
    let call = &net1["collectives_backward"][0]["calls"][0];
    assert_eq!((&call["line"], &call["implicit"]), (&called.into(), &false.into()));
    // A record that is read back is the record.
    let records = mode.collectives();
    let read: CollectiveRecord = serde_json::from_value(call.clone()).unwrap();
    assert_eq!(Some(&read), records.last());
    let linear = &net1["operations_forward"][0];
    assert_eq!((&linear["name"], &linear["line"]), (&"linear".into(), &NET1.into()));
    assert_eq!(linear["inputs"][0]["placements"], serde_json::json!(["S(0)"]));
    assert_eq!(linear["inputs"][0]["moved_to"], serde_json::json!(["R"]));
    assert_eq!(linear["outputs"][0]["placements"], serde_json::json!(["S(1)"]));
    assert_eq!(root["operations_forward"], serde_json::json!([]));
    let all: serde_json::Value = serde_json::from_str(&mode.to_json(3)?).unwrap();
    assert_eq!(all["operations_forward"][1]["name"], "t");
    let few: serde_json::Value = serde_json::from_str(&mode.to_json(0)?).unwrap();
    let net1 = &few["children"][0]["children"][0];
    let nothing = (&serde_json::json!([]), &serde_json::json!([]), &"".into());
    assert_eq!((&net1["parameters"], &net1["operations_forward"], &net1["module_type"]), nothing);
    Ok(())
}

#[test]
fn every_collective_is_known_with_line_operator_bytes_and_mesh_dim() -> Result<()> {
    let (mode, called) = heard()?;
    let calls = mode.collectives();
    assert_eq!(names(&calls), ["all_gather", "all_reduce", "reduce_scatter"]);
    let [gather, reduce, scatter] = &calls[..] else { panic!("three") };
    assert!(calls.iter().all(|call| call.file == file!() && call.group == "tp" && call.dtype == DType::F32));
    assert_eq!((gather.implicit, gather.operator.as_deref(), gather.line), (true, Some("linear"), NET1));
    assert_eq!((&*gather.module, gather.phase, gather.reduce_op), ("Mlp.net1", Phase::Forward, None));
    assert_eq!((&gather.shape[..], gather.bytes), (&[2, 10][..], 80));
    assert_eq!((reduce.implicit, reduce.operator.as_deref(), reduce.line), (false, None, NET2));
    assert_eq!((&*reduce.module, reduce.reduce_op), ("Mlp", Some(ReduceOp::Sum)));
    // The gradient of the input, brought to where the input lies, for the module that used it.
    assert_eq!((scatter.implicit, scatter.line, scatter.phase), (false, called, Phase::Backward));
    assert_eq!((&*scatter.module, scatter.bytes), ("Mlp.net1", 320));
    assert_eq!(
        gather.to_string(),
        format!("all_gather of f32 [2, 10], 80 B, on `tp`, implicit in linear, at {}:{NET1}", file!())
    );
    Ok(())
}

#[test]
fn operators_are_known_by_module_with_layouts() -> Result<()> {
    let (mode, called) = heard()?;
    let all = mode.comm_module_operation_counts();
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), paths(&mode));
    assert_eq!(all.values().map(Vec::len).sum::<usize>(), mode.operations().len());
    let net2 = &all["Mlp.net2"];
    let named: Vec<_> = net2.iter().map(|operation| (operation.name, operation.phase)).collect();
    let backward = ["matmul", "folded_matmul", "sum", "reshape"].map(|name| (name, Phase::Backward));
    assert_eq!(named, [&[("linear", Phase::Forward)], &backward[..]].concat());
    assert_eq!(net2[0].inputs[2].placements.as_deref(), Some(&[Replicate][..]));
    assert_eq!(net2[0].inputs[2].moved_to.as_deref(), Some(&[Placement::PARTIAL][..]));
    assert_eq!(net2[0].outputs[0].placements.as_deref(), Some(&[Placement::PARTIAL][..]));
    assert!(
        net2[0].is_distributed() && net2[0].mesh.as_deref() == Some("DeviceMesh((tp=4), 'cpu', ranks=0..4)")
    );
    assert!(net2.iter().all(|operation| operation.line == NET2));
    let local = &all["Global"][1];
    assert_eq!(
        (local.name, local.line, local.is_distributed(), local.is_trivial()),
        ("t", called, false, true)
    );
    Ok(())
}

#[test]
fn information_on_parameters_is_a_table() -> Result<()> {
    let (mode, _) = heard()?;
    let parameters = "
module    parameter  dtype  shape     placements
────────  ─────────  ─────  ────────  ──────────
Mlp.net1  weight     f32    [16, 10]  S(0)
Mlp.net1  bias       f32    [16]      S(0)
Mlp.net2  weight     f32    [10, 16]  S(1)
Mlp.net2  bias       f32    [10]      R";
    assert_eq!(mode.parameter_info_table(), parameters[1..]);
    let sharding = "
parameter        placements
───────────────  ──────────
Mlp.net1.weight  S(0)
Mlp.net1.bias    S(0)
Mlp.net2.weight  S(1)
Mlp.net2.bias    R";
    assert_eq!(mode.sharding_info_table(), sharding[1..]);
    mode.print_parameter_info();
    mode.print_paramater_info();
    mode.print_sharding_info();
    // A parameter of this rank alone is one, but does not lie anywhere.
    let local =
        CommDebugMode::record(|| Linear::new(2, 3, false)?.forward(&Tensor::ones([1, 2], DType::F32)?))?;
    assert!(local.parameter_info_table().ends_with("Linear  weight     f32    [3, 2]  local"));
    assert!(local.get_sharding_info().is_empty());
    Ok(())
}

#[test]
fn a_mode_forgets_when_it_is_entered_and_can_be_asked_inside() -> Result<()> {
    let (mode, _) = heard()?;
    let mesh = four()?;
    let x = input(&mesh, Shard(0))?;
    assert_eq!(format!("{mode:?}"), "CommDebugMode(get_total_counts()=3)");
    mode.run(|| {
        assert_eq!((mode.get_total_counts(), paths(&mode)), (0, vec!["Global"]));
        assert!(mode.get_comm_counts().is_empty() && mode.operations().is_empty());
        assert!(mode.get_parameter_info().is_empty() && mode.get_sharding_info().is_empty());
        assert_eq!(mode.to_string(), "Global");
        x.full_tensor()?;
        assert_eq!(mode.clone().get_comm_counts()["all_gather"], 1);
        assert!(mode.to_string().contains("all_gather: 1"));
        Result::Ok(())
    })?;
    // What comes after it is not heard.
    x.full_tensor()?;
    assert_eq!(mode.get_total_counts(), 1);
    Ok(())
}

#[test]
fn modes_nest_and_one_that_is_entered_twice_hears_once() -> Result<()> {
    let mesh = four()?;
    let x = input(&mesh, Shard(0))?;
    let (outer, inner) = (CommDebugMode::new(), CommDebugMode::new());
    outer.run(|| {
        x.full_tensor()?;
        inner.run(|| x.full_tensor())?;
        x.full_tensor()
    })?;
    assert_eq!((outer.get_total_counts(), inner.get_total_counts()), (3, 1));
    outer.run(|| {
        x.full_tensor()?;
        outer.run(|| x.full_tensor())?;
        // The inner scope has forgotten the first; the outer one still listens.
        x.full_tensor()
    })?;
    assert_eq!(outer.get_total_counts(), 2);
    x.full_tensor()?;
    assert_eq!(outer.get_total_counts(), 2);
    Ok(())
}

#[test]
fn a_mode_inside_a_module_knows_what_it_runs_in() -> Result<()> {
    #[derive(Module)]
    struct Outer {
        inner: Linear,
    }
    #[forward]
    impl Outer {
        fn forward(&self, x: &Tensor, mode: &CommDebugMode) -> Result<Tensor> {
            mode.run(|| self.inner.forward(x))
        }
    }
    let model = Outer { inner: Linear::new(2, 2, false)? };
    let x = Tensor::ones([1, 2], DType::F32)?;
    let (outer, inner) = (CommDebugMode::new(), CommDebugMode::new());
    outer.run(|| model.forward(&x, &inner))?;
    assert_eq!(paths(&inner), ["Global", "Outer", "Outer.inner"]);
    assert_eq!(paths(&outer), paths(&inner));
    // Where nobody watches the outer module, nobody knows of it.
    model.forward(&x, &inner)?;
    assert_eq!(paths(&inner), ["Global", "Linear"]);
    Ok(())
}

#[test]
fn each_rank_hears_its_own() {
    spmd(4, |world| {
        let pair = if world.rank() < 2 { [0, 1] } else { [2, 3] };
        let x = Tensor::ones([2], DType::F32)?;
        let mode = CommDebugMode::record(|| {
            // To make groups, to wait and to exchange what is no tensor does not count.
            let group = world.new_group(&pair)?.expect("this rank is in it");
            world.group().barrier()?;
            world.group().all_gather_object(&world.rank())?;
            for _ in 0..world.rank() / 2 {
                group.all_reduce(&x, ReduceOp::Max)?;
            }
            // A message counts on both sides.
            match world.rank() {
                0 => world.group().send(&x, 3, 0)?,
                3 => drop(world.group().recv(0, 0)?),
                _ => {}
            }
            Ok(())
        })?;
        let counts = mode.get_comm_counts();
        assert_eq!(counts["all_reduce"], world.rank() / 2);
        assert_eq!(
            (counts["send"], counts["recv"]),
            ((world.rank() == 0).into(), (world.rank() == 3).into())
        );
        assert_eq!(mode.get_total_counts(), counts.total());
        assert_eq!(counts.total(), [1, 0, 1, 2][world.rank()]);
        Ok(())
    });
}

#[test]
fn counts_know_other_names() -> Result<()> {
    let mesh = four()?;
    let group = mesh.group("tp")?;
    let x = Tensor::ones([4], DType::F32)?;
    // Each a different number of times.
    let times = |n: usize, call: &dyn Fn() -> Result<()>| (0..n).try_for_each(|_| call());
    let mode = CommDebugMode::record(|| {
        times(1, &|| group.all_reduce(&x, ReduceOp::Sum).map(drop))?;
        times(2, &|| group.all_gather_tensor(&x, 0).map(drop))?;
        times(3, &|| group.reduce_scatter_tensor(&x, ReduceOp::Sum, 0).map(drop))?;
        times(4, &|| group.all_to_all_single(&x, None, None).map(drop))?;
        times(5, &|| group.broadcast(&x, 0).map(drop))?;
        times(6, &|| group.gather(&x, 0).map(drop))?;
        times(7, &|| group.scatter(Some(&[x.clone(), x.clone(), x.clone(), x.clone()]), 0).map(drop))?;
        times(8, &|| group.reduce(&x, ReduceOp::Sum, 0).map(drop))
    })?;
    let counts = mode.get_comm_counts();
    let ours = [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "gather",
        "scatter",
        "reduce",
    ];
    // The names that PyTorch's mode counts by, and those of its functions.
    let theirs = [
        "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ allreduce_ allreduce_coalesced_",
        "all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_gather_tensor \
         all_gather_single allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
        "reduce_scatter_tensor reduce_scatter_tensor_coalesced reduce_scatter_single reduce_scatter_ \
         _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
        "all_to_all_single shard_dim_alltoall alltoall_ alltoall_base_",
        "broadcast broadcast_",
        "gather_",
        "scatter_",
        "reduce_",
    ];
    for (i, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        for name in theirs.split_whitespace().chain([*ours]) {
            for before in
                ["", "c10d.", "c10d_functional.", "_c10d_functional.", "_dtensor.", "torch.ops.c10d."]
            {
                for after in ["", ".default"] {
                    let name = format!("{before}{name}{after}");
                    assert_eq!((counts[&*name], counts.get(&name)), (i + 1, i + 1), "{name}");
                }
            }
        }
    }
    for name in
        ["nothing", "aten.all_reduce", "all_reduce.out", "send", "recv", "c10d.recv_", "permute_tensor", ""]
    {
        assert_eq!(counts[name], 0, "{name}");
    }
    assert_eq!(
        format!("{counts:?}"),
        r#"{"all_gather": 2, "all_reduce": 1, "all_to_all": 4, "broadcast": 5, "gather": 6, "reduce": 8, "reduce_scatter": 3, "scatter": 7}"#
    );
    assert_eq!((counts.iter().map(|(_, count)| count).sum(), counts.total()), (36, 36));
    assert_eq!(serde_json::to_value(&counts).unwrap()["all_to_all"], 4);
    // What redistribution calls has the names, too.
    let mode = CommDebugMode::record(|| input(&mesh, Shard(0))?.redistribute([Shard(1)]))?;
    assert_eq!(mode.get_comm_counts()["_dtensor.shard_dim_alltoall"], 1);
    Ok(())
}

/// Sums what the ranks have, before it is used.
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
fn a_module_may_run_twice_or_under_two_names_or_not_be_of_the_tree() -> Result<()> {
    #[derive(Module)]
    struct Model {
        a: Reducing,
        /// The same once more.
        b: Reducing,
        /// Of which the tree knows nothing.
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
fn roots_of_one_type_have_numbers_and_parts_find_their_place() -> Result<()> {
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
    // In another scope it is the first again.
    mode.run(|| two.forward(&x, world.group()))?;
    assert_eq!(paths(&mode), ["Global", "Reducing", "Reducing.layer"]);
    Ok(())
}

#[test]
fn one_that_is_called_from_two_places_is_shown_in_both() -> Result<()> {
    #[derive(Module)]
    struct Model {
        a: Calling,
        c: Calling,
    }
    /// What it calls may belong to another one.
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
    // In the table, the numbers of a module are those of what is below it.
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
fn modules_that_nothing_tells_apart_are_found_by_where_they_lie() -> Result<()> {
    /// With data, but no parameter.
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
fn parameters_in_lists_are_those_of_the_module() -> Result<()> {
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
fn errors_and_panics_leave_nothing_running() -> Result<()> {
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
    // A panic out of the mode itself ends it; what it has heard stays.
    let model = Failing { inner: Fails { how: 2 } };
    assert!(catch_unwind(AssertUnwindSafe(|| mode.run(|| model.forward(&x, world.group())))).is_err());
    after()?;
    assert_eq!(names(&mode.collectives()), ["all_reduce"]);
    mode.run(after)?;
    assert_eq!((mode.get_total_counts(), paths(&mode)), (1, vec!["Global"]));
    Ok(())
}

#[test]
fn what_hooks_communicate_counts_for_their_module_at_the_line_that_called_it() -> Result<()> {
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
fn gradients_count_for_the_module_whose_forward_they_are_of() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "dp")?;
        let model = Mlp::new(&mesh)?;
        // As in data parallelism: all have the weights, each has some rows.
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
        // For a weight each, though nothing ran forward while this mode listened. The bias has the gradient of a sum: all know it.
        let counts = backward.comm_module_counts();
        assert_eq!(counts.keys().copied().collect::<Vec<_>>(), ["Global", "Linear#2", "Linear"]);
        assert_eq!((counts["Linear"].backward["all_reduce"], counts["Linear#2"]["all_reduce"]), (1, 1));
        assert!(backward.collectives().iter().all(|call| call.line == line && !call.implicit));
        assert!(backward.get_parameter_info().is_empty());
        // Of a forward pass that nobody watched, nobody knows the modules.
        let loss = model.net1.forward(&x)?.sum_all()?;
        backward.run(|| loss.backward())?;
        assert_eq!((paths(&backward), backward.get_total_counts()), (vec!["Global"], 1));
        Ok(())
    });
}

#[test]
fn gradients_of_another_module_are_not_counted_for_one_of_the_same_name() -> Result<()> {
    let mesh = four()?;
    let x = input(&mesh, Shard(0))?;
    let layer = || -> Result<Linear> {
        let layer = Linear::new(10, 4, false)?;
        lay(&layer, &mesh, "weight", Replicate)?;
        Ok(layer)
    };
    let mode = CommDebugMode::new();
    // It was the first of its type, and so is the one that runs while its gradients are computed. It may be gone by then.
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
        // What had the name before keeps it, if nobody else has taken it.
        assert_eq!(counts(false)?, [("Linear", 0, 1), ("Linear#2", 1, 0)]);
        drop(kept);
    }
    // Nothing that is called so is taken for what everything runs in.
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
fn modules_that_share_a_part_are_not_one() -> Result<()> {
    /// It has no base: what is in it tells it from others.
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
        // One that was moved or cloned is the same.
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

/// How often modules of a transformer of two checkpointed layers call all-reduce when they run for the first time, for gradients,
/// and again.
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

/// Checks a mode against [`reductions`], of which it has heard these phases.
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

/// What is shown of a mode that has heard the gradients of a checkpointed transformer, and what ran again for them.
fn check_recomputation(mode: &CommDebugMode) -> Result<()> {
    let again: Vec<_> =
        mode.collectives().into_iter().filter(|call| call.phase == Phase::Recomputation).collect();
    assert!(again.iter().all(|call| call.name == "all_reduce" && call.group == "tp" && call.bytes == 4096));
    let modules: Vec<_> = again.iter().map(|call| &*call.module).collect();
    let layer = |i| ["attention.wo", "feed_forward.w2"].map(|path| format!("Transformer.layers.{i}.{path}"));
    assert_eq!(modules, [layer(1), layer(0)].concat());
    // Whatever ran again has the name that it had.
    for operation in mode.operations().iter().filter(|operation| operation.phase == Phase::Recomputation) {
        assert!(operation.module.starts_with("Transformer.layers."), "{operation} in {}", operation.module);
    }
    let again = mode.comm_module_operation_counts();
    let again =
        again["Transformer.layers.1.attention.wq"].iter().filter(|op| op.phase == Phase::Recomputation);
    assert_eq!(again.filter(|operation| operation.name == "linear").count(), 1);
    // Under each module that something ran again in, with the number of sums and, where they were called, what they were.
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
    // The same in a file.
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
fn what_a_checkpoint_runs_again_counts_by_itself_under_the_names_it_had() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let args = ModelArgs { dropout_p: 0.1, checkpoint_activations: true, ..ModelArgs::default() };
        let model = Transformer::parallelize(Transformer::new(&args)?, &mesh, false)?;
        let tokens = Tensor::randint(0, 8, [8, 8])?;
        let mode = CommDebugMode::new();
        mode.run(|| model.forward(&tokens)?.sum_all()?.backward())?;
        check_reductions(&mode, [true; 3]);
        check_recomputation(&mode)?;

        // Forward in one run, and the rest in another.
        let loss = mode.run(|| model.forward(&tokens)?.sum_all())?;
        check_reductions(&mode, [true, false, false]);
        let names = paths(&mode);
        mode.run(|| loss.backward())?;
        check_reductions(&mode, [false, true, true]);
        check_recomputation(&mode)?;
        assert!(paths(&mode).iter().all(|path| names.contains(path)), "{:?}", paths(&mode));

        // Others of the same types, and a part of the model by itself, may have run in between, or run in the same run.
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

        // The model may be gone: what is run again is not.
        let loss = mode.run(|| model.forward(&tokens)?.sum_all())?;
        drop(model);
        mode.run(|| loss.backward())?;
        check_reductions(&mode, [false, true, true]);
        check_recomputation(&mode)
    });
}

#[test]
fn a_leaf_that_two_modules_use_is_brought_home_once() -> Result<()> {
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
    // For the one whose gradient came first: that which used it last.
    assert_eq!((counts["Tied.second"]["all_reduce"], counts["Tied.first"]["all_reduce"]), (1, 0));
    assert_eq!(
        mode.get_sharding_info().keys().collect::<Vec<_>>(),
        ["Tied.first.weight", "Tied.second.weight"]
    );
    Ok(())
}

#[test]
fn a_collective_counts_where_it_begins() -> Result<()> {
    #[derive(Module)]
    struct Begins;
    #[forward]
    impl Begins {
        fn forward(&self, x: &Tensor, group: &Group) -> Result<dtensor::comm::Pending> {
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
fn two_mesh_dims_and_two_meshes_are_told_apart() -> Result<()> {
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
fn values_are_the_same_to_the_bit_with_and_without_a_mode() {
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
fn modules_are_shared_between_ranks_that_are_threads() -> Result<()> {
    // Both ranks run one and the same module: each hears what it does itself.
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
