//! Tests that every scoped thread-local mode is declared with `mode!`, so that a `Snapshot` contains all of them. This
//! file lists every other thread-local with the reason.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Thread-locals that are not modes: file, name and reason.
const STATE: [(&str, &str, &str); 16] = [
    ("dtensor-array/src/cuda/device.rs", "ENTERED", "the GPU that the driver acts on"),
    ("dtensor-array/src/cuda/device.rs", "WAITS", "a counter"),
    ("dtensor-array/src/cuda/device.rs", "LAUNCHES", "a counter"),
    ("dtensor-array/src/cuda/nccl/emulator.rs", "GROUP", "transfers that have begun"),
    ("dtensor-array/src/cuda/recorder.rs", "RECORDER", "a graph records all work of the thread"),
    ("dtensor-array/src/cuda/stream.rs", "STREAMS", "the queues of the thread's work"),
    ("dtensor-array/src/cuda/stream.rs", "COMMUNICATION", "the queues of the thread's collectives"),
    ("dtensor-array/src/cuda/stream.rs", "CURRENT", "the queue that was used last"),
    ("dtensor-array/src/mode.rs", "VALUE", "the value of a mode"),
    ("dtensor-array/src/mode.rs", "ANY", "listeners hear what happens now, whoever asked for it"),
    ("dtensor-array/src/mode.rs", "LIST", "listeners hear what happens now, whoever asked for it"),
    ("dtensor/src/autograd/node.rs", "NEXT", "a counter"),
    ("dtensor/src/autograd/node.rs", "DROP_QUEUE", "nodes that are being dropped"),
    ("dtensor/src/journal.rs", "ANY", "a graph records all work of the thread"),
    ("dtensor/src/journal.rs", "JOURNAL", "a graph records all work of the thread"),
    ("dtensor/src/dispatch/mode.rs", "WARNED", "warnings that have been printed"),
];

/// Names assigned to modules, which outlive every scope.
const NAMES: (&str, &str) = ("dtensor/src/nn/track/names.rs", "NAMES");

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the offset of the brace that closes the one opened before `text`.
fn closing(text: &str) -> usize {
    let mut open = 1;
    let closes = |c: char| {
        open += i32::from(c == '{') - i32::from(c == '}');
        open == 0
    };
    text.find(closes).unwrap()
}

#[test]
fn every_mode_is_declared_with_the_macro() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = BTreeSet::new();
    for member in ["dtensor-array", "dtensor-comm", "dtensor-layout", "dtensor"] {
        let mut files = Vec::new();
        sources(&crates.join(member).join("src"), &mut files);
        assert!(!files.is_empty());
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let name = file.strip_prefix(crates).unwrap().to_str().unwrap().replace('\\', "/");
            for block in text.split("thread_local! {").skip(1) {
                let declared =
                    block[..closing(block)].lines().filter_map(|line| line.trim().split_once("static "));
                found.extend(
                    declared.map(|(_, rest)| (name.clone(), rest.split(':').next().unwrap().to_string())),
                );
            }
        }
    }
    let known = STATE.iter().map(|&(file, name, _)| (file, name)).chain([NAMES]);
    let known: BTreeSet<_> = known.map(|(file, name)| (file.to_string(), name.to_string())).collect();
    assert_eq!(
        found, known,
        "declare a mode with `mode!`; other state of a thread is listed in this test with the reason"
    );
}

/// A mode declared outside the crate is restored when a checkpoint recomputes, without being listed anywhere.
#[test]
fn a_user_defined_mode_is_restored_when_a_checkpoint_recomputes() -> dtensor::Result<()> {
    use std::sync::{Arc, Mutex};

    dtensor_array::mode! {
        static MINE: Cell<u32> = 0;
    }
    let x = dtensor::Tensor::scalar(2f64)?.requires_grad_(true)?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let y = MINE.within(7, || {
        dtensor::checkpoint(&x, move |x| {
            noted.lock().unwrap().push(MINE.get());
            x.exp()
        })
    })?;
    MINE.within(9, || y.backward())?;
    assert_eq!(*seen.lock().unwrap(), [7, 7]);
    assert_eq!(MINE.get(), 0);
    Ok(())
}
