//! PyTorch's `test_comm_mode_features.py`: every test under its PyTorch name.
#![allow(non_snake_case)]

use dtensor::comm::World;
use dtensor::models::{MLPModule, MLPStacked, ModelArgs, Transformer};
use dtensor::prelude::*;
use dtensor::testing::spmd;

const NUM_DEVICES: usize = 4;

fn device_mesh(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [NUM_DEVICES], ())
}

fn inp() -> Result<Tensor> {
    manual_seed(0);
    Tensor::rand([8, 10], DType::F32)
}

/// The modules and parameters that a mode must report, in this order, and the placements of the parameters.
type GroundTruth = (Vec<(String, String)>, Vec<(String, Vec<Placement>)>);

fn ground_truth(model: &dyn Module) -> GroundTruth {
    let (mut parameters, mut sharding) = (Vec::new(), Vec::new());
    for (name, parameter) in model.named_parameters() {
        let (module, name) = name.rsplit_once('.').expect("these models have parameters in layers only");
        let module = format!("{}.{module}", model.kind());
        let value = parameter.get();
        if value.is_distributed() {
            sharding.push((format!("{module}.{name}"), value.placements().to_vec()));
        }
        parameters.push((module, name.to_string()));
    }
    (parameters, sharding)
}

fn check_same_set_of_keys(expected: &GroundTruth, comm_mode: &CommDebugMode) {
    let (parameters, sharding) = expected;
    let known: Vec<_> = comm_mode
        .get_parameter_info()
        .into_iter()
        .flat_map(|(module, all)| all.into_keys().map(move |name| (module.to_string(), name)))
        .collect();
    assert_eq!(known, *parameters);
    assert_eq!(comm_mode.get_sharding_info().into_iter().collect::<Vec<_>>(), *sharding);
}

fn parallelized_mlp(mesh: &DeviceMesh) -> Result<MLPModule> {
    let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
    parallelize_module(MLPModule::new(true)?, mesh, plan)
}

#[test]
fn test_MLP_distributed_sharding_display() {
    spmd(NUM_DEVICES, |world| {
        let mesh = device_mesh(&world)?;
        let inp = inp()?;
        let model = parallelized_mlp(&mesh)?;
        let comm_mode = CommDebugMode::new();
        comm_mode.run(|| model.forward(&inp)?.sum_all()?.backward())?;
        let expected = ground_truth(&model);
        assert_eq!((expected.0.len(), expected.1.len()), (4, 4));
        check_same_set_of_keys(&expected, &comm_mode);
        Ok(())
    });
}

#[test]
fn test_MLPStacked_distributed_sharding_display() {
    spmd(NUM_DEVICES, |world| {
        let mesh = device_mesh(&world)?;
        let inp = inp()?;
        let model = parallelized_mlp(&mesh)?;
        let comm_mode = CommDebugMode::new();
        comm_mode.run(|| model.forward(&inp)?.sum_all()?.backward())?;
        assert_eq!(comm_mode.get_sharding_info().len(), 4);

        let plan = plan! {
            "MLPStacked.layers.0.net1" => ColwiseParallel::new(),
            "MLPStacked.layers.0.net2" => RowwiseParallel::new(),
            "MLPStacked.layers.1.net1" => ColwiseParallel::new(),
            "MLPStacked.layers.1.net2" => RowwiseParallel::new(),
        };
        let model2 = parallelize_module(MLPStacked::new(2)?, &mesh, plan)?;
        comm_mode.run(|| {
            // Entering the mode clears the earlier records.
            assert!(comm_mode.get_parameter_info().is_empty());
            assert!(comm_mode.get_sharding_info().is_empty());
            model2.forward(&inp)
        })?;
        check_same_set_of_keys(&ground_truth(&model2), &comm_mode);
        assert_eq!(comm_mode.get_sharding_info().len(), 8);
        Ok(())
    });
}

#[test]
fn test_MLP_module_tracing() {
    spmd(NUM_DEVICES, |world| {
        let mesh = device_mesh(&world)?;
        let inp = inp()?;
        let model = parallelized_mlp(&mesh)?;
        let comm_mode = CommDebugMode::new();
        comm_mode.run(|| model.forward(&inp)?.sum_all()?.backward())?;
        // The dict has all submodules in the order in which they ran.
        let modules = comm_mode.module_depth_dict();
        assert_eq!(modules.len(), 5);
        assert_eq!(
            modules.into_keys().collect::<Vec<_>>(),
            ["Global", "MLPModule", "MLPModule.net1", "MLPModule.relu", "MLPModule.net2"]
        );
        let counts = comm_mode.comm_module_counts();
        for path in ["Global", "MLPModule", "MLPModule.net2"] {
            assert_eq!(counts[path]["c10d_functional.all_reduce"], 1, "{path}");
            assert_eq!(counts[path].forward["all_reduce"], 1, "{path}");
        }
        assert!(counts["MLPModule.net1"].all().is_empty() && counts["MLPModule.relu"].all().is_empty());
        assert_eq!(comm_mode.get_total_counts(), 1);
        Ok(())
    });
}

#[test]
fn test_transformer_module_tracing() {
    spmd(NUM_DEVICES, |world| {
        let mesh = device_mesh(&world)?;
        manual_seed(5);
        let args = ModelArgs { dropout_p: 0.0, ..ModelArgs::default() };
        let model = Transformer::parallelize(Transformer::new(&args)?, &mesh, false)?;
        manual_seed(0);
        let inp = Tensor::randint(0, 8, [8, 8])?;
        let comm_mode = CommDebugMode::new();
        comm_mode.run(|| model.forward(&inp))?;
        let counts = comm_mode.comm_module_counts();
        let expect = |path: &str, all_reduce: usize, all_gather: usize| {
            let of = &counts[path];
            assert_eq!((of["all_reduce"], of["all_gather"]), (all_reduce, all_gather), "{path}");
            assert_eq!(of.all().total(), all_reduce + all_gather, "{path}");
            assert_eq!(of.forward, *of.all(), "{path}");
        };
        expect("Global", 6, 1);
        expect("Transformer", 6, 1);
        expect("Transformer.tok_embeddings", 1, 0);
        expect("Transformer.pos_embeddings", 1, 0);
        for layer in 0..2 {
            let layer = format!("Transformer.layers.{layer}");
            expect(&layer, 2, 0);
            expect(&format!("{layer}.attention"), 1, 0);
            expect(&format!("{layer}.attention.wo"), 1, 0);
            expect(&format!("{layer}.feed_forward"), 1, 0);
            expect(&format!("{layer}.feed_forward.w2"), 1, 0);
        }
        expect("Transformer.output", 0, 1);

        // In backward, each column-wise layer all-reduces the gradient of its replicated input.
        comm_mode.run(|| model.forward(&inp)?.sum_all()?.backward())?;
        let counts = comm_mode.comm_module_counts();
        for (path, of) in &counts {
            let layer = path.rsplit('.').next().unwrap_or(path);
            let sums = match *path {
                "Global" | "Transformer" => 9,
                "Transformer.layers.0" | "Transformer.layers.1" => 4,
                _ => match layer {
                    "attention" => 3,
                    "feed_forward" | "wq" | "wk" | "wv" | "w1" | "output" => 1,
                    _ => 0,
                },
            };
            assert_eq!((of.backward["all_reduce"], of.backward.total()), (sums, sums), "{path}");
        }
        Ok(())
    });
}
