//! Tests arguments that are invalid on one rank, and arguments that do not match between ranks.

use dtensor::comm::{ReduceOp, record};
use dtensor::testing::spmd;
use dtensor::{DType, Tensor};

use crate::common::ranks::{Array, same};
use crate::common::refused::refused;

#[test]
fn invalid_arguments_are_an_error_and_the_group_still_works() {
    spmd(2, |world| {
        let (group, me) = (world.group(), world.rank());
        let x = Tensor::zeros([3, 4], DType::F32)?;
        let scalar = Tensor::zeros((), DType::F32)?;
        let sum = ReduceOp::Sum;
        refused(
            group.reduce_scatter_tensor(&x, sum, 0),
            &["reduce_scatter", "size 3 of dim 0", "multiple", "2"],
        );
        refused(group.reduce_scatter_tensor(&x, sum, 2), &["reduce_scatter", "out of range", "2"]);
        refused(group.reduce_scatter_tensor(&scalar, sum, 0), &["reduce_scatter", "a scalar (0-d)"]);
        refused(group.reduce_scatter_uneven(&x, sum, 0, &[2, 2]), &["[2, 2]", "add up", "dim 0", "[3, 4]"]);
        refused(group.reduce_scatter_uneven(&x, sum, 0, &[3]), &["[3]", "one size for each of the 2 ranks"]);
        refused(group.reduce_scatter_uneven(&x, sum, 0, &[usize::MAX, 4]), &["their sum"]);
        refused(group.all_gather_tensor(&x, -3), &["all_gather", "out of range", "-3"]);
        refused(group.all_gather_tensor(&scalar, 0), &["all_gather", "a scalar (0-d)"]);
        let other: Vec<usize> = (0..2).map(|r| if r == me { 4 } else { 3 }).collect();
        refused(group.all_gather_uneven(&x, 0, &other), &["all_gather", "do not give this rank", "[3, 4]"]);
        refused(group.all_gather_uneven(&x, 0, &[3, 3, 3]), &["all_gather", "[3, 3, 3]", "2 ranks"]);
        refused(group.all_to_all_single(&x, None, None), &["all_to_all", "multiple"]);
        refused(group.all_to_all_single(&x, Some(&[1, 2]), None), &["input_splits", "together"]);
        refused(group.all_to_all(&x, 1, &[1, 2], 0, &[3, 3]), &["all_to_all", "add up", "dim 1"]);
        refused(group.all_to_all(&x, 1, &[2, 2], 0, &[3]), &["all_to_all", "receive", "[3]"]);
        refused(group.all_to_all(&x, 1, &[2, 2], 5, &[3, 3]), &["all_to_all", "out of range", "5"]);
        for result in [group.broadcast(&x, 2), group.recv(2, 0), group.scatter(None, 2)] {
            refused(result, &["rank 2 is not in the group, which has 2"]);
        }
        refused(group.reduce(&x, sum, 2), &["reduce", "rank 2 is not in the group"]);
        refused(group.gather(&x, 2), &["gather", "rank 2 is not in the group"]);
        refused(group.send(&x, 2, 0), &["send", "rank 2 is not in the group"]);
        for to in [&[0, 0][..], &[0], &[0, 2], &[0, 1, 2]] {
            refused(group.permute_tensor(&x, to), &["permute", "is not a permutation of the 2 ranks"]);
        }
        let pieces = [x.clone(), x.clone(), x.clone()];
        let given = if me == 0 { &pieces[..] } else { &pieces[..2] };
        refused(group.scatter(Some(given), 0), &["scatter", "rank 0"]);
        // The size that a rank sends to itself must be the size that it expects from itself.
        let mut receive = vec![3; 2];
        receive[me] = 2;
        refused(group.all_to_all(&x, 1, &[2, 2], 0, &receive), &["all_to_all", "[3, 4]", "itself"]);
        let alone = world.new_group(&[me])?.expect("this rank is in it");
        refused(alone.all_to_all(&x, 1, &[4], 0, &[9]), &["all_to_all", "itself"]);
        same(&alone.all_to_all(&x, 1, &[4], 0, &[3])?, &Array::of(&x)?);
        let meta = Tensor::meta_of([2], DType::F32)?;
        refused(group.send(&meta, 1 - me, 0), &["send", "meta"]);

        // None of these calls counts as a collective: the next one is the first on every rank.
        let (sum, calls) = record(|| group.all_reduce(&Tensor::ones([1], DType::F32)?, sum));
        assert_eq!(sum?.to_vec::<f32>()?, [2.0]);
        assert_eq!(calls[0].sequence, 0);
        Ok(())
    });
}

#[test]
fn an_all_to_all_with_mismatched_sizes_fails_on_every_rank() {
    spmd(3, |world| {
        let me = world.rank();
        // Rank `from` sends rank `to` one column more than the others do. No rank can detect this alone.
        let cut = |from: usize, to: usize| {
            let mut send = [1; 3];
            send[to] += usize::from(me == from);
            send
        };
        // Rank 0 expects one row from rank 1, which sends two.
        let expected = if me == 0 { [2, 1, 2] } else { [2, 2, 2] };
        let mut cases = vec![
            ("rows".to_string(), vec![2, 3], [1, 1, 1], expected),
            ("depth".to_string(), vec![2, 3, 1 + me / 2], [1, 1, 1], [2, 2, 2]),
        ];
        for (from, to) in [(2, 1), (0, 1), (0, 2), (1, 2), (2, 0), (2, 2)] {
            let send = cut(from, to);
            cases.push((format!("columns {from} {to}"), vec![2, send.iter().sum()], send, [2, 2, 2]));
        }
        for (name, dims, send, receive) in cases {
            let group = world.named_group(&[0, 1, 2], &name)?.expect("all are in it");
            let x = Tensor::zeros(dims, DType::F32)?;
            let result = group.all_to_all(&x, 1, &send, 0, &receive);
            refused(result, &["all_to_all", "does not match", &name, "laws_collectives/misfits.rs"]);
        }
        world.group().barrier()
    });
}
