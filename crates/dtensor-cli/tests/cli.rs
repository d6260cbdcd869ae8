//! The program, run as a person would.

use std::process::{Command, Output};

use serde_json::Value;

fn dtensor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dtensor")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints text")
}

#[test]
fn the_demo_shows_the_loss_falling() {
    let run = dtensor(&["demo", "--steps", "500"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let out = text(&run.stdout);
    let losses: Vec<f64> = out
        .lines()
        .filter(|line| line.starts_with("step"))
        .map(|line| line.split_whitespace().last().unwrap().parse().unwrap())
        .collect();
    assert_eq!(losses.len(), 11, "the first step, and ten more:\n{out}");
    assert!(losses[10] < losses[0] / 3.0, "{losses:?}");
}

#[test]
fn the_demo_repeats_itself() {
    let run = |seed: &str| {
        let out = text(&dtensor(&["demo", "--steps", "50", "--seed", seed]).stdout);
        out.lines().filter(|line| line.starts_with("step")).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1"), run("2"));
}

#[test]
fn a_rate_that_diverges_is_said_in_one_line() {
    for rate in ["1000", "nan", "-1"] {
        let run = dtensor(&["demo", "--steps", "200", &format!("--rate={rate}")]);
        assert!(!run.status.success());
        let message = text(&run.stderr);
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.starts_with("error: "), "{message}");
    }
}

#[test]
fn kernels_prints_a_json_line_for_every_case() {
    const CASES: [&str; 24] = [
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
    assert_eq!(row["ratio"].as_f64().unwrap(), ours / theirs);
    assert!(text(&run.stderr).contains("geometric mean"));
}

#[test]
fn a_peer_that_is_not_there_is_named() {
    let run = dtensor(&["bench", "kernels", "--peer", "/nonexistent/python"]);
    assert!(!run.status.success());
    assert!(text(&run.stderr).contains("/nonexistent/python"));
}
