//! Tests activation checkpoints of distributed tensors: ranks issue the same collectives in the same order.

use super::*;

fn names(calls: &[dtensor::comm::Call]) -> Vec<String> {
    let moving = calls.iter().filter(|call| !matches!(call.collective, Collective::Join));
    moving.map(|call| format!("{} at {}", call.collective.name(), call.at.line)).collect()
}

/// Shards the parameters of blocks for tensor parallelism: the weights of first layers by rows, of second layers by
/// columns.
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

/// Compares gradients, bit by bit, and collectives with and without checkpoints, on a 1-d mesh of all ranks.
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
        // Backward issues the collectives of the plain backward, plus those of forward once for each recomputation.
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
fn checkpointed_gradients_on_a_mesh_have_the_same_bits() {
    spmd(4, |world| {
        on_a_mesh(&world, 8, 4, Replicate)?;
        // Fewer heads than ranks, and sizes that the mesh does not divide.
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
fn ranks_that_compute_differently_between_collectives_stay_in_step() {
    spmd(3, |world| {
        let (group, rank) = (world.group().clone(), world.rank());
        let x = leaf(&[1. + rank as f64, 2.1]);
        let body = move |x: &Tensor| {
            let mut y = group.all_reduce(x, ReduceOp::Sum)?;
            // After the collective, each rank saves another number of values, and rank 0 none.
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
fn recomputed_collectives_are_attributed_to_the_body() {
    spmd(2, |world| {
        let group = world.group().clone();
        let x = leaf(&[1., 2.]);
        let line = line!() + 1;
        let body = move |x: &Tensor| group.all_reduce(&x.exp()?, ReduceOp::Sum);
        let y = checkpoint(&x, body)?.sum_all()?;
        let (done, calls) = record(|| y.backward());
        done?;
        // One call is the recomputed all-reduce and one its gradient.
        assert_eq!(calls.iter().map(|call| call.at.line).collect::<Vec<_>>(), [line, line]);
        Ok(())
    });
}

#[test]
fn a_body_recomputes_in_the_mesh_modes_of_its_first_run() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x =
            distribute_tensor(&Tensor::ones([4, 4], DType::F64)?, &mesh, [Shard(0)])?.requires_grad_(true)?;
        let columns = distribute_tensor(&Tensor::ones([4, 4], DType::F64)?, &mesh, [Shard(1)])?;
        let local = Tensor::ones([4], DType::F64)?;
        // The scope that treats local tensors as replicated is active only in forward.
        let body = move |x: &Tensor| x.mul(&local);
        assert!(checkpoint(&x, body.clone()).is_err());
        let y = implicit_replication(|| checkpoint(&x, body))?;
        y.sum_all()?.backward()?;
        // Implicit communication is allowed in forward, but an error in the scope of backward.
        let moved = columns.clone();
        let body = move |x: &Tensor| x.exp()?.add(&moved.exp()?);
        let y = checkpoint(&x, body.clone())?.sum_all()?;
        explicit_communication(ImplicitCommunication::Error, || y.backward())?;
        // The mesh comes from the scope of forward.
        let body =
            |x: &Tensor| x.mul(&distribute_tensor(&Tensor::ones([4, 4], DType::F64)?, None, [Shard(0)])?);
        let y = use_mesh(&mesh, || checkpoint(&x, body))?;
        y.sum_all()?.backward()?;
        // The recomputation must give the same layouts.
        let count = Count::default();
        let body = move |x: &Tensor| {
            count.up();
            let y = x.exp()?;
            if count.get() == 1 { Ok(y) } else { y.redistribute([Replicate]) }
        };
        let error = message(checkpoint(&x, body)?.sum_all()?.backward());
        assert!(error.contains("different metadata") && error.contains("S(0)"), "{error}");
        // Intermediate layouts must agree as well, even if the results do.
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
        // Placements are compared as well as shapes: local tensors of `Replicate` and `Partial` have the same shape.
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
