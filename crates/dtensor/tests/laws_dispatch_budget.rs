//! An operator on tensors that lie on a mesh costs few instructions more than the same on a plain tensor.
//!
//! Valgrind counts them; where it is not installed the test says so and passes. What is counted is the code of this test
//! program: the library as tests build it, less optimised than a release and with its debug assertions, so a release needs
//! fewer. Every number repeats exactly, whatever else the machine does.
//!
//! The baseline is `Tensor::add` of the tensor that rank 0 holds of the distributed one, without a mesh: the same
//! kernel, allocation and, with gradients, node. What is beyond it is the price of the mesh.
//!
//! This test is a program by itself: valgrind runs all of it, and it sets the number of threads of its process.

use std::hint::black_box;
use std::process::Command;

use dtensor::comm::World;
use dtensor::{DType, DeviceMesh, Replicate, Result, Shard, Tensor, distribute_tensor, set_num_threads};

/// Instructions that an operator may cost beyond its baseline, without and with a gradient.
const BUDGET: [(&str, u64); 2] = [("", 218), ("_grad", 765)];

/// Ranks in the simulated world. Their number does not matter to what one of them does.
const RANKS: usize = 4;

/// How many operators are counted. The difference leaves out what happens once: for the first operator the decision is
/// made that the rest look up.
const FEW: u64 = 100;
const MANY: u64 = 1_100;

/// Tells this program that it is being counted: `case operators`.
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

/// Adds the tensor of a case to itself, so often.
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

/// All that is counted, so that what the start of a program takes, which differs a little each time, is not. Valgrind finds it
/// by its name.
#[inline(never)]
fn repeat(x: &Tensor, operators: u64) -> Result<()> {
    for _ in 0..operators {
        drop(black_box(x.add(x)?));
    }
    Ok(())
}

/// The instructions of one operator of a case, once the decision for it is made.
fn instructions(case: &str) -> u64 {
    let (few, many) = (counted(case, FEW), counted(case, MANY));
    (many - few) / (MANY - FEW)
}

/// The instructions of this program when it does so many operators.
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
