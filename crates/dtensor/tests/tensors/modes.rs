//! Scoped modes of a thread are declared with `mode!`, so that a `Snapshot` has all of them. Any other thread-local is state that is
//! explained here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Thread-locals that are no modes, by crate, file and name, with the reason.
const STATE: [(&str, &str, &str); 6] = [
    ("dtensor-array/src/mode.rs", "VALUE", "the value of a mode"),
    ("dtensor-array/src/mode.rs", "ANY", "listeners hear what happens now, whoever asked for it"),
    ("dtensor-array/src/mode.rs", "LIST", "listeners hear what happens now, whoever asked for it"),
    ("dtensor/src/autograd/node.rs", "NEXT", "a counter"),
    ("dtensor/src/autograd/node.rs", "DROP_QUEUE", "nodes that are being dropped"),
    ("dtensor/src/dispatch/mode.rs", "WARNED", "warnings that have been printed"),
];

/// Names that modules have been given, which outlive every scope.
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

/// Where the brace is closed that was opened before the text.
fn closing(text: &str) -> usize {
    let mut open = 1;
    let closes = |c: char| {
        open += i32::from(c == '{') - i32::from(c == '}');
        open == 0
    };
    text.find(closes).unwrap()
}

#[test]
fn no_mode_is_outside_the_registry() {
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

/// A mode is carried over to a checkpoint's second run without being listed anywhere.
#[test]
fn a_mode_of_a_user_holds_when_a_checkpoint_runs_again() -> dtensor::Result<()> {
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
