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
    gpt: "../examples/gpt.rs";
    colwise_parallel: "../examples/colwise_parallel.rs";
    rowwise_parallel: "../examples/rowwise_parallel.rs";
    sequence_parallel: "../examples/sequence_parallel.rs";
    local_map: "../examples/local_map.rs";
    prepare_module_input: "../examples/prepare_module_input.rs";
    prepare_module_output: "../examples/prepare_module_output.rs";
    prepare_module_input_output: "../examples/prepare_module_input_output.rs";
    loss_parallel: "../examples/loss_parallel.rs";
    data_parallel: "../examples/data_parallel.rs";
    fully_shard: "../examples/fully_shard.rs";
    random: "../examples/random.rs";
    optimizer: "../examples/optimizer.rs";
    mesh: "../examples/mesh.rs";
    redistribute: "../examples/redistribute.rs";
    sharded_operators: "../examples/sharded_operators.rs";
    distribute_module: "../examples/distribute_module.rs";
    comm_debug_mode: "../examples/comm_debug_mode.rs";
    checkpoint_autocast: "../examples/checkpoint_autocast.rs";
    checkpoint_files: "../examples/checkpoint_files.rs";
    gpu: "../examples/gpu.rs";
    cuda_graph: "../examples/cuda_graph.rs";
    register_sharding: "../examples/register_sharding.rs";
    own_operator: "../examples/own_operator.rs";
    collectives: "../examples/collectives.rs";
}

/// Fails if an example in the folder is missing from the list above or from the README, or if the README names one that does not exist.
#[test]
fn every_example_is_run() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    let (here, readme) = (include_str!("examples.rs"), include_str!("../../../README.md"));
    for file in std::fs::read_dir(folder).expect("there are examples") {
        let name = file.expect("a file").file_name().into_string().expect("a name");
        assert!(here.contains(&format!("\"../examples/{name}\";")), "{name} is not run");
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
