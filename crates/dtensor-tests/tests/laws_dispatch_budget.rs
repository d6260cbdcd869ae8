//! Tests that an operator on distributed tensors costs only a few instructions more than the same operator on plain tensors.
//!
//! Valgrind counts the instructions. If it is not installed, the test says so and passes. The count is of a test build, which
//! is less optimised than a release and has debug assertions, so a release needs fewer. The counts repeat exactly, whatever
//! else the machine does.
//!
//! The baseline is `Tensor::add` of a plain tensor of the shape of rank 0's local tensor: it has the same kernel, allocation
//! and, with gradients, graph node. The difference is the cost of the mesh.
//!
//! This test is a separate program: valgrind runs all of it, and it sets the number of threads of its process.

use std::hint::black_box;
use std::process::Command;

use dtensor::comm::World;
use dtensor::{DType, DeviceMesh, Replicate, Result, Shard, Tensor, distribute_tensor, set_num_threads};

/// The instructions that an operator may cost beyond the baseline, without and with a gradient.
const BUDGET: [(&str, u64); 2] = [("", 218), ("_grad", 765)];

/// The ranks in the simulated world. The count does not depend on their number.
const RANKS: usize = 4;

/// The numbers of operators in the two runs. Their difference excludes one-time costs: the first operator makes the sharding
/// decision that the others find in the cache.
const FEW: u64 = 100;
const MANY: u64 = 1_100;

/// The environment variable that tells this program to run `case operators` under valgrind.
const CHILD: &str = "DTENSOR_COUNTED";

#[test]
fn dispatch_stays_inside_its_instruction_budget() {
    if let Ok(what) = std::env::var(CHILD) {
        let (case, operators) = what.split_once(' ').expect("a case and a number");
        add(case, operators.parse().expect("a number")).expect("the operators succeed");
        return;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("left out: no valgrind here to count instructions");
        return;
    }
    let mut beyond = Vec::new();
    for (grad, budget) in BUDGET {
        let local = instructions(&format!("local{grad}"));
        eprintln!("local{grad}: {local} instructions");
        for layout in ["replicate", "shard"] {
            let case = format!("{layout}{grad}");
            let all = instructions(&case);
            let more = all.saturating_sub(local);
            eprintln!("{case}: {all} instructions, {more} beyond local{grad}");
            beyond.push((case, more, budget));
        }
    }
    beyond.retain(|&(_, more, budget)| more > budget);
    assert!(beyond.is_empty(), "more instructions beyond the local operator than the budget: {beyond:?}");
}

/// Adds the tensor of a case to itself `operators` times.
fn add(case: &str, operators: u64) -> Result<()> {
    set_num_threads(1);
    let mesh = DeviceMesh::new(&World::simulated(RANKS, 0)?, [RANKS], "ranks")?;
    let ones = |rows: usize| Tensor::ones([rows, 4], DType::F32)?.requires_grad_(case.ends_with("_grad"));
    let x = match case.trim_end_matches("_grad") {
        "local" => ones(4)?,
        "replicate" => distribute_tensor(&ones(4)?, &mesh, Replicate)?,
        "shard" => distribute_tensor(&ones(4 * RANKS)?, &mesh, Shard(0))?,
        other => panic!("no case {other}"),
    };
    repeat(&x, operators)
}

/// The only function that valgrind counts, by its name. The start of a program is excluded because its cost varies.
#[inline(never)]
fn repeat(x: &Tensor, operators: u64) -> Result<()> {
    for _ in 0..operators {
        drop(black_box(x.add(x)?));
    }
    Ok(())
}

/// Returns the instructions of one operator of a case, with its sharding decision in the cache.
fn instructions(case: &str) -> u64 {
    let (few, many) = (counted(case, FEW), counted(case, MANY));
    (many - few) / (MANY - FEW)
}

/// Returns the instructions that this program counts for `operators` operators.
fn counted(case: &str, operators: u64) -> u64 {
    let name = format!("dtensor-counted-{}-{case}-{operators}", std::process::id());
    let file = std::env::temp_dir().join(name);
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*laws_dispatch_budget::repeat*"])
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(std::env::current_exe().expect("a running program has a path"))
        .args(["dispatch_stays_inside_its_instruction_budget", "--exact", "--test-threads=1"])
        .env(CHILD, format!("{case} {operators}"))
        .output()
        .expect("valgrind starts");
    let profile = std::fs::read_to_string(&file);
    let _ = std::fs::remove_file(&file);
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && out.contains("1 passed"), "{case} under valgrind:\n{out}\n{err}");
    let profile = profile.expect("valgrind writes what it counted");
    let total =
        profile.lines().find_map(|line| line.strip_prefix("totals: ")).expect("a profile has a total");
    let total = total.trim().parse().expect("a number of instructions");
    assert!(total > operators, "valgrind counted {total} instructions: did it not find `repeat`?");
    total
}
