//! Tools for tests: [`spmd`] runs a test on several ranks, [`validate`] checks sharding rules, and [`DTensorConverter`] tries all
//! placements.

mod converter;
mod dense;
mod validate;

pub use converter::DTensorConverter;
pub use validate::{Validation, search, validate, validate_on};

use crate::Result;
use crate::comm::Failure;
#[cfg(feature = "mpi")]
use crate::comm::run_each;
use crate::comm::{World, launch_each};

/// The environment variable of the processes that [`spmd`] starts: a folder in which each process that succeeds writes a file.
#[cfg(feature = "mpi")]
const CHILD: &str = "DTENSOR_SPMD_CHILD";

/// Runs the body of a test on `ranks` ranks: on threads and, with the feature `mpi`, on processes too. An error or panic of any rank
/// fails the test. With the environment variable `DTENSOR_SPMD=threads`, only threads run it.
///
/// For processes, it starts `mpirun` on the same test binary with the name of the calling test. So call it directly in the test
/// function.
///
/// ```no_run
/// use dtensor::comm::ReduceOp;
/// use dtensor::testing::spmd;
/// use dtensor::{DType, Tensor};
///
/// #[test]
/// fn all_reduce_adds() {
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

/// Runs a body like [`spmd`], for tests of errors: `check` gets each rank and the result of its body. It is called in the process of
/// the rank, after all ranks of that process have ended.
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
        // A test may call `spmd` several times. The calls with another number of ranks run in another `mpirun`.
        if world.size() == ranks {
            let rank = world.rank();
            run_each(vec![world], body).into_iter().for_each(|result| check(rank, result));
            let file = std::path::Path::new(&folder).join(rank.to_string());
            std::fs::write(file, []).expect("cannot write to the folder of the test");
        }
        return;
    }
    for (rank, result) in launch_each(ranks, &body).into_iter().enumerate() {
        check(rank, result);
    }
    #[cfg(feature = "mpi")]
    if std::env::var("DTENSOR_SPMD").as_deref() != Ok("threads") {
        run_on_processes(ranks, std::any::type_name::<F>());
    }
}

/// Runs a test on processes. The type name of its body contains the name of the test.
#[cfg(feature = "mpi")]
fn run_on_processes(ranks: usize, body: &str) {
    use std::collections::BTreeSet;
    use std::io::Read;
    use std::process::Stdio;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    /// The tests that have run. Locked while one runs: waiting MPI processes spin, so two tests at a time would be slower than one
    /// after the other.
    static DONE: Mutex<BTreeSet<(String, usize)>> = Mutex::new(BTreeSet::new());
    const LIMIT: Duration = Duration::from_secs(180);

    // `krate::module::test::{{closure}}`
    let path = body.split("::{{closure}}").next().unwrap_or(body);
    let test = path.split_once("::").map_or(path, |(_, test)| test);
    // One `mpirun` runs all bodies of a test for this number of ranks.
    let mut done = DONE.lock();
    if !done.insert((test.to_owned(), ranks)) {
        return;
    }
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("dtensor-spmd-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("cannot create a temporary folder");
    let program = std::env::current_exe().expect("the test binary has no path");
    let mut child = crate::comm::mpirun(ranks)
        .arg(program)
        .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(CHILD, &folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun did not start: is an MPI library installed?");
    let read = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            // On an error, show what was read before it.
            let _ = pipe.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let out = read(Box::new(child.stdout.take().expect("stdout is piped")));
    let err = read(Box::new(child.stderr.take().expect("stderr is piped")));
    let start = Instant::now();
    let status = loop {
        match child.try_wait().expect("cannot wait for mpirun") {
            Some(status) => break Some(status),
            None if start.elapsed() > LIMIT => {
                let _ = child.kill().and_then(|()| child.wait());
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = |thread: std::thread::JoinHandle<String>| thread.join().unwrap_or_default();
    let (out, err) = (text(out), text(err));
    // `mpirun` also succeeds if the name matches no test, so count the files.
    let passed = std::fs::read_dir(&folder).map_or(0, |files| files.count());
    let _ = std::fs::remove_dir_all(&folder);
    if !status.is_some_and(|status| status.success()) || passed != ranks {
        let end = status
            .map_or(format!("was still running after {LIMIT:?}"), |status| format!("ended with {status}"));
        panic!("on {ranks} processes, {test} {end}, and passed on {passed}:\n{out}\n{err}");
    }
}
