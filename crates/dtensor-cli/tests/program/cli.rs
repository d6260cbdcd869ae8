//! Tests of `dtensor bench`: run the program and check its output.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn dtensor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dtensor")).args(arguments).output().expect("the program starts")
}

const FAKE_PEER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_peer");

/// Runs the program and parses the rows that it prints.
fn rows(arguments: &[&str]) -> Vec<Value> {
    let run = dtensor(arguments);
    assert!(run.status.success(), "{}", text(&run.stderr));
    text(&run.stdout).lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints text")
}

/// Compares two numbers up to rounding, because JSON does not preserve the last digits.
fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * b.abs()
}

#[test]
fn kernels_prints_a_json_line_for_every_case() {
    const CASES: [&str; 33] = [
        "add",
        "mul",
        "relu",
        "exp",
        "gelu",
        "softmax",
        "layernorm",
        "sum0",
        "sum1",
        "sum_all",
        "bcast_row",
        "bcast_col",
        "transpose_contiguous",
        "cat0",
        "cat1",
        "embedding",
        "embedding_backward",
        "mm256",
        "mm512",
        "mm1024",
        "linear_bias",
        "bmm_32x128x64",
        "rand",
        "randn",
        "uniform",
        "normal",
        "trunc_normal",
        "randint",
        "bernoulli",
        "bernoulli_each",
        "dropout",
        "tiny_add",
        "tiny_mm",
    ];
    let run = dtensor(&["bench", "kernels", "--rounds", "1"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let rows: Vec<Value> =
        text(&run.stdout).lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect();
    let names: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert_eq!(names, CASES);
    for row in &rows {
        assert_eq!(row["workload"], "kernels");
        assert!(row["seconds"].as_f64().unwrap() > 0.0);
        assert!(row.get("ratio").is_none() && row.get("peer_seconds").is_none());
    }
}

#[test]
fn kernels_are_compared_with_the_peer() {
    let peer = FAKE_PEER;
    let run = dtensor(&["bench", "kernels", "--rounds", "1", "--only", "tiny_add", "--peer", peer]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let row: Value = serde_json::from_str(&text(&run.stdout)).unwrap();
    let (ours, theirs) = (row["seconds"].as_f64().unwrap(), row["peer_seconds"].as_f64().unwrap());
    assert_eq!(theirs, 2.0);
    assert!(is_close(row["ratio"].as_f64().unwrap(), ours / theirs), "{row}");
    assert!(text(&run.stderr).contains("geometric mean"));
}

#[test]
fn a_missing_peer_is_named_in_the_error() {
    let run = dtensor(&["bench", "kernels", "--peer", "/nonexistent/python"]);
    assert!(!run.status.success());
    assert!(text(&run.stderr).contains("/nonexistent/python"));
}

#[test]
fn redistribute_prints_a_json_line_for_every_case() {
    let run = dtensor(
        &[
            &["bench", "redistribute", "--world", "threads", "--rounds", "1"][..],
            &["--ranks", "2,3", "--sizes", "4096,30000"],
        ]
        .concat(),
    );
    assert!(run.status.success(), "{}", text(&run.stderr));
    let rows: Vec<Value> =
        text(&run.stdout).lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect();
    let mut rows = rows.iter();
    // Three ranks cannot shard the requested sizes evenly, so the cases have the next smaller sizes.
    for (ranks, sizes) in [(2, [4096, 86 * 86 * 4]), (3, [30 * 33 * 4, 84 * 87 * 4])] {
        for bytes in sizes {
            for kind in ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"] {
                let row = rows.next().unwrap();
                assert_eq!(row["workload"], "redistribute");
                assert_eq!(row["case"], format!("{kind}_{bytes}"));
                assert_eq!(row["ranks"], ranks);
                assert_eq!(row["world"], "threads");
                assert_eq!(row["bytes"], bytes);
                assert!(row["seconds"].as_f64().unwrap() > 0.0);
                assert!(row["bound_fraction"].as_f64().unwrap() > 0.0);
                assert!(row.get("ratio").is_none() && row.get("peer_seconds").is_none());
            }
        }
    }
    assert!(rows.next().is_none());
}

#[test]
fn redistribute_is_compared_with_the_peer() {
    let peer = FAKE_PEER;
    let quick = ["--rounds", "1", "--ranks", "2", "--sizes", "4096", "--only", "all_to_all"];
    let run =
        dtensor(&[&["bench", "redistribute", "--world", "threads", "--peer", peer], &quick[..]].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    let row: Value = serde_json::from_str(&text(&run.stdout)).unwrap();
    let (ours, theirs) = (row["seconds"].as_f64().unwrap(), row["peer_seconds"].as_f64().unwrap());
    assert_eq!(theirs, 2.0);
    assert!(is_close(row["ratio"].as_f64().unwrap(), ours / theirs), "{row}");
    assert!(text(&run.stderr).starts_with("threads, 4096 bytes: "), "{}", text(&run.stderr));
}

#[test]
fn invalid_ranks_worlds_and_sizes_are_errors() {
    for (flag, value) in [("--ranks", "0"), ("--ranks", "2,many"), ("--world", "moon"), ("--sizes", "0")] {
        let run = dtensor(&["bench", "redistribute", flag, value]);
        assert!(!run.status.success());
        let (message, wrong) = (text(&run.stderr), value.trim_start_matches("2,"));
        let first = message.lines().next().unwrap();
        assert!(first.starts_with(&format!("error: invalid value '{wrong}' for '{flag}")), "{message}");
    }
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_world_that_this_build_does_not_support_gives_one_line() {
    let run = dtensor(&["bench", "redistribute", "--world", "mpi"]);
    assert!(!run.status.success());
    let message = text(&run.stderr);
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("error: ") && message.contains("feature `mpi`"), "{message}");
}

#[test]
#[cfg(feature = "mpi")]
fn redistribute_runs_on_processes() {
    let quick = ["--rounds", "1", "--ranks", "2", "--sizes", "4096", "--only", "all_reduce"];
    let run = dtensor(&[&["bench", "redistribute", "--world", "threads,mpi"], &quick[..]].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    let rows: Vec<Value> =
        text(&run.stdout).lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect();
    let worlds: Vec<&str> = rows.iter().map(|row| row["world"].as_str().unwrap()).collect();
    assert_eq!(worlds, ["threads", "mpi"]);
    assert!(rows.iter().all(|row| row["seconds"].as_f64().unwrap() > 0.0));
}

#[test]
fn dispatch_prints_a_json_line_for_every_case() {
    const CASES: [&str; 7] = [
        "local_add",
        "add_replicate",
        "add_shard",
        "local_add_grad",
        "add_replicate_grad",
        "add_shard_grad",
        "matmul_shard",
    ];
    let run = dtensor(&["bench", "dispatch", "--rounds", "1", "--ranks", "2"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let rows: Vec<Value> =
        text(&run.stdout).lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect();
    let mut rows = rows.iter();
    for world in ["simulated", "threads"] {
        for case in CASES {
            let row = rows.next().unwrap();
            assert_eq!((&row["workload"], &row["case"]), (&"dispatch".into(), &case.into()));
            assert_eq!((&row["ranks"], &row["world"]), (&2.into(), &world.into()));
            assert!(row["seconds"].as_f64().unwrap() > 0.0);
            assert!(row.get("ratio").is_none() && row.get("peer_seconds").is_none());
        }
    }
    assert!(rows.next().is_none());
}

#[test]
fn dispatch_is_compared_with_the_peer() {
    let peer = FAKE_PEER;
    let quick = ["--rounds", "1", "--world", "simulated", "--only", "matmul"];
    let run = dtensor(&[&["bench", "dispatch", "--peer", peer], &quick[..]].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    let row: Value = serde_json::from_str(&text(&run.stdout)).unwrap();
    let (ours, theirs) = (row["seconds"].as_f64().unwrap(), row["peer_seconds"].as_f64().unwrap());
    assert_eq!(theirs, 2.0);
    assert!(is_close(row["ratio"].as_f64().unwrap(), ours / theirs), "{row}");
    assert!(text(&run.stderr).starts_with("simulated: at least "), "{}", text(&run.stderr));
}

#[test]
fn plan_times_the_search_and_the_cache() {
    let run = dtensor(&["bench", "plan", "--mesh", "2,2", "--shape", "8,6", "--pairs", "5", "--all"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let out = text(&run.stdout);
    let rows: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 11, "expected five common pairs, five random pairs and the summary:\n{out}");
    for row in &rows[..10] {
        let seconds = |name: &str| row[name].as_f64().unwrap();
        assert!(seconds("cached_seconds") > 0.0 && seconds("uncached_seconds") > 0.0, "{row}");
        assert!(row["case"].as_str().unwrap().starts_with(['R', 'S', 'P']), "{row}");
    }
    assert_eq!((&rows[10]["ranks"], &rows[10]["pairs"]), (&4.into(), &5.into()));
    let run = dtensor(&["bench", "plan", "--pairs", "0"]);
    assert_eq!(text(&run.stderr), "error: --pairs must be at least 1\n");
}

#[test]
fn training_prints_a_json_line_for_every_case() {
    const MLP: [&str; 3] = ["b8_d64_h256", "b64_d512_h2048", "b256_d1024_h4096"];
    const TRANSFORMER: [&str; 2] = ["l2_v256_s32_d64_h4_b4", "l4_v1024_s128_d256_h8_b8"];
    const FSDP: [&str; 1] = ["fsdp_l2_v256_s32_d64_h4_b4"];
    for (workload, cases, only) in
        [("mlp", &MLP[..], ""), ("transformer", &TRANSFORMER[..1], "l2"), ("fsdp", &FSDP[..], "l2")]
    {
        let flags = ["--world", "threads", "--rounds", "1", "--ranks", "2", "--only", only];
        let rows = rows(&[&["bench", workload], &flags[..]].concat());
        let names: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
        assert_eq!(names, cases);
        for row in &rows {
            assert_eq!((&row["workload"], &row["world"]), (&workload.into(), &"threads".into()));
            assert_eq!(row["ranks"], 2);
            let seconds = row["seconds"].as_f64().unwrap();
            assert!(seconds > 0.0);
            let rate = row.get("tokens_per_second").map(|rate| rate.as_f64().unwrap());
            assert_eq!(rate.is_some(), workload != "mlp", "{row}");
            assert!(rate.is_none_or(|rate| (rate * seconds - 128.0).abs() < 1e-6), "{row}");
            assert!(row.get("ratio").is_none() && row.get("peer_seconds").is_none());
        }
    }
}

/// The losses are those that `train_peer.py` computes with PyTorch.
#[test]
fn training_has_the_losses_of_pytorch_on_any_number_of_ranks() {
    let train = |workload: &str, only: &str, ranks: &str, loss: &str| {
        let flags = ["--world", "threads", "--rounds", "1", "--peer", FAKE_PEER];
        let mut command = Command::new(env!("CARGO_BIN_EXE_dtensor"));
        command.args(["bench", workload, "--only", only, "--ranks", ranks]).args(flags);
        command.env("FAKE_LOSS", loss).output().expect("the program starts")
    };
    for (workload, only, ranks, loss) in [
        ("mlp", "b8", "1,2,3,5", "-99.10051727294922"),
        ("mlp", "b64", "3", "-1151596.75"),
        ("transformer", "l2", "1,2,4", "5.015446186065674"),
    ] {
        let run = train(workload, only, ranks, loss);
        assert!(run.status.success(), "{}", text(&run.stderr));
        for line in text(&run.stdout).lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let (ours, theirs) = (row["seconds"].as_f64().unwrap(), row["peer_seconds"].as_f64().unwrap());
            assert_eq!(theirs, 2.0);
            assert!(is_close(row["ratio"].as_f64().unwrap(), ours / theirs), "{row}");
        }
        assert!(text(&run.stderr).starts_with("threads, "), "{}", text(&run.stderr));
    }
    let run = train("mlp", "b8", "2", "null");
    assert!(!run.status.success());
    assert_eq!(text(&run.stderr), "error: b8_d64_h256: peer reported no loss\n");
    let run = train("mlp", "b8", "2", "-99.4");
    assert!(!run.status.success());
    let message = text(&run.stderr);
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(
        message.starts_with("error: b8_d64_h256: the loss of peer is -99.4, but that of threads is -99.1"),
        "{message}"
    );
}

#[cfg(feature = "mpi")]
#[test]
fn training_startup_and_memory_run_on_processes() {
    let quick = ["--world", "threads,mpi", "--rounds", "1", "--ranks", "2"];
    for (workload, only) in
        [("mlp", "b8"), ("transformer", "l2"), ("fsdp", "l2"), ("startup", ""), ("memory", "b8_")]
    {
        let rows = rows(&[&["bench", workload, "--only", only], &quick[..]].concat());
        let worlds: Vec<&str> = rows.iter().map(|row| row["world"].as_str().unwrap()).collect();
        assert_eq!(worlds, ["threads", "mpi"], "{workload}");
        let measure = if workload == "memory" { "peak_bytes" } else { "seconds" };
        assert!(rows.iter().all(|row| row[measure].as_f64().unwrap() > 0.0), "{rows:?}");
    }
}

#[test]
fn startup_is_compared_with_the_peer() {
    let rows = rows(&[
        "bench", "startup", "--world", "threads", "--ranks", "1,3", "--rounds", "2", "--peer", FAKE_PEER,
    ]);
    let ranks: Vec<u64> = rows.iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [1, 3]);
    for row in &rows {
        assert_eq!((&row["workload"], &row["world"]), (&"startup".into(), &"threads".into()));
        assert_eq!((&row["case"], &row["peer_seconds"]), (&"process_group_and_mesh".into(), &2.0.into()));
        let seconds = row["seconds"].as_f64().unwrap();
        assert!(seconds > 0.0 && is_close(row["ratio"].as_f64().unwrap(), seconds / 2.0), "{row}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_compared_with_the_peer() {
    let quick = ["--world", "threads", "--ranks", "2", "--rounds", "1", "--only", "d64"];
    let rows = rows(&[&["bench", "memory", "--peer", FAKE_PEER], &quick[..]].concat());
    let cases: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["b8_d64_h256", "l2_v256_s32_d64_h4_b4", "fsdp_l2_v256_s32_d64_h4_b4"]);
    for row in &rows {
        assert_eq!((&row["workload"], &row["world"]), (&"memory".into(), &"threads".into()));
        assert_eq!((&row["ranks"], &row["peer_peak_bytes"]), (&2.into(), &2_000_000.into()));
        let bytes = row["peak_bytes"].as_f64().unwrap();
        assert!(bytes > 1e6 && is_close(row["ratio"].as_f64().unwrap(), bytes / 2e6), "{row}");
        assert!(row.get("seconds").is_none() && row.get("bytes").is_none(), "{row}");
    }
}

#[test]
fn scaling_measures_all_ranks_and_meshes() {
    let train =
        rows(&["bench", "scaling", "--rounds", "1", "--ranks", "1,2", "--only", "b64", "--meshes", "2"]);
    let ranks: Vec<u64> = train.iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [1, 2]);
    assert!(train.iter().all(|row| row["seconds"].as_f64().unwrap() > 0.0 && row["world"] == "threads"));
    let operators = rows(&["bench", "scaling", "--rounds", "1", "--only", "add_shard", "--meshes", "2,300"]);
    let ranks: Vec<u64> = operators.iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [2, 300]);
    assert!(
        operators.iter().all(|row| row["seconds"].as_f64().unwrap() > 0.0 && row["world"] == "simulated")
    );
    let plans = rows(&["bench", "scaling", "--only", "plan", "--meshes", "2,4096"]);
    assert_eq!(plans.len(), 10);
    for row in &plans {
        assert!(row["uncached_seconds"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["cached_seconds"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn all_workloads_make_one_table() {
    let quick = ["--world", "threads", "--ranks", "2", "--rounds", "1"];
    // Together, these filters select every kind of row.
    for (only, expected) in [
        ("add", vec!["kernels | add", "kernels | tiny_add", "dispatch | add_shard | 2 | simulated"]),
        ("b8_", vec!["mlp | b8_d64_h256 | 2 | threads", "memory | b8_d64_h256 | 2 | threads"]),
        ("mesh", vec!["startup | process_group_and_mesh | 2 | threads"]),
        ("all_to_all_4096", vec!["redistribute | all_to_all_4096 | 2 | threads"]),
    ] {
        let run = dtensor(&[&["bench", "--all", "--peer", FAKE_PEER, "--only", only], &quick[..]].concat());
        assert!(run.status.success(), "{}", text(&run.stderr));
        let out = text(&run.stdout);
        assert!(out.starts_with("- machine: "), "{out}");
        assert!(
            out.contains(concat!("dtensor ", env!("CARGO_PKG_VERSION"))) && out.contains("PyTorch unknown"),
            "{out}"
        );
        assert!(
            out.contains("| workload | case | ranks | world | dtensor | PyTorch | dtensor / PyTorch |"),
            "{out}"
        );
        for row in expected {
            let line = out.lines().find(|line| line.starts_with(&format!("| {row} |")));
            let line = line.unwrap_or_else(|| panic!("no {row} in\n{out}"));
            assert_eq!(line.matches('|').count(), 8, "{line}");
            assert!(
                line.contains(if row.starts_with("memory") { "| 1.91 MiB |" } else { "| 2.00 s |" }),
                "{line}"
            );
        }
    }
    let alone = rows(&[&["bench", "--all", "--json", "--only", "tiny_add"], &quick[..]].concat());
    assert_eq!((&alone[0]["workload"], &alone[1]["case"]), (&"machine".into(), &"tiny_add".into()));
    assert!(alone[0]["cores"].as_u64().unwrap() > 0 && alone[0].get("pytorch").is_none(), "{}", alone[0]);
    assert_eq!(alone.len(), 2);
}

/// Dispatch runs on the largest number of ranks, and the commit is the one that the program was built from.
#[test]
fn the_table_names_the_commit_and_the_ranks() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dtensor"));
    command.args([
        "bench", "--all", "--world", "threads", "--ranks", "2,1", "--rounds", "1", "--only", "matmul",
    ]);
    let run = command.current_dir("/").output().expect("the program starts");
    assert!(run.status.success(), "{}", text(&run.stderr));
    let out = text(&run.stdout);
    assert!(out.contains(concat!("\n- commit ", env!("DTENSOR_COMMIT"), ", ")), "{out}");
    assert!(!out.contains("MPI"), "{out}");
    assert!(out.contains("| dispatch | matmul_shard | 2 | threads |"), "{out}");
    let empty = dtensor(&["bench", "--all", "--world", "threads", "--rounds", "1", "--only", "zzz"]);
    assert!(!empty.status.success() && empty.stdout.is_empty());
    assert_eq!(text(&empty.stderr).lines().last(), Some("error: no case contains \"zzz\""));
}

#[test]
fn rows_measured_before_an_error_are_printed() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dtensor"));
    command.args(["bench", "--all", "--peer", FAKE_PEER, "--only", "add_shard", "--ranks", "2"]);
    command.args(["--world", "threads", "--rounds", "1"]).env("FAKE_END", "threads:add_shard_grad");
    let run = command.output().expect("the program starts");
    assert!(!run.status.success());
    let (out, message) = (text(&run.stdout), text(&run.stderr));
    assert!(out.contains("| dispatch | add_shard | 2 | threads |"), "{out}");
    assert!(!out.contains("| dispatch | add_shard_grad | 2 | threads |"), "{out}");
    assert_eq!(
        message.lines().last(),
        Some("error: the peer ended in case threads:add_shard_grad; its own message is above")
    );
}

#[cfg(unix)]
#[test]
fn a_peer_that_ends_at_once_gives_one_line() {
    let run = dtensor(&["bench", "kernels", "--only", "mm512", "--rounds", "1", "--peer", "true"]);
    assert!(!run.status.success());
    assert_eq!(text(&run.stderr), "error: the peer ended in case mm512; its own message is above\n");
}

#[test]
fn a_closed_pipe_is_no_error() {
    for arguments in [
        &["kernels", "--only", "tiny", "--rounds", "1"][..],
        &["plan", "--mesh", "2", "--shape", "8", "--pairs", "5", "--all"],
        &["--all", "--only", "tiny", "--rounds", "1"],
        &["--all", "--only", "tiny", "--rounds", "1", "--json"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dtensor"));
        command.arg("bench").args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        drop(child.stdout.take());
        let run = child.wait_with_output().expect("the program ends");
        let message = text(&run.stderr);
        assert!(run.status.success(), "{message}");
        assert!(message.lines().all(|line| line.ends_with(" …")), "{message}");
    }
}

#[test]
fn invalid_benchmark_flags_give_one_line() {
    for (arguments, expected) in [
        (&["mlp", "--ranks", "0"][..], "invalid value '0' for '--ranks"),
        (&["transformer", "--world", "moon"], "invalid value 'moon' for '--world"),
        (&["transformer", "--world", "simulated"], "invalid value 'simulated' for '--world"),
        (&["startup", "--rounds", "0"], "invalid value '0' for '--rounds"),
        (&["memory", "--serve"], "unexpected argument '--serve'"),
        (&["scaling", "--meshes", "0"], "invalid value '0' for '--meshes"),
        (&["--all", "--ranks", "two"], "invalid value 'two' for '--ranks"),
        (&["--all", "mlp"], "the subcommand 'mlp' cannot be used with '--all'"),
        (&["kernels", "--only", "zzz"], "no case contains \"zzz\""),
        (&["kernels", "--only", "zzz"], "no case contains \"zzz\""),
        (&["redistribute", "--only", "zzz"], "no case contains \"zzz\""),
        (&["dispatch", "--only", "zzz"], "no case contains \"zzz\""),
        (&["mlp", "--only", "l2"], "no case contains \"l2\""),
        (&["startup", "--only", "zzz"], "no case contains \"zzz\""),
        (&["memory", "--only", "zzz"], "no case contains \"zzz\""),
        (&["scaling", "--only", "zzz", "--meshes", "2"], "no case contains \"zzz\""),
        (
            &["transformer", "--ranks", "2,3"],
            "--ranks 3: the 4 heads of l2_v256_s32_d64_h4_b4 are not divisible",
        ),
        (&["memory", "--ranks", "8"], "--ranks 8: the 4 heads of l2_v256_s32_d64_h4_b4 are not divisible"),
        (
            &["scaling", "--ranks", "3"],
            "--ranks 3: the 8 heads of l4_v1024_s128_d256_h8_b8 are not divisible",
        ),
        (&["--all", "--ranks", "3"], "--ranks 3: the 4 heads of l2_v256_s32_d64_h4_b4 are not divisible"),
        (&["--rounds", "2"], "name a workload, or measure all of them with --all"),
        (
            &["mlp", "--peer", "/nonexistent/python", "--world", "threads"],
            "cannot start the peer \"/nonexistent/python\"",
        ),
    ] {
        let run = dtensor(&[&["bench"], arguments].concat());
        assert!(!run.status.success());
        let message = text(&run.stderr);
        assert!(message.lines().next().unwrap().starts_with(&format!("error: {expected}")), "{message}");
    }
}

#[test]
fn checkpoint_saves_and_loads_beside_the_peer() {
    let common =
        ["bench", "checkpoint", "--rounds", "1", "--ranks", "2", "--weights", "1", "--world", "threads"];
    let rows = rows(&[&common[..], &["--peer", FAKE_PEER]].concat());
    let cases: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["save_1x16MiB", "load_1x16MiB", "load_cached_1x16MiB"]);
    for row in rows {
        assert_eq!((row["workload"].as_str(), row["bytes"].as_u64()), (Some("checkpoint"), Some(16 << 20)));
        let seconds = row["seconds"].as_f64().unwrap();
        assert!(seconds > 0.0 && row["bound_fraction"].as_f64().unwrap() > 0.0, "{row}");
        assert!(is_close(row["ratio"].as_f64().unwrap(), seconds / 2.0), "{row}");
    }
}

#[test]
fn gpt_has_the_same_loss_on_one_rank_and_on_several() {
    let run =
        dtensor(&["bench", "gpt", "--ranks", "2", "--world", "threads", "--rounds", "1", "--only", "l2_"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let rows: Vec<Value> =
        text(&run.stdout).lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect();
    let mut rows = rows.iter();
    for dtype in ["f32", "bf16"] {
        for (ranks, sharding) in [(1, ""), (2, "_tp"), (2, "_fsdp")] {
            let row = rows.next().unwrap();
            let case = format!("l2_v256_s32_d64_h4_b4_{dtype}{sharding}");
            assert_eq!((&row["case"], &row["ranks"]), (&case.into(), &ranks.into()));
            assert!(row["seconds"].as_f64().unwrap() > 0.0 && row["loss"].as_f64().unwrap() > 1.0, "{row}");
        }
    }
    assert!(rows.next().is_none());
}

#[test]
fn gpt_is_compared_with_the_peer() {
    let quick = ["bench", "gpt", "--ranks", "1", "--rounds", "1", "--only", "l2_v256_s32_d64_h4_b4_f32"];
    let run = |loss: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dtensor"));
        command.args(quick).args(["--peer", FAKE_PEER]).env("FAKE_LOSS", loss);
        command.output().expect("the program starts")
    };
    let alone = dtensor(&quick);
    let row: Value = serde_json::from_str(&text(&alone.stdout)).unwrap();
    let beside = run(&row["loss"].to_string());
    assert!(beside.status.success(), "{}", text(&beside.stderr));
    let row: Value = serde_json::from_str(&text(&beside.stdout)).unwrap();
    assert_eq!(row["peer_seconds"], 2.0);
    assert!(text(&beside.stderr).contains("times as fast as the peer"), "{}", text(&beside.stderr));
    let other = run("1.0");
    assert!(!other.status.success());
    assert!(text(&other.stderr).contains("the losses differ"), "{}", text(&other.stderr));
}
