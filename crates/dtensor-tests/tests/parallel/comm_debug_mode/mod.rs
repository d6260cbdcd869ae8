//! Tests of `CommDebugMode`: what it records, for which module it counts, and how it is displayed.

mod modules;
mod order;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use dtensor::debug::{CollectiveRecord, Phase};
use dtensor::models::{ModelArgs, Transformer};
use dtensor::nn::{Base, Linear, Module, Parameter, forward};
use dtensor::prelude::*;
use dtensor::testing::spmd;

/// A tensor-parallel MLP: the first layer is sharded along its outputs, the second along its inputs.
#[derive(Module)]
struct Mlp {
    net1: Linear,
    relu: Relu,
    net2: Linear,
}

/// A module without parameters and without a base, so only its place in the model identifies it.
#[derive(Module)]
struct Relu;

#[forward]
impl Relu {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.relu()
    }
}

/// The source lines of the calls in `Mlp::forward`.
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

/// Returns a mesh of four simulated ranks.
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
fn collectives_count_for_their_module_its_parents_and_global() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let model = Mlp::new(&mesh)?;
        let x = input(&mesh, Replicate)?.requires_grad_(true)?;
        let mode = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
        // One all-reduce sums the outputs of `net2`, the other the gradients of the input of `net1`.
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
fn modules_are_listed_in_execution_order_with_their_parameters() {
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

/// Records forward and backward of an [`Mlp`] on four simulated ranks. Returns the mode and the line of the calls.
/// The input requires a gradient. It is sharded along its rows, so the first layer must gather it.
fn heard() -> Result<(CommDebugMode, u32)> {
    let mesh = four()?;
    let model = Mlp::new(&mesh)?;
    let x = input(&mesh, Shard(0))?.requires_grad_(true)?;
    let mode = CommDebugMode::new();
    mode.run(|| model.forward(&x)?.to_local()?.t()?.sum_all()?.backward())?;
    Ok((mode, line!() - 1))
}

/// The table of the mode of [`heard`]. Each line begins with the lowest level that shows it.
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
fn the_level_selects_the_lines_of_the_table() -> Result<()> {
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

/// Removes the colour escapes from a text.
fn without_escapes(text: &str) -> String {
    let mut pieces = text.split('\x1b');
    let first = pieces.next().unwrap_or_default().to_string();
    pieces.fold(first, |text, piece| text + piece.split_once('m').unwrap().1)
}

#[test]
fn colours_add_only_escapes() -> Result<()> {
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

/// Returns the path of a temporary file.
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
fn invalid_levels_and_unwritable_paths_are_errors() -> Result<()> {
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
fn json_has_the_same_tree_as_the_table() -> Result<()> {
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
    // A parent includes the counts of its submodules, but calls are listed only for the module that made them.
    assert_eq!(root["collectives_backward"][0]["count"], 1);
    assert_eq!(root["collectives_backward"][0]["calls"], serde_json::json!([]));
    let call = &net1["collectives_backward"][0]["calls"][0];
    assert_eq!((&call["line"], &call["implicit"]), (&called.into(), &false.into()));
    // A record that is read back from JSON equals the original.
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
fn every_collective_has_its_line_operator_bytes_and_mesh_dim() -> Result<()> {
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
    // The gradient of the input is redistributed to the input's layout. This counts for the module that used the input.
    assert_eq!((scatter.implicit, scatter.line, scatter.phase), (false, called, Phase::Backward));
    assert_eq!((&*scatter.module, scatter.bytes), ("Mlp.net1", 320));
    assert_eq!(
        gather.to_string(),
        format!("all_gather of f32 [2, 10], 80 B, on `tp`, implicit in linear, at {}:{NET1}", file!())
    );
    Ok(())
}

#[test]
fn operators_are_listed_by_module_with_their_layouts() -> Result<()> {
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
fn parameters_are_shown_as_a_table() -> Result<()> {
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
    // A plain parameter is listed as `local` and has no placements.
    let local =
        CommDebugMode::record(|| Linear::new(2, 3, false)?.forward(&Tensor::ones([1, 2], DType::F32)?))?;
    assert!(local.parameter_info_table().ends_with("Linear  weight     f32    [3, 2]  local"));
    assert!(local.get_sharding_info().is_empty());
    Ok(())
}

#[test]
fn each_run_clears_the_record_which_can_be_read_inside() -> Result<()> {
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
    // Collectives after the run are not recorded.
    x.full_tensor()?;
    assert_eq!(mode.get_total_counts(), 1);
    Ok(())
}

/// Formatting a tensor runs no operator.
#[test]
fn printing_a_tensor_is_not_recorded() -> Result<()> {
    let mesh = four()?;
    let large = Tensor::ones([40, 30], DType::F32)?;
    let tensors = [
        Tensor::ones([2], DType::U8)?,
        Tensor::ones([3], DType::BF16)?,
        distribute_tensor(&large.to_dtype(DType::I64)?, &mesh, [Shard(1)])?,
        large,
    ];
    let mode = CommDebugMode::record(|| {
        for x in &tensors {
            assert!(!format!("{x} {x:?}").is_empty());
        }
        Result::Ok(())
    })?;
    assert!(mode.operations().is_empty(), "{:?}", mode.operations());
    Ok(())
}

#[test]
fn modes_nest_and_a_mode_inside_itself_records_once() -> Result<()> {
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
        // The inner run cleared the first collective from the record. The outer run still records.
        x.full_tensor()
    })?;
    assert_eq!(outer.get_total_counts(), 2);
    x.full_tensor()?;
    assert_eq!(outer.get_total_counts(), 2);
    Ok(())
}

#[test]
fn a_mode_inside_a_module_sees_the_modules_that_an_outer_mode_tracks() -> Result<()> {
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
    // Without an outer mode, the outer module is not tracked.
    model.forward(&x, &inner)?;
    assert_eq!(paths(&inner), ["Global", "Linear"]);
    Ok(())
}

#[test]
fn each_rank_records_its_own_collectives() {
    spmd(4, |world| {
        let pair = if world.rank() < 2 { [0, 1] } else { [2, 3] };
        let x = Tensor::ones([2], DType::F32)?;
        let mode = CommDebugMode::record(|| {
            // The creation of groups, barriers and the exchange of objects do not count.
            let group = world.new_group(&pair)?.expect("this rank is in it");
            world.group().barrier()?;
            world.group().all_gather_object(&world.rank())?;
            for _ in 0..world.rank() / 2 {
                group.all_reduce(&x, ReduceOp::Max)?;
            }
            // A message counts for the sender and for the receiver.
            match world.rank() {
                0 => world.group().send(&x, 3, 0)?,
                3 => drop(world.group().recv::<Tensor>(0, 0)?),
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
fn counts_can_be_read_by_pytorch_names() -> Result<()> {
    let mesh = four()?;
    let group = mesh.group("tp")?;
    let x = Tensor::ones([4], DType::F32)?;
    // Each collective runs a different number of times, so that its count identifies it.
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
    // The names by which PyTorch's `CommDebugMode` counts, and the names of PyTorch's functions.
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
    // The collectives of a redistribution have these names too.
    let mode = CommDebugMode::record(|| input(&mesh, Shard(0))?.redistribute([Shard(1)]))?;
    assert_eq!(mode.get_comm_counts()["_dtensor.shard_dim_alltoall"], 1);
    Ok(())
}
