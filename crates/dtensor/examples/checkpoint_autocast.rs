//! Activation checkpointing with autocast: layers in half precision that backward runs again instead of saving their
//! activations. The gradients are bit-identical; backward issues the collectives of the forward pass again.
//!
//! `cargo run --example checkpoint_autocast`

use dtensor::comm::record;
use dtensor::models::MLPStacked;
use dtensor::nn::Parameter;
use dtensor::prelude::*;

/// Returns this rank's gradients and the number of collectives in forward and backward.
fn step(model: &MLPStacked, x: &Tensor, recompute: bool) -> Result<(Vec<Vec<f32>>, usize, usize)> {
    let run = || {
        model.layers.iter().try_fold(x.clone(), |h, layer| {
            // A clone shares the layer's parameters. The body owns it until backward runs it again.
            let layer = layer.clone();
            let body = move |h: &Tensor| layer.forward(h);
            if recompute { checkpoint(&h, body) } else { body(&h) }
        })
    };
    let (y, forward) = record(|| autocast(DType::BF16, run));
    let y = y?;
    assert_eq!(y.dtype(), DType::BF16);
    model.zero_grad();
    let loss = y.to_dtype(DType::F32)?.pow(2)?.sum_all()?;
    let (done, backward) = record(|| loss.backward());
    done?;
    let grad = |p: &Parameter| p.grad().expect("it was used").to_local()?.to_vec::<f32>();
    let grads = model.parameters().iter().map(grad).collect::<Result<_>>()?;
    Ok((grads, forward.len(), backward.len()))
}

pub(crate) fn main() -> Result<()> {
    launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let plan = plan! {
            "layers.*.net1" => ColwiseParallel::new(),
            "layers.*.net2" => RowwiseParallel::new(),
        };
        let model = parallelize_module(MLPStacked::new(3)?, &mesh, plan)?;
        let x = Tensor::rand([4, 10], DType::F32)?;

        let (saved, forward, backward) = step(&model, &x, false)?;
        let (recomputed, forward_again, backward_again) = step(&model, &x, true)?;
        if world.rank() == 0 {
            println!("saved      {forward} collectives forward, {backward} backward");
            println!("recomputed {forward_again} collectives forward, {backward_again} backward");
        }
        assert_eq!(saved, recomputed);
        assert_eq!((forward_again, backward_again), (forward, backward + forward));
        Ok(())
    })?;
    Ok(())
}
