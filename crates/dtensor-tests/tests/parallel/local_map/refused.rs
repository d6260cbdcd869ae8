//! Tests of errors of `local_map`. If possible, they come before any communication and before the function runs.

use std::time::Duration;

use super::*;

/// Asserts that `local_map` returns an error with all of these words before any communication.
#[track_caller]
fn refused<T>(body: impl FnOnce() -> Result<T>, words: &[&str]) {
    let (result, calls) = record(body);
    let Err(error) = result else { panic!("accepted, but expected {words:?}") };
    let message = error.to_string();
    assert!(message.starts_with("local_map: "), "{message}");
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
    assert!(calls.is_empty(), "{message}: {calls:?}");
}

/// A function that must not run.
fn never(_: &Tensor, _: &Tensor, _: f64) -> Result<Tensor> {
    panic!("what is refused is not run")
}

struct Bench {
    square: DeviceMesh,
    rows: Tensor,
    columns: Tensor,
    on_square: Tensor,
}

impl Bench {
    fn new(world: &World) -> Result<Bench> {
        let mesh = line(world)?;
        let square = DeviceMesh::new(world, [2, 1], ["dp", "tp"])?;
        let x = numbers(0, [5, 3])?;
        let rows = distribute_tensor(&x, &mesh, [Shard(0)])?.requires_grad_(true)?;
        let columns = distribute_tensor(&x, &mesh, [Shard(1)])?;
        let on_square = distribute_tensor(&x, &square, [Shard(0), R])?;
        Ok(Bench { square, rows, columns, on_square })
    }
}

#[test]
fn invalid_argument_placements_are_errors() {
    spmd(2, |world| {
        let b = Bench::new(&world)?;
        let (rows, columns) = (&b.rows, &b.columns);
        let map = local_map(never).out_placements([Shard(0)]);
        let both = (rows, columns, 2.0);

        // Wrong numbers of entries.
        let too_few = map.clone().in_placements(([Shard(0)], [Shard(1)]));
        refused(
            || too_few.call(both),
            &[
                "in_placements length 2 does not match the number of input args 3",
                "(a tensor, a tensor, f64)",
            ],
        );
        let too_many = map.clone().in_placements(([Shard(0)], [Shard(1)], None, None));
        refused(
            || too_many.call(both),
            &["in_placements length 4 does not match the number of input args 3"],
        );
        let only = map.clone().in_placements([Shard(0)]);
        refused(|| only.call(both), &["in_placements=([S(0)],)", "length 1", "input args 3"]);
        let grads = map.clone().in_grad_placements(([Shard(0)], [Shard(1)]));
        refused(
            || grads.call(both),
            &["in_grad_placements length 2 does not match the number of input args 3"],
        );
        // The number of entries is checked even if no input is distributed.
        let plain = rows.to_local()?;
        refused(|| too_few.call((&plain, &plain, 2.0)), &["in_placements length 2"]);

        // Missing placements for tensors, and placements for values that are not tensors.
        let none = map.clone().in_placements((None, [Shard(1)], None));
        refused(
            || none.call(both),
            &["distributed input 0, [5, 3] [S(0)], expects placements but received None"],
        );
        let none = map.clone().in_placements(([Shard(0)], None, None));
        refused(|| none.call(both), &["distributed input 1", "expects placements but received None"]);
        let of_number = map.clone().in_placements(([Shard(0)], [Shard(1)], [R]));
        refused(
            || of_number.call(both),
            &["non-tensor input 2 (f64) expects None placements but received [R]", "in_placements"],
        );
        refused(
            || of_number.call((&plain, &plain, 2.0)),
            &["non-tensor input 2 (f64) expects None placements"],
        );
        let grads = map.clone().in_grad_placements((None, [Shard(1)], None));
        refused(
            || grads.call(both),
            &["distributed input 0", "expects in grad placements but received None"],
        );
        let grads = map.clone().in_grad_placements(([Shard(0)], [Shard(1)], [R]));
        refused(
            || grads.call(both),
            &["non-tensor input 2 (f64) expects None placements but received [R]", "in_grad_placements"],
        );

        // Inputs with other placements. In the second case the first input could be redistributed, but is not.
        let other = map.clone().in_placements(([Shard(1)], [Shard(1)], None));
        refused(
            || other.call(both),
            &[
                "input 0 in local_map has a mismatched placements",
                "its placements are [S(0)], but the input placements is [S(1)]",
                "set redistribute_inputs=true to local_map",
            ],
        );
        let last = map.clone().in_placements(([Shard(1)], [Shard(7)], None)).redistribute_inputs(true);
        refused(
            || last.call(both),
            &["in_placements of input 1: sharding dim 7 is equal to or greater than tensor ndim 2"],
        );
        // `Shard(-2)` is the same placement as `Shard(0)`.
        let same = local_map(|x: &Tensor| Ok(x.numel())).in_placements([Shard(-2)]);
        assert_eq!(same.call(rows)?, [9, 6][world.rank()]);

        // Placements that are invalid for this mesh and tensor.
        let on_two = map.clone().in_placements(([Shard(0), R], [Shard(1)], None));
        refused(
            || on_two.call(both),
            &[
                "in_placements of input 0: `placements` must have the same length as `device_mesh.ndim`",
                "[S(0), R] has 2",
            ],
        );
        let low = map.clone().in_placements(([Shard(0)], [Shard(-3)], None));
        refused(|| low.call(both), &["in_placements of input 1: sharding dim -3 is less than -2"]);
        let grads = map.clone().in_grad_placements(([Shard(2)], [Shard(1)], None));
        refused(|| grads.call(both), &["in_grad_placements of input 0: sharding dim 2"]);
        let grads = map.clone().in_grad_placements(([Shard(0)], [R, R], None));
        refused(|| grads.call(both), &["in_grad_placements of input 1", "[R, R] has 2 for a mesh of 1 dims"]);
        let mixed = [Partial(ReduceOp::Max), Partial(ReduceOp::Min)];
        let grads = local_map(Tensor::neg).out_placements([Shard(0), R]).in_grad_placements(mixed);
        refused(|| grads.call(&b.on_square), &["in_grad_placements of input 0: mixed Partial reduce types"]);

        // Gradient placements that do not match the shards of the input.
        for (grad, shown) in [([Shard(1)], "[5, 3] [S(1)]"), ([R], "[5, 3] [R]"), ([P], "[5, 3] [P(sum)]")] {
            let grads = map.clone().in_grad_placements((grad, [Shard(1)], None));
            let words = "in_grad_placements of input 0: a gradient of a tensor [5, 3] [S(0)] cannot be";
            refused(|| grads.call(both), &[words, shown]);
        }
        Ok(())
    });
}

#[test]
fn mismatched_meshes_are_errors() {
    spmd(2, |world| {
        let b = Bench::new(&world)?;
        let map = local_map(never).out_placements([Shard(0)]);
        refused(
            || map.call((&b.rows, &b.on_square, 1.0)),
            &[
                "input 1 is on",
                "dp=2, tp=1",
                "an earlier input is on",
                "all distributed inputs must be on the same mesh",
            ],
        );
        let given = map.clone().device_mesh(&b.square);
        refused(|| given.call((&b.rows, &b.columns, 1.0)), &["input 0 is on", "but device_mesh is", "dp=2"]);
        refused(|| given.call((&b.on_square, &b.columns, 1.0)), &["input 1 is on", "but device_mesh is"]);
        // An equal mesh is accepted.
        let same = line(&world)?;
        let neg = local_map(Tensor::neg).out_placements([Shard(0)]).device_mesh(&same);
        close(&neg.call(&b.rows)?, &b.rows.full_tensor()?.neg()?);
        Ok(())
    });
}

#[test]
fn invalid_result_placements_are_errors_before_the_call() {
    spmd(2, |world| {
        let b = Bench::new(&world)?;
        let never = |_: &Tensor| -> Result<(Tensor, bool)> { panic!("what is refused is not run") };
        let map = local_map(never);
        // Wrong numbers of entries.
        let words = "local_map requires one PlacementType be provided for each output value";
        refused(
            || map.clone().out_placements([Shard(0)]).call(&b.rows),
            &[
                words,
                "out_placements=([S(0)],)",
                "the outputs are (a tensor, bool)",
                "a tuple has one for each",
            ],
        );
        let three = map.clone().out_placements(([Shard(0)], None, None));
        refused(|| three.call(&b.rows), &[words, "out_placements=([S(0)], None, None)"]);
        // A plain list is one entry: the placements of one tensor.
        let list = map.clone().out_placements([Shard(0), R]);
        refused(|| list.call(&b.rows), &[words, "out_placements=([S(0), R],)"]);
        let list = local_map(Tensor::neg).out_placements([Shard(0), R]);
        refused(
            || list.call(&b.rows),
            &[
                "out_placements of output 0: `placements` must have the same length as `device_mesh.ndim`",
                "[S(0), R]",
            ],
        );
        // Missing placements for tensors, and placements for values that are not tensors.
        refused(
            || map.call(&b.rows),
            &[
                "output 0 is a tensor and expects placements but received None",
                "[Replicate]",
                "`Plain(tensor)`",
            ],
        );
        let none = map.clone().out_placements((None, None));
        refused(|| none.call(&b.rows), &["output 0 is a tensor and expects placements but received None"]);
        let of_flag = map.clone().out_placements(([Shard(0)], [R]));
        refused(
            || of_flag.call(&b.rows),
            &["non-tensor output 1 (bool) expects None placements but received [R]"],
        );
        let said = map.clone().out_placements(([Shard(0)], None));
        refused(
            || said.clone().out_grad_placements((None, [R])).call(&b.rows),
            &["non-tensor output 1 (bool) expects None placements but received [R]"],
        );
        refused(
            || said.clone().out_shapes(([5, 3], [2])).call(&b.rows),
            &["non-tensor output 1 (bool) expects None placements but received [2]"],
        );
        refused(
            || said.clone().out_grad_placements([R]).call(&b.rows),
            &[words, "out_grad_placements=([R],)"],
        );
        refused(
            || said.clone().out_shapes([5, 3]).call(&b.rows),
            &["requires one shape be provided for each output value: out_shapes=([5, 3],)"],
        );
        refused(
            || said.clone().out_grad_placements(([R, R], None)).call(&b.rows),
            &["out_grad_placements of output 0", "[R, R] has 2 for a mesh of 1 dims"],
        );
        // With a given shape, placements can be checked against it.
        let low = map.clone().out_placements(([Shard(2)], None)).out_shapes(([5, 3], None));
        refused(|| low.call(&b.rows), &["out_placements of output 0: sharding dim 2"]);
        let known = said.out_shapes(([5, 3], None));
        let low = known.clone().out_grad_placements(([Shard(2)], None));
        refused(|| low.call(&b.rows), &["out_grad_placements of output 0: sharding dim 2"]);
        for grad in [R, P, Shard(1)] {
            let other = known.clone().out_grad_placements(([grad], None));
            let words = "out_grad_placements of output 0: a gradient of a tensor [5, 3] [S(0)] cannot be";
            refused(|| other.call(&b.rows), &[words]);
        }
        // These errors come before any input is redistributed.
        let moving = map.in_placements([Shard(1)]).redistribute_inputs(true);
        refused(|| moving.call(&b.rows), &["output 0 is a tensor"]);
        Ok(())
    });
}

#[test]
fn invalid_results_are_errors_after_the_call() {
    spmd(2, |world| {
        let b = Bench::new(&world)?;
        let rows = &b.rows;
        // All ranks return an error if the result lacks the sharded dim.
        let sum = local_map(|x: &Tensor| x.sum([1]));
        let error = raises(sum.clone().out_placements([Shard(1)]).call(rows), "sharding dim 1").to_string();
        assert!(error.starts_with("local_map: output 0: "), "{error}");
        // Lists with the wrong number of members.
        let list = local_map(|x: &Tensor| Ok(vec![x.neg()?, x.clone()]));
        let words = "local_map requires one PlacementType be provided for each output value";
        refused(|| list.clone().out_placements([Shard(0)]).call(rows), &[words, "(a tensor, a tensor)"]);
        refused(|| list.clone().out_placements([[Shard(0)]; 3]).call(rows), &[words]);
        refused(|| list.call(rows), &["output 0 is a tensor and expects placements but received None"]);
        let some = local_map(|x: &Tensor| Ok((1, Some(x.clone()))));
        refused(|| some.call(rows), &["output 1 is a tensor and expects placements but received None"]);
        // A distributed result.
        let held = rows.clone();
        let distributed = local_map(move |x: &Tensor| Ok((x.neg()?, held.neg()?)));
        refused(
            || distributed.out_placements([[Shard(0)]; 2]).call(rows),
            &[
                "plain tensor output expected but received a distributed tensor: output 1 is [5, 3] [S(0)]",
                "`to_local`",
            ],
        );
        // A gradient placement that does not match the shards of the result.
        let grads = local_map(Tensor::neg).out_placements([Shard(0)]).out_grad_placements([R]);
        let error = raises(grads.call(rows), "a gradient of a tensor [5, 3] [S(0)] cannot be").to_string();
        assert!(error.contains("output 0") && error.contains("[5, 3] [R]"), "{error}");
        // An error of the function is returned unchanged.
        let fails = local_map(|x: &Tensor| x.reshape([7])).out_placements([Shard(0)]);
        raises(fails.call(rows), "reshape");
        // The inputs are unchanged, and the ranks can still communicate.
        close(rows, &numbers(0, [5, 3])?);
        close(&local_map(Tensor::neg).out_placements([Shard(0)]).call(rows)?, &numbers(0, [5, 3])?.neg()?);
        Ok(())
    });
}

/// If the function fails on one rank, the others return an error too.
#[test]
fn a_rank_that_fails_does_not_leave_the_others_waiting() {
    dtensor::testing::spmd_outcomes(
        2,
        |world| {
            let mesh = line(&world)?;
            let x = distribute_tensor(&numbers(0, [3])?, &mesh, [Shard(0)])?;
            let rank = world.rank();
            let fails = local_map(move |x: &Tensor| match rank {
                0 => x.neg(),
                _ => Err(Error::argument("mine", "this rank cannot")),
            });
            let began = std::time::Instant::now();
            let result = fails.out_placements([Shard(0)]).call(&x);
            assert!(began.elapsed() < Duration::from_secs(20));
            result
        },
        |rank, result| {
            let error = result.expect_err("one of them failed").to_string();
            assert!(error.contains("this rank cannot"), "{error}");
            assert_eq!(error.starts_with("mine: "), rank == 1, "{error}");
        },
    );
}

/// Gradient shards that have the same shapes as the tensor's shards, but other elements.
#[test]
fn gradients_of_other_elements_are_errors() {
    spmd(4, |world| {
        let square = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let x = distribute_tensor(&numbers(0, [4, 4])?, &square, [Shard(0), Shard(1)])?;
        let both = [Shard(0), Shard(1)];
        let never = |_: &Tensor| -> Result<Tensor> { panic!("what is refused is not run") };
        let turned = local_map(never).out_placements(both).in_grad_placements([Shard(1), Shard(0)]);
        refused(|| turned.call(&x), &["in_grad_placements of input 0", "[4, 4] [S(1), S(0)]"]);
        let turned = local_map(never).out_placements(both).out_grad_placements([Shard(1), Shard(0)]);
        refused(|| turned.out_shapes([4, 4]).call(&x), &["out_grad_placements of output 0", "[S(1), S(0)]"]);
        let line = line(&world)?;
        let strided = StridedShard { dim: 0, split_factor: 2 };
        let x = distribute_tensor(&numbers(0, [8])?, &line, [Shard(0)])?;
        let pieces = local_map(never).out_placements([Shard(0)]).in_grad_placements([strided]);
        refused(|| pieces.call(&x), &["in_grad_placements of input 0", "[8] [_S(0, 2)]"]);
        // Accepted: other placements of the same elements, and any placements of an empty tensor.
        let x = distribute_tensor(&numbers(0, [1])?, &line, [Shard(0)])?;
        let same = local_map(Tensor::neg).out_placements([Shard(0)]).in_grad_placements([strided]);
        close(&same.call(&x)?, &numbers(0, [1])?.neg()?);
        let x = distribute_tensor(&numbers(0, [0, 4])?, &square, [R, Shard(0)])?;
        let none = local_map(Tensor::neg).out_placements([R, Shard(0)]).in_grad_placements([Shard(0), R]);
        assert_eq!(none.call(&x)?.dims(), [0, 4]);
        Ok(())
    });
}

/// A tensor that only some ranks return is an error on all of them.
#[test]
fn results_missing_on_some_ranks_are_errors() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let x = distribute_tensor(&numbers(0, [5])?, &mesh, [Shard(0)])?;
        for who in [[true, false, false], [false, true, true], [true, true, false]] {
            let there = who[world.rank()];
            let maybe = move |x: &Tensor| Ok((1, if there { Some(x.neg()?) } else { None }));
            for placement in [Shard(0), R, P] {
                let map = local_map(maybe).out_placements((None, [placement]));
                let message = raises(map.call(&x), "local_map: output 1: inconsistent results").to_string();
                assert!(
                    message.contains("returned a tensor") && message.contains("returned none"),
                    "{message}"
                );
            }
            // An optional result next to a list.
            let list = move |x: &Tensor| Ok((vec![x.neg()?], if there { Some(x.neg()?) } else { None }));
            let map = local_map(list).out_placements(([Shard(0)], [R])).out_shapes(([5], None));
            raises(map.call(&x), "output 1: inconsistent results");
        }
        // The ranks can still communicate.
        let some = local_map(|x: &Tensor| Ok(Some(x.neg()?))).out_placements([Shard(0)]);
        close(&some.call(&x)?.expect("it is there"), &numbers(0, [5])?.neg()?);
        Ok(())
    });
}

/// A user type that takes fewer tensors than it gives.
#[test]
fn values_that_do_not_take_all_tensors_are_errors() {
    struct Pair(Tensor, Tensor);

    impl MapValue for Pair {
        type As<'h> = Tensor;
        type Rest = ();

        fn give(self, leaves: &mut Leaves) {
            (self.0, self.1).give(leaves);
        }

        fn take<'h>((): (), tensors: &mut Tensors<'h>) -> Result<Tensor> {
            Tensor::take((), tensors)
        }
    }
    let x = numbers(0, [2]).unwrap();
    let never = |_: Tensor, _: &Tensor| -> Result<()> { panic!("what is refused is not run") };
    let words = "1 of 3 tensors were not taken";
    refused(|| local_map(never).call((Pair(x.clone(), x.clone()), &x)), &[words, "`give`"]);
    refused(|| local_map(|x: &Tensor| Ok(Pair(x.clone(), x.clone()))).call(&x), &["1 of 2 tensors"]);
}
