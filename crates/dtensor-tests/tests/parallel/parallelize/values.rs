//! Tests that a parallelized model computes and learns the same as on a single device.

use super::*;

/// Trains an MLP for ten steps on the mesh and on a single device, and compares losses, gradients and parameters.
/// `sizes` are the numbers of inputs, hidden units and outputs.
fn trains_alike(world: &World, sizes: (usize, usize, usize), bias: bool, sequence: bool) -> Result<()> {
    let mesh = line(world)?;
    let (inputs, hidden, outputs) = sizes;
    let single = MLPModule::with_sizes(inputs, hidden, outputs, bias)?;
    let batch = 2 * world.size();
    let x = Tensor::rand([batch, inputs], DType::F32)?;
    let target = Tensor::rand([batch, outputs], DType::F32)?;
    let laid_as = if sequence { Shard(0) } else { Replicate };
    let plan = plan! {
        "net1" => ColwiseParallel::new().input_layouts(laid_as),
        "net2" => RowwiseParallel::new().output_layouts(laid_as),
    };
    let model = parallelize_module(deep_copy(&single)?, &mesh, plan)?;
    let own = |x: &Tensor| distribute_tensor(x, &mesh, [laid_as])?.to_local();
    let (own_x, own_target) = (own(&x)?, own(&target)?);
    let (one, other) = (Sgd::new(single.parameters(), 0.1)?, Sgd::new(model.parameters(), 0.1)?);
    for _ in 0..10 {
        let want = single.forward(&x)?.sub(&target)?.pow(2.0)?.sum_all()?;
        // If the batch is sharded, each rank has a partial loss.
        let loss = model.forward(&own_x)?.sub(&own_target)?.pow(2.0)?.sum_all()?;
        let lies = if sequence { Placement::PARTIAL } else { Replicate };
        close(&Tensor::from_local(&loss.detach(), &mesh, [lies])?, &want);
        one.zero_grad();
        other.zero_grad();
        want.backward()?;
        loss.backward()?;
        for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
            assert_eq!(ours.grad().unwrap().placements(), ours.get().placements());
            close(&ours.grad().unwrap(), &theirs.grad().unwrap());
        }
        one.step()?;
        other.step()?;
    }
    for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
        close(&ours.get(), &theirs.get());
    }
    Ok(())
}

fn trains_alike_in_all_sizes(world: &World) -> Result<()> {
    for hidden in [16, 10, 7, 3, 1] {
        trains_alike(world, (5, hidden, 3), true, false)?;
        trains_alike(world, (5, hidden, 3), true, true)?;
    }
    trains_alike(world, (1, 6, 1), false, false)?;
    trains_alike(world, (3, 9, 2), false, true)
}

#[test]
fn uneven_layers_train_as_on_a_single_device() {
    for ranks in 1..=4 {
        spmd(ranks, |world| trains_alike_in_all_sizes(&world));
    }
}

#[test]
fn layers_and_batches_of_size_zero_are_valid() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = parallelize_module(MLPModule::with_sizes(4, 0, 3, true)?, &mesh, mlp())?;
        let bias = model.net2.bias.as_ref().unwrap();
        let y = model.forward(&Tensor::ones([2, 4], DType::F32)?)?;
        close(&y.narrow(0, 1, 1)?.flatten_all()?, &bias.get());
        y.sum_all()?.backward()?;
        close(&bias.grad().unwrap(), &Tensor::full([3], 2.0, DType::F32)?);
        let y = model.forward(&Tensor::ones([0, 4], DType::F32)?)?;
        assert_eq!(y.dims(), [0, 3]);
        Ok(())
    });
}

#[test]
fn uneven_embeddings_match_a_single_device() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(6);
        for (words, size) in [(10, 6), (3, 5), (1, 2), (7, 1)] {
            let single = Embedding::new(words, size)?;
            let ids = Tensor::randint(0, words as i64, [4, 3])?;
            let weights = Tensor::rand([4, 3, size], DType::F32)?;
            let want = single.forward(&ids)?;
            want.mul(&weights)?.sum_all()?.backward()?;
            let want_grad = single.weight.grad().unwrap();
            for style in [
                Box::new(ColwiseParallel::new().output_layouts(Replicate)) as Box<dyn ParallelStyle>,
                Box::new(RowwiseParallel::new().input_layouts(Replicate)),
            ] {
                let model = deep_copy(&single)?;
                model.zero_grad();
                let model = parallelize_module(model, &mesh, style)?;
                let y = model.forward(&ids)?;
                close(&y, &want);
                y.mul(&weights)?.sum_all()?.backward()?;
                close(&model.weight.grad().unwrap(), &want_grad);
            }
        }
        Ok(())
    });
}

/// Each rank runs attention on its own heads, as plain tensors.
#[test]
fn attention_runs_on_local_heads() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let single = MultiHeadAttention::new(12, 4)?.with_causal(true);
        let plan = plan! { "w[qkv]" => ColwiseParallel::new(), "wo" => RowwiseParallel::new() };
        let model = parallelize_module(deep_copy(&single)?, &mesh, plan)?;
        let x = Tensor::randn([2, 5, 12], DType::F32)?;
        let (one, other) = (x.requires_grad_(true)?, x.requires_grad_(true)?);
        let (want, got) = (single.forward(&one)?, model.forward(&other)?);
        close(&got, &want);
        want.pow(2.0)?.sum_all()?.backward()?;
        got.pow(2.0)?.sum_all()?.backward()?;
        close(&other.grad().unwrap(), &one.grad().unwrap());
        for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
            close(&ours.grad().unwrap(), &theirs.grad().unwrap());
        }
        Ok(())
    });
}

/// Without `input_layouts`, a row-wise embedding takes its indices as replicated.
#[test]
fn indices_of_a_rowwise_embedding_are_replicated_by_default() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let single = Embedding::new(7, 3)?;
        let model = parallelize_module(deep_copy(&single)?, &mesh, RowwiseParallel::new())?;
        let ids = Tensor::from_slice(&[6i64, 0, 3, 3, 1, 5], [3, 2])?;
        let (y, counts) = counted(|| model.forward(&ids))?;
        assert_eq!((y.dims(), &counts[..]), (&[3, 2, 3][..], "AR 1"));
        close(&y, &single.forward(&ids)?);
        Ok(())
    });
}

/// Hooks convert a list of outputs like a single output.
#[test]
fn outputs_in_a_list_become_local_tensors() {
    spmd(2, |world| {
        #[derive(Module)]
        struct Twice {
            base: Base,
        }
        #[forward]
        impl Twice {
            fn forward(&self, x: &Tensor) -> Result<(Vec<Tensor>, Tensor)> {
                Ok((vec![x.clone(), x.neg()?], x.clone()))
            }
        }
        let mesh = line(&world)?;
        let style = SequenceParallel::new().use_local_output(true);
        let model = parallelize_module(Twice { base: Base::new() }, &mesh, style)?;
        let (list, x) = model.forward(&Tensor::ones([1, 2, 3], DType::F32)?)?;
        assert!(!x.is_distributed() && list.iter().all(|x| !x.is_distributed() && x.dims() == [1, 2, 3]));
        Ok(())
    });
}
