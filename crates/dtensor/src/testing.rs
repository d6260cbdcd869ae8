//! Tests of programs that run on several ranks.

mod converter;
mod numbers;
mod validate;

pub use converter::DTensorConverter;
pub use validate::{Validation, search, validate, validate_on};

use crate::Result;
use crate::comm::Failure;
#[cfg(feature = "mpi")]
use crate::comm::run_each;
use crate::comm::{World, launch_each};

/// Set for the processes that [`spmd`] starts: a folder, in which each leaves a file when it has come through.
#[cfg(feature = "mpi")]
const CHILD: &str = "DTENSOR_SPMD_CHILD";

/// Runs a test's body on `ranks` ranks of every kind of world: on threads and, with the feature `mpi`, on processes, for which
/// `mpirun` is started on the same test binary for this one test. An error or panic of any rank fails the test.
///
/// Call it directly in the test function: that is the test that the processes run.
///
/// ```no_run
/// use dtensor::comm::ReduceOp;
/// use dtensor::testing::spmd;
/// use dtensor::{DType, Tensor};
///
/// #[test]
/// fn sums_are_sums() {
///     spmd(4, |world| {
///         let x = Tensor::ones([3], DType::F32)?;
///         let sum = world.group().all_reduce(&x, ReduceOp::Sum)?;
///         assert_eq!(sum.to_vec::<f32>()?, [4.; 3]);
///         Ok(())
///     });
/// }
/// ```
pub fn spmd<F: Fn(World) -> Result<()> + Sync>(ranks: usize, body: F) {
    on_every_world::<F, _>(ranks, body, |rank, result| {
        if let Err(error) = result {
            panic!("{}", Failure::Launch { failures: vec![(rank, error)] });
        }
    });
}

/// As [`spmd`], for tests of what goes wrong: `check` is given each rank's number and how its body ended. It is called
/// where the rank ran, after all ranks there have ended.
pub fn spmd_outcomes<T: Send, F: Fn(World) -> Result<T> + Sync>(
    ranks: usize,
    body: F,
    check: impl Fn(usize, Result<T>),
) {
    on_every_world::<F, T>(ranks, body, check);
}

fn on_every_world<F: Fn(World) -> Result<T> + Sync, T: Send>(
    ranks: usize,
    body: F,
    check: impl Fn(usize, Result<T>),
) {
    #[cfg(feature = "mpi")]
    if let Some(folder) = std::env::var_os(CHILD) {
        let world = World::mpi().unwrap_or_else(|error| panic!("{error}"));
        // One test may have several bodies. Those for another number of ranks have their turn in another `mpirun`.
        if world.size() == ranks {
            let rank = world.rank();
            run_each(vec![world], body).into_iter().for_each(|result| check(rank, result));
            let file = std::path::Path::new(&folder).join(rank.to_string());
            std::fs::write(file, []).expect("the folder can be written to");
        }
        return;
    }
    for (rank, result) in launch_each(ranks, &body).into_iter().enumerate() {
        check(rank, result);
    }
    #[cfg(feature = "mpi")]
    on_processes(ranks, std::any::type_name::<F>());
}

/// Runs the test whose body has this type name on processes.
#[cfg(feature = "mpi")]
fn on_processes(ranks: usize, body: &str) {
    use std::collections::BTreeSet;
    use std::io::Read;
    use std::process::Stdio;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    /// Processes that wait do not sleep, so that two such tests at a time are slower than one after the other.
    static TURN: Mutex<BTreeSet<(String, usize)>> = Mutex::new(BTreeSet::new());
    const LIMIT: Duration = Duration::from_secs(180);

    // `krate::module::test::{{closure}}`
    let path = body.split("::{{closure}}").next().unwrap_or(body);
    let test = path.split_once("::").map_or(path, |(_, test)| test);
    // A test with several bodies for one number of ranks runs them all in one go.
    let mut done = TURN.lock();
    if !done.insert((test.to_owned(), ranks)) {
        return;
    }
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("dtensor-spmd-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("temporary files can be written");
    let program = std::env::current_exe().expect("a running program has a path");
    let mut child = crate::comm::mpirun(ranks)
        .arg(program)
        .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(CHILD, &folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun starts: is an MPI library installed?");
    let read = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            // What could be read before the end is all there is to show.
            let _ = pipe.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let out = read(Box::new(child.stdout.take().expect("it was piped")));
    let err = read(Box::new(child.stderr.take().expect("it was piped")));
    let began = Instant::now();
    let status = loop {
        match child.try_wait().expect("mpirun can be waited for") {
            Some(status) => break Some(status),
            None if began.elapsed() > LIMIT => {
                let _ = child.kill().and_then(|()| child.wait());
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = |thread: std::thread::JoinHandle<String>| thread.join().unwrap_or_default();
    let (out, err) = (text(out), text(err));
    // A name that matches no test succeeds too, with nothing done.
    let passed = std::fs::read_dir(&folder).map_or(0, |files| files.count());
    let _ = std::fs::remove_dir_all(&folder);
    if !status.is_some_and(|status| status.success()) || passed != ranks {
        let end = status
            .map_or(format!("was still running after {LIMIT:?}"), |status| format!("ended with {status}"));
        panic!("on {ranks} processes, {test} {end}, and passed on {passed}:\n{out}\n{err}");
    }
}
