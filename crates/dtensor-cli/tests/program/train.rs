//! Tests of `dtensor train`: run the program and check its output and files.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// The flags of a model and a training that take less than a second.
const TINY: [&str; 16] = [
    "--steps", "6", "--batch", "4", "--layers", "2", "--dim", "16", "--heads", "4", "--seq", "12",
    "--sample", "20", "--lr", "0.02",
];

/// The program in a temporary folder, where it writes `loss.svg`.
fn program() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_dtensor"));
    program.current_dir(env!("CARGO_TARGET_TMPDIR"));
    program
}

fn train(arguments: &[&str]) -> Output {
    program().arg("train").args(TINY).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints text")
}

#[track_caller]
fn succeeded(run: &Output) -> String {
    assert!(run.status.success(), "{}\n{}", text(&run.stdout), text(&run.stderr));
    text(&run.stdout)
}

/// A temporary file or folder, removed at the end of the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Scratch(std::env::temp_dir().join(format!("dtensor-train-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("the temporary folder has a UTF-8 path")
    }

    fn read(&self) -> String {
        std::fs::read_to_string(&self.0).expect("the program has written it")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0).or_else(|_| std::fs::remove_dir_all(&self.0));
    }
}

/// Trains with `--json`, and returns the content of the file.
fn results(name: &str, arguments: &[&str]) -> Value {
    let file = Scratch::new(name);
    succeeded(&train(&[arguments, &["--json", file.path()]].concat()));
    serde_json::from_str(&file.read()).expect("a JSON object")
}

fn losses(results: &Value) -> Vec<f64> {
    results["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_near(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= tolerance, "{a} and {b}");
    }
}

#[test]
fn every_mesh_has_the_losses_of_one_rank() {
    let single = results("single", &["--mesh", "dp=1"]);
    let expected = losses(&single);
    assert_eq!(expected.len(), 6);
    assert!(expected[5] < expected[0], "{expected:?}");
    assert!((expected[0] - 256f64.ln()).abs() < 0.5, "{expected:?}");
    assert_eq!(single["collectives"].as_array().unwrap().len(), 0);
    let meshes: [&[&str]; 7] = [
        &["--mesh", "dp=2"],
        &["--mesh", "tp=2"],
        // Four sequences on three replicas: uneven slices of the batch.
        &["--mesh", "dp=3"],
        &["--mesh", "tp=2,dp=2", "--sequence-parallel", "--loss-parallel"],
        &["--mesh", "tp=4", "--loss-parallel"],
        &["--mesh", "dp=2,tp=2", "--accumulate", "2"],
        &["--mesh", "dp=2,tp=2", "--checkpoint-activations", "--sequence-parallel"],
    ];
    for (i, flags) in meshes.into_iter().enumerate() {
        let run = results(&format!("mesh-{i}"), flags);
        assert_near(&losses(&run), &expected, 1e-4);
        let validation = |run: &Value| run["validation_loss"].as_f64().unwrap();
        assert_near(&[validation(&run)], &[validation(&single)], 1e-3);
        assert!(!run["collectives"].as_array().unwrap().is_empty());
        assert_eq!(run["sample"].as_array().unwrap().len(), 5 + 20);
    }
    let half = results("half", &["--mesh", "dp=2,tp=2", "--dtype", "bf16"]);
    assert_near(&losses(&half), &expected, 0.05);
    assert_ne!(losses(&half), expected);
}

#[test]
fn progress_collectives_and_sample_are_printed() {
    let out = succeeded(&train(&["--mesh", "dp=2,tp=2", "--sequence-parallel"]));
    let steps = out.lines().filter(|line| line.starts_with("step ")).count();
    assert_eq!(steps, 6, "{out}");
    for words in [
        "on 4 threads, dp=2,tp=2, sequence parallel",
        "tokens/s",
        "layers.*.attention.wo",
        "reduce_scatter",
        "(outside modules)",
        "A sample:\n  Anne ",
        "validation loss ",
        "⣀",
    ] {
        assert!(out.contains(words), "{words:?} is not in\n{out}");
    }
    let single = succeeded(&train(&["--mesh", "dp=1", "--sample", "0"]));
    assert!(single.contains("No communication") && !single.contains("A sample"), "{single}");
}

#[test]
fn a_run_is_reproducible_and_depends_on_the_seed() {
    let run = |name: &str, seed: &str| results(name, &["--mesh", "dp=2", "--dropout", "0.1", "--seed", seed]);
    let (first, again, other) = (run("first", "1"), run("again", "1"), run("other", "2"));
    assert_eq!(first["losses"], again["losses"]);
    assert_eq!(first["sample"], again["sample"]);
    assert_ne!(first["losses"], other["losses"]);
}

#[test]
fn a_resumed_training_has_the_losses_of_one_that_went_on() {
    let (folder, flags) = (Scratch::new("steps"), ["--mesh", "dp=2,tp=2", "--dropout", "0.1"]);
    let all =
        results("went-on", &[&flags[..], &["--save", folder.path(), "--every", "2", "--keep", "2"]].concat());
    let names = || {
        let mut names: Vec<String> = std::fs::read_dir(&folder.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["step-00000004", "step-00000006"]);
    let step = folder.0.join("step-00000004");
    let resume = ["--resume", step.to_str().unwrap()];
    // The same mesh has the same bits.
    let same = results("resumed", &[&flags[..], &resume].concat());
    for key in ["losses", "validation_loss", "sample"] {
        assert_eq!(same[key], all[key], "{key}");
    }
    // Other meshes have the same losses, without dropout, which differs from mesh to mesh.
    let plain = Scratch::new("plain");
    let constant = ["--schedule", "constant", "--warmup", "0"];
    let save = ["--mesh", "dp=2,tp=2", "--save", plain.path(), "--every", "4"];
    let all = results("plain-all", &[&constant[..], &save].concat());
    let step = plain.0.join("step-00000004");
    for flags in [
        &["--mesh", "dp=1"][..],
        &["--mesh", "tp=4", "--sequence-parallel"],
        &["--mesh", "dp=3", "--fsdp"],
        &["--mesh", "dp=2,tp=2", "--fsdp"],
    ] {
        let other =
            results("resumed-elsewhere", &[flags, &constant, &["--resume", step.to_str().unwrap()]].concat());
        assert_near(&losses(&other), &losses(&all), 1e-4);
        assert_eq!(losses(&other)[..4], losses(&all)[..4]);
    }
    // A folder of steps is continued from its last one, and saved into.
    let more =
        ["--mesh", "dp=2", "--steps", "7", "--resume", plain.path(), "--save", plain.path(), "--verify"];
    let more = results("more", &[&constant[..], &more].concat());
    assert_eq!(losses(&more)[..6], losses(&all));
    let out = succeeded(&train(&["--mesh", "dp=2", "--steps", "8", "--resume", plain.path()]));
    assert!(out.contains("Continuing from step 7"), "{out}");
    assert!(out.contains("parameters, 1 steps in"), "{out}");
}

#[test]
fn invalid_checkpoints_give_one_line_before_training() {
    let folder = Scratch::new("one-line");
    succeeded(&train(&["--mesh", "dp=2", "--save", folder.path()]));
    let damaged = Scratch::new("damaged");
    std::fs::create_dir(&damaged.0).unwrap();
    std::fs::write(damaged.0.join("checkpoint.json"), "{").unwrap();
    let path = folder.path();
    let cases: [(&[&str], &str); 8] = [
        (&["--resume", "/nonexistent"], "--resume /nonexistent"),
        (&["--resume", path], "--steps 6 asks for no more"),
        (&["--resume", path, "--steps", "9", "--dim", "32"], "the model was saved with --dim 16, not 32"),
        (&["--resume", damaged.path()], "checkpoint.json` is truncated"),
        (&["--save", path], "the folder has a checkpoint of step 6 of another training"),
        (&["--save", path, "--every", "0"], "--every must be at least 1"),
        (&["--keep", "2"], "--save"),
        (&["--save", path, "--keep", "0"], "--keep must be at least 1"),
    ];
    for (bad, words) in cases {
        let run = train(bad);
        let message = text(&run.stderr);
        assert!(matches!(run.status.code(), Some(1 | 2)), "{bad:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{bad:?}: {message}");
        assert!(message.starts_with("error: ") && message.contains(words), "{bad:?}: {message}");
        assert!(run.stdout.is_empty(), "{bad:?}: {}", text(&run.stdout));
    }
}

#[test]
fn checkpoints_are_shown_verified_and_merged() {
    let folder = Scratch::new("shown");
    succeeded(&train(&["--mesh", "dp=2,tp=2", "--save", folder.path()]));
    let checkpoint = |arguments: &[&str]| program().arg("checkpoint").args(arguments).output().unwrap();
    let out = succeeded(&checkpoint(&["show", folder.path()]));
    for words in
        ["step-00000006", "model: 29 tensors", "output.weight  ", "[256, 16]", "optimizer: ", "step: 6"]
    {
        assert!(out.contains(words), "{words:?} is not in\n{out}");
    }
    let out = succeeded(&checkpoint(&["show", folder.path(), "--part", "model"]));
    assert!(out.contains("model: ") && !out.contains("optimizer: ") && !out.contains("step: 6"), "{out}");
    let out = succeeded(&checkpoint(&["verify", folder.path()]));
    assert!(out.contains("tensors have the checksums that were saved"), "{out}");
    let merged = Scratch::new("merged.safetensors");
    let out = succeeded(&checkpoint(&["merge", folder.path(), merged.path()]));
    assert!(out.starts_with("29 tensors, ") && out.contains(merged.path()), "{out}");
    let out = succeeded(&checkpoint(&["verify", merged.path()]));
    assert!(out.contains("29 have no checksum"), "{out}");
    // A flipped bit is found, and named.
    let file = folder.0.join("step-00000006/model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let other = Scratch::new("other.safetensors");
    for (arguments, words) in [
        (&["verify", folder.path()][..], "tensor `tok_embeddings.weight`"),
        (&["merge", folder.path(), other.path()], "tensor `tok_embeddings.weight`"),
        (&["merge", folder.path(), other.path(), "--part", "modle"], "there is no part `modle`"),
        (&["show", folder.path(), "--part", "modle"], "--part modle"),
        (&["show", "/nonexistent"], "there is no `/nonexistent`"),
    ] {
        let run = checkpoint(arguments);
        let message = text(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{arguments:?}");
        assert!(message.starts_with("error: ") && message.contains(words), "{arguments:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    assert!(!other.0.exists());
}

#[test]
fn verify_compares_with_one_rank() {
    for flags in [
        &["--mesh", "dp=2,tp=2", "--sequence-parallel", "--loss-parallel"][..],
        &["--mesh", "dp=3", "--batch", "7", "--accumulate", "2"],
        // The ranks of one replica drop the same elements.
        &["--mesh", "tp=2", "--dropout", "0.2", "--sequence-parallel"],
        &["--mesh", "tp=2", "--dtype", "bf16"],
    ] {
        let out = succeeded(&train(&[flags, &["--verify"]].concat()));
        let last = out.lines().last().unwrap();
        assert!(last.starts_with("Verified: ") && last.contains("of 6 steps"), "{out}");
    }
}

#[test]
fn a_text_file_replaces_the_book() {
    let file = Scratch::new("text");
    std::fs::write(&file.0, "abc ".repeat(100)).unwrap();
    let flags =
        ["--mesh", "tp=2", "--text", file.path(), "--prompt", "ab", "--steps", "60", "--temperature", "0.1"];
    let out = succeeded(&train(&flags));
    assert!(out.contains("\n  abc abc abc"), "{out}");
}

#[test]
fn an_empty_svg_path_writes_no_file() {
    let folder = Scratch::new("empty-svg");
    std::fs::create_dir(&folder.0).unwrap();
    for flag in [&["--svg", ""][..], &["--svg="]] {
        let mut command = program();
        command.current_dir(&folder.0).arg("train").args(TINY).args(["--mesh", "dp=1"]).args(flag);
        let out = succeeded(&command.output().expect("the program starts"));
        assert!(!out.contains("Loss curve written"), "{out}");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
    }
    std::fs::remove_dir(&folder.0).unwrap();
}

#[test]
fn the_loss_curve_is_well_formed_svg() {
    let file = Scratch::new("loss.svg");
    let out = succeeded(&train(&["--mesh", "dp=1", "--svg", file.path()]));
    assert!(out.contains(file.path()), "{out}");
    let svg = file.read();
    // Opening and closing tags match.
    let mut open: Vec<&str> = Vec::new();
    for tag in svg.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        match tag {
            _ if tag.starts_with('/') => assert_eq!(open.pop(), Some(name), "{tag}"),
            _ if tag.ends_with('/') => {}
            _ => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    assert!(svg.starts_with("<svg xmlns=") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    let points = svg.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(points.split(' ').count(), 6);
    for words in [">step<", ">loss (nats per byte)<", ">held out<", "dp=1"] {
        assert!(svg.contains(words), "{words}");
    }
}

#[test]
fn invalid_flags_give_one_line_before_training() {
    let short = Scratch::new("short");
    std::fs::write(&short.0, "too short").unwrap();
    let cases: [(&[&str], &str); 33] = [
        (&["--mesh", "dp=2,pp=2"], "no mesh dim `pp`"),
        (&["--mesh", "dp=two"], "`dp`"),
        (&["--mesh", "tp=3"], "--heads must be divisible by the size of `tp`"),
        (&["--mesh", ""], "NAME=SIZE"),
        (&["--heads", "3"], "--dim must be divisible by --heads"),
        (&["--heads", "0"], "--heads"),
        (&["--seq", "0"], "--seq"),
        (&["--steps", "0"], "--steps"),
        (&["--batch", "0"], "--batch"),
        (&["--layers", "0"], "--layers"),
        (&["--dim", "0"], "--dim"),
        (&["--accumulate", "0"], "--accumulate"),
        (&["--batch", "1"], "--batch 1 is too small: 2 replicas"),
        (&["--accumulate", "3"], "--batch 4 is too small"),
        (&["--lr", "-1"], "--lr"),
        (&["--dim", "100000000000"], "--dim"),
        (&["--sample", "99999999999999"], "--sample"),
        (&["--svg", "a.json", "--json", "./a.json"], "--json and --svg are the same file"),
        (&["--lr", "nan"], "--lr"),
        (&["--clip=-1"], "--clip"),
        (&["--weight-decay", "inf"], "--weight-decay"),
        (&["--dropout", "1"], "--dropout"),
        (&["--warmup", "6"], "--warmup 6"),
        (&["--temperature", "0"], "--temperature"),
        (&["--schedule", "steep"], "--schedule"),
        (&["--dtype", "f16"], "--dtype"),
        (&["--mesh", "dp=2", "--sequence-parallel"], "--sequence-parallel needs a dim `tp`"),
        (&["--mesh", "dp=2", "--loss-parallel"], "--loss-parallel needs a dim `tp`"),
        (&["--dropout", "0.1", "--verify"], "--verify"),
        (&["--text", "/nonexistent/text"], "--text /nonexistent/text"),
        (&["--text", short.path()], "the text has 9 bytes"),
        (&["--svg", "/nonexistent/loss.svg"], "--svg /nonexistent/loss.svg"),
        (&["--speed", "9"], "--speed"),
    ];
    for (bad, words) in cases {
        let run = train(bad);
        let message = text(&run.stderr);
        assert!(matches!(run.status.code(), Some(1 | 2)), "{bad:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{bad:?}: {message}");
        assert!(message.starts_with("error: ") && message.contains(words), "{bad:?}: {message}");
        assert!(run.stdout.is_empty(), "{bad:?}: {}", text(&run.stdout));
    }
}

#[test]
fn a_loss_that_diverges_gives_one_line_and_keeps_old_files() {
    for (steps, place) in [("6", "at step "), ("1", "on the held-out text")] {
        let svg = Scratch::new("diverged.svg");
        std::fs::write(&svg.0, "old content").unwrap();
        let arguments =
            ["--mesh", "dp=2", "--lr", "1e30", "--clip", "0", "--steps", steps, "--svg", svg.path()];
        let run = train(&arguments);
        assert_eq!(run.status.code(), Some(1));
        let message = text(&run.stderr);
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.contains("the loss is") && message.contains("--lr"), "{message}");
        assert!(message.contains(place), "{message}");
        assert_eq!(svg.read(), "old content");
    }
}

#[test]
fn a_process_prints_an_error_that_the_first_process_did_not_have() {
    let mut second = program();
    let run =
        second.env("PMI_RANK", "1").args(["train", "--steps", "0"]).output().expect("the program starts");
    assert_eq!(run.status.code(), Some(1));
    assert_eq!(text(&run.stderr), "rank 1: error: --steps must be at least 1\n");
}

#[cfg(feature = "mpi")]
mod processes {
    use super::*;

    fn mpirun(ranks: usize, arguments: &[&str]) -> Output {
        let program = env!("CARGO_BIN_EXE_dtensor");
        let mut command = dtensor::comm::mpirun(ranks);
        command.current_dir(env!("CARGO_TARGET_TMPDIR"));
        command.args([program, "train"]).args(TINY).args(arguments).output().expect("mpirun starts")
    }

    #[test]
    fn processes_and_threads_are_bit_identical() {
        let flags = ["--mesh", "dp=2,tp=2", "--sequence-parallel", "--loss-parallel", "--dropout", "0.1"];
        let threads = results("threads", &flags);
        let file = Scratch::new("processes");
        let run = mpirun(4, &[&flags[..], &["--json", file.path()]].concat());
        let out = succeeded(&run);
        assert!(out.contains("on 4 processes"), "{out}");
        assert_eq!(out.matches("A sample:").count(), 1, "only one process may print:\n{out}");
        let processes: Value = serde_json::from_str(&file.read()).unwrap();
        for key in ["losses", "validation_loss", "sample", "collectives"] {
            assert_eq!(processes[key], threads[key], "{key}");
        }
    }

    #[test]
    fn processes_save_and_threads_resume() {
        let folder = Scratch::new("saved-by-processes");
        let flags = ["--mesh", "dp=2,tp=2", "--dropout", "0.1"];
        let all = results("threads-all", &flags);
        succeeded(&mpirun(4, &[&flags[..], &["--save", folder.path(), "--every", "3"]].concat()));
        let step = folder.0.join("step-00000003");
        let resumed =
            results("threads-resumed", &[&flags[..], &["--resume", step.to_str().unwrap()]].concat());
        assert_eq!(resumed["losses"], all["losses"]);
        let file = Scratch::new("processes-resumed");
        let resume = ["--resume", step.to_str().unwrap(), "--json", file.path()];
        let out = succeeded(&mpirun(4, &[&flags[..], &resume].concat()));
        assert_eq!(out.matches("Continuing from step 3").count(), 1, "{out}");
        let processes: Value = serde_json::from_str(&file.read()).unwrap();
        assert_eq!(processes["losses"], all["losses"]);
    }

    #[test]
    fn verify_works_on_processes() {
        let out = succeeded(&mpirun(2, &["--mesh", "tp=2", "--verify"]));
        assert_eq!(out.matches("Verified: ").count(), 1, "{out}");
    }

    #[test]
    fn only_one_process_prints_an_error() {
        for (arguments, words) in [
            (&["--mesh", "dp=2,tp=2"][..], "--mesh dp=2,tp=2 needs 4 ranks, but mpirun started 2"),
            (&["--mesh", "dp=1"], "--mesh dp=1 needs 1 ranks, but mpirun started 2"),
            (&["--mesh", "pp=2"], "no mesh dim `pp`"),
            (&["--mesh", "tp=2", "--dropout", "7"], "--dropout must be"),
            (&["--mesh", "tp=2", "--svg", "/nonexistent/x.svg"], "--svg /nonexistent/x.svg"),
        ] {
            let run = mpirun(2, arguments);
            assert!(!run.status.success());
            let message = text(&run.stderr);
            // The launcher adds its own messages about programs that fail.
            assert_eq!(message.matches("error: ").count(), 1, "{message}");
            assert!(message.contains(words), "{message}");
        }
    }
}
