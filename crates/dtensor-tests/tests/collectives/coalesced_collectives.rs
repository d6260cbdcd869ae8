//! Tests coalesced collectives: one collective of several tensors gives every tensor the result and the gradient that a separate
//! collective would give.

use dtensor::comm::{Cause, Failure, Group, ReduceOp, record};
use dtensor::prelude::*;
use dtensor::testing::{spmd, spmd_outcomes};

/// Makes leaves of the given shapes, with different values on every rank.
fn inputs(group: &Group, shapes: &[Shape]) -> Result<Vec<Tensor>> {
    let value = |(i, shape): (usize, &Shape)| {
        let values =
            (0..shape.numel()).map(|j| ((i * 5 + j * 3 + group.rank() * 7) % 13) as f64 - 6.0).collect();
        Tensor::from_vec(values, shape.clone())?.requires_grad_(true)
    };
    shapes.iter().enumerate().map(value).collect()
}

type Together = fn(&Group, &[&Tensor]) -> Result<Vec<Tensor>>;
type Alone = fn(&Group, &Tensor) -> Result<Tensor>;

/// Asserts that a coalesced collective matches separate ones, forward and backward.
fn compare(world: &World, shapes: &[Shape], name: &str, together: Together, alone: Alone) -> Result<()> {
    let group = world.group();
    let (a, b) = (inputs(group, shapes)?, inputs(group, shapes)?);
    let loss = |x: &Tensor| x.mul(x)?.mul(0.5 + group.rank() as f64)?.sum_all();
    let (all, calls) = record(|| together(group, &a.iter().collect::<Vec<_>>()));
    let all = all?;
    assert_eq!((calls.len(), calls[0].collective.name()), (1, name));
    assert_eq!(calls[0].at.file, file!());
    let each = b.iter().map(|x| alone(group, x)).collect::<Result<Vec<_>>>()?;
    assert_eq!(all.len(), shapes.len());
    for (x, y) in all.iter().zip(&each) {
        assert_eq!((x.dims(), x.to_vec::<f64>()?), (y.dims(), y.to_vec::<f64>()?));
    }
    let sum = |outputs: &[Tensor]| -> Result<Tensor> {
        outputs.iter().try_fold(Tensor::scalar(0f64)?, |sum, x| sum.add(&loss(x)?))
    };
    let (back, calls) = record(|| sum(&all)?.backward());
    back?;
    assert_eq!(calls.len(), 1, "{calls:?}");
    sum(&each)?.backward()?;
    for (x, y) in a.iter().zip(&b) {
        let grad = |x: &Tensor| x.grad().expect("it is a leaf").to_vec::<f64>();
        assert_eq!(grad(x)?, grad(y)?, "{name}");
    }
    Ok(())
}

#[test]
fn coalesced_collectives_match_separate_ones() {
    spmd(3, |world| {
        let any: [Shape; 5] = [[4].into(), Shape::scalar(), [2, 3].into(), [0, 5].into(), [1, 1, 7].into()];
        compare(
            &world,
            &any,
            "all_reduce",
            |group, x| group.all_reduce_coalesced(x, ReduceOp::Sum),
            |group, x| group.all_reduce(x, ReduceOp::Sum),
        )?;
        compare(
            &world,
            &any[..1],
            "all_reduce",
            |group, x| group.all_reduce_coalesced_async(x, ReduceOp::Avg)?.wait(),
            |group, x| group.all_reduce(x, ReduceOp::Avg),
        )?;
        let some: [Shape; 4] = [[4].into(), [2, 3].into(), [0, 5].into(), [3, 0].into()];
        compare(
            &world,
            &some,
            "all_gather",
            |group, x| group.all_gather_coalesced(x),
            |group, x| group.all_gather_single_async(x, 0)?.wait(),
        )?;
        let divided: [Shape; 4] = [[6].into(), [3, 2].into(), [0, 4].into(), [9, 1, 2].into()];
        compare(
            &world,
            &divided,
            "reduce_scatter",
            |group, x| group.reduce_scatter_coalesced(x, ReduceOp::Sum),
            |group, x| group.reduce_scatter_single_async(x, ReduceOp::Sum, 0)?.wait(),
        )
    });
}

#[test]
fn invalid_inputs_are_an_error_before_anything_is_sent() {
    spmd(2, |world| {
        let group = world.group();
        let (x, y) = (Tensor::ones([3], DType::F32)?, Tensor::ones([3], DType::F64)?);
        let refused = |result: Result<Vec<Tensor>>, words: &[&str]| {
            let error = result.unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        refused(group.all_reduce_coalesced(&[], ReduceOp::Sum), &["all_reduce_coalesced: ", "non-empty"]);
        refused(
            group.all_reduce_coalesced(&[&x, &y], ReduceOp::Sum),
            &["all_reduce_coalesced: ", "f32", "f64"],
        );
        refused(group.all_gather_coalesced(&[]), &["all_gather_coalesced: ", "non-empty"]);
        refused(group.all_gather_coalesced(&[&Tensor::scalar(1f32)?]), &["all_gather_coalesced: ", "scalar"]);
        refused(
            group.reduce_scatter_coalesced(&[&x], ReduceOp::Sum),
            &["reduce_scatter_coalesced: ", "multiple of group_size"],
        );
        let mesh = DeviceMesh::new(&world, [2], ())?;
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        // A distributed tensor is the first error, before its sizes, which are global.
        for result in [
            group.all_reduce_coalesced(&[&x, &laid], ReduceOp::Sum),
            group.all_gather_coalesced(&[&laid]),
            group.reduce_scatter_coalesced(&[&laid], ReduceOp::Sum),
        ] {
            refused(result, &["_coalesced: ", "distributed"]);
        }
        // The group still works.
        assert_eq!(group.all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()?, [2.; 3]);
        Ok(())
    });
}

/// Lists with the same number of elements but different shapes do not match.
#[test]
fn different_shapes_on_another_rank_are_an_error() {
    let body = |world: World| {
        let (a, b) = (Tensor::ones([2], DType::F32)?, Tensor::ones([4], DType::F32)?);
        let order = if world.rank() == 0 { [&a, &b] } else { [&b, &a] };
        world.group().all_reduce_coalesced(&order, ReduceOp::Sum)
    };
    spmd_outcomes(2, body, |rank, outcome| {
        let error = outcome.unwrap_err();
        let Some(Failure::Collective(fault)) = Failure::of(&error) else { panic!("rank {rank}: {error}") };
        assert!(matches!(*fault.cause, Cause::Mismatch { .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains("bundle of 2: [2], [4]"), "{message}");
        assert!(message.contains("bundle of 2: [4], [2]"), "{message}");
    });
    // The message shows only the first shapes of a long list.
    let body = |world: World| {
        let x = Tensor::ones([2, 3], DType::F32)?;
        let turned = x.transpose(0, 1)?;
        let mut list = vec![&x; 20];
        list[15 + world.rank()] = &turned;
        world.group().all_reduce_coalesced(&list, ReduceOp::Sum)
    };
    spmd_outcomes(2, body, |_, outcome| {
        let message = outcome.unwrap_err().to_string();
        assert!(message.contains("bundle of 20: [2, 3], [2, 3],") && message.contains(", … (#"), "{message}");
    });
}

/// An input that requires no gradient stays outside the graph although another input requires one.
#[test]
fn inputs_without_gradients_give_outputs_without_gradients() {
    spmd(2, |world| {
        let group = world.group();
        let x = Tensor::ones([2, 2], DType::F64)?.requires_grad_(true)?;
        let plain = Tensor::ones([4, 1], DType::F64)?;
        for all in [
            group.all_reduce_coalesced(&[&plain, &x, &plain], ReduceOp::Sum)?,
            group.all_gather_coalesced(&[&plain, &x, &plain])?,
            group.reduce_scatter_coalesced(&[&plain, &x, &plain], ReduceOp::Sum)?,
        ] {
            assert_eq!(all.iter().map(|y| y.requires_grad()).collect::<Vec<_>>(), [false, true, false]);
            x.zero_grad();
            all[1].sum_all()?.backward()?;
            assert!(x.grad().is_some());
        }
        Ok(())
    });
}

/// The collective, and that of its gradient, have the line of the caller.
#[test]
fn a_coalesced_collective_has_the_callers_line() {
    spmd(2, |world| {
        let x = Tensor::ones([2, 2], DType::F64)?.requires_grad_(true)?;
        let line = line!() + 1;
        let (sums, forward) = record(|| world.group().all_reduce_coalesced(&[&x, &x], ReduceOp::Sum));
        let loss = sums?[0].sum_all()?;
        let (done, backward) = record(|| loss.backward());
        done?;
        for calls in [forward, backward] {
            assert_eq!(
                calls.iter().map(|call| (&*call.at.file, call.at.line)).collect::<Vec<_>>(),
                [(file!(), line)]
            );
        }
        Ok(())
    });
}
