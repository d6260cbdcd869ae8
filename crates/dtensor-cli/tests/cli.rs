//! The program, run as a person would.

use std::process::{Command, Output};

use serde_json::Value;

fn dtensor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dtensor")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints text")
}

/// Equal but for the last digits, which reading JSON does not keep.
fn close(a: f64, b: f64) -> bool {
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
    let run = dtensor(&["bench", "kernels", "--rounds", "1", "--candle"]);
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
    assert!(rows[0]["candle_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_peer_is_timed_beside_us() {
    let peer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_peer");
    let run = dtensor(&["bench", "kernels", "--rounds", "1", "--only", "tiny_add", "--peer", peer]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let row: Value = serde_json::from_str(&text(&run.stdout)).unwrap();
    let (ours, theirs) = (row["seconds"].as_f64().unwrap(), row["peer_seconds"].as_f64().unwrap());
    assert_eq!(theirs, 2.0);
    assert!(close(row["ratio"].as_f64().unwrap(), ours / theirs), "{row}");
    assert!(text(&run.stderr).contains("geometric mean"));
}

#[test]
fn a_peer_that_is_not_there_is_named() {
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
    // Three ranks have no equal parts of the sizes asked for: they get the next smaller that has.
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
fn the_peer_redistributes_beside_us() {
    let peer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_peer");
    let quick = ["--rounds", "1", "--ranks", "2", "--sizes", "4096", "--only", "all_to_all"];
    let run =
        dtensor(&[&["bench", "redistribute", "--world", "threads", "--peer", peer], &quick[..]].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    let row: Value = serde_json::from_str(&text(&run.stdout)).unwrap();
    let (ours, theirs) = (row["seconds"].as_f64().unwrap(), row["peer_seconds"].as_f64().unwrap());
    assert_eq!(theirs, 2.0);
    assert!(close(row["ratio"].as_f64().unwrap(), ours / theirs), "{row}");
    assert!(text(&run.stderr).starts_with("threads, 4096 bytes: "), "{}", text(&run.stderr));
}

#[test]
fn ranks_that_cannot_be_are_refused() {
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
fn a_world_that_was_not_built_in_is_said_in_one_line() {
    let run = dtensor(&["bench", "redistribute", "--world", "mpi"]);
    assert!(!run.status.success());
    let message = text(&run.stderr);
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("error: ") && message.contains("feature `mpi`"), "{message}");
}

#[test]
#[cfg(feature = "mpi")]
fn processes_redistribute_too() {
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
fn the_peer_dispatches_beside_us() {
    let peer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_peer");
    let quick = ["--rounds", "1", "--world", "simulated", "--only", "matmul"];
    let run = dtensor(&[&["bench", "dispatch", "--peer", peer], &quick[..]].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    let row: Value = serde_json::from_str(&text(&run.stdout)).unwrap();
    let (ours, theirs) = (row["seconds"].as_f64().unwrap(), row["peer_seconds"].as_f64().unwrap());
    assert_eq!(theirs, 2.0);
    assert!(close(row["ratio"].as_f64().unwrap(), ours / theirs), "{row}");
    assert!(text(&run.stderr).starts_with("simulated: at least "), "{}", text(&run.stderr));
}

#[test]
fn plan_times_finding_and_looking_up() {
    let run = dtensor(&["bench", "plan", "--mesh", "2,2", "--shape", "8,6", "--pairs", "5", "--all"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let out = text(&run.stdout);
    let rows: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 11, "five plain pairs, five random ones and the summary:\n{out}");
    for row in &rows[..10] {
        let seconds = |name: &str| row[name].as_f64().unwrap();
        assert!(seconds("cached_seconds") > 0.0 && seconds("uncached_seconds") > 0.0, "{row}");
        assert!(row["case"].as_str().unwrap().starts_with(['R', 'S', 'P']), "{row}");
    }
    assert_eq!((&rows[10]["ranks"], &rows[10]["pairs"]), (&4.into(), &5.into()));
    let refused = dtensor(&["bench", "plan", "--pairs", "0"]);
    assert_eq!(text(&refused.stderr), "error: no pairs were asked for\n");
}
