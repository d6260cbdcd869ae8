//! Tests that `docs/api-map.md` is complete, and that `docs/guide.md` shows the real output of its programs.
//!
//! Every PyTorch name in the list below must have a row in the map. The list has the names that PyTorch documents for
//! `torch.distributed.tensor` and what it refers to. It was typed from PyTorch's documentation and signatures, so names that
//! PyTorch adds must be added here. Every name of this library in the map must be used in the map's code, which the
//! documentation tests compile and run.

use std::collections::HashSet;

use dtensor::debug::CommDebugMode;
use dtensor::models::MLPModule;
use dtensor::prelude::*;

const MAP: &str = include_str!("../../../../docs/api-map.md");
const GUIDE: &str = include_str!("../../../../docs/guide.md");

/// The names of PyTorch 2.15 by the heading of their section in the map. `f(x=)` is the argument `x` of `f`. A feature without
/// a name in PyTorch is listed as the text of its whole cell.
const NAMES: [(&str, &[&str]); 8] = [
    (
        "`torch.distributed.tensor`",
        &[
            "DTensor",
            "distribute_tensor",
            "distribute_tensor(device_mesh=)",
            "distribute_tensor(placements=)",
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
            "logspace(base=)",
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
            "DTensor.from_local",
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
            "x[idx] = v",
            "repr",
            "numpy",
            "nn.Parameter(dtensor)",
            "torch.save",
            "pickle",
            "arithmetic and methods",
        ],
    ),
    (
        "Placement types",
        &[
            "is_shard()",
            "is_shard(dim)",
            "is_replicate()",
            "is_partial()",
            "is_partial(reduce_op)",
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
            "PrepareModuleInputOutput(input_layouts=)",
            "PrepareModuleInputOutput(desired_input_layouts=)",
            "PrepareModuleInputOutput(input_kwarg_layouts=)",
            "PrepareModuleInputOutput(desired_input_kwarg_layouts=)",
            "PrepareModuleInputOutput(use_local_input=)",
            "PrepareModuleInputOutput(output_layouts=)",
            "PrepareModuleInputOutput(desired_output_layouts=)",
            "PrepareModuleInputOutput(use_local_output=)",
            "parallelize_module(device_mesh=)",
            "parallelize_module(parallelize_plan=)",
            "parallelize_module(src_data_rank=)",
            "distribute_module(device_mesh=)",
            "distribute_module(partition_fn=)",
            "distribute_module(input_fn=)",
            "distribute_module(output_fn=)",
            "style `repr`",
            "input_reshard",
            "_pre_dp_module_transform",
        ],
    ),
    (
        "`torch.distributed.tensor.debug` and other tools",
        &[
            "CommDebugMode",
            "`CommDebugMode` `repr`",
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
            "save_logs",
            "load_logs",
            "custom dispatch hooks of `DebugMode`",
            "ExplicitRedistributionContext",
            "ExplicitRedistributionContext(enable=)",
            "ExplicitRedistributionContext(strict=)",
            "ExplicitRedistributionContext(mode=)",
            "LocalTensorMode",
            "strategy validation",
            "sharding-cache statistics",
            "sharding-cache clear",
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
            "context_parallel_unshard(mesh=)",
            "context_parallel_unshard(buffers=)",
            "context_parallel_unshard(seq_dims=)",
            "context_parallel_unshard(load_balancer=)",
            "set_rotate_method",
            "load balancers of `context_parallel`",
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
            "torch.distributed.tensor._random.manual_seed",
            "distribute_region_enabled",
            "generator=",
        ],
    ),
    (
        "`torch.distributed.device_mesh`",
        &[
            "init_device_mesh",
            "init_device_mesh(device_type=)",
            "init_device_mesh(mesh_dim_names=)",
            "init_device_mesh(backend_override=)",
            "DeviceMesh(mesh=)",
            "DeviceMesh(device_type=)",
            "DeviceMesh(mesh_dim_names=)",
            "DeviceMesh(backend_override=)",
            "DeviceMesh(preserve_rank_order=)",
            "mesh[\"tp\"]",
            "mesh[\"dp\", \"tp\"]",
            "_flatten",
            "_unflatten",
            "_concatenate",
            "get_group",
            "get_all_groups",
            "get_local_rank",
            "get_coordinate",
            "get_rank",
            "size()",
            "size(dim)",
            "shape",
            "ndim",
            "mesh",
            "device_type",
            "mesh_dim_names",
            "_get_root_mesh",
            "_get_root_mesh_dim",
            "_get_all_submeshes",
            "from_group",
            "from_group(device_type=)",
            "from_group(mesh=)",
            "from_group(mesh_dim_names=)",
            "with mesh:",
            "==",
            "hash",
            "repr",
            "abort",
        ],
    ),
    (
        "`torch.distributed._functional_collectives`",
        &[
            "all_reduce",
            "all_reduce(reduceOp=)",
            "all_gather_single",
            "all_gather_single(gather_dim=)",
            "all_gather_tensor",
            "reduce_scatter_single",
            "reduce_scatter_single(reduceOp=)",
            "reduce_scatter_single(scatter_dim=)",
            "reduce_scatter_tensor",
            "all_to_all_single",
            "all_to_all_single(output_split_sizes=)",
            "all_to_all_single(input_split_sizes=)",
            "broadcast",
            "broadcast(src=)",
            "permute_tensor",
            "permute_tensor(src_dst=)",
            "all_reduce_coalesced",
            "all_gather_into_tensor_coalesced",
            "reduce_scatter_tensor_coalesced",
            "reduce_scatter_tensor_coalesced(scatter_dim=)",
            "wait_tensor",
            "AsyncCollectiveTensor.wait",
            "shard_dim_alltoall",
            "\"sum\"",
            "\"avg\"",
            "\"min\"",
            "\"max\"",
            "\"product\"",
            "\"band\"",
            "\"bor\"",
            "\"bxor\"",
            "\"premul_sum\"",
            "group=",
            "tag=",
        ],
    ),
];

struct Row {
    heading: &'static str,
    torch: &'static str,
    ours: &'static str,
    note: &'static str,
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

/// Returns the texts between backticks.
fn code(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Returns the blocks of code that are compiled.
fn blocks() -> Vec<&'static str> {
    MAP.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Returns the function and the names of the arguments of `f(x=, y=False)`.
fn arguments(code: &str) -> Option<(&str, Vec<&str>)> {
    let (function, arguments) = code.strip_suffix(')')?.split_once('(')?;
    Some((function, arguments.split(',').filter_map(|one| Some(one.split_once('=')?.0.trim())).collect()))
}

/// Returns true if a cell of the first column covers a name: the name is the whole cell, or is in it as code.
fn names(cell: &str, name: &str) -> bool {
    if let Some((function, wanted)) = arguments(name).filter(|(_, wanted)| !wanted.is_empty()) {
        let mut calls = code(cell).filter_map(arguments);
        return calls.any(|(of, there)| of == function && there.contains(&wanted[0]));
    }
    cell == name || code(cell).any(|code| code == name)
}

/// Returns true if a block uses a name: as `Type::name`, or as a method, field or function if the block also has the type.
fn uses(block: &str, path: &str) -> bool {
    let Some((rest, name)) = path.rsplit_once("::") else { return words(block).any(|word| word == path) };
    let owner = rest.rsplit("::").next().unwrap_or(rest);
    if block.contains(&format!("{owner}::{name}")) {
        return true;
    }
    let forms = [format!(".{name}("), format!(".{name}::<"), format!("{name}:"), format!("fn {name}(")];
    let used = |form: &String| {
        let before = |at: usize| block[..at].chars().next_back();
        let starts = |at: usize| !before(at).is_some_and(|c| c.is_alphanumeric() || c == '_');
        block.match_indices(&form[..]).any(|(at, _)| form.starts_with('.') || starts(at))
    };
    // An item of a module may be imported by its name.
    let imported = owner.starts_with(char::is_lowercase) && words(block).any(|word| word == name);
    words(block).any(|word| word == owner) && (imported || forms.iter().any(used))
}

/// Returns true if a text is a path of identifiers.
fn is_path(text: &str) -> bool {
    text.split("::").all(|part| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_'))
}

#[test]
fn every_name_of_pytorch_is_in_the_api_map() {
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
fn every_mapped_name_is_used_in_code_that_runs() {
    let blocks = blocks();
    let mut unused = Vec::new();
    for row in rows() {
        let ours: Vec<&str> = code(row.ours).map(|name| name.trim_end_matches('!')).collect();
        assert!(!ours.is_empty() || row.ours == "—", "{}: `{}` says nothing", row.heading, row.torch);
        assert!(ours.iter().all(|name| is_path(name)), "{}: {}", row.heading, row.ours);
        let noted = code(row.note).filter(|text| text.contains("::") && is_path(text));
        for name in ours.into_iter().chain(noted) {
            if !blocks.iter().any(|block| uses(block, name)) {
                unused.push(format!("{}: {name}", row.torch));
            }
        }
    }
    assert!(unused.is_empty(), "in no block of code of docs/api-map.md:\n{}", unused.join("\n"));
}

#[test]
fn missing_names_have_a_reason_and_no_name_is_listed_twice() {
    let mut seen = HashSet::new();
    for Row { heading, torch, ours, note } in rows() {
        assert!(seen.insert((heading, torch)), "{heading}: {torch} is there twice");
        assert!(ours != "—" || !note.is_empty(), "{heading}: {torch} is not there, and nothing says why");
    }
    assert!(seen.len() > 150, "{} rows", seen.len());
}

/// Checks that the tests above can fail.
#[test]
fn names_are_distinguished_from_substrings() {
    assert!(
        names("`ones`, `full`", "full")
            && !names("`ones_like`, full", "full")
            && !names("`full(x=)`", "full")
    );
    assert!(names("`f(a=, b=False)` and its like", "f(b=)") && !names("`f(ab=)`, `g(b=)`", "f(b=)"));
    assert!(names("arithmetic and methods", "arithmetic and methods"));
    assert!(uses("let x: Tensor; x.add(1)", "Tensor::add") && !uses("x.add(1)", "Tensor::add"));
    assert!(uses("Options { low: 1 }", "Options::low") && !uses("Options { slow: 1 }", "Options::low"));
    assert!(!uses("let x: Tensor; x.add_all(1)", "Tensor::add") && uses("a::b::of()", "b::of"));
    assert!(uses("use debug::{show, other}; show()", "debug::show") && !uses("show()", "debug::show"));
}

#[test]
fn the_guide_shows_what_its_programs_print() -> Result<()> {
    let shown: Vec<&str> =
        GUIDE.split("```text\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let printed = launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let x = sharded::rand([6, 5], DType::F32, &mesh, [Shard(0), Shard(1)])?;
        let plan = x.explain_redistribute([Replicate, Shard(0)])?.to_string();

        let styles = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
        let model = parallelize_module(MLPModule::new(true)?, &mesh["tp"], styles)?;
        let x = Tensor::rand([8, 10], DType::F32)?.requires_grad_(true)?;
        let comm = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
        Ok([plan, comm.to_string()])
    })?;
    for text in &printed[0] {
        assert!(shown.iter().any(|shown| shown.trim() == text.trim()), "the guide does not show\n{text}");
    }
    Ok(())
}
