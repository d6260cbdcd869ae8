//! Tests the order of messages, of collectives in flight, and of barriers.

use std::time::{Duration, Instant, SystemTime};

use dtensor::comm::{Group, ReduceOp};
use dtensor::testing::spmd;
use dtensor::{DType, Result, Tensor};

use crate::common::ranks::{Array, Inputs, Layout, Random, cat, reduce, same};
use crate::common::refused::refused;

#[test]
fn messages_arrive_by_tag_and_in_the_order_sent() {
    spmd(4, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        let letter = |from: usize, to: usize, tag: u32, i: u64| {
            let dims = [[2, 3], [1, 1], [0, 4]][i as usize % 3];
            let dtype = DType::ALL[(tag as usize + i as usize) % 6];
            Array::random(dtype, &dims, &[from as u64, to as u64, tag as u64, i])
        };
        // Every rank sends to every rank, itself included, before any rank receives.
        for to in 0..n {
            for i in 0..3 {
                for tag in [0, 7, (1 << 24) - 1] {
                    group.send(&letter(me, to, tag, i).tensor()?, to, tag)?;
                }
            }
        }
        // Receive in another order of tags and senders.
        for tag in [7, (1 << 24) - 1, 0] {
            for from in (0..n).rev() {
                for i in 0..3 {
                    same(&group.recv(from, tag)?, &letter(from, me, tag, i));
                }
            }
        }
        // A receive may begin before its send, with collectives in between.
        let next = (me + 1) % n;
        let before = (me + n - 1) % n;
        let coming = group.recv_async(before, 1)?;
        group.barrier()?;
        group.send(&letter(me, next, 1, 0).tensor()?, next, 1)?;
        same(&coming.wait()?, &letter(before, me, 1, 0));

        // Pass tensors round a ring until every rank has had all of them. They are too large for any buffer of a transport.
        let large = |r: usize| Array::random(DType::F32, &[300, 1001], &[r as u64]);
        let mut mine = large(me).tensor()?;
        for step in 1..=n {
            group.send(&mine, next, 2)?;
            mine = group.recv(before, 2)?;
            same(&mine, &large((me + n - step) % n));
        }
        // In a group, ranks are those of the group. A strided tensor is sent in its logical order.
        if let Some(pair) = world.new_group(&[2, 0])? {
            let x = Inputs::laid(&pair, DType::I64, 5, Layout::Transposed, |_| vec![3, 4])?;
            pair.send(&x.mine, 1 - pair.rank(), 0)?;
            same(&pair.recv(1 - pair.rank(), 0)?, &x.all[1 - pair.rank()]);
        }
        Ok(())
    });
}

#[test]
fn receives_with_one_tag_match_sends_in_the_order_they_began() {
    spmd(2, |world| {
        let (group, other) = (world.group(), 1 - world.rank());
        for reversed in [false, true] {
            for value in [1.0, 2.0, 3.0] {
                group.send(&Tensor::full([4], value, DType::F32)?, other, 5)?;
            }
            let recv = || group.recv_async::<Tensor>(other, 5);
            let (first, dropped, third) = (recv()?, recv()?, recv()?);
            drop(dropped);
            let (first, third) = if reversed {
                let third = third.wait()?;
                (first.wait()?, third)
            } else {
                (first.wait()?, third.wait()?)
            };
            assert_eq!(first.to_vec::<f32>()?, [1.0; 4]);
            assert_eq!(third.to_vec::<f32>()?, [3.0; 4]);
            group.barrier()?;
        }
        Ok(())
    });
}

#[test]
fn collectives_in_flight_may_be_waited_for_in_any_order() {
    spmd(4, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        // Every rank waits in its own order. Large collectives are computed by the ranks that wait.
        for round in 0..12u64 {
            let mut flying = Vec::new();
            for i in 0..9 {
                let dims = if i == 4 && round % 4 == 0 { vec![200, 1000] } else { vec![3, i as usize] };
                let x = Inputs::new(group, DType::F32, 100 * round + i, |_| dims.clone())?;
                flying.push(match i % 3 {
                    0 => (group.all_gather_tensor_async(&x.mine, 0)?, cat(&x.all, 0)),
                    1 => (group.all_reduce_async(&x.mine, ReduceOp::Sum)?, reduce(ReduceOp::Sum, &x.all)),
                    _ => (group.broadcast_async(&x.mine, 1)?, x.all[1].clone()),
                });
            }
            let mut random = Random::new(&[round, me as u64]);
            while !flying.is_empty() {
                let (pending, expected) = flying.swap_remove(random.below(flying.len()));
                same(&pending.wait()?, &expected);
            }
        }
        // A collective is not ready before the last rank has arrived, and then becomes ready without a wait.
        let x = Inputs::new(group, DType::F64, 1, |_| vec![2, 2])?;
        let word = Tensor::zeros([1], DType::U8)?;
        let mut pending = if me == 0 {
            let mut pending = group.all_reduce_async(&x.mine, ReduceOp::Sum)?;
            assert!(!pending.is_ready());
            for to in 1..n {
                group.send(&word, to, 0)?;
            }
            pending
        } else {
            group.recv::<Tensor>(0, 0)?;
            group.all_reduce_async(&x.mine, ReduceOp::Sum)?
        };
        let began = Instant::now();
        while !pending.is_ready() {
            assert!(began.elapsed() < Duration::from_secs(20), "not ready after all have come");
            std::thread::yield_now();
        }
        assert!(pending.is_ready());
        same(&pending.wait()?, &reduce(ReduceOp::Sum, &x.all));

        // The other ranks get a result that one rank drops, large or small.
        for dims in [vec![3], vec![400, 1000]] {
            for idle in 0..n {
                let x = Inputs::new(group, DType::F32, idle as u64, |_| dims.clone())?;
                let sum = group.all_reduce_async(&x.mine, ReduceOp::Sum)?;
                let all = group.all_gather_tensor_async(&x.mine, 0)?;
                if me == idle {
                    drop((sum, all));
                } else {
                    same(&all.wait()?, &cat(&x.all, 0));
                    same(&sum.wait()?, &reduce(ReduceOp::Sum, &x.all));
                }
            }
        }
        // Collectives of two overlapping groups begin in another order on every rank, and are waited for in yet another.
        let left = world.new_group(&[0, 1, 2])?;
        let right = world.new_group(&[3, 2, 1])?;
        for round in 0..20u64 {
            let begin = |group: &Option<Group>, seed: u64| -> Result<_> {
                let Some(group) = group else { return Ok(None) };
                let x = Inputs::new(group, DType::BF16, seed, |_| vec![4])?;
                let pending = group.all_reduce_async(&x.mine, ReduceOp::Product)?;
                Ok(Some((pending, reduce(ReduceOp::Product, &x.all))))
            };
            let mut flying = Vec::new();
            for i in 0..2 {
                let first = (me as u64 + round + i).is_multiple_of(2);
                let seed = 2 * round + u64::from(first);
                flying.extend(begin(if first { &left } else { &right }, seed)?);
            }
            if round % 3 == 0 {
                flying.reverse();
            }
            for (pending, expected) in flying {
                same(&pending.wait()?, &expected);
            }
        }
        // Barriers may also be waited for in any order.
        let (first, second) = (group.barrier_async()?, group.barrier_async()?);
        second.wait()?;
        first.wait()
    });
}

#[test]
fn barriers_wait_for_all_ranks_and_objects_reach_all_ranks() {
    spmd(4, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
        for late in 0..n {
            if me == late {
                std::thread::sleep(Duration::from_millis(15));
            }
            let came = now();
            group.barrier()?;
            let times = group.all_gather_object(&(came, now()))?;
            let last_came = times.iter().map(|t| t.0).max();
            let first_went = times.iter().map(|t| t.1).min();
            assert!(last_came <= first_went, "somebody went on before all had come: {times:?}");
        }
        // Objects of different lengths, and of a nested type.
        type Object = (usize, String, Vec<Option<f64>>);
        let object =
            |r: usize| -> Object { (r, "ä\"\n".repeat(r * 100), vec![Some(0.1), None][..r % 3].to_vec()) };
        let all = group.all_gather_object(&object(me))?;
        assert_eq!(all, (0..n).map(object).collect::<Vec<_>>());
        for src in 0..n {
            let mine = object(me);
            let got: Object = group.broadcast_object((me == src).then_some(&mine), src)?;
            assert_eq!(got, object(src));
        }
        assert_eq!(group.all_gather_object(&())?.len(), n);
        refused(
            group.broadcast_object(Some(&1).filter(|_| me != 0), 0),
            &["broadcast_object", "rank 0 must pass"],
        );
        refused(group.broadcast_object::<u8>(None, 4), &["broadcast_object", "rank 4 is not in the group"]);
        // A call that returned an error has sent nothing: the group still works.
        let words = group.all_gather_object(&"word".to_string())?;
        assert_eq!(words, vec!["word"; n]);
        // Receiving another type than was sent is an error that names the sender.
        if me == 0 {
            refused(group.all_gather_object(&7u8), &["all_gather_object", "rank 1 sent"]);
        } else {
            refused(group.all_gather_object(&"seven".to_string()), &["rank 0 sent"]);
        }
        group.barrier()
    });
}
