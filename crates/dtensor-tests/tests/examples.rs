//! Runs the examples. Their own assertions are the tests.

macro_rules! examples {
    ($($name:ident: $path:literal;)*) => {$(
        #[path = $path]
        mod $name;

        #[test]
        fn $name() -> dtensor::Result<()> {
            $name::main()
        }
    )*};
}

examples! {
    gpt: "../../dtensor/examples/gpt.rs";
    colwise_parallel: "../../dtensor/examples/colwise_parallel.rs";
    rowwise_parallel: "../../dtensor/examples/rowwise_parallel.rs";
    sequence_parallel: "../../dtensor/examples/sequence_parallel.rs";
    local_map: "../../dtensor/examples/local_map.rs";
    prepare_module_input: "../../dtensor/examples/prepare_module_input.rs";
    prepare_module_output: "../../dtensor/examples/prepare_module_output.rs";
    prepare_module_input_output: "../../dtensor/examples/prepare_module_input_output.rs";
    loss_parallel: "../../dtensor/examples/loss_parallel.rs";
    data_parallel: "../../dtensor/examples/data_parallel.rs";
    fully_shard: "../../dtensor/examples/fully_shard.rs";
    random: "../../dtensor/examples/random.rs";
    optimizer: "../../dtensor/examples/optimizer.rs";
    mesh: "../../dtensor/examples/mesh.rs";
    redistribute: "../../dtensor/examples/redistribute.rs";
    sharded_operators: "../../dtensor/examples/sharded_operators.rs";
    distribute_module: "../../dtensor/examples/distribute_module.rs";
    comm_debug_mode: "../../dtensor/examples/comm_debug_mode.rs";
    checkpoint_autocast: "../../dtensor/examples/checkpoint_autocast.rs";
    checkpoint_files: "../../dtensor/examples/checkpoint_files.rs";
    cuda_graph: "../../dtensor/examples/cuda_graph.rs";
    gpu: "../../dtensor/examples/gpu.rs";
    register_sharding: "../../dtensor/examples/register_sharding.rs";
    own_operator: "../../dtensor/examples/own_operator.rs";
    collectives: "../../dtensor/examples/collectives.rs";
}

/// Fails if an example in the folder is missing from the list above or from the README, or if the README names one that does not exist.
#[test]
fn every_example_is_run() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../dtensor/examples");
    let (here, readme) = (include_str!("examples.rs"), include_str!("../../../README.md"));
    for file in std::fs::read_dir(folder).expect("there are examples") {
        let name = file.expect("a file").file_name().into_string().expect("a name");
        assert!(here.contains(&format!("\"../../dtensor/examples/{name}\";")), "{name} is not run");
        let name = name.trim_end_matches(".rs");
        assert!(readme.contains(&format!("`{name}`")), "{name} is not in the README");
    }
    let table = readme.split("| concept | examples |").nth(1).and_then(|rest| rest.split("\n\n").next());
    for name in table.expect("the README lists examples").split('`').skip(1).step_by(2) {
        assert!(
            std::path::Path::new(folder).join(format!("{name}.rs")).exists(),
            "there is no example {name}"
        );
    }
}
