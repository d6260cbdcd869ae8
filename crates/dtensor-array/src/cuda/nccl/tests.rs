use super::*;
use crate::cuda::device_count;
use crate::cuda::testing::numbers;
use crate::host::testing::values;
use crate::kernels::parallel::reduce_alone;

fn watch() -> Watch {
    let on_failure = |why: &str| panic!("transfers failed: {why}");
    Watch { timeout: Duration::from_secs(60), on_failure: Box::new(on_failure) }
}

/// Returns the communicators of a group with a rank on each of `n` GPUs, or `None` if NCCL or the GPUs are missing.
fn communicators(n: usize) -> Option<Vec<Arc<Communicator>>> {
    if check_available().is_err() || device_count() < n {
        return None;
    }
    let ranks: Vec<(usize, Device)> = (0..n).map(|rank| (rank, Device::Cuda(rank))).collect();
    Some(Communicator::join(&unique_id().unwrap(), n, &ranks).unwrap())
}

/// Small integers, which every dtype adds exactly.
fn inputs(n: usize, len: usize, dtype: DType) -> Vec<Array> {
    (0..n)
        .map(|rank| {
            let x: Vec<i64> = (0..len as i64).map(|i| (i * 7 + rank as i64 * 3) % 5).collect();
            crate::kernels::cast::cast(&Array::from_vec(x, &[len]).unwrap(), dtype).unwrap()
        })
        .collect()
}

/// Runs the transfers of all ranks, and returns their results.
fn run(
    ranks: &[Arc<Communicator>],
    transfers: impl Fn(usize, &Communicator) -> (Vec<Transfer>, Vec<Array>),
) -> Vec<Vec<Array>> {
    let mut results = Vec::new();
    let mut all = Vec::new();
    for (i, rank) in ranks.iter().enumerate() {
        let (transfers, arrays) = rank.run(|| transfers(i, rank)).unwrap();
        all.push((rank, transfers));
        results.push(arrays);
    }
    communicate(&all, watch()).unwrap();
    results.iter().map(|all| all.iter().map(|x| x.to_device(Device::Cpu).unwrap()).collect()).collect()
}

fn same(got: &Array, want: &Array) {
    assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()));
    assert_eq!(values(got), values(want));
}

#[test]
fn every_transfer_on_every_dtype() {
    for n in [1, 2] {
        let Some(ranks) = communicators(n) else { continue };
        for dtype in DType::ALL {
            for len in [0, 1, 37, 70_000] {
                let x = inputs(n, len * n, dtype);
                let there = |i: usize| x[i].to_device(Device::Cuda(i)).unwrap();
                let all: Vec<&Array> = x.iter().collect();
                for op in ReduceOp::ALL {
                    if op == ReduceOp::Avg && dtype.is_int() {
                        continue;
                    }
                    let want = reduce_alone(op, &all).unwrap();
                    let got = run(&ranks, |i, rank| {
                        let reduced = rank.empty(dtype, &[len * n]).unwrap();
                        let slice = rank.empty(dtype, &[len]).unwrap();
                        let at_last = (i == n - 1).then(|| rank.empty(dtype, &[len * n]).unwrap());
                        let transfers = vec![
                            Transfer::AllReduce(op, there(i), reduced.clone()),
                            Transfer::ReduceScatter(op, there(i), slice.clone()),
                            Transfer::Reduce(op, n - 1, there(i), at_last.clone()),
                        ];
                        (transfers, [reduced, slice].into_iter().chain(at_last).collect())
                    });
                    for (i, got) in got.iter().enumerate() {
                        same(&got[0], &want);
                        same(&got[1], &want.narrow(0, i * len, len).unwrap());
                        assert_eq!(got.len(), 2 + usize::from(i == n - 1));
                        got.iter().skip(2).for_each(|got| same(got, &want));
                    }
                }
                let got = run(&ranks, |i, rank| {
                    let gathered = rank.empty(dtype, &[len * n * n]).unwrap();
                    let copied = rank.empty(dtype, &[len * n]).unwrap();
                    let received = rank.empty(dtype, &[len * n]).unwrap();
                    let transfers = vec![
                        Transfer::AllGather(there(i), gathered.clone()),
                        Transfer::Broadcast(
                            0,
                            if i == 0 { there(0) } else { copied.clone() },
                            copied.clone(),
                        ),
                        Transfer::Send((i + 1) % n, there(i)),
                        Transfer::Receive((i + n - 1) % n, received.clone()),
                    ];
                    (transfers, vec![gathered, copied, received])
                });
                for (i, got) in got.iter().enumerate() {
                    same(&got[0], &crate::kernels::cat::cat(&all, 0).unwrap());
                    same(&got[1], &x[0]);
                    same(&got[2], &x[(i + n - 1) % n]);
                }
            }
        }
    }
}

#[test]
fn transfers_wait_for_what_writes_their_arrays_and_readers_for_them() {
    let Some(ranks) = communicators(1) else { return };
    for round in 0..20 {
        let x = numbers(1 << 20, DType::F32, round).to_device(Device::Cuda(0)).unwrap();
        let x = crate::kernels::parallel::reduce_alone(ReduceOp::Sum, &[&x, &x]).unwrap();
        let out = ranks[0].run(|| ranks[0].empty(DType::F32, &[1 << 20])).unwrap().unwrap();
        communicate(
            &[(&ranks[0], vec![Transfer::AllReduce(ReduceOp::Sum, x.clone(), out.clone())])],
            watch(),
        )
        .unwrap();
        let twice = crate::kernels::parallel::reduce_alone(ReduceOp::Sum, &[&out, &x]).unwrap();
        let want = crate::kernels::parallel::reduce_alone(ReduceOp::Sum, &[&x, &x]).unwrap();
        same(&twice.to_device(Device::Cpu).unwrap(), &want.to_device(Device::Cpu).unwrap());
    }
}

#[test]
fn an_aborted_communicator_runs_nothing_more_and_a_new_one_works() {
    let Some(ranks) = communicators(1) else { return };
    let x = numbers(8, DType::F32, 1).to_device(Device::Cuda(0)).unwrap();
    let reduce = |ranks: &[Arc<Communicator>]| {
        let out = ranks[0].run(|| ranks[0].empty(DType::F32, &[8])).unwrap().unwrap();
        communicate(
            &[(&ranks[0], vec![Transfer::AllReduce(ReduceOp::Sum, x.clone(), out.clone())])],
            watch(),
        )?;
        out.to_device(Device::Cpu)
    };
    same(&reduce(&ranks).unwrap(), &x.to_device(Device::Cpu).unwrap());
    ranks[0].abort();
    assert!(reduce(&ranks).unwrap_err().to_string().contains("aborted"));
    let Some(ranks) = communicators(1) else { return };
    same(&reduce(&ranks).unwrap(), &x.to_device(Device::Cpu).unwrap());
}

fn is_emulated() -> bool {
    crate::cuda::device_name(Device::Cuda(0)).is_ok_and(|name| name.contains("emulated"))
}

/// On a GPU, where transfers take time.
#[test]
fn transfers_that_take_too_long_are_aborted_on_a_gpu() {
    let Some(ranks) = communicators(1).filter(|_| !is_emulated()) else { return };
    let shape = [8 << 20];
    let x = crate::kernels::copy::full(Device::Cuda(0), DType::F32, &shape, 1.0).unwrap();
    let out = ranks[0].run(|| ranks[0].empty(DType::F32, &shape)).unwrap().unwrap();
    // Copies of 32 MiB: some 15 microseconds each.
    let transfers = (0..5000).map(|_| Transfer::AllReduce(ReduceOp::Sum, x.clone(), out.clone())).collect();
    let on_failure = |why: &str| vec![Error::argument("test", why)];
    let watch = Watch { timeout: Duration::from_millis(10), on_failure: Box::new(on_failure) };
    let queued = communicate(&[(&ranks[0], transfers)], watch);
    let read = queued.and_then(|()| out.narrow(0, 0, 1)?.to_device(Device::Cpu));
    let error = read.expect_err("the transfers take 75 ms").to_string();
    assert!(error.contains("did not finish it within 10ms"), "{error}");
    assert!(communicators(1).is_some());
}

/// On the emulator, where a transfer can be told to hang.
#[cfg(feature = "cuda-emulator")]
#[test]
fn a_transfer_that_hangs_is_aborted_and_reported_to_its_readers() {
    let Some(ranks) = communicators(2).filter(|_| is_emulated()) else { return };
    for (count, error) in [(70_001, None), (70_003, Some("a link is down"))] {
        emulator::emulate_hang(count, error);
        let ranks = if error.is_none() { ranks.clone() } else { communicators(2).unwrap() };
        let mut all = Vec::new();
        let mut outs = Vec::new();
        for (i, rank) in ranks.iter().enumerate() {
            let x = numbers(count, DType::F32, 1).to_device(Device::Cuda(i)).unwrap();
            let out = rank.run(|| rank.empty(DType::F32, &[count])).unwrap().unwrap();
            all.push((rank, vec![Transfer::AllReduce(ReduceOp::Sum, x, out.clone())]));
            outs.push(out);
        }
        let on_failure = |why: &str| (0..2).map(|i| Error::argument("test", format!("{i}: {why}"))).collect();
        // Longer than queueing takes on a busy machine.
        let timeout = Duration::from_secs(if error.is_some() { 60 } else { 3 });
        let want = if error.is_none() { "did not finish it within 3s" } else { "a link is down" };
        let queued = communicate(&all, Watch { timeout, on_failure: Box::new(on_failure) });
        // The watchdog may find the error while the transfers are still being queued.
        if let Err(early) = &queued {
            assert!(error.is_some() && early.to_string().contains(want), "{early}");
        }
        // This stream reads the result, and then waits for it.
        for (i, out) in outs.iter().enumerate().filter(|_| queued.is_ok()) {
            let twice = reduce_alone(ReduceOp::Sum, &[out, out]);
            let error = twice.and_then(|twice| twice.to_device(Device::Cpu)).unwrap_err().to_string();
            assert!(error.contains(&format!("{i}: ")) && error.contains(want), "{error}");
        }
        // Later work is not affected, but the communicators are.
        assert_eq!(
            values(
                &numbers(3, DType::F32, 1)
                    .to_device(Device::Cuda(0))
                    .unwrap()
                    .to_device(Device::Cpu)
                    .unwrap()
            )
            .len(),
            3
        );
        let error = communicate(&all, watch()).unwrap_err();
        assert!(error.to_string().contains("aborted"), "{error}");
    }
}
