//! Tests that a mismatch, a dead rank or a hang gives the same clear error on every rank within the timeout. The process
//! continues, and a new world works.
//!
//! These tests are a separate program: they measure time limits, which other tests running beside them would exceed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dtensor::comm::{Cause, Departure, Failure, Fault, ReduceOp, World, launch, launch_each};
use dtensor::testing::spmd_outcomes;
use dtensor::{DType, Error, Result, Tensor};

const TIMEOUT: Duration = Duration::from_millis(700);
/// The longest delay that a busy machine may add.
const SLACK: Duration = Duration::from_secs(5);

fn ones(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::ones(shape, dtype)
}

fn sum(world: &World) -> Result<Tensor> {
    world.group().all_reduce(&ones(&[2, 3], DType::F32)?, ReduceOp::Sum)
}

/// The result of a rank's call, and how long the call took.
type Outcome = (std::result::Result<(), Error>, Duration);

/// Runs a call and times it.
fn timed(call: impl FnOnce() -> Result<()>) -> Result<Outcome> {
    let began = Instant::now();
    let result = call();
    Ok((result, began.elapsed()))
}

fn fault(outcome: Result<Outcome>) -> Fault {
    let (result, waited) = outcome.expect("the body itself does not fail");
    assert!(waited < TIMEOUT + SLACK, "waited {waited:?}");
    match result.as_ref().err().and_then(|error| Failure::of(error)) {
        Some(Failure::Collective(fault)) => (**fault).clone(),
        _ => panic!("a fault was expected, not {result:?}"),
    }
}

/// Asserts that the message names this rank, the call and its line.
fn names_itself(fault: &Fault, rank: usize, call: &str, line: u32) {
    let message = fault.to_string();
    let first = message.lines().next().unwrap();
    assert_eq!(fault.rank, rank);
    assert!(first.starts_with(&format!("rank {rank}: {call}")), "{message}");
    assert!(first.contains(&format!("laws_faults.rs:{line}")), "line {line} in: {message}");
}

/// Asserts that a new world in the same process works after a fault.
fn a_new_world_works() {
    let sums = launch(3, |world| sum(&world)?.to_vec::<f32>()).unwrap();
    assert_eq!(sums, vec![vec![3.0; 6]; 3]);
}

#[test]
fn a_rank_that_panics_is_named_on_all_ranks_that_wait_for_it() {
    const LINE: u32 = line!() + 9;
    spmd_outcomes(
        4,
        |world| {
            let world = world.with_timeout(TIMEOUT);
            sum(&world)?;
            if world.rank() == 2 {
                panic!("the sky has fallen");
            }
            timed(|| world.group().all_gather_tensor(&ones(&[2], DType::F32)?, 0).map(drop))
        },
        |rank, outcome| {
            if rank == 2 {
                let error = outcome.unwrap_err();
                assert_eq!(error, Failure::Panicked { rank: 2, message: "the sky has fallen".into() }.into());
                return;
            }
            let fault = fault(outcome);
            names_itself(&fault, rank, "all_gather", LINE);
            let Cause::Left { rank: 2, how: Departure::Panicked(message), last: Some(last) } = &*fault.cause
            else {
                panic!("{fault:?}");
            };
            assert_eq!(message, "the sky has fallen");
            assert_eq!(last.collective.name(), "all_reduce");
            let message = fault.to_string();
            assert!(
                message.contains("rank 2 has left the world: it panicked: the sky has fallen"),
                "{message}"
            );
            // The message shows the earlier collectives of this rank.
            assert_eq!(fault.recent.len(), 1);
            assert!(message.contains(&format!("last collectives of rank {rank}")), "{message}");
        },
    );
    a_new_world_works();
}

#[test]
fn a_rank_that_returns_early_or_fails_is_named() {
    for fails in [false, true] {
        spmd_outcomes(
            3,
            move |world| {
                let world = world.with_timeout(TIMEOUT);
                if world.rank() == 0 {
                    return if fails {
                        Err(Error::argument("model", "no such file"))
                    } else {
                        Ok((Ok(()), Duration::ZERO))
                    };
                }
                timed(|| world.group().barrier())
            },
            move |rank, outcome| {
                if rank == 0 {
                    assert_eq!(outcome.is_err(), fails);
                    return;
                }
                let fault = fault(outcome);
                let words = if fails { "it returned an error: model: no such file" } else { "it returned" };
                let message = fault.to_string();
                assert!(message.contains(&format!("rank 0 has left the world: {words}")), "{message}");
                assert!(message.contains("barrier #0 on `world`"), "{message}");
            },
        );
    }
}

#[test]
fn a_rank_that_never_arrives_is_named_after_the_timeout() {
    const LINE: u32 = line!() + 11;
    spmd_outcomes(
        4,
        |world| {
            let world = world.with_timeout(TIMEOUT);
            if world.rank() == 1 {
                std::thread::sleep(TIMEOUT * 2);
                // The late rank gets the error too.
                return timed(|| sum(&world).map(drop));
            }
            timed(|| {
                world.group().reduce_scatter_tensor(&ones(&[8], DType::F64)?, ReduceOp::Max, 0).map(drop)
            })
        },
        |rank, outcome| {
            let waited = outcome.as_ref().map_or(Duration::ZERO, |(_, waited)| *waited);
            let fault = fault(outcome);
            let Cause::Late { ranks, waited: limit } = &*fault.cause else { panic!("{fault:?}") };
            assert_eq!(*limit, TIMEOUT);
            let late: Vec<usize> = ranks.iter().map(|(rank, _)| *rank).collect();
            assert_eq!(late, [1], "{fault}");
            if rank == 1 {
                assert!(fault.earlier || waited < TIMEOUT, "it need not wait: the group has failed");
                return;
            }
            names_itself(&fault, rank, "reduce_scatter(max, dim 0) #0 on `world` (f64 [8]", LINE);
            assert!(fault.to_string().contains("rank 1 did not arrive within 700ms"), "{fault}");
        },
    );
    a_new_world_works();
}

/// Runs `odd` on the last of three ranks and `even` on the others, and passes each rank and its error message to `check`.
macro_rules! mismatch {
    ($even:expr, $odd:expr, $check:expr) => {
        spmd_outcomes(
            3,
            |world| {
                let world = world.with_timeout(TIMEOUT);
                timed(|| if world.rank() == 2 { $odd(&world) } else { $even(&world) })
            },
            |rank, outcome| {
                let fault = fault(outcome);
                let Cause::Mismatch { one, other } = &*fault.cause else { panic!("{fault:?}") };
                assert_eq!((one.0, other.0), (0, 2), "{fault}");
                let message = fault.to_string();
                assert!(message.contains(" does not match rank "), "{message}");
                // Every rank shows both sides of the mismatch, each with its line.
                assert_eq!(
                    message.matches("laws_faults.rs:").count(),
                    if rank == 1 { 3 } else { 2 },
                    "{message}"
                );
                $check(rank, message);
            },
        );
    };
}

#[test]
fn a_different_collective_on_one_rank_is_an_error_on_all_ranks() {
    mismatch!(
        |world: &World| sum(world).map(drop),
        |world: &World| world.group().all_gather_tensor(&ones(&[2, 3], DType::F32)?, 0).map(drop),
        |_, message: String| {
            assert!(message.contains("all_reduce(sum) #0 on `world` (f32 [2, 3]"), "{message}");
            assert!(message.contains("all_gather(dim 0) #0 on `world` (f32 [2, 3]"), "{message}");
        }
    );
    a_new_world_works();
}

#[test]
fn a_different_shape_dtype_reduction_or_root_is_an_error_on_all_ranks() {
    fn reduce(shape: &'static [usize], dtype: DType, op: ReduceOp) -> impl Fn(&World) -> Result<()> + Sync {
        move |world| world.group().all_reduce(&ones(shape, dtype)?, op).map(drop)
    }
    mismatch!(
        reduce(&[2, 3], DType::F32, ReduceOp::Sum),
        reduce(&[3, 2], DType::F32, ReduceOp::Sum),
        |_, message: String| assert!(
            message.contains("f32 [2, 3]") && message.contains("f32 [3, 2]"),
            "{message}"
        )
    );
    mismatch!(
        reduce(&[2, 3], DType::F32, ReduceOp::Sum),
        reduce(&[2, 3], DType::BF16, ReduceOp::Sum),
        |_, message: String| assert!(
            message.contains("f32 [2, 3]") && message.contains("bf16 [2, 3]"),
            "{message}"
        )
    );
    mismatch!(
        reduce(&[4], DType::I64, ReduceOp::Sum),
        reduce(&[4], DType::I64, ReduceOp::Min),
        |_, message: String| assert!(message.contains("(sum)") && message.contains("(min)"), "{message}")
    );
    mismatch!(
        |world: &World| world.group().broadcast(&ones(&[1], DType::F32)?, 0).map(drop),
        |world: &World| world.group().broadcast(&ones(&[1], DType::F32)?, 1).map(drop),
        |_, message: String| assert!(
            message.contains("(from 0)") && message.contains("(from 1)"),
            "{message}"
        )
    );
}

#[test]
fn mismatched_split_sizes_are_an_error_on_all_ranks() {
    mismatch!(
        |world: &World| {
            world.group().all_gather_uneven(&ones(&[1, 2], DType::F32)?, 0, &[1, 1, 1]).map(drop)
        },
        |world: &World| {
            world.group().all_gather_uneven(&ones(&[2, 2], DType::F32)?, 0, &[1, 1, 2]).map(drop)
        },
        |_, _| ()
    );
    mismatch!(
        |world: &World| {
            world
                .group()
                .all_to_all_single(&ones(&[3], DType::F32)?, Some(&[1, 1, 1]), Some(&[1, 1, 1]))
                .map(drop)
        },
        |world: &World| {
            world
                .group()
                .all_to_all_single(&ones(&[4], DType::F32)?, Some(&[1, 1, 1]), Some(&[2, 1, 1]))
                .map(drop)
        },
        |_, _| ()
    );
}

#[test]
fn a_different_order_across_two_groups_is_an_error_and_not_a_hang() {
    spmd_outcomes(
        3,
        |world| {
            let world = world.with_timeout(TIMEOUT);
            let all = [0, 1, 2];
            let (a, b) = (world.named_group(&all, "a")?.unwrap(), world.named_group(&all, "b")?.unwrap());
            let (first, second) = if world.rank() == 1 { (&b, &a) } else { (&a, &b) };
            timed(|| {
                first.all_reduce(&ones(&[2], DType::F32)?, ReduceOp::Sum)?;
                second.all_reduce(&ones(&[2], DType::F32)?, ReduceOp::Sum).map(drop)
            })
        },
        |rank, outcome| {
            let fault = fault(outcome);
            let message = fault.to_string();
            // Either side may time out first. The other side then finds that a rank has left.
            let named: Vec<usize> = match &*fault.cause {
                Cause::Late { ranks, .. } => ranks.iter().map(|(rank, _)| *rank).collect(),
                Cause::Left { rank, .. } => vec![*rank],
                other => panic!("{other:?}"),
            };
            assert!(!named.contains(&rank) && !named.is_empty(), "{message}");
            let group = if rank == 1 { "`b`" } else { "`a`" };
            assert!(message.starts_with(&format!("rank {rank}: all_reduce(sum) #0 on {group}")), "{message}");
        },
    );
    a_new_world_works();
}

#[test]
fn a_failed_group_stays_failed_and_other_groups_still_work() {
    spmd_outcomes(
        4,
        |world| {
            let world = world.with_timeout(TIMEOUT);
            let pair = world.new_group(if world.rank() < 2 { &[0, 1] } else { &[2, 3] })?.unwrap();
            let x = ones(&[2], DType::F32)?;
            if world.rank() < 2 {
                let op = if world.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
                let first = pair.all_reduce(&x, op).unwrap_err();
                let again = pair.all_reduce(&x, ReduceOp::Sum).unwrap_err();
                let sent = pair.send(&x, 1 - world.rank(), 0).unwrap_err();
                for (error, earlier) in [(first, false), (again, true), (sent, true)] {
                    let Some(Failure::Collective(fault)) = Failure::of(&error) else { panic!("{error}") };
                    assert_eq!(fault.earlier, earlier, "{fault}");
                    assert!(matches!(*fault.cause, Cause::Mismatch { .. }), "{fault}");
                }
            } else {
                assert_eq!(pair.all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()?, [2.0; 2]);
            }
            // The group of all ranks is not affected.
            assert_eq!(sum(&world)?.to_vec::<f32>()?, [4.0; 6]);
            Ok(())
        },
        |rank, outcome| outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}")),
    );
}

#[test]
fn a_value_that_requires_a_gradient_on_some_ranks_only_is_an_error() {
    mismatch!(
        |world: &World| sum(world).map(drop),
        |world: &World| {
            let x = ones(&[2, 3], DType::F32)?.requires_grad_(true)?;
            world.group().all_reduce(&x, ReduceOp::Sum).map(drop)
        },
        |_, message: String| assert!(message.contains("f32 [2, 3], requires grad, at"), "{message}")
    );
    mismatch!(
        |world: &World| sum(world).map(drop),
        |world: &World| {
            world.group().all_reduce(&Tensor::meta_of([2, 3], DType::F32)?, ReduceOp::Sum).map(drop)
        },
        |_, message: String| assert!(message.contains("f32 [2, 3], meta, at"), "{message}")
    );
}

#[test]
fn a_message_sent_before_a_rank_returns_arrives() {
    spmd_outcomes(
        2,
        |world| {
            let world = world.with_timeout(TIMEOUT * 4);
            let x = Tensor::arange(0, 1 << 20, 1, DType::I64)?;
            if world.rank() == 0 {
                return world.group().send(&x, 1, 3);
            }
            std::thread::sleep(TIMEOUT);
            assert_eq!(world.group().recv::<Tensor>(0, 3)?.to_vec::<i64>()?, x.to_vec::<i64>()?);
            Ok(())
        },
        |rank, outcome| outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}")),
    );
}

#[test]
fn polling_for_a_rank_that_never_arrives_ends() {
    spmd_outcomes(
        2,
        |world| {
            let world = world.with_timeout(TIMEOUT);
            if world.rank() == 1 {
                std::thread::sleep(TIMEOUT * 2);
                return Ok((Ok(()), Duration::ZERO));
            }
            let mut sum = world.group().all_reduce_async(&ones(&[2], DType::F32)?, ReduceOp::Sum)?;
            timed(|| {
                while !sum.is_ready() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sum.wait().map(drop)
            })
        },
        |rank, outcome| {
            if rank == 0 {
                assert!(matches!(*fault(outcome).cause, Cause::Late { .. }));
            }
        },
    );
}

#[test]
fn a_group_with_a_late_member_fails_on_all_waiting_ranks_and_names_it() {
    spmd_outcomes(
        3,
        |world| {
            // On threads, making a group does not wait, so the first collective returns the error.
            let world = world.with_timeout(TIMEOUT);
            std::thread::sleep([TIMEOUT / 4, Duration::ZERO, TIMEOUT * 2][world.rank()]);
            if world.rank() == 2 {
                return Ok(Ok(()));
            }
            let made = world.named_group(&[0, 1, 2], "late");
            Ok(made.and_then(|group| group.expect("this rank is in it").barrier()))
        },
        |rank, outcome| {
            if rank == 2 {
                return;
            }
            let message = outcome.unwrap().unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("rank {rank}: ")) && message.contains("`late`"),
                "{message}"
            );
            assert!(message.contains("rank 2 "), "{message}");
        },
    );
}

#[test]
fn waiting_for_a_message_that_no_rank_sends_ends() {
    spmd_outcomes(
        2,
        |world| {
            let world = world.with_timeout(TIMEOUT);
            if world.rank() == 0 {
                return timed(|| world.group().recv::<Tensor>(1, 7).map(drop));
            }
            world.group().send(&ones(&[1], DType::F32)?, 0, 8)?;
            std::thread::sleep(TIMEOUT * 2);
            Ok((Ok(()), Duration::ZERO))
        },
        |rank, outcome| {
            if rank == 0 {
                let message = fault(outcome).to_string();
                assert!(message.starts_with("rank 0: recv(from 1, tag 7)"), "{message}");
                assert!(message.contains("rank 1 did not arrive"), "{message}");
            }
        },
    );
}

#[test]
fn an_argument_error_on_one_rank_does_not_hang_the_others() {
    spmd_outcomes(
        2,
        |world| {
            let world = world.with_timeout(TIMEOUT);
            let size = if world.rank() == 0 { 3 } else { 4 };
            world.group().reduce_scatter_tensor(&ones(&[size], DType::F32)?, ReduceOp::Sum, 0)
        },
        |rank, outcome| {
            let message = outcome.unwrap_err().to_string();
            let words = "size 3 of dim 0 of [3] must be a multiple of group_size 2";
            assert!(message.contains(words), "rank {rank}: {message}");
        },
    );
}

#[test]
fn the_error_of_a_launch_names_the_cause_first() {
    let error = launch(3, |world| {
        if world.rank() == 2 {
            return Err(Error::argument("model", "no such file"));
        }
        sum(&world)
    });
    let message = error.unwrap_err().to_string();
    assert!(message.starts_with("rank 2: model: no such file\nrank 0: all_reduce"), "{message}");
}

/// Runs collectives with a fault of kind `how` on rank `who`.
fn go_wrong(world: &World, how: usize, who: usize, be_late: impl Fn()) -> Result<()> {
    let group = world.group();
    let x = ones(&[3, 2], DType::F32)?;
    group.all_reduce(&x, ReduceOp::Sum)?;
    if world.rank() == who {
        match how {
            0 => std::panic::resume_unwind(Box::new("a fault on purpose".to_string())),
            1 => return Ok(()),
            2 => return Err(Error::argument("fault", "on purpose")),
            3 => be_late(),
            4 => drop(group.all_gather_tensor(&x, 0)?),
            5 => drop(group.all_reduce(&ones(&[2, 3], DType::F32)?, ReduceOp::Sum)?),
            6 => drop(group.all_reduce(&ones(&[3, 2], DType::F64)?, ReduceOp::Sum)?),
            _ => drop(group.all_reduce_async(&x, ReduceOp::Min)?),
        }
    }
    group.all_reduce(&x, ReduceOp::Sum)?;
    group.barrier()
}

#[test]
#[cfg(target_os = "linux")]
fn two_hundred_random_faults_leave_no_thread_behind() {
    let mut state = 7u64;
    let mut next = move |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    // Count only threads of this test: other tests of the process have their own.
    let mine = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("fault rank")).count()
    };
    for round in 0..200 {
        let (ranks, how) = (2 + next(4), next(8));
        let who = next(ranks);
        let timeout = Duration::from_millis(if how == 3 { 20 } else { 2000 });
        // A rank is late if it arrives after another has given up. On a busy machine no fixed delay is long enough for that.
        let given_up = AtomicBool::new(false);
        let be_late = || {
            let patience = Instant::now();
            while !given_up.load(Ordering::Acquire) && patience.elapsed() < SLACK {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let results = launch_each(ranks, |world| {
            std::fs::write("/proc/thread-self/comm", "fault rank").unwrap();
            let result = go_wrong(&world.with_timeout(timeout), how, who, be_late);
            given_up.store(true, Ordering::Release);
            result
        });
        for (rank, result) in results.into_iter().enumerate() {
            if rank == who && how == 1 {
                assert!(result.is_ok());
                continue;
            }
            let error = result.expect_err(&format!("round {round}: way {how} on rank {who} of {ranks}"));
            if rank != who {
                assert!(
                    matches!(Failure::of(&error), Some(Failure::Collective(_))),
                    "round {round}: {error}"
                );
            }
        }
        // The system takes a moment to remove a finished thread from the list.
        let patience = Instant::now();
        while mine() > 0 {
            assert!(patience.elapsed() < SLACK, "round {round}: {} threads are left", mine());
            std::thread::yield_now();
        }
    }
    a_new_world_works();
}

#[test]
#[cfg(feature = "mpi")]
fn random_faults_over_mpi_leave_the_process_usable() {
    dtensor::testing::spmd(3, |world| {
        if world.kind() != dtensor::comm::WorldKind::Mpi {
            return Ok(());
        }
        for round in 0..16 {
            let (how, who) = (round % 8, round % 3);
            let fresh = World::mpi()?.with_timeout(TIMEOUT);
            let be_late = || std::thread::sleep(TIMEOUT * 2);
            let result =
                dtensor::comm::run_each(vec![fresh], |world| go_wrong(&world, how, who, be_late)).remove(0);
            if world.rank() == who && how == 1 {
                assert!(result.is_ok());
            } else {
                assert!(result.is_err(), "round {round}: way {how} on rank {who}");
            }
            // All ranks must have seen the fault before the next world begins.
            world.group().barrier()?;
        }
        assert_eq!(sum(&world)?.to_vec::<f32>()?, [3.0; 6]);
        Ok(())
    });
}
