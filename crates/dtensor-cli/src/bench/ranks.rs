//! Ranks that time redistributions when told to: threads of this process, or processes that `mpirun` started.
//!
//! Rank 0 reads the lines that [`Peer`](super::peer::Peer) writes, tells the others, and answers.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use dtensor::comm::{Group, World, run};
use dtensor::{DeviceMesh, Result, set_num_threads};

use super::collective::Case;
use super::peer::Answer;
use super::timing::median;

/// Calls before the ones that count: they bring memory and threads to where they stay.
const WARM_UP: usize = 3;

/// Answers until the input ends.
pub(crate) fn serve(ranks: usize) -> std::result::Result<(), Box<dyn Error>> {
    run(World::from_env(ranks)?, |world| {
        set_num_threads(1);
        let (group, mesh) = (world.group(), DeviceMesh::new(&world, [world.size()], "ranks")?);
        while let Some(line) = next_line(group)? {
            let seconds = answer(&mesh, group, &line)?;
            if world.rank() == 0 {
                let answer = serde_json::to_string(&Answer { seconds }).expect("a number is JSON");
                println!("{answer}");
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// The next line of the input, which only rank 0 has, on every rank.
///
/// While rank 0 reads, others have their turn on this machine. So the rest of the ranks look now and then whether it
/// has come back: waiting in a collective could keep their cores busy, and would run into its timeout.
fn next_line(group: &Group) -> Result<Option<String>> {
    let mut line = None;
    if group.rank() == 0 {
        // An input that cannot be read is at its end.
        line = Some(std::io::stdin().lines().next().and_then(|line| line.ok()));
    }
    let mut back = group.barrier_async()?;
    while !back.is_ready() {
        std::thread::sleep(Duration::from_millis(1));
    }
    back.wait()?;
    group.broadcast_object(line.as_ref(), 0)
}

/// The median time that rank 0 needs for the case in a line, all ranks starting together.
fn answer(mesh: &DeviceMesh, group: &Group, line: &str) -> Result<f64> {
    let wrong = || dtensor::Error::argument("bench", format!("{line:?} is not `case samples inner`"));
    let mut words = line.split_whitespace();
    let case = words.next().and_then(|name| Case::named(name, group.size())).ok_or_else(wrong)?;
    let mut count = || words.next().and_then(|word| word.parse::<usize>().ok()).filter(|&n| n > 0);
    let (samples, inner) = count().zip(count()).ok_or_else(wrong)?;

    let source = case.source(mesh)?;
    let calls = |n: usize| (0..n).try_for_each(|_| case.call(&source).map(|y| drop(black_box(y))));
    calls(WARM_UP)?;
    let mut times = Vec::with_capacity(samples);
    for _ in 0..samples {
        group.barrier()?;
        let began = Instant::now();
        calls(inner)?;
        times.push(began.elapsed().as_secs_f64() / inner as f64);
    }
    Ok(median(times))
}
