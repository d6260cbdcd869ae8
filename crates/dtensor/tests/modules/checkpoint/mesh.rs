//! Checkpoints of tensors on a mesh: ranks stay in step.

use super::*;

fn names(calls: &[dtensor::comm::Call]) -> Vec<String> {
    let moving = calls.iter().filter(|call| !matches!(call.collective, Collective::Join));
    moving.map(|call| format!("{} at {}", call.collective.name(), call.at.line)).collect()
}

/// Lays a block's parameters on a mesh as tensor parallelism does: what goes up is cut by rows, what comes down by columns.
fn shard(blocks: &[Block], mesh: &DeviceMesh) -> Result<()> {
    let lay = |linear: &Linear, weight: Placement, bias: Placement| -> Result<()> {
        linear.weight.replace(&distribute_tensor(&linear.weight.get().detach(), mesh, [weight])?)?;
        let own = linear.bias.as_ref().expect("a bias");
        own.replace(&distribute_tensor(&own.get().detach(), mesh, [bias])?)
    };
    for Block { attention, mlp } in blocks {
        for linear in [&attention.query, &attention.key, &attention.value, &mlp.up] {
            lay(linear, Shard(0), Shard(0))?;
        }
        lay(&attention.out, Shard(1), Replicate)?;
        lay(&mlp.down, Shard(1), Replicate)?;
    }
    Ok(())
}

/// On a mesh of so many ranks: bits with and without checkpoints, and the collectives of both.
fn on_a_mesh(world: &World, size: usize, heads: usize, input: Placement) -> Result<()> {
    let mesh = DeviceMesh::new(world, [world.size()], "tp")?;
    let mut outcomes = Vec::new();
    for how in [How::Plain].into_iter().chain(HOWS) {
        manual_seed(7);
        let blocks = blocks(size, heads)?;
        let x = Tensor::randn([2, 5, size], DType::F32)?;
        shard(&blocks, &mesh)?;
        let x = distribute_tensor(&x, &mesh, [input])?.requires_grad_(true)?;
        let (y, forward) = record(|| run(&blocks, &x, how));
        let loss = y?.pow(2)?.sum_all()?;
        let (done, backward) = record(|| loss.backward());
        done?;
        let mut all = Vec::new();
        for leaf in parameters(&blocks).iter().map(Parameter::get).chain([x]) {
            let grad = leaf.grad().expect("a gradient");
            assert_eq!(grad.layout(), leaf.layout(), "{how:?}");
            all.push(bits(&grad.to_local()?));
        }
        outcomes.push((how, all, names(&forward), names(&backward)));
    }
    let (_, grads, forward, backward) = &outcomes[0];
    assert_eq!([forward.is_empty(), backward.is_empty()], [world.size() == 1; 2]);
    for (how, again, first, back) in &outcomes[1..] {
        assert_eq!(again, grads, "{how:?}");
        assert_eq!(first, forward, "{how:?}");
        // Those of the body once more for each time it is run; gradients and the leaves' own as they were.
        let count = |names: &[String], name: &String| names.iter().filter(|other| *other == name).count();
        let runs = if *how == How::Nested { 2 } else { 1 };
        for name in back.iter().chain(forward) {
            let want = runs * count(forward, name) + count(backward, name);
            assert_eq!(count(back, name), want, "{how:?}: {name}\n{back:?}");
        }
    }
    Ok(())
}

#[test]
fn on_meshes_too_gradients_have_the_same_bits() {
    spmd(4, |world| {
        on_a_mesh(&world, 8, 4, Replicate)?;
        // Fewer heads than ranks, and sizes that do not divide.
        on_a_mesh(&world, 6, 3, Replicate)?;
        on_a_mesh(&world, 6, 2, Shard(1))
    });
    spmd(3, |world| {
        on_a_mesh(&world, 12, 3, Shard(0))?;
        on_a_mesh(&world, 10, 5, Shard(1))
    });
    spmd(1, |world| on_a_mesh(&world, 4, 2, Replicate));
}

#[test]
fn ranks_that_do_different_things_between_collectives_stay_in_step() {
    spmd(3, |world| {
        let (group, rank) = (world.group().clone(), world.rank());
        let x = leaf(&[1. + rank as f64, 2.1]);
        let body = move |x: &Tensor| {
            let mut y = group.all_reduce(x, ReduceOp::Sum)?;
            // Only some ranks save anything after the collective, and not as much.
            for _ in 0..rank {
                y = y.mul(&y)?;
            }
            Ok(y)
        };
        let mut grads = Vec::new();
        for checkpointed in [false, true] {
            let (outer, inner) = (body.clone(), body.clone());
            let y = match checkpointed {
                true => checkpoint(&x, move |x| checkpoint(&outer(x)?, inner.clone()))?,
                false => inner(&outer(&x)?)?,
            };
            world.group().all_reduce(&y, ReduceOp::Sum)?.sum_all()?.backward()?;
            grads.push(grad_of(&x).into_iter().map(f64::to_bits).collect::<Vec<_>>());
            x.zero_grad();
        }
        assert_eq!(grads[1], grads[0]);
        assert!(grads[0].iter().all(|&g| f64::from_bits(g).is_finite() && f64::from_bits(g) != 0.));
        Ok(())
    });
}

#[test]
fn collectives_of_the_second_run_are_of_the_lines_of_the_body() {
    spmd(2, |world| {
        let group = world.group().clone();
        let x = leaf(&[1., 2.]);
        let line = line!() + 1;
        let body = move |x: &Tensor| group.all_reduce(&x.exp()?, ReduceOp::Sum);
        let y = checkpoint(&x, body)?.sum_all()?;
        let (done, calls) = record(|| y.backward());
        done?;
        // Once more, and its gradient.
        assert_eq!(calls.iter().map(|call| call.at.line).collect::<Vec<_>>(), [line, line]);
        Ok(())
    });
}

#[test]
fn modes_of_meshes_are_those_of_the_first_run() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x =
            distribute_tensor(&Tensor::ones([4, 4], DType::F64)?, &mesh, [Shard(0)])?.requires_grad_(true)?;
        let columns = distribute_tensor(&Tensor::ones([4, 4], DType::F64)?, &mesh, [Shard(1)])?;
        let local = Tensor::ones([4], DType::F64)?;
        // A local tensor that is taken to be the same everywhere, only where the body is called.
        let body = move |x: &Tensor| x.mul(&local);
        assert!(checkpoint(&x, body.clone()).is_err());
        let y = implicit_replication(|| checkpoint(&x, body))?;
        y.sum_all()?.backward()?;
        // Communication that is allowed in the body, and not in the pass.
        let moved = columns.clone();
        let body = move |x: &Tensor| x.exp()?.add(&moved.exp()?);
        let y = checkpoint(&x, body.clone())?.sum_all()?;
        explicit_communication(ImplicitCommunication::Error, || y.backward())?;
        // A mesh that is that of the scope.
        let body =
            |x: &Tensor| x.mul(&distribute_tensor(&Tensor::ones([4, 4], DType::F64)?, None, [Shard(0)])?);
        let y = use_mesh(&mesh, || checkpoint(&x, body))?;
        y.sum_all()?.backward()?;
        // The layouts of the second run have to be those of the first.
        let count = Count::default();
        let body = move |x: &Tensor| {
            count.up();
            let y = x.exp()?;
            if count.get() == 1 { Ok(y) } else { y.redistribute([Replicate]) }
        };
        let error = message(checkpoint(&x, body)?.sum_all()?.backward());
        assert!(error.contains("different metadata") && error.contains("S(0)"), "{error}");
        // Those on the way too, though it comes to the same in the end.
        for (first, second) in [(Replicate, Shard(1)), (Shard(1), Replicate)] {
            let count = Count::default();
            let body = move |x: &Tensor| {
                count.up();
                let over = if count.get() == 1 { first } else { second };
                x.redistribute([over])?.redistribute([Shard(0)])
            };
            x.zero_grad();
            let error = message(checkpoint(&x, body)?.sum_all()?.backward());
            assert!(error.contains("different metadata") && error.contains("S(1)"), "{error}");
            assert!(error.contains("redistribute") && x.grad().is_none(), "{error}");
        }
        // The part of a sum and that of a whole have one shape.
        let count = Count::default();
        let body = move |x: &Tensor| {
            count.up();
            let over = if count.get() == 1 { Replicate } else { Partial(ReduceOp::Sum) };
            Tensor::from_local(&x.to_local()?, x.mesh(), [over])?.to_local()
        };
        let error = message(checkpoint(&x, body)?.sum_all()?.backward());
        assert!(error.contains("different metadata") && error.contains("P(sum)"), "{error}");
        Ok(())
    });
}
