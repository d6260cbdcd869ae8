//! `docs/api-map.md` is complete: every name that PyTorch's `torch.distributed.tensor` has is a row of it, and every name that it
//! gives for one is used in its code, which is compiled and run with the documentation tests.

use std::collections::HashSet;

const MAP: &str = include_str!("../../../docs/api-map.md");

/// What PyTorch 2.15 has, by the heading that it is to be found under. `f(x=)` is the argument `x` of `f`.
const NAMES: [(&str, &[&str]); 8] = [
    (
        "`torch.distributed.tensor`",
        &[
            "DTensor",
            "distribute_tensor",
            "distribute_tensor(src_data_rank=)",
            "distribute_module",
            "Shard",
            "Replicate",
            "Partial",
            "Placement",
            "ones",
            "empty",
            "full",
            "linspace",
            "logspace",
            "rand",
            "randn",
            "zeros",
            "DeviceMesh",
            "init_device_mesh",
            "_StridedShard",
            "ones(dtype=)",
            "ones(layout=)",
            "ones(requires_grad=)",
            "ones(device_mesh=)",
            "ones(placements=)",
        ],
    ),
    (
        "`DTensor`",
        &[
            "from_local",
            "from_local(run_check=)",
            "from_local(shape=)",
            "from_local(stride=)",
            "from_local(grad_placements=)",
            "to_local",
            "to_local(grad_placements=)",
            "full_tensor",
            "full_tensor(grad_placements=)",
            "redistribute",
            "redistribute(device_mesh=)",
            "redistribute(async_op=)",
            "redistribute(forward_dtype=)",
            "redistribute(backward_dtype=)",
            "device_mesh",
            "placements",
            "__create_write_items__",
            "__create_chunk_list__",
            "__get_tensor_shard__",
            "item",
            "float",
            "bool",
            "idx",
            "repr",
            "numpy",
            "Parameter",
            "save",
            "pickling",
            "arithmetic",
        ],
    ),
    (
        "Placement types",
        &[
            "is_shard",
            "is_shard(dim",
            "is_replicate",
            "is_partial",
            "is_partial(reduce_op",
            "Shard.dim",
            "Partial.reduce_op",
            "_StridedShard(split_factor=)",
            "_is_shard_like",
            "_MaskPartial",
            "_NormPartial",
            "hash",
            "str",
        ],
    ),
    (
        "`torch.distributed.tensor.parallel`",
        &[
            "ParallelStyle",
            "ParallelStyle._apply",
            "ParallelStyle.src_data_rank",
            "ColwiseParallel",
            "RowwiseParallel",
            "SequenceParallel",
            "PrepareModuleInput",
            "PrepareModuleOutput",
            "PrepareModuleInputOutput",
            "parallelize_module",
            "loss_parallel",
            "ColwiseParallel(input_layouts=)",
            "ColwiseParallel(output_layouts=)",
            "ColwiseParallel(use_local_output=)",
            "RowwiseParallel(input_layouts=)",
            "RowwiseParallel(output_layouts=)",
            "RowwiseParallel(use_local_output=)",
            "SequenceParallel(sequence_dim=)",
            "SequenceParallel(use_local_output=)",
            "PrepareModuleInput(input_layouts=)",
            "PrepareModuleInput(desired_input_layouts=)",
            "PrepareModuleInput(input_kwarg_layouts=)",
            "PrepareModuleInput(desired_input_kwarg_layouts=)",
            "PrepareModuleInput(use_local_output=)",
            "PrepareModuleOutput(output_layouts=)",
            "PrepareModuleOutput(desired_output_layouts=)",
            "PrepareModuleOutput(use_local_output=)",
            "PrepareModuleInputOutput(use_local_input=)",
            "PrepareModuleInputOutput(use_local_output=)",
            "parallelize_module(parallelize_plan=)",
            "parallelize_module(src_data_rank=)",
            "distribute_module(partition_fn=)",
            "distribute_module(input_fn=)",
            "distribute_module(output_fn=)",
            "repr",
            "input_reshard",
            "_pre_dp_module_transform",
        ],
    ),
    (
        "`torch.distributed.tensor.debug` and other tools",
        &[
            "CommDebugMode",
            "get_total_counts",
            "get_comm_counts",
            "comm_module_counts",
            "get_comm_module_counts",
            "get_parameter_info",
            "get_sharding_info",
            "advanced_module_tracker.module_helper_dict",
            "advanced_module_tracker.module_depth_dict",
            "comm_module_operation_counts",
            "generate_comm_debug_tracing_table(noise_level=)",
            "log_comm_debug_tracing_table_to_file(file_name=)",
            "log_comm_debug_tracing_table_to_file(noise_level=)",
            "generate_json_dump(file_name=)",
            "generate_json_dump(noise_level=)",
            "generate_module_tracing_table",
            "log_module_tracing_table_to_file",
            "print_paramater_info",
            "print_sharding_info",
            "visualize_sharding(header=)",
            "visualize_sharding(use_rich=)",
            "DebugMode",
            "debug_string",
            "DebugMode(record_torchfunction=)",
            "DebugMode(record_faketensor=)",
            "DebugMode(record_realtensor=)",
            "DebugMode(record_tensor_attributes=)",
            "DebugMode(record_nn_module=)",
            "DebugMode(store_original_args=)",
            "DebugMode(record_stack_trace=)",
            "DebugMode(record_output=)",
            "DebugMode(record_ids=)",
            "DebugMode(record_profiler_context=)",
            "DebugMode(record_localtensor=)",
            "DebugMode(run_compile_with_interpreter=)",
            "log_tensor_hashes",
            "check_hash_mismatches",
            "hooks",
            "ExplicitRedistributionContext",
            "ExplicitRedistributionContext(enable=)",
            "ExplicitRedistributionContext(strict=)",
            "ExplicitRedistributionContext(mode=)",
            "LocalTensorMode",
            "validation",
            "statistics",
            "clear",
        ],
    ),
    (
        "`torch.distributed.tensor.experimental`, and random numbers",
        &[
            "context_parallel",
            "context_parallel(buffers=)",
            "context_parallel(buffer_seq_dims=)",
            "context_parallel(no_restore_buffers=)",
            "context_parallel_unshard",
            "set_rotate_method",
            "balancers",
            "implicit_replication",
            "local_map",
            "local_map(out_placements=)",
            "local_map(in_placements=)",
            "local_map(in_grad_placements=)",
            "local_map(device_mesh=)",
            "local_map(redistribute_inputs=)",
            "local_map(spmd_types=)",
            "register_sharding",
            "loss_parallel",
            "manual_seed",
            "distribute_region_enabled",
            "generator",
        ],
    ),
    (
        "`torch.distributed.device_mesh`",
        &[
            "DeviceMesh",
            "init_device_mesh",
            "init_device_mesh(mesh_dim_names=)",
            "DeviceMesh(device_type",
            "DeviceMesh(backend_override=)",
            "DeviceMesh(preserve_rank_order=)",
            "mesh[",
            "_flatten",
            "_unflatten",
            "_concatenate",
            "get_group",
            "get_all_groups",
            "get_local_rank",
            "get_coordinate",
            "get_rank",
            "size",
            "shape",
            "ndim",
            "mesh",
            "device_type",
            "mesh_dim_names",
            "_get_root_mesh",
            "_get_root_mesh_dim",
            "_get_all_submeshes",
            "from_group",
            "with",
            "hash",
            "repr",
            "abort",
        ],
    ),
    (
        "`torch.distributed._functional_collectives`",
        &[
            "all_reduce",
            "all_gather_single",
            "all_gather_tensor",
            "reduce_scatter_single",
            "reduce_scatter_tensor",
            "all_to_all_single",
            "broadcast",
            "permute_tensor",
            "all_reduce_coalesced",
            "all_gather_into_tensor_coalesced",
            "reduce_scatter_tensor_coalesced",
            "wait_tensor",
            "shard_dim_alltoall",
            "sum",
            "avg",
            "min",
            "max",
            "product",
            "band",
            "bor",
            "bxor",
            "premul_sum",
            "group",
        ],
    ),
];

struct Row {
    heading: &'static str,
    torch: &'static str,
    ours: &'static str,
    note: &'static str,
}

impl Row {
    /// Whether the name is still to come from elsewhere, and so cannot be in the code.
    fn is_awaited(&self) -> bool {
        self.note.contains("<!-- new -->")
    }
}

fn rows() -> Vec<Row> {
    let (mut rows, mut heading) = (Vec::new(), "");
    for line in MAP.lines() {
        if let Some(text) = line.strip_prefix("## ").or(line.strip_prefix("### ")) {
            heading = text;
        }
        if !line.starts_with("| ") || line.starts_with("| PyTorch |") || line.starts_with("| ---") {
            continue;
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [torch, ours, note] = cells[..] else { panic!("not three cells: {line}") };
        rows.push(Row { heading, torch, ours, note });
    }
    rows
}

/// The texts between backticks.
fn code(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// The code that is compiled.
fn blocks() -> String {
    let blocks = MAP.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    blocks.collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Whether a cell of the first column is about a name.
fn names(cell: &str, name: &str) -> bool {
    if let Some((function, argument)) = name.split_once('(') {
        let call = format!("{function}(");
        let argument = argument.trim_end_matches(')');
        return code(cell).any(|code| code.starts_with(&call) && code.contains(argument));
    }
    if words(name).count() > 1 || name.ends_with('[') {
        return cell.contains(name);
    }
    words(cell).any(|word| word == name)
}

#[test]
fn every_name_of_pytorch_is_there() {
    let rows = rows();
    let mut missing = Vec::new();
    for (heading, list) in NAMES {
        for name in list {
            if !rows.iter().any(|row| row.heading == heading && names(row.torch, name)) {
                missing.push(format!("{heading}: {name}"));
            }
        }
    }
    assert!(missing.is_empty(), "not in docs/api-map.md:\n{}", missing.join("\n"));
}

#[test]
fn every_name_of_ours_is_in_code_that_runs() {
    let blocks = blocks();
    let used: HashSet<&str> = words(&blocks).collect();
    let mut unused = Vec::new();
    for row in rows().iter().filter(|row| !row.is_awaited()) {
        let all: Vec<&str> = code(row.ours).flat_map(words).collect();
        assert!(!all.is_empty() || row.ours == "—", "{}: `{}` says nothing", row.heading, row.torch);
        unused.extend(
            all.into_iter().filter(|word| !used.contains(word)).map(|word| format!("{}: {word}", row.torch)),
        );
    }
    assert!(unused.is_empty(), "in no block of code of docs/api-map.md:\n{}", unused.join("\n"));
}

#[test]
fn what_is_not_there_has_a_reason_and_nothing_is_there_twice() {
    let mut seen = HashSet::new();
    for Row { heading, torch, ours, note } in rows() {
        assert!(seen.insert((heading, torch)), "{heading}: {torch} is there twice");
        assert!(ours != "—" || !note.is_empty(), "{heading}: {torch} is not there, and nothing says why");
    }
    assert!(seen.len() > 150, "{} rows", seen.len());
}
